"""Reading in tiles of the vocabulary: against a closed form in float64, wherever the targets lie and however narrow a tile is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from iglens_tl import NEXT, TOP, Estimate, estimate, ig_lens
from iglens_tl._core import readout as module
from iglens_tl._core.readout import TILE_ROWS, Readout, read, value_and_gradient
from iglens_tl._model.head import readout_of
from iglens_tl._model.host import host_of
from tests.subjects import D_VOCAB, ROWS, cached, each_kind, padded, subject, tiny

D_MODEL, WORDS, N = 24, 997, 700  # more rows than a tile has, and a vocabulary that no tile divides
GROUPS = ((1,), (3,), (2, 1))


def made(dtype: torch.dtype, bias: bool, scale: float = 1.0) -> tuple[Readout, torch.Tensor, torch.Tensor]:
    """A readout that is one matrix, rows, and their logits in float64."""
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(D_MODEL, WORDS, generator=draw).to(dtype)
    b = torch.randn(WORDS, generator=draw).to(dtype) if bias else None
    rows = scale * torch.randn(N, D_MODEL, generator=draw).to(dtype)

    def unembed(states: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return states @ weight if b is None else states @ weight + b

    readout = Readout(lambda states: states, unembed, None, D_MODEL, WORDS, torch.device("cpu"), dtype, (weight, b))
    logits = rows.double() @ weight.double() + (0 if b is None else b.double())
    return readout, rows, logits


def targets(widths: tuple[int, ...]) -> list[torch.Tensor]:
    """Groups that share no word, over the whole vocabulary; the last word of a wide group is filler in every third row."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(WORDS, generator=draw)[: sum(widths)] for _ in range(N)])
    ids[0, 0], ids[1, 0] = 0, WORDS - 1
    groups = [group.clone() for group in ids.split(list(widths), dim=1)]
    for group in groups:
        if group.shape[1] > 1:
            group[::3, -1] = -1
    return groups


def in_words(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the probability of a group, and of everything else, by summing what is in it and what is not."""
    member = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids.clamp(min=0), ids >= 0)
    member = member | torch.zeros_like(member).scatter(1, ids[:, :1], True)  # a filler pointed at word 0
    inside = logits.masked_fill(~member, -torch.inf).logsumexp(1)
    outside = logits.masked_fill(member, -torch.inf).logsumexp(1)
    return inside - logits.logsumexp(1), outside - logits.logsumexp(1)


def all_read(readout: Readout, rows: torch.Tensor, groups: list[torch.Tensor], budget: int | None = None):
    readout = readout if budget is None else dataclasses.replace(readout, budget=budget)
    return read(readout, lambda i: rows[i], lambda i: [group[i] for group in groups], len(rows))


@pytest.mark.parametrize("budget", [None, 40_000, 64], ids=["default", "narrow tiles", "the least there is"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", GROUPS, ids=str)
def test_tiles_are_the_closed_form(widths, bias, budget) -> None:
    readout, rows, logits = made(torch.float64, bias)
    groups = targets(widths)
    levels = all_read(readout, rows, groups, budget)
    for place, group in enumerate(groups):
        log_target, log_rest = in_words(logits, group)
        # float64: sums of a thousand exponentials, and a product of 24 terms
        assert levels.log_target[place] == pytest.approx(log_target, abs=1e-11)
        assert levels.log_rest[place] == pytest.approx(log_rest, abs=1e-11)
    assert levels.log_top == pytest.approx(logits.log_softmax(1).amax(1), abs=1e-11)
    first = groups[0]
    best = logits.argmax(1, keepdim=True)
    assert torch.equal(levels.is_top, ((first == best) & (first >= 0)).any(1))
    if widths == (1,):
        assert levels.logit[0] == pytest.approx(logits.gather(1, first)[:, 0], abs=1e-11)


def test_tiles_in_float32_are_as_good_as_float32_logits() -> None:
    readout, rows, logits = made(torch.float32, True)
    (group,) = targets((1,))
    levels = all_read(readout, rows, [group])
    log_target, _ = in_words(logits, group)
    # logits of size 15 in float32 are off by 1e-6; a probability below 1 by no more than that
    assert levels.value("prob")[:] == pytest.approx(log_target.exp(), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_near_certain_target_keeps_the_digits_of_its_odds(dtype) -> None:
    readout, rows, logits = made(dtype, False, scale=60.0)
    group = logits.argmax(1, keepdim=True)  # 1 - p is far below what 1 minus a float can say, for many rows
    levels = all_read(readout, rows, [group])
    _, log_rest = in_words(logits, group)
    certain = log_rest < -100
    assert int(certain.sum()) > 20
    tolerance = (
        1e-9 if dtype == torch.float64 else 5e-3
    )  # logits of size 1000 in float32 are off by 1e-4, summed over 24 terms
    assert levels.log_rest[0][certain] == pytest.approx(log_rest[certain], abs=tolerance)
    assert levels.value("log_odds")[certain].isfinite().all()


def test_tiles_are_what_reading_whole_rows_gives() -> None:
    readout, rows, _ = made(torch.float32, True)
    groups = targets((2, 1))
    whole = all_read(dataclasses.replace(readout, linear=None), rows, groups)
    tiles = all_read(readout, rows, groups)
    for metric in ("prob", "log_prob", "log_odds", "logit"):
        assert tiles.value(metric) == pytest.approx(whole.value(metric), abs=5e-6), metric  # two float32 products
    assert torch.equal(tiles.is_top, whole.is_top)


def test_whole_rows_are_read_as_many_at_a_time_as_the_budget_holds() -> None:
    readout, rows, _ = made(torch.float32, False)
    sizes: list[int] = []

    def unembed(states: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        sizes.append(len(states))
        return readout.unembed(states, out)

    all_read(
        dataclasses.replace(readout, linear=None, unembed=unembed),
        rows,
        targets((1,)),
        budget=2 * 5 * (4 * (2 * WORDS + 6 * D_MODEL) + 96) + 33 * N,  # 33 bytes are kept of every row
    )
    assert max(sizes) == 5, "half of it is for what is made of the logits, of which a module makes two"
    assert sum(sizes) == N


@each_kind
def test_models_with_a_plain_unembedding_are_read_in_tiles(kind) -> None:
    model = subject(kind).model
    readout = readout_of(host_of(model))
    assert readout.in_tiles
    assert readout.linear[0].data_ptr() == model.W_U.data_ptr(), "no copy of the unembedding"
    assert not readout_of(host_of(model), torch.bfloat16).in_tiles
    assert TILE_ROWS > 0


@each_kind
def test_an_unembedding_cast_in_pieces_is_the_one_cast_whole(kind) -> None:
    model = tiny(kind, d_vocab=300)
    whole, pieces = (readout_of(host_of(model), torch.float64, max_memory) for max_memory in (2**30, 2**15))
    rows = torch.randn(5, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    groups = [torch.tensor([[7], [0], [299], [64], [63]])]
    exact = (rows.double() @ model.W_U.detach().double()) + model.b_U.detach().double()
    for readout in (whole, pieces):
        # float64, summed over the width in another order; the norm of a model without one would leave rows as they are
        assert (dataclasses.replace(readout, norm=lambda states: states).logits(rows) - exact).abs().max() <= 1e-12
    one, other = (value_and_gradient(readout, rows, groups, "prob") for readout in (whole, pieces))
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    held: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            held.append(out.nbytes if isinstance(out, torch.Tensor) and out.shape[:1] == (model.cfg.d_model,) else 0)
            return out

    with Watch():
        value_and_gradient(pieces, rows, groups, "prob")
    assert 0 < max(held) <= 8 * model.cfg.d_model * 64, "never more than 64 words in float64"


CALLS = {
    "default": {},
    "all positions": {"positions": None},
    "next": {"targets": NEXT, "positions": None},
    "steps": {"n_steps": 4, "positions": None},
    "integrating": {"estimator": "gauss_legendre", "n_steps": 3},
    "trapezoid": {"estimator": "trapezoid", "n_steps": 3},
    "few layers from zero": {"layers": [1], "baseline": "zero"},
    "sublayers": {"incl_mid": True},
}


def counted(call, monkeypatch) -> tuple[int, int]:
    """Rows that pass the final norm of the readout, and those of them that are read with a gradient."""
    rows, with_gradient = [], []
    tiles, logits, gradient = module._levels_in_tiles, Readout.logits, module.value_and_gradient
    monkeypatch.setattr(module, "_levels_in_tiles", lambda r, x, *rest: rows.append(len(x)) or tiles(r, x, *rest))
    monkeypatch.setattr(Readout, "logits", lambda self, x, out=None: rows.append(len(x)) or logits(self, x, out))
    monkeypatch.setattr(
        "iglens_tl._core.segments.value_and_gradient",
        lambda r, x, *rest: with_gradient.append(len(x)) or gradient(r, x, *rest),
    )
    call()
    return sum(rows), sum(with_gradient)


@each_kind
@pytest.mark.parametrize("settings", CALLS.values(), ids=CALLS)
def test_the_estimate_is_what_the_call_reads(kind, settings, monkeypatch) -> None:
    model = subject(kind).model
    tokens, mask = padded("right")
    found = estimate(model, tokens, attention_mask=mask, **settings)
    rows, with_gradient = counted(lambda: ig_lens(model, tokens, attention_mask=mask, **settings), monkeypatch)
    alike = (
        0 if settings.get("baseline") != "zero" else len(mask) - 1
    )  # of two prompts' zeros the second may be read or not
    assert found.rows - alike <= rows <= found.rows
    assert found.gradient_rows == with_gradient
    assert found.flops == 2 * (found.rows + 2 * with_gradient) * model.cfg.d_model * D_VOCAB
    assert found.forwards == 1


@each_kind
def test_the_estimate_of_a_cache(kind, monkeypatch) -> None:
    model = subject(kind).model
    tokens = ROWS[0][None]
    cache = cached(model, tokens)
    found = estimate(cache, tokens, positions=None)
    rows, _ = counted(lambda: ig_lens(cache, tokens, positions=None), monkeypatch)
    assert found.rows == rows == found.n_states * found.n_tokens, (
        "the last states that say what TOP is are not read twice"
    )
    through, _ = counted(lambda: ig_lens(cache, tokens, positions=None, lens=lambda state, _: state), monkeypatch)
    assert estimate(cache, tokens, positions=None, lens=lambda state, _: state).rows == through == rows + found.n_tokens
    assert found.forwards == 0
    assert found.logits_bytes == 4 * (found.rows - found.n_tokens) * D_VOCAB, (
        "a tile of all but the last states, which is more than these whole"
    )
    assert found.state_bytes == 0, "they stay in the cache"
    slopes = estimate(cache, tokens, positions=None, estimator="midpoint", n_steps=3)
    assert slopes.logits_bytes == 7 * 4 * slopes.gradient_rows * D_VOCAB
    asked = estimate(cache, tokens, positions=None, targets=7)
    assert asked.rows == asked.n_states * asked.n_tokens
    assert estimate(model, tokens, positions=None).state_bytes == 4 * asked.rows * model.cfg.d_model
    assert isinstance(asked, Estimate)
    assert f"{asked.rows:,} rows" in str(asked)
    assert "no forward pass" in str(asked)


@each_kind
@pytest.mark.parametrize("targets", [7, TOP], ids=["an id", "TOP"])
@pytest.mark.parametrize("asked", ["model", "cache", "cache and logits"])
def test_the_estimate_says_how_many_rows_are_read_at_a_time(kind, asked, targets, monkeypatch) -> None:
    model, tokens = (
        tiny(kind, d_vocab=300),
        torch.arange(300).reshape(25, 12),
    )  # no word twice, so no state is read once for two
    settings: dict = {"positions": None, "targets": targets}
    if asked == "cache and logits":
        settings["logits"] = model(tokens)
    of = model if asked == "model" else cached(model, tokens)
    found = estimate(of, tokens, **settings)
    seen: list[int] = []
    tiles = module._levels_in_tiles
    monkeypatch.setattr(module, "_levels_in_tiles", lambda r, x, *rest: seen.append(len(x)) or tiles(r, x, *rest))
    ig_lens(of, tokens, **settings)
    assert max(seen) == found.chunk_rows < TILE_ROWS < found.rows, "what is kept of all rows has its place among them"


@each_kind
def test_an_estimate_checks_its_arguments(kind) -> None:
    model = subject(kind).model
    with pytest.raises(ValueError, match="estimator must be one of"):
        estimate(model, ROWS[0], estimator="simpson")
    with pytest.raises(ValueError, match="ids"):
        estimate(model, ROWS[0], targets=D_VOCAB)
