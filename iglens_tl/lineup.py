"""`compare`: one run, one set of states, several methods, one table.

Every column speaks of the same states, positions and targets, in its own unit and with its own additivity:

- "ig_lens" [the metric's unit]: the credit of each segment; sums to the change of the metric.
- "logit_lens" [the metric's unit]: the level at the segment's end; levels have no sum.
- "dla" [logits]: what the segment adds to the target's logit, the final norm's scale frozen at the last state; with the first
  state's share, the norm's bias and `b_U` it sums to the logit, which is no probability.
- "layer_conductance", "layer_integrated_gradients" [the metric's unit]: through the full model from a first state of
  nought, of the read position at the segment's end. No theorem makes them add up over layers; the gap is shown.

The first three need nothing but the states: on a cache they run nothing. What a table does not claim: that methods of
different units should agree, or that one of them is the causal effect.

Example::

    from iglens_tl import compare

    logits, cache = model.run_with_cache("The capital of France is")
    print(compare(cache, targets=" Paris"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import refuse_sets, settings_of, token_fields
from iglens_tl._checks import METRICS, memory_size, one_of, whole_number
from iglens_tl._core.levels import Levels
from iglens_tl._core.segments import Path
from iglens_tl._model.direction import directions_of
from iglens_tl._request import Lens, Request
from iglens_tl._trajectory import Trajectory, ordinary_tensors, read_checked, trajectory
from iglens_tl.companions import logit_of, quantity
from iglens_tl.comparison import LensComparison
from iglens_tl.layer_paths import PATH_METHODS, captum_class, layer_path
from iglens_tl.targets import TOP

METHODS = ("ig_lens", "logit_lens", "dla", *PATH_METHODS)


@dataclass(frozen=True)
class _Column:
    """One method's column: `[segment, rows]`, and what stands under it, each `[rows]`."""

    amounts: Tensor
    unit: str
    meaning: str
    expected_name: str = ""
    outside: Tensor | None = None
    expected: Tensor | None = None


@dataclass(frozen=True)
class _Asked:
    """What the columns are computed from."""

    request: Request
    run: Trajectory
    levels: Levels
    metric: str
    n_steps: int
    budget: int | None
    progress: bool


@ordinary_tensors()
def compare(
    model_or_cache: Any,
    input: Any = None,
    *,
    methods: Sequence[str] = ("ig_lens", "logit_lens", "dla"),
    targets: Any = TOP,
    incorrect_targets: Any = None,
    cache: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    metric: str = "prob",
    n_steps: int = 50,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
    progress: bool = True,
) -> LensComparison:
    """What several methods say of the same segments, lined up.

    Args:
        methods: of "ig_lens", "logit_lens", "dla", "layer_conductance", "layer_integrated_gradients", in the order of the
            columns. The last two run the full model many times: they need its tokens as `input`, and captum.
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, metric, dtype, logits,
            attention_mask, prepend_bos, max_memory: as in `ig_lens`. `metric` is that of every method but DLA, `baseline` that
            of IG-Lens's path (and the first state of DLA).
        n_steps: of the full-model methods.
        lens: for "ig_lens" and "logit_lens", as in `ig_lens`; the others look at the model's own states.
        progress: a bar for the full-model methods, which also says how many sequences they run.

    Returns:
        A `LensComparison`: `amounts` `[method, segment, batch, pos]`; `sums`, `outside`, `expected`, `gap`
        `[method, batch, pos]`.

    Raises:
        ImportError: for a full-model method without captum.
        ValueError, TypeError: for unknown or repeated methods, a `TokenSet` with "dla", and all that `ig_lens` refuses.
    """
    chosen = _chosen(methods)
    one_of("metric", metric, tuple(METRICS))
    n_steps, budget = whole_number("n_steps", n_steps, 2), memory_size(max_memory)
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, lens, dtype,
        logits, attention_mask, prepend_bos,
    )  # fmt: skip
    if "dla" in chosen or metric == "logit":
        refuse_sets(request, 'compare with "dla" or metric="logit"')
    for method in chosen:
        _COLUMNS[method][1](method, request)
    run = trajectory(request, budget=budget)
    asked = _Asked(request, run, read_checked(run, metric), metric, n_steps, budget, progress)
    return _comparison(asked, chosen, [_COLUMNS[method][0](method, asked) for method in chosen])


def _chosen(methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise TypeError(f"methods must be a list of names, got the single string {methods!r}: write [{methods!r}].")
    chosen = tuple(one_of("methods", method, METHODS) for method in methods)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"methods must name at least one method and none twice; got {list(methods)}.")
    return chosen


def _comparison(asked: _Asked, methods: tuple[str, ...], columns: Sequence[_Column]) -> LensComparison:
    run = asked.run

    def under(pick: Callable[[_Column], Tensor | None]) -> Tensor:
        nothing = torch.full((run.path.n_tokens,), torch.nan, dtype=torch.float64)
        found = [pick(column) for column in columns]
        return torch.stack([nothing if rows is None else rows for rows in found])

    sums = under(lambda column: None if column.expected is None else column.amounts.sum(0))
    outside, expected = under(lambda column: column.outside), under(lambda column: column.expected)
    return LensComparison(
        amounts=run.on_grid(torch.stack([column.amounts for column in columns])),
        sums=run.on_grid(sums),
        outside=run.on_grid(outside),
        expected=run.on_grid(expected),
        gap=run.on_grid(sums + outside - expected),
        method_labels=methods,
        segment_labels=run.states.segment_labels,
        hidden_states=run.states.hidden_states,
        units=tuple(column.unit for column in columns),
        meanings=tuple(column.meaning for column in columns),
        expected_names=tuple(column.expected_name for column in columns),
        settings={**settings_of(asked.request, run), "metric": asked.metric, "n_steps": asked.n_steps},
        **token_fields(run),
    )


def _values(asked: _Asked) -> Tensor:
    return asked.levels.value(asked.metric).reshape(asked.run.path.n_segments + 1, -1)


def _ig_lens(method: str, asked: _Asked) -> _Column:  # noqa: ARG001 -- every column is made by a call of this form
    values = _values(asked)
    total = values[-1] - values[0]
    meaning = "the segment's credit, extra metric read from the state after it given the state before it"
    name = f"the change of the metric from {asked.run.states.state_labels[0]} to final_post"
    return _Column(values.diff(dim=0), METRICS[asked.metric], meaning, name, torch.zeros_like(total), total)


def _logit_lens(method: str, asked: _Asked) -> _Column:  # noqa: ARG001 -- as above
    return _Column(_values(asked)[1:], METRICS[asked.metric], "the level at the segment's end; levels have no sum")


def _dla(method: str, asked: _Asked) -> _Column:  # noqa: ARG001 -- as above
    run = asked.run
    stream, n_tokens = Path(run.stream, run.path.groups), run.path.n_tokens
    shares = torch.empty(len(run.stream), n_tokens, dtype=torch.float64)
    outside, logit = torch.empty(2, n_tokens, dtype=torch.float64)
    direction_at = directions_of(run.host)
    for rows in torch.arange(n_tokens).split(run.readout.rows_at_a_time(_COPIES, 8, _AT_A_TIME)):
        last, groups = stream.rows(-1, rows), stream.target_rows(rows)
        direction = direction_at(last, groups)
        for state in range(len(run.stream)):
            shares[state, rows] = direction.share(stream.rows(state, rows)[None])[0]
        biases = [found for found in (direction.norm_bias, direction.unembed_bias) if found is not None]
        outside[rows] = torch.stack([shares[0, rows], *biases]).sum(0)
        logit[rows] = logit_of(run.readout, last, groups, direction)
    nothing = direction_at(stream.rows(-1, torch.arange(0)), stream.target_rows(torch.arange(0)))
    meaning = (
        "what the segment adds to the logit, the final norm's scale frozen at the last state; outside: the first state's "
        "share, the norm's bias, b_U"
    )
    name = f"{quantity(nothing, asked.request.incorrect_targets is not None)}, no probability"
    return _Column(shares.diff(dim=0), "logits", meaning, name, outside, logit)


_COPIES, _AT_A_TIME = 16, 1 << 18
"""What becomes of a state in float64 on its way to DLA's direction and back, and numbers of states that go it together."""


def _through_the_model(method: str, asked: _Asked) -> _Column:
    run = asked.run
    found = layer_path(method, run, "zero", asked.metric, asked.n_steps, asked.budget, asked.progress, {})
    first = 1 if run.states.base == "embed" else 0
    amounts = found.at_position[first:][:, run.positions.mask]
    total = found.total[run.positions.mask]
    meaning = "of the read position at the segment's end, from first states of nought through the full model"
    name = "the change of the metric from first states of nought, which every layer claims for itself: no theorem"
    return _Column(amounts, METRICS[asked.metric], meaning, name, torch.zeros_like(total), total)


def _needs_nothing(method: str, request: Request) -> None:
    pass


def _needs_the_model(method: str, request: Request) -> None:
    captum_class(method)
    if request.input is None:
        raise ValueError(f"{method} runs the full model: give its tokens (or the prompt) as the second argument.")
    if request.incl_mid:
        raise ValueError(f"{method} takes whole-layer states; leave incl_mid=False.")


_COLUMNS: dict[str, tuple[Callable[[str, _Asked], _Column], Callable[[str, Request], None]]] = {
    "ig_lens": (_ig_lens, _needs_nothing),
    "logit_lens": (_logit_lens, _needs_nothing),
    "dla": (_dla, _needs_nothing),
    **dict.fromkeys(PATH_METHODS, (_through_the_model, _needs_the_model)),
}
