"""What makes two models the same model, as far as can be told quickly: configuration, dtype, and a sample of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from iglens_tl._model.host import Host, hook_functions, provenance

SAMPLE = 256
"""Elements of each parameter that are looked at, evenly spaced."""

_VERSIONS = ("iglens_tl", "transformer_lens", "transformers", "torch")


def model_identity(host: Host) -> dict[str, Any]:
    """Name, architecture, dtype, flags, the hooks and where they sit, and a digest of the weights; without versions.

    Raises:
        TypeError: for a hook that cannot be told from another one.
    """
    about = {name: value for name, value in provenance(host).items() if name not in _VERSIONS}
    hooks = [
        f"{point}: {function_identity(host, hook, f'the hook on {point}')}"
        for point, hook in hook_functions(host.model)
    ]
    return {**about, "hooks": hooks, "weights": weights_digest(host.model)}


def function_identity(host: Host, function: Callable[..., Any], what: str) -> str:
    """The name of a function (or module, or other object that can be called), and a digest of its code and what it holds.

    The digest is that of `datasets` (its `Hasher`): of code, defaults, what a closure holds, the globals that are used,
    attributes and weights. A function that can be imported counts by its name alone, and so does the model where one
    refers to it.

    Raises:
        TypeError: for what cannot be pickled.
    """
    from datasets.fingerprint import Hasher

    try:
        with _by_name(host.model):
            digest = Hasher.hash(function)
    except Exception as error:  # pickling runs code of whatever is held
        raise TypeError(
            f"{what} cannot be pickled ({error}), so a run could not be told from one with another function when it goes on. "
            "Let it hold tensors, modules and plain values only."
        ) from error
    of = function if hasattr(function, "__qualname__") else type(function)
    return f"{of.__module__}.{of.__qualname__} {digest}"


@contextmanager
def _by_name(model: torch.nn.Module) -> Generator[None]:
    """Have the model pickled as a word: it has a digest of its own, and what it keeps beside weights differs from run to run."""
    modules = list(model.modules())
    for module in modules:
        vars(module)["__reduce_ex__"] = lambda _: (str, ("the model",))
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["__reduce_ex__"]


def weights_digest(model: torch.nn.Module) -> str:
    """A training step, a merged adapter and folding change it; a single weight changed by hand may not."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample = flat[:: -(-len(flat) // SAMPLE)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
