"""What a user did wrong, in one line."""

from __future__ import annotations

import sys

BAD_INPUT = 2
"""The exit code for what cannot be done as it was asked."""


class BadInputError(ValueError):
    """What was asked cannot be done; the message is the one line that the user sees."""


def complain(error: Exception) -> int:
    """Say what is wrong in one line on stderr; gives the exit code."""
    print(f"iglens: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr, flush=True)
    return BAD_INPUT
