"""What a user sees go wrong: the type of every refusal, what its message says, and the state that is left behind.

Every refusal runs inside `refused`, which compares the whole model and torch's global state before and after. Those
that need no forward pass run inside `refused_unrun`, which also counts the runs of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from iglens_tl import (
    NEXT,
    TOP,
    MissingActivationError,
    ReadoutMismatchError,
    TokenSet,
    UnsupportedModelError,
    ig_lens,
)
from tests import models
from tests.families import FAMILIES
from tests.models import BATCH, TOKENS
from tests.oracles import Head
from tests.subjects import (
    D_MODEL,
    D_VOCAB,
    KINDS,
    ROWS,
    cached,
    each_kind,
    fresh,
    one_kind,
    padded,
    residual_names,
    speaking,
    states_of,
    subject,
    tiny,
    words,
)
from tests.versions import HAS_BRIDGE, HAS_HOOKED
from tests.watching import Count, forwards, modules_of, refused, untouched

NAMES = residual_names()


@contextlib.contextmanager
def refused_unrun(model: Any, error: type[Exception], *parts: str) -> Iterator[None]:
    """Refused before any forward pass."""
    with forwards(model) as count, refused(model, error, *parts):
        yield
    assert count.runs == 0, f"refused only after {count.runs} forward passes"


# --- The watch itself --------------------------------------------------------------------------------------------


def _edit(model: Any) -> None:
    next(iter(model.parameters())).data.view(-1)[0] += 1e-6


def _set_gradient(model: Any) -> None:
    weight = next(iter(model.parameters()))
    weight.grad = torch.zeros_like(weight)


DAMAGE = {
    "hooks": lambda model: model.hook_dict["blocks.1.hook_resid_post"].add_hook(lambda tensor, hook: None),
    "training": lambda model: model.blocks[1].train(),
    "numbers": _edit,
    "gradient flags": _set_gradient,
    "places": lambda model: setattr(model.blocks[0].ln1, "extra", None) or model.double(),
    "settings": lambda model: setattr(model.cfg, "n_ctx", 17),
    "torch": lambda model: torch.set_grad_enabled(False),
    "torch random": lambda model: torch.rand(1),
    "python random": lambda model: __import__("random").random(),
    "numpy random": lambda model: np.random.rand(),
}


@each_kind
@pytest.mark.parametrize("part", DAMAGE)
def test_the_watch_sees_every_change(kind: str, part: str) -> None:
    model = fresh(kind).model
    # The outer two put back what the damage is to torch itself.
    with models.same_randomness(), torch.enable_grad(), pytest.raises(AssertionError, match=part), untouched(model):
        DAMAGE[part](model)


# --- State after success -----------------------------------------------------------------------------------------

SUCCESSES: dict[str, dict[str, Any]] = {
    "default": {},
    "steps": {"n_steps": 4},
    "gradients": {"estimator": "midpoint", "n_steps": 4, "metric": "log_prob"},
    "gradients in float64": {"estimator": "gauss_legendre", "n_steps": 3, "dtype": torch.float64},
    "half precision": {"dtype": torch.bfloat16},
    "all positions, zero baseline": {"positions": None, "baseline": "zero"},
    "mean baseline, a lens": {"positions": None, "baseline": "mean", "lens": lambda state, index: state},
    "next tokens": {"positions": None, "targets": NEXT},
    "a difference": {"targets": 7, "incorrect_targets": TokenSet([3, 4])},
    "one row at a time": {"max_memory": 1},
}


@each_kind
@pytest.mark.parametrize("name", SUCCESSES)
def test_success_leaves_no_trace(kind: str, name: str) -> None:
    model = subject(kind).model
    with untouched(model):
        ig_lens(model, BATCH, **SUCCESSES[name])
    cache = cached(model, BATCH)
    with untouched(model):
        ig_lens(cache, BATCH, **SUCCESSES[name])


@each_kind
@pytest.mark.parametrize("arguments", [{}, {"targets": D_VOCAB}, {"targets": 7, "incorrect_targets": 7}])
def test_the_users_own_hooks_stay_and_fire_in_the_users_own_calls_alone(kind: str, arguments: dict[str, Any]) -> None:
    model = fresh(kind).model
    count, of_norm, of_unembed = Count(), Count(), Count()
    model.add_hook("blocks.1.hook_resid_post", count)
    model.add_hook("ln_final.hook_normalized", of_norm)
    model.add_hook("blocks.0.hook_resid_pre", of_unembed, is_permanent=True)
    with untouched(model), contextlib.suppress(ValueError):
        ig_lens(model, TOKENS, **arguments)
    runs = count.runs
    assert runs == of_norm.runs, "the readout must not be seen by a hook on the final norm"
    model(TOKENS)
    assert (count.runs, of_norm.runs, of_unembed.runs) == (runs + 1,) * 3


@each_kind
def test_hooks_of_an_open_context_stay(kind: str) -> None:
    model = subject(kind).model
    count = Count()
    with untouched(model), model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", count)]):
        with untouched(model):
            ig_lens(model, TOKENS)
        with refused(model, ValueError, "token ids"):
            ig_lens(model, TOKENS, targets=D_VOCAB)
        model(TOKENS)
    assert count.runs == 2


# --- Targets -----------------------------------------------------------------------------------------------------


@each_kind
def test_a_target_of_several_tokens_shows_its_pieces(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    with refused_unrun(
        model, ValueError, "exactly one token", "'w05 w06 w07'", "is 3", "'w05' (5)", "'w07' (7)", "Give one"
    ):
        ig_lens(model, TOKENS, targets="w05 w06 w07")
    with refused_unrun(model, ValueError, "incorrect_targets must be exactly one token", "'w05' (5)", "'w06' (6)"):
        ig_lens(model, TOKENS, targets="w05", incorrect_targets="w05 w06")
    with refused_unrun(model, ValueError, "exactly one token", "'w08' (8)", "'w09' (9)"):
        ig_lens(model, TOKENS, targets=TokenSet(["w05", "w08 w09"]))
    with refused_unrun(model, ValueError, "exactly one token", "'' is 0", "nothing"):
        ig_lens(model, TOKENS, targets="")
    with refused_unrun(model, ValueError, "'zzz' is not in the vocabulary", "unknown token, id 1"):
        ig_lens(model, TOKENS, targets="zzz")


@each_kind
def test_a_string_target_needs_a_tokenizer(kind: str) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, "no tokenizer", "targets='w05'", "give a token id"):
        ig_lens(model, TOKENS, targets="w05")
    with refused_unrun(model, ValueError, "no tokenizer", "'w05 w06'", "give token ids"):
        ig_lens(model, "w05 w06")


WRONG_IDS = [
    -1,
    D_VOCAB,
    [3, -1],
    [3, D_VOCAB + 7],
    TokenSet([2, -5]),
    torch.tensor(D_VOCAB),
    torch.tensor([[-1], [3]]),
]


@one_kind
@pytest.mark.parametrize("name", ["targets", "incorrect_targets"])
@pytest.mark.parametrize("ids", WRONG_IDS, ids=repr)
def test_target_ids_outside_the_vocabulary(kind: str, name: str, ids: Any) -> None:
    model = subject(kind).model
    wrong = {-1: "-1", 50: "50", 57: "57", -5: "-5"}
    numbers = ids.tokens if isinstance(ids, TokenSet) else np.ravel(np.asarray(ids)).tolist()
    (said,) = [wrong[i] for i in numbers if i in wrong]
    with refused_unrun(model, ValueError, f"{name}: token ids must lie in [0, 50)", f"got {said}"):
        ig_lens(model, BATCH, **{"targets": 9, name: ids})


def test_a_target_must_be_an_output_not_only_an_input() -> None:
    model = tiny(KINDS[0], d_vocab_out=7)
    with refused_unrun(model, ValueError, "[0, 7)", "width of the logits", "got 20"):
        ig_lens(model, TOKENS, targets=20)
    with refused_unrun(model, ValueError, "targets=NEXT", "9, 14, 15, 26", "d_vocab_out 7"):
        ig_lens(model, TOKENS, targets=NEXT, positions=None)


@one_kind
@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (2.5, ("token string or a token id", "2.5", "float")),
        (True, ("token string or a token id", "True", "bool")),
        ({"w05"}, ("token string or a token id", "set")),
        ([3, 2.5], ("token string or a token id", "2.5")),
        (torch.tensor([2.5]), ("whole-number token ids", "float32")),
        (torch.tensor([True]), ("whole-number token ids", "bool")),
        (torch.tensor(2.5), ("token string or a token id", "2.5")),
    ],
)
def test_targets_of_another_type(kind: str, targets: Any, parts: tuple[str, ...]) -> None:
    model = subject(kind).model
    with refused_unrun(model, TypeError, *parts):
        ig_lens(model, BATCH, targets=targets)


@one_kind
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"targets": [3]}, ("one entry a prompt", "2 prompts", "1 entries")),
        ({"targets": []}, ("one entry a prompt", "2 prompts", "0 entries")),
        ({"targets": torch.tensor([3, 4, 5])}, ("(3,)", "(2, 1)", "tensor[:, None]")),
        ({"targets": torch.zeros(2, 2, dtype=torch.long)}, ("(2, 2)", "(2, 1)")),
        ({"targets": TokenSet([5, 5])}, ("twice", "5, 5")),
        ({"targets": TokenSet(range(50))}, ("all 50 tokens", "probability is 1")),
        ({"targets": NEXT}, ("targets=NEXT", "no selected position has a next token", "positions=-2")),
    ],
)
def test_targets_that_do_not_fit_the_prompts(kind: str, arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, BATCH, **arguments)


def test_a_token_set_needs_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token, got none"):
        TokenSet([])
    with pytest.raises(TypeError, match=r"a list of tokens, got the single string 'w05'; write TokenSet\(\[...\]\)"):
        TokenSet("w05")


# --- Prompts -----------------------------------------------------------------------------------------------------


@one_kind
@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.tensor([[3, -1, 5]]), "got -1."),
        (torch.tensor([[3, D_VOCAB]]), "got 50."),
        ([3, 99, -7], "got -7, 99."),
        ([[3, 4], [5]] + [[D_VOCAB + i] for i in range(9)], "(9 in all)"),
    ],
    ids=str,
)
def test_prompt_ids_outside_the_vocabulary(kind: str, tokens: Any, said: str) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, "token ids must lie in [0, 50), the model's vocabulary", said):
        ig_lens(model, tokens)


NOTHING = {
    "an empty list": [],
    "a list of nothing": [[]],
    "no ids": torch.zeros(0, dtype=torch.long),
    "no positions": torch.zeros(2, 0, dtype=torch.long),
    "no prompts": torch.zeros(0, 5, dtype=torch.long),
    "an empty array": np.zeros((0, 3), dtype=np.int64),
}


@each_kind
@pytest.mark.parametrize("name", NOTHING)
def test_prompts_without_tokens(kind: str, name: str, tmp_path: Any) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, "no tokens", "at least one"):
        ig_lens(model, NOTHING[name])
    shared = speaking(kind, tmp_path, pad=2)
    with refused_unrun(shared, ValueError, "no tokens", "at least one"):
        ig_lens(shared, NOTHING[name])


@each_kind
def test_an_empty_prompt_among_others_is_named(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    with refused_unrun(model, ValueError, "prompt 1 has no tokens"):
        ig_lens(model, [[3, 4], []])
    with refused_unrun(model, ValueError, "prompt 0 has no tokens (nothing but padding)"):
        ig_lens(model, torch.tensor([[4, 4], [3, 5]]))
    with refused_unrun(model, ValueError, "prompt 1 has no tokens"):
        ig_lens(model, BATCH, attention_mask=torch.tensor([[1] * 6, [0] * 6]))


@each_kind
def test_an_empty_string_has_no_tokens_but_its_bos(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    with refused_unrun(model, ValueError, "no tokens"):
        ig_lens(model, "", prepend_bos=False)
    with refused_unrun(model, ValueError, "prompt 1 has no tokens"):
        ig_lens(model, ["w05", ""], prepend_bos=False)
    assert ig_lens(model, "", prepend_bos=True).tokens.tolist() == [[2]]


@each_kind
def test_prompts_longer_than_the_positions(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    limit = int(model.cfg.n_ctx)
    parts = ("the prompt has", f"{limit + 8} tokens", f"takes {limit} (n_ctx)", "shorten")
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, torch.arange(limit + 8)[None] % 40 + 5)
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, words([7] * (limit + 8)), prepend_bos=False)
    with untouched(model):
        assert ig_lens(model, torch.arange(limit)[None] % 40 + 5).tokens.shape == (1, limit)


@pytest.mark.bridge
def test_alibi_that_is_laid_out_for_so_many_positions() -> None:
    model = models.bridge(FAMILIES["MPT"].build())
    model(TOKENS)
    long = torch.arange(80)[None] % 40 + 5
    with refused_unrun(model, ValueError, "80 tokens", "takes 64 (n_ctx)"):
        ig_lens(model, long)
    free = models.bridge(FAMILIES["BLOOM"].build())
    assert ig_lens(free, long).tokens.shape == (1, 80)


@pytest.mark.bridge
@pytest.mark.parametrize("family", ["RWKV", "RecurrentGemma"])
def test_left_padding_where_a_recurrence_runs_over_it(family: str) -> None:
    model = models.bridge(FAMILIES[family].build())
    model(TOKENS)
    tokens, mask = padded("left")
    parts = (
        "prompt 1, 2, 3 is padded on the left",
        "runs over padding",
        "Pad on the right, or pass the prompts as lists",
    )
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, tokens, attention_mask=mask)
    right, mask = padded("right")
    together = ig_lens(model, right, attention_mask=mask, targets=7)
    for i, row in enumerate(ROWS):
        alone = ig_lens(model, row, targets=7)
        torch.testing.assert_close(together.attribution[:, i], alone.attribution[:, 0], rtol=0, atol=1e-5)


@one_kind
@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (5, ("string, a list of strings, or token ids", "int")),
        ({"input_ids": [1]}, ("string, a list of strings, or token ids", "dict")),
        (torch.tensor([[1.0]]), ("whole numbers", "float32")),
        (torch.tensor([[True]]), ("whole numbers", "bool")),
        ([3, 2.5], ("whole-number token ids", "mixture")),
        ([3, True], ("whole-number token ids", "mixture")),
        (["w05", 3], ("all strings or all whole-number token ids", "mixture")),
        ([[3], 4], ("list of lists of ids", "mixture")),
        ([[3, 2.5]], ("flat list of whole-number token ids",)),
        ([[[3]]], ("flat list of whole-number token ids",)),
    ],
    ids=str,
)
def test_prompts_of_another_type(kind: str, tokens: Any, parts: tuple[str, ...]) -> None:
    model = subject(kind).model
    with refused_unrun(model, TypeError, *parts):
        ig_lens(model, tokens)


@one_kind
def test_prompts_of_another_shape(kind: str) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, "[pos] or [batch, pos]", "(1, 2, 3)"):
        ig_lens(model, torch.ones(1, 2, 3, dtype=torch.long))
    with refused_unrun(model, ValueError, "[pos] or [batch, pos]", "()"):
        ig_lens(model, torch.tensor(3))


@each_kind
def test_a_model_without_a_prompt(kind: str) -> None:
    model = subject(kind).model
    with refused_unrun(model, TypeError, "a prompt or token ids", "second argument", "cache="):
        ig_lens(model)


# --- Positions, layers, baselines and other settings --------------------------------------------------------------


@one_kind
@pytest.mark.parametrize(
    ("positions", "parts"),
    [
        (6, ("inside every prompt", "prompt 0 has 6 tokens and no position 6", "prompt 1 has 6 tokens")),
        (-7, ("prompt 0 has 6 tokens and no position -7",)),
        ([0, 9], ("prompt 0 has 6 tokens and no position 9",)),
        (slice(6, 9), ("slice(6, 9, None) selects no token", "lengths 6, 6")),
    ],
    ids=str,
)
def test_positions_outside_the_prompts(kind: str, positions: Any, parts: tuple[str, ...]) -> None:
    model = subject(kind).model
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, BATCH, positions=positions)


@each_kind
def test_positions_are_counted_in_each_prompts_own_tokens(kind: str) -> None:
    model = subject(kind).model
    tokens, mask = padded("left")
    with refused_unrun(model, ValueError, "prompt 1 has 3 tokens and no position 3", "prompt 3 has 1 tokens"):
        ig_lens(model, tokens, attention_mask=mask, positions=3)


SETTINGS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"positions": "last"}, TypeError, ("positions must be None, a whole number, a list of them or a slice", "'last'")),
    ({"positions": True}, TypeError, ("positions", "True")),
    ({"positions": []}, TypeError, ("positions", "[]")),
    ({"positions": 1.0}, TypeError, ("positions", "1.0")),
    ({"positions": torch.tensor([1.0])}, TypeError, ("positions", "tensor([1.])")),
    ({"layers": 0}, ValueError, ("between 1 and 3", "got 0")),
    ({"layers": 4}, ValueError, ("between 1 and 3", "got 4")),
    ({"layers": True}, TypeError, ("layers must be None, a number of segments, or a list", "True")),
    ({"layers": 1.5}, TypeError, ("layers", "1.5")),
    ({"layers": "1_pre"}, TypeError, ("a list of state indices and labels", "'1_pre'")),
    ({"layers": []}, ValueError, ("states 0 to 3", "an empty list")),
    ({"layers": [1, 4, -1]}, ValueError, ("states 0 to 3", "3 leaves the last block", "got 4, -1")),
    ({"layers": ["3_pre", "1_pre"]}, ValueError, ("states 0 to 3", "final_post", "got '3_pre'")),
    ({"layers": ["1_attn", True]}, ValueError, ("got '1_attn', True",)),
    ({"metric": "probability"}, ValueError, ("metric must be one of 'prob', 'log_prob', 'log_odds', 'logit'", "'probability'")),
    ({"estimator": "simpson"}, ValueError, ("estimator must be one of 'prediction_aware'", "'gauss_legendre'", "'simpson'")),
    ({"n_steps": 0}, ValueError, ("n_steps must be at least 1", "got 0")),
    ({"n_steps": 2.0}, TypeError, ("n_steps must be a whole number", "2.0", "float")),
    ({"n_steps": True}, TypeError, ("n_steps must be a whole number", "True", "bool")),
    ({"max_memory": 0}, ValueError, ("at least one byte", "0")),
    ({"max_memory": "lots"}, ValueError, ('"2GB" or "512MiB"', "'lots'")),
    ({"max_memory": "-1GB"}, ValueError, ("max_memory", "'-1GB'")),
    ({"max_memory": float("inf")}, ValueError, ("max_memory", "inf")),
    ({"max_memory": [1]}, TypeError, ("max_memory", "[1]")),
    ({"max_memory": True}, TypeError, ("max_memory", "True")),
    ({"dtype": "float64"}, TypeError, ("dtype must be None, torch.float64", "'float64'")),
    ({"dtype": torch.int8}, TypeError, ("dtype must be None, torch.float64", "torch.int8")),
    ({"lens": "tuned"}, TypeError, ("lens= must be a function (state, state_index) -> state", "'tuned'")),
    ({"baseline": "unigram"}, ValueError, ('"embed", "zero", "mean", or a tensor', "'unigram'")),
    ({"baseline": None}, ValueError, ('"embed", "zero", "mean", or a tensor', "None")),
    ({"baseline": np.zeros(32)}, ValueError, ('"embed", "zero", "mean", or a tensor', "array")),
    ({"baseline": torch.zeros(31)}, ValueError, ("[d_model] = [32]", "[2, 32]", "[2, 1, 32]", "(31,)")),
    ({"baseline": torch.zeros(3, 32)}, ValueError, ("[batch, d_model] = [2, 32]", "(3, 32)")),
    ({"baseline": torch.zeros(2, 6, 32)}, ValueError, ("[batch, pos, d_model] = [2, 1, 32]", "(2, 6, 32)")),
    ({"baseline": torch.zeros(32, dtype=torch.long)}, ValueError, ("floating-point tensor", "torch.int64")),
    ({"cache": 5}, TypeError, ("cache= must be an ActivationCache or a mapping", "5")),
    ({"incl_mid": True, "layers": 2}, ValueError, ("incl_mid=True", "layers=None", '["3_mid"]')),
    ({"incl_mid": True, "layers": ["1_mid"]}, ValueError, ("incl_mid=True", "layers=None")),
    ({"incl_mid": True, "lens": lambda state, index: state}, ValueError, ("lens=", "whole-layer states", "incl_mid=False")),
    ({"layers": ["1_mid"], "lens": lambda state, index: state}, ValueError, ("lens=", "name no mid state")),
    ({"prepend_bos": True}, ValueError, ("prepend_bos applies to strings", "Leave it out")),
    ({"prepend_bos": False}, ValueError, ("prepend_bos applies to strings", "Leave it out")),
    ({"logits": torch.zeros(2, 6, 50)}, ValueError, ("logits= goes with a cache", "Leave it out")),
    ({"attention_mask": torch.ones(2, 5)}, ValueError, ("shape of the tokens, (2, 6)", "(2, 5)")),
    ({"attention_mask": torch.ones(6)}, ValueError, ("shape of the tokens, (2, 6)", "(1, 6)")),
    ({"attention_mask": 2 * torch.ones(2, 6)}, ValueError, ("0 (padding) and 1 (real token) only",)),
    ({"metric": "logit", "targets": TokenSet([3, 5])}, ValueError, ("single tokens", "TokenSet", '"log_odds"')),
    ({"metric": "logit", "targets": [3, TokenSet([3, 5])]}, ValueError, ("single tokens", "TokenSet")),
    ({"metric": "logit", "targets": 3, "incorrect_targets": TokenSet([7, 5])}, ValueError, ("single tokens", "TokenSet")),
]  # fmt: skip


def _words(arguments: dict[str, Any]) -> str:
    """The name of a row: a tensor by its shape."""
    return ", ".join(
        f"{name}={list(value.shape) if hasattr(value, 'shape') else value}" for name, value in arguments.items()
    )


@one_kind
@pytest.mark.parametrize(("arguments", "error", "parts"), SETTINGS, ids=[_words(row[0]) for row in SETTINGS])
def test_settings_that_cannot_be_met(kind: str, arguments: dict[str, Any], error: Any, parts: tuple[str, ...]) -> None:
    model = subject(kind).model
    with refused_unrun(model, error, *parts):
        ig_lens(model, BATCH, **arguments)


@each_kind
def test_a_mask_beside_strings_or_lists_of_unequal_length(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    with refused_unrun(model, ValueError, "attention_mask goes with token ids", "Leave it out"):
        ig_lens(model, "w05 w06", attention_mask=torch.ones(1, 2))
    with refused_unrun(model, ValueError, "attention_mask needs prompts of one length"):
        ig_lens(model, [[5, 6], [7]], attention_mask=torch.ones(2, 2))


@one_kind
@pytest.mark.parametrize(
    ("targets", "incorrect", "shared"),
    [
        (7, 7, "7"),
        ([7, 8], 8, "8"),
        (TokenSet([5, 7]), TokenSet([7, 9]), "7"),
        (TOP, TOP, "token id"),
        (torch.tensor([[9], [7]]), [3, 7], "7"),
    ],
    ids=str,
)
def test_a_target_on_both_sides_of_a_difference(kind: str, targets: Any, incorrect: Any, shared: str) -> None:
    model = subject(kind).model
    with refused(model, ValueError, "targets and incorrect_targets share token id", shared, "says nothing"):
        ig_lens(model, BATCH, targets=targets, incorrect_targets=incorrect)


# --- Models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "gpt2", None, 5, torch.ones(2)], ids=str)
def test_what_is_no_model(thing: Any) -> None:
    with pytest.raises(
        TypeError, match=f"HookedTransformer, a TransformerBridge or an ActivationCache.*{type(thing).__name__}"
    ):
        ig_lens(thing, TOKENS)


def test_a_raw_hugging_face_model_is_told_how_to_be_wrapped() -> None:
    model = FAMILIES["GPT-2"].build()
    parts = (
        "GPT2LMHeadModel",
        "Wrap",
        "TransformerBridge.boot_transformers(name, hf_model=model",
        "HookedTransformer.from_pretrained",
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TypeError) as caught:
        ig_lens(model, TOKENS)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _encoder() -> Any:
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    return HookedEncoder(HookedTransformerConfig(**_ENCODER, n_layers=2))


def _encoder_decoder() -> Any:
    from transformer_lens import HookedEncoderDecoder, HookedTransformerConfig

    relative = {"relative_attention_max_distance": 8, "relative_attention_num_buckets": 4, "use_attn_scale": False}
    return HookedEncoderDecoder(HookedTransformerConfig(**_ENCODER, **relative, n_layers=2, tie_word_embeddings=False))


def _bert() -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=50, **sizes, max_position_embeddings=64)
    return models.bridge(models.redraw(transformers.BertForMaskedLM(config)))


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0
    )
    return models.bridge(models.redraw(transformers.T5ForConditionalGeneration(config)))


_ENCODER: dict[str, Any] = {
    "d_model": 32, "d_head": 8, "n_heads": 4, "d_mlp": 64, "n_ctx": 32, "d_vocab": 50, "act_fn": "gelu",
    "normalization_type": "LN", "device": "cpu", "attention_dir": "bidirectional",
}  # fmt: skip
ENCODERS = {
    **({"HookedEncoder": _encoder, "HookedEncoderDecoder": _encoder_decoder} if HAS_HOOKED else {}),
    **({"HookedTransformer": lambda: models.hooked(attention_dir="bidirectional")} if HAS_HOOKED else {}),
    **({"BertForMaskedLM": _bert, "T5ForConditionalGeneration": _t5} if HAS_BRIDGE else {}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_and_encoder_decoders(name: str) -> None:
    with models.same_randomness():
        model = ENCODERS[name]().eval()
    parts = (name, "is an encoder or encoder-decoder", "decoder-only", "use a causal language model")
    with refused(model, UnsupportedModelError, *parts):
        ig_lens(model, TOKENS)


def _in_training_mode(name: str) -> Any:
    if name == "no Hugging Face model":
        return tiny("bridge").train()
    with models.same_randomness():
        model = FAMILIES["GPT-2"].build().train()
    return models.bridge(model)


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["GPT-2", "no Hugging Face model"])
def test_a_bridge_in_training_mode(name: str) -> None:
    model = _in_training_mode(name)
    with refused_unrun(
        model, ValueError, "evaluation mode", "dropout", "in training mode: the model", "Call model.eval() first"
    ):
        ig_lens(model, TOKENS)
    model.eval()
    assert ig_lens(model, TOKENS).gap.abs().max() < 1e-12


@pytest.mark.bridge
@pytest.mark.parametrize("name", ["GPT-2"])
def test_one_submodule_in_training_mode_is_named(name: str) -> None:
    model = _in_training_mode(name).eval()
    dropouts = [path for path, module in modules_of(model).items() if isinstance(module, torch.nn.Dropout)]
    modules_of(model)[dropouts[0]].train()
    with refused_unrun(model, ValueError, "evaluation mode", dropouts[0]):
        ig_lens(model, TOKENS)


@pytest.mark.hooked
@pytest.mark.parametrize("module", [torch.nn.Dropout(), torch.nn.BatchNorm1d(4)], ids=str)
def test_a_hooked_transformer_is_judged_by_what_acts_by_mode(module: Any) -> None:
    model = models.hooked().train()
    with untouched(model):
        ig_lens(model, TOKENS)
    model.blocks[1].extra = module.train()
    with refused_unrun(model, ValueError, "evaluation mode", "in training mode: blocks.1.extra.", "Call model.eval()"):
        ig_lens(model, TOKENS)


# --- Readouts ----------------------------------------------------------------------------------------------------


@each_kind
def test_a_hook_on_the_readout_during_the_run(kind: str) -> None:
    model = subject(kind).model

    def shrink(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return tensor * 2

    parts = (
        "ln_final.hook_scale",
        "at prompt 0 position 5",
        "the model itself says",
        "1 of 1 positions",
        "Remove them",
    )
    with model.hooks(fwd_hooks=[("ln_final.hook_scale", shrink)]), refused(model, ReadoutMismatchError, *parts):
        ig_lens(model, TOKENS)
    with untouched(model):
        ig_lens(model, TOKENS)


@each_kind
def test_the_mismatch_names_both_numbers(kind: str) -> None:
    model, head = subject(kind).model, subject(kind).head
    logits, cache = model(TOKENS).detach(), cached(model, TOKENS)
    doubled = 2 * logits
    own = float(head.prob(cache[NAMES[-1]][0, -1], torch.tensor(7)))
    said = float(doubled[0, -1].double().softmax(-1)[7])
    parts = (f"reads as p = {own:.6g}"[:22], f"itself says {said:.6g}"[:18], "position 5", "logits= are of another run")
    with refused_unrun(model, ReadoutMismatchError, *parts):
        ig_lens(cache, targets=7, logits=doubled)
    with untouched(model):
        assert ig_lens(cache, targets=7, logits=logits).settings["checked_against_model"]


@each_kind
def test_a_mismatch_too_small_for_a_probability_shows_in_its_logarithm(kind: str) -> None:
    """The target has a probability below 1e-6 both in the states and in the logits, and another one."""
    model = fresh(kind).model
    weight = {"hooked": lambda: model.unembed.W_U, "bridge": lambda: model.unembed.original_component.weight}[kind]()
    weight.data *= 8
    cache, logits = cached(model, TOKENS), model(TOKENS).detach().clone()
    target = int(logits[0, -1].argmin())
    assert logits[0, -1].softmax(-1)[target] < 1e-6
    with untouched(model):
        ig_lens(cache, targets=target, logits=logits)
    logits[..., target] -= 2
    with refused_unrun(model, ReadoutMismatchError, "log p = "):
        ig_lens(cache, targets=target, logits=logits)


@each_kind
def test_a_lens_that_changes_the_last_state(kind: str) -> None:
    model = subject(kind).model
    with refused(model, ReadoutMismatchError, "lens= changes the last state", "must be the identity"):
        ig_lens(model, TOKENS, lens=lambda state, index: state.flip(-1))


@each_kind
@pytest.mark.parametrize(
    ("lens", "said"),
    [
        (lambda state, index: state[:, :5], "(1, 5)"),
        (lambda state, index: None, "NoneType"),
        (lambda s, i: s[0], "(32,)"),
    ],
)
def test_a_lens_that_returns_no_state(kind: str, lens: Any, said: str) -> None:
    model = subject(kind).model
    with refused(model, ValueError, "lens= must return a tensor of the state's shape (1, 32)", f"got {said}"):
        ig_lens(model, TOKENS, lens=lens)


class _Broken(Exception):
    pass


def _breaks(*_: Any, **__: Any) -> None:
    raise _Broken


@each_kind
def test_exceptions_of_the_users_own_functions_pass_and_leave_no_trace(kind: str) -> None:
    model = subject(kind).model
    with refused(model, _Broken):
        ig_lens(model, TOKENS, lens=_breaks)
    with refused(model, _Broken), model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", _breaks)]):
        ig_lens(model, TOKENS)
    with untouched(model):
        ig_lens(model, TOKENS)


class _Int8(torch.nn.Module):
    """A quantised unembedding: whole numbers and a scale in a module of its own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, rows_are_words: bool) -> None:
        super().__init__()
        self.rows_are_words = rows_are_words
        self.scale = float(weight.abs().max()) / 127
        whole = (weight / self.scale).round().to(torch.int8)
        self.register_buffer("weight" if rows_are_words else "W_U", whole)
        self.register_buffer("bias" if rows_are_words else "b_U", bias.clone())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        whole = self.weight.T if self.rows_are_words else self.W_U
        bias = self.bias if self.rows_are_words else self.b_U
        return rows @ (whole.to(rows.dtype) * self.scale) + bias.to(rows.dtype)


def quantised(kind: str) -> tuple[Any, Head]:
    """A model whose unembedding is quantised, and the head that it has then."""
    made = fresh(kind)
    model, head = made.model, made.head
    unembed = head.unembed.float()
    bias = torch.zeros(D_VOCAB) if head.unembed_bias is None else head.unembed_bias.float()
    quantity = _Int8(unembed if kind == "bridge" else unembed.T, bias, rows_are_words=kind == "bridge")
    if kind == "bridge":
        model.unembed.set_original_component(quantity)
    else:
        model.unembed = quantity
    rounded = (unembed / quantity.scale).round() * quantity.scale
    return model.eval(), Head(**{**vars(head), "unembed": rounded.double()})


@each_kind
def test_a_quantised_unembedding_is_read_through_its_module_or_refused(kind: str) -> None:
    model, head = quantised(kind)
    states = states_of(cached(model, TOKENS))
    with untouched(model):
        result = ig_lens(model, TOKENS, targets=7)
    expected = head.prob(states[:, :, -1], torch.tensor([[7]]).expand(4, 1))
    torch.testing.assert_close(result.values[..., 0], expected, rtol=0, atol=1e-6)  # float32 logits of size 5
    parts = ("dtype=torch.float64", "floating-point matrix", "_Int8", "quantised", "Leave dtype=None")
    with refused(model, UnsupportedModelError, *parts):
        ig_lens(model, TOKENS, targets=7, dtype=torch.float64)


@each_kind
def test_a_quantised_unembedding_of_a_half_precision_model(kind: str) -> None:
    """Its module holds no floating-point parameter to tell in which precision it wants its rows: the model's own."""
    model = quantised(kind)[0].to(torch.bfloat16)
    result = ig_lens(model, TOKENS, targets=7)
    assert result.settings["readout_dtype"] == "bfloat16"
    torch.testing.assert_close(result.values[-1], result.model_value, rtol=0, atol=1e-2)  # bfloat16 has 3 digits


# --- States that are no numbers ----------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_named(kind: str, number: float) -> None:
    model = subject(kind).model

    def spoil(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[1, 3, 0] = number
        return tensor

    parts = ("the state 2_pre holds NaN or infinite numbers", "prompt 1 position 3", "overflow in half precision")
    with refused(model, ValueError, *parts), model.hooks(fwd_hooks=[("blocks.2.hook_resid_pre", spoil)]):
        ig_lens(model, BATCH, positions=None)
    cache = {name: tensor.clone() for name, tensor in cached(model, BATCH).items() if name in NAMES}
    cache["blocks.2.hook_resid_pre"][1, 3, 0] = number
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, BATCH, cache=cache, positions=None)
    with refused_unrun(model, ValueError, "the state 2_pre", "prompt 1 position 3"):
        ig_lens(model, BATCH, cache=cache, positions=3)
    with untouched(model):
        ig_lens(model, BATCH, cache=cache, positions=2)


@each_kind
def test_a_baseline_that_is_not_finite(kind: str) -> None:
    model = subject(kind).model
    with refused(model, ValueError, "the state baseline holds NaN", "prompt 0 position 5"):
        ig_lens(model, TOKENS, baseline=torch.full((D_MODEL,), float("nan")))


def overflowing(kind: str) -> Any:
    """A float16 model whose states fit and whose logits do not."""
    model = fresh(kind).model.to(torch.float16)
    weight = model.unembed.W_U if kind == "hooked" else model.unembed.original_component.weight
    weight.data *= 60000 / float(weight.data.abs().max())
    return model


@each_kind
def test_logits_that_overflow_in_half_precision(kind: str) -> None:
    model = overflowing(kind)
    cache = cached(model, TOKENS)
    with refused(model, ValueError, "the model's own logits are NaN or infinite at prompt 0 position 5", "float16"):
        ig_lens(model, TOKENS)
    with refused_unrun(
        model, ValueError, "final_post", "NaN or infinite logits", "torch.float16", "dtype=torch.float32"
    ):
        ig_lens(cache, targets=7)
    with untouched(model):
        assert ig_lens(cache, targets=7, dtype=torch.float32).gap.abs().max() < 1e-12


@each_kind
def test_a_target_that_the_model_masks(kind: str) -> None:
    model = fresh(kind).model
    weight_of = {"hooked": lambda: model.unembed.b_U, "bridge": lambda: model.unembed.original_component.bias}
    weight_of[kind]().data[7] = -torch.inf
    cache = cached(model, TOKENS)
    with refused(model, ValueError, "minus infinity at prompt 0 position 5", "masked", "another target"):
        ig_lens(model, TOKENS, targets=7)
    with refused_unrun(model, ValueError, "minus infinity at 0_pre", "masked"):
        ig_lens(cache, targets=7)
    with untouched(model):
        assert ig_lens(cache, targets=8).gap.abs().max() < 1e-12, "the others are read as ever"


# --- Caches ------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("lacking", ["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"])
def test_a_cache_that_lacks_a_state(kind: str, lacking: str) -> None:
    model = subject(kind).model
    cache = cached(model, TOKENS, names_filter=[name for name in NAMES if name != lacking])
    parts = (
        f"lacks {lacking}. ",
        "run_with_cache(tokens, names_filter=names)",
        "for l in range(3)",
        '"blocks.2.hook_resid_post"]',
    )
    with refused_unrun(model, MissingActivationError, *parts):
        ig_lens(cache, targets=7)
    plain = {name: cached(model, TOKENS)[name] for name in NAMES if name != lacking}
    with refused_unrun(model, MissingActivationError, *parts):
        ig_lens(model, cache=plain, targets=7)


@each_kind
def test_a_cache_that_lacks_several(kind: str) -> None:
    model = subject(kind).model
    cache = cached(model, TOKENS, names_filter=["blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"])
    with refused_unrun(model, MissingActivationError, "lacks blocks.1.hook_resid_pre, blocks.2.hook_resid_pre."):
        ig_lens(cache, targets=7)
    with refused_unrun(model, MissingActivationError, "blocks.0.hook_resid_mid", "and the hook_resid_mid."):
        ig_lens(cache, targets=7, incl_mid=True)
    with untouched(model):
        ig_lens(cache, targets=7, layers=1)


@each_kind
def test_the_names_that_the_message_gives_work(kind: str) -> None:
    """The advice, followed to the letter."""
    model = subject(kind).model
    with pytest.raises(MissingActivationError) as caught:
        ig_lens(model, cache={}, targets=7)
    advice = str(caught.value).split("where names = ")[1].removesuffix(".")
    cache = cached(model, TOKENS, names_filter=eval(advice))
    assert ig_lens(cache, targets=7).n_segments == 3


@each_kind
@pytest.mark.parametrize(("settings", "n_states"), [({"d_model": 16}, "16"), ({"n_layers": 4}, "block 3")], ids=str)
def test_activations_of_another_model(kind: str, settings: dict[str, Any], n_states: str) -> None:
    model, other = tiny(kind), tiny(kind, **settings)
    activations = dict(cached(other, TOKENS).items())
    parts = {
        "16": ("(1, 6, 16)", "d_model = 32", "another model"),
        "block 3": ("another model", "it holds block 3", "3 blocks"),
    }
    with refused_unrun(model, ValueError, *parts[n_states]):
        ig_lens(model, cache=activations, targets=7)


@each_kind
def test_activations_of_a_shallower_model(kind: str) -> None:
    model, other = tiny(kind), tiny(kind, n_layers=2)
    with refused_unrun(model, MissingActivationError, "lacks blocks.2.hook_resid_post."):
        ig_lens(model, cache=dict(cached(other, TOKENS).items()), targets=7)


@each_kind
def test_a_cache_and_the_model_that_did_not_make_it(kind: str) -> None:
    model, other = subject(kind).model, fresh(kind).model
    cache = cached(other, TOKENS)
    parts = ("the cache is of another model", type(other).__name__, "pass the cache alone", "the model that made it")
    with refused_unrun(model, ValueError, *parts):
        ig_lens(model, TOKENS, cache=cache)
    with untouched(other):
        ig_lens(other, TOKENS, cache=cache)


@each_kind
def test_two_caches_and_a_mapping_without_a_model(kind: str) -> None:
    model = subject(kind).model
    cache = cached(model, TOKENS)
    with refused_unrun(model, TypeError, "two caches came", "give one"):
        ig_lens(cache, TOKENS, cache=cache)
    with refused_unrun(
        model, TypeError, "plain mapping", "does not know its model", "ig_lens(model, cache=activations)"
    ):
        ig_lens(dict(cache.items()), TOKENS)


@each_kind
def test_settings_that_a_cache_alone_cannot_meet(kind: str) -> None:
    model = subject(kind).model
    cache = cached(model, BATCH)
    with refused_unrun(model, ValueError, "prepend_bos applies to a prompt given as a string", "Leave it out"):
        ig_lens(cache, prepend_bos=True)
    with refused_unrun(model, ValueError, "targets=NEXT needs the tokens", "second argument"):
        ig_lens(cache, targets=NEXT)
    with refused_unrun(model, ValueError, "the shape of the cache, (2, 6)", "(2, 5)"):
        ig_lens(cache, attention_mask=torch.ones(2, 5))
    with refused_unrun(model, ValueError, "0 (padding) and 1 (real token) only"):
        ig_lens(cache, attention_mask=2 * torch.ones(2, 6))
    with refused_unrun(
        model, ValueError, "logits must have shape [batch, pos, d_vocab_out] = (2, 6, 50)", "(2, 6, 49)"
    ):
        ig_lens(cache, logits=torch.zeros(2, 6, 49))
    with refused_unrun(model, TypeError, "logits= must be a tensor", "ndarray"):
        ig_lens(cache, logits=np.zeros((2, 6, 50)))
    with refused_unrun(model, ValueError, "[batch, pos] = (2, 6)", "(1, 6)", "the tokens that the cache was made with"):
        ig_lens(cache, TOKENS)
    with refused_unrun(model, ValueError, "(2, 6)", "(2, 5)", "leave the input out"):
        ig_lens(cache, BATCH[:, :5])


@each_kind
def test_a_padded_batch_in_a_cache_needs_its_tokens(kind: str, tmp_path: Any) -> None:
    model = speaking(kind, tmp_path)
    cache = cached(model, BATCH)
    with refused_unrun(model, ValueError, "2 prompts", "nothing says where they are padded", "attention_mask="):
        ig_lens(cache)
    with untouched(model):
        ig_lens(cache, attention_mask=torch.ones(2, 6))
        ig_lens(cache, BATCH)


@each_kind
def test_a_cache_without_values(kind: str) -> None:
    model = subject(kind).model
    cache = {name: tensor.to("meta") for name, tensor in cached(model, TOKENS).items() if name in NAMES}
    with refused_unrun(
        model, ValueError, "meta device", "blocks.0.hook_resid_pre", "no values", "run the model on a real device"
    ):
        ig_lens(model, TOKENS, cache=cache, targets=7)


@each_kind
def test_a_cache_without_a_batch_axis_is_of_one_prompt(kind: str) -> None:
    """`run_with_cache(two prompts, remove_batch_dim=True)` keeps the first prompt alone in TransformerLens 2 and 3."""
    model = subject(kind).model
    cache = cached(model, TOKENS)
    cache.remove_batch_dim()
    with refused_unrun(model, ValueError, "(1, 6)", "(2, 6)", "a cache without a batch axis is of one prompt"):
        ig_lens(cache, BATCH)


@each_kind
def test_states_of_different_shapes(kind: str) -> None:
    model = subject(kind).model
    cache = {name: tensor.clone() for name, tensor in cached(model, BATCH).items() if name in NAMES}
    cache["blocks.1.hook_resid_pre"] = cache["blocks.1.hook_resid_pre"][:, :4]
    with refused_unrun(model, ValueError, "differ in shape", "(2, 6, 32)", "(2, 4, 32)", "blocks.1.hook_resid_pre"):
        ig_lens(model, cache=cache, targets=7)


@each_kind
def test_mid_states_where_attention_and_mlp_are_parallel(kind: str) -> None:
    model = tiny(kind, parallel_attn_mlp=True)
    parts = ("incl_mid", "between attention and MLP", "blocks.0.hook_resid_mid", "Leave incl_mid=False")
    with refused_unrun(model, UnsupportedModelError, *parts):
        ig_lens(model, TOKENS, incl_mid=True)
    cache = cached(model, TOKENS)
    with refused_unrun(model, UnsupportedModelError, *parts):
        ig_lens(cache, incl_mid=True)
    with refused_unrun(model, UnsupportedModelError, "blocks.1.hook_resid_mid"):
        ig_lens(cache, layers=["1_mid"])


@each_kind
def test_mid_states_of_attention_alone(kind: str) -> None:
    model = tiny(kind, attn_only=True)
    with refused_unrun(model, UnsupportedModelError, "blocks.0.hook_resid_mid", "attention-only"):
        ig_lens(model, TOKENS, incl_mid=True)
