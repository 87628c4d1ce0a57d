"""A model by what a user types, on tiny models made here: it computes what it was made of, or is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from iglens_tl import _boot, loading
from iglens_tl.loading import ModelLoadError, load_model
from tests.models import same_randomness
from tests.smollm2 import MUST_HAVE, PARIS, PROMPT_IDS

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "a", "mat", "dog", *(f"w{i}" for i in range(10, 50))]
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 41, 7]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def made(family: str) -> Any:
    """A tiny Hugging Face model whose weights are far from what an initialiser draws."""
    import transformers as hf

    config: Any = {
        "gpt2": lambda: hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64),
        "neox": lambda: hf.GPTNeoXConfig(vocab_size=50, max_position_embeddings=64, rotary_pct=0.5, **SIZES),
        "llama": lambda: hf.LlamaConfig(
            vocab_size=50, max_position_embeddings=64, num_key_value_heads=2, rope_theta=300.0, **SIZES
        ),
    }[family]()
    if family == "llama" and hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": 300.0}  # transformers 5 reads no rope_theta
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    with same_randomness():
        model = hf.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0))
    return model


def log_probs(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, "logits", out).double().log_softmax(-1)


def saved(model: Any, folder: Path) -> Path:
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


def write_gguf(model: Any, file: Path) -> Path:
    """A tiny Llama as llama.cpp writes it: its names, and query and key rows in its rotary order."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(300.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(50)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("!") + i) for i in range(45)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, "!#", "$&"])
    writer.add_token_types([3, 3, 3, *[1] * 47])
    writer.add_token_merges(["! #", "$ &"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for projection, n_heads in heads.items():
            if projection in name:
                array = array.reshape(n_heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Two float32 implementations of a three-layer model with log-probabilities down to -30: measured at most 3e-5; a wrong
# rotary base moves them by 0.1 and more (last test of this class).
SAME = {"rtol": 0, "atol": 2e-4}


@pytest.mark.parametrize("api", MUST_HAVE)
class TestFolderAndFile:
    @pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
    def test_folder(self, api: str, family: str, tmp_path: Path) -> None:
        hf_model = made(family)
        expected = log_probs(hf_model)
        folder = saved(hf_model, tmp_path / f"my-{family}-folder")
        model = load_model(str(folder), api=api, device="cpu")
        torch.testing.assert_close(log_probs(model), expected, **SAME)
        assert not model.training
        assert model.to_single_token("cat") == 4
        assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[1, 3, 4]]
        assert model.cfg.model_name == f"my-{family}-folder"

    def test_gguf(self, api: str, tmp_path: Path) -> None:
        hf_model = made("llama")
        expected = log_probs(hf_model)
        model = load_model(str(write_gguf(hf_model, tmp_path / "tiny.gguf")), api=api, device="cpu")
        torch.testing.assert_close(log_probs(model), expected, **SAME)
        tokenizer = model.tokenizer
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert model.to_tokens('"!#', prepend_bos=True).tolist() == [[1, 4, 48]]
        assert model.to_tokens('"!#', prepend_bos=False).tolist() == [[4, 48]]

    def test_dtype(self, api: str, tmp_path: Path) -> None:
        model = load_model(str(saved(made("gpt2"), tmp_path / "m")), api=api, device="cpu", dtype=torch.float64)
        assert model.W_U.dtype == torch.float64

    def test_a_model_that_is_not_reproduced_is_refused(
        self, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = saved(made("llama"), tmp_path / "m")
        build = _boot.to_bridge if api == "bridge" else _boot.to_hooked

        def wrong(hf_model: Any, *args: Any, **settings: Any) -> Any:
            with torch.no_grad():
                hf_model.model.layers[1].post_attention_layernorm.weight *= 1.1
            return build(hf_model, *args, **settings)

        monkeypatch.setattr(_boot, f"to_{api}", wrong)
        with pytest.raises(ModelLoadError, match=r"does not compute what m \(LlamaForCausalLM\) computes.*nats"):
            load_model(str(folder), api=api, device="cpu")


@pytest.mark.hooked
def test_rotary_base_is_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(made("llama"), tmp_path / "m")
    assert load_model(str(folder), api="hooked", device="cpu").cfg.rotary_base == 300
    monkeypatch.setattr(_boot, "rope_theta", lambda config: 10_000)
    with pytest.raises(ModelLoadError, match="does not compute"):
        load_model(str(folder), api="hooked", device="cpu")


@pytest.mark.smollm2
def test_the_embedded_model() -> None:
    logits = log_probs(load_model("SmolLM2", device="cpu"), torch.tensor([PROMPT_IDS]))
    assert logits[0, -1, PARIS].exp().item() == pytest.approx(0.77253, abs=2e-5)  # as in test_demo


class TestRefused:
    def test_name_of_nothing(self) -> None:
        with pytest.raises(ModelLoadError) as caught:
            load_model("no/such-model")
        message = str(caught.value)
        assert "must be 'smollm2', a folder with a config.json, a GGUF file or a name that TransformerLens" in message
        assert "but 'no/such-model' is no such folder or file, and TransformerLens says: " in message
        assert "\n" not in message
        assert len(message) < 400

    def test_other_file(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"PK\x03\x04 and so on")
        with pytest.raises(ModelLoadError, match=r"must be a GGUF file, but .*model\.gguf begins with b'PK"):
            load_model(str(file))

    def test_gguf_file_cut_short(self, tmp_path: Path) -> None:
        file = write_gguf(made("llama"), tmp_path / "tiny.gguf")
        file.write_bytes(file.read_bytes()[:3000])
        with pytest.raises(ModelLoadError, match=r"cannot read the GGUF file .*tiny\.gguf"):
            load_model(str(file))

    def test_gguf_package_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF")
        find = loading._gguf.importlib.util.find_spec
        monkeypatch.setattr(
            loading._gguf.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
        )
        with pytest.raises(ModelLoadError, match=r"pip install 'iglens_tl\[demo\]'"):
            load_model(str(file))

    def test_encoder_decoder(self, tmp_path: Path) -> None:
        import transformers as hf

        config = hf.T5Config(vocab_size=50, d_model=32, num_layers=2, num_heads=4, d_ff=48, d_kv=8)
        with same_randomness():
            model = hf.T5ForConditionalGeneration(config)
        folder = saved(model, tmp_path / "t5")
        with pytest.raises(ModelLoadError, match="cannot load a causal language model"):
            load_model(str(folder))

    def test_api(self) -> None:
        with pytest.raises(ModelLoadError, match="api must be None, 'bridge' or 'hooked', not 'nnsight'"):
            load_model("smollm2", api="nnsight")
