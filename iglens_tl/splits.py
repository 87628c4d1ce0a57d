"""What a split found: which additive parts of a segment its credit goes to.

A segment `h_{j-1} -> h_j` is a sum of parts `c_i` (attention and MLP, heads, neurons). With `f` the readout,

    attribution[i] = <integral_0^1 grad f(h_{j-1} + a (h_j - h_{j-1})) da, c_i>
    sum over the parts of segment j = f(h_j) - f(h_{j-1}) = whole.attribution[j]        (`gap` says how closely)

whatever the order of the parts. Sign: a positive credit raised the target. Unit: `metric_unit`. What it does not say: it
is no causal effect through the blocks above, and parts of one segment are credited along one straight line between its
ends, on which they all arrive together; `attn_first` and `mlp_first` let them arrive one after the other.

`path="sequential"`: one segment a block, as in `ig_lens`. `path="straight"`: one segment from the baseline to the last
state, so that blocks have no order either; `sequential` then holds a whole block's credit in the other path.

`linear` is the gradient at the last state times the part, beside it: direct attribution in the metric's own unit, which
does not add up.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl import _files, _share_text, _tables
from iglens_tl._fields import AXES as WHOLE_AXES
from iglens_tl._fields import labels_as_tuples, map_tensors, plain_fields
from iglens_tl._shares import AXES, KINDS, Part, ShareFields, tensors_of
from iglens_tl.results import IGLensResult

if TYPE_CHECKING:
    import pandas

_WHOLE = "whole."


class SplitResult(ShareFields):
    """The credits of the parts of each segment.

    Every tensor is on the CPU; numbers are float64. An entry where `whole.mask` is False is NaN (0 in `nodes`).

    Attributes:
        whole: the attribution that is shared out: segments, values, targets, tokens, settings, provenance.
        parts: what the rows of the part axis are, segment by segment.
        attribution: [part, batch, pos] credits, in `metric_unit`.
        gap: [segment, batch, pos] sum of a segment's parts less its credit in `whole`.
        error: [segment, batch, pos] the estimated error of the quadrature, at most `tolerance`, for each part.
        nodes: [segment, batch, pos] gradients that were computed for it.
        linear: [part, batch, pos] gradient at the last state times the part; does not add up.
        sequential: [part, batch, pos] with `path="straight"` and whole blocks: the block's credit in the sequential path.
        attn_first, mlp_first: [part, batch, pos] with `unit="sublayer"`: credits if the one arrives before the other; NaN
            for what has no such order; None where nothing has.
        unit: `"block"`, `"sublayer"`, `"head"`, `"neuron"`, or `"parts"` for the caller's own.
        path: `"sequential"` or `"straight"`.
        tolerance: what the quadrature was refined to, in `metric_unit`.

    Raises:
        ValueError: when built from fields that contradict each other; every contradiction is named.
    """

    def of_kind(self, *kinds: str) -> list[int]:
        """The places on the part axis of parts of these kinds ("head", "mlp", ...)."""
        strange = [kind for kind in kinds if kind not in KINDS]
        if strange:
            raise ValueError(f"kinds are {', '.join(KINDS)}; there is no {', '.join(map(repr, strange))}.")
        return [place for place, part in enumerate(self.parts) if part.kind in kinds]

    def matrix(self, kind: str = "head") -> Float[Tensor, "layer index batch pos"]:
        """Credits as a matrix, layers by heads (or neurons; one column for attention, MLPs or blocks).

        Returns:
            `[layer, index, batch, pos]`, in `metric_unit`; NaN where a layer has no such part.

        Raises:
            ValueError: where the split has no part of the kind.
        """
        places = self.of_kind(kind)
        layers = [(self.parts[place].layer, self.parts[place].index or 0, place) for place in places]
        if not layers or any(layer is None for layer, _, _ in layers):
            have = dict.fromkeys(part.kind for part in self.parts if part.layer is not None)
            raise ValueError(
                f"this split has no layer with a part of kind {kind!r}; it has {', '.join(have) or 'none'}."
            )
        n_layers = 1 + max(part.layer for part in self.parts if part.layer is not None)
        size = (n_layers, 1 + max(index for _, index, _ in layers), *self.attribution.shape[1:])
        grid = torch.full(size, torch.nan, dtype=torch.float64)
        for layer, index, place in layers:
            grid[layer, index] = self.attribution[place]
        return grid

    def to_dataframe(self) -> pandas.DataFrame:
        """The long table: one row for each (batch, position, part) that exists.

        Columns: those of a token (see `IGLensResult.to_dataframe`); `segment`; `part`, `kind`; `layer`, `index` (Int64);
        `credit`; `sequential`, or `attn_first`, `mlp_first`, `mean_of_orders`, where there are such; `linear`; `unit`;
        `metric`.
        """
        import pandas as pd

        whole, k, n = self.whole, len(self.parts), int(self.whole.mask.sum())
        columns: dict[str, Any] = {name: column.repeat(k) for name, column in _tables.token_columns(whole).items()}
        labels = [whole.segment_labels[part.segment] for part in self.parts]
        columns["segment"] = pd.Categorical(labels * n, categories=list(whole.segment_labels), ordered=True)
        columns["part"] = _tables.objects([part.label for part in self.parts] * n)
        columns["kind"] = _tables.objects([part.kind for part in self.parts] * n)
        columns["layer"] = pd.array([part.layer for part in self.parts] * n, dtype="Int64")
        columns["index"] = pd.array([part.index for part in self.parts] * n, dtype="Int64")
        for name, tensor in self._credit_columns().items():
            columns[name] = tensor.permute(1, 2, 0)[whole.mask].reshape(-1).numpy()
        columns["unit"] = _tables.repeated(whole.unit, n * k)
        columns["metric"] = _tables.repeated(whole.metric, n * k)
        return _tables.frame_of(columns)

    def _credit_columns(self) -> dict[str, Tensor]:
        beside = {
            "sequential": self.sequential,
            "attn_first": self.attn_first,
            "mlp_first": self.mlp_first,
            "mean_of_orders": self.mean_of_orders,
        }
        found = {name: tensor for name, tensor in beside.items() if tensor is not None}
        return {"credit": self.attribution, **found, "linear": self.linear}

    def top(self, k: int = 10) -> pandas.DataFrame:
        """The `k` parts of largest |credit| of each token, largest first: rows of `to_dataframe`."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        frame = self.to_dataframe()
        size = frame["credit"].abs().rename("size")
        order = frame.assign(size=size).sort_values(
            ["batch", "position", "size"], ascending=[True, True, False], kind="stable"
        )
        return order.groupby(["batch", "position"], sort=False).head(k).drop(columns="size").reset_index(drop=True)

    def to_csv(self, path: str | Path | _tables.TextStream, *, spreadsheet_safe: bool = True) -> None:
        """Write the long table as CSV; see `IGLensResult.to_csv`."""
        _tables.write_text(_tables.csv_text(self.to_dataframe(), spreadsheet_safe), path)

    def to_json(self, path: str | Path | _tables.TextStream) -> None:
        """Write the long table as JSON, a list with one object a row."""
        _tables.write_text(_tables.json_text(self.to_dataframe()), path)

    def to_text(self, width: int | None = None, max_rows: int = 20) -> str:
        """The split as text: for each token the `max_rows` parts of largest |credit|, and what all others sum to.

        Raises:
            ValueError: for a `width` or a `max_rows` below 1.
        """
        width = shutil.get_terminal_size().columns if width is None else width
        for name, number in (("width", width), ("max_rows", max_rows)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        return _share_text.text(self, self._credit_columns(), width, max_rows)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a small table for each token; no script, every text escaped."""
        return _share_text.html(self, self._credit_columns())

    def save(self, path: str | Path) -> None:
        """Write everything, `whole` too, to one safetensors file. Loading and saving again gives the same bytes."""
        outer = map_tensors(self.whole, lambda _, tensor: tensor)
        tensors = {_WHOLE + name: tensor for name, tensor in outer.items() if tensor is not None} | tensors_of(self)
        plain = {name: getattr(self, name) for name in ("unit", "path", "tolerance")}
        parts = [list(asdict(part).values()) for part in self.parts]
        _files.write(path, type(self).__name__, tensors, {**plain, "parts": parts, "whole": plain_fields(self.whole)})

    @classmethod
    def load(cls, path: str | Path) -> SplitResult:
        """Read what `save` wrote; needs neither a model nor TransformerLens.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: for a file of another kind or of a newer format, saying which.
        """
        tensors, plain = _files.read(path, cls.__name__)
        inner = {name.removeprefix(_WHOLE): tensor for name, tensor in tensors.items() if name.startswith(_WHOLE)}
        labels = plain.pop("whole")
        fields: dict[str, Any] = {**dict.fromkeys(WHOLE_AXES), **inner, **labels, **labels_as_tuples(labels)}
        own: dict[str, Any] = {
            **dict.fromkeys(AXES),
            **{name: tensors[name] for name in AXES if name in tensors},
            **plain,
        }
        own.update(whole=IGLensResult(**fields), parts=tuple(Part(*row) for row in plain["parts"]))
        return cls(**own)

    def equals(self, other: object) -> bool:
        """Whether every field is the same: numbers exactly, NaN equal to NaN."""
        if not isinstance(other, SplitResult) or not self.whole.equals(other.whole):
            return False
        mine, theirs = tensors_of(self), tensors_of(other)
        plain = all(getattr(self, name) == getattr(other, name) for name in ("parts", "unit", "path", "tolerance"))
        same = mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)
        return plain and same


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())
