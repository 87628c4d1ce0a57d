"""One segment and the parts that it is the sum of: how long they are, and what a direction makes of each.

Parts are streamed: they are built a few at a time, multiplied with the direction, and dropped. What the parts leave of
the segment is a part too, so that the shares always add up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._shares import Part

Pieces = Callable[[slice], Iterator[tuple[tuple[str, ...], Tensor]]]
"""Some rows -> labels and parts `[part, rows, d_model]`, a few parts at a time."""

_KINDS = (
    (r"L(\d+)H(\d+)", "head"),
    (r"L(\d+)N(\d+)", "neuron"),
    (r"(\d+)_(?:attn|mlp)_bias", "bias"),
    (r"(\d+)_attn", "attn"),
    (r"(\d+)_mixer", "mixer"),
    (r"(\d+)_mlp", "mlp"),
    (r"(\d+)", "block"),
    (r"(\d+)_mlp_others", "others"),
    (r"embed|pos_embed", "embed"),
)


@dataclass(frozen=True)
class Source:
    """Parts that come from one place.

    Args:
        pieces: builds them.
        own: whether the caller brought them.
        rest: where only the largest are kept: the name of the sum of all others.
    """

    pieces: Pieces
    own: bool = False
    rest: str | None = None


@dataclass(frozen=True)
class Stretch:
    """A segment of the path.

    Args:
        start, end: its ends `[rows, d_model]`, as they are read.
        sources: what its parts come from.
        rest: name and kind of what the parts leave of it.
        fixed: parts that no source builds, by name and kind, `[rows, d_model]`.
    """

    start: Tensor
    end: Tensor
    sources: Sequence[Source]
    rest: tuple[str, str]
    fixed: Sequence[tuple[str, str, Tensor]] = ()

    @property
    def change(self) -> Float[Tensor, "rows d_model"]:
        """End less start, in float64 on the CPU."""
        return self.end.double().cpu() - self.start.double().cpu()


def part_of(label: str, segment: int, own: bool = False) -> Part:
    """A part by the label that its source gave it.

    >>> part_of("L3H2", 3)
    Part(label='L3H2', kind='head', segment=3, layer=3, index=2)
    """
    if own:
        return Part(label, "own", segment)
    for pattern, kind in _KINDS:
        match = re.fullmatch(pattern, label)
        if match is not None:
            layer, index = (*map(int, match.groups()), None, None)[:2]
            return Part(label, kind, segment, layer, index)
    raise AssertionError(f"no kind of part is labelled {label!r}")


def row_slices(n_rows: int, d_model: int, budget: int, most: int = 256) -> list[slice]:
    """Rows few enough for `most` parts of them to fit the budget (bytes)."""
    size = max(1, budget // (8 * d_model * most))
    return [slice(i, min(i + size, n_rows)) for i in range(0, n_rows, size)]


def longest(stretch: Stretch, slices: Sequence[slice]) -> Float[Tensor, "rows"]:
    """The length of the longest part of each row, the remainder and the whole change among them."""
    change = stretch.change
    lengths = change.norm(dim=-1)
    left = change.clone()
    for _, _, fixed in stretch.fixed:
        left -= fixed
        lengths = torch.maximum(lengths, fixed.norm(dim=-1))
    for source in stretch.sources:
        for rows in slices:
            for _, parts in source.pieces(rows):
                wide = parts.double().cpu()
                left[rows] -= wide.sum(0)
                lengths[rows] = torch.maximum(lengths[rows], wide.norm(dim=-1).amax(0))
    return torch.maximum(lengths, left.norm(dim=-1))


@dataclass(frozen=True)
class Shares:
    """What directions make of the parts of one segment.

    Args:
        parts: the rows of the part axis.
        credits: `[direction, part, rows]`.
    """

    parts: tuple[Part, ...]
    credits: Float[Tensor, "direction part rows"]


def share(
    stretch: Stretch,
    segment: int,
    directions: Float[Tensor, "direction rows d_model"],
    slices: Sequence[slice],
    keep: int,
) -> Shares:
    """Inner products of every part with the directions; of a source that names its `rest`, the `keep` largest and the rest.

    "Largest" is by the first direction, over all rows.
    """
    parts: list[Part] = []
    credits: list[Tensor] = []
    left = stretch.change
    for label, kind, fixed in stretch.fixed:
        parts.append(Part(label, kind, segment))
        credits.append(_along(fixed[None], directions))
        left -= fixed
    for source in stretch.sources:
        labels, found = _of_source(source, directions, left, slices)
        if source.rest is not None:
            labels, found = _largest(labels, found, keep, source.rest)
        parts += [part_of(label, segment, source.own) for label in labels]
        credits.append(found)
    parts.append(Part(*stretch.rest, segment))
    return Shares(tuple(parts), torch.cat([*credits, _along(left[None], directions)], dim=1))


def _of_source(
    source: Source, directions: Tensor, left: Tensor, slices: Sequence[slice]
) -> tuple[tuple[str, ...], Tensor]:
    """Labels and credits `[direction, part, rows]` of one source; its parts are taken off `left`."""
    labels: tuple[str, ...] = ()
    columns: list[Tensor] = []
    for rows in slices:
        found: list[tuple[tuple[str, ...], Tensor]] = []
        for names, parts in source.pieces(rows):
            wide = parts.double().cpu()
            left[rows] -= wide.sum(0)
            found.append((names, _along(wide, directions[:, rows])))
        labels = tuple(name for names, _ in found for name in names)
        columns.append(torch.cat([credits for _, credits in found], dim=1))
    return labels, torch.cat(columns, dim=-1)


def _along(parts: Tensor, directions: Tensor) -> Tensor:
    return torch.einsum("prd,grd->gpr", parts, directions)


def _largest(labels: tuple[str, ...], credits: Tensor, keep: int, rest: str) -> tuple[tuple[str, ...], Tensor]:
    """The `keep` neurons of largest credit by the first direction, in their order, and a bias; then the sum of the others."""
    size = credits[0].abs().amax(-1)
    biases = sum(label.endswith("_bias") for label in labels)
    size[[i for i, label in enumerate(labels) if label.endswith("_bias")]] = torch.inf
    order = size.argsort(descending=True, stable=True)
    kept, others = order[: keep + biases].sort().values, order[keep + biases :]
    if not len(others):
        return labels, credits
    names = (*(labels[i] for i in kept.tolist()), rest)
    return names, torch.cat([credits[:, kept], credits[:, others].sum(1, keepdim=True)], dim=1)
