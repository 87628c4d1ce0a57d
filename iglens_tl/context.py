"""From which layer on does a token no longer need its context?

An onset (`IGLensResult.onset`) is a depth, not a block: up to here the target cannot be read, from here on it can. Its causal
counterpart is not the effect of removing one block but the depth from which on the token carries all it needs. Two curves
over L = 0 .. n say where that is, read at the target position:

- transplant. The clean `h_L` of the position runs on through blocks L .. n-1, and what it attends to there is a foreign
  context: the first tokens of another prompt, as many as stand before the position, in their own clean run. Averaged over
  several foreign contexts. At L = 0 the position brings its own token alone, at L = n everything.
- attention cut. From block L on, what the position's attention puts out is replaced by its mean over a reference set
  (first positions and padding left out); the MLPs run on.

The *causal layer* is the smallest L from which on, to the end, the target keeps half of its clean probability. A block's
*gain* is the difference of its two L. Unit: the metric's. What the curves do not say: see `iglens_tl.context_result`.

Cost: a position takes n (n + 1) / 2 block evaluations for the attention cut, and as many for each foreign context.

Example::

    from iglens_tl import context_need

    need = context_need(model, "The capital of France is", targets=" Paris", reference=sentences)
    need.causal_layer("transplant")  # [batch, pos]
    need.gain("attention_cut")  # [segment, batch, pos]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import refuse_sets, settings_of, token_fields
from iglens_tl._checks import METRICS, UnsupportedModelError, memory_size, one_of, plain, whole_number
from iglens_tl._draws import generator_of
from iglens_tl._model.ablating import point_of, require_component
from iglens_tl._model.continuing import CleanRun, Entry, Replacement, Tally, continue_run, record_run, same_arguments
from iglens_tl._model.host import Host
from iglens_tl._prompt_runs import (
    host_to_run,
    progress_bar,
    prompts_in,
    read_all,
    reference_for,
    reference_prompts,
)
from iglens_tl._request import Request
from iglens_tl._trajectory import Trajectory, ordinary_tensors, trajectory
from iglens_tl.context_result import CURVES, ContextNeed
from iglens_tl.reference import ReferenceUpdates
from iglens_tl.targets import TOP


@ordinary_tensors()
def context_need(
    model: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    positions: Any = -1,
    reference: Any = None,
    foreign: Any = None,
    n_foreign: int = 4,
    curves: Sequence[str] = CURVES,
    seed: int = 0,
    metric: str = "prob",
    dtype: torch.dtype | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    batch_size: int | None = None,
    max_memory: int | float | str | None = None,
    progress: bool | None = None,
) -> ContextNeed:
    """How much of the target's probability is left when, from each layer on, the token loses its context.

    Args:
        model, input, targets, incorrect_targets, positions, metric, dtype, attention_mask, prepend_bos, max_memory: as in
            `ig_lens`.
        reference: what the attention cut draws its means from: prompts, or a `ReferenceUpdates` that holds `"attn"`. None:
            the foreign prompts.
        foreign: prompts whose first tokens are the foreign contexts; those that are too short for a position, or begin as
            the prompt itself does, are passed over. None: the reference prompts.
        n_foreign: how many of them a position is put among, drawn with `seed` and the prompt's own tokens.
        curves: of `"transplant"` and `"attention_cut"`.
        seed: of the draw of foreign contexts.
        batch_size, progress: as in `ablate_layers`.

    Returns:
        A `ContextNeed`: curves `[state, batch, pos]`, n + 1 states; the last is the clean value.

    Raises:
        UnsupportedModelError: where the model does not expose its attention's output, or hands its blocks something of the
            tokens beside the state.
        ReadoutMismatchError, ValueError, TypeError: as `ig_lens`; and where no foreign context is long enough.
    """
    budget, tally = memory_size(max_memory), Tally()
    chosen = _curves(curves)
    one_of("metric", metric, tuple(METRICS))
    n_foreign, seed = whole_number("n_foreign", n_foreign, 1), whole_number("seed", seed, 0)
    size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    host = host_to_run(model, "context_need")
    if reference is None and foreign is None:
        raise ValueError(
            "context_need needs reference=: prompts (a few dozen sentences of the kind you study); they are what the attention "
            "cut averages over and, without foreign=, what a token is transplanted among."
        )
    if "attention_cut" in chosen:
        require_component(host, "attn", range(host.n_layers))
    request = Request(
        model, input, targets, incorrect_targets, positions=positions, layers=1, dtype=dtype,
        attention_mask=attention_mask, prepend_bos=prepend_bos,
    )  # fmt: skip
    if metric == "logit":
        refuse_sets(request, 'metric="logit"')
    contexts = _contexts(host, foreign, reference, prepend_bos, tally) if "transplant" in chosen else None
    run = trajectory(request, budget=budget)
    tally.whole(run.token_shape[0], host.n_layers)
    source = None
    if "attention_cut" in chosen:
        given = foreign if reference is None else reference
        source = reference_for(host, given, "attn", range(host.n_layers), seed, tally, prepend_bos)
    found = _changed(run, contexts, source, n_foreign, seed, tally, size, progress)
    read = {name: read_all(run, rows, metric, n_foreign if name == "transplant" else 1) for name, rows in found.items()}
    clean = next(iter(read.values())).value[:1]
    each = None if contexts is None else torch.cat([read["transplant"].samples, clean.expand(1, n_foreign, -1)])
    values = {name: torch.cat([reading.value[1:], clean]) for name, reading in read.items()}
    return ContextNeed(
        clean=run.on_grid(clean[0]),
        transplant=run.on_grid(values["transplant"]) if "transplant" in values else None,
        transplant_each=None if each is None else run.on_grid(each),
        attention_cut=run.on_grid(values["attention_cut"]) if "attention_cut" in values else None,
        state_labels=(*(f"{layer}_pre" for layer in range(host.n_layers)), "final_post"),
        segment_labels=tuple(str(layer) for layer in range(host.n_layers)),
        metric=metric,
        forwards=tally.forwards,
        block_evaluations=tally.block_evaluations,
        settings=_settings(request, run, chosen, contexts, source, n_foreign, seed, tally),
        **token_fields(run),
    )


def _curves(curves: Any) -> list[str]:
    names = [curves] if isinstance(curves, str) else list(curves)
    if not names:
        raise ValueError(f"curves must name one of {', '.join(map(repr, CURVES))}; got nothing.")
    return [one_of("curves", plain(name), CURVES) for name in names]


@dataclass
class _Contexts:
    """Foreign prompts without padding, and their clean runs as far as they were needed."""

    host: Host
    rows: Sequence[Tensor]
    tally: Tally
    runs: dict[int, CleanRun] = field(default_factory=dict[int, CleanRun])

    def drawn(self, own: Tensor, length: int, count: int, seed: int) -> list[CleanRun]:
        """Runs of `count` contexts of at least so many tokens that are not the prompt's own."""
        fit = [
            place
            for place, row in enumerate(self.rows)
            if len(row) >= length and not torch.equal(row[:length], own[:length])
        ]
        if len(fit) < count:
            raise ValueError(
                f"n_foreign={count} needs as many foreign prompts of at least {length} tokens that do not begin as the prompt "
                f"does; there are {len(fit)} among {len(self.rows)}. Give more or longer prompts as foreign= (or reference=), or "
                "a smaller n_foreign."
            )
        order = torch.randperm(len(fit), generator=generator_of(seed, "foreign", own.tolist()))
        return [self._run(fit[place]) for place in order[:count].tolist()]

    def _run(self, place: int) -> CleanRun:
        if place not in self.runs:
            self.runs[place] = record_run(self.host, self.rows[place], [], self.tally)
        return self.runs[place]


def _contexts(host: Host, foreign: Any, reference: Any, prepend_bos: bool | None, tally: Tally) -> _Contexts:
    given = reference if foreign is None else foreign
    if isinstance(given, ReferenceUpdates):
        raise ValueError(
            "the transplant needs foreign=: prompts to transplant the token among; a ReferenceUpdates holds none. Or ask for "
            'curves=["attention_cut"].'
        )
    prompts = reference_prompts(host, given, prepend_bos)
    return _Contexts(host, [row[real] for row, real in zip(prompts.tokens, prompts.mask, strict=True)], tally)


def _changed(
    run: Trajectory,
    contexts: _Contexts | None,
    source: ReferenceUpdates | None,
    n_foreign: int,
    seed: int,
    tally: Tally,
    batch_size: int | None,
    progress: bool | None,
) -> dict[str, list[Tensor]]:
    """By curve, the clean last state and the last states from every L (and context), `[tokens, d_model]` each."""
    prompts = list(prompts_in(run))
    runs = (0 if contexts is None else n_foreign) + (source is not None)
    found: dict[str, list[list[Tensor]]] = {}
    with progress_bar(sum(len(prompt.read) for prompt in prompts) * run.host.n_layers * runs, progress) as done:
        for prompt in prompts:
            clean = record_run(run.host, prompt.tokens, [], tally)
            entries: dict[str, list[Entry]] = {}
            if contexts is not None:
                entries["transplant"] = _transplants(clean, contexts, prompt.read, n_foreign, seed)
            if source is not None:
                entries["attention_cut"] = _cuts(clean, source, prompt.read)
            for name, rows in entries.items():
                point = point_of("attn") if name == "attention_cut" else None
                finals = torch.cat(continue_run(clean, rows, point, tally, batch_size, done))
                own = clean.states[-1][prompt.read.to(clean.states[-1].device)]
                found.setdefault(name, []).append([own, *finals.reshape(-1, *own.shape)])
    return {name: [torch.cat(rows) for rows in zip(*parts, strict=True)] for name, parts in found.items()}


def _transplants(clean: CleanRun, contexts: _Contexts, read: Tensor, n_foreign: int, seed: int) -> list[Entry]:
    """In the order of L, context, position."""
    own = clean.tokens[0].cpu()
    drawn: dict[int, list[CleanRun]] = {}
    for position in read.tolist():
        if position:  # before the first position there is no context to be foreign
            drawn[position] = contexts.drawn(own, position, n_foreign, seed)
    strange = [other for others in drawn.values() for other in others if not same_arguments(clean, other)]
    if strange:
        raise UnsupportedModelError(
            f"{clean.host.name} hands its blocks something of the tokens beside the state, which would stay behind in a "
            'transplant. Ask for curves=["attention_cut"].'
        )
    return [
        Entry(
            layer, _transplanted(clean, drawn.get(position, [clean] * n_foreign)[place], layer, position), _at(position)
        )
        for layer in range(clean.host.n_layers)
        for place in range(n_foreign)
        for position in read.tolist()
    ]


def _transplanted(clean: CleanRun, other: CleanRun, layer: int, position: int) -> Callable[[], Tensor]:
    def state() -> Tensor:
        return torch.cat([other.states[layer][:position], clean.states[layer][position:]])

    return state


def _at(position: int) -> Tensor:
    return torch.tensor([position])


def _cuts(clean: CleanRun, source: ReferenceUpdates, read: Tensor) -> list[Entry]:
    """In the order of L, position."""
    n, means = clean.host.n_layers, source.means["attn"]
    return [
        Entry(
            layer,
            _transplanted(clean, clean, layer, position),
            _at(position),
            {block: Replacement((_at(position),), means[block][None]) for block in range(layer, n)},
        )
        for layer in range(n)
        for position in read.tolist()
    ]


def _settings(
    request: Request,
    run: Trajectory,
    curves: Sequence[str],
    contexts: _Contexts | None,
    source: ReferenceUpdates | None,
    n_foreign: int,
    seed: int,
    tally: Tally,
) -> dict[str, Any]:
    shared = settings_of(request, run)
    for name in ("baseline", "incl_mid", "lens", "source", "layers"):
        del shared[name]
    return {
        **shared,
        "curves": list(curves),
        "n_foreign": None if contexts is None else n_foreign,
        "foreign": None if contexts is None else {"prompts": len(contexts.rows)},
        "reference": None if source is None else {"prompts": source.n_prompts, "positions": source.n_positions},
        "seed": seed,
        "prefix_reused": tally.enters,
    }
