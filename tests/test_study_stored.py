"""The study that is kept in the repository: large enough, of the prompts that lie beside it, and its page made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from iglens_tl import OnsetStudy
from iglens_tl import _study_analysis as analysis
from iglens_tl import _study_page as page
from iglens_tl._study_prompts import read_prompts

FOLDER = Path(__file__).parent.parent / "studies" / "onset"
PAGE = (FOLDER / "RESULTS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def study() -> OnsetStudy:
    return OnsetStudy.load(FOLDER / "results.parquet")


def test_it_is_as_large_as_planned_and_of_these_prompts(study) -> None:
    assert study.n_pairs >= 300
    assert study.n_prompts >= 100
    prompts = {prompt.id: prompt.text for prompt in read_prompts(FOLDER / "prompts.jsonl")}
    assert dict(study.table[["prompt_id", "prompt"]].itertuples(index=False)).items() <= prompts.items()
    reference = {prompt.text for prompt in read_prompts(FOLDER / "reference.jsonl")}
    assert not reference & set(prompts.values())


def test_credits_add_up_to_the_probability(study) -> None:
    m = study.measurements()
    total, p = m.columns["credit"].sum(1), m.columns["prob"][:, 0]
    # What is missing is the probability at the embedding: near 1 where the token itself comes again (the unembedding is the
    # embedding's own matrix), else of no account. Columns are kept as float32.
    again = (m.pairs["token"] == m.pairs["target"]).to_numpy()
    assert 0 < again.sum() < 20
    assert total[~again] == pytest.approx(p[~again], abs=1e-3)
    assert (total <= p + 1e-5).all()
    assert m.effect("direct skip")[:, -1] == pytest.approx(m.columns["credit"][:, -1], abs=1e-5), (
        "the same by construction"
    )
    assert m.columns["kept_cut"][:, -1] == pytest.approx(m.columns["prob"][:, 0], abs=1e-5), (
        "nothing is cut after the last"
    )


def test_the_page_says_what_is_stored(study) -> None:
    m = study.measurements()
    assert page._markdown(page._percent(analysis.where_it_hurts(m, list(analysis.OUTCOMES)))) in PAGE
    fresh, of_page = (re.findall(r"[|] (-?\d\.\d\d) \[", text) for text in (page._overview(m, 19), PAGE))
    assert len(fresh) == 4 * len(analysis.PREDICTORS) * len(analysis.OUTCOMES)
    assert fresh == of_page, "the means of every predictor and outcome"
    assert page._data(m, study.settings, study.provenance) in PAGE
    means = analysis.primary(m, 49)  # few resamples: the intervals differ, the means do not
    for row in means.to_dict("records"):
        cells = f"| {row['blocks']} | {row['rival'].replace('|', chr(92) + '|')} |"
        line = next(
            line for line in PAGE.splitlines()
            if line.startswith(cells) and (" top-1 hit " if row["measure"] == "top1" else " rho ") in line
        )  # fmt: skip
        assert f"{row['difference']:+.3f}" in line
