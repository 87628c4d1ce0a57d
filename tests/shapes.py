"""A type checker for jaxtyping that looks at array shapes and dtypes alone.

`pytest --jaxtyping-packages=iglens_tl,tests.shapes.check` (in `pyproject.toml`) runs the whole suite with every jaxtyping
annotation of the package enforced. A general checker would speak before our own refusals of wrong arguments, and beartype
draws from Python's random state, which the tests of untouched state watch.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jaxtyping


class ShapeError(TypeError):
    """An array is not of the annotated dtype or shape."""


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its array arguments and its array result are checked against their annotations."""
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not hints:
            hints.update(_hints(function))
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            _require(hints.get(name), value, f"{function.__qualname__}({name})")
        result = function(*args, **kwargs)
        _require(hints.get("return"), result, f"{function.__qualname__} -> result")
        return result

    return checked


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {"": None, **typing.get_type_hints(function)}
    except NameError:  # a name that is imported for type checkers only: such functions annotate no arrays
        return {"": None}


def _require(annotation: Any, value: Any, place: str) -> None:
    if not _fits(annotation, value):
        shape = getattr(value, "shape", None)
        got = type(value).__name__ if shape is None else f"{value.dtype} {tuple(shape)}"
        raise ShapeError(f"{place}: {annotation} is annotated, got {got}.")


def _fits(annotation: Any, value: Any) -> bool:
    if _is_array(annotation):
        return isinstance(value, annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType) and any(_is_array(member) for member in inner):
        return any(value is None if member is type(None) else _fits(member, value) for member in inner)
    if origin is tuple and isinstance(value, tuple) and len(inner) == len(value):
        return all(_fits(member, item) for member, item in zip(inner, value, strict=True))
    if origin in (list, Sequence) and inner and isinstance(value, (list, tuple)):
        return all(_fits(inner[0], item) for item in value)
    return True


def _is_array(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
