"""What a call may take where nobody says: a share of what is free."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iglens_tl import NEXT, TokenSet, _memory, compare, ig_lens, logit_lens
from iglens_tl._checks import memory_size
from iglens_tl._core.levels import FIELDS_OF
from iglens_tl._core.readout import DEFAULT_BUDGET, Readout
from iglens_tl._core.segments import Path, integrate, read_states, read_steps
from iglens_tl._core.spectrum import read_spectrum
from iglens_tl._core.states import States
from iglens_tl._model.head import readout_of
from iglens_tl._model.host import host_of
from tests.subjects import each_kind, one_kind, subject, tiny

CPU = torch.device("cpu")


def test_an_eighth_of_what_is_free_and_no_more_than_the_most(monkeypatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=800))
    assert _memory.share_of_free(CPU, 1000) == 100
    assert _memory.share_of_free(CPU, 60) == 60
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert _memory.share_of_free(CPU, 60) == 1, "a call that must fail is to fail by itself, with torch's words"


def test_of_a_gpu_what_torch_keeps_and_does_not_use_is_free(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert _memory.free_memory(torch.device("cuda", 1)) == 1400


@one_kind
@pytest.mark.parametrize(("free", "budget"), [(80_000, 10_000), (2**40, DEFAULT_BUDGET)], ids=["little", "plenty"])
def test_a_readout_takes_a_share_of_what_is_free(kind, free, budget, monkeypatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert readout_of(host_of(subject(kind).model)).budget == budget


class Ledger(TorchDispatchMode):
    """The most bytes that tensors made inside have held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        came = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        out = operation(*args, **(kwargs or {}))
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in came and storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return out


def tensors(of: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


SHAPES = {"many words": (16, 20_000, 60), "a wide model": (2048, 600, 200)}
"""Width, words, tokens: logits are most of it, or the states are."""

STATES = 5
READINGS: dict[str, Callable[[Readout, Path], object]] = {
    "tiles": read_states,
    "cast in tiles": lambda readout, path: read_states(replace(readout, dtype=torch.float64), path),
    "whole rows": lambda readout, path: read_states(replace(readout, linear=None), path),
    "soft-cap": lambda readout, path: read_states(replace(readout, transform=soft_cap), path),
    "a near-certain target": lambda readout, path: read_states(replace(readout, linear=None, norm=certain), path),
    "integrated, near-certain": lambda readout, path: integrate(
        replace(readout, norm=certain), path, "log_odds", "midpoint", 2
    ),
    "steps": lambda readout, path: read_steps(readout, path, torch.zeros(STATES, path.n_tokens), "prob", 3),
    "integrated": lambda readout, path: integrate(readout, path, "prob", "midpoint", 2),
    "integrated under a soft-cap": lambda readout, path: integrate(
        replace(readout, transform=soft_cap), path, "prob", "midpoint", 2
    ),
    "spectrum": lambda readout, path: read_spectrum(readout, path, 5),
}


def soft_cap(logits: torch.Tensor) -> torch.Tensor:
    return 30.0 * torch.tanh(logits / 30.0)


def certain(rows: torch.Tensor) -> torch.Tensor:
    return 300 * layer_norm(rows)


def layer_norm(rows: torch.Tensor) -> torch.Tensor:
    """As TransformerLens writes it out, with all that it makes on the way."""
    centred = rows - rows.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return (centred / scale) * torch.ones(rows.shape[-1], dtype=rows.dtype) + torch.zeros(
        rows.shape[-1], dtype=rows.dtype
    )


@pytest.mark.parametrize("budget", [2_000_000, 8_000_000], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reading", READINGS)
def test_reading_takes_no_more_than_it_may(reading, shape, budget) -> None:
    width, words, n_tokens = SHAPES[shape]
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(width, words, generator=draw)

    def unembed(rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(rows, weight, out=out)

    readout = Readout(layer_norm, unembed, None, width, words, CPU, torch.float32, (weight, None), budget)
    path = Path(
        [torch.randn(n_tokens, width, generator=draw) for _ in range(STATES)], [torch.arange(n_tokens)[:, None]]
    )
    with Ledger() as ledger:
        READINGS[reading](readout, path)
    results = 150 * n_tokens * STATES  # what is found of every row, and its copies in another order
    assert 0.1 * budget < ledger.peak <= budget + results


class Shifted(States):
    """One state for many: each is the first one with its own number added, so that no two rows are alike."""

    def rows(self, index: int, tokens: torch.Tensor) -> torch.Tensor:
        return super().rows(index, tokens) + index


def test_four_times_the_tokens_take_the_same_memory() -> None:
    peaks = []
    for n_tokens in (1024, 4096):
        draw = torch.Generator().manual_seed(0)
        weight, state = torch.randn(576, 1000, generator=draw), torch.randn(n_tokens, 576, generator=draw)
        readout = Readout(layer_norm, torch.matmul, None, 576, 1000, CPU, torch.float32, (weight, None))
        path = Path(Shifted([state] * 31), [torch.zeros(n_tokens, 1, dtype=torch.int64)])
        with Ledger() as ledger:
            read_states(readout, path, fields=FIELDS_OF["prob"])
        peaks.append(ledger.peak)
    kept = 9 * 31 * 3 * 1024  # bytes more that are kept of the rows: others make room for them
    assert max(peaks) <= 1.05 * min(peaks) < min(peaks) + kept < 20e6


def test_what_is_kept_of_many_rows_leaves_half_for_those_that_are_read() -> None:
    readout = Readout(layer_norm, torch.matmul, None, 576, 1000, CPU, torch.float32, (torch.zeros(576, 1000), None))
    for each in (readout, replace(readout, linear=None)):
        alone, beside = each.tile(10**9)[0], each.tile(10**9, kept=10**10)[0]
        # half of what may be taken is left, a part of it for what is made of whole rows of logits
        assert alone // 3 <= beside < alone, "reading one row at a time would take for ever"


CALLS: dict[str, Callable[..., object]] = {
    "default": ig_lens,
    "float64": partial(ig_lens, dtype=torch.float64),
    "bfloat16": partial(ig_lens, dtype=torch.bfloat16),
    "the next token": partial(ig_lens, targets=NEXT),
    "incorrect targets": partial(ig_lens, targets=7, incorrect_targets=8),
    "steps": partial(ig_lens, n_steps=3),
    "integrated": partial(ig_lens, estimator="gauss_legendre", n_steps=1, layers=[1]),
    "integrated in float64": partial(ig_lens, estimator="gauss_legendre", n_steps=1, layers=[1], dtype=torch.float64),
    "a set of words": partial(ig_lens, targets=TokenSet(range(500))),
    "two sets": partial(ig_lens, targets=TokenSet(range(500)), incorrect_targets=TokenSet(range(1000, 1500))),
    "a mean baseline": partial(ig_lens, baseline="mean"),
    "logit_lens": logit_lens,
    "compare": compare,
}


@functools.cache
def asked(kind: str, width: int) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """A model with many words, a cache of two prompts, their tokens and logits."""
    model = tiny(kind, d_vocab=8_000, d_model=width, n_heads=4, d_head=width // 4)
    tokens = (torch.arange(40).reshape(2, 20) * 331) % 8_000
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    return model, cache, tokens, logits


@pytest.mark.parametrize(("width", "budget"), [(32, "500kB"), (512, "2MB")])
@pytest.mark.parametrize("said", [None, torch.float32, torch.float16], ids=["no logits", "logits", "half logits"])
@pytest.mark.parametrize("call", CALLS)
@each_kind
def test_a_call_takes_no_more_than_max_memory(kind, call, said, width, budget) -> None:
    _, cache, tokens, logits = asked(kind, width)
    given = {} if said is None else {"logits": logits.to(said)}
    with Ledger() as ledger:
        CALLS[call](cache, tokens, positions=None, max_memory=budget, **given)
    n_rows = 40 * len(cache_states(cache))
    results = 150 * n_rows
    ids = 5 * 8 * 500 * 40
    results += {"a set of words": ids, "two sets": 2 * ids, "a mean baseline": 8 * width * 40}.get(call, 0)
    assert ledger.peak <= memory_size(budget) + results


@pytest.mark.parametrize("most", ["2MB", None])
def test_many_rows_are_looked_through_a_few_at_a_time(most) -> None:
    model = tiny(d_vocab=50, d_model=512, n_heads=1, d_head=8, d_mlp=8, n_ctx=512)
    tokens = torch.arange(16 * 512).reshape(16, 512) % 50
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: "resid" in name)
    state = cache["resid_pre", 0].nbytes
    with Ledger() as ledger:
        ig_lens(cache, tokens, targets=NEXT, positions=None, max_memory=most)
    results = 60 * len(cache_states(cache)) * tokens.numel()
    tiles = 2e6 if most else 8e6  # by itself: 512 rows in six copies of 512 numbers, and a tile of 1 MB
    assert ledger.peak <= tiles + results < state


@pytest.mark.parametrize("with_logits", [False, True], ids=["no logits", "logits"])
def test_four_times_the_tokens_take_a_call_the_same_memory(with_logits) -> None:
    model = tiny(d_vocab=300, d_model=576, n_layers=30, n_heads=1, d_head=8, d_mlp=8, n_ctx=1024)
    peaks = []
    for n_prompts in (1, 4):
        tokens = torch.randint(0, 300, (n_prompts, 1024), generator=torch.Generator().manual_seed(n_prompts))
        with torch.no_grad():
            logits, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(("_pre", "_post")))
        given = {"logits": logits} if with_logits else {}
        with Ledger() as ledger:
            ig_lens(cache, tokens, targets=NEXT, positions=None, **given)
        peaks.append(ledger.peak)
    assert peaks[1] <= 1.1 * peaks[0]


def cache_states(cache: Any) -> list[str]:
    return [name for name in cache if name.endswith(("hook_resid_pre", "hook_resid_post"))]
