"""Runs that are entered in the middle: a state put in before some block, and the blocks above it run on from there.

The clean run of a prompt is recorded with the very arguments that each of its blocks was called with (masks, rotary
tables, positions). An entry is a state `[seq, d_model]` put in before block `l`; the blocks `l .. n-1` are then called as the
model called them, many entries in one batch that grows from block to block, so that what lies below `l` is never run
again: all blocks of a model cost about half a forward pass each. What an entry replaces of a component's output, it replaces
through TransformerLens's hook points.

Nothing is taken on trust. Every batch carries a control: the clean state, entered at the batch's lowest block, must come
out as the clean last state. Where it does not, or a block cannot be called by itself (its arguments depend on the size of
the batch, or on the blocks before), the entries are run as full forward passes that are hooked, with the same control. A
hook that does not fire is an error, and so is a block whose output is not its input plus what its sublayers put out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError
from iglens_tl._model.adding import require_equal
from iglens_tl._model.host import Host, architecture
from iglens_tl._model.states import Wanted, hook_name, run_and_collect

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far a control may come out from the clean state, relative to the largest coordinate at its position.

Measured: 0 to 2e-6 in float32 (another batch, another order of sums); a run that is entered wrongly is off by 0.1 and more.
"""

_CANNOT_ENTER = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
_BATCH_TOKENS = 4096


@dataclass
class Tally:
    """What a call has run so far.

    Args:
        forwards: sequences that ran through the whole model.
        block_evaluations: blocks evaluated, one for each block and sequence; those of the forwards too.
        enters: whether blocks can be called by themselves; False once it has failed.
    """

    forwards: int = 0
    block_evaluations: int = 0
    enters: bool = True

    def whole(self, sequences: int, n_layers: int) -> None:
        """Count full forward passes."""
        self.forwards += sequences
        self.block_evaluations += sequences * n_layers


@dataclass(frozen=True)
class Call:
    """The arguments beside the state that a block was called with, and the device of the state."""

    device: torch.device
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CleanRun:
    """One prompt's run.

    Args:
        host: the model.
        tokens: `[1, seq]`, without padding.
        states: `n_layers + 1` of them, `[seq, d_model]`: what enters each block, before hooks on its input, and the last.
        outputs: other activations by name, `[seq, ...]`.
        calls: how each block was called; empty where blocks were not called as modules.
    """

    host: Host
    tokens: Tensor
    states: tuple[Tensor, ...]
    outputs: Mapping[str, Tensor]
    calls: tuple[Call, ...]

    @property
    def n_tokens(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Replacement:
    """What is put in the place of a component's output: `output[index] = value`, an output being `[seq, ...]`."""

    index: tuple[Any, ...]
    value: Tensor

    def put(self, output: Tensor) -> None:
        output[self.index] = self.value.to(output.device, output.dtype)


@dataclass(frozen=True)
class Entry:
    """A state that is put in before a block, and what is replaced in the blocks from there on.

    Args:
        layer: the first block that runs; `n_layers` where none does.
        state: makes the state `[seq, d_model]`.
        read: the positions whose last state is wanted.
        replaced: by block, what is put in the place of a component there.
    """

    layer: int
    state: Callable[[], Tensor]
    read: Tensor
    replaced: Mapping[int, Replacement] = field(default_factory=dict[int, Replacement])


def record_run(host: Host, tokens: Tensor, names: Sequence[str], tally: Tally) -> CleanRun:
    """Run one prompt `[seq]`; keep all its states, the activations `names`, and how the blocks were called."""
    n = host.n_layers
    wanted = [Wanted(_point_of_state(layer), _first_row) for layer in range(n + 1)]
    wanted += [Wanted(name, _first_row) for name in names]
    calls: dict[int, Call] = {}
    first: list[Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int) -> None:  # noqa: ARG001 -- torch's
        if args and isinstance(args[0], Tensor):
            calls[layer] = Call(args[0].device, tuple(map(_reusable, args[1:])), _reusable_kwargs(kwargs))
            if layer == 0:
                first.append(args[0].detach()[0].clone())

    handles = [
        block.register_forward_pre_hook(partial(keep, layer=layer), with_kwargs=True)
        for layer, block in enumerate(host.model.blocks)
    ]
    try:
        kept, _ = run_and_collect(host, tokens[None].to(host.device), None, wanted)
    finally:
        for handle in handles:
            handle.remove()
    tally.whole(1, n)
    outputs = dict(zip(names, kept[n + 1 :], strict=True))
    known = tuple(calls[layer] for layer in range(n)) if len(calls) == n else ()
    states = (*(first or kept[:1]), *kept[1 : n + 1])
    return CleanRun(host, tokens[None].to(host.device), states, outputs, known)


def same_arguments(left: CleanRun, right: CleanRun) -> bool:
    """Whether the blocks of two runs were called with the same arguments beside the state, as far as both have positions.

    Masks and positions are the same for any tokens; anything else comes from the tokens themselves.
    """
    pairs = zip(left.calls, right.calls, strict=False)
    return all(_same((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs))) for a, b in pairs)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        common = tuple(slice(0, min(a, b)) for a, b in zip(left.shape, right.shape, strict=False))
        return left.ndim == right.ndim and bool((left[common] == right[common]).all())
    if isinstance(left, dict) and isinstance(right, dict):
        mine: dict[str, Any] = left
        theirs: dict[str, Any] = right
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        own: Any = left
        other: Any = right
        return len(own) == len(other) and all(_same(a, b) for a, b in zip(own, other, strict=True))
    return type(left) is type(right)


def _point_of_state(layer: int) -> str:
    """Where a state is taken and put in: as it leaves the block before, so that hooks on the next block's input act on it."""
    return "blocks.0.hook_resid_pre" if layer == 0 else f"blocks.{layer - 1}.hook_resid_post"


def _first_row(full: Tensor) -> Tensor:
    return full[0]


def _reusable(value: Any) -> Any:
    """An argument as it may be given again: a key-value cache would grow at every call."""
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        items: Any = value
        return type(items)(_reusable(item) for item in items)
    return None


def _reusable_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: False if name == "use_cache" else _reusable(value) for name, value in kwargs.items()}


def continue_run(
    run: CleanRun,
    entries: Sequence[Entry],
    point: str | None,
    tally: Tally,
    batch_size: int | None = None,
    done: Callable[[int], Any] | None = None,
) -> list[Tensor]:
    """The last states of all entries, `[read, d_model]` each.

    Args:
        run: the clean run of the prompt.
        entries: what is put in where.
        point: the hook point, as named within a block, at which `replaced` is put in; None where nothing is.
        tally: counts what is run.
        batch_size: entries at a time; None for as many as hold 4,096 tokens.
        done: told how many entries a batch held.

    Raises:
        UnsupportedModelError: where the clean state does not come out as it should, a hook does not fire, or a block
            does not add up.
    """
    size = max(1, _BATCH_TOKENS // run.n_tokens) if batch_size is None else batch_size
    order = sorted(range(len(entries)), key=lambda place: entries[place].layer)
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        finals = _batch(run, [entries[place] for place in places], point, tally)
        found.update(zip(places, finals, strict=True))
        if done is not None:
            done(len(places))
    return [found[place] for place in range(len(entries))]


def _batch(run: CleanRun, entries: Sequence[Entry], point: str | None, tally: Tally) -> list[Tensor]:
    control = Entry(entries[0].layer, lambda: run.states[entries[0].layer], torch.arange(run.n_tokens))
    rows = [control, *entries]
    if tally.enters and len(run.calls) == run.host.n_layers:
        try:
            finals = _enter(run, rows, point, tally)
        except _CANNOT_ENTER:  # whatever it was: a full forward pass shows whether it was ours or the model's
            finals = None
        if finals is not None and _control_holds(run, finals[0]):
            return finals[1:]
    tally.enters = False
    finals = _full(run, rows, point, tally)
    if not _control_holds(run, finals[0]):
        raise UnsupportedModelError(
            f"a state of {architecture(run.host.model) or run.host.name} put back before block {entries[0].layer}, unchanged, "
            "does not give the model's own last state, so an ablation would measure something else. Does a hook of yours change "
            "from run to run?"
        )
    return finals[1:]


def _control_holds(run: CleanRun, final: Tensor) -> bool:
    clean = run.states[-1].double()
    off = (final.double().to(clean.device) - clean).abs().amax(-1)
    return bool((off <= _TOLERANCE[run.states[-1].dtype] * clean.abs().amax(-1).clamp(min=1e-6)).all())


def _enter(run: CleanRun, rows: Sequence[Entry], point: str | None, tally: Tally) -> list[Tensor]:
    """Block after block, the batch growing by the entries of each block; rows come in the order of their layers."""
    model, n = run.host.model, run.host.n_layers
    seat = _Seat(run, rows, point)
    active: Tensor | None = None
    with run.host.hooks(seat.hooks()):
        for layer in range(rows[0].layer, n + 1):
            new = [row.state() for row in rows if row.layer == layer]
            if new:
                fresh = torch.stack([state.to(run.states[layer]) for state in new])
                active = fresh if active is None else torch.cat([active.to(fresh.device), fresh])
            if layer < n and active is not None:
                seat.rows = [row for row in rows if row.layer <= layer]
                active = _call(model.blocks[layer], run.calls[layer], active)
                tally.block_evaluations += len(active)
    assert active is not None
    seat.check()
    return [final[row.read.to(final.device)] for row, final in zip(rows, active, strict=True)]


def _call(block: Any, call: Call, state: Tensor) -> Tensor:
    out = block(state.to(call.device), *call.args, **call.kwargs)
    first = out[0] if isinstance(out, tuple) else out
    if not isinstance(first, Tensor) or first.shape != state.shape:
        raise UnsupportedModelError("a block called by itself returns no state.")
    return first


def _full(run: CleanRun, rows: Sequence[Entry], point: str | None, tally: Tally) -> list[Tensor]:
    """Full forward passes, each entry's state put in before its block; rows that enter nowhere are not run."""
    n = run.host.n_layers
    ran = [row for row in rows if row.layer < n]
    finals: list[Tensor] = []
    if ran:
        seat = _Seat(run, ran, point)
        seat.rows = ran
        inject = [(_point_of_state(row.layer), partial(_inject, place=i, row=row)) for i, row in enumerate(ran)]
        last = Wanted(hook_name(2 * n, n), lambda full: full)
        tokens = run.tokens.expand(len(ran), -1)
        with run.host.hooks([*inject, *seat.hooks()]):
            kept, _ = run_and_collect(run.host, tokens, None, [last])
        tally.whole(len(ran), n)
        seat.check()
        finals = list(kept[0])
    finals += [row.state() for row in rows if row.layer == n]
    return [final[row.read.to(final.device)] for row, final in zip(rows, finals, strict=True)]


def _inject(tensor: Tensor, hook: Any, place: int, row: Entry) -> Tensor:  # noqa: ARG001 -- TransformerLens calls it so
    changed = tensor.clone()
    changed[place] = row.state().to(tensor)
    return changed


class _Seat:
    """The hooks of a batch: they put replacements into the rows that are running, and look whether they took."""

    def __init__(self, run: CleanRun, rows: Sequence[Entry], point: str | None) -> None:
        self.run, self.point = run, point
        self.rows: Sequence[Entry] = ()
        self.layers = sorted({layer for row in rows for layer in row.replaced})
        self.seen: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.layers}
        self.fired: set[int] = set()

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """To be added for the batch: put in first, look afterwards."""
        known = self.run.host.hook_names
        found: list[tuple[str, Callable[..., Any]]] = []
        for layer in self.layers:
            found.append((f"blocks.{layer}.{self.point}", partial(self._put, layer=layer)))
            for term in ("hook_resid_pre", *sublayer_points(self.run.host, layer), "hook_resid_post"):
                if f"blocks.{layer}.{term}" in known:
                    found.append((f"blocks.{layer}.{term}", partial(self._look, layer=layer, term=term)))
        return found

    def _put(self, tensor: Tensor, hook: Any, layer: int) -> Tensor:  # noqa: ARG002 -- TransformerLens calls it so
        changed = tensor.clone()
        for place, row in enumerate(self.rows):
            if layer in row.replaced:
                row.replaced[layer].put(changed[place])
        self.fired.add(layer)
        return changed

    def _look(self, tensor: Tensor, hook: Any, layer: int, term: str) -> None:  # noqa: ARG002 -- as above
        rows = [(place, row.replaced[layer].index[0]) for place, row in enumerate(self.rows) if layer in row.replaced]
        self.seen[layer][term] = torch.cat([tensor[place][where].detach().clone() for place, where in rows])

    def check(self) -> None:
        """Refuse a replacement that did not take: its hook never fired, or the block is not the sum of its parts."""
        host = self.run.host
        silent = [layer for layer in self.layers if layer not in self.fired]
        if silent:
            raise UnsupportedModelError(
                f"{architecture(host.model) or host.name} never reached blocks.{silent[0]}.{self.point}, so nothing was ablated "
                'there. Use component="block".'
            )
        for layer in self.layers:
            seen = self.seen[layer]
            after = seen["hook_resid_post"]  # a block's input may be seen before it is moved to the block's device
            terms = [tensor.to(after.device).double() for name, tensor in seen.items() if name != "hook_resid_post"]
            size = torch.stack([term.abs().amax(-1) for term in terms]).amax(0)
            require_equal(
                host, torch.stack(terms).sum(0), after, size, f"resid_pre + sublayers of block {layer}", "resid_post", 2
            )


def sublayer_points(host: Host, layer: int) -> tuple[str, ...]:
    """What a block adds to the stream, as named within it; in a hybrid's block, its mixer is in the place of attention."""
    attention = "hook_attn_out" if f"blocks.{layer}.hook_attn_out" in host.hook_names else "mixer.hook_out"
    if getattr(host.model.cfg, "attn_only", False):
        return (attention,)  # HookedTransformer has hook_mlp_out, which nothing reaches
    return (attention, "hook_mlp_out")
