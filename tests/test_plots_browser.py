"""Every figure as a browser draws it, wide and narrow: no error, no text cut off, none over another; files by kaleido."""

from __future__ import annotations

import os

import pytest
from plotly.offline import get_plotlyjs

from iglens_tl import plots
from tests.made_figures import FIGURES, HOSTILE, LABELS, flat_then_steep, hostile, lens_of, padded

pytestmark = pytest.mark.browser

SLACK = 1.5  # pixels that boxes may overlap: a box is as high as its line, and a glyph lower than that

DRAW = """json => {
  const figure = JSON.parse(json), place = document.getElementById("place");
  Plotly.purge(place);
  return Plotly.newPlot(place, figure.data, figure.layout, {responsive: true}).then(() => null);
}"""

# Every text of the figure with its box; the minus signs in cells scale with their cells and are left out.
TEXTS = """() => [...document.querySelectorAll("svg.main-svg text")]
  .filter(text => text.textContent.trim() && !text.closest(".heatmap-label, .hoverlayer"))
  .map(text => {
    const box = text.getBoundingClientRect();
    return {text: text.textContent, left: box.left, right: box.right, top: box.top, bottom: box.bottom};
  })"""

CELL = """([column, row]) => {
  const {xaxis, yaxis} = document.getElementById("place")._fullLayout;
  return [xaxis._offset + xaxis.c2p(column), yaxis._offset + yaxis.c2p(row)];
}"""


@pytest.fixture(scope="module")
def page():
    """A page with Plotly in it and no network, that remembers what goes wrong."""
    from playwright.sync_api import sync_playwright  # only the development environment has it

    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["IGLENS_TL_BROWSER"], args=options)
        found = browser.new_context(offline=True).new_page()
        found.faults = []
        found.on("pageerror", lambda error: found.faults.append(str(error)))
        found.on("console", lambda said: said.type in ("error", "warning") and found.faults.append(said.text))
        found.set_content("<!doctype html><body style='margin:0'><div id='place'></div>")
        found.add_script_tag(content=get_plotlyjs())
        yield found
        browser.close()


def draw(page, fig, width):
    page.faults.clear()
    page.set_viewport_size({"width": width, "height": int(fig.layout.height)})
    page.evaluate(DRAW, fig.to_json())
    return page.evaluate(TEXTS)


def overlap(a, b):
    across = min(a["right"], b["right"]) - max(a["left"], b["left"])
    along = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
    return min(across, along)


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("name", FIGURES)
def test_texts_are_whole_and_apart(page, name, width):
    fig = FIGURES[name]()
    texts = draw(page, fig, width)
    assert page.faults == []
    assert len(texts) >= 5
    outside = [
        text
        for text in texts
        if min(text["left"], text["top"]) < -SLACK
        or text["right"] > width + SLACK
        or text["bottom"] > fig.layout.height + SLACK
    ]
    assert outside == []
    over = [(a["text"], b["text"]) for place, a in enumerate(texts) for b in texts[:place] if overlap(a, b) > SLACK]
    assert over == []


def test_labels_are_shown_letter_by_letter(page):
    texts = {text["text"] for text in draw(page, plots.heatmap(hostile(answer="x")), 1200)}
    missing = [text for text in HOSTILE if LABELS.get(text, repr(text)) not in texts]
    assert missing == []
    assert page.faults == []


def test_one_points_at_a_cell_and_reads_it(page):
    result = padded()
    draw(page, plots.heatmap(result, top=lens_of(result)), 800)
    page.mouse.move(*page.evaluate(CELL, [1, 3]))
    said = page.wait_for_selector(".hoverlayer .hovertext").text_content()
    credit, level = float(result.attribution[3, 0, 2]), float(result.values[4, 0, 2])
    for words in ("'w02' → ' t02', read at position 2", "segment 3", f"{credit:+.6g}", f"{level:.6g}", "'<b>' 0.250"):
        assert words.replace("-", "\u2212") in said.replace("-", "\u2212")


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")])
def test_files_by_kaleido(tmp_path, monkeypatch, ending, start):
    monkeypatch.setenv("BROWSER_PATH", os.environ["IGLENS_TL_BROWSER"])
    path = tmp_path / f"waterfall.{ending}"
    plots.write_image(plots.waterfall(flat_then_steep()), path, width=500)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]
