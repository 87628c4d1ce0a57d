"""Targets: what the caller asks about, as token ids at every selected position."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._core.levels import PAD
from iglens_tl._model.host import Host
from iglens_tl._model.tokens import Prompts, token_text
from iglens_tl._plan import PositionPlan
from iglens_tl.targets import NEXT, TOP, Target, TokenSet

Ids = Int[Tensor, "batch pos _"]


def token_id(host: Host, token: Any, name: str = "targets") -> int:
    """The id of a token given as a string that is exactly one token, or as an id.

    Raises:
        ValueError: for a string of no, several or unknown tokens (the pieces are shown), or an id outside the logits.
    """
    if isinstance(token, Tensor) and token.ndim == 0:
        token = token.item()
    if isinstance(token, str):
        return _within(host, _id_of_string(host, token, name), name)
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise TypeError(f"{name} must be a token string or a token id, got {token!r} ({type(token).__name__}).")
    return _within(host, int(token), name)


def _id_of_string(host: Host, text: str, name: str) -> int:
    if host.tokenizer is None:
        raise ValueError(f"the model has no tokenizer, so {name}={text!r} has no id; give a token id.")
    ids: list[int] = host.model.to_tokens(text, prepend_bos=False)[0].tolist() if text else []
    if len(ids) != 1:
        pieces = shorten((f"{token_text(host, i)!r} ({i})" for i in ids), 8) if ids else "nothing"
        raise ValueError(
            f"{name} must be exactly one token; {text!r} is {len(ids)}: {pieces}. Give one of them (a leading space counts: "
            f'" Paris" is not "Paris"), or use attribute_answer for an answer of several tokens.'
        )
    unknown = getattr(host.tokenizer, "unk_token_id", None)
    if ids[0] == unknown and text != getattr(host.tokenizer, "unk_token", None):
        raise ValueError(
            f"{name}: {text!r} is not in the vocabulary (the tokenizer gives its unknown token, id {unknown})."
        )
    return ids[0]


def _within(host: Host, token: int, name: str) -> int:
    if not 0 <= token < host.d_vocab_out:
        raise ValueError(
            f"{name}: token ids must lie in [0, {host.d_vocab_out}), the width of the logits; got {token}."
        )
    return token


def target_ids(
    host: Host, spec: Any, plan: PositionPlan, prompts: Prompts | None, name: str = "targets"
) -> tuple[Ids | None, PositionPlan]:
    """Target ids `[batch, pos, width]` (filled up with -1), and the positions that have one.

    `TOP` gives None: it is known only once the logits are.
    """
    shape = plan.mask.shape
    if isinstance(spec, Target):
        if spec is TOP:
            return None, plan
        return _next_tokens(plan, prompts, host)
    if isinstance(spec, np.ndarray):
        spec = torch.as_tensor(spec)
    if isinstance(spec, Tensor) and spec.ndim > 0:
        return _broadcast(host, spec, plan.mask, name), plan
    if isinstance(spec, (list, tuple)):
        return _one_per_prompt(host, spec, shape, name), plan
    ids = torch.tensor(_members(host, spec, name))
    return ids.expand(*shape, len(ids)).clone(), plan


def _members(host: Host, spec: Any, name: str) -> list[int]:
    if not isinstance(spec, TokenSet):
        return [token_id(host, spec, name)]
    ids = [token_id(host, token, name) for token in spec.tokens]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{name}: {spec} names a token twice (ids {shorten(ids)}); its probability would count twice.")
    if len(ids) == host.d_vocab_out:
        raise ValueError(f"{name}: the set names all {len(ids)} tokens; their probability is 1 at every state.")
    return ids


def _one_per_prompt(host: Host, spec: Sequence[Any], shape: torch.Size, name: str) -> Ids:
    if len(spec) != shape[0]:
        raise ValueError(f"{name} as a list must have one entry a prompt: {shape[0]} prompts, {len(spec)} entries.")
    rows = [_members(host, item, name) for item in spec]
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids[:, None, :].expand(*shape, width).clone()


def _broadcast(host: Host, spec: Tensor, mask: Tensor, name: str) -> Ids:
    """A tensor of ids on the grid of positions; where a position is masked, it may hold anything (-100, say)."""
    if spec.is_floating_point() or spec.dtype == torch.bool:
        raise TypeError(f"{name} as a tensor must hold whole-number token ids, got {spec.dtype}.")
    ids = spec.detach().cpu().long()
    try:
        ids = ids.broadcast_to(mask.shape)
    except RuntimeError:
        hint = " For one target a prompt pass a list, or tensor[:, None]." if ids.ndim == 1 else ""
        raise ValueError(
            f"{name} of shape {tuple(spec.shape)} do not broadcast to [batch, pos] = {tuple(mask.shape)} of the selected "
            f"positions.{hint}"
        ) from None
    wrong = ids[mask & ((ids < 0) | (ids >= host.d_vocab_out))].unique().tolist()
    if wrong:
        raise ValueError(
            f"{name}: token ids must lie in [0, {host.d_vocab_out}), the width of the logits; got {shorten(wrong)}."
        )
    return torch.where(mask, ids, PAD)[..., None]


def _next_tokens(plan: PositionPlan, prompts: Prompts | None, host: Host) -> tuple[Ids, PositionPlan]:
    if prompts is None:
        raise ValueError("targets=NEXT needs the tokens: pass them (or the prompt) as the second argument.")
    length = prompts.tokens.shape[1]
    following = (plan.index + 1).clamp(max=length - 1)
    batch = torch.arange(len(prompts.tokens))[:, None].expand_as(following)
    last = (plan.index + 1 >= length) | ~prompts.mask[batch, following]
    kept = plan.without(last)
    if not bool(kept.mask.any()):
        raise ValueError(
            "targets=NEXT: no selected position has a next token in the input (the last token has none). Select earlier "
            "positions, for example positions=None or positions=-2."
        )
    ids = prompts.tokens[batch, following]
    wrong = ids[kept.mask & (ids >= host.d_vocab_out)].unique().tolist()
    if wrong:
        raise ValueError(
            f"targets=NEXT: ids {shorten(wrong)} are inputs without an output (d_vocab_out {host.d_vocab_out})."
        )
    return ids[..., None].clone(), kept


def refuse_overlap(target: Ids, incorrect: Ids, mask: Tensor) -> None:
    """A token on both sides of a difference cancels: refuse it."""
    wide, narrow = (target, incorrect) if target.shape[-1] >= incorrect.shape[-1] else (incorrect, target)
    shared: set[int] = set()
    # One by one: all pairs of two sets of a thousand words are a million at every position.
    for token in narrow.unbind(-1):
        there = (wide == token[..., None]).any(-1) & (token != PAD) & mask
        shared.update(token[there].unique().tolist())
    if shared:
        raise ValueError(
            f"targets and incorrect_targets share token id {shorten(sorted(shared))}: their difference says nothing."
        )


def target_texts(host: Host, ids: Ids, mask: Tensor) -> tuple[tuple[str, ...], ...]:
    """Target ids as text, "" where masked; a set reads " cat| dog"."""
    known = {token: token_text(host, token) for token in ids[mask].unique().tolist() if token != PAD}

    def text(row: list[int]) -> str:
        return "|".join(known[token] for token in row if token != PAD)

    return tuple(
        tuple(text(row) if kept else "" for row, kept in zip(rows, flags, strict=True))
        for rows, flags in zip(ids.tolist(), mask.tolist(), strict=True)
    )


__all__ = ["NEXT", "TOP", "refuse_overlap", "target_ids", "target_texts", "token_id"]
