"""What an attribution found: between which two states a token's probability was produced, and how it adds up.

The path has K+1 states `h_0 .. h_K` and K segments. With `f` the readout (the probability of the target, say, that the
model's own final norm and unembedding give to a state), the credit of segment `j` and what it sums to are

    attribution[j] = f(h_{j+1}) - f(h_j)            (estimators that integrate come close, and say how close in `gap`)
    attribution.sum(0) = total = f(h_K) - f(h_0)

Sign: a positive credit raised the target. Unit: see `unit`. What a credit does not say: it is not the causal effect of
a layer through the blocks above it; it is the change of what can be read off the stream with the model's own final norm
and unembedding. A result holds data only: it can be saved, loaded, tabled, printed and plotted where neither a model
nor TransformerLens is at hand.

>>> import torch
>>> from iglens_tl.results import IGLensResult
>>> values = torch.tensor([0.0, 0.1, 0.9], dtype=torch.float64).reshape(3, 1, 1)
>>> result = IGLensResult(
...     attribution=values.diff(dim=0), values=values, total=values[-1] - values[0],
...     gap=torch.zeros(1, 1, dtype=torch.float64), model_value=None, is_top=values > 0.5,
...     mask=torch.tensor([[True]]), positions=torch.tensor([[4]]), target_ids=torch.tensor([[[7042]]]),
...     incorrect_ids=None, steps=None, tokens=None, token_mask=None, token_strings=None,
...     target_strings=((" Paris",),), incorrect_strings=None, state_labels=("0_pre", "1_pre", "final_post"),
...     segment_labels=("0", "1"), hidden_states=(1, 2), metric="prob", estimator="prediction_aware",
...     settings={"baseline": "embed"}, provenance={})
>>> result.onset()
Onset(mass, fraction 0.5: segment 1)
>>> result.to_dataframe()[["position", "target", "segment", "hidden_state", "credit"]]
   position  target segment  hidden_state  credit
0         4   Paris       0             1     0.1
1         4   Paris       1             2     0.8
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from iglens_tl import _files, _html, _onset, _tables, _text
from iglens_tl._fields import AXES, ResultFields, labels_as_tuples, map_tensors, plain_fields

if TYPE_CHECKING:
    import pandas

Index = int | slice | Sequence[int] | None


@dataclass(frozen=True, eq=False, repr=False)
class Onset:
    """Where each token's probability sets in, under one rule.

    Attributes:
        rule: the rule's name, see `IGLensResult.onset`.
        fraction: the share that the rule asks for; None for a rule that asks for none.
        kind: `"segment"` (the index counts segments) or `"state"` (it counts states).
        index: [batch, pos], -1 where there is no onset.
        labels: the segment's or state's label at `[batch][pos]`, None where there is no onset.
        hidden_states: the paper's hidden state index (for a segment: of its end), None where there is none.
    """

    rule: str
    fraction: float | None
    kind: str
    index: Int[Tensor, "batch pos"]
    labels: tuple[tuple[str | None, ...], ...]
    hidden_states: tuple[tuple[int | None, ...], ...]

    def __repr__(self) -> str:
        rows = ["[" + ", ".join(label or "none" for label in row) + "]" for row in self.labels]
        single = self.index.numel() == 1
        where = rows[0].strip("[]") if single else " ".join(rows)
        share = "" if self.fraction is None else f", fraction {self.fraction:g}"
        return f"Onset({self.rule}{share}: {self.kind}{'' if single else 's'} {where})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each entry (at most 40), "none" where there is no onset; every text escaped."""
        share = "" if self.fraction is None else f", fraction {self.fraction:g}"
        return _html.onset_html(f"Onset: {self.rule}{share}", self.kind, self.labels, self.hidden_states)


@dataclass(frozen=True, eq=False, repr=False)
class IGLensResult(ResultFields):
    """The attribution of one or many tokens' readout to the segments of the residual stream.

    Every tensor is on the CPU; numbers are float64, ids int64. An entry where `mask` is False (a pad position, or a
    position that the prompt does not have) is NaN, -1 or "", and no reduction, table or plot contains it.

    Attributes:
        attribution: [segment, batch, pos] credits, in `unit`.
        values: [segment+1, batch, pos] the readout at each state, in `unit`.
        total: [batch, pos] `values[-1] - values[0]`.
        gap: [batch, pos] `attribution.sum(0) - total`: the error of the sum.
        model_value: [batch, pos] the same quantity from the model's own logits; None where none were at hand.
        is_top: [segment+1, batch, pos] whether the target is the argmax of the readout at the state.
        mask: [batch, pos] which entries exist.
        positions: [batch, pos] the index on the token axis, -1 where masked.
        target_ids: [batch, pos, width] token ids; more than one for a set of tokens, padded with -1.
        incorrect_ids: [batch, pos, incorrect_width] the ids of what the target is compared with, or None.
        steps: [segment, step, batch, pos] the observed change per interpolation step, or None.
        tokens: [batch, seq] the ids of the prompt, None when only a cache came.
        token_mask: [batch, seq] False on padding.
        token_strings: `[batch][seq]` the prompt's tokens as text.
        target_strings: `[batch][pos]`, `" Paris"`; a set reads `" cat| dog"`; `""` where masked.
        incorrect_strings: `[batch][pos]`, or None.
        state_labels: K+1 names, `"0_pre"`, `"0_mid"`, ..., `"final_post"`, or a baseline's name first.
        segment_labels: K names by what the segment is made of: `"3"`, `"3-6"`, `"3_attn"`, `"base"`.
        hidden_states: the hidden state index 1..n of each segment's end; None for a mid state.
        metric: `"prob"`, `"log_prob"`, `"log_odds"` or `"logit"`.
        estimator: how the credits were computed.
        settings: the call, in JSON values.
        provenance: versions, model name, dtype, folding flags, in JSON values.
        answer: the generated answer, where there was one.

    Raises:
        ValueError: when built from fields that contradict each other; every contradiction is named.
    """

    @property
    def gain(self) -> Float[Tensor, "batch pos"]:
        """The sum of the positive credits, [batch, pos] in `unit`; NaN where masked."""
        return self.attribution.clamp(min=0).sum(0)

    @property
    def loss(self) -> Float[Tensor, "batch pos"]:
        """The sum of the negative credits (a number <= 0), [batch, pos] in `unit`; NaN where masked."""
        return self.attribution.clamp(max=0).sum(0)

    def is_monotone(self, tol: float = 0.0) -> Bool[Tensor, "batch pos"]:
        """Whether no credit is below `-tol`, or none is above `tol` (in `unit`): [batch, pos], False where masked."""
        credit = self.attribution  # NaN where masked, and NaN is neither above nor below anything
        return (credit >= -tol).all(0) | (credit <= tol).all(0)

    def onset(self, rule: str = "mass", fraction: float = 0.5) -> Onset:
        """Where the probability sets in. The rules answer different questions and can disagree; see `onsets`.

        Args:
            rule: `"mass"`: the first segment at which the cumulative |credit| reaches `fraction` of all |credit|.
                `"crossing"`: the first state from which the value stays at or above `fraction` of its final value.
                `"peak"`: the segment of the largest positive credit. `"rank"`: the first state from which the target
                stays the most probable token.
            fraction: in (0, 1]; "peak" and "rank" do not use it.

        Returns:
            An `Onset`. A masked entry has none, nor has one whose |credits|, final value or largest credit (by rule)
            do not exceed the smallest normal float32: what the readout cannot hold has no place either.

        Raises:
            ValueError: for an unknown rule, a fraction outside (0, 1], or "crossing" where values are no
                probabilities: half of a log-probability, a logit or a difference is no threshold.
        """
        index = _onset.onset_index(self, rule, fraction)
        labels, hidden = _onset.names_at(rule, self)
        return Onset(
            rule=rule,
            fraction=fraction if rule in _onset.WITH_FRACTION else None,
            kind=_onset.RULES[rule],
            index=index,
            labels=_onset.pick(labels, index),
            hidden_states=_onset.pick(hidden, index),
        )

    def onsets(self, fraction: float = 0.5) -> "pandas.DataFrame":
        """All rules side by side, one row a token (where `mask` is True).

        Columns: `batch`, `position`, `token`, `token_id`, `target`, `target_id`, [`incorrect`, `incorrect_id`], and for
        each rule its label (None where there is no onset, or the metric does not have the rule) and
        `<rule>_hidden_state`, by which rules can be compared.
        """
        return _tables.onset_frame(self, fraction)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The long table: one row for each (batch, position, segment) where `mask` is True.

        Columns: `batch`; `position` (on the token axis); `token` (the string there, or None); `token_id` (Int64);
        `target`; `target_id` (int64, or text such as "5|7" where any target is a set); `incorrect` and `incorrect_id`
        where there are some; `segment`, `start`, `end` (ordered categoricals, so that sorting and pivoting keep the
        order of the layers); `hidden_state` (Int64, of the end); `credit`, `value_start`, `value_end` (float64, in
        `unit`); `unit`; `metric`.
        """
        return _tables.long_frame(self)

    def to_csv(self, path: str | Path | _tables.TextStream, *, spreadsheet_safe: bool = True) -> None:
        """Write the long table as CSV (UTF-8), to a path or an open text stream.

        A text that a spreadsheet would run as a formula (it starts with =, +, -, @, a tab, a line break, or a
        full-width form of these), or that starts with an apostrophe, is written with one apostrophe before it.
        A reader gets every text back by taking one leading apostrophe away; `spreadsheet_safe=False` adds none.
        Read with `pandas.read_csv(path, keep_default_na=False)`, or the token "NA" becomes a missing value.
        A lone surrogate is written as a backslash escape. A missing number is an empty field.
        """
        _tables.write_text(_tables.csv_text(self.to_dataframe(), spreadsheet_safe), path)

    def to_json(self, path: str | Path | _tables.TextStream) -> None:
        """Write the long table as JSON, a list with one object a row, to a path or an open text stream.

        Plain ASCII, so any text comes back equal; a number that is missing or not finite is null.
        """
        _tables.write_text(_tables.json_text(self.to_dataframe()), path)

    def to_text(
        self,
        width: int | None = None,
        max_rows: int | None = 40,
        levels: bool = False,
        onset_rule: str = "mass",
        onset_fraction: float = 0.5,
    ) -> str:
        """The result as text: one token as a profile over the segments, many tokens as a map with one row a token.

        Segments for which there is no room are merged with their neighbours (`0-6`) and their credits added, never
        left out. A token's quotes show its spaces; line breaks and control characters are escaped.

        Args:
            width: in columns; None for the width of the terminal.
            max_rows: the most rows; further tokens are counted, not shown. None for all.
            levels: print the readout at the end of each segment beside its credit (a profile always has it).
            onset_rule, onset_fraction: of the map's onset column; a profile names every rule's, with that fraction.

        Raises:
            ValueError: for a `width` or a `max_rows` below 1, or a rule and fraction that `onset` refuses.
        """
        width = shutil.get_terminal_size().columns if width is None else width
        for name, number in (("width", width), ("max_rows", 1 if max_rows is None else max_rows)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        self.onset(onset_rule, onset_fraction)
        return _text.text(self, width, max_rows, levels, (onset_rule, onset_fraction))

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a small table, at most 40 rows, segments grouped; no script, every text escaped."""
        return _html.html(self)

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file. Loading and saving again gives the same bytes."""
        tensors = {name: tensor for name, tensor in map_tensors(self, _itself).items() if tensor is not None}
        _files.write(path, type(self).__name__, tensors, plain_fields(self))

    @classmethod
    def load(cls, path: str | Path) -> "IGLensResult":
        """Read what `save` wrote; needs neither a model nor TransformerLens.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: for a file of another kind or of a newer format, saying which.
        """
        tensors, plain = _files.read(path, cls.__name__)
        found: dict[str, Any] = {**dict.fromkeys(AXES), **tensors, **plain, **labels_as_tuples(plain)}
        return cls(**found)

    def select(self, batch: Index = None, pos: Index = None) -> "IGLensResult":
        """The part at some prompts and some entries of the `pos` axis (not positions on the token axis).

        Args:
            batch: an int (the axis stays, with length 1), a slice, a sequence of ints; None for all.
            pos: likewise.

        Raises:
            IndexError: for an index outside the axis.
        """
        size = self.mask.shape
        rows, columns = _indices("batch", batch, size[0]), _indices("pos", pos, size[1])

        def part(name: str, tensor: Tensor) -> Tensor:
            axes = AXES[name]
            kept = tensor.index_select(axes.index("batch"), torch.tensor(rows, dtype=torch.int64))
            if "pos" not in axes:
                return kept
            return kept.index_select(axes.index("pos"), torch.tensor(columns, dtype=torch.int64))

        chosen: dict[str, Any] = dict(map_tensors(self, part))
        for name in ("target_strings", "incorrect_strings"):
            chosen[name] = _grid_part(getattr(self, name), rows, columns)
        if self.token_strings is not None:
            chosen["token_strings"] = tuple(self.token_strings[row] for row in rows)
        return IGLensResult(**{**plain_fields(self), **chosen})

    def equals(self, other: object) -> bool:
        """Whether every field is the same: numbers exactly, NaN equal to NaN, labels, settings and provenance too."""
        if not isinstance(other, IGLensResult) or plain_fields(self) != plain_fields(other):
            return False
        return all(_same(getattr(self, name), getattr(other, name)) for name in AXES)


def _itself(name: str, tensor: Tensor) -> Tensor:  # noqa: ARG001 (map_tensors calls with a name)
    return tensor


def _indices(axis: str, chosen: Index, size: int) -> list[int]:
    if chosen is None or isinstance(chosen, slice):
        return list(range(size))[chosen or slice(None)]
    wanted = [chosen] if isinstance(chosen, int) else list(chosen)
    outside = [index for index in wanted if not -size <= index < size]
    if outside:
        raise IndexError(f"{axis} has {size} entries; there is no {outside}.")
    return [index % size for index in wanted]


def _grid_part(
    grid: Sequence[Sequence[str]] | None, rows: Sequence[int], columns: Sequence[int]
) -> tuple[tuple[str, ...], ...] | None:
    return None if grid is None else tuple(tuple(grid[row][column] for column in columns) for row in rows)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())
