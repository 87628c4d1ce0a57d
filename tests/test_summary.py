"""The summary of a run, against sums written out by hand, and both of its commands on the command line."""

from __future__ import annotations

import html
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from pyarrow import parquet
from scipy import stats

from iglens_tl import NEXT, cli, loading, plots, run_dataset, summarize
from iglens_tl._shards import RunFolder
from tests.made_figures import summary as made_summary
from tests.subjects import KINDS, speaking
from tests.test_loading import made, saved

TEXTS = ["w05 w06 w07", "w11 w12", "w20 w21 w22 w23 w24", "w30 w31", "w06 w06 w06 w06", "w05 w05"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return speaking(KINDS[0], tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every next token of six prompts, and a seventh that fails."""
    out = tmp_path_factory.mktemp("run")
    run_dataset(model, [*TEXTS, [99]], out, targets=NEXT, positions=None, prepend_bos=False, batch_size=2)
    return out


def good(folder: Path) -> Any:
    frame = parquet.read_table(folder).to_pandas()
    return frame[frame["error"].isna()]


def test_means_and_intervals_are_those_of_a_ratio_over_prompts(folder: Path) -> None:
    summary, frame = summarize(folder, confidence=0.9), good(folder)
    assert summary.segments["segment"].tolist() == ["0", "1", "2"]
    assert summary.segments["hidden_state"].tolist() == [1, 2, 3]
    for row in summary.segments.to_dict("records"):
        part = frame[frame["segment"] == row["segment"]]
        mean = part["credit"].mean()
        residuals = [sum(credit - mean for credit in rows["credit"]) for _, rows in part.groupby("prompt_index")]
        m, n = len(residuals), len(part)
        error = math.sqrt(m / (m - 1) * sum(value**2 for value in residuals)) / n
        half = stats.t(m - 1).ppf(0.95) * error
        assert (row["n_prompts"], row["n_tokens"]) == (6, 12)
        assert row["mean"] == pytest.approx(mean, abs=1e-15)  # the same sum in another order
        assert (row["low"], row["high"]) == pytest.approx((mean - half, mean + half), abs=1e-14)
        assert row["mean_abs"] == pytest.approx(part["credit"].abs().mean(), abs=1e-15)


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Clusters of unequal size with a common shift: 95% intervals hold 0 in 93 to 97% of 1,000 draws (binomial noise 0.7%,
    and a cluster interval of 30 clusters is known to be a little short); without clusters it would be in half of them."""
    from iglens_tl._dataset_sums import interval

    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(1000):
        n = torch.randint(1, 6, (30,), generator=generator)
        sums = n * torch.randn(30, generator=generator, dtype=torch.float64)
        prompts = pandas.DataFrame({"credit": sums.numpy(), "size": sums.abs().numpy(), "n": n.numpy()})
        _, low, high, *_ = interval(prompts, 0.95)
        held += low <= 0 <= high
    assert 0.93 <= held / 1000 <= 0.97


def test_onsets_are_counted_by_token(folder: Path) -> None:
    tokens = good(folder).drop_duplicates(["prompt_index", "position"])
    summary = summarize(folder)
    assert summary.n_tokens == len(tokens) == 12
    for rule in ("mass", "crossing", "peak", "rank"):
        expected = tokens[f"onset_{rule}"].value_counts(dropna=False)
        found = summary.onsets[summary.onsets["rule"] == rule]
        assert dict(zip(found["label"], found["n_tokens"], strict=True)) == {
            None if pandas.isna(label) else label: count for label, count in expected.items()
        }
        assert found["share"].sum() == pytest.approx(1)


def test_places_are_in_the_order_of_the_path(model: Any, tmp_path: Path) -> None:
    run_dataset(model, [f"w{i:02}" for i in range(5, 50)], tmp_path, incl_mid=True, baseline="zero")
    summary = summarize(tmp_path)
    labels = ["base", "0_mlp", "1_attn", "1_mlp", "2_attn", "2_mlp"]
    assert summary.segments["segment"].tolist() == labels
    assert summary.segments["hidden_state"].isna().tolist() == [True, False] * 3
    mass = summary.onsets[summary.onsets["rule"] == "mass"]["label"].tolist()
    assert len(mass) > 2
    assert mass == [label for label in labels if label in mass]


def test_a_token_without_an_onset_is_counted_as_such(model: Any, tmp_path: Path) -> None:
    """A target that is never on top has no rank onset."""
    summary = run_dataset(model, TEXTS, tmp_path, targets="w02")
    tops = good(tmp_path)[["prompt_index", "is_top_end"]].groupby("prompt_index").last()["is_top_end"]
    assert not tops.any()
    found = summary.onsets[summary.onsets["rule"] == "rank"]
    assert found[["label", "n_tokens", "share"]].to_numpy().tolist() == [[None, 6, 1.0]]
    assert next(line for line in str(summary).splitlines() if line.startswith("none")).endswith("100.0%")


def test_a_rule_that_the_metric_cannot_have_is_left_out(model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, TEXTS, tmp_path, metric="log_prob")
    assert set(summary.onsets["rule"]) == {"mass", "peak", "rank"}
    assert (summary.metric, summary.unit) == ("log_prob", "nats")


def test_the_text_says_what_is_there(folder: Path) -> None:
    summary = summarize(folder)
    text = str(summary)
    assert "7 of 7 prompts (complete, 1 failed), 12 tokens, prob [probability]" in text
    assert "95% interval" in text
    assert f"{summary.segments['mean'][1]:+.4f}" in text
    assert "not the layer's causal effect" in " ".join(text.split())
    assert "token ids must lie in [0, 50)" in text
    assert "prompt 6" in text
    assert max(len(line) for line in text.splitlines()[:12]) <= 120


def test_html_is_escaped(model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, [*TEXTS, {"prompt": "w05", "target": "<b>"}], tmp_path)
    page = summary._repr_html_()
    assert page.count("<b>") == 1  # the heading, and not the name
    assert html.escape("<b>") in page
    assert summary.n_tokens == 0  # no row but the last has a target, and that one is none


def test_a_run_can_be_summarized_while_it_goes_on(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = RunFolder.write, []

    def watched(self: RunFolder, *args: Any) -> Any:
        seen.append(summarize(tmp_path))
        return write(self, *args)

    monkeypatch.setattr(RunFolder, "write", watched)
    run_dataset(model, TEXTS, tmp_path, batch_size=2)
    assert [summary.n_done for summary in seen] == [0, 2, 4]
    assert "0 of 6 prompts (6 to do, 0 failed)" in str(seen[0])
    assert len(seen[0].segments) == 0
    assert seen[1]._repr_html_()


def test_one_prompt_has_no_interval(model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, TEXTS[:1], tmp_path)
    assert summary.segments["low"].isna().all()
    assert " - " in str(summary)


def test_what_is_no_run_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        summarize(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no folder of a run.*_run\.json"):
        summarize(tmp_path)
    with pytest.raises(ValueError, match="confidence"):
        summarize(folder, confidence=1.0)
    (tmp_path / "_run.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"format 2.*upgrade"):
        summarize(tmp_path)
    (tmp_path / "_run.json").write_text('{"format"')
    with pytest.raises(ValueError, match="damaged"):
        summarize(tmp_path)


# --- the figure ----------------------------------------------------------------------------------------------------


def test_the_figure_shows_the_numbers_of_the_summary(folder: Path) -> None:
    summary = summarize(folder)
    bars, *lines = plots.mean_credits(summary).data
    assert list(bars.x) == ["0", "1", "2"]
    assert list(bars.y) == summary.segments["mean"].tolist()
    assert [mean - half for mean, half in zip(bars.y, bars.error_y.array, strict=True)] == pytest.approx(
        summary.segments["low"].tolist(), abs=1e-15
    )
    assert [line.name for line in lines] == ["mass", "crossing", "peak", "rank"]
    for line in lines:
        found = summary.onsets[summary.onsets["rule"] == line.name].set_index("label")["share"].to_dict()
        column = "segment" if line.name in ("mass", "peak") else "end"
        assert list(line.y) == [found.get(label, 0.0) for label in summary.segments[column]]


def test_the_figure_says_what_is_at_no_segment() -> None:
    title = plots.mean_credits(made_summary()).layout.title.text
    assert "400 tokens of 40 prompts" in title
    words = " ".join(title.replace("<br>", " ").split())
    assert "9 prompts to do" in words
    assert "crossing 75&#37; at 0_pre, rank 75&#37; none" in words


def test_a_figure_of_nothing_is_refused(model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, [*TEXTS[:1], {"prompt": "w05", "target": "w05 w06"}], tmp_path)
    with pytest.raises(ValueError, match="holds no token: 2 of 2 prompts are done and 2 failed"):
        plots.mean_credits(summary)


def test_the_command_writes_the_figure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["summarize", str(folder), "--figure", str(tmp_path / "f.html")]) == 0
    assert "mean credit" in (tmp_path / "f.html").read_text(encoding="utf-8")
    assert "mean credit" in capsys.readouterr().out


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def test_run_and_summarize(
    model: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: model)
    out = tmp_path / "out"
    assert cli.main(["run", str(prompts), "--out", str(out)]) == 0
    printed, said = capsys.readouterr()
    assert printed == f"{summarize(out)}\n"
    assert said == ""
    assert cli.main(["summarize", str(out), "--confidence", "0.5"]) == 0
    assert capsys.readouterr().out == f"{summarize(out, confidence=0.5)}\n"


OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "next": (["--next", "--no-prepend-bos"], {"targets": NEXT, "positions": None, "prepend_bos": False}),
    "a target": (["--target", "w09", "--incorrect-target", "id:10"], {"targets": "w09", "incorrect_targets": 10}),
    "readout": (
        ["--k", "2", "--metric", "log_odds", "--dtype", "float64", "--baseline", "mean", "--max-memory", "1MB"],
        {"layers": 2, "metric": "log_odds", "dtype": torch.float64, "baseline": "mean", "max_memory": "1MB"},
    ),
    "batches": (["--batch-size", "2"], {"batch_size": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_keywords(
    name: str, model: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call on the folder is the same run: it finds every prompt done, by settings that are the same."""
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: model)
    words, keywords = OPTIONS[name]
    assert cli.main(["run", str(prompts), "--out", str(tmp_path / "a"), *words]) == 0
    run_dataset(model, TEXTS, tmp_path / "a", **keywords)
    run_dataset(model, TEXTS, tmp_path / "b", **keywords)
    assert parquet.read_table(tmp_path / "a").equals(parquet.read_table(tmp_path / "b"))


def test_columns_are_options_and_failures_are_exit_code_1(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: model)
    rows = [{"q": "w05", "a": "w06", "b": "w07"}, {"q": "w05", "a": "w06 w07", "b": "w08"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    names = ["--prompt-column", "q", "--target-column", "a", "--incorrect-column", "b"]
    assert cli.main(["run", str(path), "--out", str(tmp_path / "out"), *names]) == 1
    assert "exactly one token" in capsys.readouterr().out
    assert good(tmp_path / "out")["incorrect"].tolist() == ["w07"] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "none.txt", "--out", "x"], "there is no file 'none.txt'"),
        (["run", __file__], "--out"),
        (["run", __file__, "--out", __file__], "is no folder"),
        (["run", __file__, "--out", "x", "--max-memory", "much"], "max_memory"),
        (["run", __file__, "--out", "x", "--next", "--target", "w05"], "not allowed with"),
        (["summarize", "none"], "there is no folder 'none'"),
        (["summarize", __file__], "is a file; give the folder"),
        (["summarize", ".", "--confidence", "1"], "below 1"),
        (["summarize", ".", "--figure", "x.gif"], "--figure must end in .html"),
        (["summarize", ".", "--figure", "none/x.html"], "there is no folder 'none'"),
    ],
)
def test_bad_words_are_one_line_before_a_model_is_loaded(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(name: str, **settings: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load_model", loaded)
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_two_processes_by_accelerate_launch(tmp_path: Path) -> None:
    """The command of the documentation, on the CPU, from start to end."""
    folder = saved(made("llama"), tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(f"the cat w{i} w{60 - i}" for i in range(11, 23)), encoding="utf-8")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "iglens_tl"]
    words = ["run", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out"), "--model", str(folder)]
    words += ["--batch-size", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launch, *words],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 of 12 prompts (complete, 0 failed)") == 1  # the first rank prints, when all are done
    from iglens_tl._shards import read_about

    wrote = [tuple(read_about(path)["rank"]) for path in RunFolder(tmp_path / "out").shards()]
    assert sorted(wrote) == [(0, 2)] * 3 + [(1, 2)] * 3
