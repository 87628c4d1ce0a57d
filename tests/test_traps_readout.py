"""What goes wrong in tools that read probabilities off a residual stream, each with its right value.

The right values were measured without this package, to the digits that are given; the wrong ones are what a plausible
shortcut gives, and stand beside them as controls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from iglens_tl import UnsupportedModelError, ig_lens
from tests import oracles, support
from tests.families import FAMILIES
from tests.models import TOKENS, bridge, compatible, folded, hooked, redraw, same_randomness, word_tokenizer
from tests.support import WAYS
from tests.test_architectures import BY_WAY, logits_of, states_of
from tests.versions import TL_MAJOR

FIVE_DIGITS = 6e-6  # the right values are given to five digits
FOUR_DIGITS = 6e-5
READOUT = 1e-6  # float32 readout against float64
FRANCE = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is" for SmolLM2
FIRST_WAY = WAYS[TL_MAJOR][0]  # the one that every version has: "hooked" or "bridge"


def values_of(model: Any, **settings: Any) -> torch.Tensor:
    """`values[state]` at the last position of the one prompt, for its top token unless told otherwise."""
    return ig_lens(model, TOKENS, **settings).values[:, 0, 0]


def tiny(model_class: str, config_class: str, seed: int = 0, **overrides: Any) -> Any:
    """A Hugging Face model of the size that the right values were measured on."""
    import transformers

    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 4,
    }
    with same_randomness():
        config = getattr(transformers, config_class)(**{**settings, **overrides})
        return redraw(getattr(transformers, model_class)(config), seed)


# --- 1 and 2: the scale of the norm, the precision of the softmax -------------------------------------------------


@pytest.mark.hooked
def test_01_every_state_has_its_own_scale():
    model = hooked()
    head, states = oracles.lens_head(model), states_of(model, TOKENS)[:, 0, -1]
    y = logits_of(model, TOKENS)[0, -1].argmax()
    values = values_of(model)
    assert (values - torch.tensor([0.02792, 0.04404, 0.20882, 0.22880])).abs().max() <= FIVE_DIGITS
    assert (values - head.prob(states, y.expand(4))).abs().max() <= READOUT
    # The shortcuts: the last state's scale for all, without the norm's weight and bias and with them.
    centred = states.double() - states.double().mean(-1, keepdim=True)
    cached = centred / (centred[-1].pow(2).mean() + head.eps).sqrt()
    bare = oracles.Head("none", head.unembed, unembed_bias=head.unembed_bias)
    wrong = bare.prob(cached, y.expand(4))
    assert (wrong - torch.tensor([0.02743, 0.01766, 0.05988, 0.08264])).abs().max() <= FIVE_DIGITS
    subtle = bare.prob(cached * head.weight + head.bias, y.expand(4))
    assert abs(subtle[-1] - values[-1]) <= READOUT
    assert (subtle[:-1] - values[:-1]).abs().max() > 0.01, "right at the end and wrong before"


@pytest.mark.smollm2
def test_02_the_softmax_is_better_than_float32_over_a_large_vocabulary(smollm2_default):
    logits = logits_of(smollm2_default, FRANCE)
    result = ig_lens(smollm2_default, FRANCE, positions=None)
    ids = result.target_ids[..., 0]
    own = oracles.model_prob(logits, ids)
    in_float32 = torch.gather(logits.softmax(-1), -1, ids[..., None]).squeeze(-1)
    assert (in_float32 - own).abs().max() > 5e-6
    assert (result.model_value - own).abs().max() <= 5e-7
    assert (result.values[-1] - own).abs().max() <= 5e-7


# --- 3 to 6: soft-cap, centring, processing ------------------------------------------------------------------------


@pytest.mark.hooked
def test_03_a_soft_cap_is_applied():
    model = hooked(normalization_type="RMS", final_rms=True, output_logits_soft_cap=30.0, scale=12)
    values = values_of(model)
    assert (values - torch.tensor([0.0, 0.8834, 0.9150, 0.7564])).abs().max() <= FOUR_DIGITS
    assert abs(float(values[-1] - values[-2]) + 0.1586) <= FOUR_DIGITS
    uncapped = values_of(hooked(normalization_type="RMS", final_rms=True, scale=12))
    assert (uncapped - torch.tensor([0.0, 1.0, 1.0, 1.0])).abs().max() <= FOUR_DIGITS, "the argmax never changes"


@pytest.mark.bridge
@pytest.mark.parametrize("process", [lambda model: model, compatible], ids=["raw", "compatible"])
def test_03_a_soft_cap_is_applied_on_the_bridge(process):
    heads = {"head_dim": 8, "query_pre_attn_scalar": 8}
    hf_model = tiny("Gemma2ForCausalLM", "Gemma2Config", final_logit_softcapping=5.0, **heads)
    logits = logits_of(hf_model, TOKENS)[0, -1]
    values = values_of(process(bridge(hf_model)))
    assert abs(float(values[-1]) - 0.32766) <= FIVE_DIGITS
    uncapped = (5 * torch.atanh(logits.double() / 5)).softmax(-1).max()
    assert abs(float(uncapped) - 0.65244) <= 1e-4  # atanh near 1 loses digits


@pytest.mark.hooked
@pytest.mark.parametrize("off", [-1.0, 0.0, None])
def test_04_three_ways_to_have_no_soft_cap(off):
    model = hooked()
    expected = values_of(model)
    _, cache = model.run_with_cache(TOKENS)  # TransformerLens 2 cannot run with None itself
    model.cfg.output_logits_soft_cap = off
    assert (values_of(model, cache=cache) - expected).abs().max() <= 1e-7  # the last state is read whole, not in tiles


@pytest.mark.hooked
def test_05_centring_changes_a_logit_and_no_probability():
    raw, centred = hooked(), hooked()
    centred.process_weights_(fold_ln=False, center_writing_weights=False, center_unembed=True)
    assert (values_of(raw) - values_of(centred)).abs().max() <= 1e-7
    assert abs(float(values_of(raw, metric="logit")[-1]) - 3.7162) <= FOUR_DIGITS
    assert abs(float(values_of(centred, metric="logit")[-1]) - 3.5930) <= FOUR_DIGITS


@pytest.mark.hooked
def test_05_under_a_soft_cap_the_model_is_read_as_it_is():
    capped = {"normalization_type": "RMS", "final_rms": True, "output_logits_soft_cap": 30.0, "scale": 12}
    raw, centred = hooked(**capped), hooked(**capped)
    centred.process_weights_(fold_ln=False, center_writing_weights=False, center_unembed=True)
    for model in (raw, centred):
        logits = logits_of(model, TOKENS)[:, -1]
        own = oracles.model_prob(logits, logits.argmax(-1))
        assert abs(float(values_of(model)[-1] - own)) <= READOUT
    assert (values_of(raw) - values_of(centred)).abs().max() > 0.01, "centring is no identity here: it is another model"


@pytest.mark.bridge
def test_06_processing_twice_changes_nothing_on_the_bridge():
    model = bridge(tiny("LlamaForCausalLM", "LlamaConfig"))
    raw = values_of(model)
    once = values_of(compatible(model))
    twice = values_of(compatible(model))
    model.process_weights()
    assert (raw - once).abs().max() <= READOUT
    assert (raw - twice).abs().max() <= READOUT
    assert (raw - values_of(model)).abs().max() <= READOUT


@pytest.mark.hooked
def test_06_processing_twice_changes_nothing():
    model = hooked()
    raw = values_of(model)
    assert (raw - values_of(folded(model))).abs().max() <= READOUT
    assert (raw - values_of(folded(model))).abs().max() <= READOUT


# --- 7 to 9: which norm, which bias, no norm -----------------------------------------------------------------------


@pytest.mark.hooked
def test_07_the_norm_decides_and_not_the_configuration():
    model = hooked(final_rms=True)  # normalization_type "LN", and yet no centring at the end
    head = oracles.lens_head(model)
    assert head.norm == "rms"
    y = logits_of(model, TOKENS)[0, -1].argmax()
    read = head.prob(states_of(model, TOKENS)[:, 0, -1], y.expand(4))
    assert (values_of(model) - read).abs().max() <= READOUT
    assert abs(float(values_of(model, metric="logit")[-1]) - 3.9156) <= FOUR_DIGITS


@pytest.mark.hooked
def test_07_the_norm_decides_after_folding_too():
    """`process_weights_` puts a LayerNorm in place of this model's final RMSNorm: it is the new model that is read."""
    model = hooked(final_rms=True)
    before = logits_of(model, TOKENS)
    model.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=True)
    after = logits_of(model, TOKENS)
    assert (before.softmax(-1) - after.softmax(-1)).abs().max() > 0.01
    result = ig_lens(model, TOKENS, positions=None)
    assert (result.values[-1] - oracles.model_prob(after, after.argmax(-1))).abs().max() <= READOUT
    centred = oracles.Head("layer", model.W_U.detach().double().T, unembed_bias=model.b_U.detach().double())
    read = centred.prob(states_of(model, TOKENS), after.argmax(-1).expand(4, 1, 6))
    assert (result.values - read).abs().max() <= READOUT


@pytest.mark.bridge
@pytest.mark.parametrize("process", [lambda model: model, compatible], ids=["raw", "compatible"])
def test_08_an_unembedding_bias_is_added(process):
    hf_model = tiny("LlamaForCausalLM", "LlamaConfig")
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(50, generator=generator)
    hf_model.lm_head.bias = torch.nn.Parameter(bias.clone())
    logits = logits_of(hf_model, TOKENS)
    values = values_of(process(bridge(hf_model)))
    assert abs(float(values[-1]) - 0.13318) <= FIVE_DIGITS
    without = (logits - bias)[0, -1].double().softmax(-1).max()
    assert abs(float(without) - 0.26060) <= FIVE_DIGITS, "from W_U alone"


@pytest.mark.hooked
def test_09_without_a_final_norm():
    model = hooked(normalization_type=None, scale=0.003)
    assert getattr(model, "ln_final", None) is None
    y = logits_of(model, TOKENS)[0, -1].argmax()
    bare = oracles.Head("none", model.W_U.detach().double().T, unembed_bias=model.b_U.detach().double())
    read = bare.prob(states_of(model, TOKENS)[:, 0, -1], y.expand(4))
    assert (values_of(model) - read).abs().max() <= READOUT


@pytest.mark.bridge
@pytest.mark.parametrize("before", [True, False], ids=["norm first", "norm last"])
def test_09_a_projection_in_between_is_refused(before):
    """A readout without it has the wrong shape, one without the norm the wrong value; 0.08778 would be right."""
    hf_model = tiny("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=before)
    with pytest.raises(UnsupportedModelError, match="project_out"):
        ig_lens(bridge(hf_model), TOKENS)


# --- 11 to 14: what must not be written to, what must add up -------------------------------------------------------


@pytest.mark.parametrize("way", WAYS[TL_MAJOR])
@pytest.mark.parametrize("name", ["GPT-2", "Llama, tied"])
def test_11_nothing_is_written_to(name, way):
    family = FAMILIES[name]
    model = BY_WAY[way](family, family.build())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    for settings in ({}, {"metric": "log_odds"}, {"estimator": "midpoint", "n_steps": 2}, {"dtype": torch.float64}):
        ig_lens(model, TOKENS, positions=None, **settings)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())


NO_MIDDLE = {
    "parallel": ["GPT-J", "GPT-NeoX", "Falcon", "Phi", "Cohere", "Cohere-2"],
    "one mixer a block": ["Mamba", "Mamba-2", "Falcon-Mamba", "Zamba2"],
    "no hook there": ["RecurrentGemma"],
}
_WHOLE = {name for names in NO_MIDDLE.values() for name in names}
_READ = {way: [name for name, found in support.cells("exact") if found == way] for way in ("bridge", "hooked")}


def _cases(has_middle: bool) -> list[Any]:
    marks = {"bridge": pytest.mark.bridge, "hooked": pytest.mark.hooked}
    return [
        pytest.param(name, way, marks=marks[way])
        for way, names in _READ.items()
        for name in names
        if (name not in _WHOLE) is has_middle
    ]


@pytest.mark.parametrize(("name", "way"), _cases(has_middle=False))
def test_09_a_block_without_a_middle_is_not_split(name, way):
    model = BY_WAY[way](FAMILIES[name], FAMILIES[name].build())
    assert ig_lens(model, TOKENS).segment_labels == tuple(map(str, range(model.cfg.n_layers)))
    with pytest.raises(UnsupportedModelError, match="incl_mid"):
        ig_lens(model, TOKENS, incl_mid=True)


@pytest.mark.parametrize(("name", "way"), [case for case in _cases(has_middle=True) if case.values[0] != "RWKV"])
def test_12_a_split_block_adds_up(name, way):
    """The state in the middle of a block is what leaves it less what TransformerLens says that its MLP has added."""
    family = FAMILIES[name]
    hf_model = family.build()
    head = family.read_head(hf_model)
    model = BY_WAY[way](family, hf_model)
    n = model.cfg.n_layers
    names = [f"blocks.{layer}.{hook}" for layer in range(n) for hook in ("hook_resid_post", "hook_mlp_out")]
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS, names_filter=names)
    left, added = (torch.stack([cache[name] for name in names[part::2]])[:, 0, -1] for part in (0, 1))
    assert_splits(model, head, left - added)


@pytest.mark.bridge
def test_12_a_split_block_adds_up_in_rwkv():
    """Its parts have no hooks in TransformerLens: the state in the middle is what enters its second norm."""
    family = FAMILIES["RWKV"]
    hf_model = family.build()
    middle: list[torch.Tensor] = []
    for block in hf_model.rwkv.blocks:
        block.ln2.register_forward_pre_hook(lambda module, args: middle.append(args[0][0, -1].clone()))
    logits_of(hf_model, TOKENS)
    for block in hf_model.rwkv.blocks:
        block.ln2._forward_pre_hooks.clear()
    assert_splits(bridge(hf_model), family.read_head(family.build()), torch.stack(middle))


def assert_splits(model: Any, head: oracles.Head, middle: torch.Tensor) -> None:
    n = model.cfg.n_layers
    result, whole = ig_lens(model, TOKENS, incl_mid=True), ig_lens(model, TOKENS)
    y = result.target_ids[0, 0]
    credits = result.attribution[:, 0, 0]
    assert result.segment_labels == tuple(f"{layer}_{part}" for layer in range(n) for part in ("attn", "mlp"))
    assert (result.values[1::2, 0, 0] - head.prob(middle, y.expand(n))).abs().max() <= READOUT
    assert (credits[::2] + credits[1::2] - whole.attribution[:, 0, 0]).abs().max() <= READOUT
    assert abs(float(credits.sum() - whole.total)) <= READOUT


@pytest.mark.hooked
def test_14_attention_is_the_whole_block():
    model = hooked(attn_only=True)
    assert ig_lens(model, TOKENS).segment_labels == ("0", "1", "2")
    with pytest.raises(UnsupportedModelError, match="incl_mid"):
        ig_lens(model, TOKENS, incl_mid=True)


# --- 24: the width of the vocabulary ---------------------------------------------------------------------------------


@pytest.mark.hooked
def test_24_a_target_must_be_an_output():
    model = hooked(d_vocab_out=7)
    assert values_of(model, targets=6).shape == (4,)
    for outside in (7, 20, -1):
        with pytest.raises(ValueError, match=r"\b7\b"):
            ig_lens(model, TOKENS, targets=outside)


def test_24_a_token_without_a_string_is_shown_by_its_id(tmp_path):
    family = FAMILIES["GPT-2"]
    model = BY_WAY[FIRST_WAY](family, family.build())
    model.tokenizer = word_tokenizer(tmp_path, size=40)
    result = ig_lens(model, TOKENS, targets=45)
    assert result.target_strings == (("<id 45>",),)
    assert ig_lens(model, TOKENS, targets=12).target_strings == (("w12",),)


# --- 28 and 37: a batch is its rows ----------------------------------------------------------------------------------

ROWS = [[3, 14, 15, 9, 26, 5], [7, 8, 9], [40, 41, 42, 43]]
# Kernels add in another order for another shape: 2e-7 for most models here, 4.5e-6 through a mixture of experts.
SAME_ROW = 1e-5


def _padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, ROWS))
    tokens, mask = torch.full((len(ROWS), width), 4), torch.zeros(len(ROWS), width, dtype=torch.long)
    for i, row in enumerate(ROWS):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), None)
        tokens[i, place], mask[i, place] = torch.tensor(row), 1
    return tokens, mask


@pytest.mark.parametrize("way", WAYS[TL_MAJOR])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "GPT-NeoX", "Gemma-2", "Mixtral"])
def test_28_a_row_of_a_batch_is_the_row_alone(name, way):
    family = FAMILIES[name]
    model = BY_WAY[way](family, family.build())
    for settings in ({}, {"baseline": "mean"}, {"estimator": "midpoint", "n_steps": 4}):
        alone = [ig_lens(model, torch.tensor([row]), **settings) for row in ROWS]
        for side in ("right", "left"):
            tokens, mask = _padded(side)
            batch = ig_lens(model, tokens, attention_mask=mask, **settings)
            for i, one in enumerate(alone):
                assert batch.target_ids[i].tolist() == one.target_ids[0].tolist(), side
                assert (batch.values[:, i] - one.values[:, 0]).abs().max() <= SAME_ROW, side
                assert (batch.attribution[:, i] - one.attribution[:, 0]).abs().max() <= SAME_ROW, side


@pytest.mark.parametrize("way", WAYS[TL_MAJOR])
def test_28_rows_of_equal_length(way):
    family = FAMILIES["Qwen2"]
    model = BY_WAY[way](family, family.build())
    rows = torch.tensor([[3, 14, 15, 9], [7, 8, 9, 10], [40, 41, 42, 43]])
    batch = ig_lens(model, rows, positions=None)
    for i, row in enumerate(rows):
        one = ig_lens(model, row, positions=None)  # a prompt of one axis is a batch of one
        assert (batch.values[:, i] - one.values[:, 0]).abs().max() <= SAME_ROW


@pytest.mark.parametrize("way", WAYS[TL_MAJOR])
def test_37_experts_are_read_as_any_block(way):
    family = FAMILIES["Mixtral"]
    hf_model = family.build()
    head, logits = family.read_head(hf_model), logits_of(hf_model, TOKENS)
    model = BY_WAY[way](family, hf_model)
    result = ig_lens(model, TOKENS, positions=None)
    ids = logits.argmax(-1)
    assert (result.values - head.prob(states_of(model, TOKENS), ids.expand(4, 1, 6))).abs().max() <= READOUT
    assert (result.values[-1] - oracles.model_prob(logits, ids)).abs().max() <= 2e-6
