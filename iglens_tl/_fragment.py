"""The pieces of a notebook's HTML: no script, no style sheet, readable on a light and a dark page, everything escaped.

Colours are translucent and text takes the page's own colour. Notebooks typeset what stands between dollars as mathematics, and
tokens are no mathematics: of the two classes of a fragment MathJax 2 (classic notebook) leaves one alone, MathJax 3 and 4
(JupyterLab, Notebook 7) the other. A table is made of columns; one with `numbers` has bars, to the right for a gain and to the
left for a loss, below the numbers where it has both. `signed` and `levels` make such columns, each on a scale of its own, so that
columns of different units can stand side by side::

    fragment("MyResult: 3 parts", table([Column("part", ["a", "b", "c"], right=False), *signed("drop", [0.1, -0.2, 0.0])]), note)
"""

from __future__ import annotations

import html as markup
import math
from collections.abc import Iterable, Sequence

from iglens_tl._display import credit, head, level
from iglens_tl._layout import Column

ROWS = 40
_LONGEST = 24  # characters of a token in a table
_GAIN, _LOSS = "#2684ff80", "#ff6e1e99"
_UNDER = " 0 100%/100% 25% no-repeat"  # no number on a colour: muted themes have no contrast to spare
_NO_MATHS = "tex2jax_ignore mathjax_ignore"
_WORDS = "white-space:pre-wrap;overflow-wrap:anywhere"  # a prompt need not have spaces


def fragment(title: str, *parts: str, note: str = "") -> str:
    """A whole fragment: a title, parts that are HTML already, and a note beneath."""
    above = f"<div><b>{markup.escape(title)}</b></div>"
    beneath = f'<div style="max-width:60em">{markup.escape(note)}</div>' if note else ""
    return f'<div class="{_NO_MATHS}" style="font-size:90%">{above}{"".join(parts)}{beneath}</div>'


def named(name: str, words: str) -> str:
    """A line of a name and what is said of it."""
    return f'<div style="{_WORDS}"><b>{markup.escape(name)}</b> {markup.escape(words)}</div>'


def line(words: str) -> str:
    """A line of text; nothing where there are no words."""
    return f'<div style="{_WORDS}">{markup.escape(words)}</div>' if words else ""


def signed(title: str, numbers: Iterable[float]) -> list[Column]:
    """Amounts that have a sign: a column of numbers, and one of bars."""
    amounts = list(numbers)
    return [Column(title, ["-" if math.isnan(number) else credit(number) for number in amounts]), bars(amounts)]


def levels(title: str, numbers: Iterable[float]) -> Column:
    """Amounts without bars: levels, sums, errors."""
    return Column(title, ["-" if math.isnan(number) else level(number) for number in numbers])


def bars(numbers: Sequence[float], scale: float | None = None) -> Column:
    """A column of bars alone; without a `scale`, the longest is the largest of them."""
    return Column("", [""] * len(numbers), numbers=numbers, scale=largest(numbers) if scale is None else scale)


def largest(numbers: Iterable[float]) -> float:
    """The largest finite |number|, 0 where there is none."""
    return max([0.0, *(abs(number) for number in numbers if math.isfinite(number))])


def table(columns: Sequence[Column]) -> str:
    """A table of columns; bars of columns without a scale of their own share one."""
    scale = largest(number for column in columns if column.scale is None for number in column.numbers or [])
    titles = "".join(f"<th{_attributes(column)}>{markup.escape(column.title)}</th>" for column in columns)
    cells = zip(*([_cell(column, row, scale) for row in range(len(column.cells))] for column in columns), strict=True)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<table style="margin:.3em 0 .8em"><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>'


def _attributes(column: Column, *styles: str) -> str:
    """Alignment both ways: style sheets of notebooks win over `align`, and code hosts take styles away."""
    side = "right" if column.right else "left"
    return f' align="{side}" style="{";".join([f"text-align:{side}", *styles])}"'


def _cell(column: Column, row: int, scale: float) -> str:
    text = markup.escape(head(column.cells[row], _LONGEST))
    styles = ["white-space:pre"] if " " in text or not column.right else []  # no line break within an interval
    if column.numbers is not None:
        bar = _bar(column.numbers[row], scale if column.scale is None else column.scale)
        styles += [f"background:{bar}{_UNDER if text else ''}"] if bar else []
        styles += [] if text else ["min-width:14em"]
    return f"<td{_attributes(column, *styles)}>{text}</td>"


def _bar(number: float, scale: float) -> str:
    """A bar as a background: from the middle to the right for a gain, to the left for a loss."""
    share = 50 * (number / scale) if scale > 0 and math.isfinite(number) else 0.0
    if abs(share) < 0.25:
        return ""
    start, stop = sorted((50.0, 50 + share))
    colour = _GAIN if number > 0 else _LOSS
    return f"linear-gradient(90deg,#0000 {start:.1f}%,{colour} 0 {stop:.1f}%,#0000 0)"
