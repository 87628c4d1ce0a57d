"""The one-file report: what is embedded is the result, nothing in it can run or be fetched, and it stays small."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from iglens_tl import (
    AnswerResult,
    IGLensResult,
    LensComparison,
    LogitLensResult,
    attribute_answer,
    compare,
    direct_logit_attribution,
    ig_lens,
    logit_lens,
    report_html,
    write_report,
)
from iglens_tl._report.strip import prompts, visible
from tests.made_results import NAN, make, one, rich
from tests.models import BATCH
from tests.subjects import KINDS, subject
from tests.test_html import HOSTILE, hostile

KIND = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u16": "<u2"}


class Page(HTMLParser):
    """The elements of a page in order as (tag, attributes, the text directly in it)."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in {"meta", "link", "br"}:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open[-1:]:
            element[2] += data

    def all(self, tag, **wanted):
        return [
            element
            for element in self.elements
            if element[0] == tag and all(element[1].get(name.rstrip("_")) == value for name, value in wanted.items())
        ]

    @property
    def data(self):
        (element,) = self.all("script", id="data")
        return json.loads(element[2])


def array(packed):
    (name,) = packed.keys() - {"shape"}
    return np.frombuffer(base64.b64decode(packed[name]), KIND[name]).reshape(packed["shape"])


def at_tokens(result, grid):
    """`[token, ...]` from `[..., batch, pos]`, an own way."""
    return np.stack([grid[..., row, column].numpy() for row, column in result.mask.nonzero().tolist()])


@pytest.fixture(scope="module")
def asked():
    """A result of a real tiny model, and its companions, on one cache."""
    model = subject(KINDS[-1]).model
    with torch.no_grad():
        logits, cache = model.run_with_cache(BATCH)
    ask = {"targets": 7, "positions": None, "cache": cache, "logits": logits}
    shares = direct_logit_attribution(model, BATCH, unit="block", **ask)
    return ig_lens(model, BATCH, **ask), [logit_lens(model, BATCH, **ask), compare(model, BATCH, **ask), shares]


@pytest.fixture(scope="module")
def page(asked):
    result, companions = asked
    return Page(report_html(result, companions=companions))


def test_the_numbers_are_the_results_own_to_the_last_bit(asked, page):
    result, (lens, table, shares) = asked
    data = page.data
    for name, grid in (("credits", result.attribution), ("values", result.values), ("total", result.total)):
        assert np.array_equal(array(data[name]), at_tokens(result, grid))
    compared, direct = data["methods"]
    assert [compared["name"], compared["unit"], direct["name"]] == ["dla", "logits", "dla"]
    assert np.array_equal(array(compared["amounts"]), at_tokens(result, table.amounts[2]))
    assert np.array_equal(array(compared["under"]["outside"]), at_tokens(result, table.outside[2]))
    inside = shares.attribution[1 : 1 + result.n_segments]
    assert np.array_equal(array(direct["amounts"]), at_tokens(result, inside))
    under = {name: array(packed) for name, packed in direct["under"].items()}
    # float64 sums of some ten logits in another order
    assert under["sum"] + under["outside"] == pytest.approx(at_tokens(result, shares.total), abs=1e-12)
    assert np.array_equal(array(data["lens"]["rank"]), at_tokens(result, lens.rank))
    tops = [
        [[data["lens"]["strings"][place] for place in state] for state in token]
        for token in array(data["lens"]["top"]).tolist()
    ]
    assert tops == [
        [[repr(text) for text in lens.top_strings[state][row][column]] for state in range(len(lens.state_labels))]
        for row, column in result.mask.nonzero().tolist()
    ]
    probs = at_tokens(result, lens.top_probs.movedim(-1, 0)).transpose(0, 2, 1)
    assert np.array_equal(array(data["lens"]["top_probs"]), probs.astype("f4"))


def test_onsets_of_every_rule_are_those_of_the_result():
    result = rich().select(batch=0)  # a difference: no crossing
    data = Page(report_html(result)).data
    table = result.onsets()
    assert [rule["rule"] for rule in data["onsets"]] == ["mass", "crossing", "peak", "rank"]
    for rule in data["onsets"]:
        wanted = [label or ("undefined" if rule["rule"] == "crossing" else "none") for label in table[rule["rule"]]]
        assert rule["labels"] == wanted
        names = result.segment_labels if rule["kind"] == "segment" else result.state_labels
        shift = rule["kind"] == "segment"  # a segment stands at the state that it ends in
        ends = [-1 if label not in names else names.index(label) + shift for label in wanted]
        assert array(rule["ends"]).tolist() == ends
        assert rule["known"] == (rule["rule"] != "crossing")


def test_the_rows_of_the_waterfall_cover_every_segment_once():
    result = make([[[0.02 * k**2, 0.5 + (-0.3) ** (k + 1)]] for k in range(31)])
    for token in Page(report_html(result)).data["tokens"]:
        assert token["groups"][-1] == 30
        assert sorted(set(token["groups"])) == token["groups"]
        assert len(token["labels"]) == len(token["groups"]) <= 16


def test_masked_positions_are_left_out_and_repeated_tokens_are_kept_apart():
    page = Page(report_html(rich()))
    tokens = page.data["tokens"]
    assert [(token["batch"], token["position"]) for token in tokens] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert [token["target"] for token in tokens][::4] == ["' cat| dog' \N{MINUS SIGN} ' x'"] * 2
    buttons = page.all("button", class_="token")
    assert [button[1]["data-entry"] for button in buttons] == ["0", "1", "2", "3", "4"]
    assert [button[2] for button in buttons] == ["<s>", "the", "the", "\\ud800", "a↵b"]
    assert not np.isnan(array(page.data["credits"])).any()


# --- the strip -----------------------------------------------------------------------------------------------------


def pieces(result):
    return [(piece.text, piece.entry, piece.target) for _, found in prompts(result) for piece in found]


def words(*texts, **changes):
    """A result of one prompt of these words, whose ids are their places."""
    n = len(texts)
    return {
        "token_strings": (texts,),
        "tokens": torch.arange(n)[None],
        "token_mask": torch.ones(1, n).bool(),
        **changes,
    }


def test_an_answer_is_running_text():
    asked = words("Who", "?", " I", positions=torch.tensor([[1, 2]]), target_ids=torch.tensor([[[2], [9]]]))
    result = make([[[0.0, 0.0]], [[0.5, 0.7]]], targets=[[" I", "."]], **asked)
    assert pieces(result) == [("Who?", None, ""), (" I", 0, ""), (".", 1, "")]


def test_targets_that_are_not_the_next_tokens_stand_beneath():
    asked = words("a", "b", positions=torch.tensor([[0, 1]]), target_ids=torch.tensor([[[7], [7]]]))
    result = make([[[0.0, 0.0]], [[0.5, 0.7]]], targets=[["x", "x"]], **asked)
    assert pieces(result) == [("a", 0, "x"), ("b", 1, "x")]


def test_padding_is_not_part_of_the_prompt():
    asked = words("<pad>", "<pad>", "a", "b")
    asked |= {"token_mask": torch.tensor([[False, False, True, True]]), "positions": torch.tensor([[3]])}
    result = make([[[0.0]], [[0.5]]], targets=[[" c"]], **asked)
    assert pieces(result) == [("ab", None, ""), (" c", 0, "")]


def test_without_texts_there_are_positions():
    assert pieces(one([0.0, 1.0], tokens=None, token_strings=None, token_mask=None)) == [("position 0", 0, " t00")]


def test_bytes_that_tokens_split_are_characters_again():
    asked = words("<0xE6><0x9D>", "<0xB1>", "x", positions=torch.tensor([[2]]))
    assert pieces(make([[[0.0]], [[0.5]]], targets=[["y"]], **asked))[0] == ("東x", None, "")


def test_signs_that_cannot_be_seen_are_written():
    assert visible("a\u202eb\x00\ud800\xa0\n\t ") == "a\\u202eb\\x00\\ud800\\xa0↵⇥ "


# --- nothing runs, nothing is fetched --------------------------------------------------------------------------------


def test_markup_is_text_wherever_it_comes_from():
    clean = Page(report_html(hostile_like("w")))
    for title in (None, "</title><script>alert(1)</script>", "\ud800"):
        text = report_html(hostile(), title=title)
        page = Page(text)
        assert page.open == []
        assert [element[0] for element in page.elements] == [element[0] for element in clean.elements]
        assert [sorted(element[1]) for element in page.elements] == [sorted(e[1]) for e in clean.elements]
        text.encode("utf-8")
    shown = [button[2] for button in page.all("button", class_="token")]
    assert shown == [*HOSTILE[:-1], "\\ud800"]
    assert page.data["tokens"][5]["target"] == repr(HOSTILE[5])


def hostile_like(text):
    """The hostile result with harmless texts."""
    n = len(HOSTILE)
    targets = [[text] * n]
    return make(
        [[[0.1] * n], [[0.9] * n]],
        token_strings=((text,) * n,),
        targets=targets,
        answer=text,
        settings={"baseline": text},
    )


def test_the_data_cannot_end_its_script():
    text = report_html(hostile())
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1)
    assert not set("<>&") & set(data)
    assert data.isascii()
    assert Page(text).data["tokens"][1]["target"] == "'</s>'"


def test_only_the_two_scripts_of_the_page_may_run(page):
    (policy,) = page.all("meta", http_equiv="Content-Security-Policy") or [
        element for element in page.all("meta") if "http-equiv" in element[1]
    ]
    scripts = [element[2] for element in page.all("script") if "type" not in element[1]]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1]["content"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in hashes]
    assert rules["img-src"] == "data: blob:"
    assert len(scripts) == 2


def test_no_address_is_fetched(page):
    fetching = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "ping"}
    found = {value for _, attributes, _ in page.elements for name, value in attributes.items() if name in fetching}
    assert found == {"data:,"}
    assert not [element for element in page.elements if any(name.startswith("on") for name in element[1])]
    (style,) = [element[2] for element in page.elements if element[0] == "style"]
    assert not re.search(r"@import|url\(|https?:", style)
    ours = page.all("script")[-1][2]
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|WebSocket|innerHTML|insertAdjacentHTML|eval\(", ours)


def test_plotly_is_there_once_and_512_tokens_of_30_layers_fit_8_mb(tmp_path):
    places = torch.arange(512.0, dtype=torch.float64)
    values = places / 512 * (torch.arange(31)[:, None, None] > places % 30)
    result = make(values)
    write_report(result, tmp_path / "x.html", companions=[*full_companions(result, values, shared_fields(result))])
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert (tmp_path / "x.html").stat().st_size < 8e6
    assert text.count("plotly.js v") == 1
    assert len(Page(text).all("button", class_="token")) == 512


def shared_fields(result):
    """What a companion says of the same tokens."""
    return {
        name: getattr(result, name)
        for name in (
            "mask", "positions", "target_ids", "incorrect_ids", "tokens", "token_mask", "token_strings", "target_strings",
            "incorrect_strings", "settings", "provenance",
        )
    }  # fmt: skip


def full_companions(result, values, shared):
    """As much as a report can hold: five top tokens at each state, all different, and three methods."""
    states, _, n = values.shape
    ids = torch.arange(states * n * 5).reshape(states, 1, n, 5) % 49152
    strings = tuple(((tuple(tuple(f" word{i}" for i in five) for five in row)),) for (row,) in ids.tolist())
    yield LogitLensResult(
        **dict.fromkeys(("prob", "log_prob", "logit", "entropy", "kl"), values),
        rank=ids[..., 0],
        top_ids=ids,
        top_probs=values[..., None].expand(-1, -1, -1, 5).contiguous(),
        top_strings=strings,
        state_labels=result.state_labels,
        hidden_states=(0, *result.hidden_states),
        **shared,
    )
    grid = values[None, 1:].expand(3, -1, -1, -1).contiguous()
    yield LensComparison(
        amounts=grid,
        **dict.fromkeys(("sums", "outside", "expected", "gap"), grid[:, 0]),
        method_labels=("dla", "layer_conductance", "layer_integrated_gradients"),
        segment_labels=result.segment_labels,
        hidden_states=result.hidden_states,
        units=("logits", "probability", "probability"),
        meanings=("m",) * 3,
        expected_names=("e",) * 3,
        **shared,
    )


def test_a_report_is_the_same_bytes_again_and_says_how_it_was_made(asked):
    result, companions = asked
    text = report_html(result, companions=companions)
    assert text == report_html(result, companions=companions)
    cells = "".join(element[2] for element in Page(text).elements if element[0] in {"td", "th"})
    for name, value in {**result.settings, **result.provenance}.items():
        assert value is None or (name in cells and (str(value).lower() in cells.lower()))
    said = " ".join(" ".join(element[2].split()) for element in Page(text).elements)
    assert "not the layer's causal effect through the blocks above" in said
    assert "conditional marginal" in said


def test_a_report_of_an_answer_is_that_of_its_tokens():
    answer = attribute_answer(subject(KINDS[-1]).model, [7, 8, 9], [3, 4])
    assert report_html(answer) == report_html(answer.tokens)
    assert isinstance(answer, AnswerResult)


def test_several_prompts_have_a_strip_each():
    page = Page(report_html(rich()))
    assert [element[1]["aria-label"] for element in page.all("div", class_="strip")] == [
        "tokens of prompt 0",
        "tokens of prompt 1",
    ]


def test_numbers_that_are_not_finite_are_written():
    page = Page(report_html(one([0.0, NAN, float("inf")])))
    assert np.array_equal(array(page.data["values"])[0], [0.0, NAN, np.inf], equal_nan=True)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_no_result_is_refused(asked):
    result, (lens, *_) = asked
    refusals = [
        (TypeError, "IGLensResult or an AnswerResult, got LogitLensResult", {"result": lens}),
        (TypeError, "title must be a string", {"result": result, "title": 3}),
        (TypeError, "companions must be .*; got IGLensResult", {"result": result, "companions": [lens, result]}),
        (ValueError, "at most one of each kind", {"result": result, "companions": [lens, lens]}),
        (ValueError, "at least one token", {"result": make([[[0.0]], [[1.0]]], mask=[[False]])}),
    ]
    for kind, message, asked_for in refusals:
        given = dict(asked_for)
        with pytest.raises(kind, match=message):
            report_html(given.pop("result"), **given)


def test_companions_about_something_else_are_refused(asked):
    result, _ = asked
    model = subject(KINDS[-1]).model
    ask = {"targets": 7, "positions": None}
    wrong = [
        ("must be about every token", logit_lens(model, BATCH, targets=7, positions=-1)),
        ("others at .* give both calls the same targets", compare(model, BATCH, targets=8, positions=None)),
        ("must have the result's state_labels", logit_lens(model, BATCH, layers=2, **ask)),
        ("must have the result's segment_labels", compare(model, BATCH, layers=2, **ask)),
        ('no part for the segments 0, 1, 2: use unit="block"', direct_logit_attribution(model, BATCH, **ask)),
    ]
    for message, companion in wrong:
        with pytest.raises(ValueError, match=message):
            report_html(result, companions=companion)


def test_a_companion_may_hold_more_tokens(asked):
    result, (lens, *_) = asked
    with pytest.raises(ValueError, match="other tokens in prompt 0: give both calls the same input"):
        report_html(result.select(batch=[1], pos=[2]), companions=lens)  # prompt 1 of the one is prompt 0 of the other
    last = result.select(pos=[-1])
    data = Page(report_html(last, companions=lens)).data
    assert array(data["lens"]["rank"]).tolist() == lens.rank[:, :, -1].T.tolist()


def test_without_plotly_the_error_names_the_extra(monkeypatch):
    real = importlib.import_module

    def lacking(name, *rest):
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", lacking)
    with pytest.raises(ImportError, match=r"pip install iglens_tl\[plots\]"):
        report_html(one([0.0, 1.0]))


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "x.html"
    file.write_text("old")
    with pytest.raises(FileNotFoundError):
        write_report(one([0.0, 1.0]), tmp_path / "none" / "x.html")
    with pytest.raises(ValueError, match="at least one token"):
        write_report(make([[[0.0]], [[1.0]]], mask=[[False]]), file)
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]
    assert file.read_text() == "old"


def test_it_is_read_where_there_is_no_transformer_lens(tmp_path):
    import subprocess

    rich().save(tmp_path / "x.safetensors")
    code = (
        "import sys; sys.modules['transformer_lens'] = None; from iglens_tl import IGLensResult, write_report; "
        f"write_report(IGLensResult.load({str(tmp_path / 'x.safetensors')!r}), {str(tmp_path / 'x.html')!r})"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == report_html(rich())
    assert IGLensResult.load(tmp_path / "x.safetensors").equals(rich())
