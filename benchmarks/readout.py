"""What the default call costs: against the bare matrix product of the same rows, and how much memory beyond the states.

    python -m benchmarks.readout [--tokens 256] [--turns 5] [--out FILE]
    python -m benchmarks.readout --held ig_lens 1 1024

The extra peak is measured twice (on Linux), each time in a process of its own and beyond the states and the model's own forward
pass: what the call holds at most (memray: every allocation, Python's and the libraries'), and by how much the process grows
(`VmHWM`, reset before the call; with the product's work space, and pieces that the allocator could not use again, which differ
from process to process). For the latter glibc is told to give back what is freed (`MALLOC_MMAP_THRESHOLD_`): by itself it keeps
pieces, and the same calls read 10 to 19 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import RESULTS
from benchmarks.measuring import in_children, in_turn, prompt_of, residual_cache, say, store
from iglens_tl import NEXT, ig_lens, logit_lens
from iglens_tl._core import readout as core
from iglens_tl._core.readout import Readout
from iglens_tl.demo import demo_model

BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
PEAKS = {  # method, prompts, tokens of each; the model's longest prompt is 2,048
    "ig_lens, {}, 1,024 tokens x 31 states": ("ig_lens", 1, 1024),
    "ig_lens, {}, 4,096 tokens x 31 states": ("ig_lens", 2, 2048),
    "logit_lens, {}, 256 tokens x 31 states": ("logit_lens", 1, 256),
}
EXACT = {"PYTHONMALLOC": "malloc"}  # or Python takes a whole arena of 1 MB, or does not, for a few objects
MEASURES = {"held at most": ("--held", 3, EXACT), "extra peak": ("--peak", 5, BACK)}
"""Of each peak: the option that measures it, in how many processes, and their environment."""


def count_rows(call: Callable[[], object]) -> int:
    """Rows that pass through the readout during a call."""
    read, tiles = Readout.logits, core._levels_in_tiles
    rows: list[int] = []

    def counted(self: Readout, chunk: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(len(chunk))
        return read(self, chunk, out)

    def in_tiles(readout: Readout, chunk: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(chunk))
        return tiles(readout, chunk, *rest)

    with mock.patch.object(Readout, "logits", counted), mock.patch.object(core, "_levels_in_tiles", in_tiles):
        call()
    return sum(rows)


def bare_product(model: Any, cache: Any, chunk: int = 256) -> Callable[[], None]:
    """The unembedding's matrix product over all states and positions, in chunks into one buffer, and nothing else."""
    layers = model.cfg.n_layers
    states = [cache["resid_pre", layer] for layer in range(layers)] + [cache["resid_post", layers - 1]]
    rows = torch.cat([state.reshape(-1, state.shape[-1]) for state in states])
    weight = model.W_U.detach()
    buffer = torch.empty(chunk, weight.shape[1])

    def product() -> None:
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            torch.mm(part, weight, out=buffer[: len(part)])

    return product


def speed(n_tokens: int, turns: int) -> dict[str, list[float]]:
    """Seconds of the call and of the bare product; the call reads every state once and no other row."""
    model = demo_model()
    tokens = prompt_of(model, n_tokens)
    cache = residual_cache(model, tokens)

    def call() -> object:
        return ig_lens(cache, tokens, positions=None)

    states = model.cfg.n_layers + 1
    rows, expected = count_rows(call), states * n_tokens
    assert rows == expected, f"{rows} rows read, {expected} expected"
    work = f"{n_tokens} tokens x {states} states"
    return in_turn({f"bare product, {work}": bare_product(model, cache), f"ig_lens, {work}": call}, turns)


def _peak() -> int:
    """Bytes: the most that this process has held since the mark was reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def prepared(method: str, batch: int, n_tokens: int) -> Callable[[], object]:
    """The call, all of whose loading has been done, as have the states and the model's own forward pass."""
    model = demo_model()
    tokens = torch.cat([prompt_of(model, n_tokens, row) for row in range(batch)])
    cache = residual_cache(model, tokens)
    mask = torch.ones_like(tokens)
    call = {"ig_lens": ig_lens, "logit_lens": logit_lens}[method]
    call(cache, tokens, targets=0, positions=0, layers=1, attention_mask=mask)  # what is loaded and kept once
    gc.collect()
    return partial(call, cache, tokens, targets=NEXT, positions=None, attention_mask=mask)


def held_at_most(call: Callable[[], object]) -> int:
    """Bytes that the call has allocated and not freed, at the worst moment."""
    import memray

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "memray.bin"
        with memray.Tracker(record):
            call()
        return memray.FileReader(record).metadata.peak_memory


def extra_peak(call: Callable[[], object]) -> int:
    """Bytes by which the process grows during the call."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already could be taken again without being seen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to what is resident now
    before = _peak()
    call()
    return _peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    for option, _, _ in MEASURES.values():
        parser.add_argument(option, nargs=3, metavar=("METHOD", "BATCH", "TOKENS"), help="print the bytes of one peak")
    parser.add_argument("--out", type=Path, default=RESULTS / "readout.json")
    arguments = parser.parse_args()
    for of, measure in ((arguments.held, held_at_most), (arguments.peak, extra_peak)):
        if of:
            method, batch, n_tokens = of
            print(measure(prepared(method, int(batch), int(n_tokens))))
            return
    seconds = speed(arguments.tokens, arguments.turns)
    say(seconds, "second")
    store(arguments.out, seconds, "second")
    for (name, of), (measured, (option, turns, own)) in product(PEAKS.items(), MEASURES.items()):
        found = in_children("benchmarks.readout", [option, *map(str, of)], turns, own)
        peaks = {name.format(measured): [number for (number,) in found]}
        say(peaks, "byte")
        store(arguments.out, peaks, "byte")


if __name__ == "__main__":
    main()
