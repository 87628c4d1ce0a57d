"""The README's numbers are the stored ones, and these hold what is promised."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import RESULTS
from benchmarks.table import LINES, MARKS, README, Ratio, stored, table

TOKENS = "256 tokens x 31 states"
PROMISED = {  # (one, other): at most; None of another: the amount itself
    (f"ig_lens, {TOKENS}", f"bare product, {TOKENS}"): 1.15,
    ("ig_lens, 64 tokens", "TransformerLens logit_lens, 64 tokens"): 0.8,
    ("ig_lens, 8 tokens", "stacked, 8 tokens"): 1 / 40,
    ("growth, 128 tokens", "growth, 64 tokens"): 2.1,
    ("growth, 256 tokens", "growth, 128 tokens"): 2.1,
    ("growth, 512 tokens", "growth, 256 tokens"): 2.1,
    ("ig_lens, held at most, 1,024 tokens x 31 states", None): 200e6,
    ("ig_lens, held at most, 4,096 tokens x 31 states", None): 200e6,
    ("ig_lens, extra peak, 1,024 tokens x 31 states", None): 200e6,
    ("ig_lens, extra peak, 4,096 tokens x 31 states", None): 200e6,
    ("first use of ig_lens", None): 0.1,
}


def test_the_readme_shows_the_stored_results() -> None:
    shown = README.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown == table()
    assert shown.count("\n| ") == len(LINES)


@pytest.mark.parametrize(("names", "most"), PROMISED.items(), ids=str)
def test_the_stored_results_keep_the_promises(names, most) -> None:
    results = stored()
    ones = results[names[0]][0]
    others = [1.0] * len(ones) if names[1] is None else results[names[1]][0]
    assert len(ones) >= 3
    assert statistics.median(one / other for one, other in zip(ones, others, strict=True)) <= most


@pytest.mark.parametrize("measured", ["held at most", "extra peak"])
def test_four_times_the_tokens_take_the_same_memory(measured) -> None:
    short, long = (stored()[f"ig_lens, {measured}, {tokens} tokens x 31 states"][0] for tokens in ("1,024", "4,096"))
    assert statistics.median(long) <= 1.1 * statistics.median(short)


def test_the_stored_results_describe_their_machine_and_nobody_s_host() -> None:
    for _, about in stored().values():
        assert {"cpu_count", "cpu_model_name", "threads", "torch", "transformer_lens", "date"} <= set(about)
        assert not {"hostname", "python_executable", "command"} & set(about)
    assert {line.one for line in LINES if isinstance(line, Ratio)} <= set(stored())


def test_the_stored_run_was_killed_and_lost_nothing() -> None:
    run = json.loads((RESULTS / "dataset.json").read_text(encoding="utf-8"))
    assert run["prompts"] == 2000
    assert run["rows"] == 2000 * 30
    assert len(run["finished after each kill"]) == 10
    assert run["rows that are there twice"] == 0
    assert run["equal to the bit"] is True
