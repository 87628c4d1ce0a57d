"""What other methods say of the same states, for the same targets, under the same labels as `ig_lens`.

`logit_lens` reads levels: the probability (rank, entropy, ...) at every state. Its probabilities are `ig_lens`'s `values`,
within float32 rounding. `direct_logit_attribution` (DLA) shares out one logit: with the scale `s` of the final norm frozen at the
last state `h`, the target's logit is linear in the parts that `h` is the sum of,

    logit = sum_c ((c - mean c) / s * w) . u  +  b_norm . u  +  b_U,        u = W_U[:, y],

so the parts sum to the model's own logit [logits], whether or not norms are folded into the weights.

What they do not claim: levels add up to nothing; a share of a logit is no share of a probability (a large part of a logit
may raise every token alike), and with the scale frozen it is not what leaving the part out would do.

References: nostalgebraist, "interpreting GPT: the logit lens" (2020); Elhage et al., "A Mathematical Framework for
Transformer Circuits" (2021).

Example::

    from iglens_tl import direct_logit_attribution, logit_lens

    logits, cache = model.run_with_cache("The capital of France is")
    print(logit_lens(cache, targets=" Paris"))
    print(direct_logit_attribution(cache, targets=" Paris", unit="sublayer"))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import refuse_sets, settings_of, token_fields
from iglens_tl._checks import memory_size, one_of, whole_number
from iglens_tl._core.levels import Levels
from iglens_tl._core.readout import Readout
from iglens_tl._core.spectrum import Spectrum, read_spectrum
from iglens_tl._model.direction import Direction, direction_of
from iglens_tl._model.parts import UNITS
from iglens_tl._model.tokens import token_text
from iglens_tl._request import Lens, Request
from iglens_tl._trajectory import Trajectory, checked, ordinary_tensors, read_last, trajectory
from iglens_tl.companion_results import DLAResult, LogitLensResult
from iglens_tl.targets import TOP


@ordinary_tensors()
def logit_lens(
    model_or_cache: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    top_k: int = 5,
    cache: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> LogitLensResult:
    """Read every state through the model's own final norm and unembedding, its statistics recomputed for each state.

    Args:
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, lens, dtype,
            logits, attention_mask, prepend_bos, max_memory: as in `ig_lens`. A rank is the target's, whatever it is
            compared with.
        top_k: how many of the most probable tokens to keep at each state.

    Returns:
        A `LogitLensResult`: `prob`, `log_prob` and `entropy` and `kl` [nats], `logit`, `rank`, each `[state, batch, pos]`;
        `top_ids`, `top_probs` `[state, batch, pos, k]`.

    Raises:
        UnsupportedModelError, ReadoutMismatchError, MissingActivationError, ValueError, TypeError: as `ig_lens`.
    """
    top_k = whole_number("top_k", top_k, 1)
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, lens, dtype,
        logits, attention_mask, prepend_bos,
    )  # fmt: skip
    run = trajectory(request, budget=memory_size(max_memory))
    levels, spectrum = read_spectrum(run.readout, run.path, top_k)
    return _lens_result(run, checked(run, levels), spectrum, settings_of(request, run))


def _lens_result(run: Trajectory, levels: Levels, spectrum: Spectrum, settings: dict[str, Any]) -> LogitLensResult:
    shape = (run.path.n_segments + 1, run.path.n_tokens)

    def grid(rows: Tensor) -> Tensor:
        return run.on_grid(rows.reshape(shape), -1 if rows.dtype == torch.int64 else float("nan"))

    def tops(rows: Tensor) -> Tensor:
        by_rank = rows.T.reshape(-1, *shape)
        return run.on_grid(by_rank, -1 if rows.dtype == torch.int64 else float("nan")).movedim(0, -1).contiguous()

    ids = tops(spectrum.top_ids)
    known = {token: token_text(run.host, token) for token in ids.unique().tolist() if token >= 0}
    return LogitLensResult(
        **{name: grid(levels.value(name)) for name in ("prob", "log_prob", "logit")},
        rank=grid(spectrum.rank),
        entropy=grid(spectrum.entropy),
        kl=grid(spectrum.kl),
        top_ids=ids,
        top_probs=tops(spectrum.top_log_probs.exp()),
        top_strings=_texts(ids.tolist(), known),
        state_labels=run.states.state_labels,
        hidden_states=_state_indices(run),
        settings=settings,
        **token_fields(run),
    )


def _texts(ids: Any, known: dict[int, str]) -> Any:
    """Nested lists of ids as nested tuples of texts; -1 stands for nothing."""
    if not ids or not isinstance(ids[0], list):
        return tuple(known[token] for token in ids if token >= 0)
    return tuple(_texts(inner, known) for inner in ids)


def _state_indices(run: Trajectory) -> tuple[int | None, ...]:
    own = tuple(None if half % 2 else half // 2 for half in run.states.halves)
    return own if run.states.base == "embed" else (None, *own)


@ordinary_tensors()
def direct_logit_attribution(
    model_or_cache: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    unit: str = "sublayer",
    cache: Any = None,
    positions: Any = -1,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
) -> DLAResult:
    """Share the target's logit among the parts of the last state, with the final norm's scale frozen there.

    Works on any state of the weights: the norm's weight and bias are applied as they stand, and its bias and `b_U` are
    parts of their own. A constant factor on the logits (Cohere, Granite) is applied; behind a soft-cap (Gemma-2), which
    shares nothing out, the logit *before* the cap is explained, and `quantity` says so.

    Args:
        model_or_cache, input, targets, incorrect_targets, cache, positions, logits, attention_mask, prepend_bos: as in
            `ig_lens`, for single tokens; with incorrect targets it is the logit difference that is shared.
        unit: "block" (whole blocks), "sublayer" (attention and MLP), or "head" (every head, attention's bias, MLP).

    Returns:
        A `DLAResult`: `attribution` `[part, batch, pos]` in logits; they sum to `logit` up to `gap`.

    Raises:
        UnsupportedModelError: where the parts do not add up to the states, heads are not exposed, or norm or
            unembedding cannot be written out.
        MissingActivationError: where a cache lacks an activation of the unit; it names the `names_filter` to use.
        ReadoutMismatchError, ValueError, TypeError: as `ig_lens`.
    """
    one_of("unit", unit, UNITS[:3])
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions,
        logits=logits, attention_mask=attention_mask, prepend_bos=prepend_bos,
    )  # fmt: skip
    refuse_sets(request, "direct_logit_attribution")
    run = trajectory(request, unit)
    read_last(run)
    direction = direction_of(run.host, run.path.states[-1], run.path.groups)
    labels, shares = zip(*_shares(run, direction), strict=True)
    attribution, logit = torch.cat(shares), logit_of(run.readout, run.path.states[-1], run.path.groups, direction)
    return DLAResult(
        attribution=run.on_grid(attribution),
        logit=run.on_grid(logit),
        total=run.on_grid(attribution.sum(0)),
        gap=run.on_grid(attribution.sum(0) - logit),
        part_labels=tuple(label for group in labels for label in group),
        unit=unit,
        quantity=quantity(direction, request.incorrect_targets is not None),
        settings=settings_of(request, run),
        **token_fields(run),
    )


def _shares(run: Trajectory, direction: Direction) -> Iterator[tuple[Sequence[str], Tensor]]:
    for group in run.parts:
        labels, parts = group.build()
        yield labels, direction.share(parts)
    for label, rows in (("norm_bias", direction.norm_bias), ("unembed_bias", direction.unembed_bias)):
        if rows is not None:
            yield (label,), rows[None]


def logit_of(readout: Readout, last: Tensor, groups: Sequence[Tensor], direction: Direction) -> Tensor:
    """The logit that DLA explains, as the model's readout gives it at last states `[rows, d_model]`, `[rows]` in float64."""
    plain = replace(readout, transform=None)
    found = torch.empty(len(last), dtype=torch.float64)
    for rows in torch.arange(len(last)).split(plain.rows_per_chunk(copies=5)):
        logits = plain.logits(last[rows.to(last.device)])
        found[rows] = direction.logit(logits, [ids[rows] for ids in groups])
        del logits
    return found


def quantity(direction: Direction, difference: bool) -> str:
    """What DLA's parts sum to, in words."""
    name = "logit difference" if difference else "logit"
    return f"the {name} before the soft-cap" if direction.capped else f"the model's own {name}"
