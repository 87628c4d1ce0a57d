"""How a block adds a sublayer's output to the stream, and whether sums agree within rounding.

A sublayer's output reaches the stream as it is, times a factor (Granite), or through a post-norm (Gemma-2, OLMo-2), which
is linear once its scale is frozen. Which of them it is, is settled by what was added, never by a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError
from iglens_tl._model.head import formula_of
from iglens_tl._model.host import Host, architecture

Way = Callable[[Tensor, Tensor], Tensor]
"""`(parts [part, rows, d_model], their sum [rows, d_model]) -> the parts as they are added`."""

# float32: sums over d_model, heads and neurons in another order. Half precision: one rounding of the state a sublayer.
_ROUNDINGS = {torch.float64: 256, torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}


def require_equal(
    host: Host, got: Tensor, wanted: Tensor, size: Tensor, name: str, wanted_name: str, times: int
) -> None:
    """Refuse a sum `[rows, d_model]` that differs by more than rounding.

    Args:
        host: the model, for the message.
        got: the sum, in float64.
        wanted: what it must be, in the model's dtype, on any device.
        size: the size of the largest term in each row.
        name, wanted_name: of the two, for the message.
        times: how many sums were rounded on the way.

    Raises:
        UnsupportedModelError: with the numbers.
    """
    exact = wanted.to(got.device).double()
    off = (got - exact).abs().amax(-1)
    size = torch.maximum(size, exact.abs().amax(-1)).clamp(min=1e-6)
    bound = _ROUNDINGS[wanted.dtype] * max(times, 1) * torch.finfo(wanted.dtype).eps
    worst = int((off / size).nan_to_num(torch.inf).argmax())
    if not bool(off[worst] <= bound * size[worst]):
        raise UnsupportedModelError(
            f"the parts of {architecture(host.model) or host.name} do not add up: {name} differs from {wanted_name} by "
            f"{float(off[worst]):.3g}, where the stream is {float(size[worst]):.3g} large and rounding allows "
            f"{float(bound * size[worst]):.3g}. TransformerLens takes these parts at another point than the model adds them "
            "(or a hook changed them on the way): ask for whole blocks."
        )


def way_of_adding(
    host: Host,
    layer: int,
    norms: Sequence[str],
    parts: Float[Tensor, "part rows d_model"],
    added: Float[Tensor, "rows d_model"],
    name: str,
) -> Way:
    """The way in which the block adds these parts.

    Args:
        host: the model.
        layer: the block.
        norms: names that a post-norm of this sublayer can have.
        parts: the sublayer's output in parts (all heads, or partial sums of the neurons).
        added: what the sublayer added to the stream.
        name: of the parts, for the message.

    Raises:
        UnsupportedModelError: where no way gives what was added.
    """
    ways, whole = list(_ways(host, layer, norms)), parts.sum(0)
    truth, as_added = added.to(parts.device).double(), [way(parts, whole).double() for way in ways]
    size = torch.stack([found.abs().sum(0).amax(-1) for found in as_added])
    off = torch.stack([(found.sum(0) - truth).abs().amax(-1) for found in as_added])
    best = int((off / size.clamp(min=1e-30)).amax(-1).nan_to_num(torch.inf).argmin())
    require_equal(
        host, as_added[best].sum(0), added, size[best],
        f"the sum of {name} of block {layer}", "what it added to the stream", 1,
    )  # fmt: skip
    return ways[best]


def _ways(host: Host, layer: int, norms: Sequence[str]) -> Iterator[Way]:
    yield lambda parts, whole: parts  # noqa: ARG005 -- as every way is called
    config: Any = getattr(getattr(host.model, "original_model", None), "config", host.model.cfg)
    multiplier = getattr(config, "residual_multiplier", None)
    if isinstance(multiplier, float):
        yield lambda parts, whole: parts * multiplier  # noqa: ARG005 -- as every way is called
    block = host.model.blocks[layer]
    for name in norms:
        module = getattr(block, name, None)
        formula = formula_of(host, module) if isinstance(module, torch.nn.Module) else None
        if formula is not None:
            yield formula.frozen


def wide(tensor: Tensor) -> Tensor:
    """At least in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
