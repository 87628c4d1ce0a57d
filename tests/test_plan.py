"""The pure part of a call: which states, segments and positions are meant, and the argument checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iglens_tl import _checks
from iglens_tl._model.states import hook_name, prefix_mean, rows_at
from iglens_tl._plan import PositionPlan, plan_positions, plan_states, segment_label, state_label

many = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# --- States and segments -----------------------------------------------------------------------------------------


def test_states_have_transformer_lens_names() -> None:
    names = [state_label(half, 3) for half in range(7)]
    assert names == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"]


@pytest.mark.parametrize(
    ("start", "end", "label"),
    [
        (0, 2, "0"),
        (6, 8, "3"),
        (6, 14, "3-6"),
        (0, 24, "0-11"),
        (6, 7, "3_attn"),
        (7, 8, "3_mlp"),
        (6, 9, "3-4_attn"),
        (7, 9, "3_mlp-4_attn"),
        (7, 10, "3_mlp-4"),
        (7, 13, "3_mlp-6_attn"),
    ],
)
def test_a_segment_is_named_by_what_lies_in_it(start: int, end: int, label: str) -> None:
    assert segment_label(start, end) == label


@pytest.mark.parametrize(
    ("half", "name"),
    [
        (0, "blocks.0.hook_resid_pre"),
        (1, "blocks.0.hook_resid_mid"),
        (4, "blocks.2.hook_resid_pre"),
        (6, "blocks.2.hook_resid_post"),
    ],
)
def test_every_state_has_its_hook(half: int, name: str) -> None:
    assert hook_name(half, 3) == name


PLANS: list[tuple[Any, bool, str, list[int]]] = [
    (None, False, "embed", [0, 2, 4, 6, 8]),
    (None, True, "embed", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    (None, False, "zero", [2, 4, 6, 8]),
    (None, True, "zero", [1, 2, 3, 4, 5, 6, 7, 8]),
    (1, False, "embed", [0, 8]),
    (2, False, "embed", [0, 4, 8]),
    (4, False, "embed", [0, 2, 4, 6, 8]),
    (2, False, "mean", [4, 8]),
    ([0], False, "embed", [0, 8]),
    ([0], False, "zero", [0, 8]),
    ([4], False, "zero", [8]),
    ([3, 1, 3], False, "embed", [0, 2, 6, 8]),
    (("3_mid", "0_post", "final_post"), False, "embed", [0, 2, 7, 8]),
    (range(1, 4), False, "embed", [0, 2, 4, 6, 8]),
    (np.array([1, 2]), False, "embed", [0, 2, 4, 8]),
    (torch.tensor([1, 2]), False, "embed", [0, 2, 4, 8]),
    ([np.int64(1), torch.tensor(2), "3_pre"], False, "embed", [0, 2, 4, 6, 8]),
    (np.int64(2), False, "embed", [0, 4, 8]),
]


@pytest.mark.parametrize(("layers", "incl_mid", "base", "halves"), PLANS, ids=str)
def test_layers_settle_into_states(layers: Any, incl_mid: bool, base: str, halves: list[int]) -> None:
    plan = plan_states(layers, incl_mid, base, 4)
    assert plan.halves == tuple(halves)
    assert len(plan.state_labels) == len(plan.segment_labels) + 1 == len(plan.hidden_states) + 1
    assert plan.state_labels[-1] == "final_post"
    assert plan.hidden_states[-1] == 4
    assert plan.state_labels[0] == ("0_pre" if base == "embed" else base)
    assert ("base" in plan.segment_labels) == (base != "embed")


@pytest.mark.parametrize(
    "layers",
    [[], (), torch.tensor([], dtype=torch.long), [5], [-1], ["4_pre"], ["1_attn"], ["x"], [True], [1.0]],
    ids=str,
)
def test_states_that_the_model_does_not_have(layers: Any) -> None:
    with pytest.raises(ValueError, match="layers must name states 0 to 4"):
        plan_states(layers, False, "embed", 4)


def test_every_offender_is_named_and_a_long_list_is_cut() -> None:
    with pytest.raises(ValueError, match=r"got 5, 6, 7, 8, 9, 10, \.\.\. \(15 in all\)"):
        plan_states(list(range(20)), False, "embed", 4)


@many
@given(n_layers=st.integers(1, 60), data=st.data())
def test_a_number_of_segments_is_met_and_evenly_spread(n_layers: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n_layers))
    plan = plan_states(k, False, "embed", n_layers)
    assert len(plan.segment_labels) == k
    lengths = {(b - a) // 2 for a, b in zip(plan.halves[:-1], plan.halves[1:], strict=True)}
    assert all(half % 2 == 0 for half in plan.halves)
    assert plan.halves[-1] == 2 * n_layers
    assert max(lengths) - min(lengths) <= 1
    with_base = plan_states(k, False, "zero", n_layers)
    assert with_base.halves == plan.halves[1:]


@many
@given(n_layers=st.integers(1, 40), data=st.data())
def test_labels_name_the_states_that_they_came_from(n_layers: int, data: st.DataObject) -> None:
    halves = sorted(data.draw(st.sets(st.integers(0, 2 * n_layers))) | {0, 2 * n_layers})
    plan = plan_states([state_label(half, n_layers) for half in halves], False, "embed", n_layers)
    assert plan.halves == tuple(halves)
    assert len(set(plan.segment_labels)) == len(plan.segment_labels)
    assert plan.hidden_states == tuple(None if half % 2 else half // 2 for half in halves[1:])


# --- Positions ---------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("positions", "index"),
    [
        (-1, [[3], [3], [0]]),
        (0, [[0], [2], [0]]),
        ([-1, 0], [[3, 0], [3, 2], [0, 0]]),
        (slice(None), [[0, 1, 2, 3], [2, 3, -1, -1], [0, -1, -1, -1]]),
        (slice(1, None), [[1, 2, 3], [3, -1, -1], [-1, -1, -1]]),
        (slice(None, None, -2), [[3, 1], [3, -1], [0, -1]]),
        (slice(3, 4), [[3], [-1], [-1]]),
        (None, [[0, 1, 2, 3], [-1, -1, 2, 3], [0, -1, -1, -1]]),
        (np.int64(-1), [[3], [3], [0]]),
        (np.array([-1, 0]), [[3, 0], [3, 2], [0, 0]]),
        (torch.tensor(0), [[0], [2], [0]]),
        (range(-1, 0), [[3], [3], [0]]),
    ],
    ids=str,
)
def test_positions_settle_into_an_index_and_a_mask(positions: Any, index: list[list[int]]) -> None:
    plan = plan_positions(positions, MASK)
    assert plan.index.tolist() == index
    assert torch.equal(plan.mask, plan.index >= 0)
    batch, pos = plan.rows
    assert [(b, p) for b, p in zip(batch.tolist(), pos.tolist(), strict=True)] == [
        (b, p) for b, row in enumerate(index) for p in row if p >= 0
    ]


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        (1, "prompt 2 has 1 tokens and no position 1"),
        (-3, "prompt 1 has 2 tokens and no position -3, prompt 2 has 1 tokens"),
        ([0, 4], "prompt 0 has 4 tokens and no position 4"),
        (slice(9, 12), r"slice\(9, 12, None\) selects no token of any prompt \(lengths 4, 2, 1\)"),
    ],
)
def test_positions_that_a_prompt_does_not_have(positions: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_positions(positions, MASK)


@pytest.mark.parametrize(
    "positions", ["-1", 1.0, True, [], [True], [1.5], {1}, torch.tensor([[1]]), torch.ones(1)], ids=str
)
def test_positions_of_another_type(positions: Any) -> None:
    with pytest.raises(TypeError, match="positions must be None, a whole number, a list of them or a slice"):
        plan_positions(positions, MASK)


def test_a_plan_does_not_share_the_mask() -> None:
    mask = MASK.clone()
    plan = plan_positions(None, mask)
    mask[:] = False
    assert torch.equal(plan.mask, MASK)


def test_rows_can_be_left_out() -> None:
    plan = PositionPlan(torch.tensor([[0, 1], [2, -1]]), torch.tensor([[True, True], [True, False]]))
    fewer = plan.without(torch.tensor([[False, True], [False, True]]))
    assert fewer.index.tolist() == [[0, -1], [2, -1]]
    assert fewer.mask.tolist() == [[True, False], [True, False]]


def test_rows_and_prefix_means_of_a_state() -> None:
    state = torch.arange(24.0).reshape(3, 4, 2)
    batch, pos = torch.tensor([0, 1, 1, 2]), torch.tensor([2, 2, 3, 0])
    assert rows_at(batch, pos)(state).tolist() == [[4, 5], [12, 13], [14, 15], [16, 17]]
    assert prefix_mean(MASK, batch, pos)(state).tolist() == [[2, 3], [12, 13], [13, 14], [16, 17]]
    state[1, :2] = float("nan")  # what stands on padding is not added, whatever it is
    assert prefix_mean(MASK, batch, pos)(state).tolist() == [[2, 3], [12, 13], [13, 14], [16, 17]]


# --- Argument checks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "size"),
    [
        (None, None), (1, 1), (1024, 1024), (1e9, 10**9), (2.9, 2), ("1", 1), ("1B", 1), ("2GB", 2 * 10**9), ("2 gb", 2 * 10**9),
        ("512MiB", 2**29), ("512 MIB", 2**29), ("1.5KiB", 1536), ("3kb", 3000), (".5GB", 5 * 10**8), (" 1GiB ", 2**30),
        (np.int64(7), 7),
    ],
)  # fmt: skip
def test_sizes_of_memory(given_: Any, size: int | None) -> None:
    assert _checks.memory_size(given_) == size


@pytest.mark.parametrize(
    "given_", [0, -1, 0.5, "0", "0GB", "GB", "2 TB", "1e9", "2G", "-2GB", "two", "", float("nan"), float("inf")]
)
def test_sizes_that_are_none(given_: Any) -> None:
    with pytest.raises(ValueError, match="max_memory"):
        _checks.memory_size(given_)


@pytest.mark.parametrize("given_", [True, [1], b"2GB", (1,)])
def test_sizes_of_another_type(given_: Any) -> None:
    with pytest.raises(TypeError, match=r'max_memory must be bytes, a size such as "2GB", or None; got'):
        _checks.memory_size(given_)


def test_whole_numbers() -> None:
    assert _checks.whole_number("n", np.int64(3), 1) == 3
    assert type(_checks.whole_number("n", np.int64(3), 1)) is int
    with pytest.raises(ValueError, match=r"n must be at least 1, got 0\."):
        _checks.whole_number("n", 0, 1)
    with pytest.raises(ValueError, match=r"n must be between 1 and 3, got 4\."):
        _checks.whole_number("n", 4, 1, 3)
    for other in (True, 2.0, "2", None):
        with pytest.raises(TypeError, match="n must be a whole number, got"):
            _checks.whole_number("n", other, 1)


def test_fractions() -> None:
    assert _checks.fraction("x", 1) == 1.0
    for other in (0, 1.01, -0.5, True, "0.5", None, float("nan")):
        with pytest.raises(ValueError, match=r"x must be a number in \(0, 1\], got"):
            _checks.fraction("x", other)


def test_choices() -> None:
    assert _checks.one_of("x", "a", ("a", "b")) == "a"
    for other in ("c", None, 1, ["a"]):
        with pytest.raises(ValueError, match="x must be one of 'a', 'b'; got"):
            _checks.one_of("x", other, ("a", "b"))


def test_long_lists_are_cut_and_their_length_said() -> None:
    assert _checks.shorten([1, 2, 3]) == "1, 2, 3"
    assert _checks.shorten(range(9)) == "0, 1, 2, 3, 4, 5, ... (9 in all)"
    assert _checks.shorten("abc", 2) == "a, b, ... (3 in all)"


def test_numpy_and_torch_numbers_as_pythons_own() -> None:
    assert _checks.plain(np.arange(3)) == [0, 1, 2]
    assert _checks.plain(torch.tensor(3)) == 3
    assert _checks.plain("3") == "3"
    assert _checks.plain(None) is None
