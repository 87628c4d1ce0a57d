"""A printed result: what it says, that it is aligned, that it fits, and that nothing falls out of the sums."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iglens_tl._display import cells, credit, head, joined, level, pad, pieces, quoted, tail
from iglens_tl._layout import grouped, grouped_by_mass, merged_label
from iglens_tl._text import bars
from tests.made_results import NAN, make, one, rich

PROFILE = """\
IGLensResult: 1 token, 4 segments from 0_pre to final_post
prompt     'The capital'
target     ' Paris' (id 7042), read at position 1 ' capital'
value      0 at 0_pre -> 0.7725 at final_post; the model's own logits: 0.7725
metric     prob [probability], baseline embed, estimator prediction_aware

segment   credit   level
0              ·       ·   │
1        +0.0703  0.0703   │████
2        -0.0200  0.0503  ▒│
3        +0.7222  0.7725   │██████████████████████████████████████

sum        +0.7725, total +0.7725, gap 0
onset      mass 3, crossing final_post, peak 3, rank final_post (fraction 0.5)

credit = extra probability that norm+unembedding read from the state after this
segment, given the state before it; not the layer's causal effect through the
blocks above. · = less than 0.00005.
"""


def paris():
    values = [[[NAN, value]] for value in (0.0, 1e-12, 0.0703, 0.0503, 0.7725)]
    tops = [[[False, top]] for top in (True, False, False, False, True)]
    result = make(values, mask=[[False, True]], is_top=tops, targets=[["", " Paris"]])
    ids = result.target_ids.clone()
    ids[0, 1] = 7042
    return make(
        values,
        mask=[[False, True]],
        is_top=tops,
        targets=[["", " Paris"]],
        target_ids=ids,
        token_strings=(("The", " capital"),),
        token_mask=torch.tensor([[True, True]]),
        gap=result.gap * 0,
        model_value=result.values[-1],
    )


def test_a_profile_in_full():
    assert paris().to_text(width=80) + "\n" == PROFILE


def test_printing_and_repr_take_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert str(paris()) == repr(paris()) == paris().to_text(80)
    monkeypatch.setenv("COLUMNS", "40")
    assert str(paris()) == paris().to_text(40)


def many(n=7, segments=30, tokens=None, **changes):
    values = [[[((7 * k + 3 * p) % 11) / 11 for p in range(n)]] for k in range(segments + 1)]
    tokens = tokens or [f" w{p}" for p in range(n)]
    return make(values, token_strings=(tuple(tokens),), targets=[tokens], **changes)


def table(text):
    """The title line and the rows of a map, from its text."""
    lines = text.split("\n")
    start = next(index for index, line in enumerate(lines) if re.match(r" *(batch +)?pos ", line))
    return lines[start], lines[start + 1 : lines.index("", start)]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200, 400])
def test_grouped_segments_cover_the_path_and_keep_the_sum(width):
    result = many()
    title, rows = table(result.to_text(width))
    labels = title.split("target")[1].split()[:-3]
    ends = [(label.split("-")[0], label.split("-")[-1]) for label in labels]
    assert (ends[0][0], ends[-1][1]) == ("0", "29")
    assert all(int(after) == int(before) + 1 for (_, before), (after, _) in itertools.pairwise(ends))
    assert len(rows) == 7
    for index, row in enumerate(rows):
        numbers = [0.0 if cell == "·" else float(cell) for cell in row.split("' ")[-1].split()]
        *credits, added, total, _onset = numbers
        assert added == total == pytest.approx(float(result.total[0, index]), abs=5e-5)
        assert sum(credits) == pytest.approx(total, abs=5e-5 * (len(credits) + 1))


def test_a_wide_terminal_shows_every_segment_and_a_narrow_one_fills_its_width():
    assert [str(i) for i in range(30)] == table(many().to_text(400))[0].split("target")[1].split()[:-3]
    line = cells(table(many().to_text(120))[0])
    assert 120 - 2 * 9 < line <= 120


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("width", [80, 130, 250])
def test_a_map_is_aligned_and_fits_wide_characters_too(width, levels):
    tokens = ["東京", " e\u0301", "\ud800", "a\nb\tc\x1b[1m", "🙂🙂", "<s>", "'\"", "", "a very long token " * 5]
    title, rows = table(many(9, tokens=tokens).to_text(width, levels=levels))
    assert len(rows) == 9
    assert {cells(row) for row in rows} == {cells(title)}
    assert cells(title) <= width
    assert ("level" in title) == levels


def test_repeated_tokens_keep_their_rows_and_positions():
    _, rows = table(many(3, tokens=["a", "the", "a"]).to_text(100))
    assert [row.split()[:2] for row in rows] == [["0", "'a'"], ["1", "'the'"], ["2", "'a'"]]


def test_levels_stand_beside_the_credits():
    result = many(2, segments=2)
    _, rows = table(result.to_text(100, levels=True))
    first = rows[0].split("' ")[-1].split()
    expected = []
    for k in range(2):
        expected += [credit(float(result.attribution[k, 0, 0])), level(float(result.values[k + 1, 0, 0]))]
    assert first[:4] == expected


def test_rows_beyond_the_limit_are_counted():
    text = many(9).to_text(100, max_rows=4)
    _, rows = table(text)
    assert rows[-1] == "... 5 more tokens"
    assert len(rows) == 5
    assert "more tokens" not in many(9).to_text(100, max_rows=9)
    assert "more tokens" not in many(60).to_text(100, max_rows=None)


def test_a_profile_beyond_the_limit_is_grouped_not_cut():
    text = many(1).to_text(100, max_rows=3)
    shown = re.findall(r"^(\d+-\d+) +([-+·]\S*)", text, re.MULTILINE)
    assert [label for label, _ in shown] == ["0-9", "10-19", "20-29"]
    total = float(many(1).total)
    assert sum(0.0 if number == "·" else float(number) for _, number in shown) == pytest.approx(total, abs=2e-4)


def test_masked_tokens_are_not_shown():
    _, rows = table(rich().to_text(200))
    assert [row.split()[:2] for row in rows] == [["0", "0"], ["0", "1"], ["0", "2"], ["1", "1"], ["1", "2"]]
    assert "no token to show" in make([[[0.0]], [[1.0]]], mask=[[False]]).to_text(80)


def test_the_prompt_is_cut_at_its_start_and_leaves_padding_out():
    result = make(
        [[[NAN, NAN, 0.1, NAN]], [[NAN, NAN, 0.9, NAN]]],
        mask=[[False, False, True, False]],
        token_mask=torch.tensor([[False, True, True, True]]),
        token_strings=(("<pad>", "x" * 50, " end", " later"),),
    )
    assert "prompt     '" + "x" * 50 + " end'\n" in result.to_text(80)
    line = result.to_text(60).split("\n")[1]
    assert line == "prompt     …" + "x" * 43 + " end'"
    assert cells(line) == 60


def test_what_is_compared_and_what_was_answered_is_named():
    text = rich().select(0, 0).to_text(100)
    assert "target     ' cat| dog' (ids 5, 7), read at position 0 '<s>'" in text
    assert "incorrect  ' x' (id 3)" in text
    assert "answer     'the'" in text
    assert "extra difference in probability, target less" in text
    assert "crossing undefined" in text


def test_the_unit_of_a_credit_is_said():
    assert "credit = extra log-probability (nats) that" in one([-3.0, -1.0], metric="log_prob").to_text(200)
    assert "log_odds [nats]" in one([-3.0, -1.0], metric="log_odds").to_text(200)
    assert "credit = extra logit that" in one([-3.0, -1.0], metric="logit").to_text(200)


def test_a_result_without_tokens_still_prints():
    bare = {"tokens": None, "token_mask": None, "token_strings": None}
    assert "prompt" not in one([0.1, 0.9], **bare).to_text(80)
    assert table(make([[[0.1, 0.2]], [[0.3, 0.4]]], **bare).to_text(80))[0].split()[:2] == ["pos", "target"]


def test_an_incomplete_sum_shows_its_gap():
    result = one([0.0, 0.5])
    text = one([0.0, 0.5], attribution=result.attribution + 0.01, gap=result.gap + 0.01).to_text(80)
    assert "sum        +0.51, total +0.5, gap 0.01" in text


def test_sizes_below_one_are_refused():
    for wrong in ({"width": 0}, {"max_rows": 0}, {"width": -5}):
        with pytest.raises(ValueError, match=r"(width|max_rows) must be at least 1, got"):
            one([0.0, 1.0]).to_text(**wrong)


def test_numbers_that_are_not_finite_do_not_break_the_table():
    text = one([0.0, NAN, float("inf")], metric="log_odds").to_text(80)
    assert "nan" in text


# Pieces


def test_numbers():
    assert [credit(x) for x in (0.7022, 0.0003, -0.0003, 1e-12, -1e-12, 0.0, NAN, float("inf"))] == [
        *("+0.7022", "+0.0003", "-0.0003", "·", "·", "·", "nan", "+inf")
    ]
    assert [level(x) for x in (0.77253, 0.0003, 1e-12, -277.2)] == ["0.7725", "0.0003", "·", "-277.2000"]


def test_widths():
    assert [cells(text) for text in ("abc", "東京", "\uff21", "e\u0301", "🙂", "│█·…")] == [3, 4, 2, 1, 2, 4]
    assert pad("東", 4) == "東  "
    assert pad("東", 4, right=True) == "  東"
    assert (head("東京都", 4), head("東京都", 6), tail("東京都", 4)) == ("東…", "東京都", "…都")


@given(st.text(max_size=30), st.integers(1, 12))
def test_cut_text_fits(text, width):
    for cut in (head, tail):
        assert cells(cut(text, width)) <= width
        assert cut(text, width) == text or "…" in cut(text, width)


@given(st.text(max_size=10))
def test_quoted_text_is_one_printable_line(text):
    assert quoted(text).isprintable()


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 90))
def test_groups_part_the_segments(n, count):
    groups = grouped([str(i) for i in range(n)], count)
    covered = [index for group in groups for index in range(group.start, group.stop)]
    assert covered == list(range(n))
    assert len(groups) == min(n, count)
    assert max(g.stop - g.start for g in groups) - min(g.stop - g.start for g in groups) <= 1
    for group in groups:
        first, last = str(group.start), str(group.stop - 1)
        assert group.label == (first if first == last else f"{first}-{last}")


@pytest.mark.parametrize(
    ("first", "last", "label"),
    [
        ("0", "0", "0"),
        ("0-2", "3-5", "0-5"),
        ("3_attn", "3_mlp", "3"),
        ("3_attn", "3_attn", "3_attn"),
        ("3_mlp", "4_attn", "3_mlp-4_attn"),
        ("3_attn", "5_mlp", "3-5"),
        ("base", "4", "base-4"),
    ],
)
def test_merged_labels(first, last, label):
    assert merged_label(first, last) == label


def test_bars_share_one_scale_and_one_axis():
    assert bars([0.5, -0.5, 0.25, 0.0], 9) == ["    │████", "▒▒▒▒│", "    │██", "    │"]
    assert bars([1.0, 0.5], 5) == ["│████", "│██"]
    assert bars([0.0], 9) == [""]
    assert bars([NAN, 1.0], 9) == ["", ""]
    assert bars([1.0], 3) == [""]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.integers(4, 60))
def test_bars_fit_their_room(numbers, room):
    drawn = bars(numbers, room)
    assert max(len(bar) for bar in drawn) <= room
    assert len({bar.index("│") for bar in drawn if bar}) <= 1


# --- where a map is finest, and what it says of an answer ----------------------------------------------------------


def bounds(result, count):
    return [group.start for group in grouped_by_mass(result, [(0, 0)], count)][1:]


def test_groups_are_finest_where_the_credit_lies():
    result = one([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.08, 0.2, 0.9])
    assert [bounds(result, count) for count in (1, 2, 3, 4)] == [[], [7], [6, 7], [5, 6, 7]]
    assert [group.label for group in grouped_by_mass(result, [(0, 0)], 3)] == ["0-5", "6", "7"]
    assert bounds(result, 99) == list(range(1, 8))


def test_a_loss_counts_as_much_as_a_gain_and_a_token_as_much_as_another():
    assert bounds(one([0.0, 0.0, 0.5, 0.1, 0.1, 0.1]), 3) == [1, 2]
    # The first token's credit is tiny and lies in segment 0, the second's large in segment 3.
    result = make([[[0.0, 0.0]], [[1e-6, 0.0]], [[1e-6, 0.0]], [[1e-6, 0.0]], [[1e-6, 0.9]]])
    both, second = grouped_by_mass(result, [(0, 0), (0, 1)], 2), grouped_by_mass(result, [(0, 1)], 2)
    assert [group.label for group in both] == ["0-1", "2-3"]
    assert [group.label for group in second] == ["0-2", "3"]


@given(st.integers(1, 12), st.integers(1, 14), st.randoms(use_true_random=False))
def test_groups_by_mass_cover_the_path_and_nest(n, count, random):
    result = one([random.choice([0.0, 0.3, random.random()]) for _ in range(n + 1)])
    groups, finer = (grouped_by_mass(result, [(0, 0)], number) for number in (count, count + 1))
    assert len(groups) == min(n, count)
    assert [group.start for group in groups] == [0, *(group.stop for group in groups[:-1])]
    assert groups[-1].stop == n
    assert {group.start for group in groups} <= {group.start for group in finer}


def test_an_answer_is_printed_whole_and_its_prompt_ends_before_it():
    answer = "東京 " * 30 + "end"
    text = many(3, answer=answer).to_text(60)
    heading = text[text.index("answer") :].split("\nmetric")[0].splitlines()
    assert "".join(line[11:] for line in heading) == quoted(answer).rstrip()
    assert all(cells(line) <= 60 for line in heading)
    assert "prompt     ' w0'\n" in text
    assert "token" not in table(text)[0].split()
    assert "token" in table(many(3).to_text(60))[0].split()


def test_the_onset_column_follows_its_rule():
    result = one([0.0, 0.4, 0.5, 0.3, 1.0])
    pair = make([[[0.0, 0.0]], [[0.4, 0.1]], [[0.5, 0.6]], [[0.3, 0.5]], [[1.0, 0.9]]])
    for rule, fraction in (("mass", 0.9), ("crossing", 0.3), ("peak", 0.5), ("rank", 0.5)):
        text = pair.to_text(100, onset_rule=rule, onset_fraction=fraction)
        _, rows = table(text)
        labels = [label or "none" for label in pair.onset(rule, fraction).labels[0]]
        assert [row.split()[-1] for row in rows] == labels
        assert f'(rule "{rule}")' in " ".join(text.split())
    assert "(fraction 0.9)" in result.to_text(100, onset_fraction=0.9)
    assert "mass 3" in result.to_text(100, onset_fraction=0.9)
    with pytest.raises(ValueError, match="rule must be one of"):
        result.to_text(100, onset_rule="half")
    with pytest.raises(ValueError, match="fraction must lie in"):
        pair.to_text(100, onset_fraction=0)


def test_pieces_are_the_whole_text():
    assert pieces("東京ab", 2) == ["東", "京", "ab"]
    assert pieces("東京", 1) == ["東", "京"]
    assert pieces("a rose is a rose", 7) == ["a rose ", "is a ", "rose"]
    assert pieces("", 5) == [""]


def test_a_prompt_shows_characters_whose_bytes_its_tokens_split():
    result = make(
        [[[NAN, NAN, NAN, 0.1]], [[NAN, NAN, NAN, 0.9]]],
        mask=[[False, False, False, True]],
        token_mask=torch.ones(1, 4, dtype=torch.bool),
        token_strings=(("<0xE6>", "<0x9D><0xB1>", "\ud800", " <0xE4>"),),
    )
    assert r"prompt     '東\ud800 <0xE4>'" in result.to_text(80)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_split_bytes_come_together_again(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    tokens = ["".join(f"<0x{byte:02X}>" for byte in raw[a:b]) for a, b in itertools.pairwise(cuts)]
    assert joined(tokens) == text


def test_where_two_groups_do_not_fit_the_tokens_make_room():
    wide, narrow = (table(many(3).to_text(width, levels=True))[0].split() for width in (100, 66))
    assert "token" in wide
    assert "token" not in narrow
    assert narrow.count("level") == 2
    assert "token" in table(make([[[0.1, 0.2]], [[0.3, 0.4]]]).to_text(20, levels=True))[0].split()
