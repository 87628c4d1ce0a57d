"""How the benchmarks measure and what they store: pyperf's files, with the machine described.

Two calls are timed in turn in one process, again and again, and their ratio is the median over the turns: what a busy
machine does to the one it does to the other. (pyperf's own runner measures one call after the other, in processes of their own.)
The values are stored in turn, so that `python -m pyperf stats FILE`, `pyperf show` and `benchmarks.table` can read them.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyperf
import torch

_KEPT = ("cpu_count", "cpu_model_name", "load_avg_1min", "date", "python_version", "perf_version")


def prompt_of(model: Any, length: int, row: int = 0) -> torch.Tensor:
    """`[1, length]` token ids, none twice: words that occur twice can ask the same question, which is read once."""
    draw = random.Random(row)
    return torch.tensor([draw.sample(range(1000, model.cfg.d_vocab), length)])


def residual_cache(model: Any, tokens: torch.Tensor) -> Any:
    layers = model.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(layers)] + [f"blocks.{layers - 1}.hook_resid_post"]
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=names, return_type=None)[1]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each call in each turn; each is called once before."""
    for call in calls.values():
        call()
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(turns)]
    return {name: [each[name] for each in rounds] for name in calls}


def in_children(
    module: str, arguments: Sequence[str], turns: int, environment: Mapping[str, str] = {}
) -> list[list[float]]:
    """The numbers that a module prints on its last line, of processes of their own."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    own = {**os.environ, **environment}
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=own).stdout for _ in range(turns)]
    return [[float(number) for number in run.splitlines()[-1].split()] for run in runs]


def store(path: Path, values: Mapping[str, Sequence[float]], unit: str) -> None:
    """Write (or add) benchmarks to a file of pyperf's; one of the same name is replaced."""
    old = pyperf.BenchmarkSuite.load(str(path)).get_benchmarks() if path.exists() else []
    kept = [each for each in old if each.get_name() not in values]
    new = [pyperf.Benchmark([_run(name, numbers, unit)]) for name, numbers in values.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyperf.BenchmarkSuite([*kept, *new]).dump(str(path), replace=True)


def machine() -> dict[str, Any]:
    """What the numbers were measured on, and with."""
    found = pyperf.Run([1.0]).get_metadata()
    return {
        **{key: found[key] for key in _KEPT if key in found},
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "torch": torch.__version__,
        "transformer_lens": version("transformer_lens"),
    }


def _run(name: str, numbers: Sequence[float], unit: str) -> pyperf.Run:
    values = [float(number) if unit == "second" else int(number) for number in numbers]
    return pyperf.Run(values, metadata={"name": name, "unit": unit, **machine()}, collect_metadata=False)


def say(values: Mapping[str, Sequence[float]], unit: str) -> None:
    for name, numbers in values.items():
        print(f"{name}: {statistics.median(numbers):.4g} {unit}s (median of {len(numbers)})", flush=True)
