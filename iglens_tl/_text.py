"""A result as text for a terminal."""

import math
import textwrap
from collections.abc import Sequence

from iglens_tl._display import cells, head, pad, pieces, tail
from iglens_tl._fields import ResultFields
from iglens_tl._layout import (
    Column,
    Rule,
    Token,
    credit_columns,
    grouped,
    grouped_by_mass,
    headings,
    map_note,
    profile_columns,
    profile_summary,
    reading,
    shown_tokens,
    sum_columns,
    title,
    who_columns,
)

_NAME = 11  # columns for the name of a heading
_CUT = ("prompt", "target", "incorrect")  # headings that hold tokens, whose spaces no line break may eat
_BAR = 40  # the most columns for bars


def text(result: ResultFields, width: int, max_rows: int | None, levels: bool, rule: Rule) -> str:
    """The whole text; see `IGLensResult.to_text`."""
    if len(shown_tokens(result)) == 1:
        body = _profile(result, width, max_rows, rule[1])
    else:
        body = _map(result, width, max_rows, levels, rule)
    lines = [head(title(result), width), *(_heading(*line, width) for line in headings(result)), "", *body]
    return "\n".join([*(line.rstrip() for line in lines), *textwrap.wrap(reading(result), max(width, 20))])


def _heading(name: str, words: str, width: int) -> str:
    room = max(width - _NAME, 20)
    if name == "answer":
        return pad(name, _NAME) + ("\n" + " " * _NAME).join(pieces(words, room))
    if name in _CUT:
        return pad(name, _NAME) + (tail if name == "prompt" else head)(words, room)
    return pad(name, _NAME) + ("\n" + " " * _NAME).join(textwrap.wrap(words, room))


def _profile(result: ResultFields, width: int, max_rows: int | None, fraction: float) -> list[str]:
    (token,) = shown_tokens(result)
    groups = grouped(result.segment_labels, max_rows or result.n_segments)
    columns = profile_columns(result, token, groups)
    lines = _lines(columns, "  ", width)
    room = min(width - cells(lines[0]) - 2, _BAR)
    drawn = ["", *bars(columns[1].numbers or [], room)]
    summary = [_heading(*line, width) for line in profile_summary(result, token, fraction)]
    return [*(f"{line}  {bar}" for line, bar in zip(lines, drawn, strict=True)), "", *summary, ""]


def bars(numbers: Sequence[float], room: int) -> list[str]:
    """One bar a number on a common scale, to the right of an axis for a gain and to the left for a loss."""
    up, down = max([0.0, *numbers]), max([0.0, *(-number for number in numbers)])
    span = up + down
    if room < 4 or span == 0 or not all(math.isfinite(number) for number in numbers):
        return [""] * len(numbers)

    def long(number: float) -> int:
        return round(max(number, 0) / span * (room - 1))

    left = long(down)
    # The two sides may both round up: what is over is taken from the right one.
    return [
        " " * (left - long(-number)) + "▒" * long(-number) + "│" + "█" * min(long(number), room - 1 - left)
        for number in numbers
    ]


def _map(result: ResultFields, width: int, max_rows: int | None, levels: bool, rule: Rule) -> list[str]:
    tokens = shown_tokens(result)
    if not tokens:
        return ["no token to show: mask is False everywhere", ""]
    shown = tokens[:max_rows]
    lines = _lines(_fitted(result, shown, width, levels, rule), " ", width)
    missing = len(tokens) - len(shown)
    return [
        *lines,
        *([f"... {missing} more tokens"] if missing else []),
        "",
        *textwrap.wrap(map_note(rule), max(width, 20)),
    ]


def _fitted(result: ResultFields, tokens: Sequence[Token], width: int, levels: bool, rule: Rule) -> list[Column]:
    """The columns of a map; where there is no room for two groups of segments, without the texts of the tokens."""
    who, sums = who_columns(result, tokens), sum_columns(result, tokens, rule)
    credits = _fitting(result, tokens, width, levels, [*who, *sums])
    if len(credits) == 1 + levels and result.n_segments > 1:
        who = [column for column in who if column.title != "token"]
        credits = _fitting(result, tokens, width, levels, [*who, *sums])
    return [*who, *credits, *sums]


def _fitting(
    result: ResultFields, tokens: Sequence[Token], width: int, levels: bool, beside: Sequence[Column]
) -> list[Column]:
    """As many groups of segments as the width has room for beside other columns, at least one."""
    room = width - cells(_lines(beside, " ", width)[0]) - 1
    count = max(1, min(result.n_segments, room // 2))
    while True:
        credits = credit_columns(result, tokens, grouped_by_mass(result, tokens, count), levels)
        over = cells(_lines(credits, " ", width)[0]) - room
        if over <= 0 or count == 1:
            return credits
        count = max(1, count - max(1, over // 20))  # a group takes up to about 20 columns


def _lines(columns: Sequence[Column], gap: str, width: int) -> list[str]:
    """A table: the titles, then a line a row; long tokens are cut, the more so where the terminal is narrow."""
    longest = 12 if width < 110 else 20
    stacked = [[column.title, *(head(cell, longest) for cell in column.cells)] for column in columns]
    widths = [max(cells(cell) for cell in column) for column in stacked]
    return [
        gap.join(pad(cell, size, right=column.right) for cell, size, column in zip(row, widths, columns, strict=True))
        for row in zip(*stacked, strict=True)
    ]
