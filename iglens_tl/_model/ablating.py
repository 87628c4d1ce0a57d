"""What each component puts out in a clean run, at which hook point it can be replaced, and what a head writes.

Components: `"block"` (the whole update `h_{l+1} - h_l`), `"attn"` and `"mlp"` (what they add to the stream, behind a
post-norm where there is one), `"head"` (a head's `z`, `[d_head]`, which its rows of `W_O` turn into what it writes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError, shorten
from iglens_tl._model.adding import way_of_adding, wide
from iglens_tl._model.continuing import CleanRun, sublayer_points
from iglens_tl._model.host import Host, architecture, weight_of
from iglens_tl._model.parts import POST_NORMS, head_outputs

COMPONENTS = ("block", "attn", "mlp", "head")
_POINTS = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "head": "attn.hook_z"}


def point_of(component: str) -> str | None:
    """The hook point within a block at which the component is replaced; None for whole blocks, which are left out."""
    return _POINTS.get(component)


def names_of(component: str, layers: Sequence[int]) -> list[str]:
    """The activations that a component's outputs are taken from, beside the states."""
    if component == "block":
        return []
    points = ("attn.hook_z", "hook_attn_out") if component == "head" else (_POINTS[component],)
    return [f"blocks.{layer}.{point}" for layer in layers for point in points]


def lacking(host: Host, component: str, layers: Sequence[int]) -> list[int]:
    """The blocks that do not expose the component."""
    if component == "block":
        return []
    return [layer for layer in layers if not _exposes(host, component, layer)]


def _exposes(host: Host, component: str, layer: int) -> bool:
    if component == "mlp":
        return "hook_mlp_out" in sublayer_points(host, layer) and f"blocks.{layer}.hook_mlp_out" in host.hook_names
    known = all(name in host.hook_names for name in names_of(component, [layer]))
    return known and (component != "head" or _w_o(host, layer) is not None)


def require_component(host: Host, component: str, layers: Sequence[int]) -> None:
    """Refuse, before anything runs, a component that some of the blocks do not have."""
    missing = lacking(host, component, layers)
    if missing:
        raise UnsupportedModelError(
            f"component={component!r} needs {_POINTS[component]} in every block that is ablated; "
            f"{architecture(host.model) or host.name} has none in block {shorten(missing)} (attention-only, state-space or fused "
            'blocks; offloaded weights). Leave these out with layers=, or use component="block".'
        )


def _w_o(host: Host, layer: int) -> Tensor | None:
    weight = weight_of(getattr(host.model.blocks[layer], "attn", None), "W_O")
    return weight if weight is not None and weight.ndim == 3 and weight.is_floating_point() else None


def output_of(run: CleanRun, component: str, layer: int) -> Tensor:
    """What the component put out in the clean run, `[seq, d_model]` or, of heads, `[seq, head, d_head]`; at least float32."""
    if component == "block":
        return wide(run.states[layer + 1]) - wide(run.states[layer]).to(run.states[layer + 1].device)
    return wide(run.outputs[f"blocks.{layer}.{_POINTS[component]}"])


def written(host: Host, layer: int, z: Tensor) -> Tensor:
    """What heads `[..., head, d_head]` write, `[..., head, d_model]`, before a post-norm."""
    weight = _w_o(host, layer)
    assert weight is not None
    return torch.einsum("...hd,hdm->...hm", z, wide(weight.detach()).to(z.device))


def norm_of(host: Host, component: str, layer: int, output: Tensor) -> Tensor:
    """The length of what a component writes, `[..., 1]` (of heads `[..., head, 1]`)."""
    return (written(host, layer, output) if component == "head" else output).norm(dim=-1, keepdim=True)


def width_of(host: Host, layer: int) -> int:
    """How many heads a block has."""
    weight = _w_o(host, layer)
    assert weight is not None
    return len(weight)


def as_added(run: CleanRun, layer: int, head: int | None, own: Tensor, value: Tensor, read: Tensor) -> Tensor:
    """By how much the stream changes at the positions that are read when `value` takes the place of `own`.

    Args:
        run: the clean run.
        layer: the block.
        head: which head, None where the output is `[seq, d_model]`.
        own: what the component put out; of heads, all heads `[seq, head, d_head]`.
        value: what takes its place; of heads, that head's `[seq, d_head]`.
        read: the positions.

    Returns:
        `[read, d_model]` in float64. A head's part goes through a post-norm with the norm's scale frozen.

    Raises:
        UnsupportedModelError: where the heads and the bias do not sum to the attention's output.
    """
    at = read.to(own.device)
    if head is None:
        return value[at].double() - own[at].double()
    changed = own[at].clone()
    changed[:, head] = value[at]
    added = run.outputs[f"blocks.{layer}.hook_attn_out"][at]
    _, parts = head_outputs(run.host, layer, own[at])
    way = way_of_adding(run.host, layer, POST_NORMS, parts, added, "the heads and the bias")
    _, others = head_outputs(run.host, layer, changed)
    return (way(others, parts.sum(0))[head] - way(parts, parts.sum(0))[head]).double()
