"""`iglens compare` and `iglens answer`: what they print, save and refuse, on a tiny model in the place of a loaded one."""

from __future__ import annotations

import pytest

from iglens_tl import AnswerResult, LensComparison, attribute_answer, cli, compare, loading
from tests.subjects import each_kind, speaking


@pytest.fixture
def model(kind, tmp_path, monkeypatch):
    made = speaking(kind, tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: made)
    return made


@each_kind
def test_compare_prints_the_table(kind, model, capsys, tmp_path):
    file = tmp_path / "x.safetensors"
    words = ["compare", "w09 w07 w05", "--target", "w08", "--incorrect-target", "id:6", "--k", "2", "--save", str(file)]
    assert cli.main(words) == 0
    wanted = compare(model, "w09 w07 w05", targets="w08", incorrect_targets=6, layers=2)
    assert capsys.readouterr().out.strip() == str(wanted).strip()
    assert LensComparison.load(file).equals(wanted)


@each_kind
def test_compare_through_the_full_model(kind, model, capsys):
    words = ["compare", "w09 w07 w05", "--n-steps", "3", "--methods", "ig_lens", "layer_integrated_gradients"]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert "layer_integrated_gradients" in printed.out.splitlines()[4]
    assert "sequences of 4 tokens" in printed.err


@each_kind
def test_answer_prints_credits_and_their_sum(kind, model, capsys, tmp_path):
    file = tmp_path / "x.safetensors"
    assert cli.main(["answer", "w09 w07 w05", "w08 w06", "--save", str(file)]) == 0
    wanted = attribute_answer(model, "w09 w07 w05", "w08 w06")
    assert capsys.readouterr().out.strip() == str(wanted).strip()
    assert AnswerResult.load(file).tokens.equals(wanted.tokens)


@each_kind
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", " "], "the prompt is empty"),
        (["compare", "w09", "--target", "w08 w06"], "exactly one token"),
        (["compare", "w09", "--methods", "lime"], "invalid choice"),
        (["compare", "w09", "--save", "/nowhere/x"], "there is no folder"),
        (["answer", "w09", ""], "the answer is empty"),
        (["answer", "w09"], "ANSWER"),
    ],
)
def test_refusals_in_one_line(kind, model, words, said, capsys):
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
