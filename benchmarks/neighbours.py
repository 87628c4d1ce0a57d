"""The default call beside its neighbours, and how it grows: times of one process, in turn.

    python -m benchmarks.neighbours [--turns 5] [--out FILE]

- stacked: 64-step stacked interpolation, the published algorithm: every segment's 65 points through norm, unembedding, softmax
- logit_lens: TransformerLens 4's own `logit_lens(return_type="probs")` of the same states
- captum: LayerIntegratedGradients and LayerConductance of the same layers, 16 steps
- growth: the call as tokens, layers or the batch grow; the readout as the vocabulary doubles
- import: `import iglens_tl`, and its first use, after `import transformer_lens`
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformer_lens.tools.analysis.logit_lens import logit_lens  # TransformerLens 4

from benchmarks import RESULTS
from benchmarks.measuring import in_children, in_turn, prompt_of, residual_cache, say, store
from iglens_tl import ig_lens, layer_conductance, layer_integrated_gradients
from iglens_tl._core.readout import Readout, read
from iglens_tl.demo import demo_model

STEPS, TARGET, LAYERS = 64, 7042, [10, 20]


def stacked(model: Any, cache: Any, chunk: int = 256) -> torch.Tensor:
    """Credits `[segment, token]` by differences of 64-step points, one row each through the model's own head."""
    layers = model.cfg.n_layers
    states = torch.stack([cache["resid_pre", i][0] for i in range(layers)] + [cache["resid_post", layers - 1][0]])
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


def beside_stacked(model: Any, turns: int) -> dict[str, list[float]]:
    tokens = prompt_of(model, 8)
    cache = residual_cache(model, tokens)
    ours = partial(ig_lens, cache, tokens, targets=TARGET, positions=None)
    same = torch.allclose(
        stacked(model, cache).double(), ours().attribution[:, 0], atol=1e-4
    )  # torch's float32 softmax
    assert same, "the two say different things"
    return in_turn({"stacked, 8 tokens": partial(stacked, model, cache), "ig_lens, 8 tokens": ours}, turns)


def beside_logit_lens(model: Any, turns: int) -> dict[str, list[float]]:
    """TransformerLens is asked for the target's probability alone, and computes entropies and ranks as it always does."""
    tokens = prompt_of(model, 64)
    cache = residual_cache(model, tokens)
    ours = partial(ig_lens, cache, tokens, targets=TARGET, positions=None)
    target = torch.full((1, 64), TARGET)
    theirs = partial(logit_lens, cache, positions=None, targets=target, return_type="probs")
    found = theirs().values.double().cpu().reshape(-1, 64)
    assert torch.allclose(found, ours().values[:, 0], atol=1e-4), "the two say different things"
    return in_turn({"TransformerLens logit_lens, 64 tokens": theirs, "ig_lens, 64 tokens": ours}, turns)


def beside_captum(model: Any, turns: int) -> dict[str, list[float]]:
    tokens = prompt_of(model, 8)
    of = {"targets": TARGET, "layers": LAYERS}
    quiet = {**of, "n_steps": 16, "progress": False}
    return in_turn(
        {
            "captum LayerIntegratedGradients, 4 states": partial(layer_integrated_gradients, model, tokens, **quiet),
            "captum LayerConductance, 4 states": partial(layer_conductance, model, tokens, **quiet),
            "ig_lens with its forward pass, 3 segments": partial(ig_lens, model, tokens, **of),
        },
        turns,
    )


def growth(model: Any, turns: int) -> dict[str, list[float]]:
    calls: dict[str, Callable[[], object]] = {}
    for n in (64, 128, 256, 512):
        tokens = prompt_of(model, n)
        cache = residual_cache(model, tokens)
        calls[f"growth, {n} tokens"] = partial(ig_lens, cache, tokens, targets=TARGET, positions=None)
        if n == 128:
            calls["growth, 15 segments"] = partial(ig_lens, cache, tokens, targets=TARGET, positions=None, layers=15)
    batch = torch.cat([prompt_of(model, 64, row) for row in range(4)])
    mask = torch.ones_like(batch)
    of = {"targets": TARGET, "positions": None, "attention_mask": mask}
    calls["growth, 4 prompts of 64 tokens"] = partial(ig_lens, residual_cache(model, batch), batch, **of)
    for words in (24_576, 49_152):
        calls[f"growth, {words:,} words"] = of_vocabulary(words)
    return in_turn(calls, turns)


def of_vocabulary(words: int, n_rows: int = 2048, d_model: int = 576) -> Callable[[], object]:
    weight = torch.randn(words, d_model).T
    rows, ids = torch.randn(n_rows, d_model), torch.zeros(n_rows, 1, dtype=torch.long)

    def unembed(states: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(states, weight, out=out)

    cpu = torch.device("cpu")
    readout = Readout(lambda x: x, unembed, None, d_model, words, cpu, torch.float32, (weight, None))
    return partial(read, readout, lambda i: rows[i], lambda i: [ids[i]], n_rows)


def import_time(turns: int) -> dict[str, list[float]]:
    """Of modules that are compiled, as pip leaves them; an environment may keep Python from writing what it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        _, *found = in_children("benchmarks.imports", [], 1 + turns, compiled)
    return {"import iglens_tl": [each[0] for each in found], "first use of ig_lens": [each[1] for each in found]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "neighbours.json")
    arguments = parser.parse_args()
    model, turns = demo_model(), arguments.turns
    for measure, times in (
        (beside_stacked, turns), (beside_logit_lens, turns), (beside_captum, max(1, turns // 2)), (growth, turns),
    ):  # fmt: skip
        seconds = measure(model, times)
        say(seconds, "second")
        store(arguments.out, seconds, "second")
    seconds = import_time(turns)
    say(seconds, "second")
    store(arguments.out, seconds, "second")


if __name__ == "__main__":
    main()
