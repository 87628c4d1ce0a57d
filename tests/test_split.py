"""A credit shared among parts, on tiny models: sums, both APIs, invariances, second derivations in float64.

The oracle of a split is written out here: gradients of the float64 head at 256 Gauss-Legendre nodes of a segment, dotted
with parts that come from TransformerLens's own cache.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch

from iglens_tl import (
    MissingActivationError,
    QuadratureError,
    SplitResult,
    TokenSet,
    UnsupportedModelError,
    ig_lens,
    split,
)
from tests import oracles, support
from tests.families import FAMILIES
from tests.models import BATCH, HOOKED, NATIVE, TOKENS, hooked, native
from tests.subjects import D_MODEL, D_VOCAB, KINDS, N_LAYERS, cached, each_kind, one_kind, subject, tiny
from tests.test_architectures import _BY_WAY
from tests.versions import TL_MAJOR

TOLERANCE = 1e-6  # the default of `split`
# Parts are float32 numbers of a float32 run; the oracle takes the same ones: what differs is the quadrature alone.
SAME_SPLIT = 1e-7
UNITS = ("block", "sublayer", "head", "neuron")
PATHS = ("sequential", "straight")

by_unit = pytest.mark.parametrize("unit", UNITS)
by_path = pytest.mark.parametrize("path", PATHS)


gauss = functools.cache(np.polynomial.legendre.leggauss)


def averaged(head: oracles.Head, start, end, target: int, n: int = 256) -> torch.Tensor:
    nodes, weights = (torch.from_numpy(array) / 2 for array in gauss(n))
    points = (start.double() + (nodes[:, None] + 0.5) * (end.double() - start.double())).requires_grad_(True)
    (gradients,) = torch.autograd.grad(head.prob(points, torch.full((n,), target)).sum(), points)
    return weights @ gradients


def credits_of(result: SplitResult, *labels: str) -> torch.Tensor:
    names = [part.label for part in result.parts]
    return torch.stack([result.attribution[names.index(label)] for label in labels])


def sums(result: SplitResult) -> torch.Tensor:
    """What the parts of each segment add up to, one number at a time."""
    total = torch.zeros_like(result.gap)
    for place, part in enumerate(result.parts):
        total[part.segment] += result.attribution[place]
    return total


def assert_adds_up(result: SplitResult) -> None:
    whole = result.whole
    assert (sums(result) - whole.attribution).abs().max() <= result.tolerance
    assert (result.gap - (sums(result) - whole.attribution)).abs().max() <= 1e-12
    assert (sums(result).sum(0) - whole.total).abs().max() <= result.tolerance * whole.n_segments
    assert (result.error <= result.tolerance).all()


# --- Against a rule written out ----------------------------------------------------------------------------------


@each_kind
def test_sublayers_are_those_of_a_fixed_rule_on_the_same_states(kind):
    model, head = subject(kind).model, subject(kind).head
    cache = cached(model, TOKENS)
    result = split(model, TOKENS, targets=7)
    for layer in range(N_LAYERS):
        start, end = cache["resid_pre", layer][0, -1], cache["resid_post", layer][0, -1]
        direction = averaged(head, start, end, 7)
        expected = [float(direction @ cache[name, layer][0, -1].double()) for name in ("attn_out", "mlp_out")]
        got = credits_of(result, f"{layer}_attn", f"{layer}_mlp").flatten().tolist()
        assert got == pytest.approx(expected, abs=SAME_SPLIT)
        middle = start.double() + cache["attn_out", layer][0, -1].double()
        other = start.double() + cache["mlp_out", layer][0, -1].double()
        f = {
            name: float(head.prob(h, torch.tensor(7)))
            for name, h in (("s", start), ("m", middle), ("o", other), ("e", end))
        }
        place = [part.label for part in result.parts].index(f"{layer}_attn")
        first, second = result.attn_first[:, 0, 0], result.mlp_first[:, 0, 0]
        # The state between is the model's own float32 sum.
        assert first[place : place + 2].tolist() == pytest.approx([f["m"] - f["s"], f["e"] - f["m"]], abs=1e-6)
        assert second[place : place + 2].tolist() == pytest.approx([f["e"] - f["o"], f["o"] - f["s"]], abs=1e-6)
    assert torch.equal(result.mean_of_orders, (result.attn_first + result.mlp_first) / 2)
    assert result.attn_first.sum(0) == pytest.approx(result.whole.total, abs=1e-12)
    assert result.mlp_first.sum(0) == pytest.approx(result.whole.total, abs=1e-12)


@each_kind
def test_straight_credits_of_blocks_are_those_of_a_2048_point_rule(kind):
    model, head = subject(kind).model, subject(kind).head
    cache = cached(model, TOKENS)
    states = [cache["resid_pre", layer][0, -1].double() for layer in range(N_LAYERS)]
    states.append(cache["resid_post", N_LAYERS - 1][0, -1].double())
    direction = averaged(head, states[0], states[-1], 7, 2048)
    result = split(model, TOKENS, targets=7, unit="block", path="straight")
    got = credits_of(result, "0", "1", "2").flatten().tolist()
    assert got == pytest.approx([float(direction @ (b - a)) for a, b in pairwise(states)], abs=SAME_SPLIT)
    sequential = ig_lens(model, TOKENS, targets=7, dtype=torch.float64).attribution
    assert (result.sequential[:N_LAYERS] - sequential).abs().max() <= 1e-12
    last = oracles.gradient(head, states[-1], 7)
    linear = [float(last @ (b - a)) for a, b in pairwise(states)]
    assert result.linear[:N_LAYERS].flatten().tolist() == pytest.approx(linear, abs=1e-8)  # float32 updates


# --- Every architecture, both APIs -------------------------------------------------------------------------------

_FAMILIES = (
    "GPT-2",
    "Llama",
    "GPT-NeoX",
    "Gemma-2",
    "OLMo-2",
    "Granite",
    "BLOOM",
    "Mixtral",
    "Qwen3",
    "Mamba",
    "Jamba",
)
_NO_NEURONS = {"Mixtral", "Jamba"}
_CELLS = [
    (name, way)
    for kind in ("exact", "as wrapped")
    for name, way in support.cells(kind)
    if name in _FAMILIES and way in ("hooked", "bridge")
]


@pytest.mark.parametrize(("name", "way"), _CELLS)
def test_families(name, way):
    """Every unit adds up to the credit; finer parts add up to coarser ones; experts' neurons are refused."""
    model = _BY_WAY[way](FAMILIES[name], FAMILIES[name].build())
    by = {unit: split(model, BATCH, unit=unit, positions=[-1, 1], keep=10) for unit in ("block", "sublayer", "head")}
    if name in _NO_NEURONS:
        with pytest.raises(UnsupportedModelError, match="does not expose its neurons"):
            split(model, BATCH, unit="neuron")
    else:
        by["neuron"] = split(model, BATCH, unit="neuron", positions=[-1, 1], keep=10)
    for unit, result in by.items():
        assert_adds_up(result)
        assert result.unit == unit
        # Rounding of float32 sums of numbers below 20.
        assert result.attribution[result.of_kind("rounding")].abs().max() <= 1e-5
    for kind, finer, pieces in (("attn", "head", ("head", "bias")), ("mlp", "neuron", ("neuron", "others", "bias"))):
        result = by.get(finer, by["sublayer"])
        for place in by["sublayer"].of_kind(kind):
            part = by["sublayer"].parts[place]
            inside = [i for i, p in enumerate(result.parts) if p.segment == part.segment and p.kind in (*pieces, kind)]
            inside = [i for i in inside if finer == "head" or result.parts[i].kind != "attn"]
            assert (result.attribution[inside].sum(0) - by["sublayer"].attribution[place]).abs().max() <= 1e-5


_OWN = [("hooked", name, HOOKED[name]) for name in HOOKED if "hooked" in KINDS]
_OWN += [("bridge", name, NATIVE[name]) for name in NATIVE if "bridge" in KINDS]


@pytest.mark.parametrize(("kind", "settings"), [(k, s) for k, _, s in _OWN], ids=[f"{k}: {n}" for k, n, _ in _OWN])
def test_transformer_lens_models(kind, settings):
    model = (hooked if kind == "hooked" else native)(**settings)
    tokens = BATCH % model.cfg.d_vocab_out
    for unit in ("sublayer", "head"):
        assert_adds_up(split(model, tokens, unit=unit))


# --- Axioms ------------------------------------------------------------------------------------------------------


def parts_of_blocks(model, tokens=TOKENS) -> dict[str, dict[str, torch.Tensor]]:
    cache = cached(model, tokens)
    return {str(n): {"attention": cache["attn_out", n], "mlp": cache["mlp_out", n]} for n in range(N_LAYERS)}


@each_kind
def test_own_parts_are_treated_as_the_models_own(kind):
    model = subject(kind).model
    own, known = split(model, TOKENS, unit=parts_of_blocks(model)), split(model, TOKENS)
    assert [part.kind for part in own.parts] == ["own", "own", "remainder"] * N_LAYERS
    assert (own.attribution - known.attribution).abs().max() <= 1e-12
    assert_adds_up(own)


@each_kind
def test_splitting_zeros_scaling_and_order(kind):
    model = subject(kind).model
    parts = parts_of_blocks(model)
    plain = split(model, TOKENS, unit=parts)
    other = {label: {
        "mlp": inner["mlp"], "a third": inner["attention"] / 3, "zero": torch.zeros_like(inner["mlp"]),
        "two thirds": inner["attention"] * 2 / 3,
    } for label, inner in reversed(parts.items())}  # fmt: skip
    changed = split(model, TOKENS, unit=other)
    for n in range(N_LAYERS):
        of = {part.label: plain.attribution[i] for i, part in enumerate(plain.parts) if part.segment == n}
        now = {part.label: changed.attribution[i] for i, part in enumerate(changed.parts) if part.segment == n}
        assert float(now["zero"]) == 0.0
        assert float(now["mlp"]) == pytest.approx(float(of["mlp"]), abs=1e-12), "order"
        # thirds of float32 numbers are rounded
        assert float(now["a third"]) == pytest.approx(float(of["attention"]) / 3, abs=1e-7)
        assert float(now["a third"] + now["two thirds"]) == pytest.approx(float(of["attention"]), abs=1e-7)


@one_kind
def test_what_is_left_out_is_a_row_of_its_own(kind):
    model = subject(kind).model
    parts = {"1": {"mlp": parts_of_blocks(model)["1"]["mlp"]}}
    result, known = split(model, TOKENS, unit=parts), split(model, TOKENS)
    assert [part.label for part in result.parts] == ["0_remainder", "mlp", "1_remainder", "2_remainder"]
    assert float(credits_of(result, "1_remainder")) == pytest.approx(float(credits_of(known, "1_attn")), abs=1e-6)
    assert_adds_up(result)


@one_kind
@pytest.mark.parametrize("path", PATHS)
def test_a_linear_readout_gives_direct_logit_attribution(kind, path):
    """Without a norm the logit is linear in the stream: parts times the unembedding's column, in closed form."""
    model = tiny(kind, normalization_type=None)
    cache = cached(model, TOKENS)
    column = oracles.lens_head(model).unembed[7]
    result = split(model, TOKENS, targets=7, metric="logit", path=path)
    for layer in range(N_LAYERS):
        expected = [float(column @ cache[name, layer][0, -1].double()) for name in ("attn_out", "mlp_out")]
        assert credits_of(result, f"{layer}_attn", f"{layer}_mlp").flatten().tolist() == pytest.approx(
            expected, abs=1e-9
        )
    assert (result.linear - result.attribution).abs().max() <= 1e-9
    assert result.nodes.unique().tolist() == [9], "a linear readout needs no refinement"


@each_kind
def test_swapping_targets_flips_the_sign(kind):
    model = subject(kind).model
    one = split(model, TOKENS, targets=7, incorrect_targets=9)
    other = split(model, TOKENS, targets=9, incorrect_targets=7)
    assert (one.attribution + other.attribution).abs().max() <= SAME_SPLIT
    apart = split(model, TOKENS, targets=7).attribution - split(model, TOKENS, targets=9).attribution
    assert (one.attribution - apart).abs().max() <= SAME_SPLIT


@each_kind
@by_path
def test_blocks_relabelled_keep_their_straight_credit(kind, path):
    """Along the straight way, only what was added counts: grouping and order of the states between change nothing."""
    model = subject(kind).model
    fine = split(model, TOKENS, unit="sublayer", path="straight")
    coarse = split(model, TOKENS, unit="sublayer", path="straight", layers=[2, 3])
    names = [f"{n}_{kind_}" for n in range(N_LAYERS) for kind_ in ("attn", "mlp")]
    assert (credits_of(fine, *names) - credits_of(coarse, *names)).abs().max() <= 1e-12
    as_own = {"b": parts_of_blocks(model)["2"]["mlp"], "a": parts_of_blocks(model)["0"]["attention"]}
    own = split(model, TOKENS, unit=as_own, path="straight")
    assert (credits_of(own, "b", "a") - credits_of(fine, "2_mlp", "0_attn")).abs().max() <= SAME_SPLIT


# --- The keywords of ig_lens -------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "settings",
    [
        {"metric": "log_prob"},
        {"metric": "log_odds"},
        {"metric": "logit"},
        {"targets": TokenSet([7, 9])},
        {"incorrect_targets": TokenSet([7, 9])},
        {"positions": None},
        {"layers": 2},
        {"layers": ["1_mid"]},
        {"incl_mid": True},
        {"baseline": "zero"},
        {"baseline": "mean"},
        {"baseline": torch.linspace(-1, 1, D_MODEL)},
        {"layers": [1, 3], "baseline": "zero"},
        {"max_memory": "50kB"},
    ],
    ids=str,
)
@by_path
def test_whole_is_what_ig_lens_gives(kind, settings, path):
    model = subject(kind).model
    result = split(model, BATCH, unit="head", path=path, **settings)
    assert_adds_up(result)
    known = ig_lens(model, BATCH, dtype=torch.float64, **settings)
    assert (result.whole.total - known.total).abs().max() <= 1e-12
    if path == "sequential":
        assert (result.whole.attribution - known.attribution).abs().max() <= 1e-12
    assert result.whole.segment_labels == (
        known.segment_labels if path == "sequential" else result.whole.segment_labels
    )


@each_kind
@by_unit
def test_rows_of_a_batch_and_of_a_padded_batch(kind, unit):
    model = subject(kind).model
    rows = [[3, 14, 15, 9, 26, 5], [40, 7, 31]]
    both = split(model, rows, unit=unit, targets=7, keep=64)
    for place, row in enumerate(rows):
        alone = split(model, [row], unit=unit, targets=7, keep=64)
        assert [part.label for part in alone.parts] == [part.label for part in both.parts]
        assert (
            alone.attribution[:, 0] - both.attribution[:, place]
        ).abs().max() <= 1e-5  # batched float32 passes differ


@each_kind
def test_through_a_lens(kind):
    """An affine lens maps parts exactly; what it changes from state to state is a row, and a bent lens has a remainder."""
    model = subject(kind).model
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.eye(D_MODEL) + 0.1 * torch.randn(D_MODEL, D_MODEL, generator=generator) for _ in range(N_LAYERS)]
    matrices.append(torch.eye(D_MODEL))

    def affine(state, index):
        return state @ matrices[index].to(state.dtype)

    result = split(model, TOKENS, lens=affine, dtype=torch.float64)
    assert_adds_up(result)
    assert result.attribution[result.of_kind("remainder")].abs().max() <= 1e-6
    assert result.attribution[result.of_kind("lens")].abs().max() >= 1e-3
    plain = split(model, TOKENS, lens=lambda state, index: state)
    # A float32 lens takes differences of float32 states.
    assert (plain.attribution[plain.of_kind("attn", "mlp")] - split(model, TOKENS).attribution[
        split(model, TOKENS).of_kind("attn", "mlp")]).abs().max() <= 1e-5  # fmt: skip
    assert_adds_up(split(model, TOKENS, lens=lambda h, i: h if i == N_LAYERS else h.tanh(), path="sequential"))


@each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes_and_nothing_left_behind(kind, mode):
    model = subject(kind).model
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with mode():
        result = split(model, TOKENS)
    assert torch.equal(result.attribution, split(model, TOKENS).attribution)
    assert not result.attribution.requires_grad
    assert not result.attribution.is_inference()
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())


@each_kind
def test_from_a_cache(kind):
    model = subject(kind).model
    cache = cached(model, TOKENS)
    run = split(model, TOKENS, unit="head")
    assert (split(cache, TOKENS, unit="head").attribution - run.attribution).abs().max() <= 1e-6
    few = cached(model, TOKENS, names_filter=lambda name: name.endswith(("resid_pre", "resid_post")))
    with pytest.raises(MissingActivationError, match="hook_z"):
        split(few, TOKENS, unit="head")


@one_kind
def test_neurons_are_streamed_and_the_largest_kept(kind):
    model = subject(kind).model
    every = split(model, BATCH, unit="neuron", keep=1000)
    few = split(model, BATCH, unit="neuron", keep=5)
    assert len(every.of_kind("others")) == 0
    assert len(few.of_kind("neuron")) == 5 * N_LAYERS
    names = {part.label: i for i, part in enumerate(every.parts)}
    for place in few.of_kind("neuron"):
        assert torch.equal(few.attribution[place], every.attribution[names[few.parts[place].label]])
    for layer in range(N_LAYERS):
        sizes = {
            p.label: float(every.attribution[i].abs().max())
            for i, p in enumerate(every.parts)
            if p.kind == "neuron" and p.layer == layer
        }
        kept = {part.label for part in few.parts if part.kind == "neuron" and part.layer == layer}
        assert kept == set(sorted(sizes, key=sizes.__getitem__)[-5:])


# --- A sparse autoencoder ----------------------------------------------------------------------------------------


class ToyAutoencoder:
    """Features of an MLP's output: `features = relu(x W_enc + b_enc)`, `x = features W_dec + b_dec + error`."""

    def __init__(self, d_model: int, n_features: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.encoder = torch.randn(d_model, n_features, generator=generator) / d_model**0.5
        self.decoder = torch.randn(n_features, d_model, generator=generator) / d_model**0.5
        self.bias = 0.1 * torch.randn(d_model, generator=generator)

    def parts(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = ((x - self.bias) @ self.encoder).relu()
        parts = {f"feature {i}": features[..., i, None] * self.decoder[i] for i in range(len(self.decoder))}
        return {**parts, "bias": self.bias.expand_as(x), "error": x - features @ self.decoder - self.bias}


@each_kind
def test_features_and_error_of_an_autoencoder_add_up_to_the_mlp(kind):
    model = subject(kind).model
    cache = cached(model, TOKENS)
    parts = {"1": {"attention": cache["attn_out", 1], **ToyAutoencoder(D_MODEL, 40).parts(cache["mlp_out", 1])}}
    result, known = split(model, TOKENS, unit=parts), split(model, TOKENS)
    features = [
        i for i, part in enumerate(result.parts) if part.label.startswith("feature") or part.label in ("bias", "error")
    ]
    assert len(features) == 42
    assert float(result.attribution[features].sum()) == pytest.approx(float(credits_of(known, "1_mlp")), abs=1e-6)
    assert float(credits_of(result, "1_remainder").abs()) <= 1e-6


# --- Refusals ----------------------------------------------------------------------------------------------------


@one_kind
def test_a_budget_that_does_not_suffice_names_the_segments(kind):
    model = tiny(kind)
    with pytest.raises(QuadratureError, match=r"segments did not reach 1e-09 probability with 9 gradients: .*0 \("):
        split(model, TOKENS, max_nodes=9, tolerance=1e-9)


@one_kind
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "layer"}, "unit must be one of 'block', 'sublayer', 'head', 'neuron'"),
        ({"path": "curved"}, "path must be one of"),
        ({"tolerance": 0}, "tolerance must be a positive number"),
        ({"max_nodes": 3}, "max_nodes must be at least 9"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"metric": "logit", "targets": TokenSet([1, 2])}, "single tokens"),
        ({"unit": {"7": {}}}, "there is no segment '7'; the segments are 0, 1, 2"),
        ({"unit": {"a": torch.zeros(1, 1, D_MODEL)}}, "the path has 3 segments"),
        ({"unit": {"0": {"a": torch.zeros(1, 1, 3)}}}, r"0: a must be a floating-point tensor"),
        ({"unit": {"0": {"a": torch.full((1, 1, D_MODEL), torch.nan)}}}, "holds NaN"),
    ],
    ids=str,
)
def test_refusals(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        split(subject(kind).model, TOKENS, **settings)


@one_kind
def test_parts_that_a_hook_keeps_from_adding_up_are_refused(kind):
    model = subject(kind).model
    shift = [("blocks.1.hook_resid_pre", lambda tensor, hook: tensor + 1)]
    with model.hooks(fwd_hooks=shift), pytest.raises(UnsupportedModelError, match="do not add up"):
        split(model, TOKENS)


def test_every_kind_of_unit_is_swept_on_every_way():
    ways = {way for _, way in _CELLS}
    assert ways == {way for way in support.WAYS[TL_MAJOR] if way in ("hooked", "bridge")}
    assert D_VOCAB == 50
