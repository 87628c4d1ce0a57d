"""The fields of a split, and the check that they agree with each other.

`ShareFields` carries data and what follows from it alone; `splits.SplitResult` adds the members a user calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl.results import IGLensResult

PATHS = ("sequential", "straight")
KINDS = (
    "block",
    "attn",
    "mixer",
    "mlp",
    "head",
    "bias",
    "neuron",
    "others",
    "embed",
    "baseline",
    "lens",
    "rounding",
    "remainder",
    "own",
)
"""What a part can be; "own" is a part that the caller brought."""

AXES: Mapping[str, str] = {
    "attribution": "part",
    "gap": "segment",
    "error": "segment",
    "nodes": "segment",
    "linear": "part",
    "sequential": "part",
    "attn_first": "part",
    "mlp_first": "part",
}
"""The first axis of every tensor; the others are batch and pos."""

_OPTIONAL = ("sequential", "attn_first", "mlp_first")


@dataclass(frozen=True)
class Part:
    """One row of a split.

    Attributes:
        label: `"3"` (a block), `"3_attn"`, `"3_mlp"`, `"L3H2"`, `"3_attn_bias"`, `"L3N17"`, `"3_rounding"`, or the caller's.
        kind: one of `KINDS`.
        segment: index of its segment in `whole`.
        layer: its block, None where there is none.
        index: the head or neuron, None where there is none.
    """

    label: str
    kind: str
    segment: int
    layer: int | None = None
    index: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ShareFields:
    """What one split found; see `iglens_tl.splits.SplitResult` for the meaning of the fields."""

    whole: IGLensResult
    parts: tuple[Part, ...]
    attribution: Float[Tensor, "part batch pos"]
    gap: Float[Tensor, "segment batch pos"]
    error: Float[Tensor, "segment batch pos"]
    nodes: Int[Tensor, "segment batch pos"]
    linear: Float[Tensor, "part batch pos"]
    sequential: Float[Tensor, "part batch pos"] | None
    attn_first: Float[Tensor, "part batch pos"] | None
    mlp_first: Float[Tensor, "part batch pos"] | None
    unit: str
    path: str
    tolerance: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        faults = [*_tensor_faults(self), *_part_faults(self)]
        if faults:
            raise ValueError("the fields of this split do not agree: " + "; ".join(faults))

    @property
    def metric_unit(self) -> str:
        """The unit of a credit: `"probability"`, `"nats"` or `"logits"`."""
        return self.whole.unit

    @property
    def mean_of_orders(self) -> Float[Tensor, "part batch pos"] | None:
        """The mean of attention first and MLP first: Shapley's value of the two; None where there are no orders."""
        if self.attn_first is None or self.mlp_first is None:
            return None
        return (self.attn_first + self.mlp_first) / 2


def tensors_of(shares: ShareFields) -> dict[str, Tensor]:
    """The tensors that are there, by name."""
    found = {name: getattr(shares, name) for name in AXES}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _tensor_faults(shares: ShareFields) -> list[str]:
    sizes = {"part": len(shares.parts), "segment": shares.whole.n_segments}
    grid = tuple(shares.whole.mask.shape)
    faults: list[str] = []
    for name, axis in AXES.items():
        tensor = getattr(shares, name)
        if tensor is None and name in _OPTIONAL:
            continue
        wanted, dtype = (sizes[axis], *grid), torch.int64 if name == "nodes" else torch.float64
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            faults.append(f"{name} [{axis} batch pos] should be {wanted} {dtype}, but is {got}")
        elif name != "nodes" and not bool(tensor[:, ~shares.whole.mask].isnan().all()):
            faults.append(f"{name} must be NaN where mask is False")
    return faults


def _part_faults(shares: ShareFields) -> list[str]:
    faults: list[str] = []
    if any(not 0 <= part.segment < shares.whole.n_segments for part in shares.parts):
        faults.append(f"parts must name one of the {shares.whole.n_segments} segments")
    names = [(part.segment, part.label) for part in shares.parts]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if twice:
        faults.append(f"a segment has two parts of one name: {twice[:4]}")
    strange = {part.kind for part in shares.parts} - set(KINDS)
    if strange:
        faults.append(f"kinds must be among {', '.join(KINDS)}; got {', '.join(sorted(strange))}")
    if shares.path not in PATHS:
        faults.append(f"path must be one of {', '.join(PATHS)}; got {shares.path!r}")
    return faults


def part_fields() -> tuple[str, ...]:
    """The names of a part's fields, in order."""
    return tuple(field.name for field in fields(Part))
