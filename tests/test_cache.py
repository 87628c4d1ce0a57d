"""Attributing a cache that is at hand: what it may hold, what is run, and what is left as it was.

A cache and a run of the model see the same states and read them by the same product, so their results are compared
bit for bit where the target is known beforehand (`assert_same_numbers` says why not otherwise).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from iglens_tl import (
    NEXT,
    IGLensResult,
    MissingActivationError,
    TokenSet,
    direct_logit_attribution,
    doctor,
    ig_lens,
    split,
)
from tests.models import BATCH, TOKENS
from tests.oracles import model_prob
from tests.subjects import (
    D_MODEL,
    N_LAYERS,
    ROWS,
    cached,
    each_kind,
    fresh,
    padded,
    residual_names,
    speaking,
    states_of,
    subject,
    tiny,
    words,
)
from tests.watching import forwards, untouched

NAMES = residual_names()
CLOSE = {"rtol": 0, "atol": 1e-6}
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def residuals(model: Any, tokens: torch.Tensor = BATCH) -> dict[str, torch.Tensor]:
    """The states between blocks as a plain mapping."""
    cache = cached(model, tokens)
    return {name: cache[name] for name in NAMES}


def assert_same_numbers(one: IGLensResult, other: IGLensResult, exact: bool = False) -> None:
    """Bit for bit where `exact`.

    Where a cache's last states say what `TOP` is, they are read by themselves, in a product of other shape: float32 logits of
    size 10 differ by 1e-6 then, and a probability by no more.
    """
    for name in ("attribution", "values"):
        tolerance = 0 if exact else 1e-6
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=tolerance, equal_nan=True)
    assert torch.equal(one.target_ids, other.target_ids)
    assert torch.equal(one.mask, other.mask)
    assert (one.state_labels, one.segment_labels) == (other.state_labels, other.segment_labels)


# --- What a cache may hold ---------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "default": {},
    "all positions": {"positions": None},
    "mid states": {"incl_mid": True},
    "a mean as baseline": {"baseline": "mean", "positions": None},
    "gradients": {"estimator": "midpoint", "n_steps": 3, "positions": [0, -1]},
    "steps of a difference": {"n_steps": 4, "targets": 7, "incorrect_targets": TokenSet([8, 9])},
    "next tokens": {"targets": NEXT, "positions": None},
    "two segments": {"layers": 2, "metric": "log_odds"},
}


@each_kind
@pytest.mark.parametrize("name", CALLS)
def test_a_full_cache_says_what_a_run_says(kind: str, name: str) -> None:
    model = subject(kind).model
    ran = ig_lens(model, BATCH, **CALLS[name])
    read = ig_lens(cached(model, BATCH), BATCH, **CALLS[name])
    assert_same_numbers(read, ran, exact="targets" in CALLS[name])
    assert torch.equal(read.tokens, BATCH)
    assert (ran.settings["source"], read.settings["source"]) == ("forward pass", "cache")


@each_kind
def test_a_cache_of_the_residual_stream_is_enough(kind: str) -> None:
    model = subject(kind).model
    ran = ig_lens(model, BATCH, positions=None)
    slim = cached(model, BATCH, names_filter=NAMES)
    assert_same_numbers(ig_lens(slim, BATCH, positions=None), ran)
    assert_same_numbers(ig_lens(model, BATCH, cache=slim, positions=None), ran)
    assert_same_numbers(ig_lens(model, BATCH, cache=residuals(model), positions=None), ran)
    alone = ig_lens(slim, positions=None)
    assert_same_numbers(alone, ran)
    assert alone.tokens is None
    assert alone.token_strings is None


@each_kind
def test_without_logits_the_last_state_is_read_and_nothing_is_checked(kind: str) -> None:
    model = subject(kind).model
    logits = model(BATCH).detach()
    result = ig_lens(model, cache=residuals(model), positions=None)
    assert torch.equal(result.target_ids[..., 0], logits.argmax(-1))
    assert result.model_value is None
    assert result.settings["checked_against_model"] is False


@each_kind
def test_with_logits_the_last_state_is_checked_against_them(kind: str) -> None:
    model = subject(kind).model
    logits = model(BATCH).detach()
    result = ig_lens(cached(model, BATCH), targets=7, logits=logits, positions=None)
    expected = model_prob(logits, torch.full((2, 6), 7))
    torch.testing.assert_close(result.model_value, expected, **CLOSE)
    torch.testing.assert_close(result.values[-1], result.model_value, **CLOSE)
    assert result.settings["checked_against_model"] is True
    half = ig_lens(cached(model, BATCH), targets=7, logits=logits.half(), positions=None)
    torch.testing.assert_close(half.model_value, expected, rtol=0, atol=5e-3)  # float16 has 3 digits


@each_kind
def test_a_cache_without_a_batch_axis(kind: str) -> None:
    """TRAPS 18."""
    model = subject(kind).model
    logits = model(TOKENS).detach()
    ran = ig_lens(model, TOKENS, positions=None)
    cache = cached(model, TOKENS)
    cache.remove_batch_dim()
    assert_same_numbers(ig_lens(cache, TOKENS, positions=None), ran)
    assert_same_numbers(ig_lens(cache, TOKENS[0], positions=None, logits=logits[0]), ran, exact=True)
    assert_same_numbers(ig_lens(cache, positions=None, logits=logits), ran, exact=True)
    plain = {name: tensor[0] for name, tensor in residuals(model, TOKENS).items()}
    assert_same_numbers(ig_lens(model, TOKENS, cache=plain, positions=None), ran)
    made_so = cached(model, TOKENS, remove_batch_dim=True)
    assert_same_numbers(ig_lens(made_so, TOKENS, positions=None), ran)


@each_kind
@pytest.mark.parametrize(("cut", "kept"), [(-1, [5]), (2, [2]), ((1, 4), [1, 2, 3]), ([0, 5], [0, 5])], ids=str)
def test_a_cache_of_some_positions(kind: str, cut: Any, kept: list[int]) -> None:
    """Within 1e-6: other positions share the matrix product."""
    model = subject(kind).model
    cache = cached(model, BATCH, pos_slice=cut, names_filter=NAMES)
    result = ig_lens(cache, targets=7, positions=None)
    expected = ig_lens(model, BATCH, targets=7, positions=kept)
    torch.testing.assert_close(result.attribution, expected.attribution, **CLOSE)
    assert result.positions.tolist() == [list(range(len(kept)))] * 2


@each_kind
def test_the_state_that_leaves_a_block_is_the_one_that_enters_the_next(kind: str) -> None:
    model = subject(kind).model
    cache = cached(model, BATCH)
    posts = {f"blocks.{i}.hook_resid_post": cache[f"blocks.{i}.hook_resid_post"] for i in range(N_LAYERS)}
    ran = ig_lens(model, BATCH, baseline="zero")
    assert_same_numbers(ig_lens(model, BATCH, cache=posts, baseline="zero"), ran)
    with_first = {**posts, "blocks.0.hook_resid_pre": cache["blocks.0.hook_resid_pre"]}
    assert_same_numbers(ig_lens(model, BATCH, cache=with_first), ig_lens(model, BATCH))
    with pytest.raises(MissingActivationError, match=r"lacks blocks\.0\.hook_resid_pre\. "):
        ig_lens(model, BATCH, cache=posts)


@each_kind
def test_only_the_states_that_are_asked_for_must_be_there(kind: str) -> None:
    model = subject(kind).model
    two = cached(model, BATCH, names_filter=["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"])
    assert_same_numbers(ig_lens(two, BATCH, layers=1), ig_lens(model, BATCH, layers=1))
    last = {"blocks.2.hook_resid_post": residuals(model)["blocks.2.hook_resid_post"]}
    result = ig_lens(model, BATCH, cache=last, layers=1, baseline="zero")
    assert_same_numbers(result, ig_lens(model, BATCH, layers=1, baseline="zero"))
    assert result.state_labels == ("zero", "final_post")


@each_kind
@SIDES
def test_a_padded_batch_in_a_cache(kind: str, side: str) -> None:
    """Within 1e-5 of the prompts alone, as for a run."""
    model = subject(kind).model
    tokens, mask = padded(side)
    cache = cached(model, tokens, attention_mask=mask)
    ran = ig_lens(model, tokens, attention_mask=mask)
    assert_same_numbers(ig_lens(cache, tokens, attention_mask=mask), ran)
    assert_same_numbers(ig_lens(cache, attention_mask=mask), ran)
    for i, row in enumerate(ROWS):
        alone = ig_lens(model, row)
        torch.testing.assert_close(ran.attribution[:, i], alone.attribution[:, 0], rtol=0, atol=1e-5)


@each_kind
@SIDES
@pytest.mark.parametrize("pad", [4, 2, 3])
def test_strings_beside_a_cache_lie_as_the_model_padded_them(kind: str, side: str, pad: int, tmp_path: Path) -> None:
    model = speaking(kind, tmp_path, side, pad=pad)
    texts = [words(row) for row in ROWS]
    with torch.no_grad():
        logits, cache = model.run_with_cache(texts)
    result = ig_lens(cache, texts, positions=None, logits=logits)
    for i, text in enumerate(texts):
        alone = ig_lens(model, text, positions=None)
        here = result.mask[i]
        torch.testing.assert_close(result.attribution[:, i, here], alone.attribution[:, 0], rtol=0, atol=1e-5)
        assert torch.equal(result.tokens[i, here], alone.tokens[0])
    assert (not result.mask[3, 0]) == (side == "left")


@each_kind
def test_lists_of_unequal_length_do_not_tell_the_side(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("left")
    cache = cached(model, tokens, attention_mask=mask)
    with pytest.raises(ValueError, match=r"lists of unequal length.*one tensor, and attention_mask="):
        ig_lens(cache, [row.tolist() for row in ROWS])


# --- Interventions -----------------------------------------------------------------------------------------------


def _zero(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return torch.zeros_like(tensor)


def _shift(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor + torch.linspace(-1, 1, D_MODEL)


def _double_in_place(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor.mul_(2)


INTERVENTIONS = {
    "an attention left out": [("blocks.1.hook_attn_out", _zero)],
    "an MLP left out": [("blocks.0.hook_mlp_out", _zero)],
    "a vector added": [("blocks.2.hook_resid_pre", _shift)],
    "a vector added at the end": [("blocks.2.hook_resid_post", _shift)],
    "the embedding changed": [("hook_embed", _shift)],
    "a state doubled in place": [("blocks.1.hook_resid_pre", _double_in_place)],
}


@each_kind
@pytest.mark.parametrize("name", INTERVENTIONS)
def test_inside_hooks_the_hooked_run_is_attributed(kind: str, name: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    with untouched(model):
        with torch.no_grad(), model.hooks(fwd_hooks=INTERVENTIONS[name]):
            logits, cache = model.run_with_cache(BATCH)
            ran = ig_lens(model, BATCH, targets=7, positions=None)
        read = ig_lens(cache, BATCH, targets=7, positions=None, logits=logits)
    assert_same_numbers(ran, read)
    targets = torch.full((4, 2, 6), 7)
    torch.testing.assert_close(ran.values, head.prob(states_of(cache), targets), **CLOSE)
    torch.testing.assert_close(ran.values[-1], model_prob(logits, targets[-1]), **CLOSE)
    clean = ig_lens(model, BATCH, targets=7, positions=None)
    assert (clean.values[-1] - ran.values[-1]).abs().max() > 1e-3


# --- Other precisions --------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [
        (torch.float64, 1e-6),
        (torch.float16, 5e-3),  # three digits, of which the norm loses one
        (torch.bfloat16, 5e-2),  # two digits
    ],
    ids=str,
)
def test_a_cache_of_another_precision_is_cast(kind: str, dtype: torch.dtype, atol: float) -> None:
    model = subject(kind).model
    logits = model(BATCH).detach()
    ran = ig_lens(model, BATCH, positions=None)
    cache = {name: tensor.to(dtype) for name, tensor in residuals(model).items()}
    result = ig_lens(model, BATCH, cache=cache, positions=None, targets=ran.target_ids[..., 0])
    torch.testing.assert_close(result.values, ran.values, rtol=0, atol=atol)
    assert result.settings["readout_dtype"] == "float32"
    assert result.gap.abs().max() <= 1e-12
    checked = ig_lens(model, BATCH, cache=cache, targets=7, logits=logits)
    assert checked.settings["checked_against_model"]


@each_kind
def test_a_baseline_of_another_precision_is_cast(kind: str) -> None:
    model = subject(kind).model
    baseline = torch.linspace(-1, 1, D_MODEL, dtype=torch.float64)
    results = [
        ig_lens(model, BATCH, targets=7, baseline=baseline.to(dtype)) for dtype in (torch.float64, torch.float32)
    ]
    torch.testing.assert_close(results[0].values, results[1].values, **CLOSE)


# --- What is run, and what is left -------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("name", CALLS)
def test_one_forward_pass_and_none_beside_a_cache(kind: str, name: str) -> None:
    model = subject(kind).model
    cache, plain = cached(model, BATCH), residuals(model)
    logits = model(BATCH).detach()
    with forwards(model) as count:
        ig_lens(model, BATCH, **CALLS[name])
    assert count.runs == 1
    with forwards(model) as count:
        ig_lens(cache, BATCH, **CALLS[name])
        ig_lens(model, BATCH, cache=cache, logits=logits, **CALLS[name])
        ig_lens(model, BATCH, cache={**plain, **{k: v for k, v in cache.items() if "mid" in k}}, **CALLS[name])
    assert count.runs == 0


def _in_place(state: torch.Tensor, index: int) -> torch.Tensor:
    return state.mul_(1 + (index < N_LAYERS))


@each_kind
@pytest.mark.parametrize("arguments", [*CALLS.values(), {"lens": _in_place, "positions": None}], ids=[*CALLS, "lens"])
def test_the_callers_cache_and_baseline_are_left_bit_for_bit(kind: str, arguments: dict[str, Any]) -> None:
    """TRAPS 16: names of a cache share storage, and a write to one is a write to several."""
    model = subject(kind).model
    baseline = torch.linspace(-1, 1, D_MODEL)
    cache, logits = cached(model, BATCH), model(BATCH).detach()
    before = {name: tensor.clone() for name, tensor in cache.items()}
    said = logits.clone()
    ig_lens(cache, BATCH, logits=logits, **arguments)
    ig_lens(cache, BATCH, **{**arguments, "baseline": baseline})
    assert before.keys() == dict(cache.items()).keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in cache.items())
    assert torch.equal(said, logits)
    assert torch.equal(baseline, torch.linspace(-1, 1, D_MODEL))


@each_kind
def test_the_result_shares_no_memory_with_the_cache(kind: str) -> None:
    model = subject(kind).model
    states = residuals(model)  # other activations are views of the weights
    result = ig_lens(model, BATCH, cache=states, positions=None)
    before = result.values.clone()
    for tensor in states.values():
        tensor.zero_()
    assert torch.equal(result.values, before)


# --- Modes of torch ----------------------------------------------------------------------------------------------

GRADIENTS: list[dict[str, Any]] = [
    {},
    {"n_steps": 3},
    {"estimator": "midpoint", "n_steps": 3},
    {"estimator": "gauss_legendre", "n_steps": 3, "dtype": torch.float64, "metric": "log_odds"},
    {"dtype": torch.bfloat16},
    {"baseline": "mean", "estimator": "trapezoid", "lens": lambda state, index: state + 0},
]
EACH_GRADIENT = pytest.mark.parametrize("arguments", GRADIENTS, ids=str)


def tensors_of(result: IGLensResult) -> Iterator[torch.Tensor]:
    return (value for value in vars(result).values() if isinstance(value, torch.Tensor))


@each_kind
@EACH_GRADIENT
def test_inside_inference_mode(kind: str, arguments: dict[str, Any]) -> None:
    model = subject(kind).model
    expected = ig_lens(model, BATCH, **arguments)
    with torch.inference_mode():
        inside = ig_lens(model, BATCH, **arguments)
        cache = model.run_with_cache(BATCH)[1]
        from_cache = ig_lens(cache, BATCH, **arguments)
        assert torch.is_inference_mode_enabled()
    from_inference_cache = ig_lens(cache, BATCH, **arguments)
    for result in (inside, from_cache, from_inference_cache):
        assert_same_numbers(result, expected)
        assert not any(tensor.is_inference() for tensor in tensors_of(result))
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    (inside.attribution * weight).sum().backward()
    assert weight.grad is not None


@each_kind
@EACH_GRADIENT
def test_gradients_disabled_globally_or_frozen_or_free(kind: str, arguments: dict[str, Any]) -> None:
    """TRAPS 33: the same numbers, no `.grad` left on any parameter, results detached."""
    free, frozen = subject(kind).model, fresh(kind).model
    frozen.requires_grad_(False)
    expected = ig_lens(free, BATCH, **arguments)
    with untouched(free), torch.no_grad():
        without = ig_lens(free, BATCH, **arguments)
    with untouched(frozen):
        of_frozen = ig_lens(frozen, BATCH, **arguments)
    torch.set_grad_enabled(False)
    try:
        globally = ig_lens(free, BATCH, **arguments)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    for result in (expected, without, of_frozen, globally):
        assert_same_numbers(result, expected)
        assert not any(tensor.requires_grad for tensor in tensors_of(result))
    assert all(parameter.grad is None for parameter in free.parameters())


@each_kind
@EACH_GRADIENT
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_default_dtype_changes_nothing(kind: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    model = subject(kind).model
    expected = ig_lens(model, BATCH, **arguments)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        result = ig_lens(model, BATCH, **arguments)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(usual)
    assert_same_numbers(result, expected)


@each_kind
def test_deterministic_algorithms_suffice(kind: str) -> None:
    model = subject(kind).model
    expected = [ig_lens(model, BATCH, **arguments) for arguments in GRADIENTS]
    torch.use_deterministic_algorithms(True)
    try:
        results = [ig_lens(model, BATCH, **arguments) for arguments in GRADIENTS]
    finally:
        torch.use_deterministic_algorithms(False)
    for result, other in zip(results, expected, strict=True):
        assert_same_numbers(result, other)


@each_kind
def test_activations_that_track_gradients(kind: str) -> None:
    """A mapping that a user's own hooks filled, without `detach`."""
    model = subject(kind).model
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, hook: Any) -> None:
        kept[hook.name] = tensor

    with model.hooks(fwd_hooks=[(name, keep) for name in NAMES]):
        logits = model(BATCH)
    activations = dict(zip(NAMES, kept.values(), strict=True))
    assert all(tensor.requires_grad for tensor in activations.values())
    with untouched(model):
        result = ig_lens(model, BATCH, cache=activations, logits=logits, baseline=activations[NAMES[0]][0, 0])
    assert not any(tensor.requires_grad for tensor in tensors_of(result))
    assert all(parameter.grad is None for parameter in model.parameters())


def _living() -> tuple[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]  # asks no lazy thing
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@each_kind
@pytest.mark.parametrize("arguments", [{}, {"estimator": "midpoint", "n_steps": 4, "dtype": torch.float64}], ids=str)
def test_a_second_call_keeps_no_more_tensors_than_the_first(kind: str, arguments: dict[str, Any]) -> None:
    """TRAPS 33. Counted, not measured: every tensor alive in the process, and the bytes behind it."""
    model = tiny(kind)
    cache = cached(model, BATCH)
    ig_lens(model, BATCH, positions=None, **arguments)
    ig_lens(cache, BATCH, positions=None, **arguments)
    before = _living()
    ig_lens(model, BATCH, positions=None, **arguments)
    ig_lens(cache, BATCH, positions=None, **arguments)
    doctor(model)
    assert _living() == before


@each_kind
def test_a_failed_call_keeps_no_tensors(kind: str) -> None:
    model = tiny(kind)

    def fail() -> None:
        with pytest.raises(ValueError, match="share token id"):
            ig_lens(model, BATCH, targets=7, incorrect_targets=7)

    fail()
    before = _living()
    fail()
    assert _living() == before


@each_kind
def test_a_result_shares_no_memory_with_what_it_was_made_of(kind: str) -> None:
    model = subject(kind).model
    ids, mask = BATCH.clone(), torch.ones_like(BATCH, dtype=torch.bool)
    cache = residuals(model)
    result = ig_lens(model, ids, cache=cache, attention_mask=mask, targets=7, positions=None)
    kept = {name: getattr(result, name).clone() for name in ("tokens", "token_mask", "values", "attribution")}
    ids.zero_(), mask.zero_()
    for tensor in cache.values():
        tensor.zero_()
    for name, tensor in kept.items():
        assert torch.equal(getattr(result, name), tensor), name


@each_kind
@pytest.mark.parametrize("unit", ["block", "sublayer"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_named_before_parts_are_summed(kind: str, unit: str, bad: float) -> None:
    model = subject(kind).model
    cache = dict(cached(model, BATCH))
    name = "blocks.1.hook_resid_post" if "blocks.2.hook_resid_pre" not in cache else "blocks.2.hook_resid_pre"
    cache[name] = cache[name].clone()
    cache[name][1, -1, 3] = bad
    for call in (direct_logit_attribution, split):
        with pytest.raises(ValueError, match=r"the state 2_pre holds NaN or infinite numbers at prompt 1 position 5"):
            call(model, BATCH, cache=cache, targets=7, unit=unit)


@each_kind
@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda state: state.int(), TypeError, "dense tensor of floating-point numbers; got torch.int32"),
        (lambda state: state.to(torch.complex64), TypeError, "got torch.complex64"),
        (lambda state: state.to_sparse(), TypeError, "torch.sparse_coo"),
        (lambda state: state[:0], ValueError, "the cache holds no tokens"),
        (lambda state: state[:, :0], ValueError, "the cache holds no tokens"),
    ],
    ids=["int", "complex", "sparse", "no prompt", "no position"],
)
def test_states_that_are_none(kind: str, spoil: Any, error: type[Exception], words: str) -> None:
    model = subject(kind).model
    with pytest.raises(error, match=words):
        ig_lens(model, cache={name: spoil(state) for name, state in residuals(model).items()}, targets=7)


@each_kind
def test_numbers_of_the_caller_that_are_not_finite(kind: str) -> None:
    model = subject(kind).model
    with pytest.raises(ValueError, match=r"the state baseline holds NaN .* Give a baseline of finite numbers"):
        ig_lens(model, BATCH, baseline=torch.full((D_MODEL,), float("nan")))
    with pytest.raises(ValueError, match="lens= gives NaN or infinite numbers for state 1"):
        ig_lens(model, BATCH, lens=lambda state, index: state / (0 if index == 1 else 1))


@each_kind
def test_a_mean_of_states_that_are_not_finite(kind: str) -> None:
    model = subject(kind).model
    cache = residuals(model)
    cache[NAMES[1]] = cache[NAMES[1]].clone()
    cache[NAMES[1]][1, 0, 3] = float("nan")  # read at the end, where only the mean of all before it holds the NaN
    assert ig_lens(model, BATCH, cache=cache).values.isfinite().all()
    with pytest.raises(ValueError, match=r"the state mean\S* holds NaN or infinite numbers at prompt 1 position 5"):
        ig_lens(model, BATCH, cache=cache, baseline="mean")
