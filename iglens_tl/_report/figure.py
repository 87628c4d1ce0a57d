"""The waterfall of a page: the look of `plots.waterfall` once, and for every token which segments are one row of it."""

from __future__ import annotations

import json
from typing import Any

from iglens_tl._layout import Token, shown_tokens
from iglens_tl.plots import waterfall
from iglens_tl.plots._waterfall import MAX_SEGMENTS, groups_of
from iglens_tl.results import IGLensResult

_OWN = ("x", "y", "measure", "text", "hovertext")  # what of the trace is a token's own
_MARGIN = {"l": 8, "r": 12, "t": 8, "b": 8}


def look(result: IGLensResult) -> dict[str, Any]:
    """Trace, layout and the mark of the onset, without the numbers of a token.

    Raises:
        ImportError: where Plotly is not installed.
    """
    batch, pos = shown_tokens(result)[0]
    drawn = json.loads(str(waterfall(result, batch, pos, onset_rule=None).to_json()))
    trace, layout = drawn["data"][0], drawn["layout"]
    for name in _OWN:
        trace.pop(name)
    layout.pop("title")
    layout["margin"] = {**layout["margin"], **_MARGIN}
    shade = {"type": "rect", "xref": "x domain", "x0": 0, "x1": 1, "yref": "y", "line": {"width": 0}, "layer": "below"}
    return {"trace": trace, "layout": layout, "shade": shade}


def rows(result: IGLensResult, token: Token) -> dict[str, Any]:
    """The rows of a token's credits: where each ends on the segment axis, and its label."""
    groups = groups_of(result, token, MAX_SEGMENTS)
    return {"groups": [group.stop for group in groups], "labels": [group.label for group in groups]}
