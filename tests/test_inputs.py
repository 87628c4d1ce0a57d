"""Prompts, padding, positions, targets and token strings in every form they may take.

A batch is compared with its prompts one by one. Measured noise between the two is 2e-7 (a matrix product of another
shape adds up in another order); the contract allows 1e-5.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from iglens_tl import NEXT, TOP, IGLensResult, TokenSet, ig_lens
from iglens_tl._core.levels import PAD
from iglens_tl._model import tokens
from iglens_tl._model.answers import refuse_overlap
from iglens_tl._model.host import Host
from iglens_tl._model.tokens import token_text
from tests.models import BATCH, TOKENS
from tests.subjects import (
    D_MODEL,
    D_VOCAB,
    KINDS,
    LENGTHS,
    ROWS,
    each_kind,
    one_kind,
    padded,
    speaking,
    subject,
    tiny,
    word_level,
    words,
)

WITHIN = {"rtol": 0, "atol": 1e-5}
POSITIONS: list[Any] = [-1, 0, [0, -1], slice(None), slice(0, 2), slice(-2, None), slice(None, None, 2), None]
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def assert_row_is(batch: IGLensResult, i: int, alone: IGLensResult) -> None:
    """Row `i` of a batch says what its prompt says alone, in the same order."""
    here, there = batch.mask[i], alone.mask[0]
    for name in ("attribution", "values"):
        torch.testing.assert_close(getattr(batch, name)[:, i, here], getattr(alone, name)[:, 0, there], **WITHIN)
    for name in ("total", "model_value"):
        torch.testing.assert_close(getattr(batch, name)[i, here], getattr(alone, name)[0, there], **WITHIN)
    assert torch.equal(batch.target_ids[i, here], alone.target_ids[0, there])
    assert torch.equal(batch.tokens[i, batch.positions[i, here]], alone.tokens[0, alone.positions[0, there]])
    assert torch.equal(batch.is_top[:, i, here], alone.is_top[:, 0, there])


def assert_rows_are_prompts(model: Any, batch: IGLensResult, rows: Any, **arguments: Any) -> None:
    """Every row of a batch is as its prompt alone."""
    assert len(batch.mask) == len(rows)
    for i, row in enumerate(rows):
        assert_row_is(batch, i, ig_lens(model, row, **arguments))


# --- Padding -----------------------------------------------------------------------------------------------------


@each_kind
@SIDES
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_a_padded_batch_equals_its_prompts_one_by_one(kind: str, side: str, positions: Any) -> None:
    model = subject(kind).model
    tokens, mask = padded(side)
    batch = ig_lens(model, tokens, attention_mask=mask, positions=positions)
    assert_rows_are_prompts(model, batch, ROWS, positions=positions)
    assert torch.equal(batch.token_mask, mask.bool())
    assert batch.settings["padding"] == "given"


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "log-odds, gradients": {"metric": "log_odds", "estimator": "midpoint", "n_steps": 2},
    "zero baseline": {"baseline": "zero", "metric": "log_prob"},
    "mean baseline": {"baseline": "mean"},
    "a vector as baseline": {"baseline": torch.linspace(-1, 1, D_MODEL)},
    "next tokens": {"targets": NEXT},
    "a difference": {"targets": TokenSet([7, 8]), "incorrect_targets": 9},
    "mid states": {"incl_mid": True, "layers": None},
}


@each_kind
@SIDES
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_a_padded_batch_equals_its_prompts_under_other_settings(kind: str, side: str, name: str) -> None:
    model, arguments = subject(kind).model, {"positions": None, **OTHER_SETTINGS[name]}
    tokens, mask = padded(side)
    keep = slice(0, 3)  # the last prompt has one token, and no next one
    batch = ig_lens(model, tokens[keep], attention_mask=mask[keep], **arguments)
    assert_rows_are_prompts(model, batch, ROWS[keep], **arguments)


@each_kind
@SIDES
def test_what_stands_on_a_pad_position_changes_nothing(kind: str, side: str) -> None:
    model = subject(kind).model
    results = []
    for filler in (4, 0, 49):
        tokens, mask = padded(side, filler)
        results.append(ig_lens(model, tokens, attention_mask=mask, positions=None))
    for other in results[1:]:
        torch.testing.assert_close(other.attribution, results[0].attribution, equal_nan=True, **WITHIN)


@each_kind
@SIDES
def test_padding_is_nan_and_false_and_left_out(kind: str, side: str) -> None:
    model = subject(kind).model
    tokens, mask = padded(side)
    result = ig_lens(model, tokens, attention_mask=mask, positions=None, n_steps=2)
    assert torch.equal(result.mask, mask.bool())
    pad = ~mask.bool()
    for tensor in (result.attribution, result.values, result.steps, result.total, result.gap, result.model_value):
        assert tensor[..., pad].isnan().all()
        assert tensor[..., ~pad].isfinite().all()
    assert (result.positions[pad] == -1).all()
    assert (result.target_ids[pad] == -1).all()
    assert not result.is_top[:, pad].any()
    assert [[text == "" for text in row] for row in result.target_strings] == pad.tolist()
    assert len(result.to_dataframe()) == sum(LENGTHS) * 3


SPECIAL = [{"pad": 4}, {"pad": 2}, {"pad": 3}, {"pad": 2, "eos": 2}]
SHARED = pytest.mark.parametrize("special", SPECIAL, ids=["own pad", "pad is bos", "pad is eos", "pad is bos and eos"])


def with_bos(rows: Any = ROWS) -> list[torch.Tensor]:
    """The rows behind a BOS."""
    return [torch.cat([torch.tensor([2]), row]) for row in rows]


@each_kind
@SIDES
@SHARED
def test_strings_need_no_pad_token(kind: str, side: str, special: dict[str, int], tmp_path: Any) -> None:
    model = speaking(kind, tmp_path, side, **special)
    texts = [words(row) for row in ROWS]
    batch = ig_lens(model, texts, positions=None, prepend_bos=True)
    assert [row[flags].tolist() for row, flags in zip(batch.tokens, batch.token_mask, strict=True)] == [
        row.tolist() for row in with_bos()
    ]
    assert batch.settings["padding"] == "added"
    assert_rows_are_prompts(model, batch, with_bos(), positions=None)
    assert_rows_are_prompts(model, ig_lens(model, [row.tolist() for row in with_bos()]), with_bos())


@each_kind
@SIDES
@SHARED
def test_padding_of_ids_alone_is_told_by_the_pad_token(
    kind: str, side: str, special: dict[str, int], tmp_path: Any
) -> None:
    """Where the pad token is also BOS, each prompt keeps one; the longest shows how many are padding."""
    model = speaking(kind, tmp_path, side, **special)
    rows = with_bos()
    width = max(map(len, rows))
    fill = torch.full((width,), special["pad"])
    tokens = torch.stack(
        [torch.cat([row, fill[len(row) :]] if side == "right" else [fill[len(row) :], row]) for row in rows]
    )
    batch = ig_lens(model, tokens, positions=None)
    assert batch.settings["padding"] == "inferred"
    assert batch.token_mask.sum(1).tolist() == [len(row) for row in rows]
    assert_rows_are_prompts(model, batch, rows, positions=None)


@each_kind
def test_a_prompt_that_ends_in_a_shared_pad_token_is_not_padded(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path, pad=3)
    tokens = torch.tensor([[2, 7, 8, 3], [2, 9, 8, 3]])
    result = ig_lens(model, tokens)
    assert result.settings["padding"] == "none"
    assert result.positions.tolist() == [[3], [3]]


@each_kind
def test_a_mask_outweighs_the_pad_token(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    tokens = torch.tensor([[7, 8, 4, 4]])
    assert ig_lens(model, tokens).positions.tolist() == [[1]]
    result = ig_lens(model, tokens, attention_mask=torch.ones(1, 4))
    assert result.positions.tolist() == [[3]]
    assert result.token_mask.all()


@each_kind
def test_a_mask_in_any_form(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("left")
    expected = ig_lens(model, tokens, attention_mask=mask)
    for form in (mask.bool(), mask.float(), mask.tolist(), mask.numpy(), mask.to(torch.int8)):
        assert ig_lens(model, tokens, attention_mask=form).equals(expected)
    single = ig_lens(model, tokens[1], attention_mask=mask[1])
    assert_row_is(expected, 1, single)
    unpadded = ig_lens(model, TOKENS, attention_mask=torch.ones(1, 6))
    assert torch.equal(unpadded.attribution, ig_lens(model, TOKENS).attribution)


@each_kind
def test_permuting_the_prompts_permutes_the_rows(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("right")
    order = torch.tensor([2, 0, 3, 1])
    plain = ig_lens(model, tokens, attention_mask=mask, positions=None)
    moved = ig_lens(model, tokens[order], attention_mask=mask[order], positions=None)
    torch.testing.assert_close(moved.attribution, plain.attribution[:, order], equal_nan=True, **WITHIN)


# --- Positions ---------------------------------------------------------------------------------------------------


@each_kind
@SIDES
@pytest.mark.parametrize(
    ("positions", "picked"),
    [
        (-1, [[5], [2], [3], [0]]),
        (0, [[0]] * 4),
        ([-1, 0], [[5, 0], [2, 0], [3, 0], [0, 0]]),
        (slice(1, 4), [[1, 2, 3], [1, 2], [1, 2, 3], []]),
        (slice(-2, None), [[4, 5], [1, 2], [2, 3], [0]]),
        (slice(None, None, -1), [[5, 4, 3, 2, 1, 0], [2, 1, 0], [3, 2, 1, 0], [0]]),
        (None, [[0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2, 3], [0]]),
    ],
    ids=str,
)
def test_numbers_count_each_prompts_own_tokens(kind: str, side: str, positions: Any, picked: list[list[int]]) -> None:
    tokens, mask = padded(side)
    result = ig_lens(subject(kind).model, tokens, attention_mask=mask, positions=positions)
    shift = [0 if side == "right" else 6 - length for length in LENGTHS]
    expected = [[p + by for p in row] for row, by in zip(picked, shift, strict=True)]
    assert [row[flags].tolist() for row, flags in zip(result.positions, result.mask, strict=True)] == expected


@one_kind
def test_positions_in_any_form(kind: str) -> None:
    model = subject(kind).model
    expected = ig_lens(model, BATCH, positions=[1, 4])
    for form in ((1, 4), range(1, 5, 3), np.array([1, 4]), torch.tensor([1, 4]), [np.int64(1), torch.tensor(4)]):
        result = ig_lens(model, BATCH, positions=form)
        assert torch.equal(result.attribution, expected.attribution)
        assert torch.equal(result.positions, expected.positions)
    for form in (np.int64(4), torch.tensor(4), -2):
        assert torch.equal(ig_lens(model, BATCH, positions=form).attribution, expected.attribution[:, :, 1:])


# --- Forms of the prompt -----------------------------------------------------------------------------------------


@each_kind
def test_ids_in_any_form(kind: str) -> None:
    model = subject(kind).model
    expected = ig_lens(model, BATCH)
    for form in (
        BATCH.tolist(),
        tuple(map(tuple, BATCH.tolist())),
        list(BATCH),
        [row.numpy() for row in BATCH],
        BATCH.numpy(),
        BATCH.int(),
        BATCH.to(torch.uint8),
        BATCH.numpy().astype(np.int32),
    ):
        assert ig_lens(model, form).equals(expected), type(form)


@each_kind
def test_one_prompt_needs_no_batch_axis(kind: str) -> None:
    model = subject(kind).model
    expected = ig_lens(model, TOKENS)
    for form in (
        TOKENS[0],
        TOKENS[0].tolist(),
        tuple(TOKENS[0].tolist()),
        TOKENS[0].numpy(),
        [np.int64(i) for i in TOKENS[0]],
    ):
        assert ig_lens(model, form).equals(expected)
    assert ig_lens(model, [3]).tokens.tolist() == [[3]]
    assert ig_lens(model, range(3, 6)).tokens.tolist() == [[3, 4, 5]]


@each_kind
def test_strings_are_the_ids_that_the_model_makes_of_them(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    text = words(TOKENS[0])
    for prepend_bos, ids in ((False, TOKENS), (True, torch.cat([torch.tensor([[2]]), TOKENS], 1))):
        spoken = ig_lens(model, text, prepend_bos=prepend_bos)
        assert torch.equal(spoken.tokens, ids)
        assert torch.equal(spoken.tokens, model.to_tokens(text, prepend_bos=prepend_bos))
        assert torch.equal(spoken.attribution, ig_lens(model, ids).attribution)
    assert torch.equal(ig_lens(model, text).tokens, model.to_tokens(text))
    assert ig_lens(model, [text]).equals(ig_lens(model, text))
    assert ig_lens(model, (text, text)).tokens.shape[0] == 2


@each_kind
def test_prepend_bos_none_is_the_models_own_habit(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    for habit in (True, False):
        model.cfg.default_prepend_bos = habit
        assert ig_lens(model, "w05 w06").tokens.shape == (1, 2 + habit)


@each_kind
def test_two_leading_bos_are_warned_of_where_the_caller_stands(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TRANSPARENT", (*tokens.TRANSPARENT, "tests.shapes"))  # the shape checker of the tests
    model = speaking(kind, tmp_path)
    with pytest.warns(UserWarning, match=r"prompt 1 begins with two BOS tokens \(id 2\).*prepend_bos=False") as caught:
        result = ig_lens(model, ["w05", "w02 w05"], prepend_bos=True)
    assert [warning.filename for warning in caught] == [__file__]
    assert result.tokens[1].tolist() == [2, 2, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ig_lens(model, "w02 w05", prepend_bos=False).tokens.tolist() == [[2, 5]]
        ig_lens(model, "w05 w02 w02", prepend_bos=True)


@each_kind
def test_padding_with_bos_is_no_second_bos(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path, "left", pad=2)
    texts = ["w05 w06 w07", "w05"]
    with torch.no_grad():
        cache = model.run_with_cache(texts)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ig_lens(cache, texts)
    assert result.tokens[1].tolist() == [2, 2, 2, 5]
    assert result.token_mask[1].tolist() == [False, False, True, True]


@each_kind
def test_two_bos_tokens_among_ids_are_warned_of(kind: str, tmp_path: Any) -> None:
    """TRAPS 22: so does `to_tokens` make them of a text that begins with one."""
    model = speaking(kind, tmp_path, "left", pad=2)
    with pytest.warns(UserWarning, match=r"prompt 0 begins with two BOS tokens \(id 2\)"):
        ig_lens(model, torch.tensor([[2, 2, 5, 6]]), attention_mask=torch.ones(1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ig_lens(model, torch.tensor([[2, 5, 6]]))


# --- Targets -----------------------------------------------------------------------------------------------------


@each_kind
def test_top_is_the_models_most_probable_token_at_each_position(kind: str) -> None:
    model = subject(kind).model
    result = ig_lens(model, BATCH, positions=None)
    assert torch.equal(result.target_ids[..., 0], model(BATCH).argmax(-1))
    assert result.is_top[-1].all()
    assert ig_lens(model, BATCH, targets=TOP, positions=None).equals(result)


@each_kind
def test_next_is_the_token_that_follows_and_the_last_has_none(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("left")
    result = ig_lens(model, tokens[:3], attention_mask=mask[:3], targets=NEXT, positions=None)
    for i, row in enumerate(ROWS[:3]):
        assert result.mask[i].sum() == len(row) - 1
        assert not result.mask[i, -1]
        assert result.target_ids[i, result.mask[i], 0].tolist() == row[1:].tolist()
    right, mask = padded("right")
    other = ig_lens(model, right[:3], attention_mask=mask[:3], targets=NEXT, positions=slice(0, None))
    assert other.mask.sum(1).tolist() == [5, 2, 3]
    assert other.target_ids[1, :2, 0].tolist() == ROWS[1][1:].tolist()
    assert ig_lens(model, right, attention_mask=mask, targets=NEXT, positions=0).mask.tolist() == [[True]] * 3 + [
        [False]
    ]


@each_kind
def test_next_with_a_baseline_for_each_position(kind: str) -> None:
    """The rows without a next token are left out of the baseline too."""
    model = subject(kind).model
    generator = torch.Generator().manual_seed(0)
    baseline = torch.randn(2, 6, D_MODEL, generator=generator)
    result = ig_lens(model, BATCH, targets=NEXT, positions=None, baseline=baseline)
    for i in range(2):
        alone = ig_lens(model, BATCH[i], targets=NEXT, positions=None, baseline=baseline[i : i + 1])
        assert_row_is(result, i, alone)


@each_kind
def test_one_target_in_any_form(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    expected = ig_lens(model, BATCH, targets=7, positions=[2, 5])
    assert (expected.target_ids == 7).all()
    forms = ["w07", np.int64(7), torch.tensor(7), [7, 7], ["w07", 7], TokenSet([7]), [TokenSet(["w07"]), "w07"]]
    tensors = [
        torch.tensor([7]),
        torch.tensor([7, 7]),
        torch.full((2, 1), 7),
        torch.full((2, 2), 7),
        np.full((1, 2), 7),
    ]
    for form in forms + tensors:
        result = ig_lens(model, BATCH, targets=form, positions=[2, 5])
        assert torch.equal(result.attribution, expected.attribution), form
        assert result.target_strings == (("w07", "w07"),) * 2


@each_kind
def test_a_list_is_one_a_prompt_and_a_tensor_is_right_aligned(kind: str) -> None:
    model = subject(kind).model
    listed = ig_lens(model, BATCH, targets=[7, 9], positions=[2, 5])
    assert listed.target_ids[..., 0].tolist() == [[7, 7], [9, 9]]
    row = ig_lens(model, BATCH, targets=torch.tensor([7, 9]), positions=[2, 5])
    assert row.target_ids[..., 0].tolist() == [[7, 9], [7, 9]]
    column = ig_lens(model, BATCH, targets=torch.tensor([[7], [9]]), positions=[2, 5])
    assert column.equals(dataclasses.replace(listed, settings=column.settings))
    full = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(ig_lens(model, BATCH, targets=full, positions=[2, 5]).target_ids[..., 0], full)


@each_kind
def test_a_tensor_may_hold_anything_where_there_is_no_position(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("left")
    labels = torch.where(mask.bool(), torch.tensor(7), torch.tensor(-100))
    result = ig_lens(model, tokens, attention_mask=mask, targets=labels, positions=None)
    expected = ig_lens(model, tokens, attention_mask=mask, targets=7, positions=None)
    assert torch.equal(result.target_ids, expected.target_ids)
    assert torch.equal(result.values[:, mask.bool()], expected.values[:, mask.bool()])


@each_kind
def test_the_probabilities_of_a_set_add_up(kind: str) -> None:
    """Within 1e-6: each is a float32 sum over the rest, and the rests differ."""
    model = subject(kind).model
    together = ig_lens(model, BATCH, targets=TokenSet([7, 9, 30]), positions=None)
    parts = [ig_lens(model, BATCH, targets=i, positions=None) for i in (7, 9, 30)]
    for name in ("values", "attribution", "model_value"):
        torch.testing.assert_close(getattr(together, name), sum(getattr(p, name) for p in parts), rtol=0, atol=1e-6)
    log = ig_lens(model, BATCH, targets=TokenSet([7, 9, 30]), positions=None, metric="log_prob")
    torch.testing.assert_close(log.values, together.values.log(), rtol=0, atol=1e-12)
    odds = ig_lens(model, BATCH, targets=TokenSet([7, 9, 30]), positions=None, metric="log_odds")
    torch.testing.assert_close(odds.values, together.values.logit(), rtol=0, atol=1e-6)
    nearly = ig_lens(model, BATCH, targets=TokenSet(range(1, D_VOCAB)), positions=None)
    zeroth = ig_lens(model, BATCH, targets=0, positions=None)
    torch.testing.assert_close(nearly.values, 1 - zeroth.values, rtol=0, atol=1e-6)


@each_kind
def test_sets_of_different_size_share_a_batch(kind: str) -> None:
    model = subject(kind).model
    sets = [TokenSet([7, 9, 30]), 8]
    result = ig_lens(model, BATCH, targets=sets)
    assert result.target_ids.tolist() == [[[7, 9, 30]], [[8, -1, -1]]]
    for i in range(2):
        alone = ig_lens(model, BATCH[i], targets=sets[i])
        torch.testing.assert_close(result.attribution[:, i], alone.attribution[:, 0], **WITHIN)


@each_kind
@pytest.mark.parametrize("metric", ["prob", "log_prob", "log_odds", "logit"])
def test_incorrect_targets_make_every_metric_a_difference(kind: str, metric: str) -> None:
    """Within 1e-5: the rest of the vocabulary is summed in float32, target and incorrect target apart or not."""
    model = subject(kind).model
    both = ig_lens(model, BATCH, targets=7, incorrect_targets=[9, 8], metric=metric, positions=None)
    right = ig_lens(model, BATCH, targets=7, metric=metric, positions=None)
    wrong = ig_lens(model, BATCH, targets=[9, 8], metric=metric, positions=None)
    for name in ("values", "attribution", "total", "model_value"):
        torch.testing.assert_close(getattr(both, name), getattr(right, name) - getattr(wrong, name), **WITHIN)
    assert both.incorrect_ids[..., 0].tolist() == [[9] * 6, [8] * 6]
    assert torch.equal(both.is_top, right.is_top)
    swapped = ig_lens(model, BATCH, targets=[9, 8], incorrect_targets=7, metric=metric, positions=None)
    torch.testing.assert_close(swapped.attribution, -both.attribution, rtol=0, atol=1e-12)


@each_kind
def test_incorrect_targets_in_any_form(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    result = ig_lens(model, BATCH, targets=20, incorrect_targets=NEXT, positions=None)
    assert torch.equal(result.incorrect_ids[:, :-1, 0], BATCH[:, 1:].where(result.mask[:, :-1], torch.tensor(-1)))
    assert not result.mask[:, -1].any()
    assert result.incorrect_strings[0][0] == "w14"
    against_top = ig_lens(model, TOKENS, targets=7, incorrect_targets=TOP)
    assert against_top.incorrect_ids.item() == int(model(TOKENS)[0, -1].argmax())
    assert against_top.total.item() < 0
    several = ig_lens(model, TOKENS, targets="w07", incorrect_targets=TokenSet(["w08", 9]))
    assert several.incorrect_ids.tolist() == [[[8, 9]]]
    assert several.incorrect_strings == (("w08|w09",),)


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_vocabulary_of_its_own(kind: str) -> None:
    model = tiny(kind, d_vocab_out=7)
    result = ig_lens(model, BATCH, targets=6, positions=None)
    expected = model(BATCH).double().softmax(-1)[..., 6]
    torch.testing.assert_close(result.values[-1], expected, rtol=0, atol=1e-6)
    top = ig_lens(model, BATCH, positions=None)
    assert torch.equal(top.target_ids[..., 0], model(BATCH).argmax(-1))


# --- Tokens as text ----------------------------------------------------------------------------------------------


@each_kind
def test_ids_used_and_their_strings_are_in_the_result(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    result = ig_lens(model, [[5, 7, 5], [5, 9]], targets=[7, TokenSet([8, 9])], positions=None)
    assert result.token_strings == (("w05", "w07", "w05"), ("w05", "w09", "w04"))
    assert result.target_strings == (("w07",) * 3, ("w08|w09", "w08|w09", ""))
    table = result.to_dataframe()
    assert table.groupby(["batch", "position"], observed=True).size().shape == (5,)
    assert list(table[table["segment"] == "0"]["token"]) == ["w05", "w07", "w05", "w05", "w09"]


@each_kind
def test_ids_without_a_string_are_shown_as_ids(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path, tokenizer=word_level(45))
    result = ig_lens(model, [5, 47], targets=48, positions=None)
    assert result.token_strings == (("w05", "<id 47>"),)
    assert result.target_strings == (("<id 48>", "<id 48>"),)
    silent = ig_lens(subject(kind).model, [5, 47], targets=48)
    assert silent.token_strings == (("<id 5>", "<id 47>"),)
    assert silent.target_strings == (("<id 48>",),)


def byte_level() -> Any:
    """Byte-level BPE without merges: every byte is a token."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "<unk>", "</s>", "<pad>", *letters]
    inner = Tokenizer(kinds.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


@each_kind
def test_bytes_that_are_no_character_are_told_apart(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path, tokenizer=byte_level(), bos=0, eos=2, pad=3)
    result = ig_lens(model, "東京 é", prepend_bos=False, positions=None)
    pieces = ["E6", "9D", "B1", "E4", "BA", "AC", " ", "C3", "A9"]
    expected = tuple(piece if piece == " " else f"<0x{piece}>" for piece in pieces)
    assert result.token_strings == (expected,)
    assert ig_lens(model, "a", targets=int(result.tokens[0, 0]), prepend_bos=False).target_strings == (("<0xE6>",),)


class _Pieces:
    """A tokenizer as SentencePiece has them, as far as texts of single tokens go."""

    pieces = ("▁Paris", "Paris", "<0xE6>", "▁", "", None)
    texts = ("Paris", "Paris", "�", "", "", "")

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.pieces[token]

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        return self.texts[ids[0]]


@pytest.mark.parametrize(
    ("token", "text"),
    [(0, " Paris"), (1, "Paris"), (2, "<0xE6>"), (3, " "), (4, "<id 4>"), (5, "<id 5>"), (6, "<id 6>")],
)
def test_the_space_that_sentencepiece_hides_is_shown(token: int, text: str) -> None:
    model = types.SimpleNamespace(tokenizer=_Pieces())
    host = Host(model=model, kind="hooked", n_layers=1, d_model=1, d_vocab=6, d_vocab_out=6)
    assert token_text(host, token) == text


def test_what_fills_a_set_up_and_what_is_masked_is_on_neither_side() -> None:
    there, masked = torch.tensor([[True]]), torch.tensor([[False]])
    few, many = torch.tensor([[[1, PAD]]]), torch.tensor([[[2, 3, PAD]]])
    refuse_overlap(few, many, there)
    refuse_overlap(many, many, masked)
    for one, other in ((many, few), (few, many)):
        with pytest.raises(ValueError, match=r"share token id 2, 3:"):
            refuse_overlap(torch.cat([one, torch.tensor([[[3, 2]]])], -1), torch.cat([other, many], -1), there)
