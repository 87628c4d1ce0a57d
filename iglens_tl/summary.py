"""What a run over a data set found, read from its shards, whether or not the run is finished.

The mean credit of each segment over all tokens is a ratio, `sum of credits / number of tokens`. Tokens of one prompt are
not independent of each other, so the interval is that of a ratio over prompts (clusters): with `s_p` a prompt's sum of
credits and `n_p` its number of tokens, the variance of the mean is

    m / (m - 1) * sum_p (s_p - mean * n_p)^2 / N^2        (m prompts, N tokens)

and the interval Student's t with m - 1 degrees of freedom. It says how well the mean of prompts *like these* is known;
it says nothing about prompts of another kind, and while a run goes on the longest prompts of each part come first.

Example::

    from iglens_tl import summarize

    summary = summarize("facts-credits")
    summary.segments      # mean credit of each segment with its interval
    summary.onsets        # how many tokens have their onset where, by each rule
    summary.failures      # the prompts that failed, and why
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iglens_tl._checks import METRICS, shorten
from iglens_tl._dataset_sums import SUMMED, Sums, require_scipy
from iglens_tl._display import SMALL, credit
from iglens_tl._fragment import bars, fragment, line
from iglens_tl._fragment import table as html_table
from iglens_tl._layout import Column
from iglens_tl._onset import RULES
from iglens_tl._shard_rows import ONSET_FRACTION
from iglens_tl._shards import open_folder, read_shards, refuse_twice

if TYPE_CHECKING:
    import pandas

_SHOWN_REASONS = 5
_BAR = 24
_WIDTH = 118


@dataclass(frozen=True, eq=False, repr=False)
class DatasetSummary:
    """Mean credits with intervals, onsets and failures of a run.

    Attributes:
        n_prompts: rows of the data set.
        n_done: rows that are finished, failed ones among them.
        n_tokens: tokens that were attributed.
        segments: one row a segment, in the order of the path: `segment`, `start`, `end`, `hidden_state`, `mean` (of the
            credits, in `unit`), `low`, `high` (its interval; NaN below two prompts), `mean_abs` (of the |credits|),
            `n_tokens`, `n_prompts`.
        onsets: one row a rule and place: `rule`, `label` (None where there is no onset), `n_tokens`, `share`.
        failures: one row a failed prompt: `prompt_index`, `error`.
        confidence: of the intervals.
        onset_fraction: the share that the onset rules ask for.
        metric, unit: of the credits.
        settings: the data, model and settings of the run, in JSON values.
    """

    n_prompts: int
    n_done: int
    n_tokens: int
    segments: pandas.DataFrame
    onsets: pandas.DataFrame
    failures: pandas.DataFrame
    confidence: float
    onset_fraction: float
    metric: str
    unit: str
    settings: Mapping[str, Any]

    @property
    def is_complete(self) -> bool:
        """Whether every row of the data set is finished."""
        return self.n_done == self.n_prompts

    def to_text(self) -> str:
        """The summary as text: a line for each segment, the onsets beside it, and what failed."""
        lines = [self._heading(), *_aligned(self._table())]
        if self.n_tokens:
            lines += ["", *(line for note in self._notes() for line in textwrap.wrap(note, _WIDTH))]
        return "\n".join([*lines, *self._failed()])

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each segment, with bars; every text escaped."""
        titles, *rows = self._table() or [[]]
        below = [line(words) for words in self._failed()]
        if not rows:
            return fragment(self._heading(), *below)
        means: list[float] = self.segments["mean"].tolist()
        drawn = [
            Column(title, cells, right=title != "segment")
            if title
            else bars([*means, *[0.0] * (len(rows) - len(means))])
            for title, cells in zip(titles, zip(*rows, strict=True), strict=True)
        ]
        return fragment(self._heading(), html_table(drawn), *below, note=" ".join(self._notes()))

    def _heading(self) -> str:
        state = "complete" if self.is_complete else f"{self.n_prompts - self.n_done} to do"
        n_failed = len(self.failures)
        return (
            f"DatasetSummary: {self.n_done} of {self.n_prompts} prompts ({state}, {n_failed} failed), {self.n_tokens} tokens, "
            f"{self.metric} [{self.unit}]"
        )

    def _table(self) -> list[list[str]]:
        if not self.n_tokens:
            return []
        rules = list(dict.fromkeys(self.onsets["rule"]))
        counts = {(rule, label): share for rule, label, _, share in self.onsets.itertuples(index=False)}
        largest = max(self.segments["mean"].abs().max(), 1e-300)
        rows = [["segment", "mean credit", f"{self.confidence:.0%} interval", "", *(f"onset {rule}" for rule in rules)]]
        for row in self.segments.to_dict("records"):
            shares = [counts.get((rule, row[_place(rule)]), 0.0) for rule in rules]
            bar = "█" * round(_BAR * abs(row["mean"]) / largest)
            interval = "-" if math.isnan(row["low"]) else f"[{credit(row['low'])}, {credit(row['high'])}]"
            rows.append([row["segment"], credit(row["mean"]), interval, bar, *(_percent(share) for share in shares)])
        none = [counts.get((rule, None), 0.0) for rule in rules]
        first = self.segments["start"].iloc[0]
        at_first = [counts.get((rule, first), 0.0) if RULES[rule] == "state" else 0.0 for rule in rules]
        rows.append([f"at {first}", "", "", "", *(_percent(share) for share in at_first)])
        rows.append(["none", "", "", "", *(_percent(share) for share in none)])
        return rows

    def _notes(self) -> list[str]:
        return [
            f"mean credit: over all tokens; interval: over prompts, as tokens of one prompt are not independent. onset: share of "
            f"tokens (fraction {self.onset_fraction:g}; crossing and rank: in the row whose end state it is).",
            "credit = extra probability that norm+unembedding read from the state after this segment, given the state before it; "
            f"not the layer's causal effect. {SMALL} = less than 0.00005.",
        ]

    def _failed(self) -> list[str]:
        reasons = Counter(self.failures["error"].tolist())
        prompts = self.failures.groupby("error", sort=False)["prompt_index"].apply(list).to_dict()
        lines = [
            f"failed {reason!r}: prompt {shorten(prompts[reason], 4)}"
            for reason, _ in reasons.most_common(_SHOWN_REASONS)
        ]
        left = len(reasons) - _SHOWN_REASONS
        return [*lines, f"... {left} more reasons: see failures"] if left > 0 else lines


def _place(rule: str) -> str:
    return "segment" if RULES[rule] == "segment" else "end"


def _percent(share: float) -> str:
    return SMALL if share == 0 else f"{share:.1%}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    drawn = 3  # the column of bars
    return [
        "  ".join(
            cell.ljust(w) if i in (0, drawn) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def summarize(out: str | Path, *, confidence: float = 0.95) -> DatasetSummary:
    """Read what a run has written so far.

    Args:
        out: the folder of `run_dataset`; the run may be going on.
        confidence: of the intervals, in (0, 1).

    Returns:
        A `DatasetSummary`; credits in the unit of the run's metric.

    Raises:
        FileNotFoundError: where there is no such folder.
        ValueError: for a folder that is of no run, a damaged shard, a prompt in two shards, or a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence!r}.")
    require_scipy()
    folder = open_folder(out)
    record = folder.record()
    assert record is not None
    sums = Sums()
    for table in read_shards(folder, SUMMED):
        refuse_twice(folder.path, sums.add(table))
    identity = record["identity"]
    metric = identity["settings"]["metric"]
    has_crossing = metric == "prob" and identity["settings"]["incorrect_targets"] is None
    return DatasetSummary(
        n_prompts=identity["data"]["rows"],
        n_done=len(sums.done),
        n_tokens=sums.n_tokens,
        segments=sums.segments(confidence),
        onsets=sums.onsets([rule for rule in RULES if rule != "crossing" or has_crossing]),
        failures=sums.failures(),
        confidence=confidence,
        onset_fraction=ONSET_FRACTION,
        metric=metric,
        unit=METRICS[metric],
        settings=identity,
    )
