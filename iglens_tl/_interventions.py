"""What is put in the place of a component's output, where, and in which state a run is entered for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from iglens_tl._draws import generator_of
from iglens_tl._model.ablating import as_added, norm_of, output_of, width_of
from iglens_tl._model.continuing import CleanRun, Entry, Replacement
from iglens_tl._model.host import Host
from iglens_tl.reference import ReferenceUpdates

REPLACEMENTS = {
    "zero": 'nothing (modes "zero" and "skip" are the same)',
    "skip": 'nothing (modes "zero" and "skip" are the same)',
    "mean": "its mean over the reference positions",
    "resample": "its output at a reference position drawn at random",
    "placebo": "itself plus a random vector of its own length",
}
MODES = tuple(REPLACEMENTS)

Site = tuple[str, int, int | None]
"""Label, block, and the number of the head where the component is a head."""


@dataclass(frozen=True)
class Intervention:
    """The settings of an ablation; `iglens_tl.ablation` explains them."""

    component: str
    mode: str
    scope: str
    effect: str
    include_first: bool
    n_samples: int
    seed: int

    @property
    def draws_on_reference(self) -> bool:
        return self.mode in ("mean", "resample")


def sites_of(host: Host, component: str, blocks: Sequence[int]) -> list[Site]:
    """What is ablated, one at a time, with its label."""
    if component == "head":
        return [(f"L{block}H{head}", block, head) for block in blocks for head in range(width_of(host, block))]
    ending = "" if component == "block" else f"_{component}"
    return [(f"{block}{ending}", block, None) for block in blocks]


def entries_of(
    run: CleanRun, kind: Intervention, sites: Sequence[Site], source: ReferenceUpdates | None, read: Tensor
) -> list[Entry]:
    """One entry for each site, sample and (scope "target") position that is read, in this order.

    Args:
        run: the clean run of the prompt.
        kind, sites: what is ablated, how.
        source: where mean and resample draw from.
        read: the positions that are read.
    """
    every = torch.arange(0 if kind.include_first else 1, run.n_tokens)
    reads = [(position[None], position[None]) for position in read] if kind.scope == "target" else [(every, read)]
    make = _block_entry if kind.component == "block" else _sublayer_entry
    return [
        make(run, site, where, values, seen)
        for site, values in _values(run, kind, sites, source)
        for where, seen in reads
    ]


def _values(
    run: CleanRun, kind: Intervention, sites: Sequence[Site], source: ReferenceUpdates | None
) -> Iterator[tuple[Site, Tensor]]:
    """For each site and sample what is put in the place of the output at every position, `[seq, ...]`."""
    for site in sites:
        for sample in range(kind.n_samples):
            yield site, _value(run, kind, site, source, sample)


def _value(run: CleanRun, kind: Intervention, site: Site, source: ReferenceUpdates | None, sample: int) -> Tensor:
    _, block, head = site
    output = output_of(run, kind.component, block)
    if kind.mode in ("zero", "skip"):
        value = torch.zeros_like(output)
    elif kind.mode == "placebo":
        value = _placebo(run, kind, site, output, sample)
    else:
        assert source is not None
        if kind.mode == "mean":
            value = source.means[kind.component][block].to(output).expand_as(output)
        else:
            drawn = _donors(run, kind, len(source.places), sample)
            value = source.donors[kind.component][block][drawn].to(output)
    return value if head is None else value[:, head]


def _placebo(run: CleanRun, kind: Intervention, site: Site, output: Tensor, sample: int) -> Tensor:
    generator = generator_of(kind.seed, "placebo", site[0], sample, _ids(run))
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    norm = partial(norm_of, run.host, kind.component, site[1])
    return output + direction * (norm(output) / norm(direction))


def _donors(run: CleanRun, kind: Intervention, n_donors: int, sample: int) -> Tensor:
    """The donor of each position, `[seq]`; the same for all layers and components."""
    generator = generator_of(kind.seed, "donor", sample, _ids(run))
    return torch.randint(n_donors, (run.n_tokens,), generator=generator)


def _ids(run: CleanRun) -> list[int]:
    return run.tokens[0].tolist()


def _block_entry(run: CleanRun, site: Site, where: Tensor, value: Tensor, read: Tensor) -> Entry:
    """A block is left out by entering above it: what it puts out is its input plus the replacement."""
    block = site[1]

    def state() -> Tensor:
        after = run.states[block + 1].clone()
        at = where.to(after.device)
        before = run.states[block].to(after.device)[at]
        after[at] = (before + value[at].to(after.device)).to(after.dtype)
        return after

    return Entry(block + 1, state, read)


def _sublayer_entry(run: CleanRun, site: Site, where: Tensor, value: Tensor, read: Tensor) -> Entry:
    _, block, head = site
    index = (where,) if head is None else (where, head)
    put = Replacement(index, value[where.to(value.device)])
    return Entry(block, _clean(run, block), read, {block: put})


def _clean(run: CleanRun, block: int) -> Callable[[], Tensor]:
    return lambda: run.states[block]


def direct_states(
    run: CleanRun, kind: Intervention, sites: Sequence[Site], source: ReferenceUpdates | None, read: Tensor
) -> list[Tensor]:
    """The last state with `u' - u` added at the positions that are read, `[read, d_model]` for each site and sample."""
    last = run.states[-1]
    at = read.to(last.device)
    found: list[Tensor] = []
    for site, value in _values(run, kind, sites, source):
        own = output_of(run, kind.component, site[1])
        change = as_added(run, site[1], site[2], own, value, read)
        found.append((last[at].double() + change.to(last.device)).to(torch.promote_types(last.dtype, torch.float32)))
    return found
