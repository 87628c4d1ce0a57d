"""The segments of a run with what their parts come from: the model's own parts, the caller's, through a lens or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._division import Pieces, Source, Stretch
from iglens_tl._model.parts import NOTHING, PartGroup, between
from iglens_tl._request import Lens
from iglens_tl._trajectory import Trajectory

Own = dict[str, Tensor]
"""The caller's parts of one segment: name -> `[rows, d_model]`."""


def stretches(run: Trajectory, way: Trajectory, unit: str | Mapping[str, Any], lens: Lens | None) -> list[Stretch]:
    """Every segment of a path, in order.

    Args:
        run: the run with all its states.
        way: the same on the path that is taken: `run` itself, or its first and last state alone.
        unit: one of `parts.UNITS`, or parts of the caller's own.
        lens: what the states were mapped with.

    Raises:
        TypeError, ValueError: for parts of the caller's that fit no segment, position or width.
    """
    own = None if isinstance(unit, str) else _own_parts(way, unit)
    ends = list(way.states.halves)
    starts = [None, *ends[:-1]] if way.states.base != "embed" else [ends.pop(0), *ends[:-1]]
    return [
        _given_stretch(way, i, own[label]) if own is not None else _model_stretch(run, way, i, start, end, lens)
        for i, (label, start, end) in enumerate(zip(way.states.segment_labels, starts, ends, strict=True))
    ]


def _given_stretch(way: Trajectory, i: int, parts: Own) -> Stretch:
    label = way.states.segment_labels[i]
    sources = [Source(_given(parts), own=True)] if parts else []
    return Stretch(way.path.states[i], way.path.states[i + 1], sources, (f"{label}_remainder", "remainder"))


def _model_stretch(run: Trajectory, way: Trajectory, i: int, start: int | None, end: int, lens: Lens | None) -> Stretch:
    """A segment by the model's own parts; `start` is None where it comes from a baseline."""
    label, before, after = way.states.segment_labels[i], way.path.states[i], way.path.states[i + 1]
    rest = "rounding" if lens is None else "remainder"
    raw, fixed = way.stream[i], list[tuple[str, str, Tensor]]()
    if start is None and run.states.base == "zero" and lens is None:
        start = NOTHING
    elif start is None:
        start, raw = run.states.halves[0], run.stream[1]
        fixed.append(("base", "baseline", _less(run.path.states[1], before)))
    sources = [_source(group) for group in between(run.parts, start, end)]
    if lens is not None:
        there = _mapped(run, lens, end // 2, raw)
        fixed.append((f"{label}_lens", "lens", _less(there, before) - sum(change for _, _, change in fixed)))
        sources = [_through(source, run, lens, end // 2, raw, there) for source in sources]
    return Stretch(before, after, sources, (f"{label}_{rest}", rest), fixed)


def _less(end: Tensor, start: Tensor) -> Tensor:
    return end.double().cpu() - start.double().cpu()


def _source(group: PartGroup) -> Source:
    rest = f"{group.start // 2}_mlp_others" if group.source.stream is not None else None
    return Source(group.pieces, rest=rest)


def _mapped(run: Trajectory, lens: Lens, index: int, rows: Tensor) -> Tensor:
    return lens(rows.to(run.readout.device, run.readout.dtype), index)


def _through(source: Source, run: Trajectory, lens: Lens, index: int, raw: Tensor, there: Tensor) -> Source:
    """Parts as the lens of the segment's end shows them: `lens(start + part) - lens(start)`."""

    def pieces(rows: slice) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        base = raw[rows].to(run.readout.device, run.readout.dtype)
        for labels, parts in source.pieces(rows):
            moved = base + parts.to(base.device, base.dtype)
            seen = _mapped(run, lens, index, moved.reshape(-1, moved.shape[-1])).reshape(moved.shape)
            yield labels, seen - there[rows].to(seen.device)

    return Source(pieces, source.own, source.rest)


def _given(parts: Own) -> Pieces:
    def pieces(rows: slice) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for name, tensor in parts.items():
            yield (name,), tensor[rows][None]

    return pieces


def _own_parts(run: Trajectory, parts: Mapping[str, Any]) -> dict[str, Own]:
    labels = run.states.segment_labels
    if all(isinstance(value, Tensor) for value in parts.values()):
        if len(labels) > 1:
            raise ValueError(
                f"the path has {len(labels)} segments, so parts are {{segment: {{name: tensor}}}} with segments among "
                f'{shorten(labels)}; {{name: tensor}} goes with one segment (layers=1, or path="straight").'
            )
        parts = {next(iter(labels)): parts}
    strange = [label for label in parts if label not in labels]
    if strange:
        raise ValueError(f"there is no segment {shorten(map(repr, strange))}; the segments are {shorten(labels)}.")
    wrong = [label for label, inner in parts.items() if not isinstance(inner, Mapping)]
    if wrong:
        raise TypeError(
            f"the parts of a segment are a mapping of names to tensors; those of {shorten(wrong)} are none."
        )
    return {
        label: {str(name): _rows(run, f"{label}: {name}", tensor) for name, tensor in parts.get(label, {}).items()}
        for label in labels
    }


def _rows(run: Trajectory, name: str, tensor: Any) -> Tensor:
    """The selected rows `[rows, d_model]` of a part given on the selected positions or on the whole input."""
    plan, d_model = run.positions, run.host.d_model
    grid = (*plan.mask.shape, d_model)
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and shape == grid:
        rows = tensor.detach().cpu()[plan.mask]
    elif isinstance(tensor, Tensor) and tensor.is_floating_point() and shape == (*run.token_shape, d_model):
        batch, pos = plan.rows
        rows = tensor.detach().cpu()[batch, pos]
    else:
        raise ValueError(
            f"the part {name} must be a floating-point tensor [batch, pos, d_model], of the selected positions {grid} or of the "
            f"whole input {(*run.token_shape, d_model)}; got {shape}."
        )
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(f"the part {name} holds NaN or infinite numbers at a selected position.")
    return rows
