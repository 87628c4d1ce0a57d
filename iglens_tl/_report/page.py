"""The page: its assets, its data and its words put together, everything escaped, no address in it that is ever fetched.

The page forbids itself the network, and every script but its own two, by a Content-Security-Policy with their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from iglens_tl._display import head
from iglens_tl._layout import quantity, reading
from iglens_tl._report.beside import Beside
from iglens_tl._report.payload import json_for_script, payload
from iglens_tl._report.strip import prompts, strip_html
from iglens_tl.plots._script import plotly_script
from iglens_tl.results import IGLensResult

_BESIDE = "level: what can be read after the segment. · rounds to nothing."
_LONGEST = 160  # characters of a setting
_LENS = "rank 0 is the most probable token at that state; probabilities are the logit lens's, the target in bold."


def page(result: IGLensResult, others: Beside, title: str) -> str:
    """The whole page as text, which any encoding to UTF-8 takes."""
    script, plotly = _asset("page.js"), plotly_script()
    strips, running = _strips(result)
    words = {
        "title": title,
        "facts": _facts(result),
        "running": " A coloured token is one whose probability is attributed." * running,
        "legend_of_table": " ".join([_BESIDE, *([_LENS] if others.lens is not None else [])]),
        "reading": reading(result),
        "quantity": quantity(result),
        "sums": _sums(result),
    }
    text = Template(_asset("page.html")).substitute(
        {name: markup.escape(text) for name, text in words.items()},
        script_hashes=" ".join(_hash(source) for source in (plotly, script)),
        style=_asset("style.css"),
        strips=strips,
        meanings=_meanings(others),
        settings=_rows(result.settings),
        provenance=_rows(result.provenance),
        data=json_for_script(payload(result, others)),
        plotly=plotly,
        script=script,
    )
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")  # a lone surrogate as an escape


def _asset(name: str) -> str:
    return files("iglens_tl._report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"


def _strips(result: IGLensResult) -> tuple[str, bool]:
    """The strips of all prompts, and whether every one of them is running text."""
    found = prompts(result)
    several = result.mask.shape[0] > 1
    parts: list[str] = []
    for row, pieces in found:
        parts += [f'<p class="prompt">Prompt {row}</p>'] if several else []
        parts.append(strip_html(pieces, f"tokens of prompt {row}" if several else "tokens of the prompt"))
    running = not any(piece.target for _, pieces in found for piece in pieces)
    return "\n".join(parts), running


def _facts(result: IGLensResult) -> str:
    def count(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}"

    path = f"{count(result.n_segments, 'segment')} from {result.state_labels[0]} to {result.state_labels[-1]}"
    baseline = [f"baseline {result.settings['baseline']}"] if "baseline" in result.settings else []
    facts = [
        count(int(result.mask.sum()), "token"),
        path,
        f"{result.metric} [{result.unit}]",
        *baseline,
        f"estimator {result.estimator}",
    ]
    return " · ".join(facts)


def _sums(result: IGLensResult) -> str:
    """That the credits add up, and how closely."""
    gap = float(result.gap[result.mask].abs().max())
    first, last = result.state_labels[0], result.state_labels[-1]
    own = ""
    if result.model_value is not None:
        off = float((result.values[-1] - result.model_value)[result.mask].abs().max())
        own = f"; what is read at {last} is the model's own within {off:.1g}"
    return (
        f"A token's credits add up to the change of its readout from {first} to {last}: here within {gap:.1g} {result.unit}"
        f"{own}."
    )


def _meanings(others: Beside) -> str:
    if not others.columns:
        return ""
    items = [
        f"<li><b>{markup.escape(column.name)}</b> [{markup.escape(column.unit)}]: {markup.escape(column.meaning)}.</li>"
        for column in others.columns
    ]
    return f"<p>The columns beside the credits, each in its own unit:</p><ul>{''.join(items)}</ul>"


def _rows(values: Mapping[str, Any]) -> str:
    def words(value: Any) -> str:
        return head(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _LONGEST)

    cells = [
        f'<tr><th scope="row">{markup.escape(name)}</th><td>{markup.escape(words(value))}</td></tr>'
        for name, value in values.items()
        if value is not None
    ]
    return f"<tbody>{''.join(cells)}</tbody>"
