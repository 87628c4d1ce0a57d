"""What every companion's result carries beside its numbers: which tokens it is about, how it was asked, and its file.

A subclass names the axes of its tensors in `AXES`; shapes, types and masked entries are checked when a result is built,
and every contradiction is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from typing_extensions import Self

from iglens_tl import _files
from iglens_tl._fields import plain_json
from iglens_tl._layout import named, prompt, shown_tokens, where_read

_OWN_AXES: Mapping[str, tuple[str, ...]] = {
    "mask": ("batch", "pos"),
    "positions": ("batch", "pos"),
    "target_ids": ("batch", "pos", "width"),
    "incorrect_ids": ("batch", "pos", "incorrect_width"),
    "tokens": ("batch", "seq"),
    "token_mask": ("batch", "seq"),
}
_MAPPINGS = ("settings", "provenance")


@dataclass(frozen=True, eq=False, repr=False)
class TokensAsked:
    """The tokens that a result is about; the fields are those of `iglens_tl.results.IGLensResult`."""

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The axes of every tensor field of the subclass. An axis "state" is one longer than "segment"."""

    mask: Bool[Tensor, "batch pos"]
    positions: Int[Tensor, "batch pos"]
    target_ids: Int[Tensor, "batch pos width"]
    incorrect_ids: Int[Tensor, "batch pos incorrect_width"] | None
    tokens: Int[Tensor, "batch seq"] | None
    token_mask: Bool[Tensor, "batch seq"] | None
    token_strings: tuple[tuple[str, ...], ...] | None
    target_strings: tuple[tuple[str, ...], ...]
    incorrect_strings: tuple[tuple[str, ...], ...] | None
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, plain_json(name, getattr(self, name)))
        faults = [*_shape_faults(self), *_label_faults(self)]
        if faults:
            raise ValueError(f"the fields of this {type(self).__name__} do not agree: " + "; ".join(faults))

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file."""
        _files.write(path, type(self).__name__, dict(_tensors(self)), dict(_plain(self)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; needs neither a model nor TransformerLens.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: for a file of another kind or of a newer format, saying which.
        """
        tensors, plain = _files.read(path, cls.__name__)
        plain = {name: value if name in _MAPPINGS else _tuples(value) for name, value in plain.items()}
        found: dict[str, Any] = {**dict.fromkeys(_axes(cls)), **tensors, **plain}
        return cls(**found)

    def equals(self, other: object) -> bool:
        """Whether every field is the same: numbers exactly, NaN equal to NaN, labels, settings and provenance too."""
        if type(other) is not type(self) or dict(_plain(self)) != dict(_plain(other)):
            return False
        mine, theirs = dict(_tensors(self)), dict(_tensors(other))
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)


def _axes(kind: type[TokensAsked]) -> dict[str, tuple[str, ...]]:
    return {**_OWN_AXES, **kind.AXES}


def _tensors(result: TokensAsked) -> Iterator[tuple[str, Tensor]]:
    for name in _axes(type(result)):
        value = getattr(result, name)
        if value is not None:
            yield name, value


def _plain(result: TokensAsked) -> Iterator[tuple[str, Any]]:
    axes = _axes(type(result))
    for field in fields(result):
        if field.name not in axes:
            yield field.name, getattr(result, field.name)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _shape_faults(result: TokensAsked) -> Iterator[str]:
    sizes: dict[str, int] = {}
    for name, tensor in _tensors(result):
        axes = _axes(type(result))[name]
        if tensor.ndim == len(axes):
            for axis, size in zip(axes, tensor.shape, strict=True):
                sizes.setdefault(axis, size)
        wanted = [sizes.get(axis, axis) for axis in axes]
        if wanted != list(tensor.shape):
            yield f"{name} [{' '.join(axes)}] should be {wanted}, but has shape {list(tensor.shape)}"
        elif tensor.device.type != "cpu" or tensor.requires_grad:
            yield f"{name} must be a detached tensor on the CPU"
        elif tensor.dtype not in (torch.float64, torch.int64, torch.bool):
            yield f"{name} must be float64, int64 or bool, got {tensor.dtype}"
        elif tensor.dtype == torch.float64 and not _masked(tensor, axes, result.mask):
            yield f"{name} must be NaN where mask is False"


def _masked(tensor: Tensor, axes: tuple[str, ...], mask: Tensor) -> bool:
    if "batch" not in axes:
        return True
    at = axes.index("batch")
    return bool(tensor.movedim((at, at + 1), (0, 1))[~mask].isnan().all())


def _label_faults(result: TokensAsked) -> Iterator[str]:
    sizes = {
        axis: size
        for name, tensor in _tensors(result)
        if tensor.ndim == len(_axes(type(result))[name])
        for axis, size in zip(_axes(type(result))[name], tensor.shape, strict=True)
    }
    for axis, size in sizes.items():
        labels = getattr(result, f"{axis}_labels", None)
        if labels is not None and len(labels) != size:
            yield f"{axis}_labels needs {size} entries, has {len(labels)}"


def heading(result: TokensAsked, token: tuple[int, int]) -> list[str]:
    """Lines that say which token a table is about."""
    target = named(result.target_strings, result.target_ids, token)
    if result.incorrect_ids is not None and result.incorrect_strings is not None:
        target += f" less {named(result.incorrect_strings, result.incorrect_ids, token)}"
    first = [] if result.token_strings is None else [f"prompt  {prompt(result, token)}"]
    batch = f"prompt {token[0]}, " if result.mask.shape[0] > 1 else ""
    return [*first, f"target  {target}, {batch}{where_read(result, token)}"]


def sections(result: TokensAsked, most: int) -> tuple[list[tuple[int, int]], str]:
    """The tokens to be shown, at most so many, and a line about those that are not."""
    tokens = shown_tokens(result)
    left = len(tokens) - most
    return tokens[:most], f"... {left} more tokens: see to_dataframe()" if left > 0 else ""
