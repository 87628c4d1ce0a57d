"""The prompt as a strip of tokens: those that were read are buttons, all others are text around them.

Where every target is the token that follows its position (an answer, the prompt's own next tokens, one target after the
end), the strip is the running text and a button is the token whose probability is attributed. Elsewhere a button is the
token at which a target is read, with the target beneath it.
"""

from __future__ import annotations

import html as markup
from collections.abc import Sequence
from typing import NamedTuple

from iglens_tl._display import joined, quoted
from iglens_tl._layout import Token, shown_tokens
from iglens_tl.results import IGLensResult


class Piece(NamedTuple):
    """A stretch of the strip; `entry` counts the result's tokens in the order of `shown_tokens`, None for plain text."""

    text: str
    entry: int | None = None
    target: str = ""  # written beneath, where the text is not the target itself


def visible(text: str) -> str:
    r"""A text whose line breaks, tabs and controls can be seen; spaces stay spaces.

    >>> visible(" a\n\tb\u202e")
    ' a↵⇥b\\u202e'
    """
    marks = {"\n": "↵", "\t": "⇥"}
    return "".join(marks.get(c) or (c if c.isprintable() else quoted(c)[1:-1]) for c in text)


def prompts(result: IGLensResult) -> list[tuple[int, list[Piece]]]:
    """Every prompt that has an entry, with its pieces in the order of reading."""
    entries: dict[int, list[tuple[int, Token]]] = {}
    for entry, token in enumerate(shown_tokens(result)):
        entries.setdefault(token[0], []).append((entry, token))
    return [(row, _pieces(result, row, found)) for row, found in entries.items()]


def _pieces(result: IGLensResult, row: int, found: Sequence[tuple[int, Token]]) -> list[Piece]:
    if result.token_strings is None:
        return [
            Piece(f"position {int(result.positions[token])}", entry, _target(result, token)) for entry, token in found
        ]
    texts, real = result.token_strings[row], _real(result, row)
    running = _running(result, row, found, real)
    at: dict[int, list[tuple[int, Token]]] = {}
    for entry, token in found:
        at.setdefault(int(result.positions[token]) + running, []).append((entry, token))
    pieces: list[Piece] = []
    for place in sorted({*real, *at}):  # the place behind the last token is that of what is predicted there
        if place not in at:
            pieces.append(Piece(texts[place]))
        for entry, token in at.get(place, []):
            pieces.append(_button(result, entry, token, texts, running))
    return _merged(pieces)


def _button(result: IGLensResult, entry: int, token: Token, texts: Sequence[str], running: bool) -> Piece:
    if running:
        return Piece(result.target_strings[token[0]][token[1]], entry)
    return Piece(texts[int(result.positions[token])], entry, _target(result, token))


def _target(result: IGLensResult, token: Token) -> str:
    row, column = token
    less = "" if result.incorrect_strings is None else f" \N{MINUS SIGN} {result.incorrect_strings[row][column]}"
    return result.target_strings[row][column] + less


def _real(result: IGLensResult, row: int) -> list[int]:
    """The places of the prompt that are no padding."""
    if result.token_mask is None:
        return list(range(len(result.token_strings[row]))) if result.token_strings is not None else []
    return result.token_mask[row].nonzero()[:, 0].tolist()


def _running(result: IGLensResult, row: int, found: Sequence[tuple[int, Token]], real: Sequence[int]) -> bool:
    """Whether each target is the token after the position at which it is read, or stands behind the whole prompt."""
    if result.tokens is None or result.incorrect_ids is not None or not real:
        return False
    tokens = dict(zip(real, result.tokens[row, list(real)].tolist(), strict=True))
    places = [int(result.positions[token]) + 1 for _, token in found]
    targets = [[i for i in result.target_ids[token].tolist() if i >= 0] for _, token in found]
    return len(set(places)) == len(places) and all(
        place == real[-1] + 1 or ids == [tokens.get(place)] for place, ids in zip(places, targets, strict=True)
    )


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Adjacent plain pieces as one, so that bytes which tokens split are characters again."""
    merged: list[list[Piece]] = []
    for piece in pieces:
        if piece.entry is None and merged and merged[-1][0].entry is None:
            merged[-1].append(piece)
        else:
            merged.append([piece])
    return [
        group[0] if group[0].entry is not None else Piece(joined(piece.text for piece in group)) for group in merged
    ]


def strip_html(pieces: Sequence[Piece], label: str) -> str:
    """The strip as HTML; every text is escaped."""
    inner = "".join(_piece_html(piece) for piece in pieces)
    return f'<div class="strip" role="group" aria-label="{markup.escape(label)}">{inner}</div>'


def _piece_html(piece: Piece) -> str:
    if piece.entry is None:
        lines = [markup.escape(visible(line)) for line in piece.text.split("\n")]
        return '<span class="context">' + "↵\n".join(lines) + "</span>"
    beneath = f'<span class="target">→ {_shown(piece.target)}</span>' if piece.target else ""
    attributes = f'type="button" class="token" data-entry="{piece.entry}" tabindex="-1" aria-pressed="false"'
    button = f"<button {attributes}>{_shown(piece.text)}{beneath}</button>"
    return button + ("\n" if "\n" in piece.text and not piece.target else "")


def _shown(text: str) -> str:
    """A token's text, escaped; one of spaces alone, or of nothing, has a sign for it."""
    blank = text.replace(" ", "␣") or "∅"
    return markup.escape(visible(text)) if text.strip(" ") else f'<span class="blank">{blank}</span>'
