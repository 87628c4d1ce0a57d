"""The long table, and CSV and JSON that give every text back."""

import csv
import io
import json

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_results import NAN, make, one, rich

AWKWARD = [
    "a\nb",
    "\r",
    "\r\n",
    "\t",
    ",",
    '"',
    '""',
    "'",
    "'=x",
    "=1+1",
    "+1",
    "-1",
    "@x",
    " =1",
    "",
    " ",
    "NA",
    "null",
]
AWKWARD += [
    "1",
    "1.0",
    "007",
    "True",
    "<s>",
    "\\",
    "\\n",
    "\u2028",
    "\x85",
    "東京",
    "🙂",
    "\uff1d1",
    "\ufeff",
    "#",
    "\x1b[1m",
]


def with_tokens(texts):
    """One prompt with these token strings, each also the target."""
    return make([[[0.0] * len(texts)], [[1.0] * len(texts)]], token_strings=(tuple(texts),), targets=[list(texts)])


def slow_rows(result):
    for b in range(result.mask.shape[0]):
        for p in range(result.mask.shape[1]):
            for k in range(result.n_segments):
                if result.mask[b, p]:
                    place = int(result.positions[b, p])
                    yield (
                        b,
                        place,
                        result.token_strings[b][place],
                        int(result.tokens[b, place]),
                        result.target_strings[b][p],
                        result.segment_labels[k],
                        result.state_labels[k],
                        result.state_labels[k + 1],
                        result.hidden_states[k],
                        float(result.attribution[k, b, p]),
                        float(result.values[k, b, p]),
                        float(result.values[k + 1, b, p]),
                        result.unit,
                        result.metric,
                    )


def test_the_table_equals_its_loop():
    result = rich()
    frame = result.to_dataframe()
    columns = frame.drop(columns=["target_id", "incorrect", "incorrect_id"])
    text = ["token", "token_id", "target", "segment", "start", "end", "hidden_state"]
    assert list(columns) == ["batch", "position", *text, "credit", "value_start", "value_end", "unit", "metric"]
    rows = [tuple(None if x is pd.NA else x for x in row) for row in columns.astype(object).itertuples(index=False)]
    assert rows == list(slow_rows(result))


def test_dtypes():
    dtypes = rich().to_dataframe().dtypes.astype(str).to_dict()
    assert {name: dtypes[name] for name in ("batch", "position", "incorrect_id")} == dict.fromkeys(
        ("batch", "position", "incorrect_id"), "int64"
    )
    assert {dtypes[name] for name in ("credit", "value_start", "value_end")} == {"float64"}
    assert dtypes["hidden_state"] == dtypes["token_id"] == "Int64"
    assert str(one([0, 1]).to_dataframe()["target_id"].dtype) == "int64"


def test_sets_are_named_by_all_their_ids():
    frame = rich().to_dataframe()
    assert frame.groupby(["batch", "position"])["target_id"].first().tolist() == ["5|7", "6", "5|7", "8", "5|7"]


def test_a_pivot_keeps_the_order_of_the_layers_and_repeated_tokens_apart():
    result = make(
        [[[0.1 * i + p for p in range(3)]] for i in range(13)], token_strings=(("a", "the", "a"),), targets=[["a"] * 3]
    )
    frame = result.to_dataframe()
    pivot = frame.pivot(index=["position", "token_id"], columns="segment", values="credit")
    assert [str(label) for label in pivot.columns] == [str(i) for i in range(12)]
    assert pivot.shape == (3, 12)
    assert [frame[name].max() for name in ("segment", "start", "end")] == ["11", "11_pre", "final_post"]
    assert frame.sort_values("segment", kind="stable")["segment"].tolist()[-1] == "11"


def test_a_cache_without_tokens_has_no_token_text():
    frame = one([0, 1], tokens=None, token_mask=None, token_strings=None).to_dataframe()
    assert frame["token"].isna().all()
    assert frame["token_id"].isna().all()


def test_a_fully_masked_result_is_an_empty_table(tmp_path):
    result = make([[[0.0]], [[1.0]]], mask=[[False]])
    assert len(result.to_dataframe()) == 0
    assert len(result.onsets()) == 0
    result.to_json(tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == []
    result.to_csv(tmp_path / "x.csv")
    assert len(pd.read_csv(tmp_path / "x.csv")) == 0


def read_csv(path):
    return pd.read_csv(path, keep_default_na=False, dtype={"token": str, "target": str})


def without_apostrophe(texts):
    return [text[1:] if text.startswith("'") else text for text in texts]


def test_csv_gives_every_row_and_text_back(tmp_path):
    path = tmp_path / "x.csv"
    with_tokens(AWKWARD).to_csv(path, spreadsheet_safe=False)
    frame = read_csv(path)
    assert frame["token"].tolist() == AWKWARD
    assert frame["target"].tolist() == AWKWARD


def test_csv_starts_no_formula_and_the_apostrophe_can_be_taken_away(tmp_path):
    path = tmp_path / "x.csv"
    with_tokens(AWKWARD).to_csv(path)
    texts = read_csv(path)["token"].tolist()
    assert [text for text in texts if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))] == []
    assert without_apostrophe(texts) == AWKWARD


def test_csv_numbers_come_back_exactly(tmp_path):
    path = tmp_path / "x.csv"
    result = rich()
    result.to_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        frame = pd.DataFrame(csv.DictReader(file))
    expected = result.to_dataframe()
    for name in ("credit", "value_start", "value_end"):
        assert [float(text) for text in frame[name]] == expected[name].tolist()
    assert [text == "" for text in frame["hidden_state"]] == expected["hidden_state"].isna().tolist()
    assert frame["token"].tolist()[12] == "\\ud800"


def test_json_gives_every_row_and_text_back_lone_surrogates_too(tmp_path):
    path = tmp_path / "x.json"
    texts = [*AWKWARD, "\ud800", "\udfff\ud800"]
    with_tokens(texts).to_json(path)
    assert [row["token"] for row in json.loads(path.read_text("ascii"))] == texts


def test_json_has_null_for_what_is_no_number(tmp_path):
    path = tmp_path / "x.json"
    one([0.0, NAN, float("inf")], hidden_states=(None, 2)).to_json(path)
    rows = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [(row["hidden_state"], row["value_start"], row["value_end"]) for row in rows] == [
        (None, 0.0, None),
        (2, None, None),
    ]


def test_writers_take_an_open_stream():
    stream = io.StringIO(newline="")
    with_tokens(["\ud800", "b"]).to_csv(stream)
    with_tokens(["\ud800", "b"]).to_json(stream)
    stream.getvalue().encode("utf-8")
    assert stream.getvalue().startswith('"batch","position","token"')


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5))
def test_csv_and_json_round_trip_any_text(texts):
    result = with_tokens(texts)
    stream = io.StringIO(newline="")
    result.to_csv(stream)
    rows = list(csv.reader(io.StringIO(stream.getvalue(), newline="")))
    assert without_apostrophe([row[2] for row in rows[1:]]) == texts
    stream.seek(0)
    assert without_apostrophe(read_csv(stream)["token"].tolist()) == texts
    stream = io.StringIO()
    result.to_json(stream)
    assert [row["token"] for row in json.loads(stream.getvalue())] == texts
