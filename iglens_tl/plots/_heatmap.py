"""Token by layer: where on the way up each token's probability is made, as a map of credits or of levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from iglens_tl._display import head, quoted
from iglens_tl._layout import Token
from iglens_tl.companion_results import LogitLensResult
from iglens_tl.plots import _style
from iglens_tl.plots._words import (
    in_title,
    labelled_by,
    of_kind,
    of_row,
    path_title,
    place_names,
    quantity,
    same_question,
    short,
    tick_texts,
    where,
)
from iglens_tl.results import IGLensResult

if TYPE_CHECKING:
    import plotly.graph_objects

VALUES = ("credit", "level")
_GAPS_TO = 48  # tokens: the most columns that stand apart


def heatmap(
    result: IGLensResult, *, value: str = "credit", batch: int = 0, top: LogitLensResult | None = None
) -> plotly.graph_objects.Figure:
    """One prompt's tokens by layers, layers upward: a cell is a credit (or a level) in `result.unit`.

    Credits have a diverging scale that is symmetric about 0, with a minus sign in the cells of losses; levels a sequential one (a
    diverging one where levels are differences). Columns are positions, so that a token that occurs twice has two; where
    there is no room for all of their labels, some are left out until one zooms in. Masked positions have no column.

    Args:
        result: of any number of tokens.
        value: `"credit"`: a row a segment. `"level"`: a row a state.
        batch: which prompt.
        top: the logit lens of the same call; the most probable tokens at each state are then shown where one points.

    Pointing at a cell says token, position, layer, credit and level, of a state the credit of the segment that ends there.

    Returns:
        A figure with one heat map trace, `z` [segment (or state), token] as in `result`.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a prompt that there is not.
        ValueError: for another `value`, a prompt without a token, or a `top` of other states or positions.
    """
    if value not in VALUES:
        raise ValueError(f"value must be one of {', '.join(map(repr, VALUES))}, got {value!r}.")
    of_kind("heatmap", result, IGLensResult)
    tokens = of_row(result, batch)
    _check_top(result, top)
    credits, columns = value == "credit", [column for _, column in tokens]
    numbers = (result.attribution if credits else result.values)[:, tokens[0][0], columns]
    labels = result.segment_labels if credits else result.state_labels
    trace = _style.graph_objects().Heatmap(
        z=numbers.numpy(),
        x=place_names(result, tokens),
        y=[_style.escaped(label) for label in labels],
        **_scale(result, numbers, credits),
        **_hover(result, tokens, top, credits),
        **(_style.minus_signs(numbers) if credits or has_sign(result) else {}),
        xgap=1 if len(tokens) <= _GAPS_TO else 0,
        ygap=1 if len(tokens) <= _GAPS_TO else 0,
        colorbar=_style.colour_bar(value, result.unit),
    )
    return _figure(result, trace, tokens, value)


def _figure(result: IGLensResult, trace: Any, tokens: Sequence[Token], value: str) -> plotly.graph_objects.Figure:
    by, rows = labelled_by(result, tokens), len(trace.y)
    texts = tick_texts(result, tokens, by)
    fig = _style.figure([trace], _title(result, tokens, value, by), _notes(result, tokens), _style.rows_height(rows))
    _style.token_axis(fig, place_names(result, tokens), texts)
    fig.update_xaxes(title_text=_AXES[by], showgrid=False)
    path = path_title(result.segment_labels) if value == "credit" else "state"
    fig.update_yaxes(title_text=path, type="category", showgrid=False)
    return fig


_AXES = {"target": "target", "token": "token", "both": "token → target"}


def _title(result: IGLensResult, tokens: Sequence[Token], value: str, by: str) -> str:
    who = in_title(result, tokens[0]) if by == "token" else "each target"
    return f"{value.capitalize()}s by layer: {quantity(result)} of {who}"


def _notes(result: IGLensResult, tokens: Sequence[Token]) -> list[str]:
    if result.answer is None:
        return where(result, tokens[-1])
    return [*where(result, tokens[0]), f"answer {head(quoted(result.answer), 80)}"]


def _scale(result: IGLensResult, numbers: Tensor, credits: bool) -> dict[str, Any]:
    """Symmetric about 0 where the sign means something; for levels of one sign from the one end to the other."""
    if credits or has_sign(result):
        size = _style.extent(numbers)
        return {"colorscale": _style.DIVERGING, "zmin": -size, "zmax": size}
    finite = numbers[numbers.isfinite()]
    low = 0.0 if result.metric == "prob" else float(finite.min()) if finite.numel() else 0.0
    high = float(finite.max()) if finite.numel() else 1.0
    return {"colorscale": _style.SEQUENTIAL, "zmin": low, "zmax": high if high > low else low + 1.0}


def has_sign(result: IGLensResult) -> bool:
    """Whether levels are differences, whose zero means something."""
    return result.incorrect_ids is not None or "difference" in result.settings


def _hover(result: IGLensResult, tokens: Sequence[Token], top: LogitLensResult | None, credits: bool) -> dict[str, Any]:
    """What is said where one points: numbers as one array, texts (credits under a level, probable tokens) beside it."""
    batch, columns, skipped = tokens[0][0], [column for _, column in tokens], int(credits)
    levels = result.values[skipped:, batch, columns]
    places = result.positions[batch, columns].double().expand_as(levels)
    lines = ["%{x}, read at position %{customdata[1]:d}"]
    if credits:
        lines += [
            "segment %{y}",
            f"credit %{{z:+.6~g}} {result.unit}",
            f"level after it %{{customdata[0]:.6~g}} {result.unit}",
        ]
    else:
        lines += ["state %{y}", f"level %{{z:.6~g}} {result.unit}"]
    texts = [] if credits else [_credits_before(result, batch, columns)]
    if top is not None:
        texts.append(_tops(top, batch, columns, skipped, "after it" if credits else "there"))
    said: dict[str, Any] = {"customdata": torch.stack([levels, places], dim=-1).numpy()}
    if texts:
        said["hovertext"] = [["<br>".join(of) for of in zip(*rows, strict=True)] for rows in zip(*texts, strict=True)]
        lines.append("%{hovertext}")
    return {**said, "hovertemplate": "<br>".join(lines) + "<extra></extra>"}


def _credits_before(result: IGLensResult, batch: int, columns: Sequence[int]) -> list[list[str]]:
    """At each state, the credit of the segment that ends there; none ends at the first."""
    credits = result.attribution[:, batch, columns].tolist()
    rows = [
        [f"credit of the segment before it {_style.signed(credit)} {result.unit}" for credit in row] for row in credits
    ]
    return [["no segment ends here"] * len(columns), *rows]


def _tops(top: LogitLensResult, batch: int, columns: Sequence[int], skipped: int, place: str) -> list[list[str]]:
    def said(texts: Sequence[str], probabilities: Sequence[float]) -> str:
        shown = zip(texts, probabilities, strict=True)
        lines = [f"{_style.escaped(short(text))} {probability:.3f}" for text, probability in shown]
        return "<br>".join([f"most probable {place}:", *lines])

    return [
        [said(texts[batch][column], numbers[batch][column].tolist()) for column in columns]
        for texts, numbers in zip(top.top_strings[skipped:], top.top_probs[skipped:], strict=True)
    ]


def _same_states(result: IGLensResult, top: LogitLensResult) -> bool:
    """Whether both read the same states, as far as can be told: by their levels where both have probabilities."""
    if any(result.settings.get(name) != top.settings.get(name) for name in ("lens", "baseline")):
        return False
    if result.metric != "prob" or has_sign(result):
        return True
    return bool(((result.values - top.prob).abs()[:, result.mask] <= _NEAR).all())


_NEAR = 1e-2
"""How far two readouts of one state may be apart in probability, in bfloat16."""


def _check_top(result: IGLensResult, top: LogitLensResult | None) -> None:
    if top is None:
        return
    same = same_question(top, result) and top.state_labels == result.state_labels
    if not same or not _same_states(result, top):
        raise ValueError(
            "top must be the logit lens of the same states, prompts, positions and targets: ask logit_lens with the same input, "
            f"targets, positions, layers, incl_mid and baseline (it has {len(top.state_labels)} states at positions "
            f"{list(top.positions.shape)}, the result {len(result.state_labels)} at {list(result.positions.shape)})."
        )
