"""The result object: fields that agree, sums, onset rules, selection, equality."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iglens_tl.results import IGLensResult
from tests.made_results import NAN, make, one, refused, rich

LEVELS = [0.0, 0.1, 0.05, 0.3, 0.9]  # credits 0.1, -0.05, 0.25, 0.6


def changed(result, **changes):
    return dataclasses.replace(result, **changes)


# Fields


def test_the_unit_follows_from_the_metric():
    units = {metric: one([0, 1], metric=metric).unit for metric in ("prob", "log_prob", "log_odds", "logit")}
    assert units == {"prob": "probability", "log_prob": "nats", "log_odds": "nats", "logit": "logits"}


def test_off_by_one_between_values_and_attribution_is_refused():
    result = one(LEVELS)
    with refused(r"values \[segment\+1 batch pos\] should be \[5, 1, 1\], but has shape \[4"):
        changed(result, values=result.values[1:])
    with refused(r"attribution.*|values"):
        changed(result, attribution=result.attribution[1:])


@pytest.mark.parametrize(
    "name",
    [
        "total",
        "gap",
        "model_value",
        "is_top",
        "mask",
        "positions",
        "target_ids",
        "incorrect_ids",
        "steps",
        "token_mask",
    ],
)
def test_a_field_of_another_shape_is_named_with_its_shape(name):
    result = rich()
    tensor = getattr(result, name)
    longer = torch.cat([tensor, tensor[..., -1:, :] if tensor.ndim > 1 else tensor], -2)
    with refused(rf"{name} .*has shape \[{', '.join(map(str, longer.shape))}\]"):
        changed(result, **{name: longer})


def test_every_fault_is_named_at_once():
    result = rich()
    with refused(r"(?s)total .*; gap "):
        changed(result, total=result.total[:1], gap=result.gap[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_labels": ("0_pre", "final_post")}, r"state_labels needs 5 entries \(segment\+1\), has 2"),
        ({"segment_labels": ("0",)}, r"segment_labels needs 4 entries \(segment\), has 1"),
        ({"segment_labels": ("0", "1", "1", "3")}, "segment_labels names something twice"),
        ({"hidden_states": (1, 2)}, "hidden_states needs 4 entries"),
        ({"target_strings": ((" a", " b"),)}, r"target_strings needs 2 rows of 3 strings, has rows of \[2\]"),
        ({"token_strings": (("a",), ("b",))}, r"token_strings needs 2 rows of 3 strings, has rows of \[1, 1\]"),
        ({"incorrect_strings": None}, "incorrect_ids and incorrect_strings come together"),
        ({"metric": "p"}, r"metric must be one of \['prob', 'log_prob', 'log_odds', 'logit'\], got 'p'"),
        ({"settings": {"dtype": torch.float32}}, "settings must hold what strict JSON can"),
        ({"settings": {"x": NAN}}, "settings must hold what strict JSON can"),
        ({"provenance": [1]}, "provenance must be a mapping"),
        ({"mask": None}, "mask must be a tensor, got NoneType"),
        ({"total": torch.zeros(2, 3)}, "total must be torch.float64, got torch.float32"),
        ({"gap": torch.zeros(2, 3, dtype=torch.float64)}, "gap must be NaN where mask is False"),
        (
            {"gap": torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)},
            "gap must be a detached tensor on the CPU",
        ),
        ({"gap": torch.zeros(2, 3, dtype=torch.float64, device="meta")}, "gap must be a detached tensor on the CPU"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, "positions must be -1 where mask is False"),
        ({"positions": torch.tensor([[0, 1, 3], [-1, 1, 2]])}, r"positions must lie on the token axis \(length 3\)"),
        ({"positions": torch.tensor([[0, 1, -1], [-1, 1, 2]])}, "positions must lie on the token axis"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with refused(message):
        changed(rich(), **changes)


def test_a_result_cannot_be_changed_and_does_not_share_its_settings():
    given_settings = {"layers": (0, 1)}
    result = one(LEVELS, settings=given_settings)
    given_settings["layers"] = None
    assert result.settings == {"layers": [0, 1]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.metric = "logit"


# Sums


def test_gain_loss_and_monotone_on_known_numbers():
    result = one(LEVELS)
    assert result.n_segments == 4
    assert result.gain.item() == pytest.approx(0.95, abs=1e-15)
    assert result.loss.item() == pytest.approx(-0.05, abs=1e-15)
    assert not result.is_monotone().item()
    assert not result.is_monotone(0.049).item()
    assert result.is_monotone(0.051).item()


def test_a_falling_and_a_flat_trajectory_are_monotone():
    assert one([0.9, 0.5, 0.5, 0.0]).is_monotone().item()
    assert one([0.5, 0.5]).is_monotone().item()
    assert one([0.0, 0.5, 0.5, 0.9]).is_monotone().item()


def test_masked_entries_are_part_of_no_reduction():
    result = rich()
    for reduced in (result.gain, result.loss):
        assert torch.equal(reduced.isnan(), ~result.mask)
    assert not make([[[0.0, 0.0]], [[1.0, 1.0]]], mask=[[True, False]]).is_monotone()[0, 1]
    for rule in ("mass", "peak", "rank"):
        onset = result.onset(rule)
        assert onset.index[1, 0] == -1
        assert onset.labels[1][0] is None
        assert onset.hidden_states[1][0] is None


# Onset


def onset(result, *args):
    found = result.onset(*args)
    assert found.index.shape == result.mask.shape
    return found.labels[0][0]


@pytest.mark.parametrize(("fraction", "label"), [(0.1, "0"), (0.15, "1"), (0.39, "2"), (0.5, "3"), (1.0, "3")])
def test_mass(fraction, label):
    # |credits| 0.1, 0.05, 0.25, 0.6 of 1.0; a decrease counts as mass too
    assert onset(one(LEVELS), "mass", fraction) == label


@pytest.mark.parametrize(
    ("fraction", "label"), [(0.05, "1_pre"), (0.1, "3_pre"), (0.33, "3_pre"), (0.34, "final_post"), (1.0, "final_post")]
)
def test_crossing_must_last_to_the_end(fraction, label):
    # thresholds 0.045 (passed at 0.1, and 0.05 still is above), 0.09 (passed at 0.1, lost at 0.05), 0.297, 0.306, 0.9
    assert onset(one(LEVELS), "crossing", fraction) == label


def test_peak_is_the_largest_gain_not_the_largest_change():
    assert onset(one([0.9, 0.1, 0.3, 0.2]), "peak") == "1"
    assert onset(one([0.0, 0.25, 0.5, 0.5]), "peak") == "0"
    assert onset(one([0.9, 0.5, 0.1]), "peak") is None


def test_rank_must_last_to_the_end():
    tops = torch.tensor([False, True, False, True, True])[:, None, None]
    found = one(LEVELS, is_top=tops).onset("rank")
    assert (found.labels, found.hidden_states, found.index.item()) == ((("3_pre",),), ((3,),), 3)
    assert onset(one(LEVELS, is_top=torch.ones_like(tops)), "rank") == "0_pre"
    assert onset(one(LEVELS, is_top=torch.tensor([True, True, True, True, False])[:, None, None]), "rank") is None


def test_rules_can_disagree_and_are_given_side_by_side():
    result = one([0.0, 0.4, 0.1, 0.4], is_top=torch.tensor([False, True, True, True])[:, None, None])
    frame = result.onsets()
    assert frame[["mass", "crossing", "peak", "rank"]].values.tolist() == [["1", "final_post", "0", "1_pre"]]
    hidden = frame[[f"{rule}_hidden_state" for rule in ("mass", "crossing", "peak", "rank")]]
    assert hidden.values.tolist() == [[2, 3, 1, 1]]


def test_onsets_leaves_out_masked_tokens_and_rules_the_metric_cannot_have():
    frame = rich().onsets()
    assert list(zip(frame["batch"], frame["position"], strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert frame["crossing"].tolist() == [None] * 5
    assert frame["crossing_hidden_state"].isna().all()
    assert frame["mass"].tolist() == ["1", "1", "2", "3", "1"]


def test_what_float32_cannot_hold_has_no_onset():
    for level in (0.0, 1e-45, torch.finfo(torch.float32).tiny):
        result = one([0.0, level / 2, level])
        assert [onset(result, rule) for rule in ("mass", "crossing", "peak", "rank")] == [None] * 4
    assert onset(one([-148.8, -181.4, -258.3, -277.2], metric="log_prob"), "mass") == "1"


@pytest.mark.parametrize("metric", ["log_prob", "log_odds", "logit"])
def test_crossing_is_refused_where_values_are_no_probabilities(metric):
    result = one([-3.0, -1.0], metric=metric)
    with refused(rf"only a probability has: this result holds {metric} \["):
        result.onset("crossing")
    assert result.onset("mass").labels == (("0",),)


def test_crossing_is_refused_for_differences():
    result = rich()
    with refused("differences of prob"):
        result.onset("crossing")
    with refused("differences of prob"):
        one([-0.1, 0.5]).onset("crossing")


def test_unknown_rules_and_fractions_are_refused():
    result = one(LEVELS)
    with refused(r"rule must be one of \['mass', 'crossing', 'peak', 'rank'\], got 'half'"):
        result.onset("half")
    for fraction in (0, 0.0, -1, 1.01, NAN, True):
        with refused(r"fraction must lie in \(0, 1\]"):
            result.onset("mass", fraction)


def test_the_hidden_state_of_a_start_follows_from_its_label():
    labels = {"state_labels": ("zero", "0_pre", "final_post"), "segment_labels": ("base", "0"), "hidden_states": (0, 1)}
    assert one([0.9, 0.8, 0.7], **labels).onset("crossing").hidden_states == ((None,),)
    assert one([0.9, 0.8]).onset("crossing").hidden_states == ((0,),)


def test_onset_reads_well():
    assert repr(one(LEVELS).onset()) == "Onset(mass, fraction 0.5: segment 3)"
    assert repr(one(LEVELS).onset("rank")) == "Onset(rank: state none)"
    assert repr(rich().onset("mass", 0.9)) == "Onset(mass, fraction 0.9: segments [3, 3, 3] [none, 3, 3])"


def slow_mass(credits, fraction):
    whole, running = 0.0, 0.0
    for credit in credits:
        whole += abs(credit)
    for index, credit in enumerate(credits):
        running += abs(credit)
        if whole > 1.2e-38 and running >= fraction * whole:
            return index
    return -1


def slow_crossing(values, fraction):
    found = -1
    for index in reversed(range(len(values))):
        if values[-1] <= 1.2e-38 or values[index] < fraction * values[-1]:
            break
        found = index
    return found


def slow_rank(tops):
    found = -1
    for index in reversed(range(len(tops))):
        if not tops[index]:
            break
        found = index
    return found


probabilities = st.floats(0, 1, allow_subnormal=False).map(lambda x: 0.0 if x < 1e-30 else x)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(probabilities, st.booleans()), min_size=2, max_size=9), st.floats(1e-6, 1))
def test_rules_equal_their_loops(states, fraction):
    values, tops = [value for value, _ in states], [top for _, top in states]
    result = one(values, is_top=torch.tensor(tops)[:, None, None])
    credits = result.attribution.flatten().tolist()
    assert result.onset("mass", fraction).index.item() == slow_mass(credits, fraction)
    assert result.onset("crossing", fraction).index.item() == slow_crossing(values, fraction)
    assert result.onset("rank").index.item() == slow_rank(tops)
    peak = result.onset("peak").index.item()
    assert peak == (credits.index(max(credits)) if max(credits) > 1.2e-38 else -1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1, 1).filter(lambda x: abs(x) > 1e-9), min_size=1, max_size=40))
def test_all_the_mass_is_always_reached(credits):
    values = torch.tensor([0.0, *credits], dtype=torch.float64).cumsum(0)
    assert one(values.tolist(), metric="logit").onset("mass", 1.0).index.item() >= 0


# Selection and equality


def test_select_keeps_the_axes_and_cuts_every_field_alike():
    result = rich()
    part = result.select(batch=-1, pos=[2, 1])
    assert part.attribution.shape == (4, 1, 2)
    assert torch.equal(part.values, result.values[:, 1:, [2, 1]])
    assert torch.equal(part.steps, result.steps[:, :, 1:, [2, 1]])
    assert torch.equal(part.target_ids, result.target_ids[1:, [2, 1]])
    assert torch.equal(part.tokens, result.tokens[1:])
    assert part.token_strings == (result.token_strings[1],)
    assert part.target_strings == ((" cat| dog", " b"),)
    assert part.incorrect_strings == ((" x", " x"),)
    assert part.positions.tolist() == [[2, 1]]
    assert part.answer == "the"


def test_select_takes_slices_and_all():
    result = rich()
    assert result.select().equals(result)
    assert result.select(slice(0, 2), slice(None)).equals(result)
    assert result.select(pos=slice(1, None)).mask.tolist() == [[True, True], [True, True]]


def test_select_refuses_what_is_not_there():
    with pytest.raises(IndexError, match=r"pos has 3 entries; there is no \[3, -4\]"):
        rich().select(pos=[0, 3, -4])
    with pytest.raises(IndexError, match="batch has 2 entries"):
        rich().select(batch=2)


def perturbations():
    result = rich()
    yield "values", result.values + torch.where(result.mask, 1e-16, 0.0)
    yield "target_ids", result.target_ids + 1
    yield "is_top", ~result.is_top
    yield "model_value", None
    yield "model_value", torch.full_like(result.model_value, NAN)
    yield "target_ids", result.target_ids[..., :1]
    yield "steps", result.steps[:, :1]
    yield "state_labels", ("zero", *result.state_labels[1:])
    yield "target_strings", ((" cat| dog", " a", " cat"), ("", " b", " cat| dog"))
    yield "settings", {"baseline": "zero"}
    yield "answer", None


@pytest.mark.parametrize(("name", "value"), list(perturbations()), ids=lambda x: x if isinstance(x, str) else "")
def test_equals_sees_every_field(name, value):
    assert not rich().equals(changed(rich(), **{name: value}))
    assert not changed(rich(), **{name: value}).equals(rich())


def test_equals_does_not_stretch_an_axis():
    narrow = one([0.0, 1.0], steps=torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    assert not narrow.equals(changed(narrow, steps=torch.zeros(1, 2, 1, 1, dtype=torch.float64)))


def test_equals_holds_for_a_copy_only():
    assert rich().equals(rich())
    assert not rich().equals(rich().select(batch=0))
    assert not rich().equals("a result")


# The module


def test_a_result_needs_neither_transformer_lens_nor_transformers_nor_pandas():
    code = (
        "import sys, iglens_tl.results as r; "
        "print([m for m in ('transformer_lens', 'transformers', 'pandas', 'plotly') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_fields_are_those_of_the_contract():
    tensors = "attribution values total gap model_value is_top mask positions target_ids incorrect_ids steps"
    tokens = "tokens token_mask token_strings target_strings incorrect_strings"
    words = "state_labels segment_labels hidden_states metric estimator settings provenance answer"
    assert " ".join(field.name for field in dataclasses.fields(IGLensResult)) == f"{tensors} {tokens} {words}"
