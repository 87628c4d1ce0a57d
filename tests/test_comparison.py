"""Methods side by side, and the two that integrate through the full model."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from captum.attr import LayerConductance, LayerIntegratedGradients

from iglens_tl import (
    LayerPathResult,
    LensComparison,
    TokenSet,
    compare,
    direct_logit_attribution,
    ig_lens,
    layer_conductance,
    layer_integrated_gradients,
    logit_lens,
)
from tests.models import BATCH, TOKENS
from tests.smollm2 import PROMPT
from tests.subjects import KINDS, N_LAYERS, cached, each_kind, padded, residual_names, subject, tiny
from tests.watching import forwards, untouched

pytest_plugins = ["tests.smollm2"]

FOUND = {"layer_conductance": layer_conductance, "layer_integrated_gradients": layer_integrated_gradients}
CAPTUM = {"layer_conductance": LayerConductance, "layer_integrated_gradients": LayerIntegratedGradients}
each_path = pytest.mark.parametrize("method", FOUND)


# --- compare -----------------------------------------------------------------------------------------------------


@each_kind
def test_the_columns_are_what_the_methods_say(kind):
    model = subject(kind).model
    ask = {"targets": 7, "positions": None}
    table = compare(model, BATCH, **ask)
    credits, levels = ig_lens(model, BATCH, **ask), logit_lens(model, BATCH, **ask)
    shares = direct_logit_attribution(model, BATCH, unit="block", **ask)
    assert table.method_labels == ("ig_lens", "logit_lens", "dla")
    assert table.units == ("probability", "probability", "logits")
    assert torch.equal(table.amounts[0], credits.attribution)
    # logit_lens, which also looks for the top tokens, reads whole rows, the others tiles of the vocabulary: float32 products of
    # other shapes
    assert (table.amounts[1] - levels.prob[1:]).abs().max() <= 1e-6
    assert (table.amounts[2] - shares.attribution[1 : N_LAYERS + 1]).abs().max() <= 1e-6
    assert table.segment_labels == credits.segment_labels == shares.part_labels[1 : N_LAYERS + 1]


@each_kind
@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("baseline", ["embed", "zero", "mean"])
def test_each_column_sums_to_what_it_should(kind, layers, baseline):
    model = subject(kind).model
    table = compare(model, BATCH, targets=7, incorrect_targets=9, layers=layers, baseline=baseline)
    with torch.no_grad():
        logits = model(BATCH)[:, -1:].double()
    assert table.gap[0].abs().max() <= 1e-12
    assert table.gap[1].isnan().all(), "levels have no sum"
    assert table.gap[2].abs().max() <= 1e-4
    assert (table.expected[2] - (logits[..., 7] - logits[..., 9])).abs().max() <= 1e-4
    probs = logits.softmax(-1)
    assert (table.amounts[1, -1] - (probs[..., 7] - probs[..., 9])).abs().max() <= 1e-6


@each_kind
def test_one_cache_one_call_and_no_run(kind):
    model = subject(kind).model
    cache = cached(model, TOKENS, names_filter=residual_names())
    with forwards(model) as count, untouched(model):
        table = compare(cache, targets=7)
    assert count.runs == 0
    with forwards(model) as count, untouched(model):
        again = compare(model, TOKENS, targets=7)
    assert count.runs == 1
    assert (table.amounts - again.amounts).abs().max() <= 1e-6


@each_kind
def test_mid_states_are_compared_too(kind):
    model = subject(kind).model
    table = compare(model, TOKENS, targets=7, incl_mid=True)
    shares = direct_logit_attribution(model, TOKENS, targets=7)
    ours = dict(zip(shares.part_labels, shares.attribution[:, 0, 0].tolist(), strict=True))
    for label, amount in zip(table.segment_labels, table.amounts[2, :, 0, 0].tolist(), strict=True):
        assert abs(ours[label] - amount) <= 1e-5


@each_kind
def test_rank_correlation_is_spearmans(kind):
    table = compare(subject(kind).model, BATCH, targets=7, positions=None, incl_mid=True)
    frame = table.to_dataframe()
    for batch, pos in table.mask.nonzero().tolist():
        own = frame[(frame["batch"] == batch) & (frame["position"] == pos)]
        wanted = own[list(table.method_labels)].rank().corr().to_numpy()
        assert abs(table.rank_correlation[:, :, batch, pos].numpy() - wanted).max() <= 1e-12


def test_disagreements_by_hand():
    table = compare(subject(KINDS[0]).model, TOKENS, targets=7)
    amounts = torch.tensor([[3.0, -1.0, 1e-9], [0.1, 0.2, 0.3], [1.0, 2.0, -3.0]]).double()[..., None, None]
    by_hand = LensComparison(**{**vars(table), "amounts": amounts})
    found = by_hand.disagreements("ig_lens", "dla")
    assert found["sign_differs"].tolist() == [False, True, False], "the third credit is rounding"
    assert found["rank_ig_lens"].tolist() == [1, 3, 2]
    assert found["rank_dla"].tolist() == [2, 1, 3]
    assert found["rank_difference"].tolist() == [-1, 2, -1]
    assert not by_hand.disagreements("ig_lens", "logit_lens")["sign_differs"].any(), "a level has no sign"
    assert float(by_hand.rank_correlation[0, 2]) == pytest.approx(-0.5)
    assert "sign differs      ig_lens / dla: 1" in str(by_hand)
    with pytest.raises(ValueError, match="method must be one of 'ig_lens'"):
        by_hand.disagreements("ig_lens", "layer_conductance")


@each_kind
def test_tables_and_files(kind, tmp_path):
    tokens, mask = padded("left")
    table = compare(subject(kind).model, tokens, targets=7, positions=None, attention_mask=mask)
    assert len(table.to_dataframe()) == int(mask.sum()) * N_LAYERS
    assert len(table.sums_frame()) == int(mask.sum()) * 3
    assert table.amounts[..., ~table.mask].isnan().all()
    table.save(tmp_path / "x.safetensors")
    assert LensComparison.load(tmp_path / "x.safetensors").equals(table)
    assert "more tokens" in str(table)


def test_markup_in_a_token_is_no_markup():
    table = compare(subject(KINDS[0]).model, TOKENS, targets=7)
    bold = LensComparison(**{**vars(table), "target_strings": (("<b>$$</b>",),)})
    assert "<b>$$" not in bold._repr_html_()
    assert "&lt;b&gt;" in bold._repr_html_()


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        ({"methods": "dla"}, TypeError, "write"),
        ({"methods": ()}, ValueError, "at least one"),
        ({"methods": ("dla", "dla")}, ValueError, "none twice"),
        ({"methods": ("lime",)}, ValueError, "'layer_conductance'"),
        ({"targets": TokenSet([7, 9])}, ValueError, "single tokens"),
        ({"metric": "p"}, ValueError, "metric"),
        ({"methods": ("layer_conductance",), "incl_mid": True}, ValueError, "whole-layer"),
    ],
)
def test_refusals(ask, error, message):
    model = subject(KINDS[0]).model
    with forwards(model) as count, untouched(model), pytest.raises(error, match=message):
        compare(model, TOKENS, **{"targets": 7, **ask})
    assert count.runs == 0


def test_a_full_model_method_needs_the_tokens():
    model = subject(KINDS[0]).model
    with pytest.raises(ValueError, match="give its tokens"):
        compare(cached(model, TOKENS), targets=7, methods=("layer_conductance",))


@pytest.mark.smollm2
def test_smollm2_one_cache_one_call(smollm2):
    _, cache = smollm2.run_with_cache(PROMPT)
    with forwards(smollm2) as count:
        table = compare(cache, targets=" Paris")
    assert count.runs == 0
    assert table.gap[0].abs().max() <= 1e-12
    assert table.gap[2].abs().max() <= 1e-4
    assert (
        table.amounts[0].argmax() == 29
    )  # which block is first under DLA depends on centring: a logit is no invariant
    assert "[probability]" in str(table)


# --- Through the full model --------------------------------------------------------------------------------------


@each_kind
@each_path
def test_both_say_what_they_run_and_leave_the_model_alone(kind, method, capsys):
    model = subject(kind).model
    with untouched(model):
        result = FOUND[method](model, BATCH, targets=7, n_steps=5)
    assert result.forwards == result.settings["sequences_announced"]
    assert f"{result.forwards:,} sequences of 6 tokens" in capsys.readouterr().err
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (result.layer_sum - result.total - result.delta).abs().max() <= 1e-12
    assert (result.attribution.sum(-1) - result.layer_sum).abs().max() <= 1e-12


class _Direct(torch.nn.Module):
    """The probability of a token at the last position as a function of the first states, hooked here by hand."""

    def __init__(self, model, layer, token=7):
        super().__init__()
        self.model, self.layer, self.token, self.tap = (model,), layer, token, torch.nn.Identity()

    def forward(self, first):
        (model,) = self.model
        hooks = [("blocks.0.hook_resid_pre", lambda tensor, hook: first)]
        hooks.append((f"blocks.{self.layer}.hook_resid_post", lambda tensor, hook: self.tap(tensor)))
        logits = model.run_with_hooks(TOKENS.expand(len(first), -1), fwd_hooks=hooks)
        return logits[:, -1].double().softmax(-1)[:, self.token]


@each_kind
@each_path
@pytest.mark.parametrize("layer", range(N_LAYERS))
def test_equals_captum_called_directly(kind, method, layer):
    model = subject(kind).model
    first = cached(model, TOKENS)["blocks.0.hook_resid_pre"]
    direct = CAPTUM[method](_Direct(model, layer), None)
    direct.layer = direct.forward_func.tap
    theirs, delta = direct.attribute(first, torch.zeros_like(first), n_steps=10, return_convergence_delta=True)
    mine = FOUND[method](model, TOKENS, targets=7, n_steps=10, progress=False)
    assert (mine.attribution[layer + 1, 0, 0] - theirs[0].detach().double().sum(-1)).abs().max() <= 1e-5
    assert abs(float(mine.delta[layer + 1]) - float(delta)) <= 1e-5


def top_token(model):
    with torch.no_grad():
        return int(model(TOKENS)[0, -1].argmax())


@each_kind
def test_conductance_against_finite_differences(kind):
    """Slow, and nothing of captum's: `sum over the path of grad_h F . (h(next) - h)`, the gradient a central difference."""
    model, layer, n = subject(kind).model, 1, 12
    # From another prompt's first states: at nought a norm is singular, and along a ray it sees no change.
    first, start = (cached(model, tokens)["blocks.0.hook_resid_pre"] for tokens in (TOKENS, BATCH[1:]))
    module = _Direct(model, layer, top_token(model))
    nodes = (torch.from_numpy(np.polynomial.legendre.leggauss(n + 1)[0]) + 1) / 2
    states, total = [], torch.zeros(first.shape[1], dtype=torch.float64)
    for node in nodes.tolist():
        kept = []
        handle = module.tap.register_forward_hook(lambda mod, args, out, kept=kept: kept.append(out.detach()))
        with torch.no_grad():
            module(start + node * (first - start))
        handle.remove()
        states.append((start + node * (first - start), kept[0]))
    for (at, here), (_, there) in itertools.pairwise(states):
        for place in range(first.shape[1]):
            step = torch.zeros_like(here)
            step[0, place] = there[0, place] - here[0, place]
            size = 0.05 / max(float(step.norm()), 1e-9)
            total[place] += (_moved(module, at, size * step) - _moved(module, at, -size * step)) / (2 * size)
    mine = layer_conductance(model, TOKENS, n_steps=n, baseline=start[0], progress=False)
    assert mine.attribution[layer + 1, 0, 0].abs().max() > 1e-2
    # Central differences over 0.05 in float32: up to 5e-4 here.
    assert (mine.attribution[layer + 1, 0, 0] - total).abs().max() <= 3e-3


def _moved(module, at, step):
    """The probability with the layer's state moved by a step."""
    handle = module.tap.register_forward_hook(lambda mod, args, out: out + step)
    with torch.no_grad():
        value = float(module(at))
    handle.remove()
    return value


@each_kind
def test_the_sum_over_layers_is_not_the_change(kind):
    """The control: within a layer the sum is the change, over layers it is not, where IG-Lens's credits are."""
    model = subject(kind).model
    start = cached(model, BATCH[1:])["blocks.0.hook_resid_pre"][0]
    result = layer_integrated_gradients(model, TOKENS, baseline=start, n_steps=60, progress=False)
    assert result.delta.abs().max() <= 1e-3
    assert (result.sum_over_layers - result.total).abs().max() > 0.05
    credits = ig_lens(model, TOKENS)
    assert (credits.attribution.sum(0) - credits.total).abs().max() <= 1e-12


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(kind, side):
    model = subject(kind).model
    tokens, mask = padded(side)
    both = layer_integrated_gradients(model, tokens, targets=7, attention_mask=mask, n_steps=4, progress=False)
    for i, (row, keep) in enumerate(zip(tokens, mask, strict=True)):
        single = layer_integrated_gradients(model, row[keep.bool()][None], targets=7, n_steps=4, progress=False)
        assert (both.attribution[:, i, :, keep.bool()] - single.attribution[:, 0]).abs().max() <= 1e-5
        assert both.attribution[:, i, :, ~keep.bool()].abs().sum() <= 1e-6


@each_path
def test_path_results_are_saved_and_loaded(method, tmp_path):
    result = FOUND[method](subject(KINDS[0]).model, BATCH, targets=7, n_steps=3, progress=False)
    result.save(tmp_path / "x.safetensors")
    assert LayerPathResult.load(tmp_path / "x.safetensors").equals(result)
    assert list(result.to_dataframe()["state"])[:4] == ["0_pre", "1_pre", "2_pre", "final_post"]
    assert "convergence" not in str(result)
    assert method.replace("_", " ") in str(result)


@each_path
def test_compare_shows_their_gap(method):
    table = compare(tiny(KINDS[0]), TOKENS, methods=("ig_lens", method), n_steps=20, progress=False)
    assert table.gap[0].abs().max() <= 1e-12
    assert table.gap[1].abs().max() > 1e-3
    assert "no theorem" in str(table)


def test_without_captum_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ImportError, match=r"needs captum .*pip install iglens_tl\[companions\]"):
        layer_conductance(subject(KINDS[0]).model, TOKENS, targets=7)
