"""`iglens summarize DIR`: what a run has found so far."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from iglens_tl._commands.arguments import share
from iglens_tl._commands.errors import BadInputError

if TYPE_CHECKING:
    from iglens_tl.summary import DatasetSummary

_ENDINGS = (".html", ".png", ".svg", ".pdf")
SUMMARY = "mean credit of each segment with its interval, onsets and failures of a run, also while it is going on"
USAGE = "iglens summarize DIR [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of iglens run")
    parser.add_argument("--figure", metavar="FILE", help="the figure, as .html, .png, .svg or .pdf")
    parser.add_argument("--confidence", type=share, default=0.95, metavar="C", help="of the intervals; default: 0.95")


def run(args: argparse.Namespace) -> int:
    _check(args)
    from iglens_tl.summary import summarize

    summary = summarize(args.folder, confidence=args.confidence)
    print(summary)
    if args.figure is not None:
        _draw(summary, Path(args.figure))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.confidence == 1:
        raise BadInputError("--confidence must be below 1")
    if args.figure is None:
        return
    if Path(args.figure).suffix.lower() not in _ENDINGS:
        raise BadInputError(f"--figure must end in {', '.join(_ENDINGS)}, got {args.figure!r}")
    if not Path(args.figure).parent.is_dir():
        raise BadInputError(f"--figure {args.figure!r}: there is no folder {str(Path(args.figure).parent)!r}")


def _draw(summary: DatasetSummary, path: Path) -> None:
    from iglens_tl import plots

    try:
        figure = plots.mean_credits(summary)
        if path.suffix.lower() == ".html":
            figure.write_html(path)
        else:
            plots.write_image(figure, path)
    except (ImportError, RuntimeError) as error:
        raise BadInputError(str(error)) from error
