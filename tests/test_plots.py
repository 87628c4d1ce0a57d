"""Each figure by the numbers inside it: data equals result, ticks, order, ranges, sums; labels; what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from iglens_tl import plots
from iglens_tl.plots import _style
from tests.made_figures import (
    FIGURES,
    HOSTILE,
    LABELS,
    ablation,
    comparison,
    flat_then_steep,
    heads,
    hostile,
    lens_of,
    long,
    nats,
    padded,
    random_values,
    with_gap,
)
from tests.made_results import NAN, make, one


def shown(fig):
    """The figure as a browser gets it, through its JSON."""
    return json.loads(fig.to_json())


def unescaped(text):
    """What Plotly shows of a label: entities become characters, and nothing may be left that it takes for markup."""
    assert "<" not in text
    assert "$" not in text
    assert "%" not in text
    return ElementTree.fromstring(f"<t>{text}</t>").text or ""


def bars(fig):
    """Labels from the bottom, amounts and measures of a waterfall."""
    (trace,) = fig.data
    return list(fig.layout.yaxis.ticktext), list(trace.x), list(trace.measure)


# --- All figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_title_and_units_and_is_valid_json(name):
    fig = FIGURES[name]()
    assert isinstance(fig, go.Figure)
    assert fig.layout.title.text.startswith("<b>")
    bar = [trace.colorbar.title.text for trace in fig.data if trace.type == "heatmap"]
    axes = [axis.title.text or "" for axis in (*fig.select_xaxes(), *fig.select_yaxes())]
    assert any(unit in text for text in (*bar, *axes) for unit in ("probability", "nats", "logits"))
    assert fig.layout.width is None, "as wide as its page"
    fig.to_json().encode("utf-8")  # a lone surrogate in a token would fail here
    assert go.Figure(shown(fig)).to_plotly_json().keys() == fig.to_plotly_json().keys()


def test_a_figure_says_the_same_under_any_default_template():
    import plotly.io

    before = plotly.io.templates.default
    plain = plots.waterfall(flat_then_steep()).to_json()
    try:
        plotly.io.templates.default = "plotly_dark"
        assert plots.waterfall(flat_then_steep()).to_json() == plain
    finally:
        plotly.io.templates.default = before


def test_importing_plots_imports_no_plotly_and_its_absence_is_explained():
    code = (
        "import sys; from iglens_tl import plots; assert 'plotly' not in sys.modules\n"
        "sys.modules['plotly'] = sys.modules['plotly.graph_objects'] = None\n"
        "from tests.made_results import one\n"
        "try: plots.waterfall(one([0.1, 0.2]))\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "figures need Plotly: pip install iglens_tl[plots]"


def test_colours_darken_with_size_and_alike_on_both_sides():
    def luminance(colour):
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    scale = [luminance(colour) for _, colour in _style.DIVERGING]
    assert scale[:6] == sorted(scale[:6])
    assert scale[5:] == sorted(scale[5:], reverse=True)
    # 0.15: what the ColorBrewer scales differ by at most at equal steps; a whole step is 0.15 to 0.25
    assert max(abs(a - b) for a, b in zip(scale, reversed(scale), strict=True)) < 0.15
    assert [luminance(colour) for _, colour in _style.SEQUENTIAL] == scale[5:]
    assert luminance(_style.LOSS) - luminance(_style.GAIN) > 0.3, "bars of gains and losses differ in a grey print"


def test_numbers_beside_bars():
    assert [_style.plain(x) for x in (-0.0003, -1.2345678, -115.8632, 4.8e-51, 0.99999, 9.9999, -0.0, 1e9)] == [
        *("\u22120.0003", "\u22121.235", "\u2212115.9", "5e\u221251", "1.0000", "10.000", "0", "1e+09")
    ]
    assert [_style.signed(x) for x in (0.5, -0.5, 0.0)] == ["+0.5000", "\u22120.5000", "0"]


# --- Waterfall ---------------------------------------------------------------------------------------------------


def test_bars_go_from_the_first_state_through_the_credits_to_p():
    result = one([0.1, 0.25, 0.2, 0.9])
    labels, amounts, measures = bars(plots.waterfall(result))
    assert labels == ["0_pre", "0", "1", "<b>▸ 2</b>", "final_post"]
    assert measures == ["absolute", "relative", "relative", "relative", "total"]
    assert amounts[:-1] == [0.1, *result.attribution[:, 0, 0].tolist()]
    assert sum(amounts[:-1]) == pytest.approx(0.9, abs=1e-12)  # a sum of four float64
    assert amounts[-1] == 0.9
    fig = plots.waterfall(result)
    assert list(fig.data[0].text) == ["0.1000", "+0.1500", "\u22120.0500", "+0.7000", "0.9000"]
    assert fig.layout.yaxis.range[0] < 0 < len(labels) - 1 < fig.layout.yaxis.range[1], "layers upward"


def test_what_holds_nothing_is_merged_by_name_and_added():
    result = flat_then_steep()
    labels, amounts, _ = bars(plots.waterfall(result))
    assert labels == ["0_pre", "0-25", "26", "27", "28", "<b>▸ 29</b>", "final_post"]
    credits = result.attribution[:, 0, 0]
    assert amounts[1] == pytest.approx(float(credits[:26].sum()), abs=1e-15)
    assert sum(amounts[:-1]) == pytest.approx(0.75, abs=1e-12)


@pytest.mark.parametrize("most", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("seed", range(3))
def test_however_many_are_merged_the_bars_sum_to_p(most, seed):
    result = one(random_values(41, 1, 1, seed)[:, 0, 0].tolist())
    labels, amounts, _ = bars(plots.waterfall(result, max_segments=most))
    assert len(labels) <= most + 2
    assert sum(amounts[:-1]) == pytest.approx(float(result.values[-1]), abs=1e-12)
    starts, stops = [], []
    for label in labels[1:-1]:
        first, _, last = label.removeprefix("<b>▸ ").removesuffix("</b>").partition("-")
        starts.append(int(first))
        stops.append(int(last or first))
    assert starts == [0, *(stop + 1 for stop in stops[:-1])]
    assert stops[-1] == 39
    credits = result.attribution[:, 0, 0]
    sums = [float(credits[a : b + 1].sum()) for a, b in zip(starts, stops, strict=True)]
    assert amounts[1:-1] == pytest.approx(sums, abs=1e-12)


def test_an_estimators_error_has_a_bar_of_its_own():
    labels, amounts, measures = bars(plots.waterfall(with_gap()))
    assert (labels[-2], measures[-2]) == ("gap", "relative")
    assert amounts[-2] == pytest.approx(0.02, abs=1e-12)
    assert sum(amounts[:-1]) == pytest.approx(0.8, abs=1e-12)
    assert "gap" not in bars(plots.waterfall(one([0.1, 0.3, 0.8])))[0]


@pytest.mark.parametrize(
    ("rule", "row", "words"),
    [
        ("mass", 3, "onset at 2 (mass 0.5)"),
        ("peak", 1, "onset at 0 (peak)"),
        ("crossing", 4, "onset at final_post (crossing 0.5)"),
        ("rank", 2, "onset at 2_pre (rank)"),
        (None, None, None),
    ],
)
def test_the_onset_is_marked_by_every_rule(rule, row, words):
    top = torch.tensor([False, False, True, True, True])[:, None, None]
    result = one([0.0, 0.4, 0.5, 0.1, 0.45], is_top=top)
    fig = plots.waterfall(result, onset_rule=rule)
    marked = [place for place, label in enumerate(fig.layout.yaxis.ticktext) if "▸" in label]
    bands = [(shape.y0, shape.y1) for shape in fig.layout.shapes]
    assert marked == ([] if row is None else [row])
    assert bands == ([] if row is None else [(row - 0.5, row + 0.5)])
    assert ("onset" in fig.layout.title.text) == (rule is not None)
    assert (words or "") in fig.layout.title.text


def test_an_onset_in_a_merged_row_is_named_and_one_at_the_first_state_marks_it():
    steady = one([0.1 * index for index in range(10)])
    fig = plots.waterfall(steady, max_segments=2)
    assert "onset at 4 (mass 0.5)" in fig.layout.title.text
    assert [label for label in fig.layout.yaxis.ticktext if "▸" in label] == ["<b>▸ 4-8</b>"]
    falling = one([0.9, 0.9, 0.8])
    assert plots.waterfall(falling, onset_rule="crossing").layout.yaxis.ticktext[0] == "<b>▸ 0_pre</b>"
    assert "no onset (mass 0.5)" in plots.waterfall(one([0.5, 0.5, 0.5])).layout.title.text


@pytest.mark.parametrize("result", [nats(), flat_then_steep(), one([0.0, 0.9, 0.1]), one([0.0, 0.0])])
def test_the_axis_holds_every_bar_and_zero(result):
    fig = plots.waterfall(result)
    low, high = fig.layout.xaxis.range
    ends = np.cumsum(fig.data[0].x[:-1])
    assert low <= min(0, ends.min())
    assert high > max(0, ends.max())
    unit = {"prob": "probability", "log_prob": "log-probability [nats]"}[result.metric]
    assert fig.layout.xaxis.title.text == unit


def test_any_token_of_a_result_and_refusals():
    result = padded()
    fig = plots.waterfall(result, 1, 0)
    assert fig.data[0].x[0] == float(result.values[0, 1, 0])
    assert fig.data[0].x[0] == plots.waterfall(result, -1, -3).data[0].x[0]
    with pytest.raises(ValueError, match=r"\(0, 0\) is masked.*\[0, 1\]"):
        plots.waterfall(result)
    with pytest.raises(IndexError, match="batch must be 0 to 1"):
        plots.waterfall(result, 2)
    with pytest.raises(IndexError, match="pos must be 0 to 2"):
        plots.waterfall(result, 0, 3)
    with pytest.raises(ValueError, match="max_segments must be at least 1, got 0"):
        plots.waterfall(result, 0, 1, max_segments=0)
    with pytest.raises(ValueError, match="rule must be one of"):
        plots.waterfall(result, 0, 1, onset_rule="first")


# --- Heat map ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["credit", "level"])
def test_cells_are_the_result_with_layers_upward(value):
    result = padded()
    for batch in (0, 1):
        fig = plots.heatmap(result, value=value, batch=batch)
        (trace,) = fig.data
        columns = result.mask[batch].nonzero()[:, 0]
        numbers = result.attribution if value == "credit" else result.values
        assert np.array_equal(trace.z, numbers[:, batch, columns].numpy())
        assert np.isfinite(trace.z).all(), "masked positions have no column"
        assert list(trace.x) == [str(position) for position in result.positions[batch, columns].tolist()]
        assert list(trace.y) == list(result.segment_labels if value == "credit" else result.state_labels)
        assert fig.layout.yaxis.autorange is None
        assert fig.layout.yaxis.range is None
        assert (fig.layout.xaxis.type, fig.layout.yaxis.type) == ("category", "category")
        assert trace.colorbar.title.text.endswith(f"{value} [probability]")


def test_credits_have_a_scale_that_is_symmetric_about_zero():
    result = make([[[0.1, 0.2]], [[0.3, 0.9]], [[0.05, 0.8]]])
    (trace,) = plots.heatmap(result).data
    assert (trace.zmin, trace.zmax) == (-trace.zmax, float(result.attribution.abs().max()))
    assert trace.colorscale[5] == (0.5, "#f7f7f7")
    assert [list(row) for row in trace.text] == [["", ""], ["\u2212", "\u2212"]], "losses say so"
    (flat,) = plots.heatmap(one([0.5, 0.5])).data
    assert (flat.zmin, flat.zmax) == (-1, 1)


def test_levels_have_a_sequential_scale_unless_their_sign_means_something():
    (trace,) = plots.heatmap(padded(), value="level").data
    assert (trace.zmin, trace.zmax) == (0, float(padded().values[:, 0, 1:].max()))
    assert trace.colorscale[0] == (0.0, "#f7f7f7")
    assert trace.text is None
    (trace,) = plots.heatmap(nats(), value="level").data
    assert (trace.zmin, trace.zmax) == (-115.86, -0.2889)
    ids = torch.full((1, 1, 1), 3)
    signed = one([-0.2, 0.1, 0.6], incorrect_ids=ids, incorrect_strings=((" x",),))
    (trace,) = plots.heatmap(signed, value="level").data
    assert (trace.zmin, trace.zmax) == (-0.6, 0.6)


def test_positions_are_the_axis_and_tokens_the_tick_texts():
    fig = plots.heatmap(hostile(answer="x"))
    aliases = fig.layout.xaxis.labelalias
    assert list(aliases) == [str(position) for position in range(len(HOSTILE))] == list(fig.data[0].x)
    assert list(fig.layout.xaxis.categoryarray) == list(fig.data[0].x)
    texts = [unescaped(text) for text in aliases.values()]
    assert texts == [LABELS.get(text, repr(text)) for text in HOSTILE]
    assert texts.count("' the'") == 2


def test_a_position_that_is_asked_for_twice_has_two_columns():
    fig = plots.heatmap(padded().select(pos=[1, 2, 1]))
    assert list(fig.data[0].x) == list(fig.layout.xaxis.labelalias) == ["1", "2", "1 (2)"]


def test_ticks_name_the_token_the_target_or_both():
    def ticks(**changes):
        fig = plots.heatmap(make(random_values(3, 1, 2), **changes))
        return [unescaped(text) for text in fig.layout.xaxis.labelalias.values()], fig.layout.xaxis.title.text

    assert ticks() == (["'w00' → ' t00'", "'w01' → ' t01'"], "token → target")
    same = torch.tensor([[[5], [5]]])
    assert ticks(targets=[[" a", " a"]], target_ids=same) == (["'w00'", "'w01'"], "token")
    assert ticks(targets=[["a" * 40, "a" * 50]])[1] == "token → target", "texts may look alike"
    assert ticks(answer="t") == (["' t00'", "' t01'"], "target")
    assert ticks(token_strings=None, tokens=None, token_mask=None) == (["' t00'", "' t01'"], "target")
    ids = torch.full((1, 2, 1), 3)
    assert ticks(answer="t", incorrect_ids=ids, incorrect_strings=((" x", " y"),))[0][1] == "' t01' \u2212 ' y'"


def test_one_points_at_numbers_of_the_result():
    result = padded()
    (trace,) = plots.heatmap(result, top=lens_of(result)).data
    assert np.array_equal(trace.customdata[..., 0], result.values[1:, 0, 1:].numpy()), "the level after the segment"
    assert trace.customdata[0, :, 1].tolist() == [1, 2], "positions"
    assert trace.hovertext[0][0] == "most probable after it:<br>'&lt;b&gt;' 0.250<br>'&#36;&#36;' 0.250"
    assert "%{hovertext}" in trace.hovertemplate
    (without,) = plots.heatmap(result).data
    assert "hovertext" not in without.hovertemplate


def test_one_points_at_a_level_and_the_credit_that_led_to_it():
    result = make([[[0.1, 0.2]], [[0.3, 0.9]], [[0.05, 0.8]]])
    (trace,) = plots.heatmap(result, value="level").data
    assert np.array_equal(trace.z, result.values[:, 0].numpy())
    assert [list(row) for row in trace.hovertext] == [
        ["no segment ends here"] * 2,
        ["credit of the segment before it +0.2000 probability", "credit of the segment before it +0.7000 probability"],
        [
            "credit of the segment before it \u22120.2500 probability",
            "credit of the segment before it \u22120.1000 probability",
        ],
    ]
    assert trace.hovertemplate.count("%{hovertext}") == 1
    padded_one = padded()
    (trace,) = plots.heatmap(padded_one, value="level", top=lens_of(padded_one)).data
    assert trace.hovertext[1][0].startswith("credit of the segment before it ")
    assert (
        trace.hovertext[0][0]
        == "no segment ends here<br>most probable there:<br>'&lt;b&gt;' 0.250<br>'&#36;&#36;' 0.250"
    )


def test_512_tokens_by_30_segments_are_a_small_figure():
    fig = plots.heatmap(long())
    # Three arrays of 8 bytes a cell in base64 are 0.49 MB, the minus signs' texts 0.1, labels the rest.
    assert len(fig.to_json()) < 1_000_000
    trace = shown(fig)["data"][0]
    assert (trace["z"]["dtype"], trace["z"]["shape"]) == ("f8", "30, 512")
    assert trace["customdata"]["shape"] == "30, 512, 2"


def test_refusals_of_the_heat_map():
    with pytest.raises(ValueError, match="value must be one of 'credit', 'level', got 'values'"):
        plots.heatmap(padded(), value="values")
    with pytest.raises(IndexError, match="batch must be 0 to 1"):
        plots.heatmap(padded(), batch=2)
    with pytest.raises(ValueError, match="prompt 0 has no token to show"):
        plots.heatmap(make([[[0.0]], [[1.0]]], mask=[[False]]))
    with pytest.raises(ValueError, match="top must be the logit lens of the same states"):
        plots.heatmap(padded(), top=lens_of(hostile()))
    lens = lens_of(padded())
    for other in ({"prob": lens.prob + 0.1}, {"settings": {"lens": "f"}}, {"settings": {"baseline": "zero"}}):
        with pytest.raises(ValueError, match="top must be the logit lens of the same states"):
            plots.heatmap(padded(), top=dataclasses.replace(lens, **other))
    with pytest.raises(ValueError, match="top must be"):
        plots.heatmap(padded(), top=lens_of(hostile()))
    lens = lens_of(padded())
    with pytest.raises(ValueError, match="top must be the logit lens of the same states, prompts"):
        plots.heatmap(padded(), top=dataclasses.replace(lens, target_ids=torch.where(lens.target_ids >= 0, 3, -1)))


# --- Lines and bars over layers ----------------------------------------------------------------------------------


def test_few_lines_have_names_and_looks_of_their_own():
    result = padded()
    fig = plots.trajectories(result)
    tokens = result.mask.nonzero().tolist()
    assert [list(trace.y) for trace in fig.data] == [result.values[:, b, p].tolist() for b, p in tokens]
    assert all(list(trace.x) == list(result.state_labels) for trace in fig.data)
    assert [trace.name.split(":")[0] for trace in fig.data] == ["0/1", "0/2", "1/0", "1/1"]
    looks = {(trace.line.color, trace.line.dash, trace.marker.symbol) for trace in fig.data}
    assert len({colour for colour, _, _ in looks}) == len({symbol for _, _, symbol in looks}) == 4
    assert len(plots.trajectories(result, batch=1).data) == 2
    (template,) = plots.trajectories(one([0.1, 0.9], targets=[["%{y}"]])).data
    assert template.hovertemplate.count("%{y") == 1, "a token is no template"


def test_many_lines_are_one_trace_and_their_median_another():
    result = hostile()
    thin, median = plots.trajectories(result).data
    n, states = len(HOSTILE), len(result.state_labels)
    lines = np.asarray(thin.y).reshape(n, states + 1)
    assert np.array_equal(lines[:, :-1].T, result.values[:, 0].numpy())
    assert np.isnan(lines[:, -1]).all()
    assert np.allclose(median.y, np.median(result.values[:, 0].numpy(), axis=1), atol=1e-15)  # a mean of two
    assert thin.text[(states + 1) * 2 - 1] == "1: '&lt;/s&gt;' → '&lt;/s&gt;'"


def test_gain_and_loss_are_means_over_tokens():
    result = padded()
    gain, loss, net = plots.gain_loss(result).data
    credits = result.attribution[:, result.mask].numpy()
    assert np.allclose(gain.y, np.where(credits > 0, credits, 0).mean(1), atol=1e-15)
    assert np.allclose(loss.y, np.where(credits < 0, credits, 0).mean(1), atol=1e-15)
    assert np.allclose(net.y, credits.mean(1), atol=1e-15)
    assert gain.y.min() >= 0 >= loss.y.max()
    assert loss.marker.pattern.shape == "/", "hatched, for a grey print"
    assert list(gain.x) == list(result.segment_labels)
    one_prompt = plots.gain_loss(result, batch=1).data[0]
    assert np.allclose(one_prompt.y, result.attribution[:, 1, :2].clamp(min=0).mean(1), atol=1e-15)
    with pytest.raises(ValueError, match="this result has no token"):
        plots.gain_loss(make([[[0.0]], [[1.0]]], mask=[[False]]))


# --- Methods side by side ----------------------------------------------------------------------------------------


def test_a_panel_a_method_each_with_its_unit():
    compared = comparison()
    fig = plots.comparison(compared, 0, 1, ablation=ablation(compared))
    wanted = [*compared.amounts[:, :, 0, 1].tolist(), ablation(compared).drop[:, 0, 1].tolist()]
    assert [list(trace.y) for trace in fig.data] == wanted
    assert [trace.yaxis for trace in fig.data] == ["y", "y2", "y3", "y4", "y5"]
    units = [axis.title.text for axis in fig.select_yaxes()]
    assert units == ["probability", "probability", "logits", "probability", "probability"]
    assert all(list(trace.x) == list(compared.segment_labels) for trace in fig.data)
    assert all(list(axis.categoryarray) == list(compared.segment_labels) for axis in fig.select_xaxes())
    names = [note.text for note in fig.layout.annotations]
    assert names[0] == "<b>IG-Lens: credit</b>"
    assert names[-1] == "<b>ablation: drop (mean, total)</b>"


def test_layers_that_were_not_ablated_stay_empty_and_the_order_is_the_paths():
    compared = comparison()
    backwards = ablation(compared, ("3", "1"))
    last = plots.comparison(compared, 0, 1, ablation=backwards).data[-1]
    assert list(last.x) == ["1", "3"]
    assert list(last.y) == backwards.drop[:, 0, 1].tolist()[::-1]


def test_an_ablation_of_something_else_is_refused():
    compared = comparison()
    with pytest.raises(ValueError, match=r"layers that are segments of the comparison .* it has L0H1"):
        plots.comparison(compared, 0, 1, ablation=ablation(compared, ("L0H1",)))
    with pytest.raises(ValueError, match=r"must be of the tokens that are compared.*it is \[1, 1\]"):
        plots.comparison(compared, 0, 1, ablation=ablation(comparison(flat_then_steep())))
    for name in ("target_ids", "positions"):
        other = ablation(compared)
        setattr(other, name, getattr(other, name) + 1)
        with pytest.raises(ValueError, match="of the prompts, positions and targets that are compared"):
            plots.comparison(compared, 0, 1, ablation=other)


@pytest.mark.parametrize(
    "draw",
    [
        plots.waterfall,
        plots.heatmap,
        plots.trajectories,
        plots.gain_loss,
        plots.heads,
        plots.top_parts,
        plots.mean_credits,
    ],
)
def test_a_figure_says_what_it_draws(draw):
    with pytest.raises(TypeError, match=rf"plots.{draw.__name__} draws an .*; got LensComparison"):
        draw(comparison())
    with pytest.raises(TypeError, match=r"plots.comparison draws an LensComparison; got IGLensResult"):
        plots.comparison(padded())


def test_an_index_is_a_whole_number():
    for call in (
        lambda: plots.waterfall(padded(), 0.5),
        lambda: plots.waterfall(padded(), None),
        lambda: plots.heatmap(padded(), batch="0"),
    ):
        with pytest.raises(TypeError, match="batch must be a whole number"):
            call()


# --- Splits ------------------------------------------------------------------------------------------------------


def test_heads_are_the_matrix_of_the_split():
    split = heads()
    fig = plots.heads(split)
    (trace,) = fig.data
    assert np.array_equal(trace.z, split.matrix("head")[..., 0, 0].numpy())
    assert (trace.zmin, trace.zmax) == (-trace.zmax, float(split.matrix("head").abs().max()))
    own = sum(float(split.attribution[place]) for place in split.of_kind("head"))
    rest = float(split.whole.total) - own
    assert f"heads {_style.signed(own)}, all else {_style.signed(rest)}" in fig.layout.title.text
    assert trace.colorbar.title.text.endswith("credit [probability]")


@pytest.mark.parametrize("n", [1, 4, 15, 100])
def test_bars_of_parts_are_ordered_and_sum_to_the_whole(n):
    split = heads()
    fig = plots.top_parts(split, n=n)
    amounts, labels = list(fig.data[0].x), list(fig.layout.yaxis.ticktext)
    assert sum(amounts) == pytest.approx(float(split.attribution.sum()), abs=1e-12)
    own = amounts[1:] if n < 15 else amounts
    assert [abs(x) for x in own] == sorted(abs(x) for x in own), "the largest at the top"
    assert labels[0] == (f"{15 - n} others" if n < 15 else labels[0])
    assert labels[-1] == split.top(1)["part"].tolist()[0]
    low, high = fig.layout.xaxis.range
    assert low <= min(0, *amounts) < max(0, *amounts) < high


def test_refusals_of_splits():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        plots.top_parts(heads(), n=0)
    with pytest.raises(IndexError, match="pos must be 0 to 0"):
        plots.heads(heads(), 0, 1)


# --- Files -------------------------------------------------------------------------------------------------------


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf, got 'x\.gif'"):
        plots.write_image(plots.waterfall(flat_then_steep()), tmp_path / "x.gif")


def test_without_kaleido_an_error_says_so_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    monkeypatch.setitem(sys.modules, "kaleido.errors", None)
    with pytest.raises(ImportError, match=r"needs kaleido 1 or newer.*Chrome or Chromium.*write_html"):
        plots.write_image(plots.waterfall(flat_then_steep()), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_only_a_value_that_is_there_makes_the_scale():
    assert _style.extent(torch.tensor([NAN, -3.0, float("inf")])) == 3
