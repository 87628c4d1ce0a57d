"""The result of a split: tables, text, files, and the command line."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
import torch

from iglens_tl import IGLensResult, SplitResult, split
from iglens_tl._shares import Part
from iglens_tl.cli import main
from tests.made_results import refused
from tests.models import BATCH, TOKENS
from tests.subjects import KINDS, N_LAYERS, subject

HEADS = 4


@pytest.fixture(scope="module")
def heads() -> SplitResult:
    return split(subject(KINDS[0]).model, BATCH, unit="head", positions=[1, -1])


def test_matrix_is_layers_by_heads(heads):
    matrix = heads.matrix("head")
    assert matrix.shape == (N_LAYERS, HEADS, 2, 2)
    for place, part in enumerate(heads.parts):
        assert part.kind != "head" or torch.equal(matrix[part.layer, part.index], heads.attribution[place])
    with pytest.raises(ValueError, match="no layer with a part of kind 'neuron'"):
        heads.matrix("neuron")


def test_table_and_top(heads):
    frame = heads.to_dataframe()
    assert len(frame) == 4 * len(heads.parts)
    sums = frame.groupby(["batch", "position"])["credit"].sum().to_numpy()
    assert sums == pytest.approx(heads.whole.total.flatten().numpy(), abs=3e-6)
    top = heads.top(3)
    assert len(top) == 12
    for _, rows in top.groupby(["batch", "position"]):
        sizes = rows["credit"].abs().tolist()
        assert sizes == sorted(sizes, reverse=True)
    first = top.iloc[0]
    inside = frame[(frame["batch"] == 0) & (frame["position"] == first["position"])]
    assert abs(first["credit"]) == inside["credit"].abs().max()
    with pytest.raises(ValueError, match="k must be at least 1"):
        heads.top(0)


@pytest.mark.parametrize("unit", ["sublayer", "block"])
@pytest.mark.parametrize("path", ["sequential", "straight"])
def test_saved_and_loaded(tmp_path, unit, path):
    result = split(subject(KINDS[0]).model, BATCH, unit=unit, path=path)
    result.save(tmp_path / "a.safetensors")
    loaded = SplitResult.load(tmp_path / "a.safetensors")
    assert loaded.equals(result)
    assert not loaded.equals(split(subject(KINDS[0]).model, BATCH, unit=unit, path=path, targets=7))
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"use SplitResult\.load"):
        IGLensResult.load(tmp_path / "a.safetensors")


def test_text_shows_the_largest_parts_and_the_sum(heads):
    text = heads.to_text(100, max_rows=5)
    assert text.count("others") == 4
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "sequential path" in text
    largest = heads.top(1)["part"].tolist()
    assert all(label in text for label in largest)
    assert str(split(subject(KINDS[0]).model, TOKENS, path="straight")).count("whole change from the first state")
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        heads.to_text(max_rows=0)


def test_html_escapes_every_label(heads):
    evil = tuple(
        dataclasses.replace(part, label=f"<script>{i}</script>", kind="own") for i, part in enumerate(heads.parts)
    )
    values = {field.name: getattr(heads, field.name) for field in dataclasses.fields(heads)}
    html = SplitResult(**{**values, "parts": evil})._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_contradictions_are_named(heads):
    values = {field.name: getattr(heads, field.name) for field in dataclasses.fields(heads)}
    with refused(r"attribution \[part batch pos\] should be"):
        SplitResult(**{**values, "attribution": heads.attribution[1:]})
    with pytest.raises(ValueError, match="two parts of one name"):
        SplitResult(**{**values, "parts": (heads.parts[0], *heads.parts[:-1])})
    with pytest.raises(ValueError, match="kinds must be among"):
        SplitResult(**{**values, "parts": (Part("x", "thing", 0), *heads.parts[1:])})


@pytest.mark.smollm2
def test_command_line(tmp_path, capsys):
    csv = tmp_path / "parts.csv"
    code = main(["split", "The capital of France is", "--target", " Paris", "--unit", "head", "--top", "5", "--no-prepend-bos",
                 "--width", "100", "--csv", str(csv)])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert "29_mlp" in out
    assert "by head" in out
    frame = pd.read_csv(csv, keep_default_na=False)
    assert frame["credit"].sum() == pytest.approx(0.77253, abs=5e-5)
    assert (frame["kind"] == "head").sum() == 270


@pytest.mark.parametrize(
    "words", [["split", " "], ["split", "x", "--unit", "layer"], ["split", "x", "--json", "--csv"]]
)
def test_command_line_refuses_before_loading(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("iglens: ")
