"""The notebook form: escaped, small, readable on light and dark pages, and its bars are the credits."""

import re
from html.parser import HTMLParser

import pytest
import torch

from iglens_tl import (
    AblationResult,
    AnswerResult,
    ContextNeed,
    Diagnosis,
    DLAResult,
    Finding,
    LayerPathResult,
    LensComparison,
    LogitLensResult,
    OnsetStudy,
    SplitResult,
)
from iglens_tl._fragment import bars, fragment, signed, table
from iglens_tl._layout import Column
from iglens_tl._shares import Part
from tests.made_figures import summary
from tests.made_results import NAN, make, one, rich
from tests.made_studies import made_table

HOSTILE = [
    "<s>",
    "</s>",
    "<b>",
    "a<b",
    "&amp;",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'",
    "\ud800",
]


TAGS = {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """The tags of a fragment, and the text of its table by cell."""

    def __init__(self, fragment):
        super().__init__()
        self.tags, self.open, self.rows, self.words = [], [], [], []
        self.feed(fragment)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def hostile():
    n = len(HOSTILE)
    return make(
        [[[0.1] * n], [[0.9] * n]],
        token_strings=(tuple(HOSTILE),),
        targets=[HOSTILE],
        answer=HOSTILE[5],
        settings={"baseline": "<i>x</i>"},
        estimator="<u>",
        state_labels=("<em>0</em>", "<em>1</em>"),
        segment_labels=("<i>2</i>",),
    )


def test_markup_in_tokens_stays_visible_text():
    for result in (hostile(), *(hostile().select(pos=index) for index in range(len(HOSTILE)))):
        page = Page(result._repr_html_())
        assert page.open == []
        assert {tag for tag, _ in page.tags} <= TAGS
        assert {name for _, attributes in page.tags for name in attributes} <= {"class", "style", "align"}
    tokens = [row[1] for row in Page(hostile()._repr_html_()).rows[1:]]
    assert tokens[:5] == ["'<s>'", "'</s>'", "'<b>'", "'a<b'", "'&amp;'"]
    assert "<script>alert(1)</script>" in "".join(page.words)


def test_one_is_singular():
    assert Page(hostile()._repr_html_()).words[0].startswith("IGLensResult: 9 tokens, 1 segment from")
    assert Page(context()._repr_html_()).words[0].startswith("ContextNeed: 9 tokens, 1 block,")


def test_it_can_be_encoded():
    hostile()._repr_html_().encode("utf-8")


def test_a_map_keeps_repeated_tokens_and_leaves_masked_ones_out():
    rows = Page(rich()._repr_html_()).rows
    assert [row[:3] for row in rows[1:]] == [
        ["0", "0", "'<s>'"],
        ["0", "1", "'the'"],
        ["0", "2", "'the'"],
        ["1", "1", "'\\ud800'"],
        ["1", "2", "'a\\nb'"],
    ]


def test_a_large_map_is_grouped_and_limited():
    result = make([[[0.01 * k + 0.001 * p for p in range(300)]] for k in range(62)])
    fragment = result._repr_html_()
    rows = Page(fragment).rows
    assert len(rows) == 41
    assert "... 260 more tokens" in fragment
    assert len(fragment) < 100_000  # 720 cells, 480 of them with a bar
    title, first = rows[0], rows[1]
    credits = first[title.index("target") + 1 : title.index("sum")]
    assert len(credits) == 12
    assert sum(float(text) for text in credits) == pytest.approx(0.61, abs=1e-3)


def bar(cell):
    return [float(x) for x in re.findall(r"([\d.]+)%", dict(cell).get("style", ""))]


def test_bars_are_zero_centred_and_on_one_scale():
    page = Page(one([0.5, 0.9, 0.7, 0.7])._repr_html_())
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    bars = cells[2::4]
    assert [bar(attributes) for attributes in bars] == [[50.0, 100.0], [25.0, 50.0], []]
    assert ["#2684ff80" in bars[0]["style"], "#ff6e1e99" in bars[1]["style"]] == [True, True]
    assert page.rows[0] == ["segment", "credit", "", "level"]  # a bar stands beside what it shows
    assert page.rows[1] == ["0", "+0.4000", "", "0.9000"]
    assert "no-repeat" not in bars[0]["style"]  # it has the height of its cell


def test_no_colour_is_fixed_but_the_translucent_bars():
    for result in (rich(), one([0.5, 0.9, 0.7])):
        fragment = result._repr_html_()
        assert set(re.findall(r"#[0-9a-f]{3,8}\b", fragment)) <= {"#0000", "#2684ff80", "#ff6e1e99"}
        assert re.findall(r"color:|opacity:", fragment) == []


def test_odd_results_render():
    for result in (one([0.0, NAN, float("inf")]), make([[[0.0]], [[1.0]]], mask=[[False]]), one([0.0, 0.0])):
        assert Page(result._repr_html_()).open == []


# --- every other result --------------------------------------------------------------------------------------------


def about(result):
    """What a companion repeats of the tokens that it is about."""
    names = (
        "mask",
        "positions",
        "target_ids",
        "incorrect_ids",
        "tokens",
        "token_mask",
        "token_strings",
        "target_strings",
    )
    return {name: getattr(result, name) for name in (*names, "incorrect_strings", "settings", "provenance")}


def lens(states=2, **changes):
    grid = torch.linspace(0, 1, states * len(HOSTILE), dtype=torch.float64).reshape(states, 1, len(HOSTILE))
    fields = {
        **dict.fromkeys(("prob", "log_prob", "logit", "entropy", "kl"), grid),
        "rank": (100 * grid).long(),
        "top_ids": torch.arange(2).expand(states, 1, len(HOSTILE), 2).contiguous(),
        "top_probs": grid[..., None].expand(-1, -1, -1, 2).contiguous(),
        "top_strings": ((tuple((text, "<u>") for text in HOSTILE),),) * states,
        "state_labels": tuple(f"<em>{i}</em>" for i in range(states)),
        "hidden_states": tuple(range(states)),
    }
    return LogitLensResult(**{**fields, **about(hostile()), **changes})


def shares(numbers=(0.5, -1.0, 0.25), labels=None):
    grid = torch.tensor(numbers, dtype=torch.float64)[:, None, None].expand(-1, 1, len(HOSTILE)).contiguous()
    return DLAResult(
        attribution=grid,
        logit=grid.sum(0),
        total=grid.sum(0),
        gap=0 * grid[0],
        part_labels=tuple(labels or [f"<i>{i}</i>" for i in range(len(numbers))]),
        unit="<b>block</b>",
        quantity="<s>logit</s>",
        **about(hostile()),
    )


def path():
    grid = torch.tensor([0.5, NAN], dtype=torch.float64)[:, None, None].expand(-1, 1, len(HOSTILE)).contiguous()
    return LayerPathResult(
        attribution=grid[..., None].expand(-1, -1, -1, len(HOSTILE)).contiguous(),
        **dict.fromkeys(("layer_sum", "delta", "at_position"), grid),
        **dict.fromkeys(("total", "sum_over_layers"), grid[0]),
        state_labels=("<b>0</b>", "1_pre"),
        hidden_states=(0, 1),
        method="<i>method</i>",
        metric="prob",
        metric_unit="<u>unit</u>",
        forwards=3,
        **about(hostile()),
    )


def comparison():
    amounts = torch.tensor([[0.5, -0.25], [2.0, 8.0]], dtype=torch.float64)[..., None, None]
    under = torch.tensor([0.25, NAN], dtype=torch.float64)[:, None, None].expand(-1, 1, len(HOSTILE)).contiguous()
    return LensComparison(
        amounts=amounts.expand(-1, -1, 1, len(HOSTILE)).contiguous(),
        **dict.fromkeys(("sums", "outside", "expected", "gap"), under),
        method_labels=("<i>a</i>", "<script>"),
        segment_labels=("<i>0</i>", "1"),
        hidden_states=(1, 2),
        units=("<u>", "&amp;"),
        meanings=("<b>", "m"),
        expected_names=("e", ""),
        **about(hostile()),
    )


def answer():
    n = len(HOSTILE)
    values = torch.linspace(-9, -1, 3 * n, dtype=torch.float64).reshape(3, 1, n)
    return AnswerResult(make(values, targets=[HOSTILE], metric="log_prob", answer=HOSTILE[5]))


def split():
    whole, n = hostile(), len(HOSTILE)
    credits = torch.tensor([0.6, -0.1, 0.3], dtype=torch.float64)[:, None, None].expand(-1, 1, n).contiguous()
    return SplitResult(
        whole=whole,
        parts=tuple(Part(label, "own", 0) for label in ("<script>", "<b>x</b>", "&amp;")),
        attribution=credits,
        gap=0 * credits[:1],
        error=0 * credits[:1],
        nodes=torch.ones(1, 1, n, dtype=torch.int64),
        linear=credits,
        sequential=None,
        attn_first=None,
        mlp_first=None,
        unit="parts",
        path="sequential",
        tolerance=1e-6,
    )


def ablation():
    grid = torch.tensor([0.5, -0.1], dtype=torch.float64)[:, None, None].expand(-1, 1, len(HOSTILE)).contiguous()
    return AblationResult(
        **dict.fromkeys(("clean", "clean_prob"), grid[0]),
        **dict.fromkeys(("after", "drop", "after_prob"), grid),
        layer_labels=("<b>0</b>", "1"),
        blocks=(0, 1),
        component="block",
        mode="zero",
        scope="target",
        effect="total",
        metric="prob",
        forwards=1,
        block_evaluations=2,
        **{**about(hostile()), "settings": {"replacement": "<s>0</s>"}},
    )


def context():
    grid = torch.tensor([0.1, 0.9], dtype=torch.float64)[:, None, None].expand(-1, 1, len(HOSTILE)).contiguous()
    return ContextNeed(
        clean=grid[1],
        transplant=grid,
        transplant_each=None,
        attention_cut=grid,
        state_labels=("<b>0</b>", "final_post"),
        segment_labels=("<i>0</i>",),
        metric="prob",
        forwards=1,
        block_evaluations=2,
        **about(hostile()),
    )


def study():
    return OnsetStudy(made_table(4, 2), {}, {"model": "<script>"})


def diagnosis():
    return Diagnosis("<script>model</script>", (Finding("<b>x</b>", True, "<i>"), Finding("y", False, "&amp;")))


EVERY = {
    "IGLensResult": hostile,
    "LogitLensResult": lens,
    "DLAResult": shares,
    "LayerPathResult": path,
    "LensComparison": comparison,
    "AnswerResult": answer,
    "SplitResult": split,
    "AblationResult": ablation,
    "ContextNeed": context,
    "OnsetStudy": study,
    "DatasetSummary": summary,
    "Diagnosis": diagnosis,
    "Onset": lambda: hostile().onset("peak"),
}

OF_NO_TOKENS = {"Onset", "Diagnosis", "OnsetStudy", "DatasetSummary"}


def test_every_result_has_a_form_for_notebooks():
    import iglens_tl

    results = [name for name in iglens_tl.__all__ if hasattr(getattr(iglens_tl, name), "_repr_html_")]
    assert sorted(results) == sorted(EVERY)
    printed = [name for name in iglens_tl.__all__ if name.endswith("Result") or name in EVERY]
    assert set(printed) <= set(EVERY)


@pytest.mark.parametrize("kind", EVERY)
def test_the_form_is_escaped_small_and_of_no_colour_of_its_own(kind):
    result = EVERY[kind]()
    fragment = result._repr_html_()
    page = Page(fragment)
    assert type(result).__name__ == kind
    assert page.open == []
    assert {tag for tag, _ in page.tags} <= TAGS
    assert {name for _, attributes in page.tags for name in attributes} <= {"class", "style", "align"}
    assert set(re.findall(r"#[0-9a-f]{3,8}\b", fragment)) <= {"#0000", "#2684ff80", "#ff6e1e99"}
    assert re.findall(r"color:|opacity:", fragment) == []  # of the reader's theme, with its contrast
    assert kind in page.words[0]
    assert len(fragment) < 40_000
    fragment.encode("utf-8")


@pytest.mark.parametrize("kind", EVERY)
def test_notebooks_typeset_no_mathematics_in_it(kind):
    outermost, *inner = Page(EVERY[kind]()._repr_html_()).tags
    # What MathJax 2 passes over, and what MathJax 3 and 4 do; nothing within asks for it again.
    assert set(outermost[1]["class"].split()) == {"tex2jax_ignore", "mathjax_ignore"}
    assert not [tag for tag, attributes in inner if "class" in attributes]


@pytest.mark.parametrize("kind", sorted(EVERY.keys() - {"Diagnosis"}))
def test_cells_are_aligned_whatever_the_host_does(kind):
    """Some themes align every cell by a style sheet, and some hosts take styles away."""
    cells = [attributes for tag, attributes in Page(EVERY[kind]()._repr_html_()).tags if tag in ("td", "th")]
    assert [f"text-align:{cell['align']}" in cell["style"].split(";") for cell in cells] == [True] * len(cells) != []


def test_titles_stand_over_their_numbers():
    page = Page(rich()._repr_html_())
    sides = [attributes["align"] for tag, attributes in page.tags if tag in ("th", "td")]
    width = len(page.rows[0])
    assert [sides[start : start + width] for start in range(0, len(sides), width)] == [sides[:width]] * len(page.rows)
    assert sides[:3] == ["right", "right", "left"]  # batch, pos, token


def test_a_prompt_without_spaces_is_broken_into_lines():
    for words in (one([0.0, 0.5]), shares()):
        lines = [
            attributes["style"] for tag, attributes in Page(words._repr_html_()).tags if "pre-wrap" in str(attributes)
        ]
        assert len(lines) > 1
        assert {"white-space:pre-wrap;overflow-wrap:anywhere"} == set(lines)


@pytest.mark.parametrize("kind", ["IGLensResult", "AblationResult", "ContextNeed"])
def test_no_bar_is_behind_a_number(kind):
    """Under muted themes, a number on a colour cannot be read."""
    page = Page(EVERY[kind]()._repr_html_())
    barred = [attributes["style"] for _, attributes in page.tags if "gradient" in attributes.get("style", "")]
    assert len(barred) > 1
    assert [style.endswith("0 100%/100% 25% no-repeat") for style in barred] == [True] * len(barred)


def test_an_interval_is_not_broken_into_lines():
    page = Page(study()._repr_html_())
    styles = [attributes["style"].split(";") for tag, attributes in page.tags if tag == "td"]
    texts = [text for row in page.rows[1:] for text in row]
    intervals = ["white-space:pre" in style for style, text in zip(styles, texts, strict=True) if "[" in text]
    assert intervals == [True] * 2 * (len(page.rows) - 1)


@pytest.mark.parametrize("kind", sorted(EVERY.keys() - OF_NO_TOKENS))
def test_markup_of_tokens_is_read_as_text(kind):
    assert "<script>alert(1)</script>" in "".join(Page(EVERY[kind]()._repr_html_()).words)


def test_bars_of_columns_in_different_units_are_each_on_their_own_scale():
    page = Page(comparison()._repr_html_())
    titles, units, first, second, *_ = page.rows
    assert titles == ["segment", "<i>a</i>", "", "<script>"]  # the second method has no sum: levels have no bars
    assert [units[1:], first[1], second[1], second[3]] == [["[<u>]", "", "[&amp;]"], "+0.5000", "-0.2500", "+8.0000"]
    bars_of = [bar(attributes) for tag, attributes in page.tags if tag == "td"][2::4]
    assert bars_of[:4] == [[], [50.0, 100.0], [25.0, 50.0], []]


def test_the_largest_amount_always_has_the_longest_bar():
    for number in (
        5.142623352209221,
        2.9583046847978816,
        0.1,
        1 / 3,
        1e-300,
        5e-324,
        1.7e308,
    ):  # 50 * x / x can be more than 50
        for sign in (1, -1):
            page = Page(table([*signed("x", [sign * number, 0.0])]))
            cells = [attributes for tag, attributes in page.tags if tag == "td"]
            assert bar(cells[1]) == ([50.0, 100.0] if sign > 0 else [0.0, 50.0])


def test_shares_of_many_parts_keep_their_order_and_their_sum():
    rows = Page(shares([0.01 * k for k in range(-30, 30)], [f"p{k}" for k in range(60)])._repr_html_()).rows
    assert rows[0] == ["part", "logits", ""]
    names, numbers = zip(*[(row[0], float(row[1])) for row in rows[1:42]], strict=True)
    assert names == (*(f"'p{k}'".strip("'") for k in (*range(21), *range(41, 60))), "20 others")
    assert sum(numbers) == pytest.approx(-0.3, abs=1e-9)  # two decimals each


def test_a_long_path_shows_its_end_and_says_so():
    fragment = lens(50, state_labels=tuple(f"s{i}" for i in range(50)))._repr_html_()
    rows = Page(fragment).rows
    assert [rows[1][0], rows[40][0]] == ["s10", "s49"]
    assert "the first 10 states are in to_dataframe()" in fragment


def test_an_answer_shows_its_tokens_and_their_sum():
    result = answer()
    titles, *rows = Page(result._repr_html_()).rows
    assert titles == ["segment", *(repr(text) for text in HOSTILE), "sum", ""]
    for segment, row in enumerate(rows):
        credits = [float(text) for text in row[1 : 1 + len(HOSTILE)]]
        assert credits == pytest.approx(result.tokens.attribution[segment, 0].tolist(), abs=5.1e-5)  # four decimals
        assert float(row[-2]) == pytest.approx(float(result.attribution[segment]), abs=5.1e-5)


def test_parts_of_a_split_have_bars_by_their_credit():
    page = Page(split()._repr_html_())
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    assert [row[:2] for row in page.rows[1:5]] == [
        ["<script>", "+0.6000"],
        ["&amp;", "+0.3000"],
        ["<b>x</b>", "-0.1000"],
        ["sum", "+0.8000"],
    ]
    assert [bar(cells[4 * row + 2]) for row in range(4)] == [[50.0, 100.0], [50.0, 75.0], [41.7, 50.0], []]


def test_an_onset_has_a_row_for_each_entry():
    values = torch.tensor([[[0.0, 0.0]], [[0.0, 0.2]], [[0.0, 0.9]]], dtype=torch.float64)
    rows = Page(make(values).onset("peak")._repr_html_()).rows
    assert rows == [["batch", "pos", "segment", "hidden state"], ["0", "0", "none", ""], ["0", "1", "1", "2"]]


def test_the_pieces_make_a_form_for_any_result():
    columns = [Column("part", ["<a>", "b"], right=False), *signed("drop", [1.0, NAN])]
    page = Page(fragment("Mine", table(columns), note="<note>"))
    assert page.rows == [["part", "drop", ""], ["<a>", "+1.0000", ""], ["b", "-", ""]]
    assert bars([0.5], scale=1.0).scale == 1.0
    assert page.words[-1] == "<note>"
