"""`run_dataset` on every kind of input: the rows are those of `ig_lens`, what cannot be read or run is named, and the folder
of another run is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from iglens_tl import NEXT, TOP, TokenSet, ig_lens, run_dataset, summarize
from iglens_tl import _batches as batches
from iglens_tl import dataset as dataset_module
from iglens_tl._shard_rows import COLUMNS
from iglens_tl._shards import RunFolder
from tests.subjects import D_MODEL, KINDS, each_kind, fresh, one_kind, speaking, tiny

TEXTS = ["w05 w06 w07", "w11", "w20 w21 w22 w23 w24", "w30 w31", "w06 w06 w06 w06"]
TARGETS = ["w09", "w10", "w12", "w13", "w14"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return speaking(KINDS[0], tmp_path_factory.mktemp("tokenizer"))


def rows(out: Path, good: bool = True) -> Any:
    """The rows of a folder as a data frame, in the order of the data; those of prompts that did not fail, or the others."""
    frame = parquet.read_table(out).to_pandas()
    frame = frame[frame["error"].isna() == good]
    return frame.sort_values(["prompt_index", "position", "segment_index"]).reset_index(drop=True)


def assert_rows_of(frame: Any, result: Any) -> None:
    """All that the long table of a result says of tokens and credits (float32 noise of another batch: 2e-7 measured)."""
    expected = result.to_dataframe()
    assert frame["prompt_index"].tolist() == expected["batch"].tolist()
    for name in ("token", "token_id", "target", "segment", "start", "end", "hidden_state", "unit", "metric"):
        assert [None if pandas.isna(entry) else entry for entry in frame[name]] == [
            None if pandas.isna(entry) else entry for entry in expected[name]
        ], name
    for name in ("credit", "value_start", "value_end"):
        assert frame[name].tolist() == pytest.approx(expected[name].tolist(), abs=1e-6), name
    assert frame["position"].tolist() == expected["position"].tolist()


# --- what goes in --------------------------------------------------------------------------------------------------


def as_list(folder: Path) -> Any:
    return [{"prompt": text, "target": target} for text, target in zip(TEXTS, TARGETS, strict=True)]


def as_json_lines(folder: Path, ending: str = ".jsonl") -> Any:
    path = folder / f"rows{ending}"
    path.write_text("".join(json.dumps(row) + "\n" for row in as_list(folder)), encoding="utf-8")
    return path


def as_json(folder: Path) -> Any:
    return as_json_lines(folder, ".json")


def as_parquet(folder: Path) -> Any:
    path = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(as_list(folder)), path)
    return str(path)


def as_hf_dataset(folder: Path) -> Any:
    import datasets

    return datasets.Dataset.from_list(as_list(folder))


@pytest.mark.parametrize("form", [as_list, as_json_lines, as_json, as_parquet, as_hf_dataset])
def test_rows_with_columns(form: Any, model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, form(tmp_path), tmp_path / "out")
    assert summary.is_complete
    assert len(summary.failures) == 0
    assert_rows_of(rows(tmp_path / "out"), ig_lens(model, TEXTS, targets=TARGETS))


def test_a_text_file_has_a_prompt_a_line(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff".encode() + "\r\n".join(TEXTS).encode())
    run_dataset(model, path, tmp_path / "out", batch_size=2)
    assert_rows_of(rows(tmp_path / "out"), ig_lens(model, TEXTS))


def test_the_same_rows_in_another_form_are_the_same_data(model: Any, tmp_path: Path) -> None:
    run_dataset(model, as_list(tmp_path), tmp_path / "out")
    before = RunFolder(tmp_path / "out").shards()
    for form in (as_json_lines, as_parquet, as_hf_dataset):
        run_dataset(model, form(tmp_path), tmp_path / "out")
    assert RunFolder(tmp_path / "out").shards() == before


def test_columns_have_the_names_that_are_given(model: Any, tmp_path: Path) -> None:
    data = [
        {"q": text, "right": target, "wrong": "w40", "target": "w41"}
        for text, target in zip(TEXTS, TARGETS, strict=True)
    ]
    names = {"prompt_column": "q", "target_column": "right", "incorrect_column": "wrong"}
    run_dataset(model, data, tmp_path, metric="logit", **names)
    expected = ig_lens(model, TEXTS, targets=TARGETS, incorrect_targets="w40", metric="logit")
    assert_rows_of(rows(tmp_path), expected)
    assert set(rows(tmp_path)["incorrect"]) == {"w40"}
    assert set(rows(tmp_path)["incorrect_id"]) == {40}


def test_token_ids_are_run_as_they_are(model: Any, tmp_path: Path) -> None:
    """The pad token (4) at an end of a prompt is a token of it: a data set's ids bring no padding."""
    data = [[4, 4, 9], torch.tensor([9, 4, 4]), np.array([7, 8, 9]), {"prompt": (9,)}]
    run_dataset(model, data, tmp_path)
    frame = rows(tmp_path)
    assert frame.groupby("prompt_index")["position"].first().tolist() == [2, 2, 2, 0]
    for index, ids in enumerate([[4, 4, 9], [9, 4, 4], [7, 8, 9], [9]]):
        alone = ig_lens(model, torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        assert frame[frame["prompt_index"] == index]["credit"].tolist() == pytest.approx(
            alone.attribution.flatten().tolist(), abs=1e-6
        )


CALLS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "every next token": {"targets": NEXT, "positions": None},
    "one target, less another": {"targets": "w09", "incorrect_targets": 10, "positions": [0, -1]},
    "a list of targets": {"targets": TARGETS},
    "a set": {"targets": TokenSet(["w09", "w10"]), "metric": "log_odds"},
    "less the most probable": {"targets": "w02", "incorrect_targets": TOP, "metric": "log_prob"},
    "segments and a baseline": {"layers": 2, "baseline": "mean", "positions": slice(0, 2)},
    "the halves of blocks": {"incl_mid": True, "baseline": "zero", "dtype": torch.float64},
    "a baseline a prompt": {"baseline": torch.linspace(-1, 1, 5 * 32).reshape(5, 32)},
    "integrated": {"estimator": "midpoint", "n_steps": 3, "max_memory": "1MB"},
    "through a lens": {"lens": lambda state, index: state * 1.0, "prepend_bos": False},
}


@pytest.mark.parametrize("name", CALLS)
def test_keywords_mean_what_they_mean_to_ig_lens(name: str, model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path, batch_size=3, **CALLS[name])
    expected = ig_lens(model, TEXTS, **CALLS[name])
    frame = rows(tmp_path)
    assert_rows_of(frame, expected)
    per_token = frame.drop_duplicates(["prompt_index", "position"])
    assert per_token["total"].tolist() == pytest.approx(expected.total[expected.mask].tolist(), abs=1e-6)
    assert per_token["model_value"].tolist() == pytest.approx(expected.model_value[expected.mask].tolist(), abs=1e-6)
    assert per_token["gap"].tolist() == pytest.approx(expected.gap[expected.mask].tolist(), abs=1e-6)


def test_a_tensor_of_targets_has_a_row_a_prompt(model: Any, tmp_path: Path) -> None:
    targets = torch.arange(10).reshape(5, 2) + 20
    run_dataset(model, TEXTS, tmp_path, targets=targets.numpy(), positions=[0, -1], batch_size=2)
    assert_rows_of(rows(tmp_path), ig_lens(model, TEXTS, targets=targets, positions=[0, -1]))


@each_kind
def test_each_way_into_transformer_lens(kind: str, tmp_path: Path) -> None:
    subject = tiny(kind)
    prompts = [[3, 14, 15], [9, 26], [5]]
    run_dataset(subject, prompts, tmp_path)
    assert_rows_of(rows(tmp_path), ig_lens(subject, prompts))


# --- what comes out ------------------------------------------------------------------------------------------------


def test_the_columns_are_the_documented_ones(model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path, targets=[*TARGETS[:4], TokenSet(["w09", "w10"])])
    assert parquet.read_table(tmp_path).column_names == list(COLUMNS)
    page = (Path(__file__).parent.parent / "docs" / "datasets.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []
    frame = rows(tmp_path)
    last = frame[frame["prompt_index"] == 4].iloc[0]
    assert list(last["target_ids"]) == [9, 10]
    assert np.isnan(last["target_id"])
    assert frame.iloc[0]["target_id"] == 9
    assert frame["prompt_hash"].nunique() == 5
    assert frame["segment_index"].tolist() == [0, 1, 2] * 5


def test_onsets_and_tops_are_those_of_the_result(model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path, positions=None, targets=NEXT)
    result = ig_lens(model, TEXTS, positions=None, targets=NEXT)
    tokens = rows(tmp_path).drop_duplicates(["prompt_index", "position"])
    for rule in ("mass", "crossing", "peak", "rank"):
        expected = result.onsets()[rule].tolist()
        assert [None if label != label else label for label in tokens[f"onset_{rule}"]] == expected
    tops = result.is_top.permute(1, 2, 0)[result.mask]
    assert rows(tmp_path)["is_top_start"].tolist() == tops[:, :-1].flatten().tolist()
    assert rows(tmp_path)["is_top_end"].tolist() == tops[:, 1:].flatten().tolist()


def test_a_shard_says_what_made_it(model: Any, tmp_path: Path) -> None:
    from iglens_tl._shards import read_about

    run_dataset(model, TEXTS, tmp_path)
    (shard,) = RunFolder(tmp_path).shards()
    about = read_about(shard)
    assert about["prompts"] == [0, 1, 2, 3, 4]
    assert about["failed"] == []
    assert about["provenance"]["torch"] == torch.__version__


def test_nothing_is_left_behind_on_the_model(model: Any, tmp_path: Path) -> None:
    hooks = {name: len(point.fwd_hooks) for name, point in model.hook_dict.items()}
    run_dataset(model, TEXTS, tmp_path)
    assert {name: len(point.fwd_hooks) for name, point in model.hook_dict.items()} == hooks


# --- batches -------------------------------------------------------------------------------------------------------


def test_prompts_of_about_one_length_run_together(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def watched(model: Any, tokens: Any, *, attention_mask: Any, **keywords: Any) -> Any:
        seen.append(attention_mask.sum(1).tolist())
        return ig_lens(model, tokens, attention_mask=attention_mask, **keywords)

    monkeypatch.setattr(dataset_module, "ig_lens", watched)
    data = [[5] * length for length in (1, 9, 2, 8, 3, 7, 4, 6)]
    run_dataset(model, data, tmp_path, batch_size=3)
    assert seen == [[9, 8, 7], [6, 4, 3], [2, 1]]


def test_long_prompts_run_with_fewer(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LOGIT_BYTES", 4 * 50 * 20)  # logits of 20 tokens
    run_dataset(model, [[5] * length for length in (25, 9, 8, 5, 5, 5, 5, 5)], tmp_path)
    sizes = [len(parquet.read_table(path)["prompt_index"].unique()) for path in RunFolder(tmp_path).shards()]
    assert sorted(sizes) == [1, 1, 2, 4]  # of 25; 5; 9 and 8; 5 four times


def test_windows_do_not_mix(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW", 2)
    run_dataset(model, TEXTS, tmp_path)
    assert [path.name for path in RunFolder(tmp_path).shards()] == [
        "prompts-000000000-n2.parquet",
        "prompts-000000002-n2.parquet",
        "prompts-000000004-n1.parquet",
    ]
    assert_rows_of(rows(tmp_path), ig_lens(model, TEXTS))


# --- rows that fail ------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_or_run_is_named_and_the_others_are_not_touched(model: Any, tmp_path: Path) -> None:
    bad: list[tuple[bytes, str]] = [
        (b'{"prompt": "w05", "target": ', "the line is no JSON"),
        (b"", "the line is empty"),
        (b'"\xff"', "the line is not UTF-8"),
        (b'{"prompt": 3.5, "target": "w09"}', "a prompt must be text or a list of token ids, got 3.5"),
        (b'{"text": "w05"}', "there is no 'prompt'; there is 'text'"),
        (b'{"prompt": "w05"}', "the row has no target, and others have one"),
        (b'{"prompt": "w05", "target": "w09 w10"}', "targets must be exactly one token; 'w09 w10' is 2"),
        (b'{"prompt": "w05", "target": {"a": 1}}', "the target is none: it must be a token string"),
        (b'{"prompt": "w05", "target": 50}', "token ids must lie in [0, 50)"),
        (b'{"prompt": [], "target": "w09"}', "holds no tokens"),
        (b'{"prompt": [5, 99], "target": "w09"}', "token ids must lie in [0, 50)"),
        (json.dumps({"prompt": [5] * 400, "target": "w09"}).encode(), "the prompt has 400 tokens and the model takes"),
        (b'{"prompt": [true, false], "target": "w09"}', "a prompt must be text or a list of token ids"),
    ]  # fmt: skip
    good = [json.dumps(row).encode() for row in as_list(tmp_path)]
    lines = [good[0], *(line for line, _ in bad), *good[1:]]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    summary = run_dataset(model, tmp_path / "rows.jsonl", tmp_path / "out", batch_size=4)
    assert summary.is_complete
    found = dict(zip(summary.failures["prompt_index"], summary.failures["error"], strict=True))
    assert list(found) == list(range(1, len(bad) + 1))
    for (line, message), reason in zip(bad, found.values(), strict=True):
        assert message in reason, line
    frame = rows(tmp_path / "out")
    assert frame["prompt_index"].unique().tolist() == [0, *range(len(bad) + 1, len(lines))]
    expected = ig_lens(model, TEXTS, targets=TARGETS)
    assert frame["credit"].tolist() == pytest.approx(expected.to_dataframe()["credit"].tolist(), abs=1e-6)
    failed = rows(tmp_path / "out", good=False)
    assert failed["credit"].isna().all()
    assert failed["segment"].isna().all()


@each_kind
def test_a_prompt_that_spoils_its_batch_fails_alone(kind: str, tmp_path: Path) -> None:
    """A token whose embedding is NaN: the others of its batch run again, one by one, with the numbers they have alone."""
    subject = fresh(kind).model
    with torch.no_grad():
        subject.embed.W_E[13] = float("nan")
    data = [[5, 6, 7], [5, 13, 7], [8, 9, 10]]
    summary = run_dataset(subject, data, tmp_path)
    assert summary.failures["prompt_index"].tolist() == [1]
    assert "NaN or infinite" in summary.failures["error"][0]
    assert "prompt 1 position 2" in summary.failures["error"][0]
    alone = [ig_lens(subject, torch.tensor([ids])).attribution.flatten().tolist() for ids in (data[0], data[2])]
    assert rows(tmp_path)["credit"].tolist() == [credit for credits in alone for credit in credits]


def test_an_error_of_the_machine_is_named_with_its_type(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(model: Any, tokens: Any, **keywords: Any) -> Any:
        if tokens.shape[1] > 4 or len(tokens) > 1:
            raise RuntimeError("not enough memory:\n you tried to allocate 8 GB")
        return ig_lens(model, tokens, **keywords)

    monkeypatch.setattr(dataset_module, "ig_lens", crowded)
    summary = run_dataset(model, TEXTS, tmp_path, prepend_bos=False)
    assert dict(summary.failures.itertuples(index=False)) == {
        2: "RuntimeError: not enough memory: you tried to allocate 8 GB"
    }


def test_an_error_that_ends_all_computing_ends_the_run(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(RuntimeError):
        pass

    def lost(*args: Any, **keywords: Any) -> Any:
        raise Lost("device-side assert triggered")

    monkeypatch.setattr(torch, "AcceleratorError", Lost, raising=False)
    monkeypatch.setattr(dataset_module, "ig_lens", lost)
    with pytest.raises(Lost):
        run_dataset(model, TEXTS, tmp_path)
    assert summarize(tmp_path).n_done == 0


# --- what is refused before anything runs --------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no rows": ([], {}, ValueError, "has no rows"),
    "a prompt, not a list": ("w05 w06", {}, FileNotFoundError, r"a single prompt goes in a list"),
    "an iterator": (iter(TEXTS), {}, TypeError, "must be a list"),
    "no usable row": ([{"text": "w05"}] * 3, {}, ValueError,
        r"not one of the 3 rows.*row 0: there is no 'prompt'.*prompt_column="),
    "two sources of targets": ([{"prompt": "w05", "target": "w06"}], {"targets": "w07"}, ValueError,
        "have a column 'target', and targets= came"),
    "a list that is short": (TEXTS, {"targets": TARGETS[:3]}, ValueError, "one entry a prompt: 5 prompts, 3 entries"),
    "a baseline that is short": (TEXTS, {"baseline": torch.zeros(3, 32)}, ValueError, "baseline must have one entry a prompt"),
    "TOP in a list": (TEXTS, {"targets": [TOP] * 5}, TypeError, "TOP and NEXT are for all prompts"),
    "a target of two tokens": (TEXTS, {"targets": "w05 w06"}, ValueError, "exactly one token"),
    "NEXT of the last": (TEXTS, {"targets": NEXT}, ValueError, "positions=None"),
    "a metric": (TEXTS, {"metric": "probability"}, ValueError, "metric must be one of"),
    "an estimator": (TEXTS, {"estimator": "idgi"}, ValueError, "estimator must be one of"),
    "steps": (TEXTS, {"n_steps": 0}, ValueError, "n_steps must be at least 1"),
    "layers": (TEXTS, {"layers": [7]}, ValueError, "layers must name states"),
    "a baseline": (TEXTS, {"baseline": "mask"}, ValueError, "baseline must be"),
    "memory": (TEXTS, {"max_memory": "much"}, ValueError, "max_memory"),
    "a batch of none": (TEXTS, {"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    "a set of logits": (TEXTS, {"targets": TokenSet([5, 6]), "metric": "logit"}, ValueError, "needs single tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_for_every_prompt_is_refused(name: str, model: Any, tmp_path: Path) -> None:
    prompts, keywords, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run_dataset(model, prompts, tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_run_is_refused_and_every_difference_named(model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path)
    before = {path: path.read_bytes() for path in RunFolder(tmp_path).shards()}
    with pytest.raises(
        ValueError, match=r"another run: data: rows 5 there, 4 here, data: sha256 .*Choose another folder"
    ):
        run_dataset(model, TEXTS[:4], tmp_path)
    differences = r"settings: layers None there, 2 here, settings: metric 'prob' there, 'log_prob' here"
    with pytest.raises(ValueError, match=differences):
        run_dataset(model, TEXTS, tmp_path, metric="log_prob", layers=2)
    with pytest.raises(ValueError, match=r"targets 'TOP' there, 'w05' here"):
        run_dataset(model, TEXTS, tmp_path, targets="w05")
    assert {path: path.read_bytes() for path in RunFolder(tmp_path).shards()} == before


@each_kind
def test_another_model_of_the_same_name_is_refused(kind: str, tmp_path: Path) -> None:
    subject = fresh(kind).model
    run_dataset(subject, [[3, 4]], tmp_path)
    run_dataset(subject, [[3, 4]], tmp_path)
    with (
        subject.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda state, hook: state)]),
        pytest.raises(ValueError, match=r"model: hooks \[\] there, \['blocks.1"),
    ):
        run_dataset(subject, [[3, 4]], tmp_path)
    with torch.no_grad():
        for parameter in subject.parameters():
            parameter.mul_(1.001)
    with pytest.raises(ValueError, match=r"model: weights '\w+' there, '\w+' here"):
        run_dataset(subject, [[3, 4]], tmp_path)


def test_a_folder_with_other_parquet_files_is_refused(model: Any, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match=r"mine\.parquet"):
        run_dataset(model, TEXTS, tmp_path)
    assert not (tmp_path / "_run.json").exists()


def test_a_shard_that_is_damaged_foreign_or_there_twice_is_named(model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path / "one", batch_size=3)
    run_dataset(model, TEXTS, tmp_path / "two", layers=1)
    first, second = RunFolder(tmp_path / "one").shards()
    whole = first.read_bytes()
    first.write_bytes(whole[:-9])
    for call in (lambda: run_dataset(model, TEXTS, tmp_path / "one"), lambda: summarize(tmp_path / "one")):
        with pytest.raises(ValueError, match=rf"{first.name} is no whole Parquet file.*Delete it"):
            call()
    (foreign,) = RunFolder(tmp_path / "two").shards()
    first.write_bytes(foreign.read_bytes())
    with pytest.raises(ValueError, match="a shard of another run"):
        run_dataset(model, TEXTS, tmp_path / "one")
    parquet.write_table(pa.table({"a": [1]}), first)
    with pytest.raises(ValueError, match="no shard of a run"):
        run_dataset(model, TEXTS, tmp_path / "one")
    first.write_bytes(whole)
    second.write_bytes(whole)
    for call in (lambda: run_dataset(model, TEXTS, tmp_path / "one"), lambda: summarize(tmp_path / "one")):
        with pytest.raises(ValueError, match=r"several shards in .* hold prompt \d"):
            call()
    second.unlink()
    assert run_dataset(model, TEXTS, tmp_path / "one", batch_size=3).is_complete


@one_kind
@pytest.mark.parametrize("column", ["prompt_index", "segment", "credit", "onset_peak"])
def test_a_byte_that_changed_in_a_column_is_seen_by_the_summary(column: str, kind: str, tmp_path: Path) -> None:
    """Each page has a checksum (its header and the file's end have none)."""
    run_dataset(tiny(kind), [[3, 4], [5]], tmp_path)
    (shard,) = RunFolder(tmp_path).shards()
    whole = shard.read_bytes()
    chunks = parquet.ParquetFile(shard).metadata.row_group(0)
    chunk = next(c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema == column)
    end = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
    for place in range(end - 8, end):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"{shard.name} is no whole Parquet file.*Delete it"):
            summarize(tmp_path)


def test_a_shard_without_a_column_is_named(model: Any, tmp_path: Path) -> None:
    run_dataset(model, TEXTS, tmp_path)
    (shard,) = RunFolder(tmp_path).shards()
    parquet.write_table(parquet.read_table(shard).drop_columns(["credit"]), shard)
    with pytest.raises(ValueError, match=rf"{shard.name} is no whole Parquet file \(no column credit\)"):
        summarize(tmp_path)


def test_a_record_that_is_none_is_named(model: Any, tmp_path: Path) -> None:
    for text in ("{", "{}", "[]", '{"format": 1}', '{"format": "1", "identity": {}}'):
        (tmp_path / "_run.json").write_text(text)
        for call in (lambda: run_dataset(model, TEXTS, tmp_path), lambda: summarize(tmp_path)):
            with pytest.raises(ValueError, match=r"_run\.json is (damaged|no record of a run)"):
                call()


def test_a_parquet_file_that_is_none_is_named(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as a Parquet file"):
        run_dataset(model, path, tmp_path / "out")


NO_PROMPT_COULD = {
    "positions of another type": ({"positions": "a"}, TypeError, "positions must be"),
    "a position beyond the longest prompt": ({"positions": 5000}, ValueError, "not even a prompt of (32|64) tokens"),
    "a slice beyond it": ({"positions": slice(5000, None)}, ValueError, "not even a prompt of (32|64) tokens"),
    "a tensor with a target a prompt": ({"targets": torch.arange(5)}, ValueError, r"pass a list, or tensor\[:, None\]"),
    "a tensor of too many positions": ({"targets": torch.ones(5, 7).long()}, ValueError, "do not broadcast"),
    "a tensor of fractions": ({"targets": torch.ones(5, 2), "positions": None}, TypeError, "whole-number"),
    "a tensor of no token": ({"targets": torch.tensor([1000])}, ValueError, r"must lie in \[0, 50\)"),
    "a narrow baseline": ({"baseline": torch.ones(5)}, ValueError, "baseline must be"),
    "a narrow baseline a prompt": ({"baseline": torch.ones(5, 7)}, ValueError, "baseline must be"),
    "a baseline of too many positions": ({"baseline": torch.ones(5, 3, D_MODEL)}, ValueError, "baseline must be"),
    "the same token twice": ({"targets": 3, "incorrect_targets": 3}, ValueError, "share token id 3"),
    "TOP twice": ({"targets": TOP, "incorrect_targets": TOP}, ValueError, "are both TOP"),
}


@pytest.mark.parametrize(("settings", "error", "words"), NO_PROMPT_COULD.values(), ids=NO_PROMPT_COULD)
def test_settings_that_no_prompt_could_meet_are_refused_before_anything_runs(
    settings: Any, error: Any, words: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        run_dataset(model, TEXTS, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


SOME_PROMPT_COULD = {
    "as many targets as one prompt has tokens": {"targets": torch.tensor([1, 2, 3, 4, 5]), "positions": None},
    "likewise a prompt": {"targets": torch.ones(5, 5).long(), "positions": None},
    "a target at each of two positions": {"targets": torch.tensor([1, 2]), "positions": [0, -1]},
    "a position that one prompt has": {"positions": 4},
    "a baseline that fits one prompt": {"baseline": torch.ones(5, 5, D_MODEL), "positions": None},
    "what overlaps for one prompt": {"targets": [3, 4, 5, 6, 7], "incorrect_targets": 3},
}


@pytest.mark.parametrize("settings", SOME_PROMPT_COULD.values(), ids=SOME_PROMPT_COULD)
def test_settings_that_some_prompt_can_meet_run(settings: Any, model: Any, tmp_path: Path) -> None:
    summary = run_dataset(model, TEXTS, tmp_path / "out", prepend_bos=False, **settings)
    assert summary.is_complete
    assert len(summary.failures) < len(TEXTS)


def test_a_deleted_shard_is_made_again(model: Any, tmp_path: Path) -> None:
    """The shards are the only record of what is done: deleting one is how failed prompts are tried again."""
    run_dataset(model, TEXTS, tmp_path, batch_size=2)
    whole = rows(tmp_path)
    RunFolder(tmp_path).shards()[1].unlink()
    assert not summarize(tmp_path).is_complete
    run_dataset(model, TEXTS, tmp_path, batch_size=2)
    assert rows(tmp_path).equals(whole)


def test_progress_is_shown_where_it_is_asked_for(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dataset(model, [*TEXTS, [99]], tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "failed=1" in shown
    assert "prompt/s" in shown
    run_dataset(model, [*TEXTS, [99]], tmp_path)
    assert capsys.readouterr().err == ""
