"""What a call may take where nobody says: a share of what is free."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from iglens_tl import _memory
from iglens_tl._core.readout import DEFAULT_BUDGET
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
