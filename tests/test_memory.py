"""What a call may take where nobody says: a share of what is free."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iglens_tl import _memory
from iglens_tl._core.readout import DEFAULT_BUDGET, Readout
from iglens_tl._core.segments import Path, read_states
from iglens_tl._core.spectrum import read_spectrum
from iglens_tl._model.head import readout_of
from iglens_tl._model.host import host_of
from tests.subjects import one_kind, subject

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
    assert readout_of(host_of(subject(kind).model)).default_budget == budget


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


WORDS, WIDTH, TOKENS, STATES = 20_000, 16, 60, 5
READINGS = {
    "tiles": read_states,
    "whole rows": lambda readout, path, budget: read_states(dataclasses.replace(readout, linear=None), path, budget),
    "soft-cap": lambda readout, path, budget: read_states(
        dataclasses.replace(readout, transform=torch.tanh), path, budget
    ),
    "spectrum": lambda readout, path, budget: read_spectrum(readout, path, 5, budget),
}


@pytest.mark.parametrize("budget", [2_000_000, 8_000_000, None], ids=str)
@pytest.mark.parametrize("reading", READINGS)
def test_reading_takes_no_more_than_it_may(reading, budget) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WORDS, generator=draw)

    def unembed(rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(rows, weight, out=out)

    readout = Readout(lambda rows: rows, unembed, None, WIDTH, WORDS, CPU, torch.float32, (weight, None), 3_000_000)
    path = Path([torch.randn(TOKENS, WIDTH, generator=draw) for _ in range(STATES)], [torch.arange(TOKENS)[:, None]])
    with Ledger() as ledger:
        READINGS[reading](readout, path, budget)
    allowed = readout.default_budget if budget is None else budget
    results = 20 * 8 * TOKENS * STATES  # what is found of every row, and its copies in another order
    assert WORDS * 4 <= ledger.peak <= allowed + results
