"""A split as text for a terminal, and as a small HTML table: for each token its largest parts and the sum of the others."""

from __future__ import annotations

import html as markup
import textwrap
from collections.abc import Mapping, Sequence

from torch import Tensor

from iglens_tl._display import SMALL, credit, head, pad, tail
from iglens_tl._fragment import bars, fragment, line, named
from iglens_tl._fragment import table as html_table
from iglens_tl._layout import Column, Token, headings, shown_tokens, who_columns
from iglens_tl._shares import ShareFields

_NAME = 11
_TOKENS = 8  # that are shown; more are counted
_HTML_ROWS = 20
_QUESTIONS = {
    "sequential": (
        "credit = the part's share in what can be read after its segment and could not before it, all parts of a segment "
        "arriving together; shares of a segment sum to its credit."
    ),
    "straight": (
        "credit = the part's share in the whole change from the first state to the last, on the straight line between "
        "them, all parts arriving together; shares sum to the change."
    ),
}
_CAUTION = (
    "Not a causal effect through later blocks. linear = gradient at the last state times the part; does not sum. "
    f"{SMALL} = below 0.00005."
)

Table = list[list[str]]


def text(shares: ShareFields, columns: Mapping[str, Tensor], width: int, max_rows: int) -> str:
    """The whole text; see `SplitResult.to_text`."""
    tokens = shown_tokens(shares.whole)
    lines = [head(title(shares), width)]
    lines += [
        pad(name, _NAME) + (tail if name == "prompt" else head)(words, width - _NAME) for name, words in _heads(shares)
    ]
    for token in tokens[:_TOKENS]:
        lines += ["", *([head(_who(shares, token), width)] if len(tokens) > 1 else [])]
        lines += [head(line, width) for line in _drawn(table(shares, columns, token, max_rows))]
    if len(tokens) > _TOKENS:
        lines += ["", f"... {len(tokens) - _TOKENS} more tokens"]
    return "\n".join([*(line.rstrip() for line in lines), "", *textwrap.wrap(reading(shares), max(width, 20))])


def html(shares: ShareFields, columns: Mapping[str, Tensor]) -> str:
    """The whole fragment; see `SplitResult._repr_html_`."""
    tokens = shown_tokens(shares.whole)
    blocks = [
        (f"<div><b>{markup.escape(_who(shares, token))}</b></div>" if len(tokens) > 1 else "")
        + _html_table(shares, columns, token)
        for token in tokens[:_TOKENS]
    ]
    more = line(f"... {len(tokens) - _TOKENS} more tokens" if len(tokens) > _TOKENS else "")
    above = [named(name, tail(words, 120)) for name, words in _heads(shares)]
    return fragment(title(shares), *above, *blocks, more, note=reading(shares))


def title(shares: ShareFields) -> str:
    """The first line: how much there is."""
    whole, n = shares.whole, len(shown_tokens(shares.whole))
    where = (
        f"{whole.n_segments} segment{'' if whole.n_segments == 1 else 's'} from {whole.state_labels[0]} to final_post"
    )
    return f"SplitResult: {n} token{'' if n == 1 else 's'}, {shares.path} path, {where}, by {shares.unit}"


def reading(shares: ShareFields) -> str:
    """What a credit means, and what it does not."""
    return f"{_QUESTIONS[shares.path]} {_CAUTION}"


def _heads(shares: ShareFields) -> list[tuple[str, str]]:
    mask = shares.whole.mask
    lines = [line for line in headings(shares.whole) if line[0] != "metric"]
    if not bool(mask.any()):
        return lines
    gap, error = (float(tensor[:, mask].abs().max()) for tensor in (shares.gap, shares.error))
    settings = (
        f"{shares.whole.metric} [{shares.metric_unit}], baseline {shares.whole.settings.get('baseline', 'embed')}"
    )
    nodes = int(shares.nodes[:, mask].sum())
    return [
        *lines,
        ("metric", settings),
        ("exactness", f"max |gap| {gap:.1g}, max error {error:.1g}, {nodes} gradients"),
    ]


def _who(shares: ShareFields, token: Token) -> str:
    return ", ".join(f"{column.title} {column.cells[0]}" for column in who_columns(shares.whole, [token]))


def table(shares: ShareFields, columns: Mapping[str, Tensor], token: Token, max_rows: int) -> Table:
    """Titles, then a row for each of the largest parts, for the rest, and for the sum."""
    at = (slice(None), *token)
    shown, rest = _largest(shares, token, max_rows)
    several = shares.whole.n_segments > 1
    rows: Table = [["part", *(["segment"] if several else []), *columns]]

    def row(name: str, segment: str, places: Sequence[int]) -> list[str]:
        numbers = [credit(float(tensor[at][list(places)].sum())) for tensor in columns.values()]
        return [name, *([segment] if several else []), *(SMALL if "nan" in number else number for number in numbers)]

    rows += [row(shares.parts[i].label, shares.whole.segment_labels[shares.parts[i].segment], [i]) for i in shown]
    if rest:
        rows.append(row(f"{len(rest)} others", "", rest))
    rows.append(["sum", *([""] if several else []), *_sums(columns, token)])
    return rows


def _largest(shares: ShareFields, token: Token, max_rows: int) -> tuple[list[int], list[int]]:
    """The parts of largest |credit|, and all others."""
    order = shares.attribution[(slice(None), *token)].abs().argsort(descending=True, stable=True).tolist()
    return order[:max_rows], order[max_rows:]


def _sums(columns: Mapping[str, Tensor], token: Token) -> list[str]:
    return [credit(float(tensor[(slice(None), *token)].nansum())) for tensor in columns.values()]


def _drawn(rows: Table) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    texts = 1 if rows[0][1] != "segment" else 2
    return [
        "  ".join(pad(cell, size, right=i >= texts) for i, (cell, size) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _html_table(shares: ShareFields, columns: Mapping[str, Tensor], token: Token) -> str:
    """The table with bars beside the credits; the rest and the sum have none."""
    titles, *rows = table(shares, columns, token, _HTML_ROWS)
    shown, _ = _largest(shares, token, _HTML_ROWS)
    credits: list[float] = shares.attribution[(shown, *token)].tolist()
    drawn: list[Column] = []
    for name, cells in zip(titles, zip(*rows, strict=True), strict=True):
        drawn.append(Column(name, cells, right=name in columns))
        if name == "credit":
            drawn.append(bars([*credits, *[0.0] * (len(rows) - len(credits))]))
    return html_table(drawn)
