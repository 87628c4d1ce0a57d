"""What a result repeats of its question: the tokens it is about, and the settings as JSON values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from iglens_tl._model.answers import target_texts
from iglens_tl._model.host import provenance
from iglens_tl._model.tokens import token_texts
from iglens_tl._request import Request
from iglens_tl._trajectory import Trajectory
from iglens_tl.targets import Target, TokenSet


def token_fields(run: Trajectory) -> dict[str, Any]:
    """The fields that all results share: tokens, targets, mask, provenance."""
    plan, host, prompts, wrong = run.positions, run.host, run.prompts, run.incorrect_ids
    return {
        "mask": plan.mask,
        "positions": plan.index,
        "target_ids": run.target_ids,
        "incorrect_ids": wrong,
        "tokens": None if prompts is None else prompts.tokens.clone(),
        "token_mask": None if prompts is None else prompts.mask.clone(),
        "token_strings": None if prompts is None else token_texts(host, prompts.tokens),
        "target_strings": target_texts(host, run.target_ids, plan.mask),
        "incorrect_strings": None if wrong is None else target_texts(host, wrong, plan.mask),
        "provenance": provenance(host),
    }


def settings_of(request: Request, run: Trajectory) -> dict[str, Any]:
    """The settings that all calls share."""
    return {
        "baseline": run.states.base,
        "targets": describe(request.targets),
        "incorrect_targets": None if request.incorrect_targets is None else describe(request.incorrect_targets),
        "positions": describe(request.positions),
        "layers": describe(request.layers),
        "incl_mid": request.incl_mid,
        "lens": None if request.lens is None else getattr(request.lens, "__qualname__", type(request.lens).__name__),
        "readout_dtype": str(run.readout.dtype).removeprefix("torch."),
        "padding": None if run.prompts is None else run.prompts.padding,
        "prepend_bos": request.prepend_bos,
        "source": "cache" if run.from_cache else "forward pass",
        "checked_against_model": run.said is not None,
    }


def describe(spec: Any) -> Any:
    """An argument as a JSON value."""
    if isinstance(spec, Target):
        return spec.name
    if isinstance(spec, Tensor):
        return f"tensor {list(spec.shape)}"
    return spec if spec is None or isinstance(spec, (str, int)) else repr(spec)


def refuse_sets(request: Request, what: str) -> None:
    """A set of tokens has a probability, but no logit.

    Raises:
        ValueError: where a target is a `TokenSet` of several tokens.
    """
    for spec in (request.targets, request.incorrect_targets):
        members = spec if isinstance(spec, (list, tuple)) else [spec]
        if any(isinstance(item, TokenSet) and len(item.tokens) > 1 for item in members):
            raise ValueError(
                f'{what} needs single tokens: a TokenSet has a probability but no logit. Use "log_odds".'
                if what.startswith("metric")
                else f"{what} needs single tokens: a TokenSet has a probability but no logit. Give one token."
            )
