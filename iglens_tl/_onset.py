"""Where on its way a probability appears: the onset rules as tensor functions.

Each rule looks along the first axis and gives, for each token, the index of a segment or a state, -1 for none. A credit
or a value at or below `TINY`, the smallest normal float32, counts as nothing: the readout is a float32 softmax, so such
a number is its underflow, and a share of it would be 0/0 or noise.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from iglens_tl._fields import ResultFields

T = TypeVar("T")

# What each rule points at: a segment (something was written) or a state (something can be read).
RULES: Mapping[str, str] = {"mass": "segment", "crossing": "state", "peak": "segment", "rank": "state"}
WITH_FRACTION = ("mass", "crossing")
TINY = torch.finfo(torch.float32).tiny


def first_true(flags: Bool[Tensor, "n batch pos"]) -> Int[Tensor, "batch pos"]:
    """The first index along axis 0 at which a flag is set, -1 where none is."""
    return torch.where(flags.any(0), flags.to(torch.uint8).argmax(0), -1)


def true_to_the_end(flags: Bool[Tensor, "n batch pos"]) -> Bool[Tensor, "n batch pos"]:
    """Set from the first index after which a flag is never unset again."""
    return flags.to(torch.uint8).flip(0).cummin(0).values.flip(0).bool()


def mass_onset(credit: Float[Tensor, "segment batch pos"], fraction: float) -> Int[Tensor, "batch pos"]:
    """The first segment at which the cumulative |credit| reaches `fraction` of all |credit|."""
    mass = credit.abs().cumsum(0)
    # The last entry of the same running sum is the whole: a sum taken in another order could exceed it by a rounding,
    # and then fraction 1 would never be reached.
    whole = mass[-1]
    return first_true((mass >= fraction * whole) & (whole > TINY))


def crossing_onset(values: Float[Tensor, "state batch pos"], fraction: float) -> Int[Tensor, "batch pos"]:
    """The first state from which the value stays at or above `fraction` of the final value to the end."""
    final = values[-1]
    return first_true(true_to_the_end(values >= fraction * final) & (final > TINY))


def peak_onset(credit: Float[Tensor, "segment batch pos"]) -> Int[Tensor, "batch pos"]:
    """The (first) segment of the largest positive credit."""
    largest = credit.amax(0)
    return first_true((credit == largest) & (largest > TINY))


def rank_onset(is_top: Bool[Tensor, "state batch pos"]) -> Int[Tensor, "batch pos"]:
    """The first state from which the target stays the most probable token to the end."""
    return first_true(true_to_the_end(is_top))


def onset_index(result: ResultFields, rule: str, fraction: float = 0.5) -> Int[Tensor, "batch pos"]:
    """The onset of each token under one rule, -1 where there is none or `mask` is False.

    Raises:
        ValueError: for a rule that does not exist, a fraction outside (0, 1], or a rule that this metric cannot have.
    """
    _check(result, rule, fraction)
    found = {
        "mass": lambda: mass_onset(result.attribution, fraction),
        "crossing": lambda: crossing_onset(result.values, fraction),
        "peak": lambda: peak_onset(result.attribution),
        "rank": lambda: rank_onset(result.is_top),
    }[rule]()
    return torch.where(result.mask, found, -1)


def _check(result: ResultFields, rule: str, fraction: float) -> None:
    if rule not in RULES:
        raise ValueError(f"rule must be one of {list(RULES)}, got {rule!r}.")
    # `not (0 < fraction)` is also true of NaN.
    if isinstance(fraction, bool) or not (0 < fraction <= 1):
        raise ValueError(f"fraction must lie in (0, 1], got {fraction!r}.")
    if rule == "crossing" and not has_crossing(result):
        raise ValueError(
            'rule "crossing" asks when a value reaches a share of its final value, which only a probability has: '
            f"this result holds {describe_values(result)}, whose zero is arbitrary or whose sign is free. "
            'Use "mass", "peak" or "rank".'
        )


def has_crossing(result: ResultFields) -> bool:
    """Whether the values are probabilities: a share of a log-probability, a logit or a difference means nothing."""
    return result.metric == "prob" and result.incorrect_ids is None and not bool((result.values < 0).any())


def describe_values(result: ResultFields) -> str:
    """The values in words: "probability", or "differences of probability"."""
    difference = result.incorrect_ids is not None or (result.metric == "prob" and not has_crossing(result))
    return f"differences of {result.metric}" if difference else f"{result.metric} [{result.unit}]"


def rules_of(result: ResultFields) -> tuple[str, ...]:
    """The rules that this result can have, in the order in which they are always given."""
    return tuple(rule for rule in RULES if rule != "crossing" or has_crossing(result))


def state_hidden(result: ResultFields) -> tuple[int | None, ...]:
    """The hidden state index of every state: 0 for `0_pre`, then the end of each segment; None for any other state."""
    start = re.fullmatch(r"(\d+)_pre", result.state_labels[0])
    return (None if start is None else int(start.group(1)), *result.hidden_states)


def pick(names: Sequence[T], index: Int[Tensor, "batch pos"]) -> tuple[tuple[T | None, ...], ...]:
    """The name at each index, None where the index is -1."""
    return tuple(tuple(None if i < 0 else names[i] for i in row) for row in index.tolist())


def names_at(rule: str, result: ResultFields) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """The labels and the hidden state indices that an index under `rule` points into."""
    if RULES[rule] == "segment":
        return result.segment_labels, result.hidden_states
    return result.state_labels, state_hidden(result)
