"""Watch a model during a call: what the call must leave as it was, and how often it ran the model.

`untouched(model)` compares a full record of the model and of torch's global state before and after its block, also
where the block raises. `refused(model, error, *parts)` is that, and the block must raise `error` with every part in its
message. `forwards(model)` counts the runs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")


def modules_of(model: Any) -> dict[str, torch.nn.Module]:
    """Every module, those of a bridge's Hugging Face model too."""
    found = dict(model.named_modules())
    inner = getattr(model, "original_model", None)
    if isinstance(inner, torch.nn.Module):
        found.update({f"original_model.{name}": module for name, module in inner.named_modules()})
    return found


def record(model: Any) -> dict[str, Any]:
    """All that a call must not change, as plain values that compare."""
    modules = modules_of(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    points = getattr(model, "hook_dict", {})
    return {
        "hooks": {name: [tuple(vars(module).get(kind) or ()) for kind in HOOKS] for name, module in modules.items()},
        "hook points": {name: [len(point.fwd_hooks), len(point.bwd_hooks)] for name, point in points.items()},
        "context level": getattr(model, "context_level", None),
        "contexts": {name: dict(point.ctx) for name, point in points.items()},
        "training": {name: module.training for name, module in modules.items()},
        "numbers": {name: value.detach().clone() for name, value in tensors.items()},
        "places": {name: (value.data_ptr(), value.dtype, value.device, value.shape) for name, value in tensors.items()},
        "gradient flags": {name: (value.requires_grad, value.grad is None) for name, value in tensors.items()},
        "gradients": {name: value.grad.clone() for name, value in tensors.items() if value.grad is not None},
        "settings": {name: repr(value) for name, value in vars(model.cfg).items()},
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch random": torch.get_rng_state(),
        "python random": random.getstate(),
        "numpy random": [np.asarray(part).tolist() for part in np.random.get_state()],
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The parts of two records that differ."""
    return [name for name in before if not _same(before[name], after[name])]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        # Bits, so that a NaN equals itself and -0.0 differs from 0.0.
        return left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 0:
        tensor = tensor[None]
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """The block leaves the model, the random states and torch's global settings as they were, failed or not."""
    before = record(model)
    try:
        yield
    finally:
        changed = changes(before, record(model))
    assert not changed, f"the call changed: {changed}"


@contextlib.contextmanager
def refused(model: Any, error: type[Exception], *parts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises exactly `error`, says every part, and leaves everything as it was."""
    with untouched(model), pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error, f"{error.__name__} was required, {type(caught.value).__name__} came"
    said = str(caught.value)
    lacking = [part for part in parts if part not in said]
    assert not lacking, f"the message does not say {lacking}: {said}"


class Count:
    """How often something happened."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.runs += 1


@contextlib.contextmanager
def forwards(model: Any) -> Iterator[Count]:
    """Count the runs of the model (of its first block: no entry point can go round that)."""
    count = Count()
    handle = model.blocks[0].register_forward_pre_hook(count)
    try:
        yield count
    finally:
        handle.remove()
