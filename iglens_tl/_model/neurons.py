"""The neurons of a block's MLP as parts of what it adds to the stream, a few at a time.

Neuron `n` adds `post[n] * W_out[n]`, the MLP's bias is a part of its own. The vectors of all neurons of a layer are
`d_mlp` times as large as the stream, so they are built in pieces that are used and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError
from iglens_tl._model.adding import way_of_adding, wide
from iglens_tl._model.host import Host, architecture, weight_of

POST_NORMS = ("ln2_post", "ln2")  # OLMo-2's post-norm is called ln2 in TransformerLens 3
_WITNESSES = 8
"""Partial sums of neurons by which the way of adding is settled."""


def neuron_activations(host: Host, layer: int) -> str:
    """The name of the activation that holds the neurons of a block.

    Raises:
        UnsupportedModelError: where the MLP does not expose them (experts, quantised or offloaded weights).
    """
    name = f"blocks.{layer}.mlp.hook_post"
    weight = weight_of(getattr(host.model.blocks[layer], "mlp", None), "W_out")
    if name not in host.hook_names or weight is None or weight.ndim != 2:
        raise UnsupportedModelError(
            f"the MLP of block {layer} of {architecture(host.model) or host.name} does not expose its neurons (mlp.hook_post and "
            'a W_out [d_mlp, d_model], not offloaded). Ask for unit="sublayer" or "head".'
        )
    if not weight.is_floating_point():
        raise UnsupportedModelError(f'W_out of block {layer} is quantised ({weight.dtype}): ask for unit="sublayer".')
    return name


def neuron_pieces(
    host: Host, layer: int, tensors: Sequence[Tensor], most: int
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Labels `L3N17` (and `3_mlp_bias`) and parts `[part, rows, d_model]`, at most `most` at a time.

    Args:
        host: the model.
        layer: the block.
        tensors: rows of the neurons' activations `[rows, d_mlp]` and of what the MLP added `[rows, d_model]`.
        most: parts in a piece.
    """
    mlp = host.model.blocks[layer].mlp
    weight = wide(mlp.W_out.detach())
    post, added = wide(tensors[0]).to(weight.device, weight.dtype), tensors[1]
    found = getattr(mlp, "b_out", None)
    bias = found.detach().to(weight.device, weight.dtype) if isinstance(found, Tensor) and bool(found.any()) else None
    sums = [post[:, i] @ weight[i] for i in torch.arange(weight.shape[0]).tensor_split(_WITNESSES)]
    witness = torch.stack([*sums, *([] if bias is None else [bias.expand_as(sums[0])])])
    way, whole = way_of_adding(host, layer, POST_NORMS, witness, added, "the neurons and the bias"), witness.sum(0)
    if bias is not None:
        yield (f"{layer}_mlp_bias",), way(bias.expand_as(whole)[None], whole)
    for start in range(0, weight.shape[0], most):
        some = slice(start, min(start + most, weight.shape[0]))
        labels = tuple(f"L{layer}N{neuron}" for neuron in range(some.start, some.stop))
        yield labels, way(post[:, some].T[..., None] * weight[some, None], whole)
