"""A run over a data set from start to end, killed at random moments on the way: its rows against those of a run that was not.

    python -m benchmarks.dataset [--prompts 2000] [--kills 10] [--seed 0] [--batch-size 32] [--out FILE]

Prompts are made by template and run on SmolLM2-135M. The children are forked from a process that has the model, so that a
killed run costs its batch in flight and not the loading of a model. Rows are compared to the bit. `--tmpfs` (root, Linux)
adds a run into a file system of that many KiB, which fills up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from benchmarks import RESULTS
from benchmarks.measuring import machine
from iglens_tl import run_dataset, summarize
from iglens_tl._shards import RunFolder
from iglens_tl.demo import demo_model

PLACES = (
    "France",
    "Vietnam",
    "Italy",
    "Japan",
    "Kenya",
    "Peru",
    "Norway",
    "Egypt",
    "Canada",
    "Poland",
    "Chile",
    "Ghana",
)
THINGS = ("river", "capital", "language", "mountain", "currency", "flag", "king", "coast", "food", "city")
FRAMES = (
    "The {thing} of {place} is",
    "Everyone in {place} knows that the {thing} is",
    "When she left {place} in {year}, the {thing}",
    "Q: What is the {thing} of {place}? A:",
    "In {year}, {place} had a {thing} that was",
    "{place}, {thing}, {year},",
)


def prompts(n: int) -> list[str]:
    """`n` different prompts of 5 to 15 tokens, in an order without system."""
    whole = [
        frame.format(place=place, thing=thing, year=year)
        for year in range(1900, 2000)
        for frame in FRAMES
        for place in PLACES
        for thing in THINGS
    ]
    return random.Random(0).sample(sorted(set(whole)), n)


def table(out: Path) -> pyarrow.Table:
    order = [(name, "ascending") for name in ("prompt_index", "position", "segment_index")]
    return pyarrow.parquet.read_table(out).sort_by(order).combine_chunks().replace_schema_metadata(None)


def child(model: Any, rows: list[str], out: Path, batch_size: int) -> int:
    """Fork a process that runs the data set; torch runs in one thread, or a fork would hang."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_dataset(model, rows, out, batch_size=batch_size)
            code = 0
        except OSError as error:
            print(error, flush=True)
        finally:
            os._exit(code)
    return pid


def waited(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_run(model: Any, rows: list[str], out: Path, batch_size: int, moments: list[float]) -> list[int]:
    """Prompts that were finished after each kill; then the run goes on to its end."""
    progress: list[int] = []
    for moment in moments:
        pid = child(model, rows, out, batch_size)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        assert waited(pid) == -signal.SIGKILL
        progress.append(RunFolder(out).n_done() if out.is_dir() else 0)
    assert waited(child(model, rows, out, batch_size)) == 0
    return progress


def full_disk(model: Any, rows: list[str], kib: int, batch_size: int) -> dict[str, Any]:
    """Run into a file system that is too small, then give it room and go on."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", name], check=True)
        try:
            code = waited(child(model, rows, place / "run", batch_size))
            left = len(list((place / "run").glob(".*.tmp")))
            done = summarize(place / "run").n_done
            subprocess.run(["mount", "-o", f"remount,size={kib * 100}k", name], check=True)
            again = waited(child(model, rows, place / "run", batch_size))
            return {
                "kib": kib, "exit code": code, "temporary files left": left, "prompts kept": done,
                "exit code with room": again, "complete": summarize(place / "run").is_complete,
            }  # fmt: skip
        finally:
            subprocess.run(["umount", name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tmpfs", type=int, metavar="KIB")
    parser.add_argument(
        "--folder", type=Path, help="where the runs go; default: a temporary folder, removed at the end"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "dataset.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, rows = demo_model(), prompts(arguments.prompts)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    start = time.perf_counter()
    assert waited(child(model, rows, folder / "whole", arguments.batch_size)) == 0
    seconds = time.perf_counter() - start
    print(f"uninterrupted: {len(rows)} prompts in {seconds:.0f} s", flush=True)
    chance = random.Random(arguments.seed)
    moments = [chance.uniform(0, 2 * seconds / (arguments.kills + 1)) for _ in range(arguments.kills)]
    start = time.perf_counter()
    progress = killed_run(model, rows, folder / "killed", arguments.batch_size, moments)
    killed_seconds = time.perf_counter() - start
    whole, killed = table(folder / "whole"), table(folder / "killed")
    keys = zip(*(killed[name].to_pylist() for name in ("prompt_index", "position", "segment_index")), strict=True)
    report = {
        "machine": machine(),
        "prompts": len(rows),
        "rows": killed.num_rows,
        "seconds": seconds,
        "prompts per second": len(rows) / seconds,
        "seconds with kills": killed_seconds,
        "finished after each kill": progress,
        "rows that are there twice": sum(times > 1 for times in Counter(keys).values()),
        "equal to the bit": killed.equals(whole),
        "bytes on disk": sum(path.stat().st_size for path in RunFolder(folder / "killed").shards()),
    }
    if arguments.tmpfs:
        report["full disk"] = full_disk(model, rows[:200], arguments.tmpfs, arguments.batch_size)
    print(summarize(folder / "killed"))
    if arguments.folder is None:
        shutil.rmtree(folder)
    text = json.dumps(report, indent=2)
    print(text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
