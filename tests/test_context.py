"""`context_need` on tiny models: other ways of hooking, values by construction, batches, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import iglens_tl.context as context
from iglens_tl import ContextNeed, UnsupportedModelError, context_need, ig_lens, reference_updates
from iglens_tl._model.continuing import Call, CleanRun, same_arguments
from iglens_tl._model.host import host_of
from tests.families import FAMILIES
from tests.models import TOKENS, bridge
from tests.subjects import D_MODEL, KINDS, N_LAYERS, ROWS, cached, each_kind, padded, speaking, subject, tiny
from tests.watching import forwards, refused, untouched

# One float32 model run in another batch: up to 1e-7 in p here.
SAME = 2e-6
FOREIGN = [[2, 3, 5, 7, 11, 13, 17], [9, 8, 7, 6, 5, 4, 3], [21, 22, 23, 24, 25, 26, 27]]
LAST = TOKENS.shape[1] - 1


def prob(logits, target, at=-1):
    z = logits[0, at].double()
    return (z[target] - z.logsumexp(-1)).exp().item()


def hooked(model, hooks, target, tokens=TOKENS):
    with torch.no_grad():
        return prob(model.run_with_hooks(tokens, fwd_hooks=hooks), target)


def transplanted(model, layer, foreign, target):
    """The token's own state, put by a hook among those of another prompt."""
    own, others = cached(model, TOKENS), cached(model, torch.tensor([foreign]))
    name = f"blocks.{layer}.hook_resid_pre"

    def put(tensor, hook):
        return torch.cat([others[name][:, :LAST], own[name][:, LAST:]], dim=1)

    return hooked(model, [(name, put)], target)


def cut(model, layer, means, target):
    def put(tensor, hook, block):
        tensor = tensor.clone()
        tensor[:, LAST] = means[block].float()
        return tensor

    hooks = [
        (f"blocks.{block}.hook_attn_out", lambda tensor, hook, block=block: put(tensor, hook, block))
        for block in range(layer, N_LAYERS)
    ]
    return hooked(model, hooks, target)


def assert_curves(model):
    need = context_need(model, TOKENS, targets=7, reference=FOREIGN, n_foreign=3)
    means = reference_updates(model, FOREIGN, components=["attn"]).means["attn"]
    for layer in range(N_LAYERS):
        each = sorted(transplanted(model, layer, foreign, 7) for foreign in FOREIGN)
        assert sorted(need.transplant_each[layer, :, 0, 0].tolist()) == pytest.approx(each, abs=SAME)
        assert need.transplant[layer].item() == pytest.approx(sum(each) / 3, abs=SAME)
        assert need.attention_cut[layer].item() == pytest.approx(cut(model, layer, means, 7), abs=SAME)
    return need


@each_kind
def test_equal_to_hooked_forward_passes(kind):
    model = subject(kind).model
    need = assert_curves(model)
    assert need.settings["prefix_reused"]
    assert need.clean.item() == pytest.approx(ig_lens(model, TOKENS, targets=7).values[-1].item(), abs=SAME)
    for name in ("transplant", "attention_cut"):
        assert torch.equal(need.curve(name)[-1], need.clean)
        assert (need.gain(name).sum(0) - (need.clean - need.curve(name)[0])).abs().max() <= 1e-12
    assert need.state_labels == ("0_pre", "1_pre", "2_pre", "final_post")
    assert need.segment_labels == ig_lens(model, TOKENS).segment_labels


@pytest.mark.bridge
@pytest.mark.parametrize(("name", "reused"), [("GPT-J", True), ("Gemma-2", True), ("OLMo-2", True), ("BLOOM", False)])
def test_families(name, reused):
    """Parallel blocks, post-norms, and blocks that cannot be called by themselves."""
    need = assert_curves(bridge(FAMILIES[name].build()))
    assert need.settings["prefix_reused"] is reused


@each_kind
def test_without_attention_nothing_needs_its_context(kind):
    model = tiny(kind)
    for block in model.blocks:
        writes = block.attn if kind == "hooked" else block.attn.o
        for name, parameter in writes.named_parameters():
            if kind == "bridge" or name in ("W_O", "b_O"):
                parameter.data.zero_()
    need = context_need(model, TOKENS, targets=7, reference=FOREIGN, n_foreign=2)
    for name in ("transplant", "attention_cut"):
        assert (need.curve(name) - need.clean).abs().max() <= SAME
        assert need.causal_layer(name).item() == 0
    whole = context_need(subject(kind).model, TOKENS, targets=7, reference=FOREIGN, n_foreign=2)
    assert (whole.transplant[0] - whole.clean).abs().max() > 1e-3


@each_kind
def test_the_first_token_has_no_context_to_lose(kind):
    model = subject(kind).model
    need = context_need(model, TOKENS, positions=[0, LAST], reference=FOREIGN, n_foreign=2, curves="transplant")
    assert (need.transplant[:, :, 0] - need.clean[:, 0]).abs().max() <= SAME
    assert (need.transplant[0, :, 1] - need.clean[:, 1]).abs().max() > 1e-3
    assert need.attention_cut is None
    with pytest.raises(ValueError, match=r"was not computed: context_need\(\.\.\., curves=\['attention_cut'\]\)"):
        need.gain("attention_cut")


@each_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_of_a_batch_is_the_row_alone(kind, side, tmp_path):
    model = speaking(kind, tmp_path)
    tokens, mask = padded(side)
    settings = {"reference": FOREIGN, "n_foreign": 2, "positions": None, "seed": 3}
    whole = context_need(model, tokens, attention_mask=mask, **settings)
    for i, row in enumerate(ROWS):
        alone = context_need(model, row, **settings)
        for name in ("transplant", "attention_cut"):
            assert (whole.curve(name)[:, i][:, whole.mask[i]] - alone.curve(name)[:, 0]).abs().max() <= SAME
    assert whole.transplant[:, ~whole.mask].isnan().all()
    assert (whole.causal_layer("transplant")[~whole.mask] == -1).all()


@each_kind
def test_foreign_contexts_are_drawn_and_never_the_prompts_own(kind):
    model = subject(kind).model
    mixed = [[*TOKENS[0, :LAST].tolist(), 1, 1], *FOREIGN, [2, 3]]

    def first(foreign, **settings):
        need = context_need(model, TOKENS, targets=7, foreign=foreign, curves="transplant", **settings)
        return need.transplant[0].item()

    assert first(mixed, n_foreign=3) == pytest.approx(first(FOREIGN, n_foreign=3), abs=SAME)
    with refused(model, ValueError, "n_foreign=4", "at least 5 tokens", "there are 3 among 5"):
        first(mixed, n_foreign=4)
    assert len({round(first(FOREIGN, n_foreign=1, seed=seed), 6) for seed in range(9)}) == 3


# --- The result --------------------------------------------------------------------------------------------------


def made(curve, clean=None, **changes):
    """A result of one token with the same curve twice."""
    values = torch.tensor(curve, dtype=torch.float64).reshape(-1, 1, 1)
    one = torch.tensor([[True]])
    fields = {
        "clean": values[-1] if clean is None else torch.tensor([[clean]], dtype=torch.float64),
        "transplant": values,
        "transplant_each": values[:, None],
        "attention_cut": values,
        "state_labels": (*(f"{i}_pre" for i in range(len(curve) - 1)), "final_post"),
        "segment_labels": tuple(str(i) for i in range(len(curve) - 1)),
        "metric": "prob",
        "forwards": 1,
        "block_evaluations": 1,
        "mask": one,
        "positions": torch.tensor([[0]]),
        "target_ids": torch.tensor([[[5]]]),
        "incorrect_ids": None,
        "tokens": None,
        "token_mask": None,
        "token_strings": None,
        "target_strings": (("<b>",),),
        "incorrect_strings": None,
        "settings": {},
        "provenance": {},
    }
    return ContextNeed(**{**fields, **changes})


@pytest.mark.parametrize(
    ("curve", "share", "layer"),
    [
        ([0.0, 0.1, 0.5, 0.8], 0.5, 2),
        ([0.0, 0.6, 0.3, 0.8], 0.5, 3),  # reached once, and lost again: from the last state on
        ([0.9, 0.9, 0.5, 0.8], 0.5, 0),
        ([0.0, 0.4, 0.39, 0.8], 0.5, 3),
        ([0.0, 0.4, 0.4, 0.8], 0.5, 1),  # exactly half is enough
        ([0.0, 0.4, 0.8, 0.8], 1.0, 2),
        ([0.0, 0.0, 0.0, 0.0], 0.5, -1),
    ],
)
def test_the_causal_layer_is_where_it_stays(curve, share, layer):
    assert made(curve).causal_layer("transplant", share).item() == layer
    assert made(curve).causal_layer("attention_cut", share).item() == layer


def test_what_a_causal_layer_needs():
    with pytest.raises(ValueError, match="a probability"):
        made([0.1, 0.2], metric="log_prob").causal_layer("transplant")
    with pytest.raises(ValueError, match="a probability"):
        made([0.1, 0.2], incorrect_ids=torch.tensor([[[3]]]), incorrect_strings=(("x",),)).causal_layer("transplant")
    with pytest.raises(ValueError, match="share"):
        made([0.1, 0.2]).causal_layer("transplant", 0)
    with pytest.raises(ValueError, match="curve must be one of"):
        made([0.1, 0.2]).causal_layer("clean")


def test_tables_text_and_files(tmp_path):
    result = made([0.0, 0.1, 0.5, 0.8])
    result.save(tmp_path / "c.safetensors")
    assert ContextNeed.load(tmp_path / "c.safetensors").equals(result)
    bare = replace(result, attention_cut=None)
    bare.save(tmp_path / "d.safetensors")
    assert ContextNeed.load(tmp_path / "d.safetensors").equals(bare)
    frame = result.to_dataframe()
    assert frame["transplant"].tolist() == [0.0, 0.1, 0.5, 0.8]
    assert frame["hidden_state"].tolist() == [0, 1, 2, 3]
    assert "attention_cut" not in bare.to_dataframe()
    lines = result.to_text(120).splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("2_pre")] == [["2_pre", "0.5000", "<"]]
    short = result.to_text(120, max_rows=2)
    assert "(2 rows of smaller change are left out" in short
    assert "final_post" in short
    html = result._repr_html_()
    assert "<b>'" not in html.replace("<b>ContextNeed", "")
    assert "&lt;b&gt;" in html


# --- What is left behind, what is refused ------------------------------------------------------------------------


@each_kind
def test_nothing_is_left_behind_and_everything_counted(kind):
    model = subject(kind).model
    with untouched(model):
        need = context_need(model, TOKENS, reference=FOREIGN, n_foreign=2, progress=True)
    # The readout's run, the recorded one, three reference prompts, two foreign contexts.
    assert need.forwards == 2 + 3 + 2
    # Six entries before each block for the transplant and three for the cut, each with its control.
    own = 2 * (3 + 2 + 1) + 3 + (3 + 2 + 1) + 3
    assert need.block_evaluations == 3 * need.forwards + own


REFUSALS = [
    ({}, ValueError, "needs reference="),
    ({"reference": FOREIGN, "curves": []}, ValueError, "curves must name one of"),
    ({"reference": FOREIGN, "curves": ["cut"]}, ValueError, "curves must be one of"),
    ({"reference": FOREIGN, "n_foreign": 0}, ValueError, "n_foreign must be at least 1"),
    ({"reference": FOREIGN, "seed": -1}, ValueError, "seed must be at least 0"),
    ({"reference": FOREIGN, "metric": "loss"}, ValueError, "metric must be one of"),
    ({"reference": FOREIGN, "batch_size": 1.5}, TypeError, "batch_size must be a whole number"),
]


@each_kind
@pytest.mark.parametrize(("settings", "error", "said"), REFUSALS, ids=lambda v: str(v)[:40])
def test_refusals(kind, settings, error, said):
    model = subject(kind).model
    with forwards(model) as count, refused(model, error, said):
        context_need(model, TOKENS, **settings)
    assert count.runs == 0


@each_kind
def test_a_reference_without_prompts_is_no_context(kind):
    model = subject(kind).model
    means = reference_updates(model, FOREIGN)
    with refused(model, ValueError, "the transplant needs foreign="):
        context_need(model, TOKENS, reference=means)
    alone = context_need(model, TOKENS, targets=7, reference=means, curves=["attention_cut"])
    both = context_need(model, TOKENS, targets=7, reference=means, foreign=FOREIGN, n_foreign=1)
    assert torch.equal(alone.attention_cut, both.attention_cut)
    with refused(model, TypeError, "runs the model, which a cache cannot"):
        context_need(cached(model, TOKENS), reference=means)


@pytest.mark.bridge
def test_models_without_attention_have_the_transplant_alone():
    model = bridge(FAMILIES["Mamba"].build())
    with refused(model, UnsupportedModelError, "hook_attn_out"):
        context_need(model, TOKENS, reference=FOREIGN)
    need = context_need(model, TOKENS, targets=7, foreign=FOREIGN, n_foreign=3, curves=["transplant"])
    each = [transplanted(model, 1, foreign, 7) for foreign in FOREIGN]
    assert need.transplant[1].item() == pytest.approx(sum(each) / 3, abs=SAME)


def test_arguments_that_come_from_the_tokens_are_noticed():
    host = host_of(subject(KINDS[0]).model)

    def run(mask_size, extra):
        call = Call(
            torch.device("cpu"),
            (),
            {"mask": torch.ones(1, 1, mask_size, mask_size), "rotary": (torch.arange(mask_size),), "x": extra},
        )
        return CleanRun(host, torch.zeros(1, mask_size), (torch.zeros(mask_size, D_MODEL),), {}, (call,))

    assert same_arguments(run(4, None), run(6, None))
    assert same_arguments(run(4, torch.ones(1, 4)), run(6, torch.ones(1, 6)))
    assert not same_arguments(run(4, torch.ones(1, 4)), run(6, torch.zeros(1, 6)))
    assert not same_arguments(run(4, None), run(6, torch.zeros(1, 6)))


@each_kind
def test_and_refused(kind, monkeypatch):
    model = subject(kind).model
    monkeypatch.setattr(context, "same_arguments", lambda *_: False)
    with refused(model, UnsupportedModelError, "something of the tokens beside the state"):
        context_need(model, TOKENS, reference=FOREIGN, n_foreign=1)
