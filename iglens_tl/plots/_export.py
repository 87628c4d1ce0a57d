"""A figure as a file: through kaleido, and a plain word where that cannot be done."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects

FORMATS = ("png", "svg", "pdf")


def write_image(
    figure: plotly.graph_objects.Figure,
    path: str | Path,
    *,
    width: int = 800,
    height: int | None = None,
    scale: float = 2,
) -> None:
    """Write a figure as PNG, SVG or PDF, by the ending of the path.

    Args:
        figure: any Plotly figure.
        path: ends in `.png`, `.svg` or `.pdf`.
        width, height: in pixels at scale 1; None for the figure's own height.
        scale: of a PNG: 2 draws twice as many pixels each way, which a paper or a slide needs.

    Raises:
        ImportError: where kaleido 1 or newer is not installed.
        RuntimeError: where kaleido finds no Chrome or Chromium to draw with.
        ValueError: for another ending.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"path must end in .png, .svg or .pdf, got {path.name!r}.")
    errors = _kaleido_errors()
    try:
        data: bytes = figure.to_image(
            format=kind, width=width, height=height or figure.layout["height"], scale=scale if kind == "png" else 1
        )
    except errors.ChromeNotFoundError as error:
        raise RuntimeError(
            "kaleido needs Chrome or Chromium to draw images, and found none: install one (`plotly_get_chrome` brings one "
            "too), or set BROWSER_PATH to where it is."
        ) from error
    path.write_bytes(data)


def _kaleido_errors() -> Any:
    try:
        return importlib.import_module("kaleido.errors")
    except ImportError as error:
        raise ImportError(
            'writing images needs kaleido 1 or newer (pip install "kaleido>=1") and Chrome or Chromium; without them, '
            "figure.write_html(path) writes a page that any browser shows."
        ) from error
