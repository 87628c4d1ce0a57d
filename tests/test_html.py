"""The notebook form: escaped, small, readable on light and dark pages, and its bars are the credits."""

import re
from html.parser import HTMLParser

import pytest

from tests.made_results import NAN, make, one, rich

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
        assert {tag for tag, _ in page.tags} <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}
        assert {name for _, attributes in page.tags for name in attributes} <= {"style", "align"}
    tokens = [row[1] for row in Page(hostile()._repr_html_()).rows[1:]]
    assert tokens[:5] == ["'<s>'", "'</s>'", "'<b>'", "'a<b'", "'&amp;'"]
    assert "<script>alert(1)</script>" in "".join(page.words)


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
    assert len(fragment) < 70_000
    title, first = rows[0], rows[1]
    credits = first[title.index("target") + 1 : title.index("sum")]
    assert len(credits) == 12
    assert sum(float(text) for text in credits) == pytest.approx(0.61, abs=1e-3)


def bar(cell):
    return [float(x) for x in re.findall(r"([\d.]+)%", dict(cell).get("style", ""))]


def test_bars_are_zero_centred_and_on_one_scale():
    page = Page(one([0.5, 0.9, 0.7, 0.7])._repr_html_())
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    bars = cells[3::4]
    assert [bar(attributes) for attributes in bars] == [[50.0, 100.0], [25.0, 50.0], []]
    assert ["#2684ff80" in bars[0]["style"], "#ff6e1e99" in bars[1]["style"]] == [True, True]
    assert page.rows[1][:3] == ["0", "+0.4000", "0.9000"]


def test_no_colour_is_fixed_but_the_translucent_bars():
    for result in (rich(), one([0.5, 0.9, 0.7])):
        fragment = result._repr_html_()
        assert set(re.findall(r"#[0-9a-f]{3,8}\b", fragment)) <= {"#0000", "#2684ff80", "#ff6e1e99"}
        assert "color:" not in fragment


def test_odd_results_render():
    for result in (one([0.0, NAN, float("inf")]), make([[[0.0]], [[1.0]]], mask=[[False]]), one([0.0, 0.0])):
        assert Page(result._repr_html_()).open == []
