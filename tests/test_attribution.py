"""`ig_lens`: what the numbers are, checked against derivations that share no code with the package.

Two oracles a quantity: the float64 head that was copied out of the raw weights (`tests.oracles.Head`), and for the
integrating estimators a node-by-node loop with float64 autograd. Tolerances: 1e-6 for a probability read in float32
(the logits have size 5 and 7 digits), 1e-12 for sums and for what is read in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch

from iglens_tl import TokenSet, ig_lens
from tests import models, oracles
from tests.families import FAMILIES
from tests.models import BATCH, TOKENS
from tests.oracles import Head, model_prob
from tests.subjects import (
    D_MODEL,
    D_VOCAB,
    N_LAYERS,
    cached,
    each_kind,
    fresh,
    one_kind,
    padded,
    residual_names,
    states_of,
    subject,
    tiny,
)

METRICS = ["prob", "log_prob", "log_odds", "logit"]
ESTIMATORS = ["midpoint", "trapezoid", "left", "right", "gauss_legendre"]
EACH_METRIC = pytest.mark.parametrize("metric", METRICS)
EACH_ESTIMATOR = pytest.mark.parametrize("estimator", ESTIMATORS)
TARGET = 7
F64 = {"dtype": torch.float64}
EXACT = {"rtol": 0, "atol": 1e-12}


def value_of(head: Head, states: torch.Tensor, target: int, metric: str = "prob") -> torch.Tensor:
    """A metric of every state `[..., d_model]` in float64, by its definition."""
    logits = head.logits(states)
    own = logits[..., target]
    rest = torch.cat([logits[..., :target], logits[..., target + 1 :]], -1).logsumexp(-1)
    everything = logits.logsumexp(-1)
    return {"prob": (own - everything).exp(), "log_prob": own - everything, "log_odds": own - rest, "logit": own}[
        metric
    ]


@functools.cache
def states(kind: str) -> torch.Tensor:
    """The states of `BATCH` in the shared model, `[state, batch, pos, d_model]`."""
    return states_of(cached(subject(kind).model, BATCH))


# --- What is read ------------------------------------------------------------------------------------------------


@each_kind
@EACH_METRIC
def test_values_and_credits_are_those_of_a_float64_head(kind: str, metric: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    expected = value_of(head, states(kind), TARGET, metric)
    single = ig_lens(model, BATCH, targets=TARGET, metric=metric, positions=None)
    # A logit of size 5 has an error of 2e-6 in float32, and so has its logarithm.
    atol = {"prob": 1e-6}.get(metric, 1e-5)
    torch.testing.assert_close(single.values, expected, rtol=0, atol=atol)
    torch.testing.assert_close(single.attribution, oracles.credits(expected), rtol=0, atol=atol)
    double = ig_lens(model, BATCH, targets=TARGET, metric=metric, positions=None, **F64)
    torch.testing.assert_close(double.values, expected, **EXACT)
    torch.testing.assert_close(double.attribution, oracles.credits(expected), **EXACT)


@each_kind
def test_the_last_value_is_the_models_own_probability(kind: str) -> None:
    model = subject(kind).model
    said = model_prob(model(BATCH).detach(), torch.full((2, 6), TARGET))
    result = ig_lens(model, BATCH, targets=TARGET, positions=None)
    torch.testing.assert_close(result.model_value, said, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.values[-1], said, rtol=0, atol=1e-6)
    for metric in METRICS[1:]:
        other = ig_lens(model, BATCH, targets=TARGET, positions=None, metric=metric)
        torch.testing.assert_close(other.values[-1], other.model_value, rtol=0, atol=1e-5)


PATHS: dict[str, dict[str, Any]] = {
    "every block": {},
    "every half block": {"incl_mid": True},
    "two segments": {"layers": 2},
    "some states": {"layers": [1, "1_mid"]},
    "from zero": {"baseline": "zero"},
    "from the mean": {"baseline": "mean", "layers": [0, 2]},
    "from a vector": {"baseline": torch.linspace(-2, 2, D_MODEL), "layers": 1},
}


@each_kind
@EACH_METRIC
@pytest.mark.parametrize("path", PATHS)
def test_credits_telescope(kind: str, metric: str, path: str) -> None:
    result = ig_lens(subject(kind).model, BATCH, targets=TARGET, metric=metric, positions=None, **PATHS[path])
    assert (result.attribution.sum(0) - result.total).abs().max() <= 1e-12
    assert torch.equal(result.total, result.values[-1] - result.values[0])
    assert torch.equal(result.gap, result.attribution.sum(0) - result.total)
    assert torch.equal(result.attribution, result.values.diff(dim=0))


@each_kind
def test_units_settings_and_provenance_are_in_the_result(kind: str) -> None:
    result = ig_lens(subject(kind).model, BATCH, targets=[7, 8], positions=[0, -1], metric="log_odds", layers=["1_pre"])
    assert (result.unit, result.metric, result.estimator) == ("nats", "log_odds", "prediction_aware")
    settings = {"targets": "[7, 8]", "positions": "[0, -1]", "layers": "['1_pre']", "baseline": "embed", "n_steps": 1}
    assert settings.items() <= result.settings.items()
    assert result.provenance["api"] == {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[kind]
    assert {"transformer_lens", "torch", "iglens_tl", "model", "model_dtype"} <= result.provenance.keys()
    assert json.loads(json.dumps(result.settings)) == result.settings


# --- Log-odds and log-probabilities at the ends of the scale ------------------------------------------------------


def sharpened(kind: str, scale: float) -> tuple[Any, Head]:
    """A model whose logits are `scale` times as large, and its head. A power of two is exact."""
    made = fresh(kind)
    weight = {"hooked": lambda: made.model.unembed.W_U, "bridge": lambda: made.model.unembed.original_component.weight}
    weight[kind]().data *= scale
    return made.model, dataclasses.replace(made.head, unembed=made.head.unembed * scale)


@each_kind
def test_log_odds_keep_their_digits_where_the_probability_is_one(kind: str) -> None:
    """`log(p) - log(1 - p)` from p alone would be infinite, or have two digits."""
    model, head = sharpened(kind, 32)
    path = states_of(cached(model, TOKENS))[:, :, -1:]
    target = int(model(TOKENS)[0, -1].argmax())
    result = ig_lens(model, TOKENS, targets=target, metric="log_odds")
    expected = value_of(head, path, target, "log_odds")
    assert result.values[-1].item() > 16  # 1 - p < 1e-7: nothing is left of it beside a float32 one
    torch.testing.assert_close(result.values, expected, rtol=1e-6, atol=1e-4)  # logits of size 100 in float32
    double = ig_lens(model, TOKENS, targets=target, metric="log_odds", **F64)
    torch.testing.assert_close(double.values, expected, rtol=1e-12, atol=1e-11)


@each_kind
def test_a_probability_that_underflows(kind: str) -> None:
    """TRAPS 32: no 0/0, onset none; its logarithm is fine."""
    model, head = sharpened(kind, 64)
    path = states_of(cached(model, TOKENS))[:, :, -1:]
    target = int(model(TOKENS)[0, -1].argmin())
    prob = ig_lens(model, TOKENS, targets=target)
    assert prob.values[-1].item() < 1e-38
    assert prob.attribution.isfinite().all()
    assert prob.onset().index.tolist() == [[-1]]
    log = ig_lens(model, TOKENS, targets=target, metric="log_prob")
    torch.testing.assert_close(log.values, value_of(head, path, target, "log_prob"), rtol=1e-5, atol=0)
    assert log.values[-1].item() < -87
    assert log.onset().index.min() >= 0
    gradients = ig_lens(model, TOKENS, targets=target, metric="log_prob", estimator="midpoint", n_steps=8)
    assert gradients.attribution.isfinite().all()


# --- Estimators --------------------------------------------------------------------------------------------------


@each_kind
@EACH_METRIC
def test_the_integrating_estimators_converge_to_the_prediction_aware_credits(kind: str, metric: str) -> None:
    """Halving the step divides the error by 4 (midpoint, trapezoid) or 2 (left, right); Gauss-Legendre needs few nodes."""
    model = subject(kind).model
    exact = ig_lens(model, BATCH, targets=TARGET, metric=metric, **F64).attribution

    def error(estimator: str, n_steps: int) -> torch.Tensor:
        result = ig_lens(model, BATCH, targets=TARGET, metric=metric, estimator=estimator, n_steps=n_steps, **F64)
        torch.testing.assert_close(result.gap, (result.attribution - exact).sum(0), **EXACT)
        return (result.attribution - exact).abs().flatten()

    for estimator, factor in (("midpoint", 4.0), ("trapezoid", 4.0), ("left", 2.0), ("right", 2.0)):
        ratio = error(estimator, 128).sum() / error(estimator, 256).sum()
        assert abs(ratio - factor) < 0.05 * factor, (estimator, float(ratio))
    assert error("gauss_legendre", 64).max() < 1e-10
    assert error("gauss_legendre", 8).sum() < error("midpoint", 8).sum()


@each_kind
@EACH_ESTIMATOR
def test_an_integral_is_that_of_a_loop_over_its_nodes(kind: str, estimator: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    result = ig_lens(model, TOKENS, targets=TARGET, estimator=estimator, n_steps=3, **F64)
    path = states(kind)[:, 0, -1]
    for j in range(N_LAYERS):
        expected = oracles.integrated_gradient(head, path[j], path[j + 1], TARGET, estimator, 3)
        assert abs(result.attribution[j, 0, 0].item() - expected) < 1e-12


@each_kind
@EACH_ESTIMATOR
def test_in_float32_an_integral_is_good_to_its_five_digits(kind: str, estimator: str) -> None:
    model = subject(kind).model
    single = ig_lens(model, BATCH, targets=TARGET, estimator=estimator, n_steps=16, positions=None)
    double = ig_lens(model, BATCH, targets=TARGET, estimator=estimator, n_steps=16, positions=None, **F64)
    torch.testing.assert_close(single.attribution, double.attribution, rtol=0, atol=1e-5)
    assert torch.equal(single.gap, single.attribution.sum(0) - single.total)
    assert single.gap.abs().max() > 1e-12  # an estimate that were exact would not be one


@each_kind
@EACH_METRIC
def test_prediction_aware_credits_do_not_depend_on_the_steps(kind: str, metric: str) -> None:
    """Bit for bit: TRAPS 30, an end state that is recomputed as `start + 1 * (end - start)` is another state."""
    model = subject(kind).model
    one, four, many = (
        ig_lens(model, BATCH, targets=TARGET, metric=metric, positions=None, n_steps=n) for n in (1, 4, 64)
    )
    assert torch.equal(one.attribution, four.attribution)
    assert torch.equal(one.attribution, many.attribution)
    assert torch.equal(one.values, many.values)
    assert one.steps is None
    assert four.steps.shape == (3, 4, 2, 6)
    assert many.steps.shape == (3, 64, 2, 6)
    for result in (four, many):
        torch.testing.assert_close(result.steps.sum(1), one.attribution, **EXACT)


@each_kind
def test_steps_are_the_observed_changes_along_the_segment(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    result = ig_lens(model, BATCH, targets=TARGET, positions=None, n_steps=5, **F64)
    path = states(kind).double()
    for j in range(N_LAYERS):
        points = [path[j] + i / 5 * (path[j + 1] - path[j]) for i in range(6)]
        along = value_of(head, torch.stack(points), TARGET)
        torch.testing.assert_close(result.steps[j], oracles.credits(along), **EXACT)


@each_kind
@pytest.mark.parametrize("estimator", ["prediction_aware", *ESTIMATORS])
def test_swapping_the_ends_flips_the_sign(kind: str, estimator: str) -> None:
    """TRAPS 29. One segment from a given vector to the last state, and back."""
    model, (start, end) = subject(kind).model, states(kind)[[0, -1], :1, -1:]
    last = residual_names()[-1]

    def credit(a: torch.Tensor, b: torch.Tensor, estimator: str) -> float:
        arguments: dict[str, Any] = {"targets": TARGET, "layers": 1, "estimator": estimator, "n_steps": 100, **F64}
        result = ig_lens(model, cache={last: b}, baseline=a, **arguments)
        assert result.state_labels == ("baseline", "final_post")
        return result.attribution.item()

    back = {"left": "right", "right": "left"}.get(estimator, estimator)
    there = credit(start, end, estimator)
    assert abs(there) > 1e-4
    assert abs(there + credit(end, start, back)) < 1e-12


@each_kind
def test_fifty_and_a_hundred_steps_agree(kind: str) -> None:
    """TRAPS 29: a sum that is not divided by the number of steps would double."""
    model = subject(kind).model
    for estimator, atol in (("midpoint", 1e-3), ("gauss_legendre", 1e-9)):
        few, many = (
            ig_lens(model, BATCH, targets=TARGET, estimator=estimator, n_steps=n, **F64).attribution for n in (50, 100)
        )
        torch.testing.assert_close(few, many, rtol=0, atol=atol)


@one_kind
def test_estimators_with_incorrect_targets_sets_and_all_settings(kind: str) -> None:
    model = subject(kind).model
    arguments: dict[str, Any] = {
        "targets": TokenSet([7, 9]), "incorrect_targets": 8, "positions": None, "incl_mid": True, "baseline": "mean", **F64
    }  # fmt: skip
    exact = ig_lens(model, BATCH, **arguments)
    close = ig_lens(model, BATCH, estimator="gauss_legendre", n_steps=64, **arguments)
    torch.testing.assert_close(close.attribution, exact.attribution, rtol=0, atol=1e-9)


# --- Baselines ---------------------------------------------------------------------------------------------------


@each_kind
def test_from_the_embedding_and_from_zero(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    embed = ig_lens(model, BATCH, targets=TARGET, positions=None)
    torch.testing.assert_close(embed.values[0], value_of(head, states(kind)[0], TARGET), rtol=0, atol=1e-6)
    zero = ig_lens(model, BATCH, targets=TARGET, positions=None, baseline="zero")
    of_nothing = value_of(head, torch.zeros(D_MODEL), TARGET)
    torch.testing.assert_close(zero.values[0], of_nothing.expand(2, 6), rtol=0, atol=1e-6)
    assert torch.equal(zero.values[1:], embed.values[1:])
    assert zero.state_labels == ("zero", "1_pre", "2_pre", "final_post")
    assert zero.segment_labels == ("base", "1", "2")
    assert zero.hidden_states == (1, 2, 3)
    torch.testing.assert_close(zero.attribution[0], zero.values[1] - zero.values[0], **EXACT)


def means(path: torch.Tensor, mask: torch.Tensor, state: int) -> torch.Tensor:
    """Of every position: the mean of a state over the prompt's real positions up to it, by a loop."""
    out = torch.zeros(*mask.shape, D_MODEL, dtype=torch.float64)
    for b in range(mask.shape[0]):
        seen: list[torch.Tensor] = []
        for p in range(mask.shape[1]):
            seen += [path[state, b, p].double()] * int(mask[b, p])
            out[b, p] = sum(seen) / max(len(seen), 1)
    return out


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("layers", "first"), [(None, 1), ([0, 2], 0), ([2], 2), (1, 3)], ids=str)
def test_from_the_mean_of_the_real_positions_so_far(kind: str, side: str, layers: Any, first: int) -> None:
    model, head = subject(kind).model, subject(kind).head
    tokens, mask = padded(side)
    path = states_of(cached(model, tokens, attention_mask=mask))
    result = ig_lens(
        model, tokens, attention_mask=mask, targets=TARGET, positions=None, baseline="mean", layers=layers, **F64
    )
    expected = value_of(head, means(path, mask, first), TARGET)
    real = mask.bool()
    torch.testing.assert_close(result.values[0][real], expected[real], **EXACT)
    assert result.state_labels[0] == "mean"
    ends = {"mean", *(f"{i}_pre" for i in range(first, N_LAYERS)), "final_post"}
    assert set(result.state_labels) <= ends
    last = ig_lens(model, tokens, attention_mask=mask, targets=TARGET, baseline="mean", layers=layers, **F64)
    for i, length in enumerate(mask.sum(1)):
        place = int(length) - 1 if side == "right" else -1
        torch.testing.assert_close(last.values[0, i, 0], expected[i, place], **EXACT)


@each_kind
def test_from_a_tensor_of_three_shapes(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 2, D_MODEL, generator=generator)
    for given in (full[0, 0], full[:, 0], full):
        result = ig_lens(model, BATCH, targets=TARGET, positions=[1, 4], baseline=given, **F64)
        shape = {1: (1, 1), 2: (2, 1), 3: (2, 2)}[given.ndim]
        expected = value_of(head, given.reshape(*shape, D_MODEL).expand(2, 2, D_MODEL), TARGET)
        torch.testing.assert_close(result.values[0], expected, **EXACT)
        assert result.state_labels[0] == "baseline"
        assert result.settings["baseline"] == "baseline"


# --- Layers, labels, mid states ----------------------------------------------------------------------------------

LABELS: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], tuple[int | None, ...]]] = [
    ({}, ("0_pre", "1_pre", "2_pre", "final_post"), ("0", "1", "2"), (1, 2, 3)),
    ({"layers": 1}, ("0_pre", "final_post"), ("0-2",), (3,)),
    ({"layers": 2}, ("0_pre", "2_pre", "final_post"), ("0-1", "2"), (2, 3)),
    ({"layers": 3}, ("0_pre", "1_pre", "2_pre", "final_post"), ("0", "1", "2"), (1, 2, 3)),
    ({"layers": [1]}, ("0_pre", "1_pre", "final_post"), ("0", "1-2"), (1, 3)),
    ({"layers": [2, 0, 2]}, ("0_pre", "2_pre", "final_post"), ("0-1", "2"), (2, 3)),
    ({"layers": ["0_post", "final_post"]}, ("0_pre", "1_pre", "final_post"), ("0", "1-2"), (1, 3)),
    ({"layers": ["1_mid"]}, ("0_pre", "1_mid", "final_post"), ("0-1_attn", "1_mlp-2"), (None, 3)),
    (
        {"layers": [1, "1_mid", 2]},
        ("0_pre", "1_pre", "1_mid", "2_pre", "final_post"), ("0", "1_attn", "1_mlp", "2"), (1, None, 2, 3),
    ),
    (
        {"incl_mid": True},
        ("0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"),
        ("0_attn", "0_mlp", "1_attn", "1_mlp", "2_attn", "2_mlp"), (None, 1, None, 2, None, 3),
    ),
    ({"baseline": "zero"}, ("zero", "1_pre", "2_pre", "final_post"), ("base", "1", "2"), (1, 2, 3)),
    ({"baseline": "zero", "layers": [0]}, ("zero", "0_pre", "final_post"), ("base", "0-2"), (0, 3)),
    ({"baseline": "zero", "layers": 1}, ("zero", "final_post"), ("base",), (3,)),
    (
        {"baseline": "zero", "incl_mid": True},
        ("zero", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "final_post"),
        ("base", "0_mlp", "1_attn", "1_mlp", "2_attn", "2_mlp"), (None, 1, None, 2, None, 3),
    ),
]  # fmt: skip


@each_kind
@pytest.mark.parametrize(("arguments", "states_", "segments", "hidden"), LABELS, ids=[str(row[0]) for row in LABELS])
def test_labels_say_what_lies_between_which_states(
    kind: str, arguments: dict[str, Any], states_: Any, segments: Any, hidden: Any
) -> None:
    model = subject(kind).model
    result = ig_lens(model, BATCH, targets=TARGET, positions=None, **arguments)
    assert (result.state_labels, result.segment_labels, result.hidden_states) == (states_, segments, hidden)
    every = ig_lens(model, BATCH, targets=TARGET, positions=None, incl_mid=True)
    known = dict(zip(every.state_labels, every.values, strict=True))
    for label, value in zip(result.state_labels, result.values, strict=True):
        torch.testing.assert_close(value, known.get(label, value), rtol=0, atol=1e-6)
    assert sum(label in known for label in states_) >= len(states_) - 1


@each_kind
def test_mid_states_are_those_that_the_mlp_reads(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    cache = cached(model, BATCH)
    result = ig_lens(model, BATCH, targets=TARGET, positions=None, incl_mid=True, **F64)
    for i in range(N_LAYERS):
        mid = cache[f"blocks.{i}.hook_resid_pre"] + cache[f"blocks.{i}.hook_attn_out"]
        torch.testing.assert_close(result.values[2 * i + 1], value_of(head, mid, TARGET), rtol=0, atol=1e-6)


# --- Lens --------------------------------------------------------------------------------------------------------


def translate(state: torch.Tensor, index: int) -> torch.Tensor:
    """As a tuned lens: an affine map for each layer, the identity at the last."""
    generator = torch.Generator().manual_seed(index)
    weight = torch.eye(D_MODEL) + 0.1 * torch.randn(D_MODEL, D_MODEL, generator=generator) * (index < N_LAYERS)
    bias = torch.randn(D_MODEL, generator=generator) * (index < N_LAYERS)
    return state @ weight.to(state) + bias.to(state)


@each_kind
def test_the_identity_is_no_lens(kind: str) -> None:
    model = subject(kind).model
    plain = ig_lens(model, BATCH, positions=None)
    through = ig_lens(model, BATCH, positions=None, lens=lambda state, index: state)
    assert torch.equal(through.attribution, plain.attribution)
    assert torch.equal(through.values, plain.values)


@each_kind
def test_a_tuned_lens_changes_the_way_and_keeps_the_end(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    plain = ig_lens(model, BATCH, targets=TARGET, positions=None, **F64)
    tuned = ig_lens(model, BATCH, targets=TARGET, positions=None, lens=translate, **F64)
    mapped = torch.stack([translate(state.double(), index) for index, state in enumerate(states(kind))])
    torch.testing.assert_close(tuned.values, value_of(head, mapped, TARGET), **EXACT)
    torch.testing.assert_close(tuned.values[-1], plain.values[-1], **EXACT)
    assert (tuned.values[:-1] - plain.values[:-1]).abs().max() > 1e-3
    assert tuned.gap.abs().max() <= 1e-12
    assert tuned.settings["lens"] == "translate"


@each_kind
@pytest.mark.parametrize(
    ("arguments", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"layers": [2]}, [0, 2, 3]),
        ({"baseline": "zero"}, [1, 2, 3]),
        ({"baseline": torch.ones(D_MODEL)}, [1, 2, 3]),
        ({"baseline": "mean", "layers": [2]}, [2, 2, 3]),
    ],
    ids=["embed", "some", "zero", "tensor", "mean"],
)
def test_a_lens_is_told_which_state_it_gets(kind: str, arguments: dict[str, Any], indices: list[int]) -> None:
    """A baseline that is no state of the model does not go through it."""
    seen: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    def lens(state: torch.Tensor, index: int) -> torch.Tensor:
        seen.append((index, tuple(state.shape), state.dtype))
        return state

    ig_lens(subject(kind).model, BATCH, positions=None, lens=lens, **arguments)
    assert [index for index, _, _ in seen] == indices
    assert {(shape, dtype) for _, shape, dtype in seen} == {((12, D_MODEL), torch.float32)}


@each_kind
def test_a_lens_with_parameters_keeps_no_gradients(kind: str) -> None:
    with models.same_randomness():
        module = torch.nn.Linear(D_MODEL, D_MODEL)
    result = ig_lens(
        subject(kind).model, BATCH, lens=lambda state, i: module(state) if i < N_LAYERS else state,
        estimator="midpoint", n_steps=2,
    )  # fmt: skip
    assert not result.attribution.requires_grad
    assert module.weight.grad is None


# --- Precision ---------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
def test_models_in_half_precision(kind: str, dtype: torch.dtype, atol: float) -> None:
    """TRAPS 34: compared with the float32 softmax of the model's own logits; sums are exact all the same."""
    made = fresh(kind)
    model = made.model.to(dtype)
    with torch.no_grad():
        logits = model(BATCH)
    assert logits.dtype == dtype
    result = ig_lens(model, BATCH, targets=TARGET, positions=None)
    said = model_prob(logits.float(), torch.full((2, 6), TARGET))
    torch.testing.assert_close(result.values[-1], said, rtol=0, atol=atol)
    torch.testing.assert_close(result.model_value, said, rtol=0, atol=1e-6)
    assert result.gap.abs().max() <= 1e-12
    assert result.settings["readout_dtype"] == str(dtype).removeprefix("torch.")
    assert result.attribution.dtype == torch.float64
    integrated = ig_lens(model, BATCH, targets=TARGET, positions=None, estimator="gauss_legendre", n_steps=16)
    torch.testing.assert_close(integrated.attribution, result.attribution, rtol=0, atol=20 * atol)


def rounded(head: Head, dtype: torch.dtype) -> Head:
    """A head whose numbers went through another precision."""
    names = ("unembed", "weight", "bias", "unembed_bias")
    return dataclasses.replace(
        head,
        **{name: None if getattr(head, name) is None else getattr(head, name).to(dtype).double() for name in names},
    )


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_model_read_in_float64(kind: str, dtype: torch.dtype) -> None:
    """Its weights and states have few digits; what is read from them has all."""
    made = fresh(kind)
    model, head = made.model.to(dtype), rounded(made.head, dtype)
    path = states_of(cached(model, BATCH))
    result = ig_lens(model, BATCH, targets=TARGET, positions=None, **F64)
    torch.testing.assert_close(result.values, value_of(head, path.double(), TARGET), **EXACT)


@pytest.mark.bridge
@pytest.mark.parametrize("size", [0.5, 30.0])
def test_a_half_precision_norm_is_written_out_by_the_right_formula(size: float) -> None:
    """Gemma multiplies by one plus the weight: for large weights bfloat16 hardly tells that from the weight alone."""
    family = FAMILIES["Gemma"]
    hf_model = family.build()
    weight = hf_model.model.norm.weight.data
    weight.copy_(size * (1 + 0.1 * torch.randn(D_MODEL, generator=torch.Generator().manual_seed(0))))
    hf_model.lm_head.weight = torch.nn.Parameter(hf_model.lm_head.weight.data.clone() / size)
    head = rounded(family.read_head(hf_model), torch.bfloat16)
    model = models.bridge(hf_model).to(torch.bfloat16)
    path = states_of(cached(model, BATCH))
    result = ig_lens(model, BATCH, targets=TARGET, positions=None, **F64)
    torch.testing.assert_close(result.values, value_of(head, path.double(), TARGET), **EXACT)


@each_kind
def test_a_model_in_double_precision(kind: str) -> None:
    made = fresh(kind)
    model = made.model.double()
    model.cfg.dtype = torch.float64  # which `double()` leaves as it is, and by which HookedTransformer casts
    path = states_of(cached(model, BATCH))
    assert path.dtype == torch.float64
    result = ig_lens(model, BATCH, targets=TARGET, positions=None)
    assert result.settings["readout_dtype"] == "float64"
    # RMSNorm of Hugging Face models is computed in float32 whatever the model is in.
    atol = {"hooked": 1e-12, "bridge": 1e-7}[kind]
    torch.testing.assert_close(result.values, value_of(made.head, path, TARGET), rtol=0, atol=atol)
    torch.testing.assert_close(result.values[-1], result.model_value, **EXACT)


@each_kind
def test_a_wider_readout_of_the_last_state_is_still_the_models(kind: str) -> None:
    model = subject(kind).model
    result = ig_lens(model, BATCH, positions=None, **F64)
    torch.testing.assert_close(result.values[-1], result.model_value, rtol=0, atol=1e-6)
    narrow = ig_lens(model, BATCH, positions=None, dtype=torch.bfloat16)
    torch.testing.assert_close(narrow.values[-1], result.model_value, rtol=0, atol=5e-2)
    assert narrow.settings["readout_dtype"] == "bfloat16"


# --- Memory ------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"n_steps": 3},
        {"estimator": "trapezoid", "n_steps": 3},
        {"incorrect_targets": 8, "dtype": torch.float64},
        {"estimator": "midpoint", "n_steps": 2, "dtype": torch.float64},
    ],
    ids=str,
)
def test_the_budget_changes_no_number(kind: str, arguments: dict[str, Any]) -> None:
    """Within 1e-7: a product of one row adds up in another order."""
    model = subject(kind).model
    whole = ig_lens(model, BATCH, targets=TARGET, positions=None, **arguments)
    for budget in (1, 5 * 4 * D_VOCAB, "2KiB", "512MiB"):
        cut = ig_lens(model, BATCH, targets=TARGET, positions=None, max_memory=budget, **arguments)
        torch.testing.assert_close(cut.values, whole.values, rtol=0, atol=1e-7)
        # An integral multiplies the gradient by a difference of two states of size 30.
        torch.testing.assert_close(cut.attribution, whole.attribution, rtol=0, atol=1e-6)
        assert cut.estimator == whole.estimator


@each_kind
def test_the_budget_bounds_the_tile_of_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = subject(kind).model
    sizes: list[int] = []

    def counted(product: Any, *operands: Any, **kept: Any) -> Any:
        sizes.extend([kept["out"].numel()] if "out" in kept else [])
        return product(*operands, **kept)

    for name in ("mm", "addmm"):  # without a bias of the unembedding, and with one
        monkeypatch.setattr(torch, name, functools.partial(counted, getattr(torch, name)))
    cache = cached(model, BATCH)
    whole = ig_lens(cache, BATCH, targets=TARGET, positions=None)
    sizes.clear()
    bounded = ig_lens(cache, BATCH, targets=TARGET, positions=None, max_memory=5 * 4 * D_VOCAB)
    assert 0 < max(sizes) <= 5 * D_VOCAB
    once = {"hooked": 0, "bridge": 1}[
        kind
    ]  # without position embeddings the token that occurs twice enters as one state
    assert sum(sizes) == (bounded.values.numel() - once) * D_VOCAB, "every logit once"
    assert (bounded.values - whole.values).abs().max() <= 1e-6  # float32 products of other shapes


# --- Ties --------------------------------------------------------------------------------------------------------


@each_kind
def test_tokens_that_tie_are_both_the_most_probable(kind: str) -> None:
    """TRAPS 34: a rank counts strictly larger logits."""
    made = fresh(kind)
    model = made.model
    weight, by_word = {
        "hooked": lambda: (model.unembed.W_U.data, 1),
        "bridge": lambda: (model.unembed.original_component.weight.data, 0),
    }[kind]()
    top = int(model(TOKENS)[0, -1].argmax())
    other = (top + 1) % D_VOCAB
    weight.index_copy_(by_word, torch.tensor([other]), weight.index_select(by_word, torch.tensor([top])))
    bias = {"hooked": lambda: model.unembed.b_U.data, "bridge": lambda: model.unembed.original_component.bias.data}[
        kind
    ]()
    bias[other] = bias[top]
    one, two = (ig_lens(model, TOKENS, targets=token) for token in (top, other))
    assert one.is_top[-1].all()
    assert two.is_top[-1].all()
    torch.testing.assert_close(one.values, two.values, rtol=0, atol=1e-7)
    assert not ig_lens(model, TOKENS, targets=(other + 1) % D_VOCAB).is_top[-1].any()
    both = ig_lens(model, TOKENS, targets=TokenSet([top, other]))
    torch.testing.assert_close(both.values, one.values + two.values, rtol=0, atol=1e-6)


@each_kind
def test_is_top_is_the_argmax_of_the_readout_at_every_state(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    best = head.logits(states(kind)).argmax(-1)
    for target in best.unique().tolist():
        result = ig_lens(model, BATCH, targets=target, positions=None)
        assert torch.equal(result.is_top, best == target)


# --- Other shapes of model ---------------------------------------------------------------------------------------


@each_kind
def test_a_model_of_one_layer(kind: str) -> None:
    model = tiny(kind, n_layers=1)
    result = ig_lens(model, BATCH, targets=TARGET)
    assert result.state_labels == ("0_pre", "final_post")
    assert ig_lens(model, BATCH, targets=TARGET, incl_mid=True).segment_labels == ("0_attn", "0_mlp")
    assert ig_lens(model, BATCH, targets=TARGET, layers=1).attribution.equal(result.attribution)
