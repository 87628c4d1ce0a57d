"""Inside a layer: a credit shared exactly among attention, MLP, heads, neurons, or any additive parts.

The residual stream grows by addition: `h_j - h_{j-1} = sum_i c_i`. Along the straight segment between the two states the
integrated gradient of the readout `f` (see `ig_lens`) is linear in the change, so

    credit of part i = <integral_0^1 grad f(h_{j-1} + a (h_j - h_{j-1})) da, c_i>

and the credits of a segment's parts sum to the segment's own, whatever the order of the parts: Aumann and Shapley's value
on the path. Summed over all layers and parts they give the change of the model's own probability. It is direct logit
attribution's counterpart in probability; with `metric="logit"` and no final norm it is direct logit attribution.

Sign: positive raised the target. Unit: the metric's. Not claimed: a causal effect through the blocks above.

Two paths answer two questions. `"sequential"` (the paper's): of what can be read after this block and could not be read
before it, which part brought how much? `"straight"`: the whole way from the baseline to the last state as one segment,
in which blocks have no order either: which part moved the last state towards the target? The second is closer to what
happens when a part is taken out of the last state.

Reference: Nguyen, "IG-Lens", arXiv 2606.29693; Aumann and Shapley, "Values of Non-Atomic Games" (1974), by way of
Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks" (2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from iglens_tl._asked import refuse_sets, settings_of
from iglens_tl._checks import METRICS, QuadratureError, memory_size, one_of, shorten, whole_number
from iglens_tl._core.averaging import Averages, average_gradients, gradients_at
from iglens_tl._core.levels import Levels
from iglens_tl._core.segments import Path
from iglens_tl._division import Shares, Stretch, longest, row_slices, share
from iglens_tl._layout import merged_label
from iglens_tl._model.parts import UNITS
from iglens_tl._orders import orders
from iglens_tl._plan import StatePlan
from iglens_tl._request import Lens, Request
from iglens_tl._shares import PATHS, Part
from iglens_tl._stretches import stretches
from iglens_tl._trajectory import Trajectory, ordinary_tensors, read_checked, trajectory
from iglens_tl.attribution import result_of
from iglens_tl.results import IGLensResult
from iglens_tl.splits import SplitResult
from iglens_tl.targets import TOP

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""Default tolerances by the readout's dtype: in float32 the rounding of large states alone leaves 5e-5."""


@ordinary_tensors()
def split(
    model_or_cache: Any,
    input: Any = None,
    *,
    unit: str | Mapping[str, Any] = "sublayer",
    path: str = "sequential",
    keep: int = 100,
    tolerance: float | None = None,
    max_nodes: int = 8193,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    cache: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    metric: str = "prob",
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> SplitResult:
    """Share the credit of each segment among the parts that its change is the sum of.

    Args:
        model_or_cache, input: as in `ig_lens`. A cache must hold what the parts are made of (a full cache does); what is
            missing is named.
        unit: "sublayer" (attention and MLP), "head" (heads, the attention's bias, and the MLP), "neuron" (attention, the
            MLP's neurons and its bias), "block", or parts of your own: `{segment label: {name: tensor}}`, where a tensor is
            `[batch, pos, d_model]` for the selected positions or for the whole input; with one segment `{name: tensor}`.
        path: "sequential" (a segment a block, as in `ig_lens`) or "straight" (one segment from the baseline to the last
            state, whose parts are those of all blocks: no order among blocks).
        keep: of the neurons of a layer, how many are named; the others are summed into `3_mlp_others`.
        tolerance: of the quadrature, for each part, in the metric's unit; None is 1e-6 for a float64 readout.
        max_nodes: gradients that a segment of a token may take.
        targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, metric, logits, attention_mask, prepend_bos:
            as in `ig_lens`. A first segment from another baseline is one part, `base`; from "zero", the embeddings (and
            what comes before the first chosen state).
        lens: as in `ig_lens`. A part is credited with what the lens of the segment's end makes of it, exactly for a lens
            that is affine; the change from one lens to the next is a part `lens`, and what the lens bends, `remainder`.
        dtype: of the readout; None is float64.
        max_memory: as in `ig_lens`, half of it for the gradients of the segments that are worked on (more where a single
            segment needs more than 64 of them). On top come what is made of the parts of a segment (`[heads, rows, d_model]` for
            heads) and the averaged gradients, `[segment, rows, d_model]` in float64.

    Returns:
        A `SplitResult`. What the model's own additions round off is a part `rounding`; what parts of your own leave of a
        segment, a part `remainder`.

    Raises:
        QuadratureError: where `max_nodes` gradients do not reach the tolerance; it names the segments.
        UnsupportedModelError: where a model does not expose the parts, or they do not add up to what its blocks add.
        ValueError, TypeError: as `ig_lens`.
    """
    one_of("metric", metric, tuple(METRICS))
    one_of("path", path, PATHS)
    if not isinstance(unit, Mapping):
        one_of("unit", unit, UNITS)
    keep, max_nodes = whole_number("keep", keep, 1), whole_number("max_nodes", max_nodes, 9)
    tolerance = _tolerance(tolerance, dtype)
    budget = memory_size(max_memory)
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline,
        None if lens is None else _in_own_dtype(lens, dtype), dtype or torch.float64, logits, attention_mask, prepend_bos,
    )  # fmt: skip
    if metric == "logit":
        refuse_sets(request, 'metric="logit"')
    run = trajectory(request, None if isinstance(unit, Mapping) else unit, budget)
    levels = read_checked(run, metric)
    way = run if path == "sequential" else _straightened(run)
    stretched = stretches(run, way, unit, request.lens)
    slices = row_slices(run.path.n_tokens, run.host.d_model, run.readout.budget)
    averages = _averages(way, metric, stretched, slices, tolerance, max_nodes)
    last = gradients_at(run.readout, run.path, run.path.n_segments, metric)
    shares = [
        share(stretch, i, torch.stack([averages.directions[i], last]), slices, keep)
        for i, stretch in enumerate(stretched)
    ]
    settings = {"metric": metric, "n_steps": 1, **settings_of(request, run)}
    whole = _whole(way, levels, metric, settings, path)
    return _split_of(run, levels, whole, shares, averages, unit, path, metric, tolerance)


def _tolerance(tolerance: Any, dtype: torch.dtype | None) -> float:
    if tolerance is None:
        return TOLERANCE.get(dtype or torch.float64, 1e-6)
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < float(tolerance) < float("inf"):
        raise ValueError(f"tolerance must be a positive number, in the metric's unit; got {tolerance!r}.")
    return float(tolerance)


def _in_own_dtype(lens: Lens, dtype: torch.dtype | None) -> Lens:
    """A lens gets the rows that it gets from `ig_lens`: float32 where no dtype is asked for."""

    def mapped(rows: Tensor, index: int) -> Tensor:
        result: Any = lens(rows.to(dtype or torch.float32), index)
        return result.to(rows.dtype) if isinstance(result, Tensor) else result

    mapped.__qualname__ = getattr(lens, "__qualname__", type(lens).__name__)
    return mapped


def _straightened(run: Trajectory) -> Trajectory:
    """The same run with nothing on its path but the first state and the last."""
    states = run.states
    halves = (states.halves[0], states.halves[-1]) if states.base == "embed" else states.halves[-1:]
    ends = Path((run.path.states[0], run.path.states[-1]), run.path.groups)
    return replace(
        run, path=ends, stream=(run.stream[0], run.stream[-1]), states=StatePlan(states.n_layers, halves, states.base)
    )


def _averages(
    run: Trajectory,
    metric: str,
    stretched: list[Stretch],
    slices: list[slice],
    tolerance: float,
    max_nodes: int,
) -> Averages:
    """The averaged gradients, or an error that names the segments which did not converge."""
    scale = torch.stack([longest(stretch, slices) for stretch in stretched])
    with tqdm(desc="gradients", unit="", delay=2, leave=False, disable=None) as bar:
        found = average_gradients(run.readout, run.path, metric, scale, tolerance, max_nodes, bar.update)
    bad = ~(found.error <= tolerance)
    if not bool(bad.any()):
        return found
    worst = found.error.nan_to_num(torch.inf).amax(1)
    named = [f"{run.states.segment_labels[i]} ({worst[i]:.2g})" for i in bad.any(1).nonzero()[:, 0].tolist()]
    raise QuadratureError(
        f"the integral along {len(named)} of {run.path.n_segments} segments did not reach {tolerance:g} {METRICS[metric]} with "
        f"{int(found.nodes.max())} gradients: {shorten(named)}. Allow more (max_nodes={2 * max_nodes}) or ask for less "
        f"(tolerance={float(worst.max()) * 2:.1g})"
        + ("." if run.readout.dtype == torch.float64 else "; dtype=None reads in float64.")
    )


def _whole(run: Trajectory, levels: Levels, metric: str, settings: dict[str, Any], path: str) -> IGLensResult:
    """The attribution that is shared out: of the run's own segments, or of the straight way alone."""
    n = run.path.n_tokens
    if path == "straight":
        levels = Levels.join([levels.at(slice(0, n)), levels.at(slice(-n, None))])
    values = levels.value(metric).reshape(-1, n)
    is_top = levels.is_top.reshape(values.shape)
    whole = result_of(run, is_top, values, values.diff(dim=0), None, metric, "prediction_aware", settings)
    if path == "sequential" or run.states.base == "embed":
        return whole
    return replace(whole, segment_labels=(merged_label("base", f"{run.host.n_layers - 1}"),))


def _split_of(
    run: Trajectory,
    levels: Levels,
    whole: IGLensResult,
    shares: list[Shares],
    averages: Averages,
    unit: str | Mapping[str, Any],
    path: str,
    metric: str,
    tolerance: float,
) -> SplitResult:
    parts = tuple(part for found in shares for part in found.parts)
    credits, linear = run.on_grid(torch.cat([found.credits for found in shares], dim=1))
    sums = torch.stack([run.on_grid(found.credits[0].sum(0)) for found in shares])
    first = (None, None)
    if unit == "sublayer" and path == "sequential" and not run.has_lens:
        first = orders(run, parts, metric)
    sequential = None
    if unit == "block" and path == "straight":
        sequential = _block_credits(run, parts, levels.value(metric).reshape(-1, run.path.n_tokens))
    return SplitResult(
        whole=whole,
        parts=parts,
        attribution=credits,
        gap=sums - whole.attribution,
        error=run.on_grid(averages.error),
        nodes=run.on_grid(averages.nodes, fill=0),
        linear=linear,
        sequential=sequential,
        attn_first=first[0],
        mlp_first=first[1],
        unit=unit if isinstance(unit, str) else "parts",
        path=path,
        tolerance=tolerance,
    )


def _block_credits(run: Trajectory, parts: tuple[Part, ...], values: Tensor) -> Tensor:
    """Each block's credit in the sequential path, `[part, batch, pos]`; NaN for what is no segment of it."""
    credits = dict(zip(run.states.segment_labels, run.on_grid(values.diff(dim=0)), strict=True))
    nothing = torch.full(run.positions.mask.shape, torch.nan, dtype=torch.float64)
    return torch.stack([credits.get(part.label, nothing) for part in parts])
