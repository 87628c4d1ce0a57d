"""How tokens, targets and units are written in a figure, and which tokens a figure is about."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from numbers import Integral

import torch

from iglens_tl._display import head, quoted, tail
from iglens_tl._fields import OfTokens, ResultFields
from iglens_tl._layout import Token, prompt, shown_tokens, token_at
from iglens_tl.plots._style import MINUS, escaped

_QUANTITIES = {"prob": "probability", "log_prob": "log-probability", "log_odds": "log-odds", "logit": "logit"}
_LONGEST = 18  # columns of a token in a label
_SHARES = {1: 18, 2: 16, 3: 10}  # of a token where a label is made of so many: together what a legend of 400 px holds
_ISOLATE, _POP = "\N{LEFT-TO-RIGHT ISOLATE}", "\N{POP DIRECTIONAL ISOLATE}"


def quantity(result: ResultFields) -> str:
    """What the values are, in words: `probability`, or `difference in probability`."""
    differs = result.incorrect_ids is not None or "difference" in result.settings
    return f"difference in {_QUANTITIES[result.metric]}" if differs else _QUANTITIES[result.metric]


def with_unit(words: str, unit: str) -> str:
    """`credit [probability]`; a unit that the words end in is not repeated."""
    return words if words.endswith(unit) else f"{words} [{unit}]"


def short(text: str, longest: int = _LONGEST) -> str:
    """A token in quotes, in at most so many columns; not yet escaped.

    A token of a script that runs from right to left is isolated, so that it turns nothing around that stands beside it.
    """
    label = head(quoted(text), longest)
    leftwards = any(unicodedata.bidirectional(character) in ("R", "AL") for character in label)
    return f"{_ISOLATE}{label}{_POP}" if leftwards else label


def target_of(result: OfTokens, token: Token, longest: int = _LONGEST) -> str:
    """The target that is read at a token, less what it is compared with; not yet escaped."""
    row, column = token
    grids = [grid for grid in (result.target_strings, result.incorrect_strings) if grid is not None]
    return f" {MINUS} ".join(short(grid[row][column], longest) for grid in grids)


def in_title(result: OfTokens, token: Token) -> str:
    """The target for a title, whose lines must not break within a token."""
    return target_of(result, token).replace(" ", "\N{NO-BREAK SPACE}")


def where(result: OfTokens, token: Token) -> list[str]:
    """Which token a figure is about: the end of the prompt, or the position alone where there is no text."""
    place = int(result.positions[token])
    if result.token_strings is None:
        return [f"read at position {place}"]
    return [f"after {tail(prompt(result, token), 38)}"]


def of_row(result: OfTokens, row: int | None) -> list[Token]:
    """The entries of one prompt that exist (of all prompts for None), in order.

    Raises:
        IndexError: for a prompt that there is not.
        ValueError: where there is no entry.
    """
    count = result.mask.shape[0]
    if row is not None:
        _whole("batch", row)
    if row is not None and not -count <= row < count:
        raise IndexError(f"batch must be 0 to {count - 1} (the prompts of this result), got {row}.")
    tokens = [token for token in shown_tokens(result) if row is None or token[0] == row % count]
    if not tokens:
        where = "this result" if row is None else f"prompt {row}"
        raise ValueError(f"{where} has no token to show: mask is False at all of its positions.")
    return tokens


def one_token(result: OfTokens, batch: int, pos: int) -> Token:
    """The entry at `[batch][pos]`; a negative index counts from the end.

    Raises:
        IndexError: outside the axes.
        ValueError: where `mask` is False.
    """
    found: list[int] = []
    for axis, index, size in zip(("batch", "pos"), (batch, pos), result.mask.shape, strict=True):
        _whole(axis, index)
        if not -size <= index < size:
            raise IndexError(f"{axis} must be 0 to {size - 1} on the {axis} axis of this result, got {index}.")
        found.append(index % size)
    token = (found[0], found[1])
    if not bool(result.mask[token]):
        there = result.mask.nonzero().tolist()
        raise ValueError(
            f"(batch, pos) {token} is masked: no target was read there (padding, or no such position). Choose one of "
            f"{there[:8]}{' ...' if len(there) > 8 else ''}."
        )
    return token


def _whole(axis: str, index: object) -> None:
    if isinstance(index, bool) or not isinstance(index, Integral):
        raise TypeError(f"{axis} must be a whole number, an index on the {axis} axis of the result; got {index!r}.")


def tick_texts(result: OfTokens, tokens: Sequence[Token], by: str) -> list[str]:
    """One label a token, escaped: the target, the token it is read at, or both, as `by` of `labelled_by` says."""
    longest = _SHARES[1 if by == "token" else 1 + (by == "both") + (result.incorrect_strings is not None)]
    texts: list[str] = []
    for token in tokens:
        at, target = short(token_at(result, token), longest), target_of(result, token, longest)
        texts.append(escaped({"target": target, "token": at, "both": f"{at} → {target}"}[by]))
    return texts


def place_names(result: OfTokens, tokens: Sequence[Token]) -> list[str]:
    """The positions as the names of an axis; one that was asked for again has the count behind it: `3`, `3 (2)`."""
    places = [int(result.positions[token]) for token in tokens]
    again = [places[: index + 1].count(place) for index, place in enumerate(places)]
    return [str(place) if count == 1 else f"{place} ({count})" for place, count in zip(places, again, strict=True)]


def labelled_by(result: OfTokens, tokens: Sequence[Token]) -> str:
    """What tells tokens apart: of an answer the targets; else the tokens, with the targets where these differ."""
    if result.token_strings is None or getattr(result, "answer", None) is not None:
        return "target"
    return "token" if same_target(result, tokens) and len(tokens) > 1 else "both"


def of_kind(figure: str, result: object, kind: type) -> None:
    """Refuse, for a figure, what is no result of the kind that it draws."""
    if not isinstance(result, kind):
        raise TypeError(f"plots.{figure} draws an {kind.__name__}; got {type(result).__name__}.")


def same_question(a: OfTokens, b: OfTokens) -> bool:
    """Whether two results are of the same tokens and positions, prompts (as far as both know them) and targets."""
    pairs = [(a.mask, b.mask), (a.positions, b.positions), (a.target_ids, b.target_ids)]
    if a.tokens is not None and b.tokens is not None:
        pairs.append((a.tokens, b.tokens))
    if (a.incorrect_ids is None) != (b.incorrect_ids is None):
        return False
    if a.incorrect_ids is not None and b.incorrect_ids is not None:
        pairs.append((a.incorrect_ids, b.incorrect_ids))
    return all(torch.equal(x, y) for x, y in pairs)


def same_target(result: OfTokens, tokens: Sequence[Token]) -> bool:
    """Whether all tokens are asked for one and the same target."""
    grids = [ids for ids in (result.target_ids, result.incorrect_ids) if ids is not None]
    return len({tuple(tuple(ids[token].tolist()) for ids in grids) for token in tokens}) == 1


def path_title(labels: Sequence[str]) -> str:
    """What the segments are: blocks, or blocks and parts of them."""
    return "block" if all(label.replace("-", "").isdigit() for label in labels) else "segment"
