"""From which layer on a token no longer needs its context: two curves over the layers, and where they reach the clean value.

    transplant[L]      the metric where the token's own clean `h_L` runs on through blocks L .. n-1 among another context
    attention_cut[L]   the metric where, in blocks L .. n-1, the token's attention puts out its mean over a reference set

Both end at `clean` (L = n: nothing is changed any more). A curve is high from where on the token carries with it what it
needs; `gain` of a block is how much of the clean value it fetched. What a curve does not say: an other context is no
neutral one, and a mean output is no silence; a token that would be probable in any context has high curves from L = 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl import _ladder
from iglens_tl._checks import METRICS, fraction, one_of
from iglens_tl._display import level
from iglens_tl._layout import Column, Token, shown_tokens
from iglens_tl._onset import TINY
from iglens_tl._tables import TextStream, csv_text, frame_of, repeated, write_text
from iglens_tl._tokens_asked import TokensAsked

if TYPE_CHECKING:
    import pandas

CURVES = ("transplant", "attention_cut")
_STATE = ("state", "batch", "pos")


@dataclass(frozen=True, eq=False, repr=False)
class ContextNeed(TokensAsked):
    """The curves of `context_need`. `L` counts the blocks that ran before anything was changed: states 0 to n.

    Every tensor is on the CPU; numbers are float64, NaN where `mask` is False.

    Attributes:
        clean: [batch, pos] the metric of the run that nothing was changed in.
        transplant: [state, batch, pos] mean over the foreign contexts; None where it was not asked for.
        transplant_each: [state, foreign, batch, pos] that of each; None likewise.
        attention_cut: [state, batch, pos], or None.
        state_labels: `"0_pre"`, ..., `"final_post"`: the state `h_L`.
        segment_labels: `"0"`, ..., the block between two of them, as `ig_lens` calls it.
        metric: `"prob"`, `"log_prob"`, `"log_odds"` or `"logit"`.
        forwards, block_evaluations: what was run, as in `AblationResult`.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "clean": ("batch", "pos"),
        "transplant": _STATE,
        "transplant_each": ("state", "foreign", "batch", "pos"),
        "attention_cut": _STATE,
    }

    clean: Float[Tensor, "batch pos"]
    transplant: Float[Tensor, "state batch pos"] | None
    transplant_each: Float[Tensor, "state foreign batch pos"] | None
    attention_cut: Float[Tensor, "state batch pos"] | None
    state_labels: tuple[str, ...]
    segment_labels: tuple[str, ...]
    metric: str
    forwards: int
    block_evaluations: int

    @property
    def unit(self) -> str:
        """The unit of the curves."""
        return METRICS[self.metric]

    def curve(self, name: str) -> Float[Tensor, "state batch pos"]:
        """A curve by its name.

        Raises:
            ValueError: for an unknown name, or a curve that was not asked for.
        """
        found: Tensor | None = getattr(self, one_of("curve", name, CURVES))
        if found is None:
            raise ValueError(f"the curve {name!r} was not computed: context_need(..., curves=[{name!r}]).")
        return found

    def gain(self, curve: str) -> Float[Tensor, "segment batch pos"]:
        """What each block fetched: `curve[L + 1] - curve[L]`, [segment, batch, pos] in `unit`, labels `segment_labels`."""
        return self.curve(curve).diff(dim=0)

    def causal_layer(self, curve: str, share: float = 0.5) -> Int[Tensor, "batch pos"]:
        """The smallest L from which on the target keeps `share` of its clean probability, at that L and at every later one.

        Args:
            curve: `"transplant"` or `"attention_cut"`.
            share: in (0, 1].

        Returns:
            [batch, pos]: 0 to n, an index of `state_labels` (the `hidden_state` of tables); -1 where masked, or where the
            clean probability does not exceed the smallest normal float32. n says: not before the last block is done.

        Raises:
            ValueError: where the curves are no probabilities; half of a log-probability or of a difference is no threshold.
        """
        fraction("share", share)
        if self.metric != "prob" or self.incorrect_ids is not None:
            raise ValueError('causal_layer needs the curves of a probability: metric="prob", no incorrect_targets.')
        keeps = self.curve(curve) >= share * self.clean
        from_here = keeps.flip(0).long().cumprod(0).sum(0)  # how many states at the end keep it without a break
        index = len(self.state_labels) - from_here
        return torch.where(self.mask & (self.clean > TINY) & (from_here > 0), index, -1)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, state) where `mask` is True.

        Columns: those of a token; `state` (an ordered categorical), `hidden_state` (L); `clean` and the curves in `unit`;
        `metric`, `unit`. A gain is the difference of two rows.
        """
        columns = _ladder.long_columns(self, "state", self.state_labels)
        columns["hidden_state"] = _ladder.tiled(self, range(len(self.state_labels)))
        columns["clean"] = _ladder.at_mask(self, self.clean.expand(len(self.state_labels), *self.mask.shape))
        for name in self._computed():
            columns[name] = _ladder.at_mask(self, self.curve(name))
        n = int(self.mask.sum()) * len(self.state_labels)
        return frame_of({**columns, "metric": repeated(self.metric, n), "unit": repeated(self.unit, n)})

    def _computed(self) -> list[str]:
        return [name for name in CURVES if getattr(self, name) is not None]

    def to_csv(self, path: str | Path | TextStream, *, spreadsheet_safe: bool = True) -> None:
        """Write the long table as CSV, as `IGLensResult.to_csv` does."""
        write_text(csv_text(self.to_dataframe(), spreadsheet_safe), path)

    def to_text(self, width: int | None = None, max_rows: int = 40) -> str:
        """A table for each token, a row a state, and what the curves mean.

        Args:
            width: in columns; None for the width of the terminal.
            max_rows: the most rows of a table; those of the largest change to the next are kept.
        """
        width = shutil.get_terminal_size().columns if width is None else width
        return _ladder.text(self, self._title(), self._columns, self._weight(), self.reading(), width, max_rows)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _ladder.html(self, self._title(), self._columns, self._weight(), self.reading())

    def _weight(self) -> Tensor:
        gains = torch.stack([self.gain(name).abs() for name in self._computed()]).amax(0)
        return torch.cat([gains, torch.full_like(gains[:1], torch.inf)])

    def _title(self) -> str:
        n, blocks = len(shown_tokens(self)), len(self.segment_labels)
        counts = f"{n} token{'' if n == 1 else 's'}, {blocks} block{'' if blocks == 1 else 's'}"
        return f"ContextNeed: {counts}, {self.metric} [{self.unit}]"

    def _columns(self, token: Token, rows: Sequence[int]) -> list[Column]:
        columns = [Column("state", [self.state_labels[row] for row in rows], right=False)]
        for name in self._computed():
            numbers: list[float] = self.curve(name)[(list(rows), *token)].tolist()
            cells = [level(number) for number in numbers]
            if self.metric == "prob" and self.incorrect_ids is None:
                at = int(self.causal_layer(name)[token])
                cells = [cell + (" <" if row == at else "  ") for cell, row in zip(cells, rows, strict=True)]
            columns.append(Column(name.replace("_", " "), cells, numbers=numbers))
        return columns

    def reading(self) -> str:
        """What the curves mean, and what they do not."""
        return (
            "transplant: the token's own state runs on among other contexts; attention cut: from this state on its attention "
            "puts out a mean. <: from here on at least half of the clean probability stays. Neither another context nor a "
            "mean is neutral."
        )
