"""`iglens summarize DIR`: what a run has found so far."""

from __future__ import annotations

import argparse

from iglens_tl._commands.arguments import share
from iglens_tl._commands.errors import BadInputError

SUMMARY = "mean credit of each segment with its interval, onsets and failures of a run, also while it is going on"
USAGE = "iglens summarize DIR [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of iglens run")
    parser.add_argument("--confidence", type=share, default=0.95, metavar="C", help="of the intervals; default: 0.95")


def run(args: argparse.Namespace) -> int:
    from iglens_tl.summary import summarize

    if args.confidence == 1:
        raise BadInputError("--confidence must be below 1")
    print(summarize(args.folder, confidence=args.confidence))
    return 0
