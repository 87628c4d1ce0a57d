"""One token's way: from the value at the first state through the signed credits to the value at the last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from iglens_tl._layout import Group, Token, group_credits, grouped_by_mass
from iglens_tl._onset import RULES, TINY, onset_index
from iglens_tl.plots import _style
from iglens_tl.plots._style import plain, signed
from iglens_tl.plots._words import in_title, of_kind, one_token, path_title, quantity, where, with_unit
from iglens_tl.results import IGLensResult

if TYPE_CHECKING:
    import plotly.graph_objects

_NEGLIGIBLE = 0.01  # segments that together hold less of all |credit| are one row
_ROUNDING = 1e-6  # of the largest level: a smaller gap between credits and total is rounding and has no bar
MAX_SEGMENTS = 16


class _Onset(NamedTuple):
    row: int  # of the figure, -1 for none
    words: str


def waterfall(
    result: IGLensResult,
    batch: int = 0,
    pos: int = 0,
    *,
    onset_rule: str | None = "mass",
    onset_fraction: float = 0.5,
    max_segments: int = MAX_SEGMENTS,
) -> plotly.graph_objects.Figure:
    """The credits of one token as steps from its value at the first state, up the layers, to that at the last.

    Bars add up: first bar + credits = last bar. Adjacent segments that together hold less than 1% of all |credit| are one
    row (`0-22`) with their credits added; where more than `max_segments` rows are left, further ones are merged. The row
    of the onset is shaded and has a "▸"; a rule that names a state marks the row whose segment ends in it.

    Args:
        result: of any number of tokens.
        batch, pos: which one, on the axes of the result (`pos` is no position on the token axis; -1 is the last entry).
        onset_rule, onset_fraction: see `IGLensResult.onset`; a rule of None marks nothing.
        max_segments: the most rows of credits.

    Returns:
        A figure with one waterfall trace, in `result.unit`: the first state, the segments from below, the last state.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a `batch` or `pos` outside the axes.
        ValueError: for a masked entry, a `max_segments` below 1, or a rule and fraction that `onset` refuses.
    """
    if max_segments < 1:
        raise ValueError(f"max_segments must be at least 1, got {max_segments}.")
    of_kind("waterfall", result, IGLensResult)
    token = one_token(result, batch, pos)
    groups = groups_of(result, token, max_segments)
    rows = _rows(result, token, groups, group_credits(result, token, groups))
    onset = _onset(result, token, groups, onset_rule, onset_fraction)
    fig = _style.figure(
        [_trace(rows)],
        f"{in_title(result, token)}: {quantity(result)} {rows[0].text} → {rows[-1].text}",
        [*where(result, token), *([onset.words] if onset.words else [])],
        height=24 * len(rows) + 20,
    )
    _draw_axes(fig, result, rows, onset.row)
    fig.update_layout(waterfallgap=0.3)
    return fig


def groups_of(result: IGLensResult, token: Token, most: int) -> list[Group]:
    """The fewest groups of which no merged one holds as much as 1% of all |credit|, at most `most`."""
    size = result.attribution[(slice(None), *token)].abs()
    whole = max(float(size.sum()), TINY)
    for count in range(1, most + 1):
        groups = grouped_by_mass(result, [token], count)
        merged = [group for group in groups if group.stop - group.start > 1]
        if all(float(size[group.start : group.stop].sum()) < _NEGLIGIBLE * whole for group in merged):
            break
    return groups  # pyright: ignore[reportPossiblyUnboundVariable] (most >= 1)


def _onset(result: IGLensResult, token: Token, groups: Sequence[Group], rule: str | None, fraction: float) -> _Onset:
    if rule is None:
        return _Onset(-1, "")
    onset = result.onset(rule, fraction)
    label = onset.labels[token[0]][token[1]]
    share = "" if onset.fraction is None else f" {onset.fraction:g}"
    if label is None:
        return _Onset(-1, f"no onset ({rule}{share})")
    # A state is produced by the segment before it; the first state is the row below all segments.
    segment = int(onset_index(result, rule, fraction)[token]) - (RULES[rule] == "state")
    row = next((1 + place for place, group in enumerate(groups) if group.start <= segment < group.stop), 0)
    return _Onset(row, f"▸ onset at {label} ({rule}{share})")


class _Row(NamedTuple):
    label: str
    amount: float
    measure: str  # Plotly's: "absolute" (a level), "relative" (a credit), "total" (what all before it add up to)
    text: str
    hover: str


def _rows(result: IGLensResult, token: Token, groups: Sequence[Group], credits: Sequence[float]) -> list[_Row]:
    values: list[float] = result.values[(slice(None), *token)].tolist()
    states, unit = result.state_labels, result.unit
    rows = [_Row(states[0], values[0], "absolute", plain(values[0]), f"{states[0]}<br>level {values[0]:.6g} {unit}")]
    for group, credit in zip(groups, credits, strict=True):
        path = f"segment {group.label}: {states[group.start]} → {states[group.stop]}"
        hover = f"{path}<br>credit {credit:+.6g} {unit}<br>level {values[group.stop]:.6g} {unit}"
        rows.append(_Row(group.label, credit, "relative", signed(credit), hover))
    missing = values[-1] - values[0] - sum(credits)
    if abs(missing) > _ROUNDING * _style.extent(result.values[(slice(None), *token)]):
        rows.append(_Row("gap", missing, "relative", signed(missing), f"error of the estimator {missing:+.6g} {unit}"))
    hover = f"{states[-1]}<br>level {values[-1]:.6g} {unit}"
    return [*rows, _Row(states[-1], values[-1], "total", plain(values[-1]), hover)]


def _trace(rows: Sequence[_Row]) -> Any:
    return _style.graph_objects().Waterfall(
        orientation="h",
        x=[row.amount for row in rows],
        y=list(range(len(rows))),
        measure=[row.measure for row in rows],
        text=[row.text for row in rows],
        textposition="outside",
        textfont={"size": 11, "color": _style.INK},
        cliponaxis=False,
        hovertext=[row.hover for row in rows],
        hoverinfo="text",
        increasing={"marker": {"color": _style.GAIN, "line": {"color": _style.GAIN, "width": 1}}},
        decreasing={"marker": {"color": _style.LOSS, "line": {"color": _style.LOSS_EDGE, "width": 1}}},
        totals={"marker": {"color": _style.WHOLE}},
        connector={"mode": "between", "line": {"color": "#8c8c8c", "width": 1}},
    )


def _draw_axes(fig: plotly.graph_objects.Figure, result: IGLensResult, rows: Sequence[_Row], onset: int) -> None:
    ends = list(itertools.accumulate(row.amount for row in rows[:-1]))
    losses = [end for row, end in zip(rows, ends, strict=False) if row.amount < 0]
    fig.update_xaxes(
        title_text=with_unit(quantity(result), result.unit),
        range=_style.room_for_numbers(ends, losses),
        zeroline=True,
        zerolinecolor="#b0b0b0",
        nticks=6,
    )
    fig.update_yaxes(
        title_text=path_title(result.segment_labels),
        tickvals=list(range(len(rows))),
        ticktext=[_tick(row.label, place == onset) for place, row in enumerate(rows)],
        range=[-0.6, len(rows) - 0.4],
        showgrid=False,
        zeroline=False,
    )
    if onset >= 0:
        fig.add_hrect(y0=onset - 0.5, y1=onset + 0.5, fillcolor=_style.SHADE, line_width=0, layer="below")


def _tick(label: str, onset: bool) -> str:
    return f"<b>▸ {_style.escaped(label)}</b>" if onset else _style.escaped(label)
