"""`iglens run PROMPTS --out DIR`: a whole data set into Parquet shards, on one process or many."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from iglens_tl._checks import memory_size
from iglens_tl._commands import models
from iglens_tl._commands.arguments import add_model_options, count, token
from iglens_tl._commands.errors import BadInputError
from iglens_tl._commands.readout import add_readout_options, readout_settings

SUMMARY = "attribute every prompt of a data set, into a folder of Parquet shards; goes on where it was interrupted"
USAGE = "iglens run PROMPTS --out DIR [options]"
_EPILOG = """
The same command goes on where it ended, however it ended. Exit code 1 where prompts failed: their rows say why.

examples:
  iglens run prompts.txt --out credits
  iglens run facts.jsonl --prompt-column question --target-column answer --out facts --metric log_prob
  iglens run text.parquet --next --out every-token
  accelerate launch --num_processes 4 -m iglens_tl run prompts.txt --out credits
  iglens summarize credits
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + _EPILOG
    parser.add_argument(
        "prompts", metavar="PROMPTS",
        help="a text file (one prompt a line), a JSON-lines file (.jsonl) or a Parquet file (.parquet)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder for the shards")
    group = parser.add_argument_group("rows and targets")
    group.add_argument("--prompt-column", default="prompt", metavar="NAME", help="default: prompt")
    group.add_argument("--target-column", default="target", metavar="NAME", help="default: target, where there is one")
    group.add_argument("--incorrect-column", default="incorrect_target", metavar="NAME", help="likewise")
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument("--target", type=token, metavar="TOKEN", help="a token (or id:7042) for every prompt")
    chosen.add_argument("--next", action="store_true", help="the prompts' own next tokens, at every position")
    group.add_argument("--incorrect-target", type=token, metavar="TOKEN", help="what the target is compared with")
    group.add_argument("--prepend-bos", action=argparse.BooleanOptionalAction, help="default: as TransformerLens does")
    add_readout_options(parser)
    group = parser.add_argument_group("running")
    group.add_argument(
        "--batch-size", type=count, default=32, metavar="N", help="prompts that run together; default: 32"
    )
    group.add_argument("--max-memory", metavar="SIZE", help='extra memory of a readout at its peak, such as "2GB"')
    parser.add_argument("--model", metavar="NAME", help="as for iglens; default: the embedded SmolLM2-135M-Instruct")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    _place(args)
    model = models.load(args.model, args)
    from iglens_tl._ranks import leave

    try:
        with models.clean_stdout():
            summary = _run(model, args)
    finally:
        leave()
    if _is_first():
        print(summary)
    return 1 if len(summary.failures) else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what cannot be done before anything is loaded."""
    if not Path(args.prompts).is_file():
        raise BadInputError(f"there is no file {args.prompts!r} to read prompts from")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise BadInputError(f"--out {args.out!r} is no folder")
    memory_size(args.max_memory)
    if args.model is not None:
        models.check_model_name(args.model)


def _place(args: argparse.Namespace) -> None:
    """Launched as one of several, each process has its own GPU."""
    from iglens_tl._ranks import launched_device

    if args.device is None:
        args.device = launched_device()


def _is_first() -> bool:
    from iglens_tl._ranks import ranks_here

    return ranks_here().index == 0


def _run(model: Any, args: argparse.Namespace) -> Any:
    from iglens_tl import NEXT, TOP, run_dataset

    targets = NEXT if args.next else TOP if args.target is None else args.target
    return run_dataset(
        model,
        args.prompts,
        args.out,
        prompt_column=args.prompt_column,
        target_column=args.target_column,
        incorrect_column=args.incorrect_column,
        targets=targets,
        incorrect_targets=args.incorrect_target,
        positions=None if args.next else -1,
        prepend_bos=args.prepend_bos,
        max_memory=args.max_memory,
        batch_size=args.batch_size,
        **readout_settings(args),
    )
