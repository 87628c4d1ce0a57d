"""`iglens PROMPT`: generate an answer, or take a given target, and print where its probability was produced."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from iglens_tl._commands import models, output, pages
from iglens_tl._commands.arguments import add_model_options, count, token
from iglens_tl._commands.errors import BadInputError, complain
from iglens_tl._commands.readout import add_readout_options, readout_settings

if TYPE_CHECKING:
    from iglens_tl.results import IGLensResult

SUMMARY = "between which two layers is the probability of each token produced?"
USAGE = "iglens PROMPT [options]"
_EPILOG = """
examples:
  iglens "What is the capital of Vietnam?"
  iglens "The capital of France is" --target " Paris"
  iglens "The capital of France is" --target " Paris" --incorrect-target " London" --metric log_prob
  iglens "Once upon a time" --no-generate --k 6
  iglens "What is the capital of Vietnam?" --html vietnam.html
  echo "Why is the sky blue?" | iglens --stdin --json > credits.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    _add_prompt(parser)
    add_readout_options(parser)
    parser.add_argument(
        "--model", metavar="NAME",
        help="a TransformerLens name, a Hugging Face folder, or a GGUF file; default: the embedded SmolLM2-135M-Instruct",
    )  # fmt: skip
    add_model_options(parser)
    output.add_output_options(parser)


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    yes_or_no = argparse.BooleanOptionalAction
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="put it in quotes")
    group = parser.add_argument_group("prompt and targets")
    group.add_argument("--stdin", action="store_true", help="read the prompt from the standard input")
    group.add_argument("--loop", action="store_true", help="read prompts from there, one a line, until an empty line")
    group.add_argument("--max-new-tokens", type=count, metavar="N", help="longest answer; default: 80")
    group.add_argument("--target", type=token, metavar="TOKEN", help="a token (or id:7042) instead of an answer")
    group.add_argument("--incorrect-target", type=token, metavar="TOKEN", help="what the target is compared with")
    group.add_argument("--no-generate", action="store_true", help="the prompt's own next tokens, at every position")
    group.add_argument(
        "--chat", action=yes_or_no,
        help="use the tokenizer's chat template; default: for an answer, where there is one",
    )  # fmt: skip
    group.add_argument("--prepend-bos", action=yes_or_no, help="default: as TransformerLens does for the model")


def run(args: argparse.Namespace) -> int:
    _check(args)
    output.check_output(args)
    if args.loop:
        return _loop(args)
    prompt = _checked_prompt(sys.stdin.read().removesuffix("\n") if args.stdin else " ".join(args.prompt))
    model = models.load(args.model, args)
    result = _attributed(model, prompt, args)
    output.show(result, args)
    pages.write(model, result, args, readout_settings(args))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself, before anything is loaded."""
    sources = ["a prompt"] * bool(args.prompt) + ["--stdin"] * args.stdin + ["--loop"] * args.loop
    own_targets = ["--target"] * (args.target is not None) + ["--no-generate"] * args.no_generate
    if not sources:
        raise BadInputError(
            'no prompt: write it in quotes, before options that take a value (iglens "What is the capital of Vietnam?"), or '
            "use --stdin or --loop"
        )
    if len(sources) > 1:
        raise BadInputError(f"{sources[0]} and {sources[1]} came: give one source of the prompt")
    if len(own_targets) > 1:
        raise BadInputError("--target and --no-generate came: one asks about a token, the other about the prompt's own")
    if own_targets and args.max_new_tokens is not None:
        raise BadInputError(f"--max-new-tokens says how long an answer may be, and with {own_targets[0]} there is none")
    if args.incorrect_target is not None and args.target is None:
        raise BadInputError("--incorrect-target needs --target, which it is compared with")
    if args.chat and args.prepend_bos is not None:
        raise BadInputError("--chat and --prepend-bos came: the chat template writes its own special tokens")
    if args.onset_rule == "crossing" and (args.metric != "prob" or args.incorrect_target is not None):
        raise BadInputError("--onset-rule crossing asks for a share of a probability: use --metric prob and one target")
    if args.loop and output.to_files(args):
        raise BadInputError(f"{output.to_files(args)[0]} FILE would be written over by every prompt of --loop")
    if args.model is not None:
        models.check_model_name(args.model)


def _checked_prompt(prompt: str) -> str:
    if not prompt.strip():
        raise BadInputError("the prompt is empty")
    return prompt


def _loop(args: argparse.Namespace) -> int:
    """One prompt a line until an empty line or the end; what is wrong with one is said, and the next one read."""
    model = models.load(args.model, args)
    code = 0
    while prompt := _next_line():
        try:
            output.show(_attributed(model, prompt, args), args)
        except BrokenPipeError:
            raise
        except (ValueError, TypeError, OSError) as error:
            code = complain(error)
    return code


def _next_line() -> str:
    """The next prompt, without its line end; empty at an empty line and at the end."""
    if sys.stdin.isatty():
        print("prompt> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline().rstrip("\r\n")
    return line if line.strip() else ""


def _attributed(model: Any, prompt: str, args: argparse.Namespace) -> IGLensResult:
    """The call that the options describe; nothing but the result reaches the standard output."""
    with models.clean_stdout():
        if args.target is not None or args.no_generate:
            return _at_targets(model, prompt, args)
        return _generated(model, prompt, args)


def _generated(model: Any, prompt: str, args: argparse.Namespace) -> IGLensResult:
    from iglens_tl.generation import MAX_NEW_TOKENS, generate_and_attribute, has_chat_template

    chat = has_chat_template(model) if args.chat is None else args.chat
    if chat and args.prepend_bos is not None:
        raise BadInputError("--prepend-bos is for plain text, and the chat template writes its own: add --no-chat")
    return generate_and_attribute(
        model,
        prompt,
        chat=chat,
        prepend_bos=args.prepend_bos,
        max_new_tokens=args.max_new_tokens or MAX_NEW_TOKENS,
        **readout_settings(args),
    )


def _at_targets(model: Any, prompt: str, args: argparse.Namespace) -> IGLensResult:
    from iglens_tl import NEXT, ig_lens
    from iglens_tl.generation import chat_tokens

    return ig_lens(
        model,
        chat_tokens(model, prompt) if args.chat else prompt,
        targets=NEXT if args.no_generate else args.target,
        incorrect_targets=args.incorrect_target,
        positions=None if args.no_generate else -1,
        prepend_bos=args.prepend_bos,
        **readout_settings(args),
    )
