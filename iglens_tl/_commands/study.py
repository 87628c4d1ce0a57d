"""`iglens study PROMPTS --reference TEXTS --out DIR`: do credits and onsets predict ablations, on prompts of one's own?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from iglens_tl._commands import models
from iglens_tl._commands.arguments import add_model_options, count, share
from iglens_tl._commands.errors import BadInputError

SUMMARY = "does the onset hold? credits and onsets against ablations, over many prompts; resumable"
USAGE = "iglens study PROMPTS --reference TEXTS --out DIR [options]"
_EPILOG = """
PROMPTS and TEXTS are text files with one prompt a line, or JSON lines with "prompt" (and "id", "kind").
A study that was interrupted goes on when the same command is given again.

examples:
  iglens study prompts.txt --reference texts.txt --out study
  iglens study prompts.jsonl --reference texts.jsonl --out study --page RESULTS.md --save results.parquet
  iglens study --out study --page RESULTS.md        (measures nothing: the page of what is there)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    parser.add_argument("prompts", nargs="?", metavar="PROMPTS", help="a .txt or .jsonl file")
    parser.add_argument("--reference", metavar="TEXTS", help="texts for means, replacements and foreign contexts")
    parser.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="a folder of the study's own (or, without PROMPTS, what --save wrote)",
    )
    parser.add_argument(
        "--n-positions", type=count, default=3, metavar="N", help="at most so many a prompt; default: 3"
    )
    parser.add_argument("--min-prob", type=share, default=0.1, metavar="P", help="of the target; default: 0.1")
    parser.add_argument(
        "--n-samples", type=count, default=1, metavar="N", help="draws of resample and placebo; default: 1"
    )
    parser.add_argument("--n-foreign", type=count, default=2, metavar="N", help="foreign contexts; default: 2")
    parser.add_argument(
        "--no-straight", action="store_true", help="without straight-path credits, which take seconds a pair"
    )
    parser.add_argument(
        "--share", type=part_of, default=(1, 1), metavar="I/N", help="of N processes in one DIR, the I-th; default: 1/1"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of every draw; default: 0")
    parser.add_argument("--page", metavar="FILE", help="the Markdown page")
    parser.add_argument(
        "--departures", metavar="FILE", help="Markdown for the page: what was done otherwise than planned"
    )
    parser.add_argument("--save", metavar="FILE", help="all measurements as one Parquet file, for OnsetStudy.load")
    parser.add_argument("--model", metavar="NAME", help="as for iglens PROMPT")
    add_model_options(parser)


def part_of(text: str) -> tuple[int, int]:
    """`2/3` as the second of three."""
    place, _, n = text.partition("/")
    if not (place.isdigit() and n.isdigit() and 1 <= int(place) <= int(n)):
        raise argparse.ArgumentTypeError(f"a share is written I/N with I from 1 to N, such as 1/2; got {text!r}")
    return int(place), int(n)


def run(args: argparse.Namespace) -> int:
    check(args)
    departures = "" if args.departures is None else Path(args.departures).read_text(encoding="utf-8")
    if args.prompts is not None:
        model = models.load(args.model, args)
        with models.clean_stdout():
            from iglens_tl import onset_study

            study = onset_study(
                model,
                args.prompts,
                reference=args.reference,
                out=args.out,
                n_positions=args.n_positions,
                min_prob=args.min_prob,
                n_samples=args.n_samples,
                n_foreign=args.n_foreign,
                straight=not args.no_straight,
                share=args.share,
                seed=args.seed,
                progress=True if sys.stderr.isatty() else None,
            )
    else:
        from iglens_tl import OnsetStudy

        study = OnsetStudy.load(args.out)
    if args.save is not None:
        study.save(args.save)
    if args.page is not None:
        Path(args.page).write_text(study.to_markdown(departures), encoding="utf-8")
    print(study)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if args.prompts is not None and args.reference is None:
        raise BadInputError(
            "--reference is missing: texts for means, replacements and foreign contexts, none of them a prompt"
        )
    if args.prompts is None and not ((Path(args.out) / "study.json").is_file() or Path(args.out).is_file()):
        raise BadInputError(f"no PROMPTS, and --out {args.out!r} holds no study to make a page of")
    for name in ("prompts", "reference", "departures"):
        file = getattr(args, name)
        if file is not None and not Path(file).is_file():
            raise BadInputError(f"there is no file {file!r} ({name})")
    for name in ("page", "save"):
        file = getattr(args, name)
        if file is not None and not Path(file).parent.is_dir():
            raise BadInputError(f"--{name} {file!r}: there is no folder {str(Path(file).parent)!r}")
    if args.model is not None:
        models.check_model_name(args.model)
