"""`generate_and_attribute`: the tokens are the plain argmax loop's, each read where it is predicted, in the same run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from iglens_tl import generate_and_attribute, ig_lens
from iglens_tl._model.greedy import stop_ids
from iglens_tl.demo import demo_folder
from iglens_tl.generation import chat_tokens, has_chat_template
from tests.families import FAMILIES
from tests.models import TOKENS, bridge, hooked, native, word_tokenizer
from tests.versions import HAS_BRIDGE

PROMPT = TOKENS[0].tolist()
QUESTION = "What is the capital of Vietnam?"
ANSWER_IDS = (504, 3575, 282, 10223, 314, 15795, 89, 1117, 30, 2)  # "The capital of Vietnam is Hoi An.<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}w47 w20 {{ m['content'] }} w21{% endfor %}{% if add_generation_prompt %} w22{% endif %}"
)
SPECIAL = {"bos": 47, "eos": 48, "pad": 49}  # names that are the beginning of no other word
BUILDERS = {"hooked": hooked, "bridge": native}
BRIDGED = ("GPT-2", "Llama", "Mistral", "Qwen3", "Gemma-2", "OLMo-2", "Phi")


@pytest.fixture(params=[pytest.param(api, marks=getattr(pytest.mark, api)) for api in BUILDERS])
def model(request):
    return BUILDERS[request.param]()


def argmax_loop(logits_of, prompt, n):
    """The plain loop, in the test's own words."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(logits_of(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def loop_of(model, n, prompt=PROMPT):
    return argmax_loop(lambda ids: model(ids, return_type="logits"), prompt, n)


def ids_of(result):
    return result.target_ids[0, :, 0].tolist()


def everything(model):
    """What a call must leave as it was."""
    return (
        {name: len(point.fwd_hooks) + len(point.bwd_hooks) for name, point in model.hook_dict.items()},
        [module.training for module in model.modules()],
        [(p.requires_grad, p.grad is None, p.detach().sum().item()) for p in model.parameters()],
    )


def half(tensor, hook):
    return 0.5 * tensor


# --- the tokens and their attribution ------------------------------------------------------------------------------


def test_the_tokens_are_the_argmax_loop(model):
    result = generate_and_attribute(model, PROMPT, max_new_tokens=8)
    assert ids_of(result) == loop_of(model, 8)
    assert result.settings["generation"]["ended_by"] == "max_new_tokens"
    assert result.settings["generation"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.bridge
@pytest.mark.parametrize("name", BRIDGED)
def test_the_tokens_are_those_of_the_untouched_hugging_face_model(name):
    family = FAMILIES[name]
    source = family.build()
    expected = argmax_loop(lambda ids: source(ids).logits, PROMPT, 8)
    result = generate_and_attribute(bridge(source, family.architecture), PROMPT, max_new_tokens=8, stop_tokens=[])
    assert ids_of(result) == expected


def test_every_token_is_read_at_the_position_that_predicts_it(model):
    result = generate_and_attribute(model, PROMPT, max_new_tokens=5)
    new = loop_of(model, 5)
    assert result.positions.tolist() == [[5, 6, 7, 8, 9]]
    assert result.tokens.tolist() == [[*PROMPT, *new[:-1]]]
    with torch.no_grad():
        steps = [model(torch.tensor([[*PROMPT, *new[:i]]]), return_type="logits")[0, -1].double() for i in range(5)]
    own = torch.stack([step.softmax(-1)[token] for step, token in zip(steps, new, strict=True)])
    # 1e-6: float32 logits of the same tokens in sequences of two lengths.
    assert torch.allclose(result.model_value[0], own, rtol=0, atol=1e-6)
    assert torch.allclose(result.values[-1, 0], own, rtol=0, atol=1e-6)
    assert result.is_top[-1].all()


def test_the_credits_are_those_of_ig_lens_on_prompt_and_answer(model):
    settings = {"layers": 2, "metric": "log_odds", "baseline": "zero", "estimator": "midpoint", "n_steps": 3}
    result = generate_and_attribute(model, PROMPT, max_new_tokens=4, dtype=torch.float64, **settings)
    new = loop_of(model, 4)
    again = ig_lens(
        model,
        [*PROMPT, *new[:-1]],
        targets=torch.tensor([new]),
        positions=[5, 6, 7, 8],
        dtype=torch.float64,
        **settings,
    )
    assert torch.equal(result.attribution, again.attribution)
    assert result.segment_labels == again.segment_labels == ("base", "2")
    assert result.n_segments == 2


def test_sublayers_and_a_lens_pass_through(model):
    assert generate_and_attribute(model, PROMPT, max_new_tokens=2, incl_mid=True).n_segments == 6
    seen = set()

    def watched(state, index):
        seen.add(index)
        return state

    generate_and_attribute(model, PROMPT, max_new_tokens=2, lens=watched, max_memory=1)
    assert seen == {0, 1, 2, 3}


def test_ids_come_as_lists_and_tensors_and_padding_is_no_prompt(model):
    expected = ids_of(generate_and_attribute(model, PROMPT, max_new_tokens=3))
    assert ids_of(generate_and_attribute(model, torch.tensor(PROMPT), max_new_tokens=3)) == expected
    assert ids_of(generate_and_attribute(model, TOKENS, max_new_tokens=3)) == expected


def test_without_a_tokenizer_the_answer_shows_the_ids(model):
    result = generate_and_attribute(model, PROMPT, max_new_tokens=2)
    first, second = loop_of(model, 2)
    assert result.answer == f"<id {first}><id {second}>"


def test_a_result_keeps_its_answer_in_its_file(model, tmp_path):
    result = generate_and_attribute(model, PROMPT, max_new_tokens=2)
    result.save(tmp_path / "answer")
    assert type(result).load(tmp_path / "answer").equals(result)


# --- hooked runs ---------------------------------------------------------------------------------------------------


def test_the_hooked_run_is_generated_and_attributed(model):
    clean = loop_of(model, 6)
    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", half), ("blocks.0.hook_mlp_out", half)]):
        expected = loop_of(model, 6)
        result = generate_and_attribute(model, PROMPT, max_new_tokens=6)
        direct = ig_lens(
            model, [*PROMPT, *expected[:-1]], targets=torch.tensor([expected]), positions=list(range(5, 11))
        )
    assert clean != expected == ids_of(result)
    assert torch.equal(result.attribution, direct.attribution)


def last_position_only(tensor, hook):
    changed = tensor.clone()
    changed[:, -1] *= -1.0
    return changed


def noise():
    generator = torch.Generator().manual_seed(0)
    return lambda tensor, hook: tensor + torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("hook", [last_position_only, noise()], ids=["the last position", "noise"])
@pytest.mark.parametrize("metric", ["prob", "log_prob", "log_odds", "logit"])
def test_a_run_that_is_not_the_same_at_every_length_is_refused(model, hook, metric):
    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", hook)]),
        pytest.raises(ValueError, match=r"when chosen, .* in the whole run.*depends on the length"),
    ):
        generate_and_attribute(model, PROMPT, max_new_tokens=4, metric=metric)


def test_nothing_is_left_behind(model):
    def user(tensor, hook):
        return tensor

    model.add_hook("blocks.0.hook_resid_post", user)
    before = everything(model)
    generate_and_attribute(model, PROMPT, max_new_tokens=3, metric="log_prob", estimator="gauss_legendre")
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate_and_attribute(model, PROMPT, max_new_tokens=0)
    assert everything(model) == before


# --- where it ends -------------------------------------------------------------------------------------------------


def test_it_ends_at_a_stop_token_and_attributes_it(model):
    free = loop_of(model, 8)
    stop = free[3]
    result = generate_and_attribute(model, PROMPT, max_new_tokens=8, stop_tokens=[49 - stop, stop])
    expected = free[: min(i for i, token in enumerate(free) if token in (stop, 49 - stop)) + 1]
    assert ids_of(result) == expected
    assert result.settings["generation"]["ended_by"] == "stop token"
    assert result.answer == "".join(f"<id {token}>" for token in expected[:-1])


def test_an_answer_that_ends_at_once_is_empty(model):
    (first,) = loop_of(model, 1)
    result = generate_and_attribute(model, PROMPT, stop_tokens=[first], max_new_tokens=5)
    assert (ids_of(result), result.answer) == ([first], "")


class Words:
    """A tokenizer that knows a few names by id, and answers 1 for the rest."""

    def __init__(self, eos, **names):
        self.eos_token_id = eos
        self.names = {"<unk>": 1, **names}

    def convert_tokens_to_ids(self, name):
        return self.names.get(name, 1)

    def convert_ids_to_tokens(self, token):
        return {number: name for name, number in self.names.items()}[token]


@pytest.mark.parametrize(
    ("tokenizer", "settings", "expected"),
    [
        (None, None, set()),
        (Words(3), None, {3}),
        (Words(None), 7, {7}),
        (Words(3), [7, 8], {3, 7, 8}),
        (Words(3, **{"<|im_end|>": 4, "<|eot_id|>": 5}), None, {3, 4, 5}),
        (Words(60, **{"<|end_of_text|>": 6}), 50, {6}),  # ids without an output can never be produced
    ],
)
def test_the_ends_that_a_model_knows(tokenizer, settings, expected):
    model = SimpleNamespace(original_model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=settings)))
    host = SimpleNamespace(tokenizer=tokenizer, model=model, d_vocab_out=50)
    assert stop_ids(host, None) == expected


# --- words ---------------------------------------------------------------------------------------------------------


def with_tokenizer(tokenizer):
    """A tiny model through the preferred way in, with a tokenizer of words."""
    if HAS_BRIDGE:
        return bridge(FAMILIES["Llama"].build(), tokenizer=tokenizer)
    model = hooked()
    model.set_tokenizer(tokenizer)
    return model


@pytest.fixture
def speaking(tmp_path):
    tokenizer = word_tokenizer(tmp_path, **SPECIAL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return with_tokenizer(tokenizer)


def test_a_chat_prompt_is_the_template_without_further_special_tokens(speaking):
    assert has_chat_template(speaking)
    assert chat_tokens(speaking, "w5 w6") == [47, 20, 5, 6, 21, 22]
    result = generate_and_attribute(speaking, "w5 w6", chat=True, max_new_tokens=3, stop_tokens=[])
    assert result.settings["generation"]["chat"] is True
    assert ids_of(result) == loop_of(speaking, 3, [47, 20, 5, 6, 21, 22])


def test_a_string_is_tokenised_as_transformer_lens_does(speaking):
    prompt = speaking.to_tokens("w5 w6")[0].tolist()
    result = generate_and_attribute(speaking, "w5 w6", max_new_tokens=3, stop_tokens=[])
    assert result.tokens[0, : len(prompt)].tolist() == prompt
    bare = generate_and_attribute(speaking, "w5 w6", max_new_tokens=3, stop_tokens=[], prepend_bos=False)
    assert bare.tokens[0, :2].tolist() == [5, 6]
    assert bare.settings["prepend_bos"] is False
    words = " ".join(f"w{token}" for token in ids_of(bare))
    assert bare.answer == words


def test_a_stop_token_can_be_a_string(speaking):
    free = loop_of(speaking, 6, [5, 6])
    result = generate_and_attribute(speaking, [5, 6], max_new_tokens=6, stop_tokens=[f"w{free[2]}"])
    assert ids_of(result) == free[: free.index(free[2]) + 1]


def test_the_tokenizer_s_end_of_text_ends_it(tmp_path):
    free = loop_of(with_tokenizer(word_tokenizer(tmp_path / "a", **SPECIAL)), 4, [5, 6])
    speaking = with_tokenizer(word_tokenizer(tmp_path / "b", **{**SPECIAL, "eos": free[1]}))
    result = generate_and_attribute(speaking, [5, 6], max_new_tokens=6)
    assert ids_of(result) == free[: free.index(free[1]) + 1]


def test_a_pad_token_that_is_generated_is_no_padding(tmp_path):
    free = loop_of(with_tokenizer(word_tokenizer(tmp_path / "a", **SPECIAL)), 4, [5, 6])
    place, pad = next((place, token) for place, token in enumerate(free) if token not in (5, 6))
    speaking = with_tokenizer(word_tokenizer(tmp_path / "b", **{**SPECIAL, "pad": pad}))
    # The attributed input ends in the pad token: prompt and answer without the last token.
    result = generate_and_attribute(speaking, [5, 6], max_new_tokens=place + 2, stop_tokens=[])
    assert result.tokens[0, -1] == pad
    assert ids_of(result) == loop_of(speaking, place + 2, [5, 6])
    assert result.mask.all()


# --- refusals ------------------------------------------------------------------------------------------------------


def never(tensor, hook):
    raise AssertionError("the model ran")


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "message"),
    [
        ([[3, 4], [5, 6]], {}, ValueError, r"one prompt a call, got 2"),
        ([], {}, ValueError, r"no tokens"),
        (PROMPT, {"max_new_tokens": 0}, ValueError, r"max_new_tokens must be at least 1, got 0"),
        (PROMPT, {"max_new_tokens": 2.0}, TypeError, r"max_new_tokens must be a whole number"),
        (PROMPT, {"max_new_tokens": 28}, ValueError, r"6 tokens and .*=28 .* up to 33, .*takes 32 .* at most 27"),
        (PROMPT, {"chat": True}, TypeError, r"chat=True takes the user's words as one string, got list"),
        ("w1", {"chat": True}, ValueError, r"no.*template|has none"),
        ("w1", {"chat": True, "prepend_bos": True}, ValueError, r"the template writes its own BOS"),
        (" ", {"chat": True}, ValueError, r"prompt is empty"),
        (PROMPT, {"prepend_bos": True}, ValueError, r"prepend_bos applies to strings"),
        (PROMPT, {"stop_tokens": [50]}, ValueError, r"stop_tokens: token ids must lie in \[0, 50\)"),
        (PROMPT, {"metric": "p"}, ValueError, r"metric must be one of"),
        (PROMPT, {"estimator": "ig"}, ValueError, r"estimator must be one of"),
        (PROMPT, {"n_steps": 0}, ValueError, r"n_steps must be at least 1"),
        (PROMPT, {"layers": [4]}, ValueError, r"layers must name states 0 to 3"),
        (PROMPT, {"baseline": "pad"}, ValueError, r"baseline must be"),
        (PROMPT, {"max_memory": "much"}, ValueError, r"max_memory must be"),
        (PROMPT, {"dtype": torch.int32}, TypeError, r"dtype must be"),
    ],
)
def test_refusals_come_before_the_model_runs(model, prompt, settings, error, message):
    settings = {"max_new_tokens": 3, **settings}
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", never)]), pytest.raises(error, match=message):
        generate_and_attribute(model, prompt, **settings)


def test_the_longest_answer_that_fits_is_given(model):
    result = generate_and_attribute(model, PROMPT, max_new_tokens=27)
    assert ids_of(result) == loop_of(model, 27)
    assert result.tokens.shape == (1, 32)


def test_a_template_that_cannot_be_filled_in_is_refused(speaking):
    speaking.tokenizer.chat_template = "{{ raise_exception('two turns, please') }}"
    with pytest.raises(ValueError, match=r"cannot take a single user's turn.*two turns, please"):
        generate_and_attribute(speaking, "w5", chat=True)


def test_logits_that_are_no_numbers_are_refused(model):
    def broken(tensor, hook):
        return tensor * float("nan")

    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", broken)]),
        pytest.raises(ValueError, match="logits after 6 tokens are NaN"),
    ):
        generate_and_attribute(model, PROMPT, max_new_tokens=3)


# --- a real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer_of_hugging_face():
    """The chat prompt and the greedy answer of the untouched Hugging Face model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = AutoModelForCausalLM.from_pretrained(folder).eval()
    turns = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt, argmax_loop(lambda ids: source(ids).logits, prompt, 10)


@pytest.mark.smollm2
def test_the_answer_is_the_hugging_face_model_s(smollm2, answer_of_hugging_face):
    prompt, expected = answer_of_hugging_face
    result = generate_and_attribute(smollm2, QUESTION, chat=True, max_new_tokens=20)
    assert result.tokens[0, : len(prompt)].tolist() == prompt
    assert tuple(ids_of(result)) == tuple(expected) == ANSWER_IDS
    assert result.answer == "The capital of Vietnam is Hoi An."
    assert result.target_strings[0][-1] == "<|im_end|>"
    assert result.settings["generation"]["ended_by"] == "stop token"
    assert result.gap.abs().max() <= 1e-12
    # 2e-5: float32 rounding of a whole forward pass, which differs by API and by sequence length.
    assert torch.allclose(result.model_value, result.values[-1], rtol=0, atol=2e-5)
    assert result.is_top[-1].all()
