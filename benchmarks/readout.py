"""What the default call costs: against the bare matrix product of the same rows, and how much memory beyond the states.

    python -m benchmarks.readout [--tokens 256] [--turns 5] [--out FILE]

The extra peak is `VmHWM` of a process of its own, reset after the model's own forward pass (Linux). Its allocator is told to give
back what is freed (`MALLOC_MMAP_THRESHOLD_`): by itself glibc keeps pieces, and the same calls read 10 to 19 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Callable
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

EXACT = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
PEAKS = {
    "ig_lens, extra peak, 1,024 tokens x 31 states": ("ig_lens", 1, 1024),
    "ig_lens, extra peak, 4,096 tokens x 31 states": ("ig_lens", 2, 2048),  # the model's longest prompt is 2,048
    "logit_lens, extra peak, 256 tokens x 31 states": ("logit_lens", 1, 256),
}


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


def extra_peak(method: str, batch: int, n_tokens: int) -> int:
    """Bytes of the call beyond the stored states and the model's own forward; for a process of its own."""
    model = demo_model()
    tokens = torch.cat([prompt_of(model, n_tokens, row) for row in range(batch)])
    cache = residual_cache(model, tokens)
    mask = torch.ones_like(tokens)
    call = {"ig_lens": ig_lens, "logit_lens": logit_lens}[method]
    call(cache, tokens, targets=0, positions=0, layers=1, attention_mask=mask)  # what is loaded and kept once
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already could be taken again without being seen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to what is resident now
    before = _peak()
    call(cache, tokens, targets=NEXT, positions=None, attention_mask=mask)
    return _peak() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peak", nargs=3, metavar=("METHOD", "BATCH", "TOKENS"), help="print the bytes of one peak")
    parser.add_argument("--out", type=Path, default=RESULTS / "readout.json")
    arguments = parser.parse_args()
    if arguments.peak:
        method, batch, n_tokens = arguments.peak
        print(extra_peak(method, int(batch), int(n_tokens)))
        return
    seconds = speed(arguments.tokens, arguments.turns)
    say(seconds, "second")
    store(arguments.out, seconds, "second")
    for name, of in PEAKS.items():
        found = in_children("benchmarks.readout", ["--peak", *map(str, of)], 5 if of[2] == 1024 else 3, EXACT)
        peaks = {name: [number for (number,) in found]}
        say(peaks, "byte")
        store(arguments.out, peaks, "byte")


if __name__ == "__main__":
    main()
