"""What the residual stream is the sum of: embeddings, and in every block attention and MLP, or heads.

A part is a vector that the model adds to the stream at one place; at a selected position all parts from the embedding to
the last block sum to the last state. They are collected in the forward pass that collects the states (or taken from the
cache at hand) as *sources*: activations of which only the selected rows are kept, and from which the parts are built
when they are needed, so that the vectors of all heads of all layers need not exist at once.

Nothing is taken on trust: before parts are handed out, state + parts = next state is checked on the states at hand, and
heads + bias = attention on the attention's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError, one_of
from iglens_tl._model.adding import require_equal, way_of_adding, wide
from iglens_tl._model.host import Host, architecture, weight_of
from iglens_tl._model.neurons import neuron_activations, neuron_pieces
from iglens_tl._model.states import hook_name, state_exists
from iglens_tl._plan import state_label

UNITS = ("block", "sublayer", "head", "neuron")
"""What a block is taken apart into: nothing (its whole update); attention and MLP; heads, attention's bias and MLP;
attention, neurons and the MLP's bias."""

NOTHING = -1
"""As the start of a part: what is there before the embedding."""

Build = Callable[[Sequence[Tensor]], tuple[tuple[str, ...], Tensor]]
"""Rows of the activations that are needed -> labels and parts `[part, rows, d_model]`."""

Pieces = Callable[[Sequence[Tensor], int], Iterator[tuple[tuple[str, ...], Tensor]]]
"""The same, for parts too many to exist at once: at most as many at a time as the second argument says."""

_MOST = 256
POST_NORMS = ("ln1_post", "ln1")  # OLMo-2's post-norm is called ln1 in TransformerLens 3


@dataclass(frozen=True)
class PartSource:
    """Parts before the run: where they are added, what they are computed from.

    Args:
        start, end: the states (in half blocks) between which they are added; `start` is `NOTHING` for the embeddings.
        needs: names of activations.
        build: what makes parts of them.
        stream: what makes a few parts of them at a time, where they are many.
    """

    start: int
    end: int
    needs: tuple[str, ...]
    build: Build
    stream: Pieces | None = None


@dataclass(frozen=True)
class PartGroup:
    """Parts after the run, which are built when asked for.

    Args:
        source: where and from what.
        tensors: the selected rows of the activations, `[rows, ...]` each.
    """

    source: PartSource
    tensors: tuple[Tensor, ...]

    @property
    def start(self) -> int:
        return self.source.start

    @property
    def end(self) -> int:
        return self.source.end

    @torch.no_grad()
    def build(self, rows: slice = slice(None)) -> tuple[tuple[str, ...], Float[Tensor, "part rows d_model"]]:
        """Labels and vectors of the parts, of some rows; at least in float32.

        Raises:
            UnsupportedModelError: for heads that do not sum to their attention's output.
        """
        return self.source.build([tensor[rows] for tensor in self.tensors])

    def pieces(self, rows: slice = slice(None), most: int = _MOST) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """As `build`, in pieces; of parts that are many, `most` at a time."""
        tensors = [tensor[rows] for tensor in self.tensors]
        with torch.no_grad():
            yield from [self.source.build(tensors)] if self.source.stream is None else self.source.stream(tensors, most)


def part_sources(host: Host, unit: str) -> list[PartSource]:
    """The sources of the whole stream, in order: embeddings, then block by block.

    Labels are `embed`, `pos_embed` (with whole blocks `embed` is both); `3` (a whole block); `3_attn`, `3_mixer`,
    `3_mlp`; `L3H2`, `3_attn_bias`; `L3N17`, `3_mlp_bias`. A block without attention and MLP hooks (a state-space model's)
    is one part in every unit.

    Raises:
        UnsupportedModelError: for heads, where an attention does not expose them.
    """
    one_of("unit", unit, UNITS)
    return [
        _embeddings(host, unit),
        *(source for layer in range(host.n_layers) for source in _of_block(host, layer, unit)),
    ]


def gather(sources: Sequence[PartSource], kept: Sequence[Tensor]) -> tuple[PartGroup, ...]:
    """The rows that were collected for `needs` of each source, one source after the other."""
    groups: list[PartGroup] = []
    for source in sources:
        groups.append(PartGroup(source, tuple(kept[: len(source.needs)])))
        kept = kept[len(source.needs) :]
    return tuple(groups)


def between(groups: Sequence[PartGroup], start: int, end: int) -> list[PartGroup]:
    """The groups whose parts are added between two states."""
    return [group for group in groups if start <= group.start and group.end <= end]


def check_parts(host: Host, groups: Sequence[PartGroup], states: Mapping[int, Tensor]) -> None:
    """Check that each state at hand plus the parts up to the next is the next.

    Args:
        host: the model.
        groups: all parts of the stream, or none.
        states: rows `[rows, d_model]` of states, by half block, ascending.

    Raises:
        UnsupportedModelError: with the numbers, where they differ by more than rounding.
    """
    if not groups:
        return
    first = next(iter(states))
    known = {NOTHING: torch.zeros_like(states[first]), **states}
    for start, end in pairwise(known):
        inside = between(groups, start, end)
        total, size = _sum(inside, known[start])
        # Every block rounds what it adds to the stream, once for each sublayer.
        require_equal(host, total, known[end], size, f"{_name(start, host)} + parts", _name(end, host), len(inside))


def _sum(groups: Sequence[PartGroup], start: Tensor) -> tuple[Tensor, Tensor]:
    """Start plus all parts `[rows, d_model]`, and the size of the largest term in each row, in float64."""
    total = start.double()
    size = total.abs().amax(-1)
    for _, parts in chain.from_iterable(group.pieces() for group in groups):
        total = total + parts.double().sum(0).to(total.device)
        size = torch.maximum(size, parts.double().abs().sum(0).amax(-1).to(total.device))
    return total, size


def _name(half: int, host: Host) -> str:
    return "nothing" if half == NOTHING else state_label(half, host.n_layers)


# --- Embeddings --------------------------------------------------------------------------------------------------


def _embeddings(host: Host, unit: str) -> PartSource:
    first = hook_name(0, host.n_layers)
    learned = getattr(host.model.cfg, "positional_embedding_type", "standard") == "standard"
    if unit == "block" or not learned or not {"hook_embed", "hook_pos_embed"} <= host.hook_names:
        return PartSource(NOTHING, 0, (first,), _as_they_are(("embed",)))
    return PartSource(NOTHING, 0, (first, "hook_embed", "hook_pos_embed"), _two_embeddings)


def _two_embeddings(tensors: Sequence[Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Token and position apart where the first state is their sum; else (scaled, normed) the first state as it is."""
    first, *both = (wide(tensor) for tensor in tensors)
    if torch.allclose(both[0] + both[1], first, rtol=1e-5, atol=1e-5 * float(first.abs().amax())):
        return ("embed", "pos_embed"), torch.stack(both)
    return ("embed",), first[None]


def _as_they_are(labels: tuple[str, ...]) -> Build:
    return lambda tensors: (labels, torch.stack([wide(tensor) for tensor in tensors]))


# --- Blocks ------------------------------------------------------------------------------------------------------


def _of_block(host: Host, layer: int, unit: str) -> Iterator[PartSource]:
    start, middle, end = 2 * layer, 2 * layer + 1, 2 * layer + 2
    attention, mlp = _sublayer_hooks(host, layer)
    if unit == "block" or (attention is None and mlp is None):
        needs = (hook_name(start, host.n_layers), hook_name(end, host.n_layers))
        yield PartSource(start, end, needs, _difference(f"{layer}"))
        return
    halved = attention is not None and mlp is not None and state_exists(host, middle)
    if attention is not None:
        stop = middle if halved else end
        if unit == "head" and attention.endswith("hook_attn_out"):
            yield _heads(host, layer, attention, start, stop)
        else:
            kind = "attn" if attention.endswith("hook_attn_out") else "mixer"
            yield PartSource(start, stop, (attention,), _as_they_are((f"{layer}_{kind}",)))
    if mlp is not None:
        first = middle if halved else start
        if unit == "neuron":
            yield _neurons(host, layer, mlp, first, end)
        else:
            yield PartSource(first, end, (mlp,), _as_they_are((f"{layer}_mlp",)))


def _sublayer_hooks(host: Host, layer: int) -> tuple[str | None, str | None]:
    """Names of what a block's attention (or, in a hybrid, its mixer) and its MLP add to the stream."""

    def found(*names: str) -> str | None:
        return next((f"blocks.{layer}.{name}" for name in names if f"blocks.{layer}.{name}" in host.hook_names), None)

    attention, mlp = found("hook_attn_out"), found("hook_mlp_out")
    if getattr(host.model.cfg, "attn_only", False):
        mlp = None  # HookedTransformer has the hook, which nothing reaches
    if attention is None and mlp is not None:
        attention = found("mixer.hook_out")
    return attention, mlp


def _difference(label: str) -> Build:
    return lambda tensors: ((label,), (wide(tensors[1]) - wide(tensors[0]).to(tensors[1].device))[None])


def _heads(host: Host, layer: int, attention: str, start: int, end: int) -> PartSource:
    name = f"blocks.{layer}.attn.hook_z"
    weight = weight_of(host.model.blocks[layer].attn, "W_O")
    if name not in host.hook_names or weight is None or weight.ndim != 3:
        raise UnsupportedModelError(
            f"the attention of block {layer} of {architecture(host.model) or host.name} does not expose its heads (attn.hook_z "
            'and a W_O [head, d_head, d_model], not offloaded). Ask for unit="sublayer".'
        )
    if not weight.is_floating_point():
        raise UnsupportedModelError(f'W_O of block {layer} is quantised ({weight.dtype}): ask for unit="sublayer".')

    def build(tensors: Sequence[Tensor]) -> tuple[tuple[str, ...], Tensor]:
        z, added = tensors
        labels, parts = head_outputs(host, layer, wide(z))
        way = way_of_adding(host, layer, POST_NORMS, parts, added, "the heads and the bias")
        return labels, way(parts, parts.sum(0))

    return PartSource(start, end, (name, attention), build)


def _neurons(host: Host, layer: int, mlp: str, start: int, end: int) -> PartSource:
    needs = (neuron_activations(host, layer), mlp)

    def stream(tensors: Sequence[Tensor], most: int) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        return neuron_pieces(host, layer, tensors, most)

    def build(tensors: Sequence[Tensor]) -> tuple[tuple[str, ...], Tensor]:
        labels, parts = zip(*stream(tensors, _MOST), strict=True)
        return tuple(chain.from_iterable(labels)), torch.cat(parts)

    return PartSource(start, end, needs, build, stream)


def head_outputs(host: Host, layer: int, z: Float[Tensor, "rows head d_head"]) -> tuple[tuple[str, ...], Tensor]:
    """Every head's output `z W_O`, and the attention's bias where it has one."""
    attn = host.model.blocks[layer].attn
    weight = wide(attn.W_O.detach())
    parts = torch.einsum("rhd,hdm->hrm", z.to(weight.device, weight.dtype), weight)
    labels = tuple(f"L{layer}H{head}" for head in range(len(parts)))
    bias = getattr(attn, "b_O", None)
    if not isinstance(bias, Tensor) or not bool(bias.any()):
        return labels, parts
    own = bias.detach().to(parts.device, parts.dtype).expand_as(parts[:1])
    return (*labels, f"{layer}_attn_bias"), torch.cat([parts, own])
