"""The report in a browser, from the disk and without a network: choose tokens by mouse and keyboard, in both colour schemes."""

from __future__ import annotations

import os

import pytest
import torch

from iglens_tl import report_html
from tests.made_results import make, rich
from tests.test_html import hostile
from tests.test_report import full_companions, shared_fields

pytestmark = pytest.mark.browser

OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
WATERFALL = "() => [...document.getElementById('waterfall').data[0].x]"
SELECTED = "() => [...document.querySelectorAll('.token[aria-pressed=true]')].map(e => Number(e.dataset.entry))"
FOCUSED = "() => Number(document.activeElement.dataset.entry ?? -1)"
WIDTH = "() => document.documentElement.scrollWidth"
TABLE = "() => [...document.querySelectorAll('#layers tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
OUTLINE = """() => {
  const at = document.activeElement;
  return getComputedStyle(at.matches("input") ? at.parentElement : at).outlineWidth;
}"""
# The contrast of texts with all that is behind them (WCAG 2), as the browser paints it.
CONTRAST = """selector => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const painted = colours => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  };
  return [...document.querySelectorAll(selector)].filter(node => node.innerText.trim()).map(node => {
    const behind = [];
    for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const [a, b] = [painted([...behind, getComputedStyle(node).color]), painted(behind)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # only the development environment has it

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=os.environ["IGLENS_TL_BROWSER"], args=OPTIONS)
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open a report from the disk; at the end nothing may have gone wrong in it, and nothing but the file been asked for."""
    faults, contexts = [], []

    def open_page(text, width=1200, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: request.url in (file.as_uri(), "data:,") or faults.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("#waterfall .main-svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def settled(page):
    """Wait until what was asked for is drawn: the page draws in the next frame."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def lines(n=24, states=7):
    """One prompt of many tokens, with a line break after every eighth, and companions."""
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(states, 1, n, generator=generator, dtype=torch.float64)
    if n > 100:  # one step each: the rows of random waterfalls would take long to choose while every shape is checked
        values = values[-1:] * (torch.arange(states)[:, None, None] > torch.arange(n) % (states - 1))
    texts = tuple(f" w{i}" if i % 8 else "\n" for i in range(n))
    result = make(values, is_top=values > 0.6, token_strings=(texts,), targets=[[*texts[1:], "!"]], target_ids=ids(n))
    return result, [*full_companions(result, values, shared_fields(result))]


def ids(n):
    """The ids of the next tokens of `made_results.make`, so that the strip is running text."""
    return torch.arange(1, n + 1).reshape(1, n, 1)


def test_a_click_shows_the_waterfall_of_that_token(opened):
    result, companions = lines()
    page = opened(report_html(result, companions=companions))
    assert page.evaluate(SELECTED) == [0]
    for token in (5, 17):
        page.click(f'.token[data-entry="{token}"]')
        settled(page)
        first, *credits, last = page.evaluate(WATERFALL)
        values = result.values[:, 0, token]
        assert [first, last] == [values[0].item(), values[-1].item()]
        assert first + sum(credits) == pytest.approx(last, abs=1e-12)
        assert page.evaluate(SELECTED) == [token]
        assert page.inner_text("#detail-heading") == repr(result.target_strings[0][token])
    assert page.locator(".main-svg").count() == page.locator("#waterfall .main-svg").count()


def test_the_table_shows_every_segment_beside_the_other_methods(opened):
    result, companions = lines()
    page = opened(report_html(result, companions=companions))
    titles, start, *rows = page.evaluate(TABLE)
    assert [title.split("\n")[0] for title in titles] == [
        *("segment", "credit", "", "level", "dla", "", "layer_conductance", "", "layer_integrated_gradients", ""),
        *("rank", "most probable tokens"),
    ]
    assert start[0] == "0_pre"
    for segment, row in enumerate(rows[: result.n_segments]):
        assert row[0] == str(segment)
        written = [float(text.replace("\N{MINUS SIGN}", "-")) for text in (row[1], row[3], row[4])]
        wanted = [
            result.attribution[segment, 0, 0],
            result.values[segment + 1, 0, 0],
            companions[1].amounts[0, segment, 0, 0],
        ]
        assert written == pytest.approx([float(number) for number in wanted], abs=5.1e-5)  # four decimals
    assert [row[0] for row in rows[result.n_segments :]] == ["sum", "outside", "expected", "gap"]
    assert rows[0][-1].startswith(f"{companions[0].top_strings[1][0][0][0]!r} {result.values[1, 0, 0]:.3f}")


def test_arrow_keys_move_the_choice_and_the_focus(opened):
    result, _ = lines()
    page = opened(report_html(result))
    page.focus('.token[data-entry="0"]')
    for key, token in (
        *(("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 23), ("ArrowRight", 23), ("Home", 0)),
        *(("ArrowLeft", 0), ("ArrowUp", 0)),
    ):
        page.keyboard.press(key)
        assert (page.evaluate(SELECTED), page.evaluate(FOCUSED)) == ([token], token), key
    for key in ("ArrowDown", "ArrowUp"):  # lines end after the tokens 7 and 15
        page.click('.token[data-entry="10"]')
        page.keyboard.press(key)
        (token,) = page.evaluate(SELECTED)
        assert token in (range(16, 24) if key == "ArrowDown" else range(8))
    settled(page)
    assert page.evaluate(WATERFALL)[-1] == result.values[-1, 0, token].item()
    page.keyboard.press("Enter")
    assert page.evaluate(SELECTED) == [token]


def test_tab_reaches_every_control_and_shows_where_it_is(opened):
    page = opened(report_html(lines()[0]))
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        assert page.evaluate(OUTLINE) == "2px"
    assert reached == ["theme", "", "token", "modebar-btn", "scroll"]
    page.focus("#rules input")
    page.keyboard.press("ArrowRight")
    assert page.locator("#rules input:checked").get_attribute("value") == "crossing"


def test_a_rule_recolours_the_strip_and_moves_the_mark(opened):
    result, _ = lines()
    page = opened(report_html(result))
    colours = "() => [...document.querySelectorAll('.token')].map(e => getComputedStyle(e).backgroundColor)"
    before = page.evaluate(colours)
    page.check('#rules input[value="peak"]', force=True)
    settled(page)
    assert page.evaluate(colours) != before
    peaks = result.onset("peak").labels[0]
    assert f"onset {peaks[3]} (peak)" in page.get_attribute('.token[data-entry="3"]', "aria-label")
    assert page.inner_text("#layers tr.onset th") == peaks[0]
    named = page.evaluate(
        "() => document.getElementById('waterfall').layout.yaxis.ticktext.find(text => text.includes('▸'))"
    )
    assert named == f"<b>▸ {peaks[0]}</b>"


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read_and_nothing_overflows(opened, scheme, width):
    result, companions = lines()
    for text in (
        report_html(result, companions=companions),
        report_html(rich(), title="one_word_without_a_break_" * 5),
    ):
        page = opened(text, width, scheme)
        assert page.evaluate(WIDTH) == width
        assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
        # WCAG AA asks for 4.5 of small text; 0.1 less for the 8 bits in which the browser mixes the colours
        assert min(page.evaluate(CONTRAST, "p, h1, h2, h3, td, th, li, legend, label, .token")) >= 4.4
        dark = page.evaluate("() => document.getElementById('waterfall').layout.paper_bgcolor")
        assert dark == page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    settled(page)
    assert page.evaluate("() => document.documentElement.dataset.theme") != scheme
    assert page.evaluate("() => document.getElementById('waterfall').layout.paper_bgcolor") != dark


def test_the_scheme_of_the_system_is_followed(opened):
    page = opened(report_html(rich()))
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")


def test_markup_in_tokens_is_shown_and_never_run(opened):
    page = opened(report_html(hostile(), title="<script>alert(1)</script>"))
    assert page.title() == "<script>alert(1)</script>"
    assert page.locator("script").count() == 3
    assert page.locator("img").count() == 0
    page.click('.token[data-entry="5"]')
    settled(page)
    assert (
        page.inner_text('.token[data-entry="5"]')
        == "<script>alert(1)</script>\n\N{RIGHTWARDS ARROW} <script>alert(1)</script>"
    )
    assert page.inner_text("#detail-heading") == "'<script>alert(1)</script>'"
    ticks = page.evaluate("() => [...document.querySelectorAll('.ytick text')].map(e => e.textContent)")
    assert ticks == ["<em>0</em>", "▸ <i>2</i>", "<em>1</em>"]


def test_512_tokens_of_30_layers_stay_responsive(opened):
    result, companions = lines(512, 31)
    page = opened(report_html(result, companions=companions))
    assert page.locator("#waterfall .main-svg").count() <= 3  # Plotly draws one figure in three layers
    page.focus('.token[data-entry="0"]')
    # From a key to the drawn figure, twenty times; half a second on one slow core is ten times what it takes.
    took = page.evaluate("""async () => {
      const before = performance.now();
      for (let i = 0; i < 20; i++) {
        document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
      }
      return (performance.now() - before) / 20;
    }""")
    assert page.evaluate(SELECTED) == [20]
    assert page.evaluate(WATERFALL)[-1] == result.values[-1, 0, 20].item()
    assert took < 500
    page.click('.token[data-entry="511"]')
    assert page.evaluate(SELECTED) == [511]


def test_numbers_that_are_not_finite_draw_without_an_error(opened):
    values = torch.tensor([[[0.0, 0.0]], [[float("nan"), 0.0]], [[float("inf"), 0.0]]])
    page = opened(report_html(make(values)))
    page.click('.token[data-entry="1"]')
    settled(page)
    assert page.evaluate(SELECTED) == [1]
