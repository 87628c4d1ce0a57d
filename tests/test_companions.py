"""Logit lens and direct logit attribution: what they add up to, and that two other ways of computing them agree."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from iglens_tl import (
    NEXT,
    DLAResult,
    LogitLensResult,
    MissingActivationError,
    TokenSet,
    UnsupportedModelError,
    direct_logit_attribution,
    ig_lens,
    logit_lens,
)
from iglens_tl._core.readout import Readout
from tests import support
from tests.families import FAMILIES
from tests.models import BATCH, HOOKED, NATIVE, bridge, compatible, converted, folded, hooked, native
from tests.smollm2 import PARIS, PROMPT
from tests.subjects import D_VOCAB, KINDS, cached, each_kind, one_kind, padded, residual_names, subject, tiny
from tests.versions import TL_MAJOR
from tests.watching import forwards, untouched

pytest_plugins = ["tests.smollm2"]

# Float32 sums of some twenty vectors times a column of W_U: up to 4e-6 here, 1e-5 on SmolLM2.
SUMS = 1e-4
UNITS = ("block", "sublayer", "head")
_BY_WAY = {
    "hooked": lambda family, hf_model: converted(hf_model, family.hooked),
    "folded": lambda family, hf_model: folded(converted(hf_model, family.hooked)),
    "bridge": lambda family, hf_model: bridge(hf_model, family.architecture),
    "compatible": lambda family, hf_model: compatible(bridge(hf_model, family.architecture)),
}
# Attention beside a mixer, short convolutions, linear attention: TransformerLens hooks them elsewhere.
_PARTS_ELSEWHERE = {"Falcon-H1", "LFM2", "Qwen3-Next"}
_REFUSED_PARTS = [name for name, way in support.cells("exact") if name in _PARTS_ELSEWHERE and way == "bridge"]
_WITH_PARTS = [cell for cell in support.cells("exact") if cell[0] not in _PARTS_ELSEWHERE]


def logits_of(model, tokens=BATCH):
    with torch.no_grad():
        return model(tokens)


def uncapped(model, logits):
    """The logits before the model's soft-cap."""
    cap = getattr(model.cfg, "output_logits_soft_cap", None) or -1.0
    return cap * torch.atanh(logits.double() / cap) if cap > 0 else logits.double()


def assert_shares_the_logit(model, target=0, tolerance=SUMS):
    """Parts of every unit sum to the logit that the model itself puts out, and finer parts to coarser ones."""
    logits = logits_of(model)
    wanted = uncapped(model, logits)[..., target]
    found = {unit: direct_logit_attribution(model, BATCH, targets=target, unit=unit, positions=None) for unit in UNITS}
    for unit, result in found.items():
        assert result.gap.abs().max() <= tolerance, unit
        assert (result.total - wanted).abs().max() <= max(tolerance, 1e-4 * float(wanted.abs().max())), unit
        assert (result.attribution.sum(0) - result.total).abs().max() <= 1e-9
    heads, sublayers = found["head"], found["sublayer"]
    for layer in range(model.cfg.n_layers):
        of_heads = [i for i, name in enumerate(heads.part_labels) if name.startswith((f"L{layer}H", f"{layer}_attn"))]
        whole = [i for i, name in enumerate(sublayers.part_labels) if name == f"{layer}_attn"]
        assert (heads.attribution[of_heads].sum(0) - sublayers.attribution[whole].sum(0)).abs().max() <= tolerance


@pytest.mark.hooked
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_hooked_parts_sum_to_the_logit(name, fold):
    model = hooked(**HOOKED[name])
    assert_shares_the_logit(folded(model) if fold else model)


@pytest.mark.bridge
@pytest.mark.parametrize("name", NATIVE)
def test_native_parts_sum_to_the_logit(name):
    assert_shares_the_logit(native(**NATIVE[name]))


@pytest.mark.parametrize(("name", "way"), _WITH_PARTS)
def test_parts_sum_to_the_logit(name, way):
    family = FAMILIES[name]
    model = _BY_WAY[way](family, family.build())
    logits = logits_of(model)
    for unit in ("block", "head"):  # heads bring the MLPs, and that they sum to their attention is checked on the way
        result = direct_logit_attribution(model, BATCH, targets=7, unit=unit)
        assert result.gap.abs().max() <= SUMS
        ahead = result.quantity.endswith("soft-cap")
        wanted = uncapped(model, logits)[:, -1:, 7] if ahead else logits[:, -1:, 7].double()
        assert (result.total - wanted).abs().max() <= SUMS
        assert result.part_labels[0] == "embed"


@pytest.mark.bridge
@pytest.mark.parametrize("name", _REFUSED_PARTS)
def test_parts_that_do_not_add_up_are_refused_with_the_numbers(name):
    model = bridge(FAMILIES[name].build(), FAMILIES[name].architecture)
    assert direct_logit_attribution(model, BATCH, targets=7, unit="block").gap.abs().max() <= SUMS
    with pytest.raises(UnsupportedModelError, match=r"do not add up: 0_pre \+ parts differs from 1_(mid|pre) by \d"):
        direct_logit_attribution(model, BATCH, targets=7, unit="sublayer")


@pytest.mark.hooked
def test_float64_sums_to_rounding():
    model = hooked().to(torch.float64)
    for unit in UNITS:
        result = direct_logit_attribution(model, BATCH, targets=7, unit=unit, positions=None)
        assert result.gap.abs().max() <= 1e-9
        assert (result.total - logits_of(model)[..., 7]).abs().max() <= 1e-9


@each_kind
def test_a_dropped_head_or_bias_is_seen(kind):
    """The sums are close enough to mean something: no head and no sublayer is as small as what they miss."""
    result = direct_logit_attribution(subject(kind).model, BATCH, targets=7, unit="head")
    sizes = dict(zip(result.part_labels, result.attribution.abs().amax((1, 2)).tolist(), strict=True))
    assert min(size for name, size in sizes.items() if "bias" not in name) > 5 * result.gap.abs().max()


@pytest.mark.hooked
@pytest.mark.parametrize(
    "name", ["LNPre", "RMSPre"]
)  # what folding leaves; on weights that are not folded theirs is wrong
def test_equals_logit_attrs_of_transformer_lens_where_it_folds(name):
    model = hooked(**HOOKED[name])
    cache = cached(model, BATCH)
    stack, labels = cache.decompose_resid(return_labels=True, mode="full")
    theirs = cache.logit_attrs(stack, tokens=torch.tensor([[7], [7]]))
    mine = direct_logit_attribution(cache, BATCH, targets=7, positions=None)
    ours = dict(zip(mine.part_labels, mine.attribution, strict=True))
    for label, row in zip(labels, theirs, strict=True):
        name = label.replace("_attn_out", "_attn").replace("_mlp_out", "_mlp")
        assert (ours[name] - row).abs().max() <= 1e-4, label


@each_kind
def test_logit_differences(kind):
    model = subject(kind).model
    one, other, both = (
        direct_logit_attribution(model, BATCH, unit="head", positions=None, **ask)
        for ask in ({"targets": 7}, {"targets": 9}, {"targets": 7, "incorrect_targets": 9})
    )
    assert (one.attribution - other.attribution - both.attribution).abs().max() <= 1e-9
    assert both.quantity == "the model's own logit difference"


@each_kind
def test_a_cache_gives_what_a_run_gives_and_runs_nothing(kind):
    model = subject(kind).model
    cache = cached(model, BATCH)
    for unit in UNITS:
        run = direct_logit_attribution(model, BATCH, targets=7, unit=unit)
        with forwards(model) as count, untouched(model):
            again = direct_logit_attribution(cache, BATCH, targets=7, unit=unit)
        assert count.runs == 0
        assert torch.equal(run.attribution, again.attribution)
        with forwards(model) as count, untouched(model):
            direct_logit_attribution(model, BATCH, targets=7, unit=unit)
            logit_lens(model, BATCH)
        assert count.runs == 2


@each_kind
def test_a_cache_of_states_says_what_heads_need(kind):
    cache = cached(subject(kind).model, BATCH, names_filter=residual_names())
    assert direct_logit_attribution(cache, BATCH, targets=7, unit="block").gap.abs().max() <= SUMS
    with pytest.raises(MissingActivationError, match=r"lacks .*blocks\.0\.attn\.hook_z.*names_filter=.*attn\.hook_z"):
        direct_logit_attribution(cache, BATCH, targets=7, unit="head")


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_equal_the_rows_alone(kind, side):
    model = subject(kind).model
    tokens, mask = padded(side)
    both = direct_logit_attribution(model, tokens, targets=7, unit="head", attention_mask=mask)
    levels = logit_lens(model, tokens, targets=7, attention_mask=mask)
    for i, (row, keep) in enumerate(zip(tokens, mask, strict=True)):
        alone = row[keep.bool()][None]
        single = direct_logit_attribution(model, alone, targets=7, unit="head")
        assert (both.attribution[:, i] - single.attribution[:, 0]).abs().max() <= 1e-5
        one = logit_lens(model, alone, targets=7)
        assert torch.equal(levels.rank[:, i], one.rank[:, 0])
        assert (levels.entropy[:, i] - one.entropy[:, 0]).abs().max() <= 1e-5


@each_kind
def test_masked_entries_are_empty(kind):
    tokens, mask = padded("right")
    levels = logit_lens(subject(kind).model, tokens, targets=7, attention_mask=mask, positions=None)
    assert levels.prob[:, ~levels.mask].isnan().all()
    assert (levels.rank[:, ~levels.mask] == -1).all()
    assert (levels.top_ids[:, ~levels.mask] == -1).all()
    assert levels.top_strings[0][3][5] == ()
    assert len(levels.to_dataframe()) == int(mask.sum()) * 4
    shares = direct_logit_attribution(subject(kind).model, tokens, targets=7, attention_mask=mask, positions=None)
    assert shares.attribution[:, ~shares.mask].isnan().all()


@each_kind
@pytest.mark.parametrize("max_memory", [None, 1])
def test_logit_lens_reads_the_values_of_ig_lens(kind, max_memory):
    """The same numbers, and every level as a float64 readout of its own has it."""
    model, head = subject(kind).model, subject(kind).head
    ask = {"targets": 7, "positions": None, "max_memory": max_memory}
    levels = logit_lens(model, BATCH, top_k=3, **ask)
    for name in ("prob", "log_prob", "logit"):
        # One reads whole rows and the other tiles of the vocabulary: float32 products of other shapes, logits of size 5.
        assert (getattr(levels, name) - ig_lens(model, BATCH, metric=name, **ask).values).abs().max() <= 3e-6
    cache = cached(model, BATCH, names_filter=residual_names())
    logs = torch.log_softmax(head.logits(torch.stack([cache[name] for name in residual_names()])), -1)
    assert (levels.entropy + (logs.exp() * logs).sum(-1)).abs().max() <= 1e-5
    assert (levels.kl - (logs[-1].exp() * (logs[-1] - logs)).sum(-1)).abs().max() <= 1e-5
    assert torch.equal(levels.rank, (logs > logs[..., 7:8]).sum(-1))
    assert (levels.top_probs - logs.exp().topk(3).values).abs().max() <= 1e-6
    assert torch.equal(levels.top_ids, logs.topk(3).indices)
    assert levels.kl[-1].max() <= 1e-6


@each_kind
def test_a_set_is_ranked_by_its_best_member(kind):
    model = subject(kind).model
    single = [logit_lens(model, BATCH, targets=token).rank for token in (7, 9)]
    both = logit_lens(model, BATCH, targets=TokenSet([7, 9])).rank
    assert torch.equal(both, torch.minimum(*single))
    with pytest.raises(ValueError, match="direct_logit_attribution needs single tokens"):
        direct_logit_attribution(model, BATCH, targets=TokenSet([7, 9]))


def test_ties_do_not_worsen_a_rank():
    model = tiny(KINDS[0], normalization_type=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.zero_()
    assert (logit_lens(model, BATCH, targets=7).rank == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_saved_and_loaded(kind, tmp_path):
    model = subject(kind).model
    for result, cls in (
        (logit_lens(model, BATCH, targets=7, incorrect_targets=9), LogitLensResult),
        (direct_logit_attribution(model, BATCH, targets=7, unit="head"), DLAResult),
    ):
        result.save(tmp_path / "x.safetensors")
        assert cls.load(tmp_path / "x.safetensors").equals(result)
        assert "target" in str(result)


@pytest.mark.smollm2
def test_smollm2_parts_sum_to_the_logit(smollm2):
    logits, cache = smollm2.run_with_cache(PROMPT)
    for unit in UNITS:
        result = direct_logit_attribution(cache, targets=" Paris", unit=unit, logits=logits)
        assert result.gap.abs().max() <= SUMS
        assert abs(float(result.total) - float(logits[0, -1, PARIS])) <= SUMS
    levels = logit_lens(cache, targets=" Paris", logits=logits)
    assert (levels.prob - ig_lens(cache, targets=" Paris").values).abs().max() <= 1e-6  # two float32 products
    assert levels.rank[-3:].flatten().tolist() == [0, 0, 0]
    assert levels.top_strings[-1][0][0][0] == " Paris"


def _by_the_tool(model):
    tool = importlib.import_module("transformer_lens.tools.analysis.logit_lens")
    return tool.logit_lens(model, BATCH, positions=None, return_type="probs").values


def _by_the_stack(model):
    with torch.no_grad():
        stack = cached(model, BATCH).accumulated_resid(apply_ln=True)
        return (stack @ model.W_U + model.b_U).softmax(-1)


_THEIRS = {2: _by_the_stack, 3: _by_the_stack, 4: _by_the_tool}[TL_MAJOR]  # TransformerLens has the tool since 4


@each_kind
def test_equals_the_logit_lens_of_transformer_lens(kind):
    model = subject(kind).model
    mine = logit_lens(model, BATCH, targets=7, positions=None)
    assert (mine.prob - _THEIRS(model)[..., 7]).abs().max() <= 1e-6


@pytest.mark.smollm2
def test_smollm2_equals_the_logit_lens_of_transformer_lens(smollm2_default):
    tokens = smollm2_default.to_tokens(PROMPT)
    with torch.no_grad():
        _, cache = smollm2_default.run_with_cache(tokens)
        stack = cache.accumulated_resid(apply_ln=True)[:, 0, -1]
        theirs = (stack @ smollm2_default.W_U + smollm2_default.b_U).double().softmax(-1)[:, PARIS]
    assert (logit_lens(cache, targets=PARIS).prob[:, 0, 0] - theirs).abs().max() <= 1e-6


@one_kind
def test_a_logit_lens_reads_each_state_once_however_little_memory(kind, monkeypatch):
    model = subject(kind).model
    cache = cached(model, BATCH)
    lens_of = functools.partial(logit_lens, cache, BATCH, positions=None, targets=NEXT, top_k=3)
    whole = lens_of()
    rows, product = [], Readout.logits
    monkeypatch.setattr(Readout, "logits", lambda self, x, out=None: rows.append(len(x)) or product(self, x, out))
    for budget in (1, 10 * 4 * D_VOCAB, 40 * 4 * D_VOCAB):
        rows.clear()
        little = lens_of(max_memory=budget)
        assert sum(rows) == whole.prob.isfinite().sum()
        for name in ("prob", "log_prob", "entropy", "kl", "logit", "top_probs"):
            # float32 products of other shapes
            torch.testing.assert_close(getattr(little, name), getattr(whole, name), rtol=0, atol=1e-5, equal_nan=True)
        assert torch.equal(little.rank, whole.rank)
        assert torch.equal(little.top_ids, whole.top_ids)
        assert (little.kl[-1][little.mask] == 0).all(), "the last state is compared with itself"
