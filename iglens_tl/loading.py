"""A model by the name a user types: the demo model, a TransformerLens name, a Hugging Face folder or a GGUF file.

What comes from a folder or a file is checked before it is returned: the TransformerLens model must give the
log-probabilities of the Hugging Face model that it was made of, else it is refused. TransformerLens's own names are
loaded as TransformerLens does it. Nothing is folded or centred.

Example::

    from iglens_tl.loading import load_model

    model = load_model("smollm2")
    model = load_model("gpt2", api="hooked")
    model = load_model("models/SmolLM2-360M-Instruct-Q8_0.gguf", dtype=torch.bfloat16)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from iglens_tl import _boot, _gguf, demo
from iglens_tl._boot import ModelLoadError

DEMO = "smollm2"
_PROBE_LENGTH = 16
# Largest difference of a log-probability on the probe that is rounding. Both sides compute the same function in another
# order: 1e-4 in float32 on real models, tenths where 8 bits of mantissa meet log-probabilities of -20. A wrong rotary
# base, scale or norm gives 0.1 to 10.
_TOLERANCE = 1e-2
_HALF_TOLERANCE = 0.5
_KIND = {"bridge": "TransformerBridge", "hooked": "HookedTransformer"}


@_boot.same_randomness()
def load_model(
    name: str, *, api: str | None = None, device: str | torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """The model that `name` names, in evaluation mode, neither folded nor centred.

    Args:
        name: "smollm2" (the embedded demo model), a folder with a config.json, a GGUF file, or a model name that
            TransformerLens knows.
        api: "bridge", "hooked", or None for `TransformerBridge` where TransformerLens has it.
        device: where it goes; None is the GPU if there is one.
        dtype: of the weights.

    Returns:
        A `TransformerBridge` or `HookedTransformer`.

    Raises:
        ModelLoadError: there is no such model, or TransformerLens cannot have it, or does not reproduce it.
        DemoModelError: the demo model could not be downloaded or converted.
    """
    kind = _boot.choose_api(api)
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.lower() == DEMO:
        return demo.demo_model(kind, device=place, dtype=dtype)
    path = Path(name).expanduser()
    if path.is_file():
        return _from_gguf(path, kind, device=place, dtype=dtype)
    if (path / "config.json").is_file():
        return _from_folder(path, kind, device=place, dtype=dtype)
    return _from_name(name, kind, device=place, dtype=dtype)


def _from_gguf(path: Path, kind: _boot.Api, *, device: torch.device, dtype: torch.dtype) -> Any:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"a file given as a model must be a GGUF file, but {path} begins with {magic!r}")
    _gguf.require_gguf()
    try:
        with _gguf.parsed_once():
            hf_model, tokenizer = _gguf.read_model(path, dtype), _gguf.read_tokenizer(path)
    except Exception as error:
        raise ModelLoadError(f"transformers cannot read the GGUF file {path}: {_said(error)}") from error
    return _built(hf_model, tokenizer, path.stem, kind, device=device, dtype=dtype)


def _from_folder(folder: Path, kind: _boot.Api, *, device: torch.device, dtype: torch.dtype) -> Any:
    import transformers

    try:
        hf_model = _boot.load_hf_model(folder, dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot load a causal language model and its tokenizer from {folder}: {_said(error)}"
        ) from error
    return _built(hf_model, tokenizer, folder.resolve().name, kind, device=device, dtype=dtype)


def _from_name(name: str, kind: _boot.Api, *, device: torch.device, dtype: torch.dtype) -> Any:
    try:
        if kind == "bridge":
            from transformer_lens.model_bridge import TransformerBridge

            model: Any = TransformerBridge.boot_transformers(name, device=str(device), dtype=dtype)
        else:
            from transformer_lens import HookedTransformer

            model = HookedTransformer.from_pretrained_no_processing(name, device=str(device), dtype=dtype)
    except Exception as error:
        raise ModelLoadError(
            f"a model must be {DEMO!r}, a folder with a config.json, a GGUF file or a name that TransformerLens can "
            f"load, but {name!r} is no such folder or file, and TransformerLens says: {_said(error)}"
        ) from error
    return model.eval()


def _built(
    hf_model: Any, tokenizer: Any, name: str, kind: _boot.Api, *, device: torch.device, dtype: torch.dtype
) -> Any:
    """The TransformerLens model of `hf_model`, after it has shown that it computes the same."""
    hf_model.to(device)
    tokens = _probe(hf_model.config.vocab_size).to(device)
    with torch.no_grad():  # before the bridge wraps the model, since it changes it
        expected = hf_model(tokens).logits.float().log_softmax(-1)
    build = _boot.to_bridge if kind == "bridge" else _boot.to_hooked
    try:
        model = build(hf_model, tokenizer, name, processed=False, device=device, dtype=dtype)
    except Exception as error:
        raise ModelLoadError(
            f"TransformerLens cannot take {name} ({type(hf_model).__name__}) as {_KIND[kind]}: {_said(error)}"
        ) from error
    with torch.no_grad():
        found = model(tokens).float().log_softmax(-1)
    gap = (found[..., : expected.shape[-1]] - expected).abs().max().item()
    allowed = _TOLERANCE if dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    if not gap <= allowed:
        raise ModelLoadError(
            f"TransformerLens's {_KIND[kind]} does not compute what {name} ({type(hf_model).__name__}) computes: "
            f"log-probabilities differ by up to {gap:.2g} nats, where {allowed:g} is rounding; try the other api"
        )
    return model


def _probe(d_vocab: int) -> torch.Tensor:
    """A prompt of spread-out token ids, `[1, pos]`, the same at every call."""
    return ((torch.arange(_PROBE_LENGTH) * 7919 + 17) % d_vocab)[None]


def _said(error: Exception) -> str:
    """The type and the first line of an error, kept short (TransformerLens lists every model it knows)."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first if len(first) <= 120 else first[:120] + '...'}"
