"""Properties that hold for every input, tried on many.

Mostly on the core, where a readout is three functions of rows and can be any; in float64 unless float32 is the point, so
that what differs is a mistake and not a rounding. Examples are drawn from a seed: the suite is the same every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iglens_tl import IGLensResult, ig_lens
from iglens_tl._core import readout as core
from iglens_tl._core.levels import PAD, Levels, levels_of_logits
from iglens_tl._core.quadrature import RULES, quadrature
from iglens_tl._core.readout import Readout, read, value_and_gradient
from iglens_tl._core.segments import Path, integrate, read_states, read_steps
from tests.models import BATCH
from tests.subjects import KINDS, N_LAYERS, cached, one_kind, residual_names, subject

many = settings(max_examples=60, deadline=None, derandomize=True, database=None)
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31 - 1)
sizes = st.sampled_from([1e-3, 0.1, 1.0, 10.0, 300.0])
metrics = st.sampled_from(["prob", "log_prob", "log_odds", "logit"])

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def permutation(seed: int, n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def readout_with(seed: int, d_model: int, d_vocab: int, cap: float | None = None, size: float = 1.0) -> Readout:
    """A LayerNorm, a linear map and perhaps a soft-cap, in float64."""
    weight, bias = size * draw(seed, d_model, d_vocab), draw(seed + 1, d_vocab)

    def norm(rows: torch.Tensor) -> torch.Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def unembed(rows: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        logits = rows @ weight + bias
        return logits if out is None else out.copy_(logits)

    transform = None if cap is None else lambda logits: cap * torch.tanh(logits / cap)
    return Readout(norm, unembed, transform, d_model, d_vocab, torch.device("cpu"), torch.float64)


@st.composite
def paths(draw_from: Any) -> tuple[Readout, Path]:
    """A readout, a few states of a few tokens, and their targets: single tokens, or sets of unequal size."""
    seed, n_states = draw_from(seeds), draw_from(st.integers(2, 6))
    n_tokens, d_vocab = draw_from(st.integers(1, 5)), draw_from(st.integers(4, 30))
    cap, size = draw_from(st.sampled_from([None, None, 3.0])), draw_from(sizes)
    readout = readout_with(seed, 6, d_vocab, cap, draw_from(st.sampled_from([0.3, 3.0])))
    states = [size * draw(seed + 2 + i, n_tokens, 6) for i in range(n_states)]
    order = torch.stack([permutation(seed + i, d_vocab) for i in range(n_tokens)])
    groups = [order[:, :2].clone(), order[:, 2:3]][: draw_from(st.integers(1, 2))]
    groups[0][:: draw_from(st.integers(1, 3)), 1] = PAD
    return readout, Path(states, groups)


def values_of(readout: Readout, path: Path, metric: str, budget: int | None = None) -> torch.Tensor:
    readout = readout if budget is None else dataclasses.replace(readout, budget=budget)
    return read_states(readout, path).value(metric).reshape(path.n_segments + 1, path.n_tokens)


# --- Segments ----------------------------------------------------------------------------------------------------


@many
@given(paths(), metrics, st.integers(1, 7))
def test_credits_and_steps_telescope(made: tuple[Readout, Path], metric: str, n_steps: int) -> None:
    readout, path = made
    values = values_of(readout, path, metric)
    credits = values.diff(dim=0)
    torch.testing.assert_close(credits.sum(0), values[-1] - values[0], **EXACT)
    steps = read_steps(readout, path, values, metric, n_steps)
    assert steps.shape == (path.n_segments, n_steps, path.n_tokens)
    torch.testing.assert_close(steps.sum(1), credits, **EXACT)


@many
@given(paths(), metrics, st.data())
def test_a_segment_can_be_split_anywhere(made: tuple[Readout, Path], metric: str, data: st.DataObject) -> None:
    """The credit of a way is the sum of its parts'."""
    readout, path = made
    last = path.n_segments
    kept = sorted({0, last, *data.draw(st.sets(st.integers(0, last)))})
    whole = values_of(readout, path, metric).diff(dim=0)
    coarse = values_of(readout, Path([path.states[k] for k in kept], path.groups), metric).diff(dim=0)
    parts = [whole[a:b].sum(0) for a, b in pairwise(kept)]
    torch.testing.assert_close(coarse, torch.stack(parts), **EXACT)


@many
@given(paths(), metrics, st.sampled_from(RULES), st.integers(1, 6))
def test_swapping_the_ends_flips_every_sign(made: tuple[Readout, Path], metric: str, rule: str, n_steps: int) -> None:
    readout, path = made
    back = Path(list(reversed(path.states)), path.groups)
    forth = values_of(readout, path, metric).diff(dim=0)
    torch.testing.assert_close(values_of(readout, back, metric).diff(dim=0).flip(0), -forth, **EXACT)
    mirrored = {"left": "right", "right": "left"}.get(rule, rule)
    there = integrate(readout, path, metric, rule, n_steps)
    again = integrate(readout, back, metric, mirrored, n_steps).flip(0)
    scale = 1 + there.abs().max().item()
    torch.testing.assert_close(again, -there, rtol=1e-9, atol=1e-9 * scale)


@many
@given(paths(), metrics, seeds)
def test_permuting_the_tokens_permutes_the_result(made: tuple[Readout, Path], metric: str, seed: int) -> None:
    readout, path = made
    order = permutation(seed, path.n_tokens)
    moved = Path([state[order] for state in path.states], [ids[order] for ids in path.groups])
    torch.testing.assert_close(values_of(readout, moved, metric), values_of(readout, path, metric)[:, order], **EXACT)
    torch.testing.assert_close(
        integrate(readout, moved, metric, "midpoint", 2),
        integrate(readout, path, metric, "midpoint", 2)[:, order],
        rtol=1e-9,
        atol=1e-10,
    )


@few
@given(paths(), metrics, st.integers(1, 5000), st.sampled_from(RULES))
def test_no_budget_changes_a_number(made: tuple[Readout, Path], metric: str, budget: int, rule: str) -> None:
    readout, path = made
    values = values_of(readout, path, metric)
    torch.testing.assert_close(values_of(readout, path, metric, budget), values, **EXACT)
    little = dataclasses.replace(readout, budget=budget)
    steps = read_steps(readout, path, values, metric, 3)
    torch.testing.assert_close(read_steps(little, path, values, metric, 3), steps, **EXACT)
    whole = integrate(readout, path, metric, rule, 2)
    torch.testing.assert_close(integrate(little, path, metric, rule, 2), whole, rtol=1e-9, atol=1e-10)


@many
@given(paths(), st.integers(1, 5000))
def test_every_row_is_read_once_in_chunks_within_the_budget(made: tuple[Readout, Path], budget: int) -> None:
    readout, path = made
    seen: list[torch.Tensor] = []
    stacked = torch.cat(list(path.states))
    ids = [group.repeat(len(path.states), 1) for group in path.groups]

    def norm(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return readout.norm(rows)

    counting = dataclasses.replace(readout, norm=norm, budget=budget)
    levels = read(counting, lambda i: stacked[i], lambda i: [group[i] for group in ids], len(stacked))
    assert torch.equal(torch.cat(seen), stacked), "every row once, in order"
    assert max(map(len, seen)) <= max(1, budget // (8 * readout.d_vocab))
    torch.testing.assert_close(levels.log_target, read_states(readout, path).log_target, **EXACT)


@few
@given(paths(), st.integers(1, 100))
def test_blocks_of_a_chunk_change_no_number(made: tuple[Readout, Path], elements: int) -> None:
    readout, path = made
    whole = read_states(readout, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "BLOCK_ELEMENTS", elements)
        blocks = read_states(readout, path)
    for name in ("log_target", "log_rest", "logit", "log_top"):
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), **EXACT)
    assert torch.equal(blocks.is_top, whole.is_top)


# --- Levels ------------------------------------------------------------------------------------------------------


def oracle(logits: torch.Tensor, groups: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fields of `Levels`, row by row and by definition, in float64."""
    rows: dict[str, list[Any]] = {name: [] for name in ("log_target", "log_rest", "logit", "log_top", "is_top")}
    for i, row in enumerate(logits.double()):
        sets = [[int(j) for j in ids[i] if j != PAD] for ids in groups]
        whole = row.logsumexp(-1)
        others = [[j for j in range(len(row)) if j not in chosen] for chosen in sets]
        rows["log_target"].append(torch.stack([row[chosen].logsumexp(-1) - whole for chosen in sets]))
        rows["log_rest"].append(torch.stack([row[other].logsumexp(-1) - whole for other in others]))
        rows["logit"].append(torch.stack([row[chosen].logsumexp(-1) for chosen in sets]))
        rows["log_top"].append(row.max() - whole)
        rows["is_top"].append(bool((row[sets[0]] == row.max()).any()))
    stacked = {name: torch.stack(rows[name], -1) for name in ("log_target", "log_rest", "logit", "log_top")}
    return {**stacked, "is_top": torch.tensor(rows["is_top"])}


@st.composite
def logits_and_groups(draw_from: Any, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of any size, with ties and gaps, and one or two disjoint groups of targets with fillers."""
    seed, n_rows, d_vocab = draw_from(seeds), draw_from(st.integers(1, 4)), draw_from(st.integers(3, 40))
    logits = draw_from(sizes) * draw(seed, n_rows, d_vocab)
    logits = logits + draw_from(st.sampled_from([0.0, -1e3, 50.0]))
    kind = draw_from(st.sampled_from(["plain", "ties", "one certain", "one impossible", "all equal"]))
    column = seed % d_vocab
    logits = {
        "plain": logits,
        "ties": logits.round(),
        "one certain": logits.index_add(1, torch.tensor([column]), torch.full((n_rows, 1), 400.0).double()),
        "one impossible": logits.index_add(1, torch.tensor([column]), torch.full((n_rows, 1), -2e3).double()),
        "all equal": torch.zeros_like(logits) + logits[:1, :1],
    }[kind].to(dtype)
    order = torch.stack([permutation(seed + i, d_vocab).roll(-i) for i in range(n_rows)])
    order[0] = torch.cat([torch.tensor([column]), order[0][order[0] != column]])
    width = draw_from(st.integers(1, min(3, d_vocab - 2)))
    groups = [order[:, :width].clone(), order[:, width : width + 1]][: draw_from(st.integers(1, 2))]
    groups[0][:, 1:] = torch.where(permutation(seed, n_rows)[:, None] % 2 == 0, PAD, groups[0][:, 1:])
    return logits, groups


def levels_of(logits: torch.Tensor, groups: Sequence[torch.Tensor], in_place: bool) -> Levels:
    return levels_of_logits(logits, groups, torch.empty_like(logits) if in_place else None)


def assert_levels(found: Levels, expected: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    for name in ("log_target", "log_rest", "logit", "log_top"):
        assert getattr(found, name).dtype == torch.float64
        torch.testing.assert_close(
            getattr(found, name), expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert torch.equal(found.is_top, expected["is_top"])


@many
@given(logits_and_groups(torch.float64), st.booleans())
def test_levels_are_those_of_the_definition(made: tuple[torch.Tensor, list[torch.Tensor]], in_place: bool) -> None:
    logits, groups = made
    expected = oracle(logits, groups)
    kept = logits.clone()
    assert_levels(levels_of(logits, groups, in_place), expected, rtol=1e-12, atol=1e-11)
    assert torch.equal(logits, kept) is not in_place


@many
@given(logits_and_groups(torch.float32), st.booleans())
def test_levels_of_float32_logits_keep_seven_digits(
    made: tuple[torch.Tensor, list[torch.Tensor]], in_place: bool
) -> None:
    """The differences of float32 logits are rounded at their own size (1e-7 of at most 5,000 here) before the exponential."""
    logits, groups = made
    expected = oracle(logits, groups)
    spread = (logits.amax(-1) - logits.amin(-1)).max().item()
    assert_levels(levels_of(logits, groups, in_place), expected, rtol=1e-6, atol=5e-6 + 1e-7 * spread)


@many
@given(logits_and_groups(torch.float64), st.floats(-1e3, 1e3), metrics)
def test_a_shift_of_all_logits_changes_no_probability(
    made: tuple[torch.Tensor, list[torch.Tensor]], shift: float, metric: str
) -> None:
    """A difference of two logits does not see it either; a single logit is shifted with them."""
    logits, groups = made
    before, after = levels_of_logits(logits, groups), levels_of_logits(logits + shift, groups)
    moved = shift * (metric == "logit" and len(groups) == 1)
    # 1e-9: logits of size 5,000 are rounded at 1e-12 by the shift, and differences of log-odds add up a few of those.
    torch.testing.assert_close(after.value(metric), before.value(metric) + moved, rtol=1e-9, atol=1e-9)


@many
@given(logits_and_groups(torch.float64))
def test_target_and_rest_make_one(made: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    levels = levels_of_logits(*made)
    torch.testing.assert_close(levels.log_target.exp() + levels.log_rest.exp(), torch.ones_like(levels.logit), **EXACT)
    assert (levels.log_target <= 1e-12).all()
    assert (levels.log_top <= 1e-12).all()


@many
@given(logits_and_groups(torch.float64), metrics)
def test_a_difference_is_the_difference_of_its_sides(
    made: tuple[torch.Tensor, list[torch.Tensor]], metric: str
) -> None:
    logits, groups = made
    sides = [levels_of_logits(logits, [group]).value(metric) for group in groups]
    expected = sides[0] - sides[1] if len(sides) == 2 else sides[0]
    torch.testing.assert_close(levels_of_logits(logits, groups).value(metric), expected, rtol=1e-9, atol=1e-9)


# --- Gradients ---------------------------------------------------------------------------------------------------


@few
@given(paths(), metrics)
def test_gradients_are_those_of_the_definition(made: tuple[Readout, Path], metric: str) -> None:
    """By autograd through `log_softmax`, which shares nothing with the package's sums."""
    readout, path = made
    rows = path.states[0]
    values, gradient = value_and_gradient(readout, rows, path.groups, metric)
    leaf = rows.clone().requires_grad_(True)
    logits = readout.logits(leaf)
    expected = torch.zeros(())
    for sign, ids in zip((1.0, -1.0), path.groups, strict=False):
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids.where(ids != PAD, ids[:, :1]), value=True)
        own = logits.masked_fill(~chosen, -torch.inf).logsumexp(-1)
        rest = logits.masked_fill(chosen, -torch.inf).logsumexp(-1)
        whole = logits.logsumexp(-1)
        one = {"prob": (own - whole).exp(), "log_prob": own - whole, "log_odds": own - rest, "logit": own}[metric]
        expected = expected + sign * one
    (by_definition,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-9, atol=1e-10)
    scale = 1 + by_definition.abs().max().item()
    torch.testing.assert_close(gradient, by_definition, rtol=1e-8, atol=1e-9 * scale)


# --- Quadrature --------------------------------------------------------------------------------------------------


def degree(rule: str, n_steps: int) -> int:
    """The highest degree of polynomials that a rule integrates exactly."""
    return {"midpoint": 1, "trapezoid": 1, "left": 0, "right": 0, "gauss_legendre": 2 * n_steps - 1}[rule]


@many
@given(st.sampled_from(RULES), st.integers(1, 40))
def test_weights_are_positive_and_sum_to_one(rule: str, n_steps: int) -> None:
    nodes, weights = quadrature(rule, n_steps)
    assert nodes.shape == weights.shape == (n_steps + (rule == "trapezoid"),)
    assert nodes.dtype == weights.dtype == torch.float64
    assert abs(weights.sum().item() - 1) < 1e-14
    assert (weights > 0).all()
    assert (nodes.diff() > 0).all()
    assert nodes[0] >= 0
    assert nodes[-1] <= 1


@many
@given(st.sampled_from(RULES), st.integers(1, 20), st.integers(0, 39))
def test_polynomials_up_to_the_degree_are_integrated_exactly(rule: str, n_steps: int, power: int) -> None:
    nodes, weights = quadrature(rule, n_steps)
    power = min(power, degree(rule, n_steps))
    assert abs((weights * nodes**power).sum().item() - 1 / (power + 1)) < 1e-13


@many
@given(st.sampled_from(RULES), st.integers(1, 4))
def test_polynomials_beyond_it_are_not(rule: str, n_steps: int) -> None:
    nodes, weights = quadrature(rule, n_steps)
    power = degree(rule, n_steps) + 1
    assert abs((weights * nodes**power).sum().item() - 1 / (power + 1)) > 1e-7


@pytest.mark.parametrize(("rule", "n_steps", "said"), [("simpson", 3, "'simpson'"), ("left", 0, "got 0")])
def test_rules_and_steps_that_there_are_not(rule: str, n_steps: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quadrature(rule, n_steps)


# --- The whole call ----------------------------------------------------------------------------------------------


def _activations(kind: str) -> dict[str, torch.Tensor]:
    cache = cached(subject(kind).model, BATCH)
    return {name: cache[name] for name in residual_names()}


ACTIVATIONS = {kind: _activations(kind) for kind in KINDS[-1:]}


def attribute(kind: str, activations: dict[str, torch.Tensor], **arguments: Any) -> IGLensResult:
    return ig_lens(subject(kind).model, cache=activations, positions=None, dtype=torch.float64, **arguments)


@one_kind
@few
@given(layers=st.sets(st.integers(0, N_LAYERS)), metric=metrics, target=st.integers(0, 49))
def test_a_credit_of_several_layers_is_the_sum_of_theirs(kind: str, layers: set[int], metric: str, target: int) -> None:
    fine = attribute(kind, ACTIVATIONS[kind], targets=target, metric=metric)
    coarse = attribute(kind, ACTIVATIONS[kind], targets=target, metric=metric, layers=[N_LAYERS, *layers])
    parts = dict(zip(fine.segment_labels, fine.attribution, strict=True))
    for label, credit in zip(coarse.segment_labels, coarse.attribution, strict=True):
        first, _, last = label.partition("-")
        total = sum(parts[str(i)] for i in range(int(first), int(last or first) + 1))
        torch.testing.assert_close(credit, total, **EXACT)
    assert coarse.gap.abs().max() <= 1e-12


@one_kind
@few
@given(seed=seeds, metric=metrics, n_steps=st.integers(1, 3))
def test_permuting_the_batch_permutes_the_result(kind: str, seed: int, metric: str, n_steps: int) -> None:
    order = permutation(seed, 2)
    moved = {name: tensor[order] for name, tensor in ACTIVATIONS[kind].items()}
    targets = [7, 9]
    plain = attribute(kind, ACTIVATIONS[kind], targets=targets, metric=metric, n_steps=n_steps)
    other = attribute(kind, moved, targets=[targets[i] for i in order], metric=metric, n_steps=n_steps)
    torch.testing.assert_close(other.attribution, plain.attribution[:, order], **EXACT)
    assert torch.equal(other.target_ids, plain.target_ids[order])


@one_kind
@few
@given(seed=seeds, size=sizes)
def test_any_vector_as_baseline_telescopes_to_the_models_probability(kind: str, seed: int, size: float) -> None:
    baseline = size * draw(seed, 32)
    result = attribute(kind, ACTIVATIONS[kind], targets=7, baseline=baseline)
    plain = attribute(kind, ACTIVATIONS[kind], targets=7)
    torch.testing.assert_close(result.attribution.sum(0) + result.values[0], plain.values[-1], **EXACT)
