"""From a study's measurements to its tables: which score predicts which effect, how well, and better than what.

Scores and effects are arrays `[pair, block]`, depths and causal depths `[pair]`, all taken from the long table by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from iglens_tl._study_statistics import (
    Interval,
    Numbers,
    correlation_interval,
    hits,
    holm,
    mean_interval,
    rank_correlations,
)

if TYPE_CHECKING:
    import pandas

RULES = ("mass", "crossing", "peak", "rank")
CONTROLS = ("first block", "last block", "random", "placebo")
RIVALS = (
    "|credit|",
    "straight",
    "gradient x update",
    "DLA",
    "update norm",
    "patching",
    "first block",
    "last block",
    "placebo",
)
"""What the credit is compared with in the primary test."""

VARIANTS = (
    "|credit|",
    "log-prob credit",
    "log-odds credit",
    "sublayer credit",
    "zero baseline",
    "mean baseline",
    *(f"onset {rule}" for rule in RULES),
)

OUTCOMES = {
    "skip, target": "drop_skip_target",
    "skip, all": "drop_skip_all",
    "mean, target": "drop_mean_target",
    "mean, all": "drop_mean_all",
    "resample, target": "drop_resample_target",
    "resample, all": "drop_resample_all",
    "placebo, target": "drop_placebo_target",
    "placebo, all": "drop_placebo_all",
    "direct skip": "direct_skip",
    "direct mean": "direct_mean",
    "gain of transplant": "gain_transplant",
    "gain of attention cut": "gain_cut",
}
PRIMARY = "skip, target"
TOTAL = tuple(name for name, column in OUTCOMES.items() if column.startswith("drop_"))

DEPTHS = {
    **{f"onset {rule}": f"onset_{rule}" for rule in RULES},
    "onset mass, log-prob": "onset_mass_log_prob",
    "onset mass, log-odds": "onset_mass_log_odds",
    "lens: first top-1": "lens_first_top",
    "half of |DLA|": "half_dla",
    "half of update norm": "half_update_norm",
}
CAUSAL_DEPTHS = {
    **{f"largest drop, {name}": name for name in TOTAL},
    "causal layer, transplant": "kept_transplant",
    "causal layer, attention cut": "kept_cut",
}
_COLUMNS = {
    "credit": "credit",
    "log-prob credit": "credit_log_prob",
    "log-odds credit": "credit_log_odds",
    "zero baseline": "credit_zero",
    "mean baseline": "credit_mean",
    "straight": "straight",
    "gradient x update": "gradient_update",
    "DLA": "dla",
    "DLA centred": "dla_centred",
    "update norm": "update_norm",
    "patching": "patching",
    "patching, all": "patching_all",
    "placebo": "drop_placebo_target",
}
PREDICTORS = (
    "credit", "|credit|", "log-prob credit", "log-odds credit", "sublayer credit", "zero baseline", "mean baseline",
    *(f"onset {rule}" for rule in RULES), "straight", "gradient x update", "DLA", "DLA centred", "update norm", "patching",
    "patching, all", *CONTROLS,
)  # fmt: skip
MONOTONE = -0.01
"""A trajectory is called monotone if no credit is below this."""


@dataclass(frozen=True)
class Measurements:
    """A study's rows as arrays.

    Args:
        pairs: one row a pair (the first of its rows in the long table).
        columns: numbers of the blocks, `[pair, block]`.
        seed: of the random control.
    """

    pairs: pandas.DataFrame
    columns: Mapping[str, Numbers]
    seed: int = 0

    @classmethod
    def of(cls, table: pandas.DataFrame, seed: int = 0) -> Measurements:
        n = int(table["block"].max()) + 1 if len(table) else 1
        pairs: Any = table[table["block"] == 0].reset_index(drop=True)
        numbers = [name for name in table.columns if table[name].dtype.kind == "f"]
        return cls(pairs, {name: table[name].to_numpy().reshape(len(pairs), n) for name in numbers}, seed)

    @property
    def n_blocks(self) -> int:
        return next(iter(self.columns.values())).shape[1]

    @property
    def prompts(self) -> NDArray[Any]:
        return self.pairs["prompt_index"].to_numpy()

    def where(self, kept: NDArray[np.bool_]) -> Measurements:
        """Some of the pairs."""
        columns = {name: column[kept] for name, column in self.columns.items()}
        pairs: Any = self.pairs[kept].reset_index(drop=True)
        return Measurements(pairs, columns, self.seed)

    def score(self, name: str) -> Numbers:
        """A predictor's score of every block."""
        return _derived(self)[name]() if name in _derived(self) else self.columns[_COLUMNS[name]]

    def effect(self, name: str) -> Numbers:
        """An outcome's effect of every block."""
        column = OUTCOMES[name]
        if not column.startswith("gain_"):
            return self.columns[column]
        kept = column.replace("gain_", "kept_")
        return np.diff(self.columns[kept], axis=1, prepend=self.columns[f"{kept}_0"][:, :1])

    def depth(self, name: str) -> Numbers:
        return self.columns[DEPTHS[name]][:, 0]

    def causal_depth(self, name: str) -> Numbers:
        """The hidden state (block + 1) of the largest drop; or from which on half of the probability is kept."""
        of = CAUSAL_DEPTHS[name]
        if of in OUTCOMES:
            return self.effect(of).argmax(1) + 1.0
        curve = np.concatenate([self.columns[f"{of}_0"][:, :1], self.columns[of]], axis=1)
        return suffix_start(curve >= self.columns["prob"][:, :1] / 2)

    @property
    def monotone(self) -> NDArray[np.bool_]:
        return np.asarray((self.columns["credit"] >= MONOTONE).all(1))


def suffix_start(enough: NDArray[np.bool_]) -> Numbers:
    """The first state from which on all of `[pair, state]` is True, `[pair]`; NaN where the last is not."""
    n_states = enough.shape[1]
    length = np.where(enough.all(1), n_states, np.argmin(enough[:, ::-1], axis=1))
    return np.where(length > 0, n_states - length, np.nan)


def _derived(m: Measurements) -> dict[str, Callable[[], NDArray[Any]]]:
    blocks, shape = np.arange(m.n_blocks), (len(m.pairs), m.n_blocks)

    def near(depth: Numbers) -> NDArray[Any]:
        return -np.abs(blocks - (depth[:, None] - 1))

    def random() -> Numbers:
        return np.random.default_rng(m.seed).random(shape)

    return {
        "|credit|": lambda: np.abs(m.columns["credit"]),
        "sublayer credit": lambda: np.maximum(m.columns["credit_attn"], m.columns["credit_mlp"]),
        **{f"onset {rule}": lambda rule=rule: near(m.depth(f"onset {rule}")) for rule in RULES},
        "first block": lambda: np.broadcast_to(-1.0 * blocks, shape),
        "last block": lambda: np.broadcast_to(1.0 * blocks, shape),
        "random": random,
    }


def agreement(m: Measurements, outcome: str, first: int = 0, n_resamples: int = 1999) -> pandas.DataFrame:
    """Every predictor against one outcome: rank correlation, hit among 1 and among 3, each with its interval.

    Args:
        m: the measurements.
        outcome: one of `OUTCOMES`.
        first: the first block that counts; 1 leaves block 0 out.
    """
    import pandas as pd

    effect, rows = m.effect(outcome)[:, first:], []
    for name in PREDICTORS:
        if _same(name, outcome):
            continue
        score, row = m.score(name)[:, first:], {"predictor": name}
        for measure, values in measures(score, effect).items():
            row |= _cells(measure, mean_interval(values, m.prompts, n_resamples))
        rows.append(row)
    return pd.DataFrame(rows)


def measures(score: Numbers, effect: Numbers) -> dict[str, Numbers]:
    """The three measures, `[pair]` each."""
    return {"rho": rank_correlations(score, effect), "top1": hits(score, effect), "top3": hits(score, effect, 3)}


def _same(predictor: str, outcome: str) -> bool:
    return _COLUMNS.get(predictor) == OUTCOMES[outcome]


def _cells(measure: str, found: Interval) -> dict[str, Any]:
    return {
        measure: found.mean,
        f"{measure}_low": found.low,
        f"{measure}_high": found.high,
        f"{measure}_n": found.n_pairs,
    }


def primary(m: Measurements, n_resamples: int = 9999) -> pandas.DataFrame:
    """The credit less each rival on the primary outcome: both measures, with and without block 0, Holm over all rows."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for first in (0, 1):
        effect = m.effect(PRIMARY)[:, first:]
        own = measures(m.score("credit")[:, first:], effect)
        for rival in RIVALS:
            other = measures(m.score(rival)[:, first:], effect)
            for measure in ("top1", "rho"):
                found = mean_interval(own[measure] - other[measure], m.prompts, n_resamples)
                rows.append(
                    {"blocks": "all" if first == 0 else "without 0", "rival": rival, "measure": measure,
                     "difference": found.mean, "low": found.low, "high": found.high, "p": found.p, "n_pairs": found.n_pairs}
                )  # fmt: skip
    table = pd.DataFrame(rows)
    table["p_holm"] = holm(table["p"].tolist())
    return table


def verdict(table: pandas.DataFrame) -> str:
    """By the rule of the plan: "holds", "does not hold" or "mixed", of what `primary` found."""
    controls = table[table["rival"].isin(CONTROLS)]
    hit = controls[controls["measure"] == "top1"]
    if ((hit["difference"] > 0) & (hit["p_holm"] < 0.05)).all():
        return "holds"
    for _, of_rival in controls.groupby(["rival", "blocks"]):
        if (of_rival["difference"] <= 0).all():
            return "does not hold"
    return "mixed"


def strata(m: Measurements, outcome: str, first: int = 0, n_resamples: int = 1999) -> pandas.DataFrame:
    """The credit and the constant controls on parts of the pairs: monotone or not, kinds of word, kinds of prompt."""
    import pandas as pd

    groups = {"monotone": m.monotone, "not monotone": ~m.monotone}
    for column, title in (("word_kind", "word"), ("kind", "prompt")):
        groups |= {f"{title}: {kind}": (m.pairs[column] == kind).to_numpy() for kind in sorted(set(m.pairs[column]))}
    rows: list[dict[str, Any]] = []
    for title, kept in groups.items():
        part, row = m.where(kept), {"stratum": title, "pairs": int(kept.sum())}
        for name in ("credit", "onset mass", "first block", "last block", "update norm"):
            if kept.any():
                found = measures(part.score(name)[:, first:], part.effect(outcome)[:, first:])
                row |= _cells(f"{name} top1", mean_interval(found["top1"], part.prompts, n_resamples))
                row |= _cells(f"{name} rho", mean_interval(found["rho"], part.prompts, n_resamples))
        rows.append(row)
    return pd.DataFrame(rows)


def depths(m: Measurements, n_resamples: int = 1999) -> pandas.DataFrame:
    """Across pairs: does a depth predict a causal depth? Rank correlation, and mean error beside the best constant's.

    The constant is the median of the causal depth on the other half of the prompts (even and odd index).
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for causal in CAUSAL_DEPTHS:
        truth = m.causal_depth(causal)
        constant = _constant_of_other_half(truth, m.prompts)
        baseline = mean_interval(np.abs(constant - truth), m.prompts, n_resamples)
        rows.append({"causal": causal, "predictor": "constant", **_cells("error", baseline)})
        for name in DEPTHS:
            guess = m.depth(name)
            rows.append(
                {"causal": causal, "predictor": name,
                 **_cells("rho", correlation_interval(guess, truth, m.prompts, n_resamples)),
                 **_cells("error", mean_interval(np.abs(guess - truth), m.prompts, n_resamples)),
                 **_cells("worse", mean_interval(np.abs(guess - truth) - np.abs(constant - truth), m.prompts, n_resamples))}
            )  # fmt: skip
    return pd.DataFrame(rows)


def _constant_of_other_half(truth: Numbers, prompts: NDArray[Any]) -> Numbers:
    even = prompts % 2 == 0
    halves = [np.nanmedian(truth[half]) if np.isfinite(truth[half]).any() else np.nan for half in (even, ~even)]
    return np.where(even, halves[1], halves[0])


def variants(m: Measurements, first: int = 0, n_resamples: int = 1999) -> pandas.DataFrame:
    """For each total effect: the variant with the best mean rho on the even prompts, on the odd ones, less the plain credit."""
    import pandas as pd

    even = m.prompts % 2 == 0
    tune, report = m.where(even), m.where(~even)
    rows: list[dict[str, Any]] = []
    for outcome in TOTAL[:6]:
        tuned = {name: _mean_rho(tune, name, outcome, first) for name in VARIANTS}
        best = max(tuned, key=lambda name: np.nan_to_num(tuned[name], nan=-2.0))
        effect = report.effect(outcome)[:, first:]
        own, other = (measures(report.score(name)[:, first:], effect) for name in ("credit", best))
        rows.append(
            {"outcome": outcome, "variant": best, "tuning rho": tuned[best],
             **_cells("rho", mean_interval(other["rho"], report.prompts, n_resamples)),
             **_cells("rho less credit's", mean_interval(other["rho"] - own["rho"], report.prompts, n_resamples)),
             **_cells("top1", mean_interval(other["top1"], report.prompts, n_resamples)),
             **_cells("top1 less credit's", mean_interval(other["top1"] - own["top1"], report.prompts, n_resamples))}
        )  # fmt: skip
    return pd.DataFrame(rows)


def _mean_rho(m: Measurements, name: str, outcome: str, first: int) -> float:
    rho = rank_correlations(m.score(name)[:, first:], m.effect(outcome)[:, first:])
    return float(np.nanmean(rho)) if np.isfinite(rho).any() else float("nan")


def where_it_hurts(m: Measurements, outcomes: Sequence[str]) -> pandas.DataFrame:
    """For each outcome: in which share of pairs block 0, the last block, or another one has the largest effect."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        best = m.effect(outcome).argmax(1)
        largest = m.effect(outcome).max(1)
        rows.append(
            {"outcome": outcome, "block 0": np.mean(best == 0), "last block": np.mean(best == m.n_blocks - 1),
             "another": np.mean((best > 0) & (best < m.n_blocks - 1)), "median block": np.median(best),
             "median largest": np.median(largest)}
        )  # fmt: skip
    return pd.DataFrame(rows)
