"""The options that say which states are read, and how: the same for every command that attributes."""

from __future__ import annotations

import argparse
from typing import Any

from iglens_tl._checks import ESTIMATORS, METRICS
from iglens_tl._commands.arguments import DTYPES, count, states


def add_readout_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("states and readout")
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument(
        "--layers", nargs="+", type=states, metavar="L", help="hidden-state indices or labels; the last is always there"
    )
    chosen.add_argument("--k", type=count, metavar="K", help="that many evenly spaced segments")
    chosen.add_argument("--incl-mid", action="store_true", help="split every block into attention and MLP")
    group.add_argument("--baseline", choices=("embed", "zero", "mean"), default="embed", help="default: embed")
    group.add_argument("--metric", choices=tuple(METRICS), default="prob", help="default: prob")
    group.add_argument("--estimator", choices=ESTIMATORS, default="prediction_aware", help="default: prediction_aware")
    group.add_argument("--n-steps", type=count, default=1, metavar="N", help="steps a segment; default: 1")
    group.add_argument("--dtype", choices=DTYPES, help="of the readout; default: the model's own")


def readout_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options as the keywords that all calls share."""
    import torch

    layers = args.k if args.layers is None else [state for group in args.layers for state in group]
    return {
        "layers": layers,
        "incl_mid": args.incl_mid,
        "baseline": args.baseline,
        "metric": args.metric,
        "estimator": args.estimator,
        "n_steps": args.n_steps,
        "dtype": None if args.dtype is None else getattr(torch, args.dtype),
    }
