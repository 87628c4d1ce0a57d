"""Load the model that a command names, with all that is printed on the way kept off the standard output."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from iglens_tl._commands.errors import BadInputError


@contextlib.contextmanager
def clean_stdout() -> Generator[None]:
    """What libraries print goes to stderr: stdout is for the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def check_model_name(name: str) -> None:
    """Refuse, before anything is imported, a path to nothing."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith(("/", "./", "../", "~")) or path.suffix.lower() == ".gguf"
    if looks_like_path and not path.exists():
        raise BadInputError(f"there is no file or folder {name!r} to load a model from")
    if path.is_dir() and looks_like_path and not (path / "config.json").is_file():
        raise BadInputError(f"the folder {name!r} has no config.json, so it is no Hugging Face model")


def load(name: str | None, args: argparse.Namespace) -> Any:
    """The model by its name (None for the embedded one), placed as the options say."""
    if name is not None:
        check_model_name(name)
    if sys.stderr.isatty():
        print(f"iglens: loading {name or 'the embedded model'} ...", file=sys.stderr, flush=True)
    with clean_stdout():
        import torch

        from iglens_tl import demo, loading

        check_device(args.device)
        try:
            return loading.load_model(
                name or loading.DEMO,
                api="hooked" if args.hooked else None,
                device=args.device,
                dtype=getattr(torch, args.model_dtype),
            )
        except demo.DemoModelError as error:
            raise BadInputError(str(error)) from error


def check_device(name: str | None) -> None:
    """Refuse a device that is not there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise BadInputError(f"--device {name} is not to be had: {str(error).splitlines()[0]}") from error
    if name is not None and torch.device(name).type == "meta":
        raise BadInputError("--device meta holds no numbers to compute with")
