"""A split as figures: layers by heads, and the parts of largest credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iglens_tl._layout import Token
from iglens_tl.plots import _style
from iglens_tl.plots._style import signed
from iglens_tl.plots._words import in_title, of_kind, one_token, quantity, where
from iglens_tl.splits import SplitResult

if TYPE_CHECKING:
    import plotly.graph_objects


def heads(split: SplitResult, batch: int = 0, pos: int = 0) -> plotly.graph_objects.Figure:
    """The credits of all heads for one token, layers upward by heads; a diverging scale, symmetric about 0.

    Args:
        split: with `unit="head"`.
        batch, pos: which token, on the axes of the result.

    Returns:
        A figure with one heat map trace, `z` [layer, head] in `split.metric_unit`; what no head has (MLPs, biases) stands
        in the title as one sum.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a `batch` or `pos` outside the axes.
        ValueError: for a masked entry, or a split that has no heads.
    """
    of_kind("heads", split, SplitResult)
    token = one_token(split.whole, batch, pos)
    credits = split.matrix("head")[(slice(None), slice(None), *token)]
    size = _style.extent(credits)
    trace = _style.graph_objects().Heatmap(
        z=credits.numpy(),
        x=list(range(credits.shape[1])),
        y=list(range(credits.shape[0])),
        colorscale=_style.DIVERGING,
        zmin=-size,
        zmax=size,
        xgap=1,
        ygap=1,
        **_style.minus_signs(credits),
        hovertemplate=f"L%{{y}}H%{{x}}<br>credit %{{z:+.6~g}} {split.metric_unit}<extra></extra>",
        colorbar=_style.colour_bar("credit", split.metric_unit),
    )
    height = _style.rows_height(credits.shape[0])
    fig = _style.figure(
        [trace], _title(split, token, "heads"), [*where(split.whole, token), _rest(split, token)], height
    )
    fig.update_xaxes(title_text="head", type="category", showgrid=False)
    fig.update_yaxes(title_text="layer", type="category", showgrid=False)
    return fig


def _title(split: SplitResult, token: Token, what: str) -> str:
    return f"Credits of {what}: {quantity(split.whole)} of {in_title(split.whole, token)}"


def _rest(split: SplitResult, token: Token) -> str:
    """What the heads sum to, and what everything else does."""
    credits = split.attribution[(slice(None), *token)]
    own = float(credits[split.of_kind("head")].sum())
    return f"heads {signed(own)}, all else {signed(float(credits.sum()) - own)}, {split.path} path"


def top_parts(split: SplitResult, batch: int = 0, pos: int = 0, *, n: int = 15) -> plotly.graph_objects.Figure:
    """The parts of largest |credit| for one token as bars, the largest at the top, and all others as one bar.

    Args:
        split: of any unit.
        batch, pos: which token, on the axes of the result.
        n: the most parts; the credits of all others are added to one bar, so that the bars sum to the whole.

    Returns:
        A figure with one bar trace, from the bottom: all others (if any), then the parts, in `split.metric_unit`.

    Raises:
        ImportError: where Plotly is not installed.
        IndexError: for a `batch` or `pos` outside the axes.
        ValueError: for a masked entry, or an `n` below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    of_kind("top_parts", split, SplitResult)
    token = one_token(split.whole, batch, pos)
    rows = _rows(split, token, n)
    fig = _style.figure(
        [_bars(rows, split.metric_unit)],
        _title(split, token, f"parts ({split.unit})"),
        [*where(split.whole, token), f"{split.path} path"],
        height=22 * len(rows) + 20,
    )
    _style.numbered_bars(fig, [amount for _, amount in rows])
    fig.update_xaxes(title_text=f"credit [{split.metric_unit}]")
    fig.update_yaxes(tickvals=list(range(len(rows))), ticktext=[_style.escaped(label) for label, _ in rows])
    return fig


def _rows(split: SplitResult, token: Token, n: int) -> list[tuple[str, float]]:
    """Labels and credits from the bottom; a part's label names its segment where another segment has the same label."""
    credits: list[float] = split.attribution[(slice(None), *token)].tolist()
    order = sorted(range(len(credits)), key=lambda place: -abs(credits[place]))
    labels = [part.label for part in split.parts]
    names = [
        part.label if labels.count(part.label) == 1 else f"{part.label} ({split.whole.segment_labels[part.segment]})"
        for part in split.parts
    ]
    top = [(names[place], credits[place]) for place in order[:n]]
    others = [credits[place] for place in order[n:]]
    return [*([(f"{len(others)} others", sum(others))] if others else []), *reversed(top)]


def _bars(rows: list[tuple[str, float]], unit: str) -> Any:
    amounts = [amount for _, amount in rows]
    return _style.graph_objects().Bar(
        orientation="h",
        x=amounts,
        y=list(range(len(rows))),
        text=[signed(amount) for amount in amounts],
        textposition="outside",
        textfont={"size": 11, "color": _style.INK},
        cliponaxis=False,
        marker=_style.signed_bars(amounts),
        hovertext=[f"{_style.escaped(label)}<br>credit {amount:+.6g} {unit}" for label, amount in rows],
        hoverinfo="text",
    )
