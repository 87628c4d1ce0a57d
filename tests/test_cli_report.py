"""`--html`: the report that a command writes, on a tiny model in the place of a loaded one."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from iglens_tl import NEXT, attribute_answer, cli, compare, generate_and_attribute, ig_lens, loading, logit_lens
from tests.subjects import each_kind, one_kind, speaking
from tests.test_report import Page, array, at_tokens

PROMPT = "w09 w07 w05"


@pytest.fixture
def model(kind, tmp_path, monkeypatch):
    made = speaking(kind, tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: made)
    return made


COMMANDS = {
    "an answer": (
        [PROMPT, "--no-chat", "--max-new-tokens", "3"],
        lambda m: generate_and_attribute(m, PROMPT, max_new_tokens=3),
        {},
    ),
    "a target": (
        [PROMPT, "--target", "w08", "--incorrect-target", "w06", "--layers", "2", "--baseline", "zero"],
        lambda m: ig_lens(m, PROMPT, targets="w08", incorrect_targets="w06", layers=[2], baseline="zero"),
        {"layers": [2], "baseline": "zero"},
    ),
    "the prompt's own": (
        [PROMPT, "--no-generate", "--metric", "log_prob"],
        lambda m: ig_lens(m, PROMPT, targets=NEXT, positions=None, metric="log_prob"),
        {"metric": "log_prob"},
    ),
    "a given answer": (
        ["answer", PROMPT, "w08 w06", "--k", "2"],
        lambda m: attribute_answer(m, PROMPT, "w08 w06", layers=2).tokens,
        {"layers": 2, "metric": "log_prob"},
    ),
    "compared": (["compare", PROMPT, "--target", "w08"], lambda m: ig_lens(m, PROMPT, targets="w08"), {}),
}


@each_kind
@pytest.mark.parametrize("name", COMMANDS)
def test_the_report_holds_the_result_and_its_companions(kind, model, name, capsys, tmp_path):
    words, call, settings = COMMANDS[name]
    file = tmp_path / "x.html"
    assert cli.main([*words, "--html", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "IGLensResult" in printed.out or "Comparison" in printed.out or "AnswerResult" in printed.out
    data, result = Page(file.read_text(encoding="utf-8")).data, call(model)
    assert np.array_equal(array(data["credits"]), at_tokens(result, result.attribution))
    mask = result.mask[0]
    ask = {
        "targets": result.target_ids[:, mask, 0],
        "incorrect_targets": None if result.incorrect_ids is None else result.incorrect_ids[:, mask, 0],
        "positions": result.positions[0][mask].tolist(),
        "attention_mask": [1] * result.tokens.shape[1],  # a generated pad token is no padding
        **settings,
    }
    table = compare(model, result.tokens, methods=["dla"], **ask)
    (column,) = data["methods"]
    # another forward pass of the same float32 numbers, as a cache and as hooks
    assert array(column["amounts"]) == pytest.approx(at_tokens(table, table.amounts[0]), abs=1e-5)
    ask.pop("metric", None)
    lens = logit_lens(model, result.tokens, **ask)
    assert np.array_equal(array(data["lens"]["rank"]), at_tokens(lens, lens.rank))


@one_kind
def test_a_model_without_direct_attribution_still_has_a_report(kind, model, capsys, tmp_path, monkeypatch):
    import iglens_tl

    def refuse(*args, **settings):
        raise iglens_tl.UnsupportedModelError("no logit here")

    monkeypatch.setattr(iglens_tl, "compare", refuse)
    assert cli.main([PROMPT, "--target", "w08", "--html", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().err == "iglens: the report goes without direct logit attribution: no logit here\n"
    assert Page((tmp_path / "x.html").read_text(encoding="utf-8")).data["methods"] == []


REFUSED = {
    "no such folder": (["--html", "/no/such/folder/x"], "there is no folder '/no/such/folder'"),
    "a folder": (["--html", "/"], "no name for a file"),
    "the standard output": (["--html"], "--html"),
}


@pytest.mark.parametrize("command", [["w05"], ["compare", "w05"], ["answer", "w05", "w06"]], ids=lambda words: words[0])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(command, name, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: pytest.fail("loaded"))
    words, message = REFUSED[name]
    assert cli.main([*command, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["w05"], ["compare", "w05"], ["answer", "w05", "w06"]], ids=lambda words: words[0])
def test_without_plotly_it_is_refused_before_a_model_is_loaded(command, capsys, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "plotly" else find(name, *rest)
    )
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: pytest.fail("loaded"))
    assert cli.main([*command, "--html", str(tmp_path / "x.html")]) == 2
    assert "pip install iglens_tl[plots]" in capsys.readouterr().err


def test_a_loop_writes_no_report(capsys):
    assert cli.main(["--loop", "--html", "x.html"]) == 2
    assert "--html FILE would be written over" in capsys.readouterr().err
