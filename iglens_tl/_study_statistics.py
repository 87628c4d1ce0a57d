"""How well a score of blocks agrees with an effect of blocks, over many tokens: measures and their intervals.

Two measures for each pair of a prompt and a position, over its blocks: Spearman's rank correlation of score and effect,
and whether the block of the largest score is among the k blocks of the largest effect (a hit). Pairs of one prompt are
not independent, so intervals come from a bootstrap over prompts (SciPy's, percentile): whole prompts are drawn again.
Ties count as the first block. A correlation in which a side is constant, and a row with NaN, is NaN and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
N_RESAMPLES = 1999


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, its 95 % interval, the two-sided bootstrap p-value of "it is 0", and how many pairs and prompts."""

    mean: float
    low: float
    high: float
    p: float
    n_pairs: int
    n_prompts: int


_NAN = float("nan")
NOTHING = Interval(_NAN, _NAN, _NAN, _NAN, 0, 0)


def rank_correlations(scores: Numbers, effects: Numbers) -> Numbers:
    """Spearman's rho of each row `[pair, block]`, `[pair]`; NaN where a side is constant or not finite."""
    from scipy.stats import rankdata

    ranks = [rankdata(side, axis=1) for side in (scores, effects)]
    a, b = (side - side.mean(1, keepdims=True) for side in ranks)
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    finite = np.isfinite(scores).all(1) & np.isfinite(effects).all(1)
    return np.where(finite & np.isfinite(rho), rho, np.nan)


def hits(scores: Numbers, effects: Numbers, k: int = 1) -> Numbers:
    """1 where the block of the largest score is among the `k` of the largest effect, else 0; NaN for a row that is not finite."""
    finite = np.isfinite(scores).all(1) & np.isfinite(effects).all(1)
    best = np.where(np.isfinite(scores), scores, -np.inf).argmax(1)
    places = np.argsort(np.argsort(-effects, axis=1, kind="stable"), axis=1, kind="stable")
    hit = places[np.arange(len(best)), best] < k
    return np.where(finite, hit.astype(float), np.nan)


def mean_interval(
    values: Numbers, prompts: Sequence[Any] | NDArray[Any], n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """The mean of `values` [pair] over the pairs that have one, with prompts as the unit of resampling."""
    kept = np.isfinite(values)
    if not kept.any():
        return NOTHING
    _, cluster = np.unique(np.asarray(prompts)[kept], return_inverse=True)
    sums, counts = np.bincount(cluster, values[kept]), np.bincount(cluster).astype(float)

    def ratio(of_sums: Numbers, of_counts: Numbers, axis: int = -1) -> Numbers:
        return of_sums.sum(axis) / of_counts.sum(axis)

    return _bootstrap((sums, counts), ratio, True, n_resamples, seed, int(kept.sum()))


def correlation_interval(
    x: Numbers, y: Numbers, prompts: Sequence[Any] | NDArray[Any], n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Interval:
    """Spearman's rho of two numbers a pair, across pairs, with prompts as the unit of resampling."""
    kept = np.isfinite(x) & np.isfinite(y)
    _, cluster = np.unique(np.asarray(prompts)[kept], return_inverse=True)
    members = [np.flatnonzero(cluster == i) for i in range(cluster.max() + 1)] if kept.any() else []
    if len(members) < 2:
        return NOTHING
    a, b = x[kept], y[kept]

    def rho(chosen: NDArray[np.int64]) -> float:
        rows = np.concatenate([members[i] for i in chosen])
        return float(rank_correlations(a[rows][None], b[rows][None])[0])

    return _bootstrap((np.arange(len(members)),), rho, False, n_resamples, seed, int(kept.sum()))


def _bootstrap(
    data: tuple[NDArray[Any], ...],
    statistic: Callable[..., Any],
    vectorized: bool,
    n_resamples: int,
    seed: int,
    n_pairs: int,
) -> Interval:
    from scipy.stats import bootstrap

    estimate = float(statistic(*data))
    n = len(data[0])
    if n < 2 or not np.isfinite(estimate):
        return Interval(estimate, np.nan, np.nan, np.nan, n_pairs, n)
    found = bootstrap(
        data,
        statistic,
        n_resamples=n_resamples,
        vectorized=vectorized,
        paired=len(data) > 1,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    drawn = found.bootstrap_distribution[np.isfinite(found.bootstrap_distribution)]
    if len(drawn) < n_resamples / 2:  # most resamples have no such statistic, so neither has the interval
        return Interval(estimate, np.nan, np.nan, np.nan, n_pairs, n)
    low, high = np.quantile(drawn, [0.025, 0.975])
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum())
    return Interval(estimate, float(low), float(high), min(1.0, 2 * (int(tail) + 1) / (len(drawn) + 1)), n_pairs, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for as many tests as there are p-values (NaN stays NaN and counts as none)."""
    p = np.asarray(p_values, dtype=float)
    order = [int(i) for i in np.argsort(p) if np.isfinite(p[i])]
    corrected, highest = np.full(len(p), np.nan), 0.0
    for place, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * p[i]))
        corrected[i] = highest
    return corrected.tolist()
