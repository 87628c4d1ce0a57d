"""What all figures share: Plotly when it is needed, colours, fonts, titles.

A gain is blue and a loss orange, as in the HTML tables; both darken with size, so that size survives a grey print. Where
the sign does not show in the position of a bar, it is written: a minus sign in a cell, a sign before a number.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from iglens_tl._display import cells

if TYPE_CHECKING:
    import plotly.graph_objects

GAIN, LOSS, LOSS_EDGE, WHOLE = "#2166ac", "#fdb863", "#7f3b08", "#4d4d4d"
INK, MUTED, SHADE = "#222222", "#595959", "#e8e8e8"
HATCH = {"shape": "/", "fgcolor": LOSS_EDGE, "size": 5, "solidity": 0.15}
MINUS = "\N{MINUS SIGN}"

# Blue of ColorBrewer's RdBu and orange of its PuOr, step for step of one lightness: blind to neither red nor green.
_UP = ("#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061")
_DOWN = ("#f7f7f7", "#fee0b6", "#fdb863", "#e08214", "#b35806", "#7f3b08")
SEQUENTIAL = [[place / 5, colour] for place, colour in enumerate(_UP)]
DIVERGING = [[place / 10, colour] for place, colour in enumerate((*_DOWN[:0:-1], *_UP))]

# Okabe and Ito's colours that are dark enough for a line, each with a dash and a marker of its own for a grey print.
LINES = (
    ("#0072b2", "solid", "circle"),
    ("#d55e00", "dash", "square"),
    ("#009e73", "dot", "diamond"),
    ("#cc79a7", "dashdot", "triangle-up"),
    ("#000000", "longdash", "x"),
    ("#e69f00", "solid", "triangle-down"),
    ("#56b4e9", "dash", "cross"),
    ("#7f7f7f", "dot", "star"),
)

_SIGN_FROM = 0.02  # of a colour scale: a smaller loss is as good as white, and has no sign to be read
_TEXT_ROOM = 0.2  # of an axis: what a number beside a bar takes in a figure of 400 px
_TITLE_WIDTH, _NOTE_WIDTH = 44, 52  # characters of a line: what 400 px hold


def graph_objects() -> Any:
    """Plotly's figures and traces.

    Raises:
        ImportError: where Plotly is not installed; it names the extra.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ImportError("figures need Plotly: pip install iglens_tl[plots]") from error


def figure(traces: Sequence[Any], title: str, notes: Sequence[str], height: int) -> plotly.graph_objects.Figure:
    """A figure with the traces, its title and notes; as wide as the page gives room for."""
    built = graph_objects().Figure(list(traces))
    return dressed(built, title, notes, height)


def dressed(
    built: plotly.graph_objects.Figure, title: str, notes: Sequence[str], height: int, above: int = 0
) -> plotly.graph_objects.Figure:
    """The figure with fonts, title and margins; `height` is that of the plot, to which title and margins are added, and
    `above` the room for what a figure itself writes above its plot.

    `title` and `notes` are plain text: what Plotly would take for markup is escaped here.
    """
    heading, lines = wrapped(title, _TITLE_WIDTH), [line for note in notes for line in wrapped(note, _NOTE_WIDTH)]
    top = 16 + 20 * len(heading) + 16 * len(lines) + above
    small = f'<span style="font-size:12px;color:{MUTED}">{"<br>".join(map(escaped, lines))}</span>'
    words = "<br>".join([*(f"<b>{escaped(line)}</b>" for line in heading), *([small] if lines else [])])
    built.update_layout(
        template="plotly_white",
        title={
            "text": words,
            "font": {"size": 15},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 12, "t": 24},
        },
        font={"family": "Arial, Helvetica, DejaVu Sans, sans-serif", "size": 13, "color": INK},
        hoverlabel={"align": "left", "font": {"family": "DejaVu Sans Mono, Consolas, monospace", "size": 12}},
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 12, "r": 16, "t": top + 14, "b": 12},
        height=height + top + 80,
        separators=".,",
    )
    axis = {"automargin": True, "title": {"standoff": 8, "font": {"size": 13}}, "tickfont": {"size": 12}}
    apart = {"ticks": "outside", "ticklen": 4, "tickcolor": "rgba(0,0,0,0)"}
    built.update_xaxes({**axis, **apart})
    built.update_yaxes({**axis, **apart})
    return built


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of so many characters; a no-break space breaks no line."""
    return textwrap.wrap(text, width, break_long_words=True)


_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"})


def escaped(text: str) -> str:
    """Text as Plotly shows it letter by letter: `<b>` and `&amp;` are no markup, `$$` no formula, `%{y}` no template.

    >>> escaped("<b>$x$ & y")
    '&lt;b&gt;&#36;x&#36; &amp; y'
    """
    return text.translate(_ENTITIES)


def signed(value: float) -> str:
    """A credit beside its bar: four digits with the sign.

    >>> signed(0.58012), signed(13.418), signed(0.0)
    ('+0.5801', '+13.42', '0')
    """
    return plain(value) if value <= 0 else "+" + plain(value)


def plain(value: float) -> str:
    """A level beside its bar, in at most seven characters.

    >>> plain(0.74909), plain(1.2345678), plain(115.8632), plain(123456.0), plain(0.0)
    ('0.7491', '1.235', '115.9', '1e+05', '0')
    """
    size = abs(value)
    if value == 0:
        return "0"
    if not 5e-5 <= size < 99999.5:
        return f"{value:.0e}".replace("-", MINUS)
    digits = 4 if size < 1 else max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{digits}f}".replace("-", MINUS)


def extent(numbers: Tensor) -> float:
    """The largest finite |number|: half the range of a scale that is symmetric about 0 (1 where all are 0)."""
    finite = numbers[numbers.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return largest or 1.0


def colour_bar(title: str, unit: str) -> dict[str, Any]:
    """A slim colour bar with its unit."""
    return {
        "title": {"text": f" <br>{title} [{unit}]", "side": "right", "font": {"size": 12}},
        "thickness": 12,
        "outlinewidth": 0,
        "tickfont": {"size": 11},
        "nticks": 7,
    }


def rows_height(rows: int) -> int:
    """The height of so many rows whose labels are all to be read, within what a screen shows."""
    return min(max(15 * rows, 120), 900)


def token_axis(built: plotly.graph_objects.Figure, places: Sequence[str], texts: Sequence[str]) -> None:
    """The x axis: places are the categories, in order, and each one's text stands at its tick.

    Plotly leaves labels out where they would touch. `texts` are escaped already.
    """
    built.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(places),
        labelalias=dict(zip(places, texts, strict=True)),
        autotickangles=[0, -90],
    )
    layout: Any = built.layout
    layout.height += 7 * max(map(cells, texts))


def minus_signs(numbers: Tensor) -> dict[str, Any]:
    """A minus sign in the cells of losses, as large as the cell: what a grey print has of the colour."""
    losses = (numbers < -_SIGN_FROM * extent(numbers)).tolist()
    text = [[MINUS if loss else "" for loss in row] for row in losses]
    return {"text": text, "texttemplate": "%{text}"}


def signed_bars(amounts: Sequence[float]) -> dict[str, Any]:
    """The marker of bars that are gains or losses."""
    losses = [amount < 0 for amount in amounts]
    edge = 0.01 * max(map(abs, amounts), default=0.0)  # what is lower than its own edge has none
    line = {"color": LOSS_EDGE, "width": [int(amount < -edge) for amount in amounts]}
    return {"color": [LOSS if loss else GAIN for loss in losses], "line": line}


def room_for_numbers(ends: Sequence[float], losses: Sequence[float]) -> list[float]:
    """A range that holds zero, all ends of bars, and the numbers beside them: at the right, and left of each loss."""
    low, high = min([0.0, *ends]), max([0.0, *ends])
    span = (high - low) or 1.0
    room = span * _TEXT_ROOM / (1 - 2 * _TEXT_ROOM)
    return [min([low, *(end - room for end in losses)]), high + room]


def numbered_bars(built: plotly.graph_objects.Figure, amounts: Sequence[float]) -> None:
    """The axes of horizontal bars from zero with numbers beside them."""
    limits = room_for_numbers(amounts, [amount for amount in amounts if amount < 0])
    built.update_layout(bargap=0.3)
    built.update_xaxes(range=limits, zeroline=True, zerolinecolor="#b0b0b0", nticks=6)
    built.update_yaxes(range=[-0.6, len(amounts) - 0.4], showgrid=False, zeroline=False)


def legend_below(built: plotly.graph_objects.Figure, entries: int) -> None:
    """A legend at the foot of the figure, which grows by the rows that it may need at 400 px."""
    built.update_layout(
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "font": {"size": 12}}
    )
    layout: Any = built.layout
    layout.height += 20 * entries
