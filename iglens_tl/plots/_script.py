"""Plotly's own script, for a page that carries it."""

from __future__ import annotations

import importlib


def plotly_script() -> str:
    """The whole of plotly.js (4.8 MB), such that it can stand in a script element.

    Raises:
        ImportError: where Plotly is not installed; it names the extra.
    """
    try:
        script: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError as error:
        raise ImportError("a report draws with Plotly: pip install iglens_tl[plots]") from error
    # Within JavaScript's strings "<\/" is "</"; a parser of HTML makes one line end of any other.
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")
