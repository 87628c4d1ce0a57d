"""What a caller may ask about: the two named targets and the event "any of these tokens"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Target(Enum):
    """A target that depends on the position."""

    TOP = "top"
    """The model's most probable next token at the position."""
    NEXT = "next"
    """The token that follows in the input."""

    def __repr__(self) -> str:
        return self.name


TOP = Target.TOP
NEXT = Target.NEXT


@dataclass(frozen=True)
class TokenSet:
    """The event "the next token is any of these": their probabilities add.

    Args:
        tokens: strings that are exactly one token each, or token ids; at least one, none twice.

    >>> TokenSet([" Paris", " paris"])
    TokenSet(tokens=(' Paris', ' paris'))
    """

    tokens: tuple[str | int, ...]

    def __init__(self, tokens: Iterable[str | int]) -> None:
        if isinstance(tokens, (str, bytes)):
            raise TypeError(
                f"TokenSet takes a list of tokens, got the single string {tokens!r}; write TokenSet([...])."
            )
        members = tuple(tokens)
        if not members:
            raise ValueError("TokenSet needs at least one token, got none.")
        object.__setattr__(self, "tokens", members)
