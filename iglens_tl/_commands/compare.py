"""`iglens compare PROMPT --target TOKEN`: what several methods say of the same segments, side by side."""

from __future__ import annotations

import argparse
from typing import Any

from iglens_tl._checks import METRICS
from iglens_tl._commands import models, output
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
    output.add_html_option(parser.add_argument)
    parser.add_argument("--model", metavar="NAME", help="as for iglens PROMPT")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    model = models.load(args.model, args)
    with models.clean_stdout():
        from iglens_tl import TOP, compare

        ask: dict[str, Any] = {
            "targets": TOP if args.target is None else args.target,
            "incorrect_targets": args.incorrect_target,
            "layers": args.k,
            "metric": args.metric,
            "prepend_bos": args.prepend_bos,
        }
        result = compare(model, args.prompt, methods=tuple(args.methods), n_steps=args.n_steps, **ask)
    if args.save is not None:
        result.save(args.save)
    print(result)
    if args.html is not None:
        with models.clean_stdout():
            _report(model, result, args, ask)
    return 0


def _report(model: Any, result: Any, args: argparse.Namespace, ask: dict[str, Any]) -> None:
    from iglens_tl import ig_lens, logit_lens, write_report

    top = {name: value for name, value in ask.items() if name != "metric"}
    lens = logit_lens(model, args.prompt, **top)
    write_report(ig_lens(model, args.prompt, **ask), args.html, companions=[lens, result])


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if not args.prompt.strip():
        raise BadInputError("the prompt is empty")
    if args.model is not None:
        models.check_model_name(args.model)
    if args.save is not None:
        output.check_file("save", args.save)
    output.check_html(args.html)
