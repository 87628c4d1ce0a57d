"""IG-Lens: between which two states is the probability of a token produced?

A decoder-only transformer refines one residual stream `h_0 -> h_1 -> ... -> h_n`. With the head-once readout

    f(h) = softmax(unembed(ln_final(h)))[y]

the credit of the segment `h_{j-1} -> h_j` is the integrated gradient of `f` along that straight line. By the gradient
theorem it equals `f(h_j) - f(h_{j-1})`, so credits telescope: they sum to `f(h_n) - f(h_base)`, the change of the
model's own probability, with softmax and final norm inside the path. Positive: the segment raised the target.
Unit: that of the metric (probability by default).

What a credit is: a conditional marginal, the extra probability that norm and unembedding read from `h_j` given
`h_{j-1}`. What it is not: the causal effect of the layer through the blocks above it (ablate to see that), nor a share
of the logit (direct logit attribution).

Reference: Nguyen, "IG-Lens: Exact Additive Probability Attribution Across Transformer Layers via Telescoping Integrated
Gradients", arXiv 2606.29693; the prediction-aware estimator follows IDGI (Yang, Wang and Bilgic, CVPR 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import refuse_sets, settings_of, token_fields
from iglens_tl._checks import ESTIMATORS, METRICS, memory_size, one_of, whole_number
from iglens_tl._core.segments import integrate, read_steps
from iglens_tl._request import Lens, Request
from iglens_tl._trajectory import Trajectory, ordinary_tensors, read_checked, trajectory
from iglens_tl.results import IGLensResult
from iglens_tl.targets import TOP


@ordinary_tensors()
def ig_lens(
    model_or_cache: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    cache: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    metric: str = "prob",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> IGLensResult:
    """Attribute the probability of a token to the segments of the residual stream that it is read from.

    A credit is what norm and unembedding read from a state beyond the state before it; it is not the layer's causal
    effect through the blocks above.

    Args:
        model_or_cache: a `HookedTransformer`, a `TransformerBridge`, or an `ActivationCache` of one. With a model, one
            forward pass is run (inside `with model.hooks(...)` it is the hooked run that is attributed).
        input: the prompt: a string, strings, or token ids `[pos]` or `[batch, pos]`. Beside a cache: what it was made
            from (needed for `NEXT`, for padding, and for token strings).
        targets: `TOP` (the model's most probable next token at each position), `NEXT` (the token that follows in the
            input), a string or id, a list with one entry a prompt, a tensor that broadcasts to `[batch, pos]`, or a
            `TokenSet`.
        incorrect_targets: the same forms; every value becomes the target's less the incorrect target's.
        cache: a cache (or mapping of activation names to tensors) of the model given first.
        positions: -1 for the last real token of each prompt; a number, list or slice counts each prompt's real tokens;
            None for all positions.
        layers: None for all blocks; state indices or labels (the final state is always added); or a number of evenly
            spaced segments that end at the final state.
        incl_mid: split every block into its attention and its MLP.
        baseline: where the path starts: "embed" (`h_0`), "zero", "mean" (of the first chosen state, over the real
            positions at or before the target position), or a tensor `[d_model]`, `[batch, d_model]`,
            `[batch, pos, d_model]`.
        metric: "prob" (probability), "log_prob" (nats), "log_odds" (nats) or "logit" (logits; not invariant to folding
            and centring of weights, unlike the others).
        estimator: "prediction_aware" (exact at any number of steps), or one that integrates gradients and reports its
            error in `gap`: "midpoint", "trapezoid", "left", "right", "gauss_legendre".
        n_steps: interpolation steps (nodes for "gauss_legendre") a segment. For the prediction-aware estimator more than
            one adds `steps` and changes no credit.
        lens: `(state [rows, d_model], state_index) -> state`, applied to each state before the readout (a tuned-lens
            translator); at the last state it must be the identity.
        dtype: precision of the readout; None is the model's own. That the last state gives the model's own probability can be
            checked only to the digits of the coarsest dtype involved: to 1e-5 in float32, in bfloat16 to 0.1 for p = 1/2 between
            logits near 25, and closer for other p.
        logits: the model's logits `[batch, pos, d_vocab_out]` beside a cache, so that the last state can be checked.
        attention_mask: `[batch, pos]` of 0 and 1, beside token ids.
        prepend_bos: as TransformerLens's `to_tokens`, for strings.
        max_memory: bytes ("2GB") that the call may take at its peak, beyond the model and its forward pass, the states (of the
            cache, or kept by the pass; a `lens` gets, and gives back, copies of all) and what it returns: logits, rows on their
            way, the copies that norm and checks make, what is kept of the rows that were read (up to half of it), and an
            unembedding cast to another `dtype`. A row of logits and the copies of its state (of a cast unembedding 64 words) are
            the least. On top come 20 to 100 bytes a row (most for log-odds against `incorrect_targets`), 16 a token for each
            word of a set of targets, and a few MB a thread of the matrix product's own. None is an eighth of what is free, at
            most 64 MiB on a CPU (more is no faster; a plain unembedding is read in tiles and takes some 10 MB) and 512 MiB on
            an accelerator, beside a cast copy of the unembedding for gradients, or for `TOP` of a cache, where that fits an
            eighth of what is free, too.

    Returns:
        An `IGLensResult`: `attribution` `[segment, batch, pos]`, `values` `[segment + 1, batch, pos]`, `total`, `gap`.

    Raises:
        UnsupportedModelError: for a model whose probability cannot be read this way.
        ReadoutMismatchError: where the last state does not give the model's own probability.
        MissingActivationError: where a cache lacks a state.
        ValueError, TypeError: for arguments that cannot be met; the message says what was required, what came, what to do.
    """
    one_of("metric", metric, tuple(METRICS))
    one_of("estimator", estimator, ESTIMATORS)
    n_steps = whole_number("n_steps", n_steps, 1)
    budget = memory_size(max_memory)
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, lens, dtype,
        logits, attention_mask, prepend_bos,
    )  # fmt: skip
    if metric == "logit":
        refuse_sets(request, 'metric="logit"')
    run = trajectory(request, budget=budget)
    levels = read_checked(run, metric)
    values = levels.value(metric).reshape(run.path.n_segments + 1, -1)
    is_top = levels.is_top.reshape(values.shape)
    del levels  # of every row there is enough to hold
    steps = None
    if estimator == "prediction_aware":
        credits = values.diff(dim=0)
        if n_steps > 1:
            steps = read_steps(run.readout, run.path, values, metric, n_steps)
    else:
        credits = integrate(run.readout, run.path, metric, estimator, n_steps)
    settings = _settings(request, metric, n_steps, run)
    return result_of(run, is_top, values, credits, steps, metric, estimator, settings)


def _settings(request: Request, metric: str, n_steps: int, run: Trajectory) -> dict[str, Any]:
    return {"metric": metric, "n_steps": n_steps, **settings_of(request, run)}


def result_of(
    run: Trajectory,
    is_top: Tensor,
    values: Tensor,
    credits: Tensor,
    steps: Tensor | None,
    metric: str,
    estimator: str,
    settings: dict[str, Any],
) -> IGLensResult:
    total = values[-1] - values[0]
    return IGLensResult(
        attribution=run.on_grid(credits),
        values=run.on_grid(values),
        total=run.on_grid(total),
        gap=run.on_grid(credits.sum(0) - total),
        model_value=None if run.said is None else run.on_grid(run.said.value(metric)),
        is_top=run.on_grid(is_top, fill=False),
        steps=None if steps is None else run.on_grid(steps),
        state_labels=run.states.state_labels,
        segment_labels=run.states.segment_labels,
        hidden_states=run.states.hidden_states,
        metric=metric,
        estimator=estimator,
        settings=settings,
        **token_fields(run),
    )
