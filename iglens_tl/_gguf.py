"""A GGUF file as a Hugging Face model and tokenizer in memory.

The reading is transformers's own; what is added is speed (it parses the file's metadata two or three times and rebuilds
its table of tensor names for every module: 20 to 30 s for a 135M model, 6 s without the repetition) and the special
tokens, which transformers 4 does not take from the file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from iglens_tl._boot import ModelLoadError, load_hf_model

_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def require_gguf() -> None:
    """Refuse, before anything is downloaded or read, when the package that reads GGUF files is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(
            "reading a GGUF file needs the package gguf, which is not installed; run `pip install 'iglens_tl[demo]'`"
        )


@contextlib.contextmanager
def parsed_once() -> Generator[None]:
    """Inside, each GGUF file is parsed once and each table of tensor names built once; nothing stays patched."""
    import gguf

    original: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in original.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in original.items():
            setattr(gguf, name, function)


def read_model(path: Path, dtype: torch.dtype) -> Any:
    """The model in a GGUF file, dequantised to `dtype`."""
    model = load_hf_model(path.parent, dtype, gguf_file=path.name)
    # The weights are plain numbers now; left in place, this makes transformers and TransformerLens refuse them.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    return model


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in a GGUF file, with the special tokens that the file names."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for name, token_id in special_ids(path).items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def special_ids(path: Path) -> dict[str, int]:
    """Token ids of `bos_token`, `eos_token`, `unk_token`, `pad_token`, as far as the file names them."""
    ids = {name: field(path, f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIAL_TOKENS.items()}
    return {name: int(value) for name, value in ids.items() if value is not None}


def field(path: Path, key: str) -> Any:
    """One entry of the file's metadata, None if it has none of that name."""
    import gguf

    entry = gguf.GGUFReader(str(path)).get_field(key)
    return None if entry is None else entry.contents()
