"""Layer Conductance and layer Integrated Gradients: the classical layer attributions, through the full model.

Both start from a baseline for the first state (nought by default) and look at one layer at a time. With `F(x)` the metric
as a function of the first states `x` of all positions, `x'` the baseline, and `h_l(x)` the states after layer `l`:

- layer conductance (Dhamdhere et al. 2019): `sum over the path of grad_{h_l} F . d h_l(x' + a (x - x'))`;
- layer integrated gradients: `(h_l(x) - h_l(x')) . integral of grad_{h_l} F` along the straight line between these two.

Within *one* layer each sums, over positions and dimensions, to `F(x) - F(x')` up to quadrature (`delta`). Over layers they
do not add up to anything: every layer claims the whole change for itself. That is what IG-Lens's telescoping credits
differ in. Units: those of the metric. captum does the mathematics (`pip install iglens_tl[companions]`).

Cost: every layer integrates through the whole model; both calls say how many sequences they will run before they start.

Example::

    from iglens_tl import layer_integrated_gradients

    print(layer_integrated_gradients(model, "The capital of France is", targets=" Paris", n_steps=20))
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from iglens_tl._asked import settings_of, token_fields
from iglens_tl._checks import METRICS, memory_size, one_of, whole_number
from iglens_tl._full_model import FromFirstState
from iglens_tl._memory import share_of_free
from iglens_tl._model.states import Wanted, hook_name, run_and_collect
from iglens_tl._request import Request
from iglens_tl._trajectory import Trajectory, ordinary_tensors, trajectory
from iglens_tl.companion_results import LayerPathResult
from iglens_tl.targets import TOP

PATH_METHODS = ("layer_conductance", "layer_integrated_gradients")
_BUDGET = 2**30


@ordinary_tensors()
def layer_conductance(
    model: Any,
    input: Any,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    positions: Any = -1,
    layers: Any = None,
    baseline: Any = "zero",
    metric: str = "prob",
    n_steps: int = 50,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
    progress: bool = True,
) -> LayerPathResult:
    """Layer Conductance of every state, through the full model.

    Args:
        model: a `HookedTransformer` or a `TransformerBridge`.
        input, targets, incorrect_targets, positions, layers, metric, attention_mask, prepend_bos: as in `ig_lens`; whole-layer
            states only.
        baseline: of the first state at every position: "zero", or a tensor `[d_model]` or `[seq, d_model]`.
        n_steps: steps of captum's rule (Gauss-Legendre) from the baseline to the input.
        max_memory: bytes ("2GB") that the activations of the sequences run at a time may take; None is an eighth of
            what is free, at most 1 GiB.
        progress: show a bar, which also says how many sequences are run.

    Returns:
        A `LayerPathResult`: `attribution` `[state, batch, pos, seq]`, `delta` `[state, batch, pos]`, in the metric's unit.

    Raises:
        ImportError: where captum is not installed; it says how to get it.
        UnsupportedModelError, ValueError, TypeError: as `ig_lens`.
    """
    request = Request(
        model, input, targets, incorrect_targets, None, positions, layers,
        attention_mask=attention_mask, prepend_bos=prepend_bos,
    )  # fmt: skip
    return _asked_for("layer_conductance", request, baseline, metric, n_steps, max_memory, progress)


@ordinary_tensors()
def layer_integrated_gradients(
    model: Any,
    input: Any,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    positions: Any = -1,
    layers: Any = None,
    baseline: Any = "zero",
    metric: str = "prob",
    n_steps: int = 50,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
    progress: bool = True,
) -> LayerPathResult:
    """Layer Integrated Gradients of every state, through the blocks above it.

    Args and Returns: as `layer_conductance`.

    Raises:
        ImportError, UnsupportedModelError, ValueError, TypeError: as `layer_conductance`.
    """
    request = Request(
        model, input, targets, incorrect_targets, None, positions, layers,
        attention_mask=attention_mask, prepend_bos=prepend_bos,
    )  # fmt: skip
    return _asked_for("layer_integrated_gradients", request, baseline, metric, n_steps, max_memory, progress)


def _asked_for(
    method: str, request: Request, baseline: Any, metric: str, n_steps: int, max_memory: Any, progress: bool
) -> LayerPathResult:
    one_of("metric", metric, tuple(METRICS))
    n_steps = whole_number("n_steps", n_steps, 2)
    budget = memory_size(max_memory)
    captum_class(method)
    run = trajectory(request)  # its budget is for whole sequences
    settings = {**settings_of(request, run), "n_steps": n_steps, "metric": metric}
    return layer_path(method, run, baseline, metric, n_steps, budget, progress, settings)


def captum_class(method: str) -> Any:
    """captum's class of a method.

    Raises:
        ImportError: where captum is not installed.
    """
    try:
        from captum.attr import LayerConductance, LayerIntegratedGradients
    except ImportError as error:
        raise ImportError(
            f"{method} needs captum ({error}): pip install captum, or pip install iglens_tl[companions]."
        ) from error
    return {"layer_conductance": LayerConductance, "layer_integrated_gradients": LayerIntegratedGradients}[method]


def sequences_needed(method: str, n_states: int, n_rows: int, n_steps: int) -> int:
    """How many sequences a call runs through the model.

    >>> sequences_needed("layer_integrated_gradients", n_states=31, n_rows=1, n_steps=50)
    1614
    """
    a_state = n_steps + (1 if method == "layer_conductance" else 2)
    return n_rows * (n_states * a_state + 2)


def layer_path(
    method: str,
    run: Trajectory,
    baseline: Any,
    metric: str,
    n_steps: int,
    budget: int | None,
    progress: bool,
    settings: dict[str, Any],
) -> LayerPathResult:
    """One of `PATH_METHODS` for the rows of a trajectory, one row at a time."""
    states = run.states
    if any(half % 2 for half in states.halves):
        raise ValueError(f"{method} takes whole-layer states; leave incl_mid=False and name no mid state.")
    module = FromFirstState(run.host, states.halves, metric)
    needed = sequences_needed(method, len(states.halves), run.path.n_tokens, n_steps)
    seq = 0 if run.prompts is None else run.prompts.tokens.shape[1]
    bar = tqdm(
        total=run.path.n_tokens * len(states.halves), disable=not progress, file=sys.stderr,
        desc=f"{method}: {needed:,} sequences of {seq} tokens",
    )  # fmt: skip
    with bar:
        budget = budget or share_of_free(run.host.device, _BUDGET)
        rows, totals = zip(*_rows(method, run, module, baseline, n_steps, budget, bar), strict=True)
    grid = run.on_grid(torch.stack(rows).permute(1, 2, 0)).permute(0, 2, 3, 1).contiguous()  # [state, batch, pos, seq]
    total = run.on_grid(torch.tensor(totals, dtype=torch.float64))
    at = run.positions.index.clamp(min=0)[None, ..., None].expand(len(grid), -1, -1, 1)
    own = grid.gather(-1, at)[..., 0]
    return LayerPathResult(
        attribution=grid,
        layer_sum=grid.sum(-1),
        total=total,
        delta=grid.sum(-1) - total,
        at_position=own,
        sum_over_layers=own.sum(0),
        state_labels=states.state_labels[-len(states.halves) :],
        hidden_states=tuple(half // 2 for half in states.halves),
        method=method,
        metric=metric,
        metric_unit=METRICS[metric],
        forwards=module.sequences,
        settings={**settings, "sequences_announced": needed, "path_baseline": _baseline_name(baseline)},
        **token_fields(run),
    )


def _rows(
    method: str, run: Trajectory, module: FromFirstState, baseline: Any, n_steps: int, budget: int, bar: Any
) -> Iterator[tuple[Tensor, float]]:
    """Of every selected (batch, pos): attributions `[state, seq]`, and the change from the baseline."""
    host, prompts = run.host, run.prompts
    if prompts is None:
        raise ValueError(f"{method} runs the model: give its tokens (or the prompt) as the second argument.")
    mask = None if prompts.attention_mask is None else prompts.attention_mask.to(host.device)
    tokens = prompts.tokens.to(host.device)
    (first,), _ = run_and_collect(host, tokens, mask, [Wanted(hook_name(0, host.n_layers), lambda full: full)])
    start = _baseline_states(baseline, first)
    explain = captum_class(method)
    fit = max(1, budget // _bytes_a_sequence(host, tokens.shape[1]))
    for row, (batch, pos) in enumerate(zip(*(axis.tolist() for axis in run.positions.rows), strict=True)):
        at = slice(batch, batch + 1)
        ids = [group[row : row + 1].to(host.device) for group in run.path.groups]
        rest = (tokens[at], torch.tensor([pos], device=host.device), None if mask is None else mask[at], *ids)
        with torch.no_grad():
            total = float(module(first[at], *rest)) - float(module(start[at], *rest))
        states: list[Tensor] = []
        for tap in module.taps:
            found = explain(module, tap).attribute(
                first[at],
                start[at],
                additional_forward_args=rest,
                n_steps=n_steps,
                internal_batch_size=min(fit, n_steps + 1),
            )
            states.append(found[0].detach().double().sum(-1).cpu())
            bar.update()
        yield torch.stack(states), total


def _bytes_a_sequence(host: Any, seq: int) -> int:
    """A rough upper bound of what one sequence keeps for the gradient."""
    return 4 * seq * (40 * host.n_layers * host.d_model + 6 * host.d_vocab_out)


def _baseline_states(baseline: Any, first: Tensor) -> Tensor:
    if isinstance(baseline, str) and baseline == "zero":
        return torch.zeros_like(first)
    shapes = (tuple(first.shape[-1:]), tuple(first.shape[-2:]))
    if not isinstance(baseline, Tensor) or not baseline.is_floating_point() or tuple(baseline.shape) not in shapes:
        got = tuple(baseline.shape) if isinstance(baseline, Tensor) else repr(baseline)
        raise ValueError(
            f'baseline must be "zero" or a floating-point tensor [d_model] = {list(shapes[0])} or [seq, d_model] = '
            f"{list(shapes[1])}; got {got}."
        )
    return baseline.detach().to(first.device, first.dtype).expand_as(first).clone()


def _baseline_name(baseline: Any) -> str:
    return baseline if isinstance(baseline, str) else f"tensor {list(baseline.shape)}"
