"""Many tokens over the layers: each one's levels as a line, and what all of them gain and lose at each segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from iglens_tl._layout import Token
from iglens_tl.plots import _style
from iglens_tl.plots._style import plain, signed
from iglens_tl.plots._words import (
    in_title,
    labelled_by,
    of_kind,
    of_row,
    path_title,
    quantity,
    same_target,
    tick_texts,
    where,
    with_unit,
)
from iglens_tl.results import IGLensResult

if TYPE_CHECKING:
    import plotly.graph_objects

_NAMED = len(_style.LINES)  # the most lines that are told apart by name


def trajectories(result: IGLensResult, *, batch: int | None = None) -> plotly.graph_objects.Figure:
    """The level of each token's target at every state, one line a token.

    Up to eight lines have a name, a colour, a dash and a marker of their own; more are thin, named where one points, with
    their median at each state as a thick line.

    Args:
        result: of any number of tokens.
        batch: which prompt; None for all.

    Returns:
        A figure, in `result.unit`. Named lines are one trace each; thin ones are one trace with a gap after each line.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a prompt that there is not.
        ValueError: where there is no token to show.
    """
    of_kind("trajectories", result, IGLensResult)
    tokens = of_row(result, batch)
    names = _names(result, tokens)
    few = len(tokens) <= _NAMED
    traces = [_line(result, *line) for line in zip(tokens, names, _style.LINES, strict=False)]
    fig = _style.figure(
        traces if few else [_thin(result, tokens, names), _median(result, tokens)],
        f"Levels: {quantity(result)} of {in_title(result, tokens[0]) if same_target(result, tokens) else 'each target'}",
        _about(result, tokens),
        height=300,
    )
    fig.update_xaxes(title_text="state", type="category", showgrid=False, autotickangles=[0, -90])
    fig.update_yaxes(title_text=with_unit(quantity(result), result.unit), rangemode="tozero")
    _style.legend_below(fig, len(traces) if few else 2)
    return fig


def _about(result: IGLensResult, tokens: Sequence[Token]) -> list[str]:
    """The prompt where there is one, and how many tokens."""
    count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
    if len({row for row, _ in tokens}) > 1:
        return [f"{count} of {len({row for row, _ in tokens})} prompts"]
    return [*where(result, tokens[-1] if result.answer is None else tokens[0]), count]


def _names(result: IGLensResult, tokens: Sequence[Token]) -> list[str]:
    """What each line is called: its place, which is never the same twice, and its label."""
    many = result.mask.shape[0] > 1
    places = [f"{row}/{int(result.positions[row, column])}" for row, column in tokens]
    texts = tick_texts(result, tokens, labelled_by(result, tokens))
    return [f"{place if many else place.split('/')[1]}: {text}" for place, text in zip(places, texts, strict=True)]


def _levels(result: IGLensResult, tokens: Sequence[Token]) -> Any:
    rows, columns = (list(axis) for axis in zip(*tokens, strict=True))
    return result.values[:, rows, columns]  # [state, token]


def _line(result: IGLensResult, token: Token, name: str, style: tuple[str, str, str]) -> Any:
    colour, dash, symbol = style
    return _style.graph_objects().Scatter(
        x=[_style.escaped(label) for label in result.state_labels],
        y=result.values[(slice(None), *token)].numpy(),
        name=name,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 6},
        cliponaxis=False,
        hovertemplate=f"{name}<br>state %{{x}}<br>level %{{y:.6~g}} {result.unit}<extra></extra>",
    )


def _thin(result: IGLensResult, tokens: Sequence[Token], names: Sequence[str]) -> Any:
    """All lines as one trace: after each stands a gap."""
    levels = torch.nn.functional.pad(_levels(result, tokens), (0, 0, 0, 1), value=torch.nan)  # [state+1, token]
    states = [*(_style.escaped(label) for label in result.state_labels), None]
    return _style.graph_objects().Scatter(
        x=states * len(tokens),
        y=levels.T.reshape(-1).numpy(),
        text=[name for name in names for _ in states],
        name="one token",
        mode="lines",
        line={"color": _style.GAIN, "width": 1},
        opacity=0.35,
        hovertemplate=f"%{{text}}<br>state %{{x}}<br>level %{{y:.6~g}} {result.unit}<extra></extra>",
    )


def _median(result: IGLensResult, tokens: Sequence[Token]) -> Any:
    return _style.graph_objects().Scatter(
        x=[_style.escaped(label) for label in result.state_labels],
        y=_levels(result, tokens).quantile(0.5, dim=1).numpy(),
        name="median",
        mode="lines",
        line={"color": _style.INK, "width": 3},
        hovertemplate=f"median<br>state %{{x}}<br>level %{{y:.6~g}} {result.unit}<extra></extra>",
    )


def gain_loss(result: IGLensResult, *, batch: int | None = None) -> plotly.graph_objects.Figure:
    """What the tokens gain and what they lose at each segment, on average: two bars, and their net as a point.

    `gain[j]` is the mean over tokens of the positive part of their credits at segment `j`, `loss[j]` of the negative
    part. Over all segments, gain and loss add up to the mean of `result.attribution.sum(0)`.

    Args:
        result: of any number of tokens.
        batch: which prompt; None for all.

    Returns:
        A figure with the traces gain, loss and net, each [segment], in `result.unit` per token.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a prompt that there is not.
        ValueError: where there is no token to show.
    """
    of_kind("gain_loss", result, IGLensResult)
    tokens = of_row(result, batch)
    rows, columns = (list(axis) for axis in zip(*tokens, strict=True))
    credits = result.attribution[:, rows, columns]
    gain, loss = credits.clamp(min=0).mean(1), credits.clamp(max=0).mean(1)
    sums = f"mean gain {signed(float(gain.sum()))}, loss {plain(float(loss.sum()))}, net {signed(float(credits.mean(1).sum()))}"
    fig = _style.figure(
        _gain_loss_traces(result, gain, loss), "Gain and loss by layer", [*_about(result, tokens), sums], height=300
    )
    fig.update_layout(barmode="relative", bargap=0.25)
    path = path_title(result.segment_labels)
    fig.update_xaxes(title_text=path, type="category", showgrid=False, autotickangles=[0, -90])
    fig.update_yaxes(title_text=f"mean credit [{result.unit}]", zerolinecolor="#8c8c8c")
    _style.legend_below(fig, 3)
    return fig


def _gain_loss_traces(result: IGLensResult, gain: Any, loss: Any) -> list[Any]:
    go = _style.graph_objects()
    labels = [_style.escaped(label) for label in result.segment_labels]

    def words(name: str) -> dict[str, Any]:
        hover = f"segment %{{x}}<br>{name} %{{y:+.6~g}} {result.unit}<extra></extra>"
        return {"x": labels, "name": name, "hovertemplate": hover}

    edge = {"color": _style.LOSS_EDGE, "width": 1}
    net = {"symbol": "diamond", "size": 7, "color": "white", "line": {"color": _style.INK, "width": 1.5}}
    return [
        go.Bar(y=gain.numpy(), marker={"color": _style.GAIN}, **words("gain")),
        go.Bar(y=loss.numpy(), marker={"color": _style.LOSS, "line": edge, "pattern": _style.HATCH}, **words("loss")),
        go.Scatter(y=(gain + loss).numpy(), mode="markers", marker=net, **words("net")),
    ]
