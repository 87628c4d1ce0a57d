"""Two runs, credit by credit: `difference(clean, corrupted)`, `difference(fine_tuned, base)`.

Both results must speak of the same thing: the same states and segments, positions, targets, metric, estimator and
settings. The difference is again an `IGLensResult` (unit unchanged) whose credits sum to the difference of the totals.

What it does not claim: that the difference of a layer's credits is that layer's effect; states above a change differ
because of the change below them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl.results import IGLensResult

_SAME = ("metric", "estimator", "state_labels", "segment_labels", "hidden_states", "target_ids", "incorrect_ids")
_SETTINGS = ("baseline", "incl_mid", "n_steps", "lens", "readout_dtype")


def difference(result_a: IGLensResult, result_b: IGLensResult) -> IGLensResult:
    """`result_a` less `result_b`, credit by credit.

    Args:
        result_a, result_b: results of the same question on two runs (another prompt of the same positions, hooks, other
            weights).

    Returns:
        An `IGLensResult` in the same unit: `attribution`, `values`, `total`, `model_value` and `steps` are differences,
        `gap` is that of the difference; an entry exists where both exist. `tokens` are those of `result_a`, `is_top` is
        where both have it, and `settings["difference"]` holds the settings and provenance of both.

    Raises:
        TypeError: for anything but two `IGLensResult`s.
        ValueError: where the two answer different questions; everything that differs is named.
    """
    for name, result in (("result_a", result_a), ("result_b", result_b)):
        if not isinstance(result, IGLensResult):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers pass anything
            raise TypeError(f"difference takes two IGLensResults; {name} is {type(result).__name__}.")
    faults = list(_what_differs(result_a, result_b))
    if faults:
        raise ValueError(
            f"the two results answer different questions: {'; '.join(faults)}. Make both with the same targets, positions, "
            "layers, metric and baseline."
        )
    mask = result_a.mask
    total = result_a.total - result_b.total
    attribution = result_a.attribution - result_b.attribution
    both = {"a": _origin(result_a), "b": _origin(result_b)}
    return replace(
        result_a,
        attribution=attribution,
        values=result_a.values - result_b.values,
        total=total,
        gap=torch.where(mask, attribution.sum(0) - total, torch.nan),
        model_value=_less(result_a.model_value, result_b.model_value),
        steps=_less(result_a.steps, result_b.steps),
        is_top=result_a.is_top & result_b.is_top,
        settings={**result_a.settings, "difference": both},
    )


def _origin(result: IGLensResult) -> dict[str, Any]:
    return {"settings": dict(result.settings), "provenance": dict(result.provenance)}


def _less(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a - b


def _what_differs(a: IGLensResult, b: IGLensResult) -> list[str]:
    """Every field and setting that must be the same and is not, with both values."""
    pairs: dict[str, tuple[Any, Any]] = {name: (getattr(a, name), getattr(b, name)) for name in _SAME}
    pairs["unit"] = (a.unit, b.unit)
    pairs["positions"] = (a.positions, b.positions)
    pairs["mask"] = (a.mask, b.mask)
    pairs.update({name: (a.settings.get(name), b.settings.get(name)) for name in _SETTINGS})
    return [f"{name} ({_short(x)} and {_short(y)})" for name, (x, y) in pairs.items() if not _equal(x, y)]


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and bool((x == y).all())
    return type(x) is type(y) and x == y


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)}: {shorten(value.flatten().tolist(), 6)}"
    return shorten(value, 4) if isinstance(value, tuple) else repr(value)
