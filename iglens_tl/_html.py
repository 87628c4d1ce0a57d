"""A result as a small HTML table for a notebook: no script, no style sheet, readable on a light and a dark page.

Colours are translucent and text takes the page's own colour. Every text goes through `html.escape`, so that a token
`<s>` stays visible and is no markup.
"""

import html as markup
from collections.abc import Sequence

from iglens_tl._display import head, tail
from iglens_tl._fields import ResultFields
from iglens_tl._layout import (
    Column,
    Token,
    grouped,
    headings,
    map_columns,
    map_note,
    profile_columns,
    profile_summary,
    reading,
    shown_tokens,
    title,
)

_ROWS = 40
_GROUPS = 12  # of segments, in a map
_LONGEST = 24  # characters of a token in a table
_GAIN, _LOSS = "#2684ff80", "#ff6e1e99"


def html(result: ResultFields) -> str:
    """The whole fragment; see `IGLensResult._repr_html_`."""
    tokens = shown_tokens(result)
    body = _profile(result, tokens[0]) if len(tokens) == 1 else _map(result, tokens)
    above = "".join(_named(name, tail(words, 120) if name == "prompt" else words) for name, words in headings(result))
    return (
        f'<div style="font-size:90%"><div><b>{markup.escape(title(result))}</b></div>{above}{body}'
        f'<div style="max-width:60em;opacity:.8">{markup.escape(reading(result))}</div></div>'
    )


def _named(name: str, words: str) -> str:
    return f'<div style="white-space:pre-wrap"><b>{markup.escape(name)}</b> {markup.escape(words)}</div>'


def _profile(result: ResultFields, token: Token) -> str:
    columns = profile_columns(result, token, grouped(result.segment_labels, _ROWS))
    credits = columns[1].numbers or []
    bars = Column("", [""] * len(credits), numbers=credits)
    plain = [column._replace(numbers=None) for column in columns]
    return table([*plain, bars]) + "".join(_named(*line) for line in profile_summary(result, token))


def _map(result: ResultFields, tokens: Sequence[Token]) -> str:
    shown = tokens[:_ROWS]
    groups = grouped(result.segment_labels, _GROUPS)
    missing = f"<div>... {len(tokens) - len(shown)} more tokens</div>" if len(tokens) > len(shown) else ""
    return f"{table(map_columns(result, shown, groups, levels=False))}{missing}<div>{markup.escape(map_note())}</div>"


def table(columns: Sequence[Column]) -> str:
    numbers = [abs(number) for column in columns for number in column.numbers or []]
    scale = max([0.0, *(number for number in numbers if number < float("inf"))])
    titles = "".join(f"<th{_align(column)}>{markup.escape(column.title)}</th>" for column in columns)
    cells = zip(*([_cell(column, row, scale) for row in range(len(column.cells))] for column in columns), strict=True)
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"


def _align(column: Column) -> str:
    return "" if column.right else ' align="left"'


def _cell(column: Column, row: int, scale: float) -> str:
    text = markup.escape(head(column.cells[row], _LONGEST))
    if not column.right:
        return f'<td align="left" style="text-align:left;white-space:pre">{text}</td>'
    styles = (
        [] if column.numbers is None else [*_bar(column.numbers[row], scale), *([] if text else ["min-width:14em"])]
    )
    style = f' style="{";".join(styles)}"' if styles else ""
    return f'<td align="right"{style}>{text}</td>'


def _bar(number: float, scale: float) -> list[str]:
    """The style of a bar behind a cell: from the middle to the right for a gain, to the left for a loss."""
    share = 50 * number / scale if scale > 0 else 0.0
    if not 0.25 <= abs(share) <= 50:
        return []
    start, stop = sorted((50.0, 50 + share))
    colour = _GAIN if number > 0 else _LOSS
    return [f"background:linear-gradient(90deg,#0000 {start:.1f}%,{colour} 0 {stop:.1f}%,#0000 0)"]
