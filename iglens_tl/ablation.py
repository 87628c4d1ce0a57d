"""Ablation: what becomes of a token's probability when a layer, or a part of it, says nothing, or something else?

The credit of `ig_lens` is what can be read off the stream after a layer and could not be before; whether the layer is
needed is another question, and this is the experiment. A component adds its output `u` to the stream at each position: a
block `u = h_{l+1} - h_l`, attention and MLP what they add (behind a post-norm, if there is one), a head its `z` (its rows of
`W_O` make of it what it adds; attention's bias stays). An ablation puts `u'` in its place:

    mode         u'
    "zero"       0
    "skip"       0: the component is passed by, what enters it leaves it. For a block h_{l+1} = h_l
    "mean"       the mean of u over the positions of a reference set, at the same block
    "resample"   u at one position of the reference set, drawn at random; the same draw for all layers
    "placebo"    u + |u| r, r a random unit vector: as large a change as "zero" makes, and nothing is taken away. For
                 a head r is drawn in the space of z, and scaled so that what is written changes by the length of what
                 the head writes

"zero" and "skip" are two names for the same ablation, for every component: in a residual stream, leaving a component out
is adding nothing. (Setting the state itself to 0 would erase what all layers below have said; it is no ablation of a layer.)
"mean" and "resample" need `reference=`; the first position of each reference prompt and padding are left out of it
(`iglens_tl.reference`). "placebo" is the control: a layer that matters because of what it says loses more by "zero".

    scope        where u is replaced
    "target"     at the position that is read, alone: it loses the component, its context keeps it
    "all"        at all positions of the prompt; `include_first=False` spares the first, an attention sink whose outputs are
                 a hundred times larger than others in many models

    effect       what follows
    "total"      the blocks above run on with what they are given, the component's own block from the component on
    "direct"     the last state is read again with u' - u added to it; no block sees the change. The causal counterpart of
                 what readout methods (direct logit attribution, `split` on the straight path) say

`drop = clean - after`, in the metric's unit; positive: the target needed it. What a drop does not say: see
`iglens_tl.ablation_result`.

Cost: nothing below the ablated layer runs again. All whole blocks of a model with n blocks take n (n - 1) / 2 block
evaluations, half a forward pass each, where blocks can be called by themselves (found out by trying, with a control), and
a share of a batched forward pass each elsewhere. `forwards` and `block_evaluations` count everything that was run.

References: Meng et al., "Locating and Editing Factual Associations in GPT" (2022); Zhang and Nanda, "Towards Best
Practices of Activation Patching" (2023); McGrath et al., "The Hydra Effect" (2023), on layers that make up for others.

Example::

    from iglens_tl import ablate_layers

    result = ablate_layers(model, "The capital of France is", targets=" Paris", mode="skip")
    result.drop[:, 0, 0]  # [layer]: what each block's absence costs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import describe, refuse_sets, settings_of, token_fields
from iglens_tl._checks import METRICS, memory_size, one_of, plain, shorten, whole_number
from iglens_tl._interventions import MODES, REPLACEMENTS, Intervention, direct_states, entries_of, sites_of
from iglens_tl._model.ablating import COMPONENTS, names_of, point_of, require_component
from iglens_tl._model.continuing import Tally, continue_run, record_run
from iglens_tl._model.host import Host
from iglens_tl._prompt_runs import Reading, host_to_run, progress_bar, prompts_in, read_all, reference_for
from iglens_tl._request import Request
from iglens_tl._trajectory import Trajectory, ordinary_tensors, trajectory
from iglens_tl.ablation_result import AblationResult
from iglens_tl.reference import ReferenceUpdates
from iglens_tl.targets import TOP

SCOPES = ("target", "all")
EFFECTS = ("total", "direct")


@ordinary_tensors()
def ablate_layers(
    model: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    positions: Any = -1,
    layers: Any = None,
    component: str = "block",
    mode: str = "zero",
    scope: str = "target",
    effect: str = "total",
    include_first: bool | None = None,
    reference: Any = None,
    n_samples: int = 1,
    seed: int = 0,
    metric: str = "prob",
    dtype: torch.dtype | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    batch_size: int | None = None,
    max_memory: int | float | str | None = None,
    progress: bool | None = None,
) -> AblationResult:
    """Ablate each layer, or a part of each, and read the target's probability again; see the module for the formulas.

    Every prompt is run by itself, without its padding; inside `with model.hooks(...)` it is the hooked run that is ablated.

    Args:
        model, input, targets, incorrect_targets, positions, metric, dtype, attention_mask, prepend_bos, max_memory: as in
            `ig_lens`. `TOP` is the most probable token of the run that nothing is ablated in.
        layers: the numbers of the blocks to ablate, one at a time; None for all. (Blocks, not the states of `ig_lens`.)
        component: `"block"`, `"attn"`, `"mlp"`, or `"head"` (each head by itself).
        mode: `"zero"`, `"skip"`, `"mean"`, `"resample"` or `"placebo"`.
        scope: `"target"`: at the position that is read; `"all"`: at all positions.
        effect: `"total"`: the blocks above run on; `"direct"`: in the last state alone (scope "target").
        include_first: with scope "all", whether each prompt's first position is ablated too; None is yes.
        reference: with "mean" and "resample": reference prompts (ids, or strings, tokenised as `prepend_bos` says), or a
            `ReferenceUpdates`.
        n_samples: draws of "resample" or "placebo"; the metric is averaged over them.
        seed: of the draws. A prompt's draws depend on the seed and its own tokens, never on its batch.
        batch_size: ablated runs at a time; None for as many as hold 4,096 tokens.
        progress: a progress bar; None shows one in a terminal after five seconds.

    Returns:
        An `AblationResult`: `clean` `[batch, pos]`, `after` and `drop` `[layer, batch, pos]` in the metric's unit.

    Raises:
        UnsupportedModelError: where the model does not expose the component, or an ablation does not take.
        ReadoutMismatchError, ValueError, TypeError: as `ig_lens`, and for settings that contradict each other.
    """
    budget, tally = memory_size(max_memory), Tally()
    kind = Intervention(
        one_of("component", component, COMPONENTS),
        one_of("mode", mode, MODES),
        one_of("scope", scope, SCOPES),
        one_of("effect", effect, EFFECTS),
        _first(include_first, scope),
        _samples(n_samples, mode),
        whole_number("seed", seed, 0),
    )
    one_of("metric", metric, tuple(METRICS))
    _refuse_contradictions(kind, reference)
    size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    host = host_to_run(model, "ablate_layers")
    chosen = _blocks(layers, host)
    require_component(host, kind.component, chosen)
    request = Request(
        model, input, targets, incorrect_targets, positions=positions, layers=1, dtype=dtype,
        attention_mask=attention_mask, prepend_bos=prepend_bos,
    )  # fmt: skip
    if metric == "logit":
        refuse_sets(request, 'metric="logit"')
    run = trajectory(request, budget=budget)
    tally.whole(run.token_shape[0], host.n_layers)
    source = (
        reference_for(host, reference, kind.component, chosen, kind.seed, tally) if kind.draws_on_reference else None
    )
    sites = sites_of(host, kind.component, chosen)
    states = _ablated(run, kind, chosen, source, tally, size, progress)
    reading = read_all(run, states, metric, kind.n_samples)
    settings = _settings(request, run, kind, chosen, source, tally)
    return _result(run, reading, kind, metric, [(label, block) for label, block, _ in sites], settings, tally)


def _ablated(
    run: Trajectory,
    kind: Intervention,
    blocks: Sequence[int],
    source: ReferenceUpdates | None,
    tally: Tally,
    batch_size: int | None,
    progress: bool | None,
) -> list[Tensor]:
    """The clean last state and those of every sample of every ablation, `[tokens, d_model]` each."""
    host = run.host
    names = names_of(kind.component, blocks)
    columns: list[list[Tensor]] = []
    prompts = list(prompts_in(run))
    sites = sites_of(host, kind.component, blocks)
    total = sum((len(prompt.read) if kind.scope == "target" else 1) for prompt in prompts) * len(sites) * kind.n_samples
    with progress_bar(total if kind.effect == "total" else 0, progress) as done:
        for prompt in prompts:
            clean = record_run(host, prompt.tokens, names, tally)
            if kind.effect == "direct":
                finals = direct_states(clean, kind, sites, source, prompt.read)
            else:
                entries = entries_of(clean, kind, sites, source, prompt.read)
                found = continue_run(clean, entries, point_of(kind.component), tally, batch_size, done)
                finals = list(torch.cat(found).reshape(len(sites) * kind.n_samples, len(prompt.read), -1))
            columns.append([clean.states[-1][prompt.read.to(clean.states[-1].device)], *finals])
    return [torch.cat([column[row].to(columns[0][0].device) for column in columns]) for row in range(len(columns[0]))]


def _result(
    run: Trajectory,
    reading: Reading,
    kind: Intervention,
    metric: str,
    rows: Sequence[tuple[str, int]],
    settings: dict[str, Any],
    tally: Tally,
) -> AblationResult:
    clean, after = run.on_grid(reading.value[0]), run.on_grid(reading.value[1:])
    return AblationResult(
        clean=clean,
        after=after,
        drop=clean - after,
        clean_prob=run.on_grid(reading.prob[0]),
        after_prob=run.on_grid(reading.prob[1:]),
        layer_labels=tuple(label for label, _ in rows),
        blocks=tuple(block for _, block in rows),
        component=kind.component,
        mode=kind.mode,
        scope=kind.scope,
        effect=kind.effect,
        metric=metric,
        forwards=tally.forwards,
        block_evaluations=tally.block_evaluations,
        settings=settings,
        **token_fields(run),
    )


def _settings(
    request: Request,
    run: Trajectory,
    kind: Intervention,
    blocks: Sequence[int],
    source: ReferenceUpdates | None,
    tally: Tally,
) -> dict[str, Any]:
    shared = settings_of(request, run)
    for name in ("baseline", "incl_mid", "lens", "source", "layers"):
        del shared[name]
    drawn = kind.mode in ("resample", "placebo")
    return {
        **shared,
        "blocks": list(blocks),
        "replacement": REPLACEMENTS[kind.mode],
        "include_first": kind.include_first if kind.scope == "all" else None,
        "n_samples": kind.n_samples if drawn else None,
        "seed": kind.seed if drawn or source is not None else None,
        "reference": None
        if source is None
        else {"prompts": source.n_prompts, "positions": source.n_positions, "donors": len(source.places)},
        "prefix_reused": tally.enters if kind.effect == "total" else None,
    }


def _first(include_first: Any, scope: str) -> bool:
    if include_first is None:
        return True
    if not isinstance(include_first, bool):
        raise TypeError(f"include_first must be True, False or None, got {include_first!r}.")
    if scope != "all":
        raise ValueError(
            'include_first goes with scope="all"; with scope="target" the position that is read is ablated, whichever it is. '
            "Leave it out."
        )
    return include_first


def _samples(n_samples: Any, mode: str) -> int:
    n = whole_number("n_samples", n_samples, 1)
    if n > 1 and mode not in ("resample", "placebo"):
        raise ValueError(
            f'n_samples={n} goes with mode="resample" or "placebo"; mode={mode!r} draws nothing. Leave it out.'
        )
    return n


def _refuse_contradictions(kind: Intervention, reference: Any) -> None:
    if kind.effect == "direct" and kind.scope == "all":
        raise ValueError(
            'effect="direct" changes the last state at the position that is read, where no other position matters; got '
            'scope="all". Use scope="target".'
        )
    if kind.draws_on_reference and reference is None:
        raise ValueError(
            f"mode={kind.mode!r} needs reference=: prompts (a few dozen sentences of the kind you study), or the result of "
            "reference_updates(model, prompts)."
        )
    if not kind.draws_on_reference and reference is not None:
        raise ValueError(
            f'reference= goes with mode="mean" or "resample"; mode={kind.mode!r} has no use for it. Leave it out.'
        )


def _blocks(layers: Any, host: Host) -> list[int]:
    n = host.n_layers
    layers = plain(layers)
    if layers is None:
        return list(range(n))
    if isinstance(layers, (str, bytes, bool)) or not isinstance(layers, Iterable):
        raise TypeError(
            "layers must be None (every block) or a list of block numbers, [2] for block 2 alone (no number of segments, as in "
            f"ig_lens); got {describe(layers)!r}."
        )
    items: list[Any] = [plain(item) for item in layers]
    numbers: list[Any] = [int(item) if isinstance(item, str) and item.isdecimal() else item for item in items]
    wrong = [item for item in numbers if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < n]
    if wrong or not numbers or len(set(numbers)) < len(numbers):
        what = shorten(map(repr, wrong)) if wrong else "an empty list" if not numbers else "a block twice"
        raise ValueError(
            f"layers must name blocks 0 to {n - 1}, each once (blocks are ablated one at a time; 3 is the segment that ig_lens "
            f'calls "3"); got {what}.'
        )
    return sorted(numbers)
