"""Ablations of SmolLM2 against a plain Hugging Face model with hooks of its own (`tests.ablation_oracle`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from iglens_tl import ablate_layers, context_need, reference_updates
from iglens_tl.demo import demo_folder
from tests.ablation_oracle import Edit, Plain

KNOWN = json.loads((Path(__file__).parent / "data" / "smollm2_known_answers.json").read_text())["prompts"]
PAIRS = [(p["token_ids"], p["target_id"]) for p in KNOWN if p["kind"] not in ("code", "short1")]
LAYERS = (0, 14, 29)
REFERENCE = [KNOWN[3]["token_ids"][:9], [1, 504, 3575, 282, 4649, 314], [20, 30, 40, 50, 60]]

# Eager attention of two implementations, then thirty blocks in another batch: up to 4e-6 here; clean runs differ by 3e-6.
SAME = 2e-5

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def plain():
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(demo_folder()), dtype=torch.float32, attn_implementation="eager"
    )
    return Plain(model)


@pytest.fixture(scope="module")
def reference(smollm2_default):
    """One donor, so that every draw is known."""
    return reference_updates(smollm2_default, REFERENCE, max_donors=1, seed=3)


@pytest.fixture(scope="module")
def replacement(plain, reference):
    """The vector that a mode puts in, by the oracle: `(component, layer, mode) -> [width]`."""
    prompt, position = reference.places[0].tolist()
    assert position > 0, "the first position of a prompt is no donor"

    def vector(component, layer, mode):
        if mode in ("zero", "skip"):
            return torch.zeros(())
        if mode == "mean":
            return plain.mean(REFERENCE, component)[layer]
        return plain.outputs(REFERENCE[prompt], component)[layer, position]

    return vector


def where(tokens, scope):
    return [len(tokens) - 1] if scope == "target" else list(range(len(tokens)))


def ablated(model, tokens, target, reference, component, mode, scope, layers=LAYERS):
    given = reference if mode in ("mean", "resample") else None
    result = ablate_layers(
        model, tokens, targets=target, component=component, mode=mode, scope=scope, layers=layers, reference=given
    )
    assert result.settings["prefix_reused"]
    assert torch.equal(result.drop, result.clean - result.after)
    return result


def assert_same(model, plain, reference, replacement, component, tokens, target, calls):
    edits = [
        [Edit(component, layer, where(tokens, scope), replacement(component, layer, mode))]
        for mode, scope in calls
        for layer in LAYERS
    ]
    clean, *after = plain.prob(tokens, target, [[], *edits]).tolist()
    for i, (mode, scope) in enumerate(calls):
        result = ablated(model, tokens, target, reference, component, mode, scope)
        assert abs(float(result.clean) - clean) <= SAME
        assert result.after[:, 0, 0].tolist() == pytest.approx(after[3 * i : 3 * i + 3], abs=SAME), (mode, scope)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_whole_blocks(smollm2_default, plain, reference, replacement, number):
    """Every mode on every pair; the scopes of those that draw on the reference take turns."""
    one, other = [("target", "all"), ("all", "target")][number % 2]
    calls = [("zero", "target"), ("skip", "all"), ("mean", one), ("resample", other)]
    assert_same(smollm2_default, plain, reference, replacement, "block", *PAIRS[number], calls)


@pytest.mark.parametrize(("component", "number"), [("attn", 0), ("mlp", 1)])
def test_sublayers(smollm2_default, plain, reference, replacement, component, number):
    calls = [("zero", "all"), ("skip", "target"), ("mean", "target"), ("resample", "all")]
    assert_same(smollm2_default, plain, reference, replacement, component, *PAIRS[number], calls)


@pytest.mark.parametrize(("mode", "scope"), [("zero", "target"), ("mean", "all")])
def test_heads(smollm2_default, plain, reference, replacement, mode, scope):
    tokens, target = PAIRS[0]
    width, edits = plain.d_head, []
    for layer in LAYERS[1:]:
        vector = replacement("head", layer, mode).expand(9 * width)
        for head in range(9):
            value = vector[head * width : (head + 1) * width]
            edits.append([Edit("head", layer, where(tokens, scope), value, head)])
    result = ablated(smollm2_default, tokens, target, reference, "head", mode, scope, LAYERS[1:])
    assert result.layer_labels[:2] == ("L14H0", "L14H1")
    assert result.blocks == (14,) * 9 + (29,) * 9
    assert result.after[:, 0, 0].tolist() == pytest.approx(plain.prob(tokens, target, edits).tolist(), abs=SAME)


@pytest.mark.parametrize(("tokens", "target"), PAIRS, ids=str)
def test_placebo(smollm2_default, plain, tokens, target):
    """The state that was seen to run on differs from the clean one by as much as the update is long, in another direction."""
    for layer in (0, 14, 28):
        seen = []

        def look(tensor, hook, seen=seen):
            seen.append(tensor.clone())

        with smollm2_default.hooks(fwd_hooks=[(f"blocks.{layer + 1}.hook_resid_pre", look)]):
            result = ablate_layers(smollm2_default, tokens, targets=target, mode="placebo", layers=[layer], seed=5)
        control, changed = seen[-1]
        assert torch.equal(control[:-1], changed[:-1])
        update, push = plain.outputs(tokens, "block")[layer, -1], (changed - control)[-1]
        # The state is float32 and up to a hundred times longer than the push.
        assert float(push.norm()) == pytest.approx(float(update.norm()), rel=1e-3)
        # A random direction in 576 dimensions: beyond 0.2 once in a million.
        assert abs(float(push @ update / (push.norm() * update.norm()))) < 0.2
        after = plain.prob(tokens, target, [[Edit("block", layer, [len(tokens) - 1], update + push)]])
        assert float(result.after) == pytest.approx(float(after), abs=SAME)


def test_direct_effect_reads_the_last_state_without_the_part(smollm2_default, plain):
    tokens, target = PAIRS[0]
    result = ablate_layers(smollm2_default, tokens, targets=target, effect="direct", layers=LAYERS)
    updates = plain.outputs(tokens, "block")[:, -1].double()
    last = updates.sum(0) + plain.model.model.embed_tokens.weight[tokens[-1]].detach().double()
    norm, eps = plain.model.model.norm.weight.detach().double(), plain.model.config.rms_norm_eps
    for layer, after in zip(LAYERS, result.after[:, 0, 0].tolist(), strict=True):
        h = last - updates[layer]
        z = plain.model.lm_head.weight.detach().double() @ (h / (h.pow(2).mean() + eps).sqrt() * norm)
        # The last state is a sum of 31 float32 numbers here; the readout is float32 there.
        assert after == pytest.approx(float((z[target] - z.logsumexp(0)).exp()), abs=SAME)
    assert result.block_evaluations == 60, "two forward passes, and nothing run again"


def test_context_need(smollm2_default, plain):
    tokens, target = PAIRS[0]
    at, foreign = len(tokens) - 1, REFERENCE[0]
    chosen = (0, 9, 24, 29)
    need = context_need(smollm2_default, tokens, targets=target, foreign=[foreign], reference=REFERENCE, n_foreign=1)
    means = plain.mean(REFERENCE, "attn")
    edits = [[Edit("attn", layer, [at], means[layer]) for layer in range(first, 30)] for first in chosen]
    cut = plain.prob(tokens, target, edits).tolist()
    assert need.attention_cut[list(chosen), 0, 0].tolist() == pytest.approx(cut, abs=SAME)
    # Below L every block puts out what it did in the clean run, so the token brings its clean h_L among the foreign tokens.
    among = foreign[:at] + tokens[at:]
    own = plain.outputs(tokens, "block")[:, at]
    kept = [[Edit("block", layer, [at], own[layer]) for layer in range(first)] for first in chosen]
    transplant = plain.prob(among, target, kept).tolist()
    assert need.transplant[list(chosen), 0, 0].tolist() == pytest.approx(transplant, abs=SAME)
    assert need.transplant[-1].item() == need.attention_cut[-1].item() == need.clean.item()
    assert need.causal_layer("transplant").item() == need.causal_layer("attention_cut").item() == 24


def test_half_a_forward_pass_an_ablation(smollm2_default):
    result = ablate_layers(smollm2_default, PAIRS[0][0], targets=PAIRS[0][1])
    assert result.forwards == 2  # the readout's run, and the one that records how blocks are called
    control, whole = 29, 30 * 29 // 2
    assert result.block_evaluations == 2 * 30 + control + whole
    assert (result.block_evaluations - 2 * 30) / 30 / 30 < 0.52
