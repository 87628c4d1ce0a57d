"""A data set: the mean credit of each segment with its interval, and where along the path its tokens have their onset."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

from iglens_tl._onset import RULES
from iglens_tl.plots import _style
from iglens_tl.plots._words import of_kind, path_title
from iglens_tl.summary import DatasetSummary

if TYPE_CHECKING:
    import plotly.graph_objects

_PANEL = 210  # pixels of one of the two panels


def mean_credits(summary: DatasetSummary) -> plotly.graph_objects.Figure:
    """Above, the mean credit of each segment with its interval; below, the share of tokens with their onset there.

    A rule that names a state counts at the segment that ends in it. Tokens whose onset is the first state, or that have
    none, are at no segment: a note says how many.

    Args:
        summary: what `iglens_tl.summarize` read.

    Returns:
        A figure with one bar trace in `summary.unit`, and a line a rule whose points are shares of tokens.

    Raises:
        ImportError: where Plotly is not installed.
        ValueError: for a summary without tokens.
    """
    of_kind("mean_credits", summary, DatasetSummary)
    if not summary.n_tokens:
        raise ValueError(
            f"the summary holds no token: {summary.n_done} of {summary.n_prompts} prompts are done and "
            f"{len(summary.failures)} failed. Wait for the run, or look at its failures."
        )
    go, subplots = _style.graph_objects(), importlib.import_module("plotly.subplots")
    names = [f"<b>mean credit, {summary.confidence:.0%} interval over prompts</b>", "<b>onset of tokens</b>"]
    fig = subplots.make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=names, vertical_spacing=0.14)
    fig.add_trace(_means(go, summary), row=1, col=1)
    for place, rule in enumerate(dict.fromkeys(summary.onsets["rule"])):
        fig.add_trace(_onsets(go, summary, rule, place), row=2, col=1)
    title = f"{summary.n_tokens} tokens of {summary.n_done - len(summary.failures)} prompts"
    fig = _style.dressed(fig, title, _notes(summary), 2 * _PANEL, above=18)
    labels = [_style.escaped(label) for label in summary.segments["segment"]]
    fig.update_xaxes(type="category", categoryorder="array", categoryarray=labels, autotickangles=[0, -90])
    fig.update_xaxes(title_text=path_title(list(summary.segments["segment"])), row=2, col=1)
    fig.update_yaxes(title_text=_style.escaped(summary.unit), zerolinecolor="#8c8c8c", nticks=6, row=1, col=1)
    fig.update_yaxes(title_text="share", tickformat=".0%", rangemode="tozero", nticks=5, row=2, col=1)
    fig.update_annotations(x=0, xanchor="left", font_size=12)
    _style.legend_below(fig, 3)
    return fig


def _means(go: Any, summary: DatasetSummary) -> Any:
    rows = summary.segments
    means = rows["mean"].tolist()
    half = [None if math.isnan(low) else mean - low for mean, low in zip(means, rows["low"].tolist(), strict=True)]
    hover = [
        f"segment {_style.escaped(segment)}: {_style.escaped(start)} → {_style.escaped(end)}<br>mean credit {mean:+.6g} "
        f"[{low:+.6g}, {high:+.6g}] {summary.unit}<br>{tokens} tokens of {prompts} prompts"
        for segment, start, end, mean, low, high, tokens, prompts in rows[
            ["segment", "start", "end", "mean", "low", "high", "n_tokens", "n_prompts"]
        ].itertuples(index=False)
    ]
    return go.Bar(
        x=[_style.escaped(label) for label in rows["segment"]],
        y=means,
        error_y={"type": "data", "array": half, "color": _style.INK, "thickness": 1, "width": 2},
        marker=_style.signed_bars(means),
        hovertext=hover,
        hoverinfo="text",
        showlegend=False,
    )


def _onsets(go: Any, summary: DatasetSummary, rule: str, place: int) -> Any:
    column = "segment" if RULES[rule] == "segment" else "end"
    shares = _shares(summary, rule)
    colour, dash, marker = _style.LINES[place]
    return go.Scatter(
        x=[_style.escaped(label) for label in summary.segments["segment"]],
        y=[shares.get(label, 0.0) for label in summary.segments[column]],
        name=rule,
        mode="lines+markers",
        line={"color": colour, "dash": dash, "width": 1.5},
        marker={"symbol": marker, "size": 6, "color": colour},
        hovertemplate=f"{rule}, segment %{{x}}<br>%{{y:.1%}} of tokens<extra></extra>",
    )


def _shares(summary: DatasetSummary, rule: str) -> dict[str | None, float]:
    rows = summary.onsets[summary.onsets["rule"] == rule]
    return dict(zip(rows["label"].tolist(), rows["share"].tolist(), strict=True))


def _notes(summary: DatasetSummary) -> list[str]:
    state = "" if summary.is_complete else f", {summary.n_prompts - summary.n_done} prompts to do"
    notes = [f"{summary.metric}, onset fraction {summary.onset_fraction:g}{state}"]
    elsewhere = [words for rule in RULES for words in _elsewhere(summary, rule)]
    return [*notes, *([f"at no segment: {', '.join(elsewhere)}"] if elsewhere else [])]


def _elsewhere(summary: DatasetSummary, rule: str) -> list[str]:
    """How many tokens have their onset at no segment: at the first state, or nowhere."""
    first, shares = summary.segments["start"].iloc[0], _shares(summary, rule)
    places = {None: "none"} if RULES[rule] == "segment" else {first: f"at {first}", None: "none"}
    return [f"{rule} {shares[label]:.0%} {words}" for label, words in places.items() if label in shares]
