"""`iglens ablate PROMPT --target TOKEN`: what a token's probability loses without each block, attention, MLP or head."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from iglens_tl._checks import METRICS
from iglens_tl._commands import models
from iglens_tl._commands.arguments import STDOUT, add_model_options, count, token
from iglens_tl._commands.errors import BadInputError

SUMMARY = "leave out each block, attention, MLP or head, and show what the token's probability loses"
USAGE = "iglens ablate PROMPT [--target TOKEN] [--component block] [--mode zero] [--scope target] [options]"
_EPILOG = """
examples:
  iglens ablate "The capital of France is" --target " Paris"
  iglens ablate "The capital of France is" --target " Paris" --component head --rows 20
  iglens ablate "The capital of France is" --target " Paris" --mode mean --reference sentences.txt
"""
_MODES = ("zero", "skip", "mean", "resample", "placebo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    parser.add_argument("prompt", metavar="PROMPT", help="in quotes")
    group = parser.add_argument_group("what is left out, and what takes its place")
    group.add_argument("--target", type=token, metavar="TOKEN", help="a token, or id:7042; default: the most probable")
    group.add_argument("--incorrect-target", type=token, metavar="TOKEN", help="what the target is compared with")
    group.add_argument("--component", choices=("block", "attn", "mlp", "head"), default="block", help="default: block")
    group.add_argument(
        "--mode", choices=_MODES, default="zero",
        help="what takes its place: nothing (zero, skip), a reference mean, a reference draw, or a control of the same size "
        "(placebo); default: zero",
    )  # fmt: skip
    group.add_argument(
        "--scope",
        choices=("target", "all"),
        default="target",
        help="the position that is read, or all; default: target",
    )
    group.add_argument("--spare-first", action="store_true", help="with --scope all: leave the first position as it is")
    group.add_argument(
        "--effect", choices=("total", "direct"), default="total",
        help="the blocks above run on, or the last state alone is changed; default: total",
    )  # fmt: skip
    group.add_argument("--layers", type=_blocks, metavar="L,...", help="blocks, commas between; default: all")
    group.add_argument("--reference", metavar="FILE", help="text, one reference prompt a line; for mean and resample")
    group.add_argument(
        "--n-samples", type=count, default=1, metavar="N", help="draws of resample and placebo; default: 1"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default: 0")
    group.add_argument("--metric", choices=tuple(METRICS), default="prob", help="default: prob")
    group.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help="default: as TransformerLens does")
    parser.add_argument("--model", metavar="NAME", help="as for iglens PROMPT")
    add_model_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--width", type=count, metavar="W", help="columns; default: the terminal's")
    output.add_argument("--rows", type=count, default=40, metavar="K", help="those of the largest drop; default: 40")
    output.add_argument("--csv", nargs="?", const=STDOUT, metavar="FILE", help="every drop, in place of the table")
    output.add_argument("--save", metavar="FILE", help="everything, for AblationResult.load")


def _blocks(text: str) -> list[int]:
    """Numbers of blocks with commas between.

    >>> _blocks("0,12")
    [0, 12]
    """
    if not all(item.isdecimal() for item in text.split(",")):
        raise argparse.ArgumentTypeError(f"block numbers with commas between, such as 0,12; got {text!r}")
    return [int(item) for item in text.split(",")]


def run(args: argparse.Namespace) -> int:
    check(args)
    reference = None if args.reference is None else _lines(args.reference)
    model = models.load(args.model, args)
    with models.clean_stdout():
        result = _ablated(model, args, reference)
    if args.csv is None:
        print(result.to_text(args.width, args.rows))
    else:
        result.to_csv(sys.stdout if args.csv == STDOUT else args.csv)
    if args.save is not None:
        result.save(args.save)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if not args.prompt.strip():
        raise BadInputError("the prompt is empty")
    if args.spare_first and args.scope != "all":
        raise BadInputError("--spare-first goes with --scope all")
    if (args.mode in ("mean", "resample")) != (args.reference is not None):
        raise BadInputError("--mode mean and --mode resample need --reference FILE, and no other mode takes one")
    if args.model is not None:
        models.check_model_name(args.model)
    if args.save is not None and not Path(args.save).parent.is_dir():
        raise BadInputError(f"--save {args.save!r}: there is no folder {str(Path(args.save).parent)!r}")


def _lines(file: str) -> list[str]:
    lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise BadInputError(f"--reference {file!r} holds no line of text")
    return lines


def _ablated(model: Any, args: argparse.Namespace, reference: list[str] | None) -> Any:
    from iglens_tl import TOP, ablate_layers

    return ablate_layers(
        model,
        args.prompt,
        targets=TOP if args.target is None else args.target,
        incorrect_targets=args.incorrect_target,
        layers=args.layers,
        component=args.component,
        mode=args.mode,
        scope=args.scope,
        effect=args.effect,
        include_first=False if args.spare_first else None,
        reference=reference,
        n_samples=args.n_samples,
        seed=args.seed,
        metric=args.metric,
        prepend_bos=args.prepend_bos,
    )
