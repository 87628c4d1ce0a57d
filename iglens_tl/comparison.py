"""Methods side by side: one row a segment, one column a method, each in its own unit, with what it adds up to.

`LensComparison` holds what `iglens_tl.compare` found. A column's cells mean what its method means by them (`meanings`); under
it stand the sum over segments, what the method keeps outside of segments (`outside`: DLA's share of the first state, of the
norm's bias and of `b_U`), the quantity that both should make (`expected`) and the error (`gap`). Levels (logit lens) have no
sum, and no theorem makes conductances of different layers add up: their gap is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._display import SMALL, credit
from iglens_tl._fragment import bars, line, table
from iglens_tl._layout import Column
from iglens_tl._tables import frame_of, token_columns
from iglens_tl._token_html import SHOWN, token_blocks
from iglens_tl._tokens_asked import TokensAsked, heading, sections

if TYPE_CHECKING:
    import pandas

_NOTHING = 1e-6  # a cell below this share of its column's largest has no sign to disagree about


@dataclass(frozen=True, eq=False, repr=False)
class LensComparison(TokensAsked):
    """What each method says of each segment.

    Attributes:
        amounts: [method, segment, batch, pos] in `units[method]`.
        sums: [method, batch, pos] the sum over segments; NaN where it has no meaning.
        outside: [method, batch, pos] what the method keeps outside of segments; NaN likewise.
        expected: [method, batch, pos] what sum and outside should make; NaN likewise.
        gap: [method, batch, pos] `sums + outside - expected`.
        method_labels, segment_labels, hidden_states: names of the axes; the hidden state is that of the segment's end.
        units: one for each method.
        meanings: what a cell of the column is, in words.
        expected_names: what `expected` is, in words.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "amounts": ("method", "segment", "batch", "pos"),
        **dict.fromkeys(("sums", "outside", "expected", "gap"), ("method", "batch", "pos")),
    }

    amounts: Float[Tensor, "method segment batch pos"]
    sums: Float[Tensor, "method batch pos"]
    outside: Float[Tensor, "method batch pos"]
    expected: Float[Tensor, "method batch pos"]
    gap: Float[Tensor, "method batch pos"]
    method_labels: tuple[str, ...]
    segment_labels: tuple[str, ...]
    hidden_states: tuple[int | None, ...]
    units: tuple[str, ...]
    meanings: tuple[str, ...]
    expected_names: tuple[str, ...]

    @property
    def rank_correlation(self) -> Float[Tensor, "method method batch pos"]:
        """Spearman's rank correlation over segments of every two methods; NaN where masked or where a column is constant."""
        ranks = _ranks(self.amounts)
        centred = ranks - ranks.mean(1, keepdim=True)
        size = centred.pow(2).sum(1).sqrt()
        products = torch.einsum("msbp,nsbp->mnbp", centred, centred)
        return products / (size[:, None] * size[None])

    def disagreements(self, a: str, b: str) -> pandas.DataFrame:
        """Where two methods disagree, in sign or in order; one row for each (batch, position, segment).

        Columns beside those of the token: `segment`, both amounts, both ranks (1 is the largest), `sign_differs` (cells
        below a millionth of their column's largest have no sign; levels have none either), `rank_difference` (rank in `a`
        less rank in `b`).

        Raises:
            ValueError: for a method that is not among `method_labels`.
        """
        first, second = (self._index(name) for name in (a, b))
        columns = self._long_columns()
        ranks = self.amounts.shape[1] + 1 - _ranks(self.amounts)
        for name, index in ((a, first), (b, second)):
            columns[name] = self._column(self.amounts[index])
            columns[f"rank_{name}"] = self._column(ranks[index])
        columns["sign_differs"] = self._column(self._sign_differs(first, second).double()).astype(bool)
        columns["rank_difference"] = columns[f"rank_{a}"] - columns[f"rank_{b}"]
        return frame_of(columns)

    def _index(self, method: str) -> int:
        if method not in self.method_labels:
            raise ValueError(f"method must be one of {', '.join(map(repr, self.method_labels))}; got {method!r}.")
        return self.method_labels.index(method)

    def _sign_differs(self, a: int, b: int) -> Tensor:
        x, y = self.amounts[a], self.amounts[b]
        weighty = (x.abs() > _NOTHING * x.abs().amax(0)) & (y.abs() > _NOTHING * y.abs().amax(0))
        signed = not (self.sums[a][self.mask].isnan().any() or self.sums[b][self.mask].isnan().any())
        return weighty & (x.sign() != y.sign()) & signed

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, segment) where `mask` is True, one column a method."""
        columns = self._long_columns()
        for index, name in enumerate(self.method_labels):
            columns[name] = self._column(self.amounts[index])
        return frame_of(columns)

    def sums_frame(self) -> pandas.DataFrame:
        """Under the table: one row for each (batch, position, method), with unit, sum, outside, expected and gap."""
        n, k = int(self.mask.sum()), len(self.method_labels)
        columns: dict[str, Any] = {name: column.repeat(k) for name, column in token_columns(self).items()}
        for name in ("method_labels", "units", "meanings", "expected_names"):
            columns[name.removesuffix("s").removesuffix("_label")] = list(getattr(self, name)) * n
        for name in ("sums", "outside", "expected", "gap"):
            columns[name.removesuffix("s")] = getattr(self, name).permute(1, 2, 0)[self.mask].reshape(-1).numpy()
        return frame_of(columns)

    def _long_columns(self) -> dict[str, Any]:
        import pandas as pd

        k, n = len(self.segment_labels), int(self.mask.sum())
        columns: dict[str, Any] = {name: column.repeat(k) for name, column in token_columns(self).items()}
        labels = list(self.segment_labels)
        columns["segment"] = pd.Categorical.from_codes(list(range(k)) * n, categories=labels, ordered=True)
        columns["hidden_state"] = pd.array(list(self.hidden_states) * n, dtype="Int64")
        return columns

    def _column(self, numbers: Tensor) -> Any:
        return numbers.permute(1, 2, 0)[self.mask].reshape(-1).numpy()

    def __str__(self) -> str:
        tokens, left = sections(self, SHOWN)
        lines = [f"LensComparison: {int(self.mask.sum())} tokens, {len(self.segment_labels)} segments"]
        for token in tokens:
            lines += [*heading(self, token), "", self._table(token).to_string(index=False), "", *self._notes(token), ""]
        return "\n".join([*lines, *([left] if left else []), *self._meanings()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a table for each token (at most 8), bars on each method's own scale; every text escaped."""

        def body(token: tuple[int, int]) -> str:
            frame = self._table(token)
            columns = [Column("segment", frame["segment"].tolist(), right=False)]
            for index, method in enumerate(self.method_labels):
                cells = frame[method].tolist()
                columns.append(Column(method, cells))
                if not bool(self.sums[(index, *token)].isnan()):  # levels have no bars: they add up to nothing
                    numbers = self.amounts[(index, slice(None), *token)].tolist()
                    columns.append(bars([0.0, *numbers, *[0.0] * (len(cells) - 1 - len(numbers))]))
            return table(columns) + "".join(line(words) for words in self._notes(token))

        title = f"{len(self.segment_labels)} segments"
        return token_blocks(self, title, body, " ".join(self._meanings()))

    def _table(self, token: tuple[int, int]) -> pandas.DataFrame:
        import pandas as pd

        names = [*self.segment_labels, "", "sum", "outside", "expected", "gap"]
        table: dict[str, list[str]] = {"segment": ["", *names]}
        for index, method in enumerate(self.method_labels):
            cells = [_cell(number) for number in self.amounts[(index, slice(None), *token)].tolist()]
            under = [_cell(float(rows[(index, *token)])) for rows in (self.sums, self.outside, self.expected)]
            gap = float(self.gap[(index, *token)])
            table[method] = [f"[{self.units[index]}]", *cells, "", *under, "-" if math.isnan(gap) else f"{gap:.1g}"]
        return pd.DataFrame(table)

    def _notes(self, token: tuple[int, int]) -> list[str]:
        correlation = self.rank_correlation[(..., *token)]
        pairs = list(combinations(range(len(self.method_labels)), 2))
        words = [f"{self.method_labels[i]} / {self.method_labels[j]} {float(correlation[i, j]):+.2f}" for i, j in pairs]
        lines = [f"rank correlation  {', '.join(words)}"] if words else []
        for i, j in pairs:
            where = self._sign_differs(i, j)[(slice(None), *token)].nonzero()[:, 0].tolist()
            if where:
                names = ", ".join(self.segment_labels[k] for k in where)
                lines.append(f"sign differs      {self.method_labels[i]} / {self.method_labels[j]}: {names}")
        return [*lines, *self._order_note(token)]

    def _order_note(self, token: tuple[int, int]) -> list[str]:
        """The largest segment by each method, where methods differ about it."""
        tops = self.amounts[(slice(None), slice(None), *token)].argmax(1).tolist()
        if len(set(tops)) < 2:
            return []
        words = [f"{name} {self.segment_labels[top]}" for name, top in zip(self.method_labels, tops, strict=True)]
        return [f"largest segment   {', '.join(words)}"]

    def _meanings(self) -> list[str]:
        rows = zip(self.method_labels, self.meanings, self.expected_names, strict=True)
        words = [
            f"{name}: {meaning}" + (f"; expected: {expected}." if expected else ".") for name, meaning, expected in rows
        ]
        return [*words, f"{SMALL} = less than 0.00005."]


def _ranks(amounts: Tensor) -> Tensor:
    """Ranks over segments from 1 (the smallest), equal amounts sharing their mean rank; NaN where masked."""
    below = (amounts[:, None] < amounts[:, :, None]).sum(2).double()
    equal = (amounts[:, None] == amounts[:, :, None]).sum(2).double()
    return torch.where(amounts.isnan(), torch.nan, below + (equal + 1) / 2)


def _cell(number: float) -> str:
    return "-" if math.isnan(number) else credit(number)
