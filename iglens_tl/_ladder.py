"""Numbers that go up the layers, as a long table, as text and as HTML: one table a token, one row a layer or state.

Shared by the causal results. Where there are more rows than fit, those of the largest `weight` are shown, in the order of
the layers, and the others are counted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from iglens_tl._display import head, pad
from iglens_tl._fragment import fragment, line, table
from iglens_tl._layout import Column, Token, shown_tokens
from iglens_tl._tables import objects, token_columns
from iglens_tl._tokens_asked import TokensAsked, heading

_TOKENS = 8  # tables in a printed result

Columns = Callable[[Token, Sequence[int]], list[Column]]
"""The columns of a token's table, for some of its rows."""


def long_columns(result: TokensAsked, name: str, labels: Sequence[str]) -> dict[str, Any]:
    """The columns of a long table but its numbers: tokens, and a categorical that keeps the order of the labels."""
    import pandas as pd

    k, n = len(labels), int(result.mask.sum())
    columns: dict[str, Any] = {key: column.repeat(k) for key, column in token_columns(result).items()}
    columns[name] = pd.Categorical.from_codes(list(range(k)) * n, categories=list(labels), ordered=True)
    return columns


def at_mask(result: TokensAsked, numbers: Tensor) -> Any:
    """Numbers `[row, batch, pos]` in the order of the long table."""
    return numbers.permute(1, 2, 0)[result.mask].reshape(-1).numpy()


def tiled(result: TokensAsked, entries: Sequence[Any]) -> Any:
    """One entry for each row of the table, for every token."""
    n = int(result.mask.sum())
    return np.tile(np.asarray(entries), n) if not isinstance(entries[0], str) else objects(list(entries) * n)


def text(result: TokensAsked, title: str, columns: Columns, weight: Tensor, note: str, width: int, rows: int) -> str:
    """The whole text.

    Args:
        result: whose tokens are shown.
        title: the first line.
        columns: of a token's table.
        weight: [row, batch, pos] how much a row matters.
        note: what the numbers mean and do not mean.
        width: of the note and the first lines.
        rows: the most rows of a table.
    """
    tokens = shown_tokens(result)
    lines = [head(title, width)]
    for token in tokens[:_TOKENS]:
        kept, left = _kept(weight[(slice(None), *token)], rows)
        lines += [*(head(words, width) for words in heading(result, token)), "", *_drawn(columns(token, kept)), ""]
        lines += [f"({left} rows of smaller change are left out: to_dataframe() has them)", ""] if left else []
    more = [f"... {len(tokens) - _TOKENS} more tokens: see to_dataframe()", ""] if len(tokens) > _TOKENS else []
    return "\n".join([*lines, *more, *textwrap.wrap(note, max(width, 20))])


def html(result: TokensAsked, title: str, columns: Columns, weight: Tensor, note: str, rows: int = 40) -> str:
    """The same as a fragment of HTML."""
    tokens = shown_tokens(result)
    blocks: list[str] = []
    for token in tokens[:_TOKENS]:
        kept, left = _kept(weight[(slice(None), *token)], rows)
        blocks += [line(head(words, 120)) for words in heading(result, token)]
        blocks.append(table(columns(token, kept)))
        blocks += [line(f"{left} rows of smaller change are left out")] if left else []
    more = f"... {len(tokens) - _TOKENS} more tokens" if len(tokens) > _TOKENS else ""
    return fragment(title, *blocks, line(more), note=note)


def _kept(weight: Tensor, rows: int) -> tuple[list[int], int]:
    order = weight.nan_to_num(0).argsort(descending=True, stable=True)[:rows].tolist()
    return sorted(order), len(weight) - len(order)


def _drawn(columns: Sequence[Column]) -> list[str]:
    widths = [max(len(cell) for cell in (column.title, *column.cells)) for column in columns]
    rows = zip(*((column.title, *column.cells) for column in columns), strict=True)
    return [
        "  ".join(
            pad(cell, size, right=column.right) for cell, size, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in rows
    ]
