"""A study's table made up from a seed, in which it is known which scores predict which effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

N_BLOCKS = 6
EFFECTS = [
    *(f"drop_{mode}_{scope}" for mode in ("skip", "mean", "resample", "placebo") for scope in ("target", "all")),
    *(f"direct_{mode}" for mode in ("skip", "mean")),
    "kept_transplant", "kept_cut",
]  # fmt: skip
SCORES = (
    "credit", "credit_log_prob", "credit_log_odds", "credit_zero", "credit_mean", "credit_attn", "credit_mlp", "straight",
    "gradient_update", "dla", "dla_centred", "update_norm", "patching", "patching_all",
)  # fmt: skip
DEPTHS = (
    *(f"onset_{rule}" for rule in ("mass", "crossing", "peak", "rank")), "onset_mass_log_prob", "onset_mass_log_odds",
    "lens_first_top", "half_dla",
    "half_update_norm",
)  # fmt: skip


def made_table(
    n_prompts: int = 20, n_positions: int = 3, seed: int = 0, predictive: str = "patching", **fixed: Any
) -> pd.DataFrame:
    """Random columns, but `predictive` orders the blocks exactly as the primary effect does.

    Args:
        fixed: columns that get one number in every row.
    """
    draw = np.random.default_rng(seed)
    rows: list[pd.DataFrame] = []
    for prompt in range(n_prompts):
        for place in range(n_positions):
            columns: dict[str, Any] = {name: draw.normal(size=N_BLOCKS) / 10 for name in (*SCORES, *EFFECTS)}
            columns |= {name: float(draw.integers(1, N_BLOCKS + 1)) for name in DEPTHS}
            columns[predictive] = 3 * columns["drop_skip_target"] + 1
            columns |= {
                "kept_transplant_0": 0.0,
                "kept_cut_0": 0.0,
                "seconds": 1.0,
                "forwards": 2.0,
                "block_evaluations": 9.0,
            }
            about = {"prompt_index": prompt, "prompt_id": f"p{prompt}", "kind": ("fact", "code")[prompt % 2],
                     "prompt": "a b",
                     "position": 3 + place, "token": "b", "target": " c", "target_id": 5,
                     "word_kind": ("word start", "number")[place % 2],
                     "prob": 0.5}  # fmt: skip
            rows.append(pd.DataFrame({**about, "block": np.arange(N_BLOCKS), **columns, **fixed}))
    return pd.concat(rows, ignore_index=True)
