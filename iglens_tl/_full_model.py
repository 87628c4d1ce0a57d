"""The full model as a function of its first state: what captum is given to do its mathematics on.

`FromFirstState` is a module `[sequences, seq, d_model] -> [sequences]`: the first state of each sequence in, the metric of
its target out, with an `Identity` (a tap) at every state that is attributed. The taps are reached through hooks of the
model's own `hooks` context, so the model is left as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from iglens_tl._core.levels import levels_of_logits
from iglens_tl._model.host import Host
from iglens_tl._model.states import hook_name


class FromFirstState(torch.nn.Module):
    """See above.

    Args:
        host: the model.
        halves: the states that have a tap.
        metric: what comes out.
    """

    def __init__(self, host: Host, halves: Sequence[int], metric: str) -> None:
        super().__init__()
        self._host = (host,)  # in a tuple: the model is no part of this module
        self._names = [hook_name(half, host.n_layers) for half in halves]
        self._metric = metric
        self.taps = torch.nn.ModuleList(torch.nn.Identity() for _ in halves)
        self.sequences = 0
        """How many sequences have run through the model."""

    def forward(self, first: Tensor, tokens: Tensor, place: Tensor, mask: Tensor | None, *groups: Tensor) -> Tensor:
        """Values `[sequences]` of first states `[sequences, seq, d_model]`.

        Args:
            first: the first states.
            tokens: `[sequences, seq]`, for what the model takes from them beside the embedding.
            place: the position that is read, `[sequences]`.
            mask: attention mask, or None.
            groups: target ids, each `[sequences, width]`.
        """
        (host,) = self._host
        self.sequences += len(first)
        start = hook_name(0, host.n_layers)
        hooks: list[Any] = [(start, partial(_instead, value=first))]
        hooks += [(name, partial(_through, tap=tap)) for name, tap in zip(self._names, self.taps, strict=True)]
        extra = {} if mask is None else {"attention_mask": mask}
        with host.model.hooks(fwd_hooks=hooks):
            logits = host.model(tokens, return_type="logits", **extra)
        rows = logits[torch.arange(len(first), device=logits.device), place.to(logits.device)]
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return levels_of_logits(rows, [ids.to(rows.device) for ids in groups]).value(self._metric)


def _instead(tensor: Tensor, hook: Any, value: Tensor) -> Tensor:  # noqa: ARG001 -- called by TransformerLens
    return value.to(tensor.device, tensor.dtype)


def _through(tensor: Tensor, hook: Any, tap: torch.nn.Module) -> Tensor:  # noqa: ARG001 -- called by TransformerLens
    return tap(tensor)
