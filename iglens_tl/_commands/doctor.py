"""`iglens doctor MODEL`: which assumption of the readout holds for a model, and which fails."""

from __future__ import annotations

import argparse

from iglens_tl._commands import models
from iglens_tl._commands.arguments import add_model_options

SUMMARY = "say which assumption of the readout holds for a model; exit code 1 where one fails"

USAGE = "iglens doctor MODEL [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a TransformerLens name, a Hugging Face folder, or a GGUF file")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    model = models.load(args.model, args)
    with models.clean_stdout():
        from iglens_tl import doctor

        report = doctor(model)
    print(report)
    return 0 if report.ok else 1
