"""The fields of a result, and the check that they agree with each other.

`ResultFields` carries data and what follows from it alone; `results.IGLensResult` adds the members a user calls. The
renderers (`_tables`, `_text`, `_html`, `_files`) read `ResultFields`, so that imports run downwards only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

UNITS: Mapping[str, str] = {"prob": "probability", "log_prob": "nats", "log_odds": "nats", "logit": "logits"}

# The axes of every tensor field. Sizes are learnt from the first field that has the axis, in this order.
AXES: Mapping[str, tuple[str, ...]] = {
    "attribution": ("segment", "batch", "pos"),
    "values": ("segment+1", "batch", "pos"),
    "total": ("batch", "pos"),
    "gap": ("batch", "pos"),
    "model_value": ("batch", "pos"),
    "is_top": ("segment+1", "batch", "pos"),
    "mask": ("batch", "pos"),
    "positions": ("batch", "pos"),
    "target_ids": ("batch", "pos", "width"),
    "incorrect_ids": ("batch", "pos", "incorrect_width"),
    "steps": ("segment", "step", "batch", "pos"),
    "tokens": ("batch", "seq"),
    "token_mask": ("batch", "seq"),
}
_OPTIONAL = ("model_value", "incorrect_ids", "steps", "tokens", "token_mask")
_FLAGS = ("is_top", "mask", "token_mask")
_IDS = ("positions", "target_ids", "incorrect_ids", "tokens")
_NAN_WHERE_MASKED = ("attribution", "values", "total", "gap")


class OfTokens(Protocol):
    """What every result says of the tokens that it is about; see `ResultFields` for shapes."""

    @property
    def mask(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def target_ids(self) -> Tensor: ...
    @property
    def incorrect_ids(self) -> Tensor | None: ...
    @property
    def tokens(self) -> Tensor | None: ...
    @property
    def token_mask(self) -> Tensor | None: ...
    @property
    def token_strings(self) -> tuple[tuple[str, ...], ...] | None: ...
    @property
    def target_strings(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def incorrect_strings(self) -> tuple[tuple[str, ...], ...] | None: ...


@dataclass(frozen=True, eq=False, repr=False)
class ResultFields:
    """What one attribution found; see `iglens_tl.results.IGLensResult` for the meaning of the fields."""

    attribution: Float[Tensor, "segment batch pos"]
    values: Float[Tensor, "segment+1 batch pos"]
    total: Float[Tensor, "batch pos"]
    gap: Float[Tensor, "batch pos"]
    model_value: Float[Tensor, "batch pos"] | None
    is_top: Bool[Tensor, "segment+1 batch pos"]
    mask: Bool[Tensor, "batch pos"]
    positions: Int[Tensor, "batch pos"]
    target_ids: Int[Tensor, "batch pos width"]
    incorrect_ids: Int[Tensor, "batch pos incorrect_width"] | None
    steps: Float[Tensor, "segment step batch pos"] | None
    tokens: Int[Tensor, "batch seq"] | None
    token_mask: Bool[Tensor, "batch seq"] | None
    token_strings: tuple[tuple[str, ...], ...] | None
    target_strings: tuple[tuple[str, ...], ...]
    incorrect_strings: tuple[tuple[str, ...], ...] | None
    state_labels: tuple[str, ...]
    segment_labels: tuple[str, ...]
    hidden_states: tuple[int | None, ...]
    metric: str
    estimator: str
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    answer: str | None = None

    def __post_init__(self) -> None:
        _canonicalise(self)
        _raise_all("tensors", _tensor_faults(self))
        sizes, faults = _measure(self)
        _raise_all("shapes", faults)
        _raise_all("labels", [*_label_faults(self, sizes), *_string_faults(self, sizes)])
        _raise_all("masked entries", _mask_faults(self, sizes))

    @property
    def unit(self) -> str:
        """The unit of a credit: `"probability"`, `"nats"` or `"logits"`."""
        return UNITS[self.metric]

    @property
    def n_segments(self) -> int:
        """How many segments the path has; there is one state more."""
        return self.attribution.shape[0]


def _raise_all(what: str, faults: Sequence[str]) -> None:
    """One error that names every fault, so that a caller mends them in one go."""
    if faults:
        raise ValueError(f"the {what} of this result do not agree: " + "; ".join(faults))


def _canonicalise(result: ResultFields) -> None:
    """Labels as tuples and settings as plain JSON values, so that what is saved is what is loaded."""
    plain = {name: plain_json(name, getattr(result, name)) for name in ("settings", "provenance")}
    for name, value in {**labels_as_tuples(plain_fields(result)), **plain}.items():
        object.__setattr__(result, name, value)


def labels_as_tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The labels and strings among the fields, as the tuples that they are declared to be."""
    labels = {name: tuple(plain[name]) for name in ("state_labels", "segment_labels", "hidden_states")}
    grids = {name: plain[name] for name in ("token_strings", "target_strings", "incorrect_strings")}
    return {**labels, **{name: rows and tuple(tuple(row) for row in rows) for name, rows in grids.items()}}


def plain_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as strict JSON gives it back; refused where it cannot hold it."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must hold what strict JSON can (strings, finite numbers, booleans, None, lists, mappings), "
            f"so that a result can be saved: {error}. Pass str(x) of anything else."
        ) from error
    if not isinstance(plain, dict):
        raise ValueError(f"{name} must be a mapping of names to JSON values, got {type(value).__name__}.")
    return plain


def _tensor_faults(result: ResultFields) -> list[str]:
    faults = {name: _tensor_fault(name, getattr(result, name)) for name in AXES}
    return [f"{name} {fault}" for name, fault in faults.items() if fault is not None]


def _tensor_fault(name: str, value: object) -> str | None:
    if value is None and name in _OPTIONAL:
        return None
    if not isinstance(value, Tensor):
        return f"must be a tensor, got {type(value).__name__}"
    wanted = torch.bool if name in _FLAGS else torch.int64 if name in _IDS else torch.float64
    if value.dtype != wanted:
        return f"must be {wanted}, got {value.dtype}"
    if value.device.type != "cpu" or value.requires_grad:
        return "must be a detached tensor on the CPU"
    return None


def _measure(result: ResultFields) -> tuple[dict[str, int], list[str]]:
    """The size of every axis, and each field whose shape contradicts the fields before it."""
    sizes: dict[str, int] = {}
    faults: list[str] = []
    for name, axes in AXES.items():
        tensor = getattr(result, name)
        if tensor is None:
            continue
        if tensor.ndim == len(axes):
            for axis, size in zip(axes, tensor.shape, strict=True):
                sizes.setdefault(axis, size)
            if axes[0] == "segment":
                sizes.setdefault("segment+1", sizes["segment"] + 1)
        wanted = [sizes.get(axis, axis) for axis in axes]
        if wanted != list(tensor.shape):
            faults.append(f"{name} [{' '.join(axes)}] should be {wanted}, but has shape {list(tensor.shape)}")
    return sizes, faults


def _label_faults(result: ResultFields, sizes: Mapping[str, int]) -> list[str]:
    faults: list[str] = []
    for name, axis in (("state_labels", "segment+1"), ("segment_labels", "segment"), ("hidden_states", "segment")):
        labels = getattr(result, name)
        if len(labels) != sizes[axis]:
            faults.append(f"{name} needs {sizes[axis]} entries ({axis}), has {len(labels)}")
        elif name != "hidden_states" and len(set(labels)) != len(labels):
            faults.append(f"{name} names something twice: {list(labels)}")
    if result.metric not in UNITS:
        faults.append(f"metric must be one of {list(UNITS)}, got {result.metric!r}")
    return faults


def _string_faults(result: ResultFields, sizes: Mapping[str, int]) -> list[str]:
    batch, pos = sizes["batch"], sizes["pos"]
    faults = [
        _grid_fault("target_strings", result.target_strings, batch, pos),
        _grid_fault("token_strings", result.token_strings, batch, sizes.get("seq")),
        _grid_fault("incorrect_strings", result.incorrect_strings, batch, pos),
    ]
    if (result.incorrect_strings is None) != (result.incorrect_ids is None):
        faults.append("incorrect_ids and incorrect_strings come together or not at all")
    return [fault for fault in faults if fault is not None]


def _grid_fault(name: str, rows: Sequence[Sequence[str]] | None, height: int, width: int | None) -> str | None:
    if rows is None:
        return None
    lengths = [len(row) for row in rows]
    if width is None:
        width = lengths[0] if lengths else 0
    if lengths == [width] * height:
        return None
    return f"{name} needs {height} rows of {width} strings, has rows of {lengths}"


def _mask_faults(result: ResultFields, sizes: Mapping[str, int]) -> list[str]:
    mask = result.mask
    faults = [f"{name} must be NaN where mask is False" for name in _NAN_WHERE_MASKED if not _nan_where(result, name)]
    if (result.positions[~mask] != -1).any():
        faults.append("positions must be -1 where mask is False")
    here = result.positions[mask]
    seq = sizes.get("seq", len(result.token_strings[0]) if result.token_strings else None)
    if (here < 0).any() or (seq is not None and (here >= seq).any()):
        faults.append(f"positions must lie on the token axis (length {seq}) where mask is True, got {here.tolist()}")
    return faults


def _nan_where(result: ResultFields, name: str) -> bool:
    tensor: Tensor = getattr(result, name)
    return bool(tensor[..., ~result.mask].isnan().all())


def map_tensors(result: ResultFields, function: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor | None]:
    """Every tensor field through `function(name, tensor)`; fields that are None stay None."""
    found = {name: getattr(result, name) for name in AXES}
    return {name: None if tensor is None else function(name, tensor) for name, tensor in found.items()}


def plain_fields(result: ResultFields) -> dict[str, Any]:
    """Every field that is no tensor, by name."""
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name not in AXES}
