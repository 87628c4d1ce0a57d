"""`iglens split PROMPT --target TOKEN`: which heads, sublayers or neurons a token's probability comes from."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from iglens_tl._checks import METRICS
from iglens_tl._commands import models
from iglens_tl._commands.arguments import STDOUT, add_model_options, count, token
from iglens_tl._commands.errors import BadInputError

SUMMARY = "share each layer's credit among attention, MLP, heads or neurons; shares add up to the change of probability"
USAGE = "iglens split PROMPT [--target TOKEN] [--unit head] [--top 20] [--path straight] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="put it in quotes")
    group = parser.add_argument_group("what is shared, and how")
    group.add_argument("--target", type=token, metavar="TOKEN", help="a token (or id:7042); default: the most probable")
    group.add_argument("--incorrect-target", type=token, metavar="TOKEN", help="what the target is compared with")
    group.add_argument("--unit", choices=("block", "sublayer", "head", "neuron"), default="head", help="default: head")
    group.add_argument(
        "--path", choices=("sequential", "straight"), default="sequential",
        help="sequential: block after block; straight: all blocks at once, without order; default: sequential",
    )  # fmt: skip
    group.add_argument("--top", type=count, default=20, metavar="K", help="parts that are listed; default: 20")
    group.add_argument("--metric", choices=tuple(METRICS), default="prob", help="default: prob")
    group.add_argument("--baseline", choices=("embed", "zero", "mean"), default="embed", help="default: embed")
    group.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help="default: as TransformerLens does")
    parser.add_argument("--model", metavar="NAME", help="as for iglens; default: the embedded SmolLM2-135M-Instruct")
    add_model_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--width", type=count, metavar="W", help="columns of the table; default: the terminal's")
    for name in ("json", "csv"):
        output.add_argument(
            f"--{name}", nargs="?", const=STDOUT, metavar="FILE",
            help="every part, to a file, or in place of the table on the standard output",
        )  # fmt: skip
    output.add_argument("--save", metavar="FILE", help="everything, for SplitResult.load")


def run(args: argparse.Namespace) -> int:
    if not args.prompt.strip():
        raise BadInputError("the prompt is empty")
    if args.json == STDOUT and args.csv == STDOUT:
        raise BadInputError("--json and --csv both go to the standard output: give one of them a FILE")
    model = models.load(args.model, args)
    with models.clean_stdout():
        result = _shared(model, args)
    if STDOUT not in (args.json, args.csv):
        print(result.to_text(args.width, args.top))
    for file, write in ((args.json, result.to_json), (args.csv, result.to_csv)):
        if file is not None:
            write(sys.stdout if file == STDOUT else file)
    if args.save is not None:
        result.save(args.save)
    return 0


def _shared(model: Any, args: argparse.Namespace) -> Any:
    from iglens_tl import TOP, split

    return split(
        model,
        args.prompt,
        unit=args.unit,
        path=args.path,
        targets=TOP if args.target is None else args.target,
        incorrect_targets=args.incorrect_target,
        metric=args.metric,
        baseline=args.baseline,
        prepend_bos=args.prepend_bos,
    )
