"""`iglens compare PROMPT --target TOKEN`: what several methods say of the same segments, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from iglens_tl._checks import METRICS
from iglens_tl._commands import models
from iglens_tl._commands.arguments import add_model_options, count, token
from iglens_tl._commands.errors import BadInputError

SUMMARY = "IG-Lens, logit lens and direct logit attribution of one token, side by side"
USAGE = "iglens compare PROMPT [--target TOKEN] [options]"
_EPILOG = """
examples:
  iglens compare "The capital of France is" --target " Paris"
  iglens compare "The capital of France is" --target " Paris" --incorrect-target " London" --k 6
"""
_METHODS = ("ig_lens", "logit_lens", "dla", "layer_conductance", "layer_integrated_gradients")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    parser.add_argument("prompt", metavar="PROMPT", help="in quotes")
    parser.add_argument("--target", type=token, metavar="TOKEN", help="a token, or id:7042; default: the most probable")
    parser.add_argument("--incorrect-target", type=token, metavar="TOKEN", help="what the target is compared with")
    parser.add_argument(
        "--methods", nargs="+", choices=_METHODS, default=_METHODS[:3], metavar="METHOD",
        help=f"of {', '.join(_METHODS)}; the last two run the model many times. Default: the first three",
    )  # fmt: skip
    parser.add_argument("--k", type=count, metavar="K", help="that many evenly spaced segments; default: every block")
    parser.add_argument("--metric", choices=tuple(METRICS), default="prob", help="default: prob")
    parser.add_argument("--n-steps", type=count, default=50, metavar="N", help="of the last two methods; default: 50")
    parser.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help="default: as TransformerLens does")
    parser.add_argument("--save", metavar="FILE", help="everything, for LensComparison.load")
    parser.add_argument("--model", metavar="NAME", help="as for iglens PROMPT")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    model = models.load(args.model, args)
    with models.clean_stdout():
        from iglens_tl import TOP, compare

        result = compare(
            model,
            args.prompt,
            methods=tuple(args.methods),
            targets=TOP if args.target is None else args.target,
            incorrect_targets=args.incorrect_target,
            layers=args.k,
            metric=args.metric,
            n_steps=args.n_steps,
            prepend_bos=args.prepend_bos,
        )
    if args.save is not None:
        result.save(args.save)
    print(result)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if not args.prompt.strip():
        raise BadInputError("the prompt is empty")
    if args.model is not None:
        models.check_model_name(args.model)
    if args.save is not None and not Path(args.save).parent.is_dir():
        raise BadInputError(f"--save {args.save!r}: there is no folder {str(Path(args.save).parent)!r}")
