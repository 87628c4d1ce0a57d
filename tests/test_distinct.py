"""Rows that ask the same question are read once, and only those."""

from __future__ import annotations

import pytest
import torch

from iglens_tl import NEXT, ig_lens
from iglens_tl._core import distinct as module
from iglens_tl._core.distinct import distinct
from tests.subjects import N_LAYERS, cached, each_kind, subject
from tests.test_tiles import all_read, counted, made

ONE, OTHER = [2, 5, 7, 5, 11, 3], [2, 5, 7, 13, 6, 4]  # a common beginning of three tokens; 5 occurs twice


def found(states: torch.Tensor, *groups: torch.Tensor, at_a_time: int = 3) -> tuple[list[int], list[int]]:
    kinds = distinct(lambda i: states[i], lambda i: [group[i] for group in groups], len(states), at_a_time)
    everyone = list(range(len(states)))
    return (everyone, everyone) if kinds is None else (kinds[0].tolist(), kinds[1].tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_first_of_each_kind_in_order(dtype) -> None:
    a, b, c = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = torch.stack([b, a, b, c, a, a, b])
    ids = torch.tensor([[4, -1], [4, 2], [4, -1], [4, 2], [4, 2], [1, 2], [4, -1]])
    assert found(states, ids) == ([0, 1, 3, 5], [0, 1, 0, 2, 1, 3, 0])
    assert found(states[:2], ids[:2]) == ([0, 1], [0, 1])


def test_one_bit_or_one_target_makes_a_difference() -> None:
    state = torch.randn(8, generator=torch.Generator().manual_seed(1))
    near = state.clone()
    near[3] = torch.nextafter(near[3], torch.tensor(9.0))
    same = torch.full((2, 1), 4)
    assert found(torch.stack([state, near]), same)[0] == [0, 1]
    assert found(torch.stack([state, state]), same)[0] == [0]
    assert found(torch.stack([state, state]), torch.tensor([[4], [5]]))[0] == [0, 1]
    assert found(torch.stack([state, state]), same, torch.tensor([[1], [2]]))[0] == [0, 1], "the incorrect ones as well"
    swapped = torch.stack([state, state.flip(0)])
    assert found(swapped, same)[0] == [0, 1], "the order of a state's numbers counts"


def test_rows_of_one_key_are_compared(monkeypatch) -> None:
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(module, "_keys", lambda rows, groups: torch.zeros(len(rows), dtype=torch.int64))
    assert found(states, torch.zeros(5, 1, dtype=torch.long)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


def test_what_is_read_once_is_said_of_all() -> None:
    readout, rows, _ = made(torch.float64, True)
    ids = torch.arange(len(rows))[:, None]
    again = torch.tensor([3, 0, 3, 3, 1, 0, 699])
    alone = all_read(readout, rows, [ids])
    levels = all_read(readout, rows[again], [ids[again]])
    for metric in ("prob", "log_prob", "log_odds", "logit"):
        # the same numbers, of a product of another number of rows
        torch.testing.assert_close(levels.value(metric), alone.value(metric)[again], rtol=1e-12, atol=1e-14)
    assert torch.equal(levels.is_top, alone.is_top[again])


def questions(model, tokens: torch.Tensor) -> int:
    """How many different states there are to read: of what a cache holds, by their bytes."""
    cache = cached(model, tokens)
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(N_LAYERS)]
    states = [cache[name] for name in (*names, f"blocks.{N_LAYERS - 1}.hook_resid_post")]
    return len({row.numpy().tobytes() for state in states for row in state.reshape(-1, state.shape[-1])})


@each_kind
def test_a_common_beginning_is_read_once(kind, monkeypatch) -> None:
    model = subject(kind).model
    both = torch.tensor([ONE, OTHER])
    n_states = N_LAYERS + 1
    expected = questions(model, both)
    assert expected <= n_states * (2 * len(ONE) - 3)
    rows, _ = counted(lambda: ig_lens(model, both, targets=7, positions=None), monkeypatch)
    assert rows == expected
    together = ig_lens(model, both, targets=7, positions=None)
    assert torch.equal(together.values[:, 0, :3], together.values[:, 1, :3])
    for row, prompt in enumerate((ONE, OTHER)):
        single = ig_lens(model, torch.tensor([prompt]), targets=7, positions=None)
        # float32: the forward pass of a batch is not that of one prompt to the last bit
        assert together.values[:, row] == pytest.approx(single.values[:, 0], abs=1e-6)
    # the next token differs where the common beginning ends: one state, two questions
    following, _ = counted(lambda: ig_lens(model, both, targets=NEXT, positions=None), monkeypatch)
    assert following >= n_states * (2 * (len(ONE) - 1) - 2) - 2


@each_kind
def test_a_zero_baseline_is_read_once_a_target(kind, monkeypatch) -> None:
    model, tokens = subject(kind).model, torch.tensor([ONE])
    of = {"positions": None, "baseline": "zero"}
    zero = ig_lens(model, tokens, targets=7, **of)
    assert (zero.values[0] == zero.values[0, 0, 0]).all()
    rows, _ = counted(lambda: ig_lens(model, tokens, targets=7, **of), monkeypatch)
    assert rows == N_LAYERS * len(ONE) + 1
    targets = torch.tensor([[1, 2, 1, 1, 2, 3]])
    several, _ = counted(lambda: ig_lens(model, tokens, targets=targets, **of), monkeypatch)
    assert several == N_LAYERS * len(ONE) + 3
    steps = ig_lens(model, tokens, targets=7, n_steps=3, **of)
    assert steps.attribution == pytest.approx(zero.attribution, abs=1e-6)  # float32 sums of more differences
