"""The default call beside its neighbours, and how it grows: ratios of one process, interleaved, medians.

    stacked     64-step stacked interpolation, the published algorithm: every segment's 65 points through norm, unembedding and
                softmax
    logit_lens  TransformerLens 4's own `logit_lens(return_type="probs")` of the same states (where it exists)
    captum      LayerIntegratedGradients and LayerConductance on a few layers, 16 steps
    growth      the call's time as tokens, layers or the batch double; the readout's as the vocabulary doubles
    import      `import iglens_tl` on top of `import transformer_lens`

Run with `make bench` or `python benchmarks/neighbours.py [--out FILE]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.readout import machine, residual_cache, timed, tokens_of
from iglens_tl import ig_lens, layer_conductance, layer_integrated_gradients
from iglens_tl._core.readout import Readout, read
from iglens_tl.demo import demo_model

STEPS, TARGET = 64, 7042


def ratio(other: Callable[[], object], ours: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds of both, and the median of their ratios, one after the other."""
    pairs = [(timed(other), timed(ours)) for _ in range(repeats)]
    return {
        "seconds_other": statistics.median(pair[0] for pair in pairs),
        "seconds_ours": statistics.median(pair[1] for pair in pairs),
        "ratio_other_to_ours": statistics.median(a / b for a, b in pairs),
    }


def stacked(model: Any, cache: Any, chunk: int = 256) -> Callable[[], torch.Tensor]:
    """All 64-step points of every segment, one row each, through the head; credits by differences."""
    layers = model.cfg.n_layers
    states = torch.stack([cache["resid_pre", i][0] for i in range(layers)] + [cache["resid_post", layers - 1][0]])

    def call() -> torch.Tensor:
        fractions = torch.linspace(0, 1, STEPS + 1)[:, None, None]
        credits: list[torch.Tensor] = []
        with torch.no_grad():
            for start, end in pairwise(states):
                points = torch.lerp(start, end, fractions).reshape(-1, start.shape[-1])
                shares = [
                    model.unembed(model.ln_final(part[None]))[0].softmax(-1)[:, TARGET] for part in points.split(chunk)
                ]
                credits.append(torch.cat(shares).reshape(STEPS + 1, -1).diff(dim=0).sum(0))
        return torch.stack(credits)

    return call


def neighbours(repeats: int) -> dict[str, Any]:
    model = demo_model()
    found: dict[str, Any] = {}
    few = tokens_of(model, 8)
    cache = residual_cache(model, few)

    def ours() -> Any:
        return ig_lens(cache, few, targets=TARGET, positions=None)

    other = stacked(model, cache)
    assert torch.allclose(other().double(), ours().attribution[:, 0], atol=1e-4), "the two say different things"
    found["stacked, 8 tokens"] = ratio(other, ours, repeats)
    found.update(own_logit_lens(model, repeats))
    for name, call in (
        ("layer_integrated_gradients", layer_integrated_gradients),
        ("layer_conductance", layer_conductance),
    ):

        def of_captum(call: Any = call) -> Any:
            return call(model, few, targets=TARGET, layers=[10, 20], n_steps=16)

        found[f"captum {name}, 3 segments, 8 tokens"] = ratio(
            of_captum, lambda: ig_lens(model, few, targets=TARGET, layers=[10, 20]), max(1, repeats // 2)
        )
    return found


def own_logit_lens(model: Any, repeats: int) -> dict[str, Any]:
    """TransformerLens's tool on 64 tokens x 31 states; it returns whole distributions, of which the target's is taken."""
    try:
        from transformer_lens.tools.analysis.logit_lens import logit_lens
    except ImportError:
        return {}
    tokens = tokens_of(model, 64)
    cache = residual_cache(model, tokens)

    def theirs() -> Any:
        return logit_lens(cache, positions=None, targets=torch.full((1, 64), TARGET), return_type="probs")

    def ours() -> Any:
        return ig_lens(cache, tokens, targets=TARGET, positions=None)

    theirs(), ours()
    return {"TransformerLens logit_lens, 64 tokens": ratio(theirs, ours, repeats)}


def growth(repeats: int) -> dict[str, Any]:
    """Seconds as one size doubles, in interleaved rounds."""
    model = demo_model()
    caches = {n: (tokens_of(model, n), residual_cache(model, tokens_of(model, n))) for n in (64, 128, 256)}
    batch = tokens_of(model, 64).expand(4, -1)
    in_batch = residual_cache(model, batch)
    calls: dict[str, Callable[[], object]] = {}
    for n, (tokens, cache) in caches.items():
        calls[f"tokens {n}"] = lambda t=tokens, c=cache: ig_lens(c, t, targets=TARGET, positions=None)
    for k in (15, 30):
        calls[f"segments {k}"] = lambda k=k: ig_lens(
            caches[128][1], caches[128][0], targets=TARGET, positions=None, layers=k
        )
    calls["batch 4 x 64 tokens"] = lambda: ig_lens(in_batch, batch, targets=TARGET, positions=None)
    for words in (24_576, 49_152):
        calls[f"vocabulary {words}"] = of_vocabulary(words)
    for call in calls.values():
        call()
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(repeats)]
    seconds = {name: statistics.median(each[name] for each in rounds) for name in calls}
    doubled = {
        "tokens 64 to 128": ("tokens 128", "tokens 64"),
        "tokens 128 to 256": ("tokens 256", "tokens 128"),
        "segments 15 to 30": ("segments 30", "segments 15"),
        "64 tokens to a batch of 4": ("batch 4 x 64 tokens", "tokens 64"),
        "vocabulary 24,576 to 49,152": ("vocabulary 49152", "vocabulary 24576"),
    }
    return {
        "seconds": seconds,
        "ratios": {name: statistics.median(each[a] / each[b] for each in rounds) for name, (a, b) in doubled.items()},
    }


def of_vocabulary(words: int, n_rows: int = 2048, d_model: int = 576) -> Callable[[], object]:
    weight = torch.randn(words, d_model).T
    rows, ids = torch.randn(n_rows, d_model), torch.zeros(n_rows, 1, dtype=torch.long)
    cpu = torch.device("cpu")

    def unembed(states: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(states, weight, out=out)

    readout = Readout(lambda x: x, unembed, None, d_model, words, cpu, torch.float32, (weight, None))
    return lambda: read(readout, lambda i: rows[i], lambda i: [ids[i]], n_rows)


def import_time(repeats: int) -> dict[str, float]:
    """Milliseconds that `import iglens_tl` and the first use of `ig_lens` take after `import transformer_lens`."""
    code = (
        "import time, transformer_lens; a = time.perf_counter(); import iglens_tl; b = time.perf_counter(); iglens_tl.ig_lens; "
        "print(b - a, time.perf_counter() - b)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(repeats)
    ]
    names = ("import_ms", "first_use_ms")
    return {name: 1000 * statistics.median(float(run[i]) for run in runs) for i, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = {
        "machine": machine(),
        "neighbours": neighbours(arguments.repeats),
        "growth": growth(arguments.repeats),
        "import": import_time(arguments.repeats),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
