"""A given answer by the chain rule, and the difference of two results."""

from __future__ import annotations

import math

import pytest
import torch

from iglens_tl import AnswerResult, IGLensResult, attribute_answer, difference, ig_lens
from tests.models import BATCH, TOKENS
from tests.oracles import Head
from tests.smollm2 import PROMPT
from tests.subjects import cached, each_kind, residual_names, speaking, states_of, subject, words
from tests.watching import forwards, untouched

pytest_plugins = ["tests.smollm2"]

PROMPT_IDS, ANSWER = [3, 14, 15], [9, 26, 4]  # 4 is the pad token: inside an answer it is a token like any other
# Float32 readouts of three tokens, log p of about -5, against float64 ones.
SAME_LOG_PROB = 1e-5


def oracle(model, head: Head, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probability of every answer token at every state, in float64, each from a run of its own."""
    columns = []
    for i, token in enumerate(answer):
        tokens = torch.tensor([[*prompt, *answer[:i]]])
        states = states_of(cached(model, tokens, names_filter=residual_names()))[:, 0, -1]
        columns.append(head.log_prob(states, torch.tensor(token).expand(len(states))))
    return torch.stack(columns, dim=1)


@each_kind
def test_sums_to_the_log_probability_of_the_answer(kind):
    model, head = subject(kind).model, subject(kind).head
    with forwards(model) as count, untouched(model):
        result = attribute_answer(model, PROMPT_IDS, ANSWER)
    assert count.runs == 1
    logs = oracle(model, head, PROMPT_IDS, ANSWER)
    assert abs(result.log_prob - float(logs[-1].sum())) <= SAME_LOG_PROB
    assert (result.attribution - logs.diff(dim=0).sum(-1)).abs().max() <= SAME_LOG_PROB
    assert abs(float(result.attribution.sum()) - (result.log_prob - result.baseline_log_prob)) <= 1e-9
    assert abs(result.gap) <= 1e-9


@each_kind
def test_equals_the_sum_of_single_calls(kind):
    model = subject(kind).model
    result = attribute_answer(model, PROMPT_IDS, ANSWER, layers=2, baseline="zero")
    credits = torch.zeros_like(result.attribution)
    for i, token in enumerate(ANSWER):
        single = ig_lens(
            model,
            torch.tensor([[*PROMPT_IDS, *ANSWER[:i]]]),
            targets=token,
            metric="log_prob",
            layers=2,
            baseline="zero",
            attention_mask=[1] * (len(PROMPT_IDS) + i),
        )
        credits += single.attribution[:, 0, 0]
        assert (result.tokens.attribution[:, 0, i] - single.attribution[:, 0, 0]).abs().max() <= SAME_LOG_PROB
    assert (result.attribution - credits).abs().max() <= SAME_LOG_PROB


@each_kind
def test_an_answer_as_text(kind, tmp_path):
    model = speaking(kind, tmp_path)
    answer = [8, 6, 5]
    text, ids = (attribute_answer(model, "w09 w07", form) for form in (words(answer), answer))
    assert text.answer == words(answer)
    assert torch.equal(text.attribution, ids.attribution)
    assert text.tokens.target_strings == ids.tokens.target_strings
    text.save(tmp_path / "x.safetensors")
    assert AnswerResult.load(tmp_path / "x.safetensors").tokens.equals(text.tokens)
    assert list(text.to_dataframe()["segment"]) == ["0", "1", "2"]
    assert "log P(answer | prompt)" in str(text)


@each_kind
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "at least one token"),
        ("", "at least one token"),
        ([50], r"\[0, 50\)"),
        ([1.5], "whole-number"),
        (7, "list"),
    ],
)
def test_answers_that_are_none(kind, answer, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        attribute_answer(speaking(kind, tmp_path), PROMPT_IDS, answer)


@each_kind
def test_one_prompt_a_call(kind):
    with pytest.raises(ValueError, match="one prompt a call, got 2"):
        attribute_answer(subject(kind).model, BATCH, ANSWER)


@pytest.mark.smollm2
def test_smollm2_answer(smollm2):
    result = attribute_answer(smollm2, PROMPT, " Paris, the city")
    ids = torch.cat([result.tokens.tokens[0], result.tokens.target_ids[0, -1]])
    with torch.no_grad():
        logits = smollm2(ids[None].to(smollm2.cfg.device))[0].double()
    n = len(result.tokens.target_strings[0])
    logs = torch.log_softmax(logits, -1)[len(ids) - n - 1 : -1].gather(-1, ids[-n:, None])
    assert n == 4
    assert abs(result.log_prob - float(logs.sum())) <= 1e-4
    assert abs(float(result.attribution.sum()) - result.total) <= 1e-9
    first = ig_lens(smollm2, PROMPT, targets=" Paris", metric="log_prob")
    assert (result.tokens.attribution[:, 0, 0] - first.attribution[:, 0, 0]).abs().max() <= 1e-3  # log p of -115 early


# --- difference --------------------------------------------------------------------------------------------------


@each_kind
def test_difference_of_two_runs(kind):
    model = subject(kind).model
    other = TOKENS.clone()
    other[0, 1] = 40
    one, two = (ig_lens(model, tokens, targets=7, positions=None) for tokens in (TOKENS, other))
    both = difference(one, two)
    assert torch.equal(both.attribution, one.attribution - two.attribution)
    assert (both.attribution.sum(0) - (one.total - two.total)).abs().max() <= 1e-12
    assert both.attribution[:, 0, 0].abs().max() <= 1e-6, "the first position sees no change"
    assert both.attribution[:, 0, 1:].abs().max() > 1e-3
    assert isinstance(both, IGLensResult)
    assert set(both.settings["difference"]) == {"a", "b"}
    assert "first run less the second" in str(both)


@each_kind
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"targets": 9}, "target_ids"),
        ({"metric": "log_prob"}, "metric"),
        ({"layers": 2}, "segment_labels"),
        ({"baseline": "zero"}, "baseline"),
        ({"positions": -2}, "positions"),
        ({"incorrect_targets": 9}, "incorrect_ids"),
        ({"n_steps": 2}, "n_steps"),
    ],
)
def test_results_of_different_questions_have_no_difference(kind, change, named):
    model = subject(kind).model
    one = ig_lens(model, TOKENS, targets=7)
    two = ig_lens(model, TOKENS, **{"targets": 7, **change})
    with pytest.raises(ValueError, match=f"answer different questions.*{named} \\("):
        difference(one, two)


def test_only_results_have_a_difference():
    with pytest.raises(TypeError, match="result_b is float"):
        difference(IGLensResult.__new__(IGLensResult), math.pi)
