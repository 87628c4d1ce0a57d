"""What ablating layers did to a token: the probability before and after, and the drop.

    drop[layer] = clean - after[layer]        (positive: without this part of the layer the target is less probable)

Unit: that of the metric (probability by default). What a drop does not say: the model was never trained to run without
a layer, so an ablated run is off its distribution; drops of several layers do not add up; and where later layers make up
for what was removed, a small drop does not mean that the layer did nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor

from iglens_tl import _ladder
from iglens_tl._checks import METRICS
from iglens_tl._display import credit, level
from iglens_tl._layout import Column, Token, shown_tokens
from iglens_tl._tables import TextStream, csv_text, frame_of, repeated, write_text
from iglens_tl._tokens_asked import TokensAsked

if TYPE_CHECKING:
    import pandas

_WORDS = {"block": "whole blocks", "attn": "attention", "mlp": "MLPs", "head": "heads"}
_LAYER = ("layer", "batch", "pos")


@dataclass(frozen=True, eq=False, repr=False)
class AblationResult(TokensAsked):
    """The metric with and without each layer, or part of each layer.

    Every tensor is on the CPU; numbers are float64, NaN where `mask` is False.

    Attributes:
        clean: [batch, pos] the metric of the run that nothing was ablated in.
        after: [layer, batch, pos] the metric with that layer ablated (mean over draws, where a mode draws).
        drop: [layer, batch, pos] `clean - after`.
        clean_prob, after_prob: the same as probabilities, whatever the metric (with incorrect targets, less theirs).
        layer_labels: `"3"` (as `ig_lens` calls the segment of block 3), `"3_attn"`, `"3_mlp"` or `"L3H2"`.
        blocks: the number of each row's block.
        component: `"block"`, `"attn"`, `"mlp"` or `"head"`.
        mode: `"zero"`, `"skip"`, `"mean"`, `"resample"` or `"placebo"`.
        scope: `"target"` or `"all"`.
        effect: `"total"` or `"direct"`.
        metric: `"prob"`, `"log_prob"`, `"log_odds"` or `"logit"`.
        forwards: sequences that ran through the whole model for this result.
        block_evaluations: blocks evaluated for this result, one for each block and sequence; those of the forwards too.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("clean", "clean_prob"), ("batch", "pos")),
        **dict.fromkeys(("after", "drop", "after_prob"), _LAYER),
    }

    clean: Float[Tensor, "batch pos"]
    after: Float[Tensor, "layer batch pos"]
    drop: Float[Tensor, "layer batch pos"]
    clean_prob: Float[Tensor, "batch pos"]
    after_prob: Float[Tensor, "layer batch pos"]
    layer_labels: tuple[str, ...]
    blocks: tuple[int, ...]
    component: str
    mode: str
    scope: str
    effect: str
    metric: str
    forwards: int
    block_evaluations: int

    @property
    def unit(self) -> str:
        """The unit of `clean`, `after` and `drop`."""
        return METRICS[self.metric]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, layer) where `mask` is True.

        Columns: those of a token (`batch`, `position`, `token`, ...); `layer` (an ordered categorical), `block`; `clean`,
        `after`, `drop` in `unit`; `clean_prob`, `after_prob`; `component`, `mode`, `scope`, `effect`, `metric`, `unit`.
        """
        columns = _ladder.long_columns(self, "layer", self.layer_labels)
        columns["block"] = _ladder.tiled(self, self.blocks)
        for name in ("clean", "after", "drop", "clean_prob", "after_prob"):
            tensor: Tensor = getattr(self, name)
            columns[name] = _ladder.at_mask(self, tensor.expand(self.after.shape))
        n = int(self.mask.sum()) * len(self.layer_labels)
        for name in ("component", "mode", "scope", "effect", "metric", "unit"):
            columns[name] = repeated(getattr(self, name), n)
        return frame_of(columns)

    def to_csv(self, path: str | Path | TextStream, *, spreadsheet_safe: bool = True) -> None:
        """Write the long table as CSV, as `IGLensResult.to_csv` does."""
        write_text(csv_text(self.to_dataframe(), spreadsheet_safe), path)

    def to_text(self, width: int | None = None, max_rows: int = 40) -> str:
        """A table for each token, the rows of the largest |drop|, and what a drop means.

        Args:
            width: in columns; None for the width of the terminal.
            max_rows: the most rows of a table.
        """
        width = shutil.get_terminal_size().columns if width is None else width
        return _ladder.text(self, self._title(), self._columns, self.drop.abs(), self.reading(), width, max_rows)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _ladder.html(self, self._title(), self._columns, self.drop.abs(), self.reading())

    def _title(self) -> str:
        n = len(shown_tokens(self))
        how = f"{_WORDS[self.component]}, {self.mode} at {self.scope}, {self.effect} effect"
        return f"AblationResult: {n} token{'' if n == 1 else 's'}, {how} [{self.unit}]"

    def _columns(self, token: Token, rows: Sequence[int]) -> list[Column]:
        after, drops = (tensor[(list(rows), *token)].tolist() for tensor in (self.after, self.drop))
        return [
            Column("layer", [self.layer_labels[row] for row in rows], right=False),
            Column("clean", [level(float(self.clean[token]))] * len(rows)),
            Column("after", [level(value) for value in after]),
            Column("drop", [credit(value) for value in drops], numbers=drops),
        ]

    def reading(self) -> str:
        """What a drop means here, and what it does not."""
        where = "at the position that is read" if self.scope == "target" else "at all positions"
        if self.scope == "all" and not self.settings.get("include_first", True):
            where = "at all positions but each prompt's first"
        how = f"output of the {'part' if self.component != 'block' else 'block'} -> {self.settings['replacement']}, {where}"
        through = (
            "the blocks above run on" if self.effect == "total" else "in the last state alone; nothing is run again"
        )
        return (
            f"drop = clean - after. {how}; {through}. An ablated run is off the model's distribution; drops do not add up, "
            "and later layers can make up for what is removed."
        )
