"""What ablating each block does to a token: every mode and scope, direct effects, and the need for context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iglens_tl._model.host import Host
from iglens_tl._study_prompts import seed_of
from iglens_tl.ablation import ablate_layers
from iglens_tl.ablation_result import AblationResult
from iglens_tl.context import context_need
from iglens_tl.context_result import ContextNeed
from iglens_tl.reference import ReferenceUpdates

Scores = NDArray[np.float64]
MODES = ("skip", "mean", "resample", "placebo")


@dataclass(frozen=True)
class Replacements:
    """What is put in the place of what is ablated.

    Args:
        updates: means and donors of the components.
        contexts: reference prompts as token ids, whose beginnings are the foreign contexts.
        n_samples: draws of "resample" and "placebo".
        n_foreign: foreign contexts.
    """

    updates: ReferenceUpdates
    contexts: Sequence[Any]
    n_samples: int
    n_foreign: int


def effects(
    host: Host, tokens: Tensor, positions: Sequence[int], targets: Sequence[int], replacements: Replacements, seed: int
) -> list[tuple[dict[str, Scores], dict[str, float]]]:
    """Of each studied position of a prompt: effects on its target's probability, one a block; and what it cost.

    `drop_<mode>_<scope>`: total effects of whole blocks, "all" sparing the first position; `direct_skip`, `direct_mean`;
    `kept_transplant`, `kept_cut`: the probability kept when context is taken away from the next block on, and
    `kept_transplant_0`, `kept_cut_0` when it is never there. `forwards`, `block_evaluations`: this position's share of the cost.

    Args:
        host: the model.
        tokens: one prompt, `[1, seq]`.
        positions: those that are studied, in order.
        targets: their target ids.
    """
    common: dict[str, Any] = {
        "targets": torch.tensor([list(targets)]),
        "positions": list(positions),
        "seed": seed_of(seed, tokens.tolist()),
        "progress": False,
        "attention_mask": torch.ones_like(tokens),
    }
    found: dict[str, Scores] = {}
    cost = {"forwards": 0.0, "block_evaluations": 0.0}

    def pay(result: AblationResult | ContextNeed) -> None:
        cost["forwards"] += result.forwards / len(positions)
        cost["block_evaluations"] += result.block_evaluations / len(positions)

    def ablate(name: str, mode: str, **settings: Any) -> None:
        drawn: dict[str, Any] = {"n_samples": replacements.n_samples} if mode in ("resample", "placebo") else {}
        from_reference: dict[str, Any] = {"reference": replacements.updates} if mode in ("resample", "mean") else {}
        result = ablate_layers(host.model, tokens, mode=mode, **drawn, **from_reference, **settings, **common)
        found[name] = result.drop[:, 0].double().numpy()
        pay(result)

    for mode in MODES:
        ablate(f"drop_{mode}_target", mode, scope="target")
        ablate(f"drop_{mode}_all", mode, scope="all", include_first=False)
    for mode in MODES[:2]:
        ablate(f"direct_{mode}", mode, effect="direct")
    need = context_need(
        host.model, tokens, foreign=replacements.contexts, n_foreign=replacements.n_foreign,
        reference=replacements.updates, **common,
    )  # fmt: skip
    pay(need)
    found |= {"kept_transplant": _curve(need.transplant), "kept_cut": _curve(need.attention_cut)}
    return [_of_position(found, i, cost) for i in range(len(positions))]


def _curve(kept: Tensor | None) -> Scores:
    assert kept is not None, "both curves were asked for"
    return kept[:, 0].double().numpy()


def _of_position(
    found: dict[str, Scores], i: int, cost: dict[str, float]
) -> tuple[dict[str, Scores], dict[str, float]]:
    """One position's columns: of the curves, which have a state more than there are blocks, the first number apart."""
    columns = {name: values[-_n_blocks(found) :, i] for name, values in found.items()}
    first = {f"{name}_0": float(values[0, i]) for name, values in found.items() if name.startswith("kept_")}
    return columns, {**first, **cost}


def _n_blocks(found: dict[str, Scores]) -> int:
    return len(found["drop_skip_target"])
