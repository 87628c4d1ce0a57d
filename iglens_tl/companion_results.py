"""Results of the companions of IG-Lens: what other methods say of the same states and the same targets.

Each says in its own words what its numbers add up to:

- `LogitLensResult`: levels at every state (probability, rank, entropy, ...). Levels do not add up to anything.
- `DLAResult`: shares of one logit, with the final norm's scale frozen; they add up to that logit, and to no probability.
- `LayerPathResult`: classical layer attributions through the full model from a baseline. Within one layer they add up
  (over positions) to the change of the model's output; over layers they add up to nothing.

All tensors are on the CPU; an entry where `mask` is False is NaN (numbers) or -1 (ids, ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._display import quoted
from iglens_tl._fragment import ROWS, levels, line, signed, table
from iglens_tl._layout import Column, Token
from iglens_tl._tables import frame_of, token_columns
from iglens_tl._token_html import SHOWN, token_blocks
from iglens_tl._tokens_asked import TokensAsked, heading, sections

if TYPE_CHECKING:
    import pandas


_LENS_NOTE = "prob: levels, not credits; ig_lens gives what each segment adds. rank 0: the most probable token."


@dataclass(frozen=True, eq=False, repr=False)
class LogitLensResult(TokensAsked):
    """Every state of the path read through the model's own norm and unembedding.

    Attributes:
        prob: [state, batch, pos] the target's probability: the very `values` of `ig_lens`; with incorrect targets, less theirs.
        log_prob: [state, batch, pos] in nats.
        logit: [state, batch, pos] in logits; not invariant to folding and centring of weights.
        rank: [state, batch, pos] how many tokens have a strictly larger logit than the target: 0 is the most probable.
        entropy: [state, batch, pos] of the state's distribution, in nats.
        kl: [state, batch, pos] from the last state's distribution to the state's, in nats: `sum q (log q - log p)`.
        top_ids: [state, batch, pos, k] the most probable tokens, the most probable first.
        top_probs: [state, batch, pos, k] their probabilities.
        top_strings: `[state][batch][pos][k]`, their texts; empty where masked.
        state_labels: `"0_pre"`, ..., `"final_post"`, or a baseline's name first.
        hidden_states: index 0..n of each state; None for mid states and baselines.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("prob", "log_prob", "logit", "rank", "entropy", "kl"), ("state", "batch", "pos")),
        "top_ids": ("state", "batch", "pos", "k"),
        "top_probs": ("state", "batch", "pos", "k"),
    }

    prob: Float[Tensor, "state batch pos"]
    log_prob: Float[Tensor, "state batch pos"]
    logit: Float[Tensor, "state batch pos"]
    rank: Int[Tensor, "state batch pos"]
    entropy: Float[Tensor, "state batch pos"]
    kl: Float[Tensor, "state batch pos"]
    top_ids: Int[Tensor, "state batch pos k"]
    top_probs: Float[Tensor, "state batch pos k"]
    top_strings: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...]
    state_labels: tuple[str, ...]
    hidden_states: tuple[int | None, ...]

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, state) where `mask` is True; `top` is a tuple of strings."""
        columns = _long(self, "state", self.state_labels)
        for name in ("prob", "log_prob", "logit", "rank", "entropy", "kl"):
            columns[name] = _at_mask(self, getattr(self, name))
        batch, pos = (axis.tolist() for axis in self.mask.nonzero(as_tuple=True))
        tops = [
            self.top_strings[state][b][p] for b, p in zip(batch, pos, strict=True) for state in range(len(self.prob))
        ]
        columns["top"] = _objects(tops)
        return frame_of(columns)

    def __str__(self) -> str:
        def body(frame: pandas.DataFrame) -> str:
            shown = frame[["state", "prob", "log_prob", "rank", "entropy", "kl"]].copy()
            shown["top"] = [" ".join(quoted(text) for text in texts) for texts in frame["top"]]
            return _aligned(shown)

        return _text(self, "logit lens", body, _LENS_NOTE)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a table for each token (at most 8), its last 40 states; every text escaped."""

        def body(token: Token) -> str:
            last = slice(-ROWS, None)
            at = (last, *token)
            columns = [
                Column("state", self.state_labels[last], right=False),
                *(levels(name, getattr(self, name)[at].tolist()) for name in ("prob", "log_prob")),
                Column("rank", [str(rank) for rank in self.rank[at].tolist()]),
                *(levels(name, getattr(self, name)[at].tolist()) for name in ("entropy", "kl")),
                *(self._top_column(k, token) for k in range(min(3, self.top_ids.shape[-1]))),
            ]
            return _left_out("states", len(self.state_labels)) + table(columns)

        return token_blocks(self, "logit lens", body, _LENS_NOTE)

    def _top_column(self, k: int, token: Token) -> Column:
        batch, pos = token
        texts = [quoted(self.top_strings[state][batch][pos][k]) for state in range(len(self.state_labels))]
        return Column("top" if k == 0 else "", texts[-ROWS:], right=False)


@dataclass(frozen=True, eq=False, repr=False)
class DLAResult(TokensAsked):
    """The target's logit (or logit difference) shared among the parts that the last state is the sum of.

    Attributes:
        attribution: [part, batch, pos] in logits, the final norm's scale frozen at the last state; its bias and `b_U` are
            parts of their own.
        logit: [batch, pos] what the model's readout gives at the last state.
        total: [batch, pos] the sum over parts.
        gap: [batch, pos] `total - logit`: rounding.
        part_labels: `"embed"`, `"pos_embed"`, `"3"` or `"3_attn"`, `"3_mlp"` or `"L3H2"`, `"3_attn_bias"`, `"norm_bias"`,
            `"unembed_bias"`.
        unit: `"block"`, `"sublayer"` or `"head"`.
        quantity: what `logit` is, in words; with a soft-cap it is the logit before it.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attribution": ("part", "batch", "pos"),
        **dict.fromkeys(("logit", "total", "gap"), ("batch", "pos")),
    }

    attribution: Float[Tensor, "part batch pos"]
    logit: Float[Tensor, "batch pos"]
    total: Float[Tensor, "batch pos"]
    gap: Float[Tensor, "batch pos"]
    part_labels: tuple[str, ...]
    unit: str
    quantity: str

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, part) where `mask` is True; `attribution` is in logits."""
        columns = _long(self, "part", self.part_labels)
        return frame_of({**columns, "attribution": _at_mask(self, self.attribution)})

    def __str__(self) -> str:
        def body(frame: pandas.DataFrame) -> str:
            return _aligned(frame[["part", "attribution"]])

        rows, columns = self.mask.nonzero(as_tuple=True)
        where = slice(0, SHOWN)
        sums = ", ".join(
            f"{total:.5g} (gap {gap:.1g})"
            for total, gap in zip(
                self.total[rows, columns][where].tolist(), self.gap[rows, columns][where].tolist(), strict=True
            )
        )
        return _text(
            self, "direct logit attribution", body, f"sum = {self.quantity}: {sums}. No share of a probability."
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a table for each token (at most 8), at most 40 parts; every text escaped."""

        def body(token: Token) -> str:
            numbers: list[float] = self.attribution[(slice(None), *token)].tolist()
            shown = _largest_in_order(numbers, ROWS)
            rest = [number for place, number in enumerate(numbers) if place not in shown]
            names = [self.part_labels[place] for place in shown] + [f"{len(rest)} others"] * bool(rest)
            amounts = [numbers[place] for place in shown] + [sum(rest)] * bool(rest)
            sums = f"sum {float(self.total[token]):+.5g} logits, gap {float(self.gap[token]):.1g}"
            return table([Column("part", names, right=False), *signed("logits", amounts)]) + line(sums)

        note = f"sum = {self.quantity}. No share of a probability."
        return token_blocks(self, f"direct logit attribution by {self.unit}", body, note)


@dataclass(frozen=True, eq=False, repr=False)
class LayerPathResult(TokensAsked):
    """Layer Conductance or layer Integrated Gradients: through the full model, from a baseline, one layer at a time.

    Attributes:
        attribution: [state, batch, pos, seq] at each state and each source position, summed over d_model, in `metric_unit`.
        layer_sum: [state, batch, pos] the sum over source positions.
        total: [batch, pos] the model's output at the input less that at the baseline.
        delta: [state, batch, pos] `layer_sum - total`: captum's convergence delta, the error of the quadrature.
        at_position: [state, batch, pos] the attribution of the position at which the target is read.
        sum_over_layers: [batch, pos] `at_position` summed over states: no method says that it should equal anything.
        state_labels, hidden_states: as in `LogitLensResult`.
        method: `"layer_conductance"` or `"layer_integrated_gradients"`.
        metric, metric_unit: the output that is attributed, and its unit.
        forwards: how many sequences were run through the model.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attribution": ("state", "batch", "pos", "seq"),
        **dict.fromkeys(("layer_sum", "delta", "at_position"), ("state", "batch", "pos")),
        **dict.fromkeys(("total", "sum_over_layers"), ("batch", "pos")),
    }

    attribution: Float[Tensor, "state batch pos seq"]
    layer_sum: Float[Tensor, "state batch pos"]
    total: Float[Tensor, "batch pos"]
    delta: Float[Tensor, "state batch pos"]
    at_position: Float[Tensor, "state batch pos"]
    sum_over_layers: Float[Tensor, "batch pos"]
    state_labels: tuple[str, ...]
    hidden_states: tuple[int | None, ...]
    method: str
    metric: str
    metric_unit: str
    forwards: int

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each (batch, position, state) where `mask` is True."""
        columns = _long(self, "state", self.state_labels)
        for name in ("at_position", "layer_sum", "delta"):
            columns[name] = _at_mask(self, getattr(self, name))
        return frame_of(columns)

    def __str__(self) -> str:
        def body(frame: pandas.DataFrame) -> str:
            return _aligned(frame[["state", "at_position", "layer_sum", "delta"]])

        return _text(self, self.method.replace("_", " "), body, self._note())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What a notebook shows: a table for each token (at most 8), its last 40 states; every text escaped."""

        def body(token: Token) -> str:
            at = (slice(-ROWS, None), *token)
            columns = [
                Column("state", self.state_labels[-ROWS:], right=False),
                *signed("at_position", self.at_position[at].tolist()),
                *signed("layer_sum", self.layer_sum[at].tolist()),
                levels("delta", self.delta[at].tolist()),
            ]
            return _left_out("states", len(self.state_labels)) + table(columns)

        return token_blocks(self, self.method.replace("_", " "), body, self._note())

    def _note(self) -> str:
        return (
            f"[{self.metric_unit}] each layer_sum (over positions) should be the change from the baseline, delta is what it "
            "misses; the sum over layers is nothing the method speaks of."
        )


def _long(result: TokensAsked, name: str, labels: tuple[str, ...]) -> dict[str, Any]:
    """The columns of a long table but its numbers: tokens, and a categorical that keeps the order of the labels."""
    import pandas as pd

    k, n = len(labels), int(result.mask.sum())
    columns: dict[str, Any] = {key: column.repeat(k) for key, column in token_columns(result).items()}
    columns[name] = pd.Categorical.from_codes(list(range(k)) * n, categories=list(labels), ordered=True)
    return columns


def _at_mask(result: TokensAsked, numbers: Tensor) -> Any:
    return numbers.permute(1, 2, 0)[result.mask].reshape(-1).numpy()


def _objects(items: list[Any]) -> Any:
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def _aligned(frame: Any) -> str:
    return frame.to_string(index=False, float_format=lambda number: f"{number:.4f}")


def _text(result: Any, title: str, body: Any, note: str) -> str:
    tokens, left = sections(result, SHOWN)
    frame = result.to_dataframe()
    lines = [f"{type(result).__name__}: {title}, {int(result.mask.sum())} tokens"]
    for token in tokens:
        own = (frame["batch"] == token[0]) & (frame["position"] == int(result.positions[token]))
        lines += [*heading(result, token), "", body(frame[own]), ""]
    return "\n".join([*lines, *([left] if left else []), note])


def _left_out(what: str, count: int) -> str:
    """A line where a table shows the last rows only."""
    return line(f"... the first {count - ROWS} {what} are in to_dataframe()" if count > ROWS else "")


def _largest_in_order(numbers: list[float], most: int) -> list[int]:
    """The places of the largest |numbers|, in their own order."""
    return sorted(sorted(range(len(numbers)), key=lambda place: -abs(numbers[place]))[:most])
