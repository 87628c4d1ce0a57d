"""`iglens answer PROMPT ANSWER`: a given answer of several tokens, by the chain rule."""

from __future__ import annotations

import argparse

from iglens_tl._commands import models, output, pages
from iglens_tl._commands.arguments import add_model_options, count
from iglens_tl._commands.errors import BadInputError

SUMMARY = "the log-probability of a given answer, token by token and summed over them"
USAGE = "iglens answer PROMPT ANSWER [options]"
_EPILOG = """
example:
  iglens answer "The capital of Vietnam is" " Ho Chi Minh City" --k 6
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    parser.add_argument("prompt", metavar="PROMPT", help="in quotes")
    parser.add_argument("answer", metavar="ANSWER", help="in quotes; a leading space counts")
    parser.add_argument("--k", type=count, metavar="K", help="that many evenly spaced segments; default: every block")
    parser.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help="default: as TransformerLens does")
    parser.add_argument("--save", metavar="FILE", help="everything, for AnswerResult.load")
    output.add_html_option(parser.add_argument)
    parser.add_argument("--model", metavar="NAME", help="as for iglens PROMPT")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    if not args.prompt.strip() or not args.answer:
        raise BadInputError(f"the {'answer' if args.prompt.strip() else 'prompt'} is empty")
    if args.model is not None:
        models.check_model_name(args.model)
    if args.save is not None:
        output.check_file("save", args.save)
    output.check_html(args.html)
    model = models.load(args.model, args)
    with models.clean_stdout():
        from iglens_tl import attribute_answer

        result = attribute_answer(model, args.prompt, args.answer, layers=args.k, prepend_bos=args.prepend_bos)
    if args.save is not None:
        result.save(args.save)
    print(result)
    pages.write(model, result.tokens, args, {"layers": args.k})
    return 0
