"""A Hugging Face model as one of TransformerLens's two kinds of model.

TransformerLens 2 has `HookedTransformer`, 4 has `TransformerBridge`, 3 has both. Everything that depends on which of
them is installed, or on how each is built from a model in memory, is here. The heavy packages are imported inside the
functions: importing this module neither loads them nor touches a class that this TransformerLens lacks.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import random
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

Api = Literal["bridge", "hooked"]

_MAX_HOOKED_CTX = 2048  # HookedTransformer stores an n_ctx x n_ctx mask in every layer: 8,192 positions would take 2 GB


class ModelLoadError(ValueError):
    """The model that was asked for cannot be had; the message says why and what can."""


def available_apis() -> tuple[Api, ...]:
    """The kinds of model that the installed TransformerLens has, the preferred one first."""
    bridge: tuple[Api, ...] = ("bridge",) if importlib.util.find_spec("transformer_lens.model_bridge") else ()
    hooked: tuple[Api, ...] = ("hooked",) if importlib.util.find_spec("transformer_lens.HookedTransformer") else ()
    return bridge + hooked


def choose_api(api: str | None) -> Api:
    """`api` checked against what TransformerLens has; None is `TransformerBridge` where there is one."""
    have = available_apis()
    if api is None:
        return have[0]
    if api not in ("bridge", "hooked"):
        raise ModelLoadError(f"api must be None, 'bridge' or 'hooked', not {api!r}")
    if api not in have:
        name = {"bridge": "TransformerBridge", "hooked": "HookedTransformer"}[api]
        version = importlib.metadata.version("transformer_lens")
        raise ModelLoadError(
            f"api={api!r} needs {name}, which TransformerLens {version} does not have; use api={have[0]!r} or None"
        )
    return api


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bars of transformers during a load of a second, and its setting as before afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def same_randomness() -> Generator[None]:
    """Give the global random states back as they were: building a model draws from them, and may seed them."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def load_hf_model(folder: str | Path, dtype: torch.dtype, **kwargs: Any) -> Any:
    """The causal language model in `folder`, in `dtype` (asked for at load, since a later cast also rounds buffers)."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    keyword = "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
    with quiet_transformers():
        model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), **{keyword: dtype}, **kwargs)
    return model.eval()


def to_bridge(
    hf_model: Any, tokenizer: Any, name: str, *, processed: bool, device: str | torch.device, dtype: torch.dtype
) -> Any:
    """`hf_model` wrapped in place as a `TransformerBridge`, in compatibility mode if `processed`."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge.boot_transformers(
        name, hf_model=hf_model.to(device), tokenizer=tokenizer, device=str(device), dtype=dtype
    )
    if processed:
        bridge.enable_compatibility_mode()
    return bridge.eval()


def to_hooked(
    hf_model: Any, tokenizer: Any, name: str, *, processed: bool, device: str | torch.device, dtype: torch.dtype
) -> Any:
    """`hf_model`'s weights in a `HookedTransformer`; norms folded and the unembedding centred if `processed`."""
    from transformer_lens import HookedTransformer, loading_from_pretrained

    hf_config = copy.deepcopy(hf_model.config)
    hf_config.architectures = [type(hf_model).__name__]
    if not hasattr(hf_config, "n_ctx"):  # GPT-2's translation reads it, and only old checkpoints have it
        hf_config.n_ctx = hf_config.max_position_embeddings
    # TransformerLens guesses the architecture from a folder's name ("llama", "gemma"): this one has none.
    with tempfile.TemporaryDirectory(prefix="m") as folder, torch.no_grad():
        hf_config.save_pretrained(folder)
        config: Any = loading_from_pretrained.get_pretrained_model_config(
            folder, fold_ln=processed, device=str(device), dtype=dtype
        )
        _complete_hooked_config(config, hf_model.config, name)
        state = loading_from_pretrained.get_pretrained_state_dict(folder, config, hf_model, dtype=dtype)
    model: Any = HookedTransformer(config, tokenizer=tokenizer)
    _load_once(model, state, processed=processed)
    return model.eval()


def _complete_hooked_config(config: Any, hf_config: Any, name: str) -> None:
    """What TransformerLens's translation of a Hugging Face config leaves out or gets wrong."""
    theta = rope_theta(hf_config)
    if config.positional_embedding_type == "rotary" and theta is not None:
        config.rotary_base = int(theta)  # 2.18 leaves 10,000 for every Llama that it does not know by name
    config.n_ctx = min(config.n_ctx, _MAX_HOOKED_CTX)
    config.model_name = name.rstrip("/").split("/")[-1]


def rope_theta(hf_config: Any) -> float | None:
    """The base of the rotary embedding, wherever this version of transformers keeps it."""
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or {}
    return rope.get("rope_theta") or getattr(hf_config, "rope_theta", None)


def _load_once(model: Any, state: dict[str, torch.Tensor], *, processed: bool) -> None:
    """Load `state`, processed by TransformerLens, in one pass: its own loader makes one pass per tensor (4 to 8 s)."""
    ready: dict[str, torch.Tensor] = {}

    def collect(part: dict[str, torch.Tensor], **_: bool) -> None:
        ready.update(part)

    model.load_state_dict = collect
    try:
        model.load_and_process_state_dict(
            state, fold_ln=processed, center_writing_weights=False, center_unembed=processed, fold_value_biases=False
        )
    finally:
        del model.load_state_dict
    model.load_state_dict(ready, strict=False)
