"""How a token and a number are written for people, and how wide they are on a terminal."""

import math
import re
import unicodedata
from collections.abc import Iterable

SMALL = "·"  # what rounds to 0.0000: it is not shown as a zero, and does not draw the eye


def quoted(text: str) -> str:
    r"""A token in quotes, with spaces visible and whatever would break a table (newlines, controls) escaped.

    >>> print(quoted(" Paris"), quoted("a\nb"))
    ' Paris' 'a\nb'
    """
    return repr(text)


def cells(text: str) -> int:
    """The columns that a text takes on a terminal: two for a wide (CJK) character, none for a combining mark."""
    return sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, width: int, *, right: bool = False) -> str:
    """A text filled up with spaces to `width` columns, standing at the left, or at the `right`."""
    space = " " * (width - cells(text))
    return space + text if right else text + space


def head(text: str, width: int) -> str:
    """The start of a text, in at most `width` columns; "…" says that something is missing."""
    return text if cells(text) <= width else _taken(text, width - 1) + "…"


def tail(text: str, width: int) -> str:
    """The end of a text, in at most `width` columns; "…" says that something is missing."""
    return text if cells(text) <= width else "…" + _taken(reversed(text), width - 1)[::-1]


def pieces(text: str, width: int) -> list[str]:
    """The whole text in pieces of at most `width` columns, at least one; a piece ends after a space where it can.

    >>> pieces("two words", 6), pieces("abcde", 2), pieces("", 2)
    (['two ', 'words'], ['ab', 'cd', 'e'], [''])
    """
    found: list[str] = []
    while text:
        piece = _taken(text, width) or text[0]
        if len(piece) < len(text):
            piece = piece[: piece.rfind(" ") + 1] or piece
        found.append(piece)
        text = text[len(piece) :]
    return found or [""]


def joined(texts: Iterable[str]) -> str:
    """The texts of tokens as one; bytes that tokens split (`<0xE6>`) are put together to characters again.

    >>> joined(["<0xE6><0x9D>", "<0xB1>", "!"]), joined(["<0xE6><0x9D>", "!"]), joined(["<", "0xE6>"])
    ('東!', '<0xE6><0x9D>!', '<0xE6>')
    """
    found: list[str] = []
    raw = bytearray()
    for text in texts:
        for place, part in enumerate(re.split(r"<0x([0-9A-F]{2})>", text)):  # text, byte, text, byte, ..., text
            if place % 2:
                raw.append(int(part, 16))
            elif part:
                found += [_decoded(raw), part]
                raw.clear()
    return "".join([*found, _decoded(raw)])


def _decoded(raw: bytes | bytearray) -> str:
    text = raw.decode("utf-8", "surrogateescape")  # which writes a byte 0xE6 that is no character as U+DCE6
    return re.sub(r"[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


def _taken(characters: Iterable[str], width: int) -> str:
    taken: list[str] = []
    for character in characters:
        width -= _cells_of(character)
        if width < 0:
            break
        taken.append(character)
    return "".join(taken)


def level(value: float) -> str:
    """A value in a table: four decimals, "·" where they are all zero.

    >>> level(0.0003), level(1e-12), level(-277.2)
    ('0.0003', '·', '-277.2000')
    """
    text = f"{value:.4f}"
    return SMALL if float(text) == 0 else text


def credit(value: float) -> str:
    """A credit in a table: as `level`, always with its sign.

    >>> credit(0.7022), credit(-0.0003), credit(0.00004)
    ('+0.7022', '-0.0003', '·')
    """
    text = level(value)
    return text if text == SMALL or text.startswith("-") or math.isnan(value) else "+" + text


def precise(value: float) -> str:
    """A number in a sentence: five significant digits."""
    return f"{value:.5g}"
