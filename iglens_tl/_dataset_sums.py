"""Sums over the shards of a run: credits by segment and prompt, onsets, failures; see `iglens_tl.summary`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from iglens_tl._onset import RULES

if TYPE_CHECKING:
    import pandas
    import pyarrow

_LABELS = ("segment", "start", "end", "hidden_state")
SUMMED = ("prompt_index", "segment_index", *_LABELS, "credit", "error", *(f"onset_{rule}" for rule in RULES))
"""The columns that are read of each shard."""


@dataclass
class Sums:
    """What is added up over shards, one at a time.

    Args:
        labels: segment, start, end and hidden state of each segment index.
        per_prompt: a frame a shard: by segment index and prompt, the sum of credits, of |credits|, and the tokens.
        onset_counts: tokens by rule and label.
    """

    done: set[int] = field(default_factory=set[int])
    n_tokens: int = 0
    labels: dict[int, tuple[Any, ...]] = field(default_factory=dict[int, tuple[Any, ...]])
    per_prompt: list[Any] = field(default_factory=list[Any])
    onset_counts: Counter[tuple[str, str | None]] = field(default_factory=Counter[tuple[str, "str | None"]])
    failed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def add(self, table: pyarrow.Table) -> list[int]:
        """Add a shard that holds the columns of `SUMMED`; gives those of its prompts that another one held already."""
        pc: Any = import_module("pyarrow.compute")  # its functions are made when it is imported

        prompts: list[int] = pc.unique(table["prompt_index"]).to_pylist()
        twice = [index for index in prompts if index in self.done]
        self.done.update(prompts)
        failed = table.filter(pc.is_valid(table["error"]))
        self.failed += list(zip(failed["prompt_index"].to_pylist(), failed["error"].to_pylist(), strict=True))
        rows = table.filter(pc.is_null(table["error"]))
        if not rows.num_rows:
            return twice
        frame = rows.select(["prompt_index", "segment_index", "credit", *_LABELS]).to_pandas()
        for index, *labels in frame[["segment_index", *_LABELS]].drop_duplicates().itertuples(index=False):
            self.labels.setdefault(int(index), tuple(labels))
        groups = frame.assign(size=frame["credit"].abs()).groupby(["segment_index", "prompt_index"])
        self.per_prompt.append(groups.agg(credit=("credit", "sum"), size=("size", "sum"), n=("credit", "count")))
        tokens = rows.filter(pc.equal(rows["segment_index"], 0))
        self.n_tokens += tokens.num_rows
        for rule in RULES:
            self.onset_counts.update((rule, label) for label in tokens[f"onset_{rule}"].to_pylist())
        return twice

    def segments(self, confidence: float) -> pandas.DataFrame:
        import pandas as pd

        names = [*_LABELS, "mean", "low", "high", "mean_abs", "n_tokens", "n_prompts"]
        if not self.per_prompt:
            return pd.DataFrame(columns=names)
        prompts = pd.concat(self.per_prompt).sort_index()  # the same sums, whatever the order of the shards
        rows = [(*self.labels[index], *interval(prompts.loc[index], confidence)) for index in sorted(self.labels)]
        frame = pd.DataFrame(rows, columns=names)
        return frame.assign(hidden_state=frame["hidden_state"].astype("Int64"))

    def onsets(self, rules: Sequence[str]) -> pandas.DataFrame:
        import pandas as pd

        found = self.onset_counts
        order = self._order()
        rows = [
            (rule, label, found[rule, label], found[rule, label] / self.n_tokens)
            for rule in rules
            for label in sorted(
                (label for name, label in found if name == rule), key=lambda label: order.get(label, -1)
            )
        ]
        frame = pd.DataFrame(rows, columns=["rule", "label", "n_tokens", "share"])
        labels = pd.Series([label for _, label, _, _ in rows], dtype=object)  # None stays None
        return frame.assign(label=labels)

    def _order(self) -> dict[str | None, int]:
        """Places along the path: a state before the segment that begins there."""
        order: dict[str | None, int] = {}
        for index in sorted(self.labels):
            segment, start, end, _ = self.labels[index]
            order |= {segment: index, end: index + 1}
            order.setdefault(start, index)
        return order

    def failures(self) -> pandas.DataFrame:
        import pandas as pd

        return pd.DataFrame(sorted(self.failed), columns=["prompt_index", "error"])


def require_scipy() -> None:
    """Refuse early where the intervals could not be reckoned."""
    if find_spec("scipy") is None:
        raise ImportError("the intervals of a summary need SciPy: pip install 'iglens_tl[data]'.")


def interval(prompts: pandas.DataFrame, confidence: float) -> tuple[float, float, float, float, int, int]:
    """Mean, its interval, mean of the sizes, tokens, prompts."""
    from scipy import stats

    credits, sizes, n = (prompts[name].to_numpy() for name in ("credit", "size", "n"))
    m, total = len(n), int(n.sum())
    mean = float(credits.sum() / total)
    half = float("nan")
    if m > 1:
        variance = m / (m - 1) * float(((credits - mean * n) ** 2).sum()) / total**2
        half = float(stats.t.ppf((1 + confidence) / 2, m - 1)) * float(np.sqrt(variance))
    return mean, mean - half, mean + half, float(sizes.sum() / total), total, m
