"""A result as one HTML file that shows itself: no server, no network, nothing installed where it is read.

The page shows the prompt with its tokens coloured by onset. A token that is clicked, or reached with the arrow keys, shows
its waterfall (value at the first state + credits = value at the last), its onset by every rule, and layer by layer its
credits and levels; beside them, where companions came, what the logit lens reads and what direct logit attribution gives,
each in its own unit. Settings and provenance stand below, with what a credit means: the extra probability that norm and
unembedding read from a state given the state before it, and not the layer's causal effect through the blocks above.

Numbers are those of the result, exactly; the same result makes the same bytes. The file is about 5 MB, which is Plotly.

Example::

    from iglens_tl import compare, ig_lens, logit_lens, write_report

    logits, cache = model.run_with_cache(prompt)
    ask = {"targets": NEXT, "positions": None}
    beside = [logit_lens(model, prompt, cache=cache, **ask), compare(model, prompt, cache=cache, **ask)]
    write_report(ig_lens(model, prompt, cache=cache, **ask), "report.html", companions=beside)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iglens_tl import _files
from iglens_tl._report.beside import Companion, beside
from iglens_tl._report.page import page
from iglens_tl.answer_result import AnswerResult
from iglens_tl.results import IGLensResult


def report_html(
    result: IGLensResult | AnswerResult,
    *,
    companions: Companion | Sequence[Companion] | None = None,
    title: str | None = None,
) -> str:
    """The report as the text of one HTML file, to be written as UTF-8.

    Args:
        result: the attribution of one or many tokens, of one or many prompts; of an `AnswerResult`, its `tokens`. Entries
            where `mask` is False are left out.
        companions: what stands beside the credits: a `LensComparison`, a `LogitLensResult`, a `DLAResult`, or a list with
            at most one of each, about the same tokens, targets and layers (and any further tokens).
        title: of the page; None for the model's name.

    Raises:
        ImportError: where Plotly is not installed.
        TypeError: for a result or a companion of another kind, or a title that is no string.
        ValueError: for a result without a token, or companions that are about something else.
    """
    tokens = result.tokens if isinstance(result, AnswerResult) else result
    _check(tokens, title)
    return page(tokens, beside(tokens, companions), _title(tokens) if title is None else title)


def write_report(
    result: IGLensResult | AnswerResult,
    path: str | Path,
    *,
    companions: Companion | Sequence[Companion] | None = None,
    title: str | None = None,
) -> None:
    """Write the report to a file; whole, or not at all.

    Args:
        result, companions, title: as in `report_html`.
        path: of the file; one that is there is replaced.

    Raises:
        FileNotFoundError: where there is no folder for it.
        ImportError, TypeError, ValueError: as in `report_html`.
    """
    _files.replace_whole(Path(path), report_html(result, companions=companions, title=title).encode("utf-8"))


def _check(result: object, title: object) -> None:
    if not isinstance(result, IGLensResult):
        raise TypeError(f"a report is of an IGLensResult or an AnswerResult, got {type(result).__name__}.")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a string or None, got {type(title).__name__}.")
    if not bool(result.mask.any()):
        raise ValueError("a report needs at least one token, and mask is False everywhere in this result.")


def _title(result: IGLensResult) -> str:
    model = result.provenance.get("model")
    return f"IG-Lens report: {model}" if model else "IG-Lens report"
