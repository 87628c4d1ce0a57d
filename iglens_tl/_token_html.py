"""A companion's result as HTML for a notebook: for each token, at most 8, a heading and a table."""

from __future__ import annotations

from collections.abc import Callable

from iglens_tl._fragment import fragment, line
from iglens_tl._layout import Token
from iglens_tl._tokens_asked import TokensAsked, heading, sections

SHOWN = 8  # tokens


def token_blocks(result: TokensAsked, title: str, body: Callable[[Token], str], note: str) -> str:
    """The whole fragment; `body` gives a token's table as HTML."""
    tokens, left = sections(result, SHOWN)
    count = int(result.mask.sum())
    parts = [part for token in tokens for part in (*(line(words) for words in heading(result, token)), body(token))]
    name = f"{type(result).__name__}: {title}, {count} token{'' if count == 1 else 's'}"
    return fragment(name, *parts, line(left), note=note)
