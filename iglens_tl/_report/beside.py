"""What other methods say of the tokens of a result: columns beside its credits, and the most probable tokens of each state.

A companion is matched token by token, by prompt and position; it may hold more tokens than the result, never fewer, and
must speak of the same targets and the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._layout import shown_tokens
from iglens_tl.companion_results import DLAResult, LogitLensResult
from iglens_tl.comparison import LensComparison
from iglens_tl.results import IGLensResult

Companion = LensComparison | LogitLensResult | DLAResult


@dataclass(frozen=True)
class MethodColumn:
    """One method's amounts `[token, segment]` in its own unit, and by name what stands under them, each `[token]`."""

    name: str
    unit: str
    meaning: str
    amounts: Tensor
    under: dict[str, Tensor]


@dataclass(frozen=True)
class Beside:
    """All that came: columns, and the logit lens with the place on its `batch` and `pos` axes of each token."""

    columns: tuple[MethodColumn, ...]
    lens: LogitLensResult | None
    lens_places: tuple[Tensor, Tensor] | None


def beside(result: IGLensResult, companions: Any) -> Beside:
    """The companions, each checked against the result.

    Raises:
        TypeError: for what is no companion.
        ValueError: for two of one kind, or one that is about other tokens, targets or layers.
    """
    given = _listed(companions)
    columns: list[MethodColumn] = []
    lens, lens_places = None, None
    for companion in given:
        places = _places(result, companion)
        if isinstance(companion, LogitLensResult):
            _same_labels("state_labels", companion, companion.state_labels, result.state_labels)
            lens, lens_places = companion, places
        elif isinstance(companion, LensComparison):
            _same_labels("segment_labels", companion, companion.segment_labels, result.segment_labels)
            columns += _compared(result, companion, places)
        else:
            columns.append(_dla(result, companion, places))
    return Beside(tuple(columns), lens, lens_places)


def _listed(companions: Any) -> list[Companion]:
    given: list[Any] = (
        [] if companions is None else list(companions) if isinstance(companions, (list, tuple)) else [companions]
    )
    strange = [type(item).__name__ for item in given if not isinstance(item, Companion)]
    if strange:
        raise TypeError(
            "companions must be a LensComparison (of compare), a LogitLensResult (of logit_lens), a DLAResult (of "
            f"direct_logit_attribution), or a list of these; got {shorten(strange)}."
        )
    kinds = [type(item).__name__ for item in given]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"companions must hold at most one of each kind; got {', '.join(kinds)}.")
    return given


def _places(result: IGLensResult, companion: Companion) -> tuple[Tensor, Tensor]:
    """Where on the companion's `batch` and `pos` axes each token of the result is."""
    there = {_key(companion, token): token for token in shown_tokens(companion)}
    wanted = {_key(result, token): token for token in shown_tokens(result)}
    kind = type(companion).__name__
    strange = [row for row in {row for row, _ in wanted} if _differ(_prompt(result, row), _prompt(companion, row))]
    if strange:
        raise ValueError(
            f"the {kind} must be about the prompts of the result, and has other tokens in prompt {shorten(strange)}: give both "
            "calls the same input."
        )
    missing = [f"prompt {row}, position {position}" for row, position in wanted.keys() - there.keys()]
    if missing:
        raise ValueError(
            f"the {kind} must be about every token of the result, and has none at {shorten(sorted(missing), 3)}: give both "
            "calls the same input and positions."
        )
    other = [key for key, token in wanted.items() if _targets(result, token) != _targets(companion, there[key])]
    if other:
        raise ValueError(
            f"the {kind} must be about the targets of the result, and has others at {len(other)} of {len(wanted)} tokens: "
            "give both calls the same targets and incorrect_targets."
        )
    rows, columns = zip(*(there[key] for key in wanted), strict=True)
    return torch.tensor(rows), torch.tensor(columns)


def _prompt(tokens: IGLensResult | Companion, row: int) -> list[int] | None:
    """The ids of a prompt without its padding; None where they are not known."""
    if tokens.tokens is None or tokens.token_mask is None or row >= len(tokens.tokens):
        return None
    return tokens.tokens[row][tokens.token_mask[row]].tolist()


def _differ(one: list[int] | None, other: list[int] | None) -> bool:
    return one is not None and other is not None and one != other


def _key(tokens: IGLensResult | Companion, token: tuple[int, int]) -> tuple[int, int]:
    return token[0], int(tokens.positions[token])


def _targets(tokens: IGLensResult | Companion, token: tuple[int, int]) -> list[list[int]]:
    grids = [ids for ids in (tokens.target_ids, tokens.incorrect_ids) if ids is not None]
    return [[i for i in ids[token].tolist() if i >= 0] for ids in grids]


def _same_labels(name: str, companion: Companion, came: Sequence[str], wanted: Sequence[str]) -> None:
    if tuple(came) != tuple(wanted):
        raise ValueError(
            f"the {type(companion).__name__} must have the result's {name} ({shorten(wanted, 4)}); it has "
            f"{shorten(came, 4)}: give both calls the same layers, incl_mid and baseline."
        )


def _compared(result: IGLensResult, companion: LensComparison, places: tuple[Tensor, Tensor]) -> Iterable[MethodColumn]:
    """The columns that the credits and levels of the result do not already show."""
    shown = {"ig_lens", "logit_lens"} if companion.settings.get("metric") == result.metric else set[str]()
    take = _taker(places)
    for index, name in enumerate(companion.method_labels):
        if name in shown:
            continue
        expected = companion.expected_names[index]
        under = {
            what: take(grid[index])
            for what, grid in (
                ("sum", companion.sums),
                ("outside", companion.outside),
                ("expected", companion.expected),
                ("gap", companion.gap),
            )
        }
        meaning = companion.meanings[index] + (f"; expected: {expected}" if expected else "")
        yield MethodColumn(name, companion.units[index], meaning, take(companion.amounts[index]), under)


def _dla(result: IGLensResult, companion: DLAResult, places: tuple[Tensor, Tensor]) -> MethodColumn:
    """The parts that are segments of the result; all others together are what lies outside of segments."""
    labels = companion.part_labels
    missing = [label for label in result.segment_labels if label not in labels]
    if missing:
        raise ValueError(
            f'the DLAResult (unit {companion.unit!r}) has no part for the segments {shorten(missing, 4)}: use unit="block" '
            'for whole blocks, unit="sublayer" with incl_mid=True, or compare(), which has a share for every segment.'
        )
    inside = [labels.index(label) for label in result.segment_labels]
    others = [index for index in range(len(labels)) if index not in inside]
    take = _taker(places)
    amounts = take(companion.attribution[inside])
    return MethodColumn(
        name="dla",
        unit="logits",
        meaning=f"direct logit attribution, the final norm's scale frozen at the last state; outside: "
        f"{', '.join(labels[index] for index in others) or 'nothing'}; expected: {companion.quantity}, no probability",
        amounts=amounts,
        under={
            "sum": amounts.sum(1),
            "outside": take(companion.attribution[others]).sum(1),
            "expected": take(companion.logit),
            "gap": take(companion.gap),
        },
    )


def _taker(places: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    """From a grid `[..., batch, pos]` to the tokens of the result, `[token, ...]`."""

    def take(grid: Tensor) -> Tensor:
        return grid[..., places[0], places[1]].movedim(-1, 0)

    return take
