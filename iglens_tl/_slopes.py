"""The slope of a target's readout at every state of the stream, through the blocks above: one backward pass.

This is what attribution patching multiplies with an update: to first order, taking the update `u_l` of block `l` out at a
position lowers the metric by `<d metric / d h_{l+1}, u_l>` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._full_model import FromFirstState
from iglens_tl._model.host import Host


def slopes_of_states(
    host: Host, tokens: Tensor, first: Tensor, place: int, groups: Sequence[Tensor], metric: str
) -> Float[Tensor, "segment seq d_model"]:
    """Gradients of the metric at the read position `place` with respect to the states that leave each block.

    Args:
        tokens: one prompt, `[1, seq]`.
        first: its first state, `[1, seq, d_model]`.
        groups: the target's ids (and those it is compared with), each `[1, width]`.
    """
    full = FromFirstState(host, [2 * (layer + 1) for layer in range(host.n_layers)], metric)
    kept: list[Tensor] = []
    for tap in full.taps:
        tap.register_forward_hook(partial(_keep, kept))
    with torch.enable_grad():
        start = first.detach().clone().requires_grad_()
        value = full(start, tokens, torch.tensor([place]), None, *groups)
        slopes = torch.autograd.grad(value.sum(), kept)
    return torch.stack([slope[0].detach().float().cpu() for slope in slopes])


def _keep(kept: list[Tensor], module: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG001 -- called by PyTorch
    kept.append(output)
