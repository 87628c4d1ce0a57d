"""An attribution as a small HTML table for a notebook: one token as a profile over the segments, many as a map."""

from collections.abc import Sequence

from iglens_tl._display import tail
from iglens_tl._fields import ResultFields
from iglens_tl._fragment import ROWS, bars, fragment, line, named, table
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

_GROUPS = 12  # of segments, in a map


def html(result: ResultFields) -> str:
    """The whole fragment; see `IGLensResult._repr_html_`."""
    tokens = shown_tokens(result)
    body = _profile(result, tokens[0]) if len(tokens) == 1 else _map(result, tokens)
    above = [named(name, tail(words, 120) if name == "prompt" else words) for name, words in headings(result)]
    return fragment(title(result), *above, body, note=reading(result))


def _profile(result: ResultFields, token: Token) -> str:
    segments, credits, *levels = profile_columns(result, token, grouped(result.segment_labels, ROWS))
    drawn = [segments, credits._replace(numbers=None), bars(credits.numbers or []), *levels]
    return table(drawn) + "".join(named(*words) for words in profile_summary(result, token))


def _map(result: ResultFields, tokens: Sequence[Token]) -> str:
    shown = tokens[:ROWS]
    groups = grouped(result.segment_labels, _GROUPS)
    missing = f"... {len(tokens) - len(shown)} more tokens" if len(tokens) > len(shown) else ""
    return table(map_columns(result, shown, groups, levels=False)) + line(missing) + line(map_note())


def onset_html(
    name: str, kind: str, labels: Sequence[Sequence[str | None]], hidden_states: Sequence[Sequence[int | None]]
) -> str:
    """The onsets of every entry as a table; see `Onset`."""
    rows = [
        (str(batch), str(pos), label or "none", "" if hidden is None else str(hidden))
        for batch, (row, states) in enumerate(zip(labels, hidden_states, strict=True))
        for pos, (label, hidden) in enumerate(zip(row, states, strict=True))
    ]
    columns = zip(*rows[:ROWS], strict=True) if rows else [()] * 4
    titles = ("batch", "pos", kind, "hidden state")
    drawn = [Column(text, cells, right=text != kind) for text, cells in zip(titles, columns, strict=True)]
    return fragment(name, table(drawn), line(f"... {len(rows) - ROWS} more" if len(rows) > ROWS else ""))
