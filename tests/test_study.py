"""A study end to end on a tiny model: what it measures, that it goes on where it stopped, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from iglens_tl import OnsetStudy, ablate_layers, context_need, ig_lens, onset_study
from iglens_tl import study as study_module
from iglens_tl._model.host import host_of
from iglens_tl._study_predictors import half_depth, predictors, read
from iglens_tl.cli import main
from tests.subjects import KINDS, N_LAYERS, cached, each_kind, speaking, states_of, words

ROWS = np.random.default_rng(11).integers(5, 50, size=(26, 7))
PROMPTS = [{"id": f"p{i}", "kind": ("even", "odd")[i % 2], "prompt": words(row)} for i, row in enumerate(ROWS[:7])]
REFERENCE = [words(row) for row in ROWS[16:]]
SETTINGS = {"reference": REFERENCE, "min_prob": 0.02, "n_foreign": 2, "progress": False}
NOT_MEASURED = ["seconds"]


@pytest.fixture(scope="module", params=KINDS[:1])
def model(request, tmp_path_factory):
    return speaking(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def study(model, tmp_path_factory):
    return onset_study(model, PROMPTS, out=tmp_path_factory.mktemp("whole") / "study", **SETTINGS)


def same(a: OnsetStudy, b: OnsetStudy) -> None:
    pd.testing.assert_frame_equal(
        a.table.drop(columns=NOT_MEASURED), b.table.drop(columns=NOT_MEASURED), check_exact=True
    )


def test_twenty_pairs_one_row_a_block(study) -> None:
    assert study.n_pairs >= 20
    assert len(study.table) == study.n_pairs * N_LAYERS
    assert study.table["block"].tolist() == list(range(N_LAYERS)) * study.n_pairs
    assert (study.table["prob"] >= 0.02).all()
    assert (study.table["position"] >= 3).all()
    assert set(study.table["kind"]) == {"even", "odd"}
    numbers = study.table.select_dtypes("float64")
    depths = [name for name in numbers if name.startswith(("onset_", "lens_"))]  # a token may have no onset
    assert np.isfinite(numbers.drop(columns=depths)).all(axis=None)


def test_every_row_is_what_the_calls_give(study, model) -> None:
    pair = study.table[study.table["prompt_index"] == 3].query("position == position.max()")
    tokens = model.to_tokens(PROMPTS[3]["prompt"])[:, : int(pair["position"].iloc[0]) + 1]
    target = int(pair["target_id"].iloc[0])
    assert target == int(model(tokens)[0, -1].argmax())
    result = ig_lens(model, tokens, targets=target)
    skipped = ablate_layers(model, tokens, targets=target, mode="skip")
    everywhere = ablate_layers(model, tokens, targets=target, mode="skip", scope="all", include_first=False)
    direct = ablate_layers(model, tokens, targets=target, mode="skip", effect="direct")
    expected = {
        "credit": result.attribution, "drop_skip_target": skipped.drop, "drop_skip_all": everywhere.drop,
        "direct_skip": direct.drop,
    }  # fmt: skip
    for name, tensor in expected.items():  # 1e-6: float32 readouts, and the table keeps float32
        assert pair[name].to_numpy() == pytest.approx(tensor[:, 0, 0].numpy(), abs=1e-6), name
    assert pair["prob"].iloc[0] == pytest.approx(float(result.values[-1]), abs=1e-6)
    assert pair["direct_skip"].iloc[-1] == pytest.approx(pair["credit"].iloc[-1], abs=1e-6), (
        "the same number by construction"
    )
    need = context_need(model, tokens, targets=target, reference=REFERENCE, curves=("attention_cut",))
    assert pair["kept_cut"].to_numpy() == pytest.approx(need.attention_cut[1:, 0, 0].numpy(), abs=1e-6)
    assert pair["kept_cut"].iloc[-1] == pytest.approx(pair["prob"].iloc[-1], abs=1e-6), (
        "after the last block nothing is cut"
    )


@each_kind
def test_scores_are_what_they_are_called(kind, tmp_path) -> None:
    model = speaking(kind, tmp_path)
    tokens = torch.tensor([ROWS[0].tolist()])
    target = int(model(tokens)[0, -1].argmax())
    scores, depths = predictors(read(host_of(model), tokens, target))
    states = states_of(cached(model, tokens))[:, 0].double()
    updates = states.diff(dim=0)
    assert scores["update_norm"] == pytest.approx(updates[:, -1].norm(dim=-1).numpy(), rel=1e-5)
    assert depths["half_update_norm"] == half_depth(scores["update_norm"])
    credits = ig_lens(model, tokens, targets=target).attribution[:, 0, 0]
    assert scores["straight"].sum() == pytest.approx(
        float(credits.sum()), abs=1e-3
    )  # the tolerance asked of each block
    # The mean logit of centred DLA: what is taken off is the same for every target, so differences of targets stay.
    other = (target + 1) % 50
    elsewhere, _ = predictors(read(host_of(model), tokens, other), straight=False)
    assert scores["dla"] - elsewhere["dla"] == pytest.approx(scores["dla_centred"] - elsewhere["dla_centred"], abs=1e-5)
    assert not np.allclose(scores["dla"], scores["dla_centred"], atol=1e-3)


@each_kind
def test_attribution_patching_is_the_slope_of_removing_an_update(kind, tmp_path) -> None:
    model = speaking(kind, tmp_path)
    tokens = torch.tensor([ROWS[0].tolist()])
    target = int(model(tokens)[0, -1].argmax())
    scores, _ = predictors(read(host_of(model), tokens, target), straight=False)
    names = [
        *(f"blocks.{layer}.hook_resid_pre" for layer in range(1, N_LAYERS)),
        f"blocks.{N_LAYERS - 1}.hook_resid_post",
    ]
    updates = states_of(cached(model, tokens)).diff(dim=0)

    def less(layer: int, places: slice, step: float) -> float:
        """The probability with a small part of the update taken out."""

        def out(tensor, hook):
            changed = tensor.clone()
            changed[:, places] -= step * updates[layer][:, places]
            return changed

        with torch.no_grad(), model.hooks(fwd_hooks=[(names[layer], out)]):
            return float(model(tokens)[0, -1].double().softmax(-1)[target])

    step = 0.01  # central: error of the order of 1e-4 times the third derivative; rounding 1e-7 / 0.02
    for name, places in (("patching", slice(-1, None)), ("patching_all", slice(1, None))):
        slope = [(less(layer, places, -step) - less(layer, places, step)) / (2 * step) for layer in range(N_LAYERS)]
        assert scores[name] == pytest.approx(slope, rel=0.02, abs=2e-4), name
    assert np.abs(scores["patching"]).max() > 0.01


def test_half_depth_by_hand() -> None:
    assert half_depth(np.array([1.0, 1.0, 2.0])) == 2
    assert half_depth(np.array([0.0, 0.0, 5.0])) == 3
    assert half_depth(np.array([5.0, 1.0, 1.0])) == 1


def test_a_study_that_was_interrupted_goes_on_and_gives_the_same_numbers(study, model, tmp_path, monkeypatch) -> None:
    whole, measured = study_module._rows_of, []

    def failing(host, prompt, *rest):
        if len(measured) in (2, 5) and prompt.index not in measured:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(prompt.index)
        return whole(host, prompt, *rest)

    monkeypatch.setattr(study_module, "_rows_of", failing)
    out = tmp_path / "study"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            onset_study(model, PROMPTS, out=out, **SETTINGS)
        partly = OnsetStudy.load(out)
        assert 0 < partly.n_prompts < len(PROMPTS)
    (out / "prompts" / "00005.parquet.123.tmp").write_bytes(b"half a file")  # of a run killed while it wrote
    same(onset_study(model, PROMPTS, out=out, **SETTINGS), study)
    done = [index for index in measured if index is not None]
    assert sorted(done) == list(range(len(PROMPTS))), "no prompt is measured twice"
    assert not list(out.rglob("*.tmp"))


def test_two_shares_make_one_study(study, model, tmp_path) -> None:
    out = tmp_path / "study"
    first = onset_study(model, PROMPTS, out=out, share=(1, 2), **SETTINGS)
    assert 0 < first.n_prompts < len(PROMPTS)
    same(onset_study(model, PROMPTS, out=out, share=(2, 2), **SETTINGS), study)


def test_another_study_in_the_same_folder_is_refused(model, tmp_path) -> None:
    out = tmp_path / "study"
    onset_study(model, PROMPTS[:1], out=out, **SETTINGS)
    for changed, words_ in (
        ({"seed": 1}, "there 0, asked for 1"),
        ({"n_foreign": 1}, "n_foreign"),
        ({"reference": REFERENCE[:-1]}, "reference: there"),
    ):
        with pytest.raises(ValueError, match=words_):
            onset_study(model, PROMPTS[:1], out=out, **{**SETTINGS, **changed})
    with pytest.raises(ValueError, match="studied: there"):
        onset_study(model, PROMPTS[:2], out=out, **SETTINGS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="something other than a study"):
        onset_study(model, PROMPTS[:1], out=tmp_path / "other", **SETTINGS)


def test_a_prompt_that_is_its_own_reference_is_refused(model, tmp_path) -> None:
    with pytest.raises(ValueError, match="none of the prompts that are studied"):
        onset_study(model, REFERENCE[:1], out=tmp_path / "study", **SETTINGS)


def test_a_prompt_without_an_eligible_position_is_noted_and_left_out(model, tmp_path) -> None:
    none = onset_study(model, PROMPTS[:2], out=tmp_path / "study", **{**SETTINGS, "min_prob": 1.0})
    assert none.n_pairs == 0
    assert len(list((tmp_path / "study" / "prompts").iterdir())) == 2
    with pytest.raises(ValueError, match="no pair yet"):
        none.verdict()


def test_the_study_leaves_the_model_as_it_was(study, model) -> None:
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_dict.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_command(model, study, tmp_path, monkeypatch, capsys) -> None:
    from iglens_tl import loading

    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: model)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (tmp_path / "r.txt").write_text("\n".join(REFERENCE))
    out, page, file = (str(tmp_path / name) for name in ("study", "page.md", "study.parquet"))
    given = [str(tmp_path / "p.jsonl"), "--reference", str(tmp_path / "r.txt"), "--out", out, "--min-prob", "0.02"]
    assert main(["study", *given, "--save", file]) == 0
    assert "OnsetStudy" in capsys.readouterr().out
    same(OnsetStudy.load(file), study)
    monkeypatch.setattr(OnsetStudy, "to_markdown", lambda self, departures: f"a page of {self.n_pairs} pairs")
    assert main(["study", "--out", out, "--page", page]) == 0
    assert (tmp_path / "page.md").read_text() == f"a page of {study.n_pairs} pairs"


@pytest.mark.parametrize(
    ("words_", "said"),
    [
        (["p.txt", "--out", "x"], "--reference is missing"),
        (["--out", "nowhere"], "holds no study"),
        (["absent.txt", "--reference", "absent.txt", "--out", "x"], "no file 'absent.txt'"),
        (["p.txt", "--reference", "r.txt", "--out", "x", "--share", "3/2"], "I/N"),
    ],
)
def test_the_command_refuses_before_it_loads(words_, said, capsys) -> None:
    assert main(["study", *words_]) == 2
    assert said in capsys.readouterr().err
