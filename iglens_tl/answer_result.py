"""The attribution of a whole answer: its tokens' credits and their sum, in nats, by the chain rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from iglens_tl._display import credit, quoted
from iglens_tl._fragment import ROWS, fragment, line, named, signed, table
from iglens_tl._layout import Column, Group, Token, group_credits, grouped, reading
from iglens_tl.results import IGLensResult

if TYPE_CHECKING:
    import pandas

_TOKENS = 12  # of an answer, in a notebook's table


@dataclass(frozen=True, eq=False, repr=False)
class AnswerResult:
    """What each segment adds to log P(answer | prompt).

    Attributes:
        tokens: the answer's tokens, one a `pos`, with metric "log_prob"; everything of it can be tabled and plotted.
    """

    tokens: IGLensResult

    def __post_init__(self) -> None:
        result = self.tokens
        if result.metric != "log_prob" or result.mask.shape[0] != 1 or not bool(result.mask.all()):
            raise ValueError(
                'an AnswerResult is of one prompt, with metric "log_prob" and every token there; got metric '
                f"{result.metric!r}, mask {result.mask.tolist()}."
            )

    @property
    def attribution(self) -> Float[Tensor, "segment"]:
        """The credits of each segment summed over the answer's tokens, in nats."""
        return self.tokens.attribution[:, 0].sum(-1)

    @property
    def log_prob(self) -> float:
        """log P(answer | prompt) as read at the last state, in nats."""
        return float(self.tokens.values[-1, 0].sum())

    @property
    def baseline_log_prob(self) -> float:
        """The same at the first state of the path."""
        return float(self.tokens.values[0, 0].sum())

    @property
    def total(self) -> float:
        """`log_prob - baseline_log_prob`: what all credits sum to."""
        return float(self.tokens.total.sum())

    @property
    def gap(self) -> float:
        """`attribution.sum() - total`."""
        return float(self.attribution.sum()) - self.total

    @property
    def answer(self) -> str:
        """The answer's text."""
        return self.tokens.answer or ""

    def to_dataframe(self) -> pandas.DataFrame:
        """One row a segment: `segment`, `hidden_state`, one column a token (`0: ' Ho'`), and their `sum`, in nats."""
        import pandas as pd

        result = self.tokens
        columns = {
            f"{index}: {text!r}": result.attribution[:, 0, index].numpy()
            for index, text in enumerate(result.target_strings[0])
        }
        frame = pd.DataFrame({"segment": list(result.segment_labels), **columns, "sum": self.attribution.numpy()})
        frame.insert(1, "hidden_state", pd.array(list(result.hidden_states), dtype="Int64"))
        return frame

    def __str__(self) -> str:
        table = self.to_dataframe().drop(columns="hidden_state")
        text = table.to_string(index=False, float_format=lambda number: f"{number:+.4f}")
        sums = "\n".join(f"{name:<10}{words}" for name, words in self._sums())
        return f"{self._title()}\n\n{text}\n\n{sums}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each segment (at most 40, else grouped), at most 12 tokens; every text escaped."""
        result, groups = self.tokens, grouped(self.tokens.segment_labels, ROWS)
        tokens = [(0, column) for column in range(min(_TOKENS, result.mask.shape[1]))]
        more = result.mask.shape[1] - len(tokens)
        columns = [
            Column("segment", [group.label for group in groups], right=False),
            *(self._column(token, groups) for token in tokens),
            *signed("sum", [float(self.attribution[group.start : group.stop].sum()) for group in groups]),
        ]
        lines = [named(name, words) for name, words in self._sums()]
        left = line(f"... {more} more tokens, which the sum holds" if more else "")
        return fragment(self._title(), table(columns), left, *lines, note=reading(result))

    def _column(self, token: Token, groups: Sequence[Group]) -> Column:
        credits = group_credits(self.tokens, token, groups)
        return Column(quoted(self.tokens.target_strings[0][token[1]]), [credit(number) for number in credits])

    def _title(self) -> str:
        return f"AnswerResult: {self.answer!r}, {len(self.tokens.target_strings[0])} tokens; credits in nats"

    def _sums(self) -> list[tuple[str, str]]:
        levels = ", ".join(
            f"{target!r} {value:.4f}"
            for target, value in zip(self.tokens.target_strings[0], self.tokens.values[-1, 0].tolist(), strict=True)
        )
        sums = (
            f"{float(self.attribution.sum()):+.5g} = log P(answer | prompt) {self.log_prob:.5g} less "
            f"{self.baseline_log_prob:.5g} at {self.tokens.state_labels[0]}, gap {self.gap:.1g}"
        )
        return [("log p", levels), ("sum", sums)]

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `IGLensResult.load` reads it too."""
        self.tokens.save(path)

    @classmethod
    def load(cls, path: str | Path) -> AnswerResult:
        """Read what `save` wrote; needs neither a model nor TransformerLens."""
        return cls(IGLensResult.load(path))
