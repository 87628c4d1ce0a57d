"""Does the onset hold? For many tokens: what IG-Lens and its rivals say of each block, and what ablating the block does.

Every pair of a prompt and a position is run once; scores of its blocks are read off (IG-Lens credits in several metrics,
straight-path credits, DLA, attribution patching, norms), and each block is ablated in every mode and scope. Nothing is
concluded here: `OnsetStudy` holds the measurements, and its tables and page do the statistics, controls beside claims.

One Parquet file a prompt is written to `out`, to a temporary name that is renamed when it is whole: a study that is
killed at any moment loses the prompt it was at, and the same call goes on with the next. The numbers depend on the seed,
the prompt and the model alone, not on where the study was interrupted.

What it does not claim: an ablation puts a model into states that it never sees, and a drop says that something is needed,
not that it is computed there. See `docs/ablation.md`.

Example::

    from iglens_tl import onset_study

    study = onset_study(model, ["The capital of France is", ...], reference=sentences, out="study")
    print(study)
    Path("RESULTS.md").write_text(study.to_markdown())
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from iglens_tl._checks import fraction, whole_number
from iglens_tl._model.host import Host, host_of, provenance
from iglens_tl._model.tokens import prompts_of, token_text
from iglens_tl._study_effects import Replacements, effects
from iglens_tl._study_files import StudyFolder
from iglens_tl._study_predictors import predictors, read
from iglens_tl._study_prompts import (
    StudyPrompt,
    choose_positions,
    kind_of_word,
    read_prompts,
    seed_of,
    top_probabilities,
)
from iglens_tl._trajectory import ordinary_tensors
from iglens_tl.reference import reference_updates
from iglens_tl.study_result import OnsetStudy


@ordinary_tensors()
def onset_study(
    model: Any,
    prompts: Any,
    *,
    reference: Any,
    out: str | Path,
    n_positions: int = 3,
    min_prob: float = 0.1,
    min_position: int = 3,
    n_samples: int = 1,
    n_foreign: int = 2,
    straight: bool = True,
    prepend_bos: bool | None = None,
    share: tuple[int, int] = (1, 1),
    seed: int = 0,
    progress: bool | None = None,
) -> OnsetStudy:
    """Measure, or go on measuring, whether credits and onsets predict ablations.

    Args:
        model: a `HookedTransformer` or `TransformerBridge` with a tokenizer. Where its blocks can be called by themselves (a
            HookedTransformer's can) an ablation costs half a forward pass.
        prompts: strings, mappings with `prompt` (and `id`, `kind`), a text file with one a line, or a JSON-lines file.
        reference: prompts of the same forms, of which means, replacements and foreign contexts are made; each at least as
            long as the longest prompt, and no prompt among them.
        out: a folder of the study's own. What is measured there already is not measured again.
        n_positions: at most so many positions a prompt: the last, and others drawn with the seed.
        min_prob: a position is studied where the most probable next token, its target, has at least this probability.
        min_position: the first position that may be studied.
        n_samples: draws of the "resample" and "placebo" ablations.
        n_foreign: foreign contexts of `context_need`.
        straight: also straight-path credits and gradient times update (seconds a pair for a large vocabulary).
        prepend_bos: as in `ig_lens`.
        share: `(1, 2)` and `(2, 2)` for two processes that work in one folder, each on half of the prompts.
        seed: of every draw.
        progress: a progress bar; None shows one in a terminal.

    Returns:
        An `OnsetStudy` of everything that lies in `out`.

    Raises:
        ValueError: for `out` that holds a study with other settings, prompts or model, saying what differs; for prompts
            that are none, and references that are too short.
        UnsupportedModelError, ReadoutMismatchError, TypeError: as `ig_lens` and `ablate_layers`.
    """
    host = host_of(model)
    chosen, references = read_prompts(prompts), read_prompts(reference)
    _refuse_overlap(chosen, references)
    settings = {
        "n_positions": whole_number("n_positions", n_positions, 1),
        "min_prob": fraction("min_prob", min_prob),
        "min_position": whole_number("min_position", min_position, 1),
        "n_samples": whole_number("n_samples", n_samples, 1),
        "n_foreign": whole_number("n_foreign", n_foreign, 1),
        "straight": bool(straight),
        "prepend_bos": prepend_bos,
        "seed": whole_number("seed", seed, 0),
    }
    folder = StudyFolder.open(out, settings, provenance(host), [chosen, references])
    place, n_shares = (whole_number("share", part, 1) for part in share)
    own = [prompt for prompt in chosen if prompt.index % n_shares == place % n_shares]
    left = [prompt for prompt in own if not folder.has(prompt.index)]
    if left:
        contexts = [prompts_of(host, prompt.text, prepend_bos).tokens for prompt in references]
        replacements = _replacements(host, contexts, n_samples, n_foreign, seed)
        hidden = None if progress is None else not progress
        for prompt in tqdm(left, desc="prompts", total=len(own), initial=len(own) - len(left), disable=hidden):
            folder.write(prompt.index, _rows_of(host, prompt, replacements, settings))
    return OnsetStudy.load(out)


def _refuse_overlap(prompts: Sequence[StudyPrompt], references: Sequence[StudyPrompt]) -> None:
    both = {prompt.text for prompt in prompts} & {prompt.text for prompt in references}
    if both:
        raise ValueError(
            f"the reference must hold none of the prompts that are studied: it has {len(both)} of them, {sorted(both)[0]!r} "
            "among them. Give other reference texts."
        )


def _replacements(host: Host, contexts: Sequence[Any], n_samples: int, n_foreign: int, seed: int) -> Replacements:
    rows = [context[0].tolist() for context in contexts]
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    tokens = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
    updates = reference_updates(host.model, tokens, components=("block", "attn"), attention_mask=mask, seed=seed)
    return Replacements(updates, rows, n_samples, n_foreign)


def _rows_of(host: Host, prompt: StudyPrompt, replacements: Replacements, settings: dict[str, Any]) -> dict[str, Any]:
    """Columns of the rows of one prompt: one for each studied position and block."""
    tokens = prompts_of(host, prompt.text, settings["prepend_bos"]).tokens
    with torch.no_grad():
        logits = host.model(tokens.to(host.device), return_type="logits")[0].cpu()
    probs, tops = top_probabilities(logits)
    at = choose_positions(
        probs,
        settings["n_positions"],
        settings["min_prob"],
        settings["min_position"],
        seed_of(settings["seed"], prompt.text),
    )
    if not at:
        return {}
    start = time.perf_counter()
    targets = [int(tops[place]) for place in at]
    measured = effects(host, tokens[:, : at[-1] + 1], at, targets, replacements, settings["seed"])
    shared = (time.perf_counter() - start) / len(at)
    pairs = [
        _pair(host, prompt, tokens[:, : place + 1], target, float(probs[place]), found, shared, settings)
        for place, target, found in zip(at, targets, measured, strict=True)
    ]
    return {name: np.concatenate([pair[name] for pair in pairs]) for name in pairs[0]}


def _pair(
    host: Host,
    prompt: StudyPrompt,
    tokens: Tensor,
    target: int,
    prob: float,
    measured: tuple[dict[str, Any], dict[str, float]],
    seconds: float,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The columns of one position: what is known of it once, repeated, beside what is known of each block."""
    start = time.perf_counter()
    scores, depths = predictors(read(host, tokens, target), settings["straight"])
    word, (columns, kept) = token_text(host, target), measured
    once = {
        "prompt_index": prompt.index,
        "prompt_id": prompt.id,
        "kind": prompt.kind,
        "prompt": prompt.text,
        "position": tokens.shape[1] - 1,
        "token": token_text(host, int(tokens[0, -1])),
        "target": word,
        "target_id": target,
        "word_kind": kind_of_word(word),
        "prob": prob,
        **depths,
        **kept,
        "seconds": seconds + time.perf_counter() - start,
    }
    n = host.n_layers
    every = {name: np.repeat(np.array([value]), n) for name, value in once.items()}
    return {"block": np.arange(n), **every, **scores, **columns}
