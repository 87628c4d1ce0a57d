"""The arguments of a call, settled before anything is run: host, prompts, states, positions, targets, baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._model.answers import Ids, target_ids
from iglens_tl._model.host import Host, host_of, is_cache
from iglens_tl._model.states import CacheView, check_states_exist, view_of
from iglens_tl._model.tokens import Prompts, given_mask, prompts_of
from iglens_tl._plan import PositionPlan, StatePlan, plan_positions, plan_states

Lens = Callable[[Tensor, int], Tensor]
"""`(state [rows, d_model], state_index) -> state [rows, d_model]`."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """The keywords that all methods share, as the caller gave them; `iglens_tl.ig_lens` explains them."""

    model_or_cache: Any
    input: Any
    targets: Any
    incorrect_targets: Any = None
    cache: Any = None
    positions: Any = -1
    layers: Any = None
    incl_mid: bool = False
    baseline: Any = "embed"
    lens: Lens | None = None
    dtype: torch.dtype | None = None
    logits: Any = None
    attention_mask: Any = None
    prepend_bos: bool | None = None


@dataclass(frozen=True)
class Settled:
    """A request that passed every check which needs no forward pass.

    Args:
        view: the cache, None where the model is to be run.
        token_mask: `[batch, seq]`, False on padding.
        target_ids, incorrect_ids: `[batch, pos, width]`; None where the target is `TOP` (or there is no incorrect one).
        baseline_rows: `[rows, d_model]` where the baseline is a tensor.
        logits: the model's own, given with a cache.
    """

    host: Host
    view: CacheView | None
    states: StatePlan
    prompts: Prompts | None
    token_mask: Tensor
    positions: PositionPlan
    target_ids: Ids | None
    incorrect_ids: Ids | None
    baseline_rows: Tensor | None
    logits: Tensor | None


def settle(request: Request) -> Settled:
    """Check and resolve a request; runs nothing."""
    _check_types(request)
    base = _baseline_name(request.baseline)
    host, cache = _host_and_cache(request.model_or_cache, request.cache)
    states = plan_states(request.layers, request.incl_mid, base, host.n_layers)
    if request.lens is not None and any(half % 2 for half in states.halves):
        raise ValueError("lens= is a function of whole-layer states; leave incl_mid=False and name no mid state.")
    view = None if cache is None else view_of(cache, host)
    _check_source(request, host, view, states)
    prompts = _prompts(request, host, run=view is None)
    token_mask = _token_mask(view, prompts, request.attention_mask)
    logits = None if request.logits is None else _logits_given(request.logits, token_mask, host)
    plan = plan_positions(request.positions, token_mask)
    ids, plan = target_ids(host, request.targets, plan, prompts)
    wrong = None
    if request.incorrect_targets is not None:
        wrong, plan = target_ids(host, request.incorrect_targets, plan, prompts, "incorrect_targets")
    rows = _baseline_rows(request.baseline, plan, host.d_model) if base == "baseline" else None
    return Settled(host, view, states, prompts, token_mask, plan, ids, wrong, rows, logits)


def _check_source(request: Request, host: Host, view: CacheView | None, states: StatePlan) -> None:
    check_states_exist(host, states.halves)
    if view is not None:
        view.require(states.halves)
        return
    if request.input is None:
        raise TypeError("a model needs a prompt or token ids as the second argument, or cache=.")
    if request.logits is not None:
        raise ValueError("logits= goes with a cache; without one the model is run and gives its own. Leave it out.")


def _prompts(request: Request, host: Host, run: bool) -> Prompts | None:
    if request.input is not None:
        return prompts_of(host, request.input, request.prepend_bos, request.attention_mask, to_run=run)
    if request.prepend_bos is not None:
        raise ValueError("prepend_bos applies to a prompt given as a string; only a cache came. Leave it out.")
    return None


def _check_types(request: Request) -> None:
    if request.dtype is not None and request.dtype not in DTYPES:
        raise TypeError(f"dtype must be None, {shorten(DTYPES)}; got {request.dtype!r}.")
    if request.lens is not None and not callable(request.lens):
        raise TypeError(f"lens= must be a function (state, state_index) -> state; got {request.lens!r}.")
    if request.cache is not None and not is_cache(request.cache):
        raise TypeError(f"cache= must be an ActivationCache or a mapping of names to tensors; got {request.cache!r}.")
    if request.logits is not None and not isinstance(request.logits, Tensor):
        raise TypeError(f"logits= must be a tensor [batch, pos, d_vocab_out]; got {type(request.logits).__name__}.")


def _baseline_name(baseline: Any) -> str:
    if isinstance(baseline, Tensor):
        return "baseline"
    if isinstance(baseline, str) and baseline in ("embed", "zero", "mean"):
        return baseline
    raise ValueError(
        'baseline must be "embed", "zero", "mean", or a tensor [d_model], [batch, d_model] or [batch, pos, d_model]; got '
        f"{baseline!r}."
    )


def _host_and_cache(model_or_cache: Any, cache: Any) -> tuple[Host, Any]:
    if not is_cache(model_or_cache):
        host = host_of(model_or_cache)
        owner = getattr(cache, "model", model_or_cache)
        if owner is not model_or_cache:
            raise ValueError(
                f"the cache is of another model ({type(owner).__name__}) than the one given; pass the cache alone, "
                "or the model that made it."
            )
        return host, cache
    if cache is not None:
        raise TypeError("two caches came, as first argument and as cache=; give one.")
    owner = getattr(model_or_cache, "model", None)
    if owner is None:
        raise TypeError(
            "a plain mapping of activations does not know its model: call ig_lens(model, cache=activations)."
        )
    return host_of(owner), model_or_cache


def _token_mask(view: CacheView | None, prompts: Prompts | None, attention_mask: Any) -> Tensor:
    if view is None:
        assert prompts is not None
        return prompts.mask
    shape = view.shape
    if prompts is not None:
        if tuple(prompts.tokens.shape) != shape:
            raise ValueError(
                f"the cache holds [batch, pos] = {shape} and the input {tuple(prompts.tokens.shape)}. Give the tokens that "
                "the cache was made with; for a cache cut with pos_slice leave the input out; a cache without a batch axis is "
                "of one prompt."
            )
        return prompts.mask
    if attention_mask is not None:
        return given_mask(attention_mask, shape, "the cache")
    if shape[0] > 1 and view.host.tokenizer is not None:
        raise ValueError(
            f"the cache holds {shape[0]} prompts and nothing says where they are padded: pass their tokens (or strings) as "
            "the second argument, or attention_mask=."
        )
    return torch.ones(shape, dtype=torch.bool)


def _logits_given(logits: Tensor, token_mask: Tensor, host: Host) -> Tensor:
    logits = logits[None] if logits.ndim == 2 else logits
    required = (*token_mask.shape, host.d_vocab_out)
    if tuple(logits.shape) != required:
        raise ValueError(
            f"logits must have shape [batch, pos, d_vocab_out] = {required} to go with the cache; got {tuple(logits.shape)}."
        )
    return logits.detach()


def _baseline_rows(baseline: Tensor, plan: PositionPlan, d_model: int) -> Tensor:
    batch, pos = plan.mask.shape
    shape = tuple(baseline.shape)
    if not baseline.is_floating_point() or shape not in {(d_model,), (batch, d_model), (batch, pos, d_model)}:
        raise ValueError(
            f"baseline must be a floating-point tensor [d_model] = [{d_model}], [batch, d_model] = [{batch}, {d_model}] or "
            f"[batch, pos, d_model] = [{batch}, {pos}, {d_model}]; got {shape} {baseline.dtype}."
        )
    full = baseline.detach() if baseline.ndim != 2 else baseline.detach()[:, None]
    return full.expand(batch, pos, d_model)[plan.mask.to(full.device)]
