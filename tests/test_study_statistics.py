"""The statistics of a study: against SciPy's own, closed forms, and data in which the answer is known."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from iglens_tl import _study_analysis as analysis
from iglens_tl._study_analysis import Measurements
from iglens_tl._study_prompts import choose_positions, kind_of_word, read_prompts, seed_of
from iglens_tl._study_statistics import correlation_interval, hits, holm, mean_interval, rank_correlations
from iglens_tl.study_result import OnsetStudy
from tests.made_studies import N_BLOCKS, made_table

DRAW = np.random.default_rng(3)


def test_rank_correlations_are_scipys() -> None:
    scores, effects = DRAW.normal(size=(7, 9)), DRAW.integers(0, 4, size=(7, 9)).astype(float)  # with ties
    expected = [spearmanr(a, b).statistic for a, b in zip(scores, effects, strict=True)]
    assert rank_correlations(scores, effects) == pytest.approx(
        expected, abs=1e-12
    )  # both are float64 sums of nine products


def test_a_constant_or_missing_side_has_no_correlation() -> None:
    scores = np.array([[1.0, 1, 1], [1, np.nan, 3], [1, 2, 3]])
    effects = np.array([[1.0, 2, 3], [1, 2, 3], [3, 2, np.inf]])
    assert np.isnan(rank_correlations(scores, effects)).all()


def test_hits_by_hand_with_ties_to_the_first() -> None:
    effects = np.array([[0.1, 0.9, 0.5, 0.9]])
    assert [hits(np.eye(4)[[i]], effects)[0] for i in range(4)] == [0, 1, 0, 0]
    assert [hits(np.eye(4)[[i]], effects, 2)[0] for i in range(4)] == [0, 1, 0, 1]
    assert [hits(np.eye(4)[[i]], effects, 3)[0] for i in range(4)] == [0, 1, 1, 1]
    assert hits(np.zeros((1, 4)), effects)[0] == 0, "a tie among all scores names the first block"
    assert np.isnan(hits(np.array([[np.nan, 1, 2, 3]]), effects)[0])


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(200):
        draw = np.random.default_rng(trial)
        of_prompt = draw.normal(size=40).repeat(3)  # three pairs a prompt that agree with each other
        values = of_prompt + 0.1 * draw.normal(size=120)
        found = mean_interval(values, np.arange(40).repeat(3), 399, seed=trial)
        covered += found.low <= 0 <= found.high
    # 95 % of 200 is 190, the standard error 3; a percentile interval of 40 clusters covers a little less. Pairs taken as
    # independent would cover about 72 %, 144.
    assert 178 <= covered <= 200


def test_the_mean_weighs_pairs_and_leaves_out_what_is_missing() -> None:
    found = mean_interval(np.array([1.0, 2, 6, np.nan]), [0, 0, 1, 1])
    assert (found.mean, found.n_pairs, found.n_prompts) == (3.0, 3, 2)
    assert mean_interval(np.array([np.nan]), [0]).n_pairs == 0


def test_p_values_are_small_where_there_is_something_and_not_where_there_is_nothing() -> None:
    prompts = np.arange(60)
    assert mean_interval(DRAW.normal(size=60) + 1, prompts, 999).p == pytest.approx(2 / 1000)  # no resample crosses 0
    assert mean_interval(np.tile([1.0, -1.0], 30), prompts, 999).p > 0.5


def test_correlation_across_pairs() -> None:
    x = DRAW.normal(size=90)
    found = correlation_interval(x, x**3, np.arange(90) // 3, 99)
    assert found.mean == pytest.approx(1)
    assert found.low == pytest.approx(1)
    loose = correlation_interval(x, DRAW.normal(size=90), np.arange(90) // 3, 199)
    assert loose.low < 0 < loose.high
    y = x + DRAW.normal(size=90)
    assert correlation_interval(x, y, np.arange(90) // 3, 99).mean == pytest.approx(
        spearmanr(x, y).statistic, abs=1e-12
    )


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, float("nan")])[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])


def test_what_orders_the_blocks_as_the_effect_does_is_found_and_nothing_else() -> None:
    found = analysis.agreement(Measurements.of(made_table()), analysis.PRIMARY, n_resamples=99).set_index("predictor")
    assert found.loc["patching", ["rho", "top1", "top3"]].tolist() == pytest.approx([1, 1, 1])
    others = found.drop("patching")
    assert (others["rho"].abs() < 0.25).all()
    assert (others["top1"] < 0.45).all()
    assert set(analysis.CONTROLS) <= set(found.index)


def test_leaving_block_0_out_leaves_it_out_on_both_sides() -> None:
    table = made_table(predictive="credit")
    table.loc[table["block"] == 0, "drop_skip_target"] = 9.0
    m = Measurements.of(table)
    every = analysis.agreement(m, analysis.PRIMARY, 0, 99).set_index("predictor")
    later = analysis.agreement(m, analysis.PRIMARY, 1, 99).set_index("predictor")
    assert every.loc["first block", "top1"] == 1
    assert every.loc["credit", "top1"] < 0.5
    assert later.loc["credit", "top1"] == 1
    assert later.loc["credit", "rho"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [({}, "holds"), ({"drop_placebo_target": "drop_skip_target"}, "does not hold")],
)
def test_the_verdict_follows_the_rule(columns: dict[str, str], expected: str) -> None:
    table = made_table(40, predictive="credit")
    if expected == "does not hold":
        table["credit"] = np.random.default_rng(1).normal(size=len(table))
    for name, source in columns.items():
        table[name] = table[source]
    assert OnsetStudy(table, {}, {}).verdict() == expected


def test_a_verdict_between_the_two_is_mixed() -> None:
    rows = [
        ("first block", "top1", 0.1, 0.5),
        ("first block", "rho", 0.1, 0.01),
        ("last block", "top1", 0.2, 0.01),
        ("last block", "rho", -0.1, 0.5),
    ]
    table = pd.DataFrame(
        [{"rival": r, "measure": m, "difference": d, "p_holm": p, "blocks": "all"} for r, m, d, p in rows]
    )
    assert analysis.verdict(table) == "mixed"


def test_causal_layers_are_suffix_rules() -> None:
    enough = np.array([[False, True, False, True, True], [True] * 5, [True, True, True, True, False]])
    assert analysis.suffix_start(enough)[:2].tolist() == [3, 0]
    assert np.isnan(analysis.suffix_start(enough)[2])


def test_gains_are_differences_of_what_is_kept() -> None:
    table = made_table(1, 1)
    kept = table["kept_cut"].to_numpy()
    gain = Measurements.of(table).effect("gain of attention cut")[0]
    assert gain == pytest.approx([kept[0] - 0.0, *np.diff(kept)])


def test_depths_are_compared_with_the_constant_of_the_other_half() -> None:
    table = made_table()
    truth = Measurements.of(table).causal_depth("largest drop, skip, target").repeat(N_BLOCKS)
    table["onset_mass"] = truth
    found = analysis.depths(Measurements.of(table), 99)
    row = found[(found["causal"] == "largest drop, skip, target") & (found["predictor"] == "onset mass")].iloc[0]
    assert row["rho"] == pytest.approx(1)
    assert row["error"] == 0
    assert row["worse"] < 0


def test_variants_are_tuned_on_one_half_and_reported_on_the_other() -> None:
    table = made_table()
    even = table["prompt_index"] % 2 == 0
    table["credit_log_prob"] = table["drop_skip_target"].where(
        even, table["credit_log_prob"]
    )  # perfect, on the tuning half only
    row = analysis.variants(Measurements.of(table), 0, 99).set_index("outcome").loc[analysis.PRIMARY]
    assert row["variant"] == "log-prob credit"
    assert row["tuning rho"] == pytest.approx(1)
    assert abs(row["rho"]) < 0.4  # thirty random pairs on the other half: sd 0.08


def test_monotone_is_a_threshold_on_the_credits() -> None:
    table = made_table(1, 2, credit=0.0)
    table.loc[2, "credit"] = -0.011
    table.loc[8, "credit"] = -0.009
    assert Measurements.of(table).monotone.tolist() == [False, True]


def test_the_page_and_the_file(tmp_path) -> None:
    study = OnsetStudy(made_table(6), {"seed": 3}, {"model": "a | b", "api": "made"})
    page = study.to_markdown("One prompt was left out.", n_resamples=29)
    for section in (
        "## Verdict",
        "## Primary test",
        "## Strata",
        "## Variants",
        "## Cost",
        "## Limits",
        "One prompt was left out.",
    ):
        assert section in page
    assert "18 pairs" in page
    assert not re.search(r"\bnan\b", page)
    assert all(line.count("|") - line.count("\\|") == width for width, line in _table_lines(page))
    study.save(tmp_path / "study.parquet")
    again = OnsetStudy.load(tmp_path / "study.parquet")
    pd.testing.assert_frame_equal(again.table, study.table, rtol=1e-6)  # kept as float32
    assert (again.settings, again.provenance) == (study.settings, study.provenance)
    assert "patching" in str(study)
    assert "<script" not in study._repr_html_()


def _table_lines(page: str) -> list[tuple[int, str]]:
    found, width = [], 0
    for line in page.splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        width = width or line.count("|") - line.count("\\|")
        found.append((width, line))
    assert found
    return found


def test_an_empty_study_says_so() -> None:
    with pytest.raises(ValueError, match="no pair yet"):
        OnsetStudy(pd.DataFrame(), {}, {}).primary()
    assert "0 pairs" in str(OnsetStudy(pd.DataFrame(), {}, {}))
    with pytest.raises(ValueError, match="outcome must be one of"):
        OnsetStudy(made_table(2), {}, {}).agreement("no such")


def test_positions_are_drawn_with_the_seed_and_the_last_is_kept() -> None:
    import torch

    probs = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.05, 0.9, 0.9, 0.9, 0.9])
    chosen = choose_positions(probs, 3, 0.1, 3, seed=5)
    assert chosen == choose_positions(probs, 3, 0.1, 3, seed=5)
    assert len(chosen) == 3
    assert chosen[-1] == 8
    assert set(chosen) <= {3, 5, 6, 7, 8}
    assert len({choose_positions(probs, 3, 0.1, 3, seed=seed) for seed in range(20)}) > 1
    assert choose_positions(probs * 0, 3, 0.1, 3, seed=0) == ()
    unlikely_end = torch.cat([probs, torch.tensor([0.01])])
    assert len(choose_positions(unlikely_end, 3, 0.1, 3, seed=0)) == 3


def test_prompts_in_every_form(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one two\n\nthree\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "one two", "id": "x", "kind": "fact"}\n')
    assert [p.text for p in read_prompts(tmp_path / "a.txt")] == ["one two", "three"]
    (prompt,) = read_prompts(tmp_path / "a.jsonl")
    assert (prompt.index, prompt.id, prompt.kind, prompt.text) == (0, "x", "fact", "one two")
    for bad, words in (
        ([], "Got none"),
        (["a", " "], "entry 1"),
        ([{"text": "a"}], "entry 0"),
        (tmp_path / "b.txt", "no file"),
    ):
        with pytest.raises(ValueError, match=words):
            read_prompts(bad)
    (tmp_path / "b.jsonl").write_text("{nonsense\n")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        read_prompts(tmp_path / "b.jsonl")


def test_kinds_of_words_and_seeds() -> None:
    kinds = {
        " Paris": "word start",
        "ing": "continuation",
        " 12": "number",
        ",": "punctuation or space",
        "\n": "punctuation or space",
    }
    assert {word: kind_of_word(word) for word in kinds} == kinds
    assert seed_of(0, "a") == seed_of(0, "a") != seed_of(1, "a")
