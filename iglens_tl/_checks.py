"""Argument checks that return the cleaned value, and the wording that all messages share.

Every message says what was required, what came, and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

METRICS = {"prob": "probability", "log_prob": "nats", "log_odds": "nats", "logit": "logits"}
"""Each metric and the unit of its values and credits."""

ESTIMATORS = ("prediction_aware", "midpoint", "trapezoid", "left", "right", "gauss_legendre")

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class UnsupportedModelError(ValueError):
    """The model is of a kind whose probability this package cannot read (an encoder, a missing final norm, ...)."""


class ReadoutMismatchError(ValueError):
    """Norm and unembedding, applied to the last state, do not give the model's own probability."""


class MissingActivationError(ValueError):
    """A cache lacks an activation that the call needs."""


class QuadratureError(ValueError):
    """An integral along a segment did not reach the tolerance within the gradients that were allowed."""


def shorten(items: Iterable[object], limit: int = 6) -> str:
    """Join items for a message; a long list is cut and its length said."""
    texts = [str(item) for item in items]
    if len(texts) <= limit:
        return ", ".join(texts)
    return ", ".join(texts[:limit]) + f", ... ({len(texts)} in all)"


def plain(value: Any) -> Any:
    """A number or array of numpy or torch as Python's own number or list; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`, else raise a ValueError that lists them."""
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")


def whole_number(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an int within the bounds; bools and floats are refused."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__}).")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} must be {bounds}, got {number}.")
    return number


def fraction(name: str, value: object) -> float:
    """Return `value` as a float in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < float(value) <= 1.0:
        raise ValueError(f"{name} must be a number in (0, 1], got {value!r}.")
    return float(value)


def memory_size(value: int | float | str | None) -> int | None:
    """Bytes meant by `max_memory`: an int, a string such as "2GB" or "512MiB", or None (choose for me)."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]?i?B?)\s*", value, flags=re.IGNORECASE)
        if match is None or match.group(2).upper() not in _SIZES:
            raise ValueError(f'max_memory must be bytes or a size such as "2GB" or "512MiB", got {value!r}.')
        amount: float = float(match.group(1)) * _SIZES[match.group(2).upper()]
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'max_memory must be bytes, a size such as "2GB", or None; got {value!r}.')
    else:
        amount = float(value)
    if not math.isfinite(amount) or amount < 1:
        raise ValueError(f"max_memory must be at least one byte, got {value!r}.")
    return int(amount)
