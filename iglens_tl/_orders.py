"""The two sublayers of a block one after the other: attention first, as the model runs them, or the MLP first.

With `m` the state between them, attention first credits attention with `f(m) - f(h_{j-1})` and the MLP with
`f(h_j) - f(m)`; the other way round the state between is `h_{j-1} + mlp`. The mean of both is Shapley's value of two players.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from iglens_tl._core.segments import Path, read_states
from iglens_tl._model.parts import PartGroup, between
from iglens_tl._shares import Part
from iglens_tl._trajectory import Trajectory


def orders(run: Trajectory, parts: Sequence[Part], metric: str) -> tuple[Tensor | None, Tensor | None]:
    """Credits `[part, batch, pos]` with attention first and with the MLP first.

    NaN for a segment that is not one block with a state between its sublayers; None and None where no segment is.
    """
    blocks = _blocks(run)
    if not blocks:
        return None, None
    middles: list[Tensor] = []
    for segment, (attention, mlp) in blocks.items():
        start = run.stream[segment]
        middles += [_plus(start, attention), _plus(start, mlp)]
    ends = [run.path.states[i] for segment in blocks for i in (segment, segment + 1)]
    read = read_states(run.readout, Path([*middles, *ends], run.path.groups)).value(metric)
    values = read.reshape(2, len(blocks), 2, -1)
    found = {segment: values[:, i] for i, segment in enumerate(blocks)}
    rows = [_of_part(part, found) for part in parts]
    size = values.shape[-1]
    filled = [row if row is not None else torch.full((2, size), torch.nan, dtype=torch.float64) for row in rows]
    both = run.on_grid(torch.stack(filled, dim=1))
    return both[0], both[1]


def _blocks(run: Trajectory) -> dict[int, tuple[PartGroup, PartGroup]]:
    """Attention and MLP of each segment that is one block with a state between them."""
    own = run.states.halves
    first = 0 if run.states.base == "embed" else 1
    found: dict[int, tuple[PartGroup, PartGroup]] = {}
    for place, (start, end) in enumerate(pairwise(own)):
        inside = between(run.parts, start, end)
        if end == start + 2 and len(inside) == 2 and inside[0].end == start + 1:
            found[place + first] = (inside[0], inside[1])
    return found


def _plus(start: Tensor, group: PartGroup) -> Tensor:
    """The state plus a sublayer's output, added as the model adds it."""
    _, parts = group.build()
    return start + parts[0].to(start.device, start.dtype)


def _of_part(part: Part, found: dict[int, Tensor]) -> Tensor | None:
    """`[order, rows]`; what is neither attention nor MLP gets nothing, since the states between are read as they are."""
    if part.segment not in found:
        return None
    (with_attention, with_mlp), (start, end) = found[part.segment]
    if part.kind in ("attn", "mixer"):
        return torch.stack([with_attention - start, end - with_mlp])
    if part.kind == "mlp":
        return torch.stack([end - with_attention, with_mlp - start])
    return torch.zeros(2, start.shape[-1], dtype=torch.float64)
