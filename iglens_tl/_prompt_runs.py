"""A call taken apart into prompts that run by themselves, and put together again for the readout."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from iglens_tl._checks import shorten
from iglens_tl._core.segments import Path, read_states
from iglens_tl._model.continuing import Tally
from iglens_tl._model.host import Host, host_of, is_cache, provenance
from iglens_tl._model.identity import weights_digest
from iglens_tl._model.tokens import Prompts, prompts_of
from iglens_tl._trajectory import Trajectory, check_against_model
from iglens_tl.reference import ReferenceUpdates, gather_updates


@dataclass(frozen=True)
class PromptRead:
    """One prompt without its padding, and the positions in it that are read."""

    tokens: Tensor
    read: Tensor


@dataclass(frozen=True)
class Reading:
    """What was read of every row.

    Args:
        value, prob: the metric and the probability, `[row, tokens]`; the first row is the clean one, the others are means
            over their samples.
        samples: the metric of every sample of the other rows, `[row - 1, sample, tokens]`.
    """

    value: Tensor
    prob: Tensor
    samples: Tensor


def prompts_in(run: Trajectory) -> Iterator[PromptRead]:
    """The prompts in the order of their rows; those of which nothing is read are left out."""
    assert run.prompts is not None
    batch, pos = run.positions.rows
    for i, (row, real) in enumerate(zip(run.prompts.tokens, run.prompts.mask, strict=True)):
        own = pos[batch == i]
        if len(own):
            yield PromptRead(row[real], torch.searchsorted(real.nonzero()[:, 0], own))


def read_all(run: Trajectory, states: Sequence[Tensor], metric: str, n_samples: int) -> Reading:
    """Read states `[tokens, d_model]`: the clean one, which is checked against the model, and samples of all others."""
    path = Path(states, run.path.groups)
    levels = read_states(run.readout, path)
    if run.said is not None:
        check_against_model(replace(run, path=path), levels.at(slice(0, path.n_tokens)), run.said)

    def read(name: str) -> tuple[Tensor, Tensor]:
        rows = levels.value(name).reshape(len(states), -1)
        samples = rows[1:].reshape(-1, n_samples, rows.shape[1])
        return torch.cat([rows[:1], samples.mean(1)]), samples

    value, samples = read(metric)
    return Reading(value, read("prob")[0], samples)


def host_to_run(model: Any, call: str) -> Host:
    """The model of a call that must run it.

    Raises:
        TypeError: for a cache.
    """
    if is_cache(model):
        raise TypeError(f"{call} runs the model, which a cache cannot: pass the model and the prompt.")
    return host_of(model)


def reference_prompts(host: Host, reference: Any, prepend_bos: bool | None) -> Prompts:
    """Reference prompts; strings are tokenised as those of the call are."""
    items: Sequence[Any] = reference if isinstance(reference, (list, tuple)) else [reference]
    strings = all(isinstance(item, str) for item in items)
    return prompts_of(host, reference, prepend_bos if strings else None)


def reference_for(
    host: Host,
    reference: Any,
    component: str,
    blocks: Sequence[int],
    seed: int,
    tally: Tally,
    prepend_bos: bool | None = None,
) -> ReferenceUpdates:
    """The reference as given, or gathered from the prompts given; it must be of this model and hold the component.

    Raises:
        ValueError: where it is not, or does not.
    """
    if not isinstance(reference, ReferenceUpdates):
        return gather_updates(host, reference_prompts(host, reference, prepend_bos), [component], 256, seed, tally)
    own = {**provenance(host), "weights": weights_digest(host.model)}
    differ = [key for key in ("model", "api", "n_layers", "weights") if reference.provenance.get(key) != own[key]]
    if differ:
        raise ValueError(
            "reference= must be of the model that is ablated; it is of "
            f"{shorten(f'{key} {reference.provenance.get(key)}' for key in differ)}, not {shorten(own[key] for key in differ)}. "
            "Call reference_updates(model, prompts) with this model, after folding, training or merging: a sample of its weights "
            "is compared."
        )
    if component not in reference.means:
        raise ValueError(
            f"reference= holds {shorten(reference.means)} and {component} is needed: "
            f"reference_updates(model, prompts, components=[{component!r}])."
        )
    lacks = [block for block in blocks if bool(reference.means[component][block].isnan().any())]
    if lacks:
        raise ValueError(f"reference= holds no {component} of block {shorten(lacks)}.")
    return reference


@contextmanager
def progress_bar(total: int, progress: bool | None) -> Generator[Callable[[int], Any]]:
    """What is told of every batch; a bar on stderr, or None: in a terminal, after five seconds."""
    off = None if progress is None else not progress
    with tqdm(total=total, disable=off, delay=5 if progress is None else 0, unit="run", leave=False) as bar:
        yield bar.update
