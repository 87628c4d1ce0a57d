"""What ablating each block does to a token: every mode and scope, direct effects, sublayers, and the need for context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iglens_tl._study_predictors import Reading
from iglens_tl._study_prompts import seed_of
from iglens_tl.ablation import ablate_layers
from iglens_tl.context_need import context_need
from iglens_tl.reference import ReferenceUpdates

Scores = NDArray[np.float64]
MODES = ("skip", "mean", "resample", "placebo")
SCOPES = ("target", "all")


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


def effects(reading: Reading, replacements: Replacements, seed: int) -> tuple[dict[str, Scores], dict[str, float]]:
    """Effects on the target's probability, one a block; and by name, what it cost (`forwards`, `block_evaluations`).

    `drop_<mode>_<scope>`: total effects of whole blocks, "all" sparing the first position (`drop_skip_all_first` does not);
    `direct_<mode>`; `drop_attn`, `drop_mlp`: total effect of zeroing a sublayer at the read position;
    `kept_transplant`, `kept_cut`: the probability kept when context is taken away from the next block on.
    """
    own = seed_of(seed, reading.tokens.tolist())
    found: dict[str, Scores] = {}
    cost = {"forwards": 0.0, "block_evaluations": 0.0}

    def ablate(name: str, mode: str, **settings: Any) -> None:
        drawn: dict[str, Any] = {"n_samples": replacements.n_samples} if mode in ("resample", "placebo") else {}
        from_reference: dict[str, Any] = {"reference": replacements.updates} if mode in ("resample", "mean") else {}
        result = ablate_layers(
            reading.host.model, reading.tokens, targets=reading.target, mode=mode, seed=own, progress=False,
            **drawn, **from_reference, **settings, **reading.mask,
        )  # fmt: skip
        found[name] = result.drop[:, 0, 0].numpy().astype(np.float64)
        cost["forwards"] += result.forwards
        cost["block_evaluations"] += result.block_evaluations

    for mode in MODES:
        for scope in SCOPES:
            spared: dict[str, Any] = {"include_first": False} if scope == "all" else {}
            ablate(f"drop_{mode}_{scope}", mode, scope=scope, **spared)
        ablate(f"direct_{mode}", mode, effect="direct")
    ablate("drop_skip_all_first", "skip", scope="all", include_first=True)
    for component in ("attn", "mlp"):
        ablate(f"drop_{component}", "zero", component=component)
    need = context_need(
        reading.host.model, reading.tokens, targets=reading.target, foreign=replacements.contexts,
        n_foreign=replacements.n_foreign, reference=replacements.updates, seed=own, progress=False, **reading.mask,
    )  # fmt: skip
    curves = {"transplant": need.transplant[:, 0, 0].numpy(), "cut": need.attention_cut[:, 0, 0].numpy()}
    found |= {f"kept_{name}": curve[1:].astype(np.float64) for name, curve in curves.items()}
    cost |= {f"kept_{name}_0": float(curve[0]) for name, curve in curves.items()}
    cost["forwards"] += need.forwards
    cost["block_evaluations"] += need.block_evaluations
    return found, cost
