"""The README's table of ratios, from the stored results.

python -m benchmarks.table            print it
python -m benchmarks.table --readme   put it between the README's marks
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

README = Path(__file__).parent.parent / "README.md"
MARKS = ("<!-- benchmarks: made by `python -m benchmarks.table --readme` -->\n", "<!-- end of benchmarks -->\n")


@dataclass(frozen=True)
class Ratio:
    """A line of the table: how long (or large) `one` is, as a multiple of `other`; the median over turns."""

    what: str
    one: str
    other: str
    meaning: str


@dataclass(frozen=True)
class Amount:
    """A line of the table: an amount by itself, the median of what was measured."""

    what: str
    name: str
    scale: float
    unit: str
    meaning: str


LINES: tuple[Ratio | Amount, ...] = (
    Ratio(
        "`ig_lens` / the bare matrix product, 256 tokens x 31 states", "ig_lens, 256 tokens x 31 states",
        "bare product, 256 tokens x 31 states",
        "into whole rows, 256 at a time; below 1, as all else costs less than writing these to memory does",
    ),
    Ratio(
        "`ig_lens` / TransformerLens 4.3 `logit_lens`, 64 tokens", "ig_lens, 64 tokens",
        "TransformerLens logit_lens, 64 tokens",
        "the target's probability at every state; theirs gives entropy and rank as well",
    ),
    Ratio(
        "64-step stacked interpolation / `ig_lens`, 8 tokens", "stacked, 8 tokens", "ig_lens, 8 tokens",
        "the published algorithm, for the same credits",
    ),
    Ratio(
        "captum `LayerIntegratedGradients` / `ig_lens`", "captum LayerIntegratedGradients, 4 states",
        "ig_lens with its forward pass, 3 segments",
        "4 states, 16 steps, one position of 8: another question, through all blocks, with gradients",
    ),
    Ratio(
        "captum `LayerConductance` / `ig_lens`", "captum LayerConductance, 4 states",
        "ig_lens with its forward pass, 3 segments", "likewise",
    ),
    Ratio("growth: 64 to 128 tokens", "growth, 128 tokens", "growth, 64 tokens", "2 is linear"),
    Ratio("growth: 128 to 256 tokens", "growth, 256 tokens", "growth, 128 tokens", "2 is linear"),
    Ratio("growth: 256 to 512 tokens", "growth, 512 tokens", "growth, 256 tokens", "2 is linear"),
    Ratio("growth: 16 to 31 states", "growth, 128 tokens", "growth, 15 segments", "1.94 is linear"),
    Ratio("growth: a prompt to 4 prompts", "growth, 4 prompts of 64 tokens", "growth, 64 tokens", "4 is linear"),
    Ratio("growth: 24,576 to 49,152 words", "growth, 49,152 words", "growth, 24,576 words", "2 is linear; the readout alone"),
    Amount(
        "`ig_lens` holds at most, 1,024 tokens x 31 states", "ig_lens, held at most, 1,024 tokens x 31 states", 1e6, "MB",
        "for `NEXT`, beyond the states and the model's own forward pass, results and all (memray); whole logits: 6.2 GB",
    ),
    Amount(
        "`ig_lens` holds at most, 4,096 tokens x 31 states", "ig_lens, held at most, 4,096 tokens x 31 states", 1e6, "MB",
        "the more is kept of all rows, the fewer are on their way",
    ),
    Amount(
        "the process grows by, 1,024 tokens x 31 states", "ig_lens, extra peak, 1,024 tokens x 31 states", 1e6, "MB",
        "with the product's work space and what the allocator leaves unused (glibc by itself keeps up to twice that)",
    ),
    Amount(
        "the process grows by, 4,096 tokens x 31 states", "ig_lens, extra peak, 4,096 tokens x 31 states", 1e6, "MB", "likewise",
    ),
    Amount(
        "the process grows by, `logit_lens`, 256 tokens x 31 states", "logit_lens, extra peak, 256 tokens x 31 states", 1e6,
        "MB", "it looks for the most probable tokens and so reads whole rows",
    ),
    Amount("`import iglens_tl` after `import transformer_lens`", "import iglens_tl", 1e-3, "ms", "nothing is loaded yet"),
    Amount("first use of `ig_lens`", "first use of ig_lens", 1e-3, "ms", "what it needs is loaded"),
)  # fmt: skip


def stored(folder: Path = RESULTS) -> dict[str, tuple[list[float], dict[str, Any]]]:
    """Values in turn, and the machine, of every benchmark in the folder; pyperf's files are JSON."""
    found: dict[str, tuple[list[float], dict[str, Any]]] = {}
    for path in (folder / "readout.json", folder / "neighbours.json"):
        suite = json.loads(path.read_text(encoding="utf-8"))
        common = suite.get("metadata", {})
        for benchmark in suite["benchmarks"]:
            own = {**common, **benchmark.get("metadata", {})}
            for run in benchmark["runs"]:
                own |= run.get("metadata", {})
            found[own["name"]] = [value for run in benchmark["runs"] for value in run["values"]], own
    return found


def table(folder: Path = RESULTS) -> str:
    """The table, and the machine below it, in Markdown."""
    results = stored(folder)
    rows = ["| what | median (of) | what it means |", "|---|---|---|"]
    for line in LINES:
        if isinstance(line, Ratio):
            pairs = zip(results[line.one][0], results[line.other][0], strict=True)
            values, unit = [a / b for a, b in pairs], "times"
        else:
            values, unit = [value / line.scale for value in results[line.name][0]], line.unit
        measured = f"{_short(statistics.median(values))} {unit} ({len(values)})"
        rows.append(f"| {line.what} | {measured} | {line.meaning} |")
    return "\n".join([*rows, "", _machine([about for _, about in results.values()]), ""])


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _machine(found: Sequence[dict[str, Any]]) -> str:
    def all_of(name: str) -> str:
        return " and ".join(sorted({str(each[name]) for each in found if name in each}))

    processor = all_of("cpu_model_name")
    return (
        f"Calls in turn (peaks: processes of their own), in float32 on SmolLM2-135M; {processor}, {all_of('cpu_count')} cores, "
        f"{all_of('threads')} threads, {all_of('memory_gib')} GiB; PyTorch {all_of('torch')}, "
        f"TransformerLens {all_of('transformer_lens')}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true")
    text = table()
    if not parser.parse_args().readme:
        print(text)
        return
    old = README.read_text(encoding="utf-8")
    before, rest = old.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    README.write_text(before + MARKS[0] + text + MARKS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    main()
