"""What the commands' arguments share: a parser that fails in one line, types of values, and the options of a model."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from iglens_tl._commands.errors import BadInputError

DTYPES = ("float64", "float32", "float16", "bfloat16")
STDOUT = "-"
"""As a FILE: the standard output."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, without the usage lines."""

    def __init__(self, prog: str, description: str, usage: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message} ({self.prog} --help lists what there is)")


def count(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """A number in (0, 1]."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1], got {text!r}")
    return number


def states(text: str) -> list[int | str]:
    """State indices and labels, one or several with commas between.

    >>> states("12"), states("0,3_mid,final_post")
    ([12], [0, '3_mid', 'final_post'])
    """
    items = text.split(",")
    wrong = [item for item in items if not re.fullmatch(r"[0-9]+|[0-9]+_(pre|mid|post)|final_post", item)]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]!r} is no state: give indices (0 enters block 0) or labels such as 3_pre, and the prompt before "
            "this option or after --"
        )
    return [int(item) if item.isdecimal() else item for item in items]


def token(text: str) -> int | str:
    """A token as its string, or `id:7042`."""
    if not text.startswith("id:"):
        return text
    if not re.fullmatch(r"id:[0-9]+", text):
        raise argparse.ArgumentTypeError(f"a token id is written id:7042, got {text!r}")
    return int(text.removeprefix("id:"))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Where the model goes and in what form; its name is each command's own argument."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--hooked",
        action="store_true",
        help="as HookedTransformer (TransformerLens 2 and 3); default: TransformerBridge",
    )
    group.add_argument("--device", help="where the model goes; default: the GPU if there is one")
    group.add_argument(
        "--model-dtype", choices=DTYPES, default="float32", help="of the model's weights; default: float32"
    )
