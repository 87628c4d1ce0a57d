"""The oracles against each other and against closed forms, then the estimators and metrics against the oracles.

The double loops of `tests.oracles` know nothing of the package; where the package integrates a gradient, each rule must
give the same number node for node, not only in the limit.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from iglens_tl import ig_lens
from tests import oracles
from tests.families import FAMILIES
from tests.models import TOKENS
from tests.support import WAYS
from tests.test_architectures import BY_WAY, states_of
from tests.versions import TL_MAJOR

RULES = ("left", "right", "midpoint", "trapezoid", "gauss_legendre")
# Norms, centred and not, with and without weight and bias, capped, scaled: every branch of the head.
NAMES = ("GPT-2", "Llama", "Gemma-2", "OPT")


def subject(name: str):
    """A model, its head, the states at the last position, and the top token there."""
    family = FAMILIES[name]
    hf_model = family.build()
    head, way = family.read_head(hf_model), WAYS[TL_MAJOR][0]
    model = BY_WAY[way](family, hf_model)
    if way == "hooked":
        head = oracles.lens_head(model)  # the converter rounds Gemma's 1 + w to float32
    states = states_of(model, TOKENS)[:, 0, -1]
    return model, head, states, int(head.logits(states[-1]).argmax())


# --- Oracles against each other ------------------------------------------------------------------------------------


def test_a_head_on_paper():
    """Two dimensions and two words: h = (3, 1), centred (1, -1), variance 1, weight 2, bias (0, 1)."""
    two = torch.eye(2, dtype=torch.float64)
    head = oracles.Head("layer", two, weight=2 * torch.ones(2), bias=torch.tensor([0.0, 1.0]), eps=0.0)
    state = torch.tensor([3.0, 1.0])
    assert head.logits(state).tolist() == [2.0, -1.0]
    assert math.isclose(float(head.prob(state, torch.tensor(0))), 1 / (1 + math.exp(-3)))
    rms = oracles.Head("rms+1", two, weight=torch.zeros(2), eps=0.0, cap=1.0, scale=2.0)
    size = math.sqrt(5)
    assert torch.allclose(rms.logits(state), torch.tensor([math.tanh(6 / size), math.tanh(2 / size)]).double())
    assert oracles.Head("none", two).logits(state).tolist() == [3.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_finite_difference(name):
    _, head, states, y = subject(name)
    direction = states[-1].double() - states[0].double()
    by_autograd = float(oracles.gradient(head, states[1], y) @ direction)
    by_difference = oracles.directional_derivative(head, states[1], direction, y)
    assert math.isclose(by_autograd, by_difference, rel_tol=1e-6, abs_tol=1e-10)  # steps of 1e-5: error 1e-10


def test_credits_and_onset_by_hand():
    values = torch.tensor([0.1, 0.4, 0.2, 0.9], dtype=torch.float64)
    credits = oracles.credits(values[:, None])[:, 0].tolist()
    assert credits == pytest.approx([0.3, -0.2, 0.7])
    assert oracles.onset(credits) == 2
    assert oracles.onset(credits, 0.25) == 0
    assert oracles.onset([1.0, -1.0]) == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_integrates_a_gradient_to_the_difference_of_the_ends(rule):
    _, head, states, y = subject("GPT-2")
    exact = float(head.prob(states[2], torch.tensor(y)) - head.prob(states[1], torch.tensor(y)))
    errors = [abs(oracles.integrated_gradient(head, states[1], states[2], y, rule, n) - exact) for n in (8, 32)]
    order = math.log(errors[0] / errors[1], 4) if errors[1] > 1e-13 else math.inf
    least = {"left": 0.9, "right": 0.9, "midpoint": 1.9, "trapezoid": 1.9, "gauss_legendre": 6}[rule]
    assert order >= least


# --- The package against the oracles -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_is_its_rule(name, rule):
    model, head, states, y = subject(name)
    expected = [oracles.integrated_gradient(head, a, b, y, rule, 3) for a, b in itertools.pairwise(states)]
    single = ig_lens(model, TOKENS, estimator=rule, n_steps=3)
    double = ig_lens(model, TOKENS, estimator=rule, n_steps=3, dtype=torch.float64)
    assert single.target_ids.tolist() == [[[y]]]
    assert single.attribution[:, 0, 0].tolist() == pytest.approx(expected, abs=2e-6)  # gradients in float32
    # The states are those of one float32 pass, to the bit, through any chunking.
    assert double.attribution[:, 0, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert double.gap[0, 0] == pytest.approx(sum(expected) - float(double.total), abs=1e-12)


def test_estimators_converge_to_the_exact_credits_at_their_order():
    model, _, _, _ = subject("Llama")
    exact = ig_lens(model, TOKENS, dtype=torch.float64).attribution

    def error(rule: str, n: int) -> float:
        found = ig_lens(model, TOKENS, dtype=torch.float64, estimator=rule, n_steps=n).attribution
        return float((found - exact).abs().max())

    for rule, order in (("left", 1), ("right", 1), ("midpoint", 2), ("trapezoid", 2)):
        assert math.log2(error(rule, 32) / error(rule, 64)) == pytest.approx(order, abs=0.1), rule
    assert error("gauss_legendre", 16) < 1e-2 * error("midpoint", 16)
    assert error("gauss_legendre", 64) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_steps_change_no_credit_by_a_bit(name):
    model, head, states, y = subject(name)
    once = ig_lens(model, TOKENS)
    for n in (4, 64):
        result = ig_lens(model, TOKENS, n_steps=n)
        assert torch.equal(result.attribution, once.attribution)
        assert torch.equal(result.values, once.values)
    assert once.steps is None
    grid = [
        [a + (b - a) * i / 4 for i in range(5)] for a, b in zip(states[:-1].double(), states[1:].double(), strict=True)
    ]
    between = [[head.prob(state, torch.tensor(y)) for state in row] for row in grid]
    steps = ig_lens(model, TOKENS, n_steps=4, dtype=torch.float64).steps
    expected = torch.tensor(between, dtype=torch.float64).diff(dim=1)
    assert (steps[..., 0, 0] - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_every_metric(name):
    model, head, states, y = subject(name)
    nats = head.log_prob(states, torch.full((len(states),), y))
    expected = {
        "prob": nats.exp(),
        "log_prob": nats,
        "log_odds": nats - torch.log1p(-nats.exp()),
        "logit": head.logits(states)[:, y],
    }
    for metric, values in expected.items():
        double = ig_lens(model, TOKENS, metric=metric, dtype=torch.float64)
        assert (double.values[:, 0, 0] - values).abs().max() <= 1e-11, metric
        single = ig_lens(model, TOKENS, metric=metric)
        # Logits up to 20 in float32: a relative 1e-6 of them.
        assert (single.values[:, 0, 0] - values).abs().max() <= 2e-5, metric
        assert (single.attribution.sum(0) - single.total).abs().max() <= 1e-12, metric


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline(name):
    model, head, _states, y = subject(name)
    stack = states_of(model, TOKENS)[:, 0].double()  # [state, pos, d_model]
    donor = torch.linspace(-1, 1, stack.shape[-1], dtype=torch.float64)
    for baseline, start in (("zero", torch.zeros_like(donor)), ("mean", stack[1].mean(0)), (donor, donor)):
        path = torch.stack([start, *stack[1:, -1]])
        expected = head.prob(path, torch.full((len(path),), y))
        result = ig_lens(model, TOKENS, baseline=baseline, dtype=torch.float64)
        assert result.segment_labels[0] == "base"
        assert (result.values[:, 0, 0] - expected).abs().max() <= 1e-7, baseline  # the mean is taken of float32 states
