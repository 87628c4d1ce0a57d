"""The command line: parse, call, then print or save.

`iglens PROMPT` attributes; `iglens COMMAND ...` does what else there is. The first word decides: where it is exactly the
name of a command, it is the command; a prompt that begins with such a word goes in quotes with the rest
(`iglens "doctor who is"`) or last, after `--` (`iglens --k 6 -- doctor who is`).

Exit codes: 0; 1 where a command says that something is not so; 2 for what cannot be done as it was asked, with one line
on stderr; 130 when interrupted; 141 when nobody reads the output any more. Tables, JSON and CSV go to stdout, all else
to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from iglens_tl import __version__
from iglens_tl._commands import ablate, answer, attribute, compare, doctor, run, split, study, summarize
from iglens_tl._commands.arguments import Parser
from iglens_tl._commands.errors import complain

COMMANDS: dict[str, Any] = {
    "ablate": ablate,
    "answer": answer,
    "compare": compare,
    "doctor": doctor,
    "run": run,
    "split": split,
    "study": study,
    "summarize": summarize,
}
"""The commands by name: modules with SUMMARY, USAGE, add_arguments and run. Without one of these names: `attribute`."""

_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments, without the program's name; None for those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _plain_streams(), _short_warnings():
            return _run(words)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE
    except (ValueError, TypeError, OSError) as error:
        if "--traceback" in words:
            traceback.print_exc()
        return complain(error)


def _run(words: Sequence[str]) -> int:
    command = COMMANDS.get(words[0]) if words else None
    parser = _parser("iglens", attribute) if command is None else _parser(f"iglens {words[0]}", command)
    try:
        args = parser.parse_args(words if command is None else words[1:])
        code = int((command or attribute).run(args))
    except SystemExit as stop:  # argparse has printed its help
        code = int(stop.code or 0)
    sys.stdout.flush()  # here, where a closed pipe can still be answered for
    return code


def _parser(prog: str, command: Any) -> Parser:
    epilog = None
    if command is attribute:
        lines = [f"  iglens {name} --help   {module.SUMMARY}" for name, module in COMMANDS.items()]
        lines.append("A prompt that begins with the name of a command goes last, after --.")
        epilog = "\n".join(["commands:", *lines, ""])
    parser = Parser(prog, command.SUMMARY, command.USAGE, epilog)
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("--traceback", action="store_true", help="with an error, where in the code it came from")
    command.add_arguments(parser)
    return parser


def _versions() -> str:
    found: list[str] = []
    for name in ("transformer_lens", "transformers", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"iglens {__version__} ({', '.join(found)})"


@contextlib.contextmanager
def _plain_streams() -> Generator[None]:
    """A character that the terminal's encoding lacks is written as an escape, not raised as an error."""
    before = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    for stream, _ in before:
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue] -- TextIO has it here
    try:
        yield
    finally:
        for stream, errors in before:
            stream.reconfigure(errors=errors)  # pyright: ignore[reportAttributeAccessIssue] -- as above


@contextlib.contextmanager
def _short_warnings() -> Generator[None]:
    """Warnings as one line each, without the source line that raised them."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"iglens: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _drop_stdout() -> None:
    """Send what is still in the buffer nowhere, so that the interpreter does not complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
