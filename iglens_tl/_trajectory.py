"""What every readout method starts from: the selected states of a run, its targets, and what the model itself said.

The states come from the cache at hand, or from one forward pass that keeps only the selected rows. Whenever the model's
logits are at hand, the readout of the last state is checked against them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from iglens_tl._agreement import agree, allowed_log, coarsest
from iglens_tl._checks import ReadoutMismatchError, shorten
from iglens_tl._core.levels import FIELDS_OF, Levels, wide
from iglens_tl._core.readout import Readout, levels_in_blocks
from iglens_tl._core.segments import Path, read_states
from iglens_tl._core.states import Rows, States
from iglens_tl._model.answers import Ids, refuse_overlap
from iglens_tl._model.head import readout_of
from iglens_tl._model.host import Host, architecture, hooked_points
from iglens_tl._model.parts import PartGroup, PartSource, check_parts, gather, part_sources
from iglens_tl._model.states import Wanted, hook_name, prefix_mean, rows_at, run_and_collect
from iglens_tl._model.tokens import Prompts
from iglens_tl._plan import PositionPlan, StatePlan
from iglens_tl._request import Lens, Request, Settled, settle
from iglens_tl.targets import TOP


@contextmanager
def ordinary_tensors() -> Generator[None]:
    """Decorates an entry point: no gradients are tracked, and a caller's `torch.inference_mode` is left for the call.

    Weights cast inside inference mode could not take part in the gradients of an integrating estimator, and a result made
    there could not take part in any of the caller's.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class Trajectory:
    """The states of the selected positions and all that a readout of them needs.

    Args:
        path: K + 1 states `[rows, d_model]` and the target ids of the rows; a row is a selected (batch, pos).
        token_shape: batch and length of the input.
        stream: the same states before a lens was applied.
        parts: what the stream is the sum of, where a `unit` was asked for; checked to add up to the states.
        said: levels of the targets under the model's own logits; None where no logits were at hand.
        said_dtype: the dtype of those logits.
        last_levels: levels of the targets at the last state, where it was read to find them; else None.
    """

    host: Host
    readout: Readout
    path: Path
    token_shape: tuple[int, int]
    stream: Sequence[Tensor]
    parts: tuple[PartGroup, ...]
    positions: PositionPlan
    states: StatePlan
    prompts: Prompts | None
    target_ids: Ids
    incorrect_ids: Ids | None
    said: Levels | None
    said_dtype: torch.dtype | None
    last_levels: Levels | None
    has_lens: bool
    from_cache: bool

    def on_grid(self, rows: Tensor, fill: float | bool = float("nan")) -> Tensor:
        """Numbers of the rows `[..., rows]` on the `[..., batch, pos]` grid, `fill` where masked."""
        mask = self.positions.mask
        grid = torch.full((*rows.shape[:-1], *mask.shape), fill, dtype=rows.dtype)
        grid[..., mask] = rows
        return grid


def trajectory(request: Request, unit: str | None = None, budget: int | None = None) -> Trajectory:
    """Settle the request, collect its states (one forward pass at most), resolve `TOP`, apply the lens.

    Args:
        request: what the caller asked for.
        unit: one of `parts.UNITS`, to collect the additive parts of the stream in the same pass; None for none.
        budget: `max_memory` in bytes, or None; see `readout_of`.

    Raises:
        UnsupportedModelError: where the parts do not add up to the states, or the model does not expose them.
        ValueError: for NaN or infinite states (layer and position are named), and all that `settle` refuses.
    """
    settled = settle(request)
    host, plan = settled.host, settled.positions
    sources = [] if unit is None else part_sources(host, unit)
    points, groups_of_parts, logits = _collect(settled, sources, budget)
    readout = readout_of(host, request.dtype, budget)
    _check_finite(settled, points, readout)
    if groups_of_parts:
        own_states = points[-len(settled.states.halves) :]
        check_parts(host, groups_of_parts, dict(zip(settled.states.halves, own_states, strict=True)))
    ids, wrong, last_levels = _resolve(settled, request, readout, points, logits)
    if wrong is not None:
        refuse_overlap(ids, wrong, plan.mask)
    path = points if request.lens is None else _through_lens(request.lens, points, settled.states, readout)
    groups = [grid[plan.mask] for grid in (ids, wrong) if grid is not None]
    readout = replace(readout, n_targets=sum(group.shape[-1] for group in groups))
    said = None if logits is None else _levels_said(readout, logits, plan, groups)
    return Trajectory(
        host=host,
        readout=readout,
        path=Path(path, groups),
        token_shape=(settled.token_mask.shape[0], settled.token_mask.shape[1]),
        stream=points,
        parts=groups_of_parts,
        positions=plan,
        states=settled.states,
        prompts=settled.prompts,
        target_ids=torch.where(plan.mask[..., None], ids, -1),
        incorrect_ids=None if wrong is None else torch.where(plan.mask[..., None], wrong, -1),
        said=said,
        said_dtype=None if logits is None else logits.dtype,
        last_levels=None if request.lens is not None else last_levels,
        has_lens=request.lens is not None,
        from_cache=settled.view is not None,
    )


def _collect(
    settled: Settled, sources: Sequence[PartSource], budget: int | None
) -> tuple[States, tuple[PartGroup, ...], Tensor | None]:
    """The states `[rows, d_model]` in the order of the path, the parts, and the logits where they are at hand."""
    batch, pos = settled.positions.rows
    view, states, n_layers = settled.view, settled.states, settled.host.n_layers
    rows, names = rows_at(batch, pos), [hook_name(half, n_layers) for half in states.halves]
    own = [Wanted(name, rows) for name in names] if view is None else []
    if states.base == "mean":
        own.insert(0, Wanted(names[0], prefix_mean(settled.token_mask, batch, pos, budget)))
    of_parts = [Wanted(name, rows) for source in sources for name in source.needs]
    kept, logits = _run(settled, [*own, *of_parts])
    points: list[Tensor | Rows] = list(kept[: len(own)])
    if view is not None:
        points += [view.rows(half, batch, pos) for half in states.halves]
    own_states, parts = States(points[-len(states.halves) :]), gather(sources, kept[len(own) :])
    if states.base == "zero":
        none = own_states.rows(0, torch.arange(0))
        points.insert(0, none.new_zeros(1, none.shape[1]).expand(len(batch), -1))
    if settled.baseline_rows is not None:
        points.insert(0, settled.baseline_rows)
    return States(points), parts, logits


def _run(settled: Settled, wanted: Sequence[Wanted]) -> tuple[list[Tensor], Tensor | None]:
    if settled.view is not None:
        return settled.view.collect(wanted), settled.logits
    host, prompts = settled.host, settled.prompts
    assert prompts is not None
    mask = prompts.attention_mask
    return run_and_collect(host, prompts.tokens.to(host.device), None if mask is None else mask.to(host.device), wanted)


def _blocks(readout: Readout, logits: Tensor, plan: PositionPlan) -> Iterator[tuple[slice, Tensor]]:
    """Copies of the selected rows of the model's logits, a few at a time and at least in float32."""
    batch, pos = (index.to(logits.device) for index in plan.rows)
    item = torch.float64 if logits.dtype == torch.float64 else readout.dtype
    few = replace(readout, budget=min(readout.budget, 16 * readout.block_elements), dtype=item)
    size = few.rows_per_chunk(copies=3)  # the last ones (or room to reduce them), these as they are, and in float32
    for start in range(0, len(batch), size):
        rows = slice(start, start + size)
        yield rows, wide(logits[batch[rows], pos[rows]])


def _levels_said(readout: Readout, logits: Tensor, plan: PositionPlan, groups: Sequence[Tensor]) -> Levels:
    with torch.no_grad():
        found = Levels.empty(len(groups), len(plan.rows[0]))
        for rows, block in _blocks(readout, logits, plan):
            ids = [group[rows].to(logits.device) for group in groups]
            for first, part in levels_in_blocks(readout, block, ids, rows.start):
                found.put(first, part)
    return found


def _resolve(
    settled: Settled, request: Request, readout: Readout, points: States, logits: Tensor | None
) -> tuple[Ids, Ids | None, Levels | None]:
    """Target and incorrect ids `[batch, pos, width]`, `TOP` looked up in the model's logits or read from its last state.

    Where it is read, the levels that the last state has come back too: it need not be read again.
    """
    ids, wrong, mask = settled.target_ids, settled.incorrect_ids, settled.positions.mask
    if ids is not None and request.incorrect_targets is not TOP:
        return ids, wrong, None
    if logits is not None:
        top, levels = torch.empty(int(mask.sum()), dtype=torch.int64), None
        for rows, block in _blocks(readout, logits, settled.positions):
            top[rows] = block.argmax(-1).cpu()
    else:
        asked = [ids] if request.incorrect_targets is None else [ids, wrong]
        groups = [None if grid is None else grid[mask] for grid in asked]
        top, levels = _read_top(readout, points, groups, int(mask.sum()))
    grid = torch.full((*mask.shape, 1), -1)
    grid[mask] = top[:, None]
    return grid if ids is None else ids, grid if request.incorrect_targets is TOP else wrong, levels


def rows_for_top(readout: Readout) -> int:
    """How many last states are read at a time, whole, to say what `TOP` is."""
    return readout.rows_per_chunk(copies=2, budget=min(readout.budget, _WHOLE_ROWS))


def _read_top(readout: Readout, points: States, groups: Sequence[Tensor | None], n_rows: int) -> tuple[Tensor, Levels]:
    """The most probable token of each row, and the levels of groups of targets, of which None stands for that token."""
    tops, levels = torch.empty(n_rows, dtype=torch.int64), Levels.empty(len(groups), n_rows)
    readout = replace(readout, n_targets=sum(1 if group is None else group.shape[-1] for group in groups))
    with torch.no_grad():
        for rows in torch.arange(n_rows).split(rows_for_top(readout)):
            logits = readout.logits(points.rows(-1, rows))
            top = logits.argmax(-1, keepdim=True)
            tops[rows] = top[:, 0].cpu()
            ids = [top if group is None else group[rows].to(logits.device) for group in groups]
            for first, part in levels_in_blocks(readout, logits, ids, int(rows[0])):
                levels.put(first, part)
            del logits
    return tops, levels


COMPARED = ("log_top",)
"""What else is kept of every row where the last state is compared with the model's own logits."""

_AT_A_TIME = 1 << 16
"""Elements of states that are looked at together."""

_WHOLE_ROWS = 8 * 2**20
"""Bytes of whole logits that are held at a time to look for the largest."""


def _check_finite(settled: Settled, points: States, readout: Readout) -> None:
    n_rows = len(settled.positions.rows[0])
    some = torch.arange(n_rows).split(readout.rows_at_a_time(2, 8, _AT_A_TIME))
    for index, label in enumerate(settled.states.state_labels):
        good = torch.empty(n_rows, dtype=torch.bool)
        for tokens in some:
            low, high = points.rows(index, tokens).aminmax(dim=-1)  # of a NaN both are NaN
            good[tokens] = (low.isfinite() & high.isfinite()).cpu()
        if not bool(good.all()):
            given = index == 0 and settled.baseline_rows is not None
            advice = (
                "Give a baseline of finite numbers"
                if given
                else "Look at the run that made it (an overflow in half precision, a hook that divides by zero)"
            )
            raise ValueError(
                f"the state {label} holds NaN or infinite numbers at {_where(settled.positions, ~good)}. {advice}; no readout of "
                "it means anything."
            )


def _through_lens(lens: Lens, points: States, states: StatePlan, readout: Readout) -> list[Tensor]:
    """Each state through the lens; a baseline that is no state of the model (zero, a tensor) stays as it is."""
    own = [half // 2 for half in states.halves]
    first = {"embed": [], "mean": [own[0]]}.get(states.base, [None])
    mapped: list[Tensor] = []
    with torch.no_grad():
        for index, point in zip([*first, *own], points, strict=True):
            rows = point.to(readout.device, readout.dtype)
            result: Any = rows if index is None else lens(rows, index)
            if not isinstance(result, Tensor) or result.shape != rows.shape:
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(f"lens= must return a tensor of the state's shape {tuple(rows.shape)}; got {got}.")
            if not all(bool(end.isfinite()) for end in result.aminmax()):  # of a NaN both are NaN
                raise ValueError(
                    f"lens= gives NaN or infinite numbers for state {index}; no readout of them means anything."
                )
            mapped.append(result.detach())
    return mapped


def read_last(run: Trajectory) -> Levels:
    """Levels at the last state alone, `[.., rows]`; checked, and refused, as `read_checked` does."""
    states = replace(run.states, halves=run.states.halves[-1:], base="embed")
    return read_checked(replace(run, states=states, path=Path(run.path.states[-1:], run.path.groups)))


def read_checked(run: Trajectory, metric: str = "prob") -> Levels:
    """Levels at every state, `[.., (K + 1) * rows]`, as far as the metric needs them; checked against what the model said.

    Raises:
        ReadoutMismatchError: where the last state does not read as the model's own probability.
        ValueError: for logits that are not finite.
    """
    states, groups, last = run.path.states, run.path.groups, run.last_levels
    fields = FIELDS_OF[metric] if run.said is None else (*FIELDS_OF[metric], *COMPARED)
    if last is None:
        return checked(run, read_states(run.readout, run.path, fields=fields))
    before = read_states(run.readout, Path(states[:-1], groups), fields=fields)
    return checked(run, Levels.join([before, last]))


def checked(run: Trajectory, levels: Levels) -> Levels:
    """The levels that came, if they are finite and their last state is the model's own; raises as `read_checked`."""
    if run.said is not None:
        _check_said(run, run.said)
    n = run.path.n_tokens
    good = levels.log_target.isfinite().all(0).reshape(-1, n).all(1)
    if not bool(good.all()):
        labels = [label for label, fine in zip(run.states.state_labels, good.tolist(), strict=True) if not fine]
        _refuse_masked(levels, shorten(labels, 4))
        wider = torch.float32 if run.readout.dtype.itemsize < 4 else torch.float64
        raise ValueError(
            f"the readout of {shorten(labels, 4)} gives NaN or infinite logits (an overflow of {run.readout.dtype}?). Read in a "
            f"wider type: dtype={wider}."
        )
    if run.said is not None:
        check_against_model(run, levels.at(slice(-n, None)), run.said)
    return levels


def _check_said(run: Trajectory, said: Levels) -> None:
    good = said.log_top.isfinite() & said.logit.isfinite().all(0)
    if not bool(good.all()):
        _refuse_masked(said, _where(run.positions, ~good))
        raise ValueError(
            f"the model's own logits are NaN or infinite at {_where(run.positions, ~good)} (an overflow of {run.said_dtype}?). "
            "Run the model in a wider type, for example model.float()."
        )


def _refuse_masked(levels: Levels, where: str) -> None:
    """Refuse a target whose logit is minus infinity while all others are numbers: no overflow, and no wider type helps."""
    if bool((levels.log_target == -torch.inf).any()) and not bool(levels.log_target.isnan().any()):
        raise ValueError(
            f"the logit of a target is minus infinity at {where}: the model gives it no probability at all (is the word masked, "
            "by b_U for example?). Ask for another target."
        )


def _where(plan: PositionPlan, rows: Tensor) -> str:
    """The prompts and positions of some rows, in words."""
    batch, pos = (index[rows.cpu()].tolist() for index in plan.rows)
    return shorten((f"prompt {b} position {p}" for b, p in zip(batch, pos, strict=True)), 4)


def check_against_model(run: Trajectory, read: Levels, said: Levels) -> None:
    """Compare the readout of the last state with the model's own logits, for the target and for the most probable token."""
    dtype = coarsest(run.readout.dtype, run.path.dtype, run.said_dtype or run.readout.dtype)
    of_top = said.log_top + said.logit - said.log_target  # the largest logit itself
    size = torch.maximum(said.logit.abs(), of_top.abs())
    good, off, most = agree(dtype, read.log_target, said.log_target, size)
    top = (read.log_top - said.log_top).abs() <= allowed_log(dtype, said.log_top, size.amax(0))
    bad = ~(good.all(0) & top)
    if not bool(bad.any()):
        return
    worst = int(torch.where(bad, off.amax(0), -1.0).argmax())
    batch, pos = (int(index[worst]) for index in run.positions.rows)
    raise ReadoutMismatchError(
        f"the last state reads as p = {read.log_target[0, worst].exp():.6g} (log p = {read.log_target[0, worst]:.4f}) at prompt "
        f"{batch} position {pos}, the model itself says {said.log_target[0, worst].exp():.6g} (log p = "
        f"{said.log_target[0, worst]:.4f}); {int(bad.sum())} of {len(bad)} positions disagree beyond what "
        f"{str(dtype).removeprefix('torch.')} leaves open ({float(most[0, worst]):.2g} here). " + _likely_cause(run)
    )


def _likely_cause(run: Trajectory) -> str:
    hooked = hooked_points(run.host.norm, run.host.model.unembed)
    if run.has_lens:
        return "Likely cause: lens= changes the last state; at the last state it must be the identity."
    if hooked:
        return (
            f"Likely cause: hooks on {shorten(hooked, 3)} changed the run after its last state, and a readout of states "
            "cannot follow them. Remove them, or hook the residual stream instead."
        )
    if run.said_dtype is not None and run.prompts is None:
        return "Likely cause: logits= are of another run than the cache (other tokens, other hooks)."
    return (
        f"Likely cause: {architecture(run.host.model) or run.host.name} does something between its last block and its logits "
        "that final norm, unembedding and output transform do not cover, or the states and logits are of different runs. "
        "iglens_tl.doctor(model) says more."
    )
