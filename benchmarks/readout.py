"""What the default call costs: rows read, time against the bare matrix product of the same rows, extra peak memory.

Run with `make bench` or `python benchmarks/readout.py [--tokens 256] [--repeats 5] [--out FILE]`. Times are of one process,
interleaved, medians; peaks are `VmHWM` of a child process, reset after the model's own forward pass (Linux).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from iglens_tl import NEXT, ig_lens
from iglens_tl._core import readout as core
from iglens_tl._core.readout import Readout
from iglens_tl.demo import demo_model

TEXT = (
    "The harbour town had two clocks, and they had disagreed for as long as anyone could remember. One hung above the "
    "customs house and was wound by the council; the other belonged to the fishermen and was right. "
)


def tokens_of(model: Any, length: int) -> torch.Tensor:
    """A prompt of exactly `length` tokens."""
    ids = model.to_tokens(TEXT, prepend_bos=False)[0]
    return ids.repeat(length // len(ids) + 1)[:length][None]


def residual_cache(model: Any, tokens: torch.Tensor) -> Any:
    layers = model.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(layers)] + [f"blocks.{layers - 1}.hook_resid_post"]
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=names, return_type=None)[1]


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


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def speed(n_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of the call and of the bare product, their ratio, and the rows read."""
    model = demo_model()
    tokens = tokens_of(model, n_tokens)
    cache = residual_cache(model, tokens)
    product = bare_product(model, cache)

    def call() -> object:
        return ig_lens(cache, tokens, targets=0, positions=None)

    rows = count_rows(call)
    expected = (model.cfg.n_layers + 1) * n_tokens
    assert rows == expected, f"{rows} rows read, {expected} expected"
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(repeats):
        bare.append(timed(product))
        ours.append(timed(call))
    return {
        "tokens": n_tokens,
        "states": model.cfg.n_layers + 1,
        "rows": rows,
        "seconds_call": statistics.median(ours),
        "seconds_bare_product": statistics.median(bare),
        "ratio": statistics.median(a / b for a, b in zip(ours, bare, strict=True)),
    }


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def peak(n_tokens: int) -> dict[str, Any]:
    """Extra peak of the call beyond the stored states and the model's own forward, in MB; run in a process of its own."""
    model = demo_model()
    tokens = tokens_of(model, n_tokens)
    cache = residual_cache(model, tokens)
    ig_lens(cache, tokens[:, :8] if n_tokens < 8 else tokens, targets=0, positions=0, layers=1)  # warm up
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM to what is resident now
    before = _peak_kib()
    ig_lens(cache, tokens, targets=NEXT, positions=None)
    return {"tokens": n_tokens, "states": model.cfg.n_layers + 1, "extra_peak_mb": (_peak_kib() - before) * 1024 / 1e6}


def peak_in_child(n_tokens: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(n_tokens)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(names),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_lens": version("transformer_lens"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", type=int, help="measure the peak for this many tokens and print it as JSON")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.peak:
        print(json.dumps(peak(arguments.peak)))
        return
    peaks = [peak_in_child(n_tokens) for n_tokens in (1024, 4096)]
    report = {
        "machine": machine(),
        "speed": speed(arguments.tokens, arguments.repeats),
        "memory": peaks,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
