"""Where a result goes: a table on the standard output, or JSON or CSV there, and files."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from iglens_tl._commands.arguments import STDOUT, count, share
from iglens_tl._commands.errors import BadInputError

if TYPE_CHECKING:
    from iglens_tl.results import IGLensResult

RULES = ("mass", "crossing", "peak", "rank")
_FILES = ("json", "csv", "save", "html")
_NEVER_STDOUT = ("save", "html")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--onset-rule", choices=RULES, default="mass", help="of the onset column; default: mass")
    group.add_argument("--onset-frac", type=share, metavar="F", help="share that the rule asks for; default: 0.5")
    group.add_argument("--width", type=count, metavar="W", help="columns of the table; default: the terminal's")
    for name, what in (("json", "JSON"), ("csv", "CSV")):
        group.add_argument(
            f"--{name}", nargs="?", const=STDOUT, metavar="FILE",
            help=f"every credit as {what}, to a file, or in place of the table on the standard output",
        )  # fmt: skip
    group.add_argument("--save", metavar="FILE", help="everything, for IGLensResult.load")
    add_html_option(group.add_argument)


def add_html_option(add_argument: Callable[..., object]) -> None:
    """`--html`, to a parser or a group."""
    add_argument("--html", metavar="FILE", help="a report to look at: one file, about 5 MB (extra plots)")


def check_output(args: argparse.Namespace) -> None:
    """Refuse contradictions, and files that cannot be written, before anything is computed."""
    if args.json == STDOUT and args.csv == STDOUT:
        raise BadInputError("--json and --csv both go to the standard output: give one of them a FILE")
    if args.onset_frac is not None and args.onset_rule not in ("mass", "crossing"):
        raise BadInputError(f"--onset-frac goes with the rules mass and crossing; {args.onset_rule} asks for no share")
    for name in _FILES:
        file = getattr(args, name)
        if file is not None and (file != STDOUT or name in _NEVER_STDOUT):
            check_file(name, file)
    check_html(args.html)


def to_files(args: argparse.Namespace) -> list[str]:
    """The options that write to a file."""
    return [f"--{name}" for name in _FILES if getattr(args, name) not in (None, STDOUT)]


def check_html(file: str | None) -> None:
    """Refuse, before anything is computed, a report that cannot be written."""
    if file is None:
        return
    check_file("html", file)
    if importlib.util.find_spec("plotly") is None:
        raise BadInputError("--html draws with Plotly, which is not installed: pip install iglens_tl[plots]")


def check_file(name: str, file: str) -> None:
    """Refuse a file that cannot be written."""
    path = Path(file)
    if not file or path.is_dir():
        raise BadInputError(f"--{name} {file!r} is no name for a file")
    if not path.parent.is_dir():
        raise BadInputError(f"--{name} {file!r}: there is no folder {str(path.parent)!r}")


def show(result: IGLensResult, args: argparse.Namespace) -> None:
    """Print the result as the options ask, and write their files."""
    if args.json == STDOUT:
        result.to_json(sys.stdout)
    elif args.csv == STDOUT:
        result.to_csv(sys.stdout)
    else:
        print(table(result, args))
    sys.stdout.flush()
    if args.json not in (None, STDOUT):
        result.to_json(args.json)
    if args.csv not in (None, STDOUT):
        result.to_csv(args.csv)
    if args.save is not None:
        result.save(args.save)


def table(result: IGLensResult, args: argparse.Namespace) -> str:
    """The result as text, with how well its credits add up under it."""
    text = result.to_text(
        args.width,
        max_rows=None,
        levels=True,
        onset_rule=args.onset_rule,
        onset_fraction=0.5 if args.onset_frac is None else args.onset_frac,
    )
    width = args.width or shutil.get_terminal_size().columns
    return "\n".join([text, *textwrap.wrap(completeness(result), max(width, 20))])


def completeness(result: IGLensResult) -> str:
    """The largest error of the sums, in words."""
    worst = float(result.gap[result.mask].abs().max())
    n = int(result.mask.sum())
    name = "Δp" if result.metric == "prob" else f"Δ{result.metric}"
    first, last = result.state_labels[0], result.state_labels[-1]
    return (
        f"max |sum - {name}| = {worst:.2g} over {n} token{'' if n == 1 else 's'}; {name} (total) = value at {last} - value "
        f"at {first}"
    )
