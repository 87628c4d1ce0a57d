"""`iglens ablate`: what it prints, saves and refuses, on a tiny model in the place of a loaded one."""

from __future__ import annotations

import io

import pandas as pd
import pytest

from iglens_tl import AblationResult, ablate_layers, cli, loading
from tests.subjects import each_kind, speaking

PROMPT = "w09 w07 w05"


@pytest.fixture
def model(kind, tmp_path, monkeypatch):
    made = speaking(kind, tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda name, **settings: made)
    return made


@each_kind
def test_it_prints_and_saves_what_the_call_returns(kind, model, capsys, tmp_path):
    file, lines = tmp_path / "x.safetensors", tmp_path / "lines.txt"
    lines.write_text("w11 w12 w13\n\nw20 w21\n")
    words = ["ablate", PROMPT, "--target", "w08", "--incorrect-target", "id:6", "--component", "attn", "--scope", "all"]
    words += ["--spare-first", "--layers", "0,2", "--mode", "resample", "--reference", str(lines), "--seed", "3"]
    assert cli.main([*words, "--n-samples", "2", "--width", "100", "--save", str(file)]) == 0
    wanted = ablate_layers(
        model, PROMPT, targets="w08", incorrect_targets=6, component="attn", scope="all", include_first=False,
        layers=[0, 2], mode="resample", reference=["w11 w12 w13", "w20 w21"], seed=3, n_samples=2,
    )  # fmt: skip
    assert capsys.readouterr().out.strip() == wanted.to_text(100).strip()
    assert AblationResult.load(file).equals(wanted)


@each_kind
def test_rows_and_csv(kind, model, capsys, tmp_path):
    assert cli.main(["ablate", PROMPT, "--component", "head", "--rows", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\nL") == 4
    assert "(8 rows of smaller change are left out" in printed
    assert cli.main(["ablate", PROMPT, "--effect", "direct", "--csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
    wanted = ablate_layers(model, PROMPT, effect="direct")
    assert frame["drop"].tolist() == pytest.approx(wanted.drop[:, 0, 0].tolist(), abs=1e-12)
    assert cli.main(["ablate", PROMPT, "--csv", str(tmp_path / "t.csv")]) == 0
    assert capsys.readouterr().out == ""
    assert len(pd.read_csv(tmp_path / "t.csv")) == 3


@each_kind
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([" "], "the prompt is empty"),
        (["w09", "--spare-first"], "--spare-first goes with --scope all"),
        (["w09", "--mode", "mean"], "need --reference FILE"),
        (["w09", "--reference", "x.txt"], "need --reference FILE"),
        (["w09", "--mode", "mean", "--reference", "/nowhere/x.txt"], "No such file"),
        (["w09", "--layers", "0;1"], "block numbers with commas"),
        (["w09", "--layers", "7"], "blocks 0 to 2"),
        (["w09", "--component", "neuron"], "invalid choice"),
        (["w09", "--scope", "all", "--effect", "direct"], 'scope="target"'),
        (["w09", "--save", "/nowhere/x"], "there is no folder"),
    ],
)
def test_refusals_in_one_line(kind, model, words, said, capsys):
    assert cli.main(["ablate", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
