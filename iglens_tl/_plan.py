"""The plan of a call, settled before anything is computed: which states, which segments, which positions.

States are counted in half blocks: `2 * l` is the state entering block `l` (`l_pre`), `2 * l + 1` the state between its
attention and its MLP (`l_mid`), `2 * n_layers` the last state (`final_post`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from iglens_tl._checks import plain, shorten, whole_number

Positions = int | slice | Sequence[int] | None


def state_label(half: int, n_layers: int) -> str:
    """TransformerLens's name of a state.

    >>> state_label(0, 3), state_label(3, 3), state_label(6, 3)
    ('0_pre', '1_mid', 'final_post')
    """
    if half == 2 * n_layers:
        return "final_post"
    return f"{half // 2}_{'mid' if half % 2 else 'pre'}"


def segment_label(start: int, end: int) -> str:
    """The name of what lies between two states: block 3 is "3", blocks 3 to 6 are "3-6", halves "3_attn" and "3_mlp".

    >>> segment_label(6, 8), segment_label(6, 14), segment_label(6, 7), segment_label(7, 8), segment_label(7, 13)
    ('3', '3-6', '3_attn', '3_mlp', '3_mlp-6_attn')
    """
    first = f"{start // 2}_mlp" if start % 2 else f"{start // 2}"
    last = f"{end // 2}_attn" if end % 2 else f"{end // 2 - 1}"
    if start // 2 == (end - 1) // 2:  # inside one block
        return last if end % 2 else first
    return f"{first}-{last}"


@dataclass(frozen=True)
class StatePlan:
    """The states of the path.

    Args:
        n_layers: blocks of the model.
        halves: the model's own states on the path, in half blocks, ascending, ending at the last.
        base: "embed" where the path starts at the first of `halves`, else the name of the baseline put before them.
    """

    n_layers: int
    halves: tuple[int, ...]
    base: str

    @property
    def state_labels(self) -> tuple[str, ...]:
        own = tuple(state_label(half, self.n_layers) for half in self.halves)
        return own if self.base == "embed" else (self.base, *own)

    @property
    def segment_labels(self) -> tuple[str, ...]:
        own = tuple(segment_label(a, b) for a, b in zip(self.halves[:-1], self.halves[1:], strict=True))
        return own if self.base == "embed" else ("base", *own)

    @property
    def hidden_states(self) -> tuple[int | None, ...]:
        """Index 0..n of each segment's end state; None where it lies inside a block."""
        ends = self.halves[1:] if self.base == "embed" else self.halves
        return tuple(None if half % 2 else half // 2 for half in ends)


def plan_states(layers: object, incl_mid: bool, base: str, n_layers: int) -> StatePlan:
    """Settle `layers`, `incl_mid` and the baseline's name into the states of the path.

    With a baseline other than the embedding, `h_0` is on the path only where `layers` names it: the baseline takes its
    place.
    """
    last = 2 * n_layers
    layers = plain(layers)
    if layers is None:
        halves = range(1 if incl_mid else 2, last + 1, 1 if incl_mid else 2)
    elif incl_mid:
        raise ValueError(
            "incl_mid=True splits every block and goes with layers=None; got layers as well. Name mid states in the list "
            'instead, e.g. layers=["3_mid"].'
        )
    elif isinstance(layers, int) and not isinstance(layers, bool):
        k = whole_number("layers (as a number of segments)", layers, 1, n_layers)
        halves = [2 * round(n_layers * i / k) for i in range(1, k + 1)]
    else:
        halves = _chosen(layers, n_layers)
    ends = sorted({*halves, last})
    if base == "embed":
        ends = sorted({0, *ends})
    return StatePlan(n_layers, tuple(ends), base)


def _chosen(layers: object, n_layers: int) -> list[int]:
    if isinstance(layers, (str, bytes, bool)) or not isinstance(layers, Sequence):
        raise TypeError(
            f"layers must be None, a number of segments, or a list of state indices and labels; got {layers!r}."
        )
    items: list[object] = [plain(item) for item in layers]
    halves = [_half(item, n_layers) for item in items]
    wrong = [item for item, half in zip(items, halves, strict=True) if half is None]
    if wrong or not items:
        raise ValueError(
            f"layers must name states 0 to {n_layers} (0 enters block 0, {n_layers} leaves the last block) or labels such as "
            f'"3_pre", "3_mid", "final_post"; got {shorten(map(repr, wrong)) if items else "an empty list"}.'
        )
    return [half for half in halves if half is not None]


def _half(item: object, n_layers: int) -> int | None:
    if isinstance(item, bool):
        return None
    if isinstance(item, int) and 0 <= item <= n_layers:
        return 2 * item
    if item == "final_post":
        return 2 * n_layers
    match = re.fullmatch(r"(\d+)_(pre|mid|post)", item) if isinstance(item, str) else None
    if match is None or int(match.group(1)) >= n_layers:
        return None
    return 2 * int(match.group(1)) + {"pre": 0, "mid": 1, "post": 2}[match.group(2)]


@dataclass(frozen=True)
class PositionPlan:
    """The selected positions.

    Args:
        index: index on the token axis, `[batch, pos]`, -1 where there is none.
        mask: False where the row has no such real token, `[batch, pos]`.
    """

    index: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Batch index and token index of the rows that are read, in order."""
        batch, pos = self.mask.nonzero(as_tuple=True)
        return batch, self.index[batch, pos]

    def without(self, drop: Bool[Tensor, "batch pos"]) -> PositionPlan:
        """The same selection with some rows masked out."""
        mask = self.mask & ~drop
        return PositionPlan(torch.where(mask, self.index, -1), mask)


def plan_positions(positions: Positions, token_mask: Bool[Tensor, "batch seq"]) -> PositionPlan:
    """Settle `positions` into an index and a mask.

    Numbers and slices count the real tokens of each prompt (so padding, left or right, changes nothing): 0 is the
    prompt's first token, -1 its last. None keeps the whole token axis, with padding masked.

    Raises:
        ValueError: where a prompt has no token at a position asked for by number.
    """
    if positions is None:
        index = torch.arange(token_mask.shape[1]).expand(token_mask.shape)
        return PositionPlan(torch.where(token_mask, index, -1), token_mask.clone())
    real = [row.nonzero()[:, 0] for row in token_mask]
    if isinstance(positions, slice):
        picked = [row[list(range(len(row))[positions])] for row in real]  # torch has no steps backwards
        if not any(len(row) for row in picked):
            raise ValueError(f"positions={positions} selects no token of any prompt (lengths {_lengths(real)}).")
    else:
        numbers = _numbers(positions)
        short = [(i, p) for i, row in enumerate(real) for p in numbers if not -len(row) <= p < len(row)]
        if short:
            raise ValueError(
                "positions must lie inside every prompt; "
                + shorten(f"prompt {i} has {len(real[i])} tokens and no position {p}" for i, p in short)
                + "."
            )
        picked = [row[torch.tensor(numbers)] for row in real]
    width = max(len(row) for row in picked)
    index = torch.full((len(picked), width), -1)
    for i, row in enumerate(picked):
        index[i, : len(row)] = row
    return PositionPlan(index, index >= 0)


def _lengths(real: Sequence[Tensor]) -> str:
    return shorten(len(row) for row in real)


def _numbers(positions: object) -> list[int]:
    chosen = plain(positions)
    several = isinstance(chosen, Sequence) and not isinstance(chosen, (str, bytes))
    items: list[object] = [plain(item) for item in chosen] if several else [chosen]
    if not items or any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise TypeError(f"positions must be None, a whole number, a list of them or a slice; got {positions!r}.")
    return [item for item in items if isinstance(item, int)]
