"""How closely the last state must read as the model's own probability: to the digits that its dtypes have, and no less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from iglens_tl import NEXT, ReadoutMismatchError, doctor, ig_lens, split
from iglens_tl._agreement import agree, allowed, allowed_log, coarsest
from iglens_tl.demo import demo_model
from tests.smollm2 import DEFAULT, WAYS
from tests.subjects import each_kind, subject

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The river Seine flows through Paris.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
)
HALVES = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)


@pytest.fixture(scope="module", params=HALVES, ids=str)
def half_model(request: pytest.FixtureRequest) -> Any:
    return demo_model(WAYS[DEFAULT][0], dtype=request.param)


def asked(model: Any, **settings: Any) -> list[Any]:
    return [ig_lens(model, text, targets=NEXT, positions=None, layers=3, **settings) for text in TEXTS]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_precision_readout_of_a_real_model_is_no_mismatch(dtype, smollm2_default) -> None:
    """Logits near 20 are 0.125 apart in bfloat16; nearly every prompt was refused for that once."""
    for result in asked(smollm2_default, dtype=dtype):
        off = (result.values[-1] - result.model_value)[result.mask].abs()
        assert 0 < off.max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_a_real_model_in_half_precision_is_no_mismatch(dtype, half_model) -> None:
    for result in asked(half_model, dtype=dtype):
        off = (result.values[-1] - result.model_value)[result.mask].abs()
        assert off.max() < 0.1
        assert dtype is None or off.max() > 0, "the model's own logits are rounded, and these are not"


def test_the_companions_of_a_real_model_in_half_precision(half_model) -> None:
    split(half_model, TEXTS[0], unit="sublayer", layers=3)
    logits, cache = half_model.run_with_cache(TEXTS[0])
    ig_lens(cache, TEXTS[0], positions=None, layers=3, logits=logits, dtype=torch.float64)
    assert doctor(half_model).ok, str(doctor(half_model))


@pytest.mark.parametrize("dtype", [None, *HALVES, *WIDE], ids=str)
def test_a_last_state_that_is_normed_twice_is_refused_in_every_dtype(dtype, smollm2_default) -> None:
    """What the published script does; a second norm of RMSNorm differs by its weights alone."""
    norm = smollm2_default.ln_final

    def twice(state: torch.Tensor, index: int) -> torch.Tensor:
        return norm(state.to(torch.float32)).to(state.dtype) if index == smollm2_default.cfg.n_layers else state

    for text in TEXTS:
        with pytest.raises(ReadoutMismatchError, match="lens= changes the last state"):
            ig_lens(smollm2_default, text, targets=NEXT, positions=None, layers=1, dtype=dtype, lens=twice)


@pytest.mark.parametrize("dtype", [*HALVES, *WIDE], ids=str)
def test_rounding_of_two_logits_is_allowed_and_four_times_as_much_is_not(dtype) -> None:
    """Two words alone: each logit is off by as much as an input and an output that are rounded to nearest leave open."""
    eps = torch.finfo(dtype).eps
    for size, apart in ((20.0, 0.1), (40.0, 1.0), (200.0, 3.0)):
        exact = torch.tensor([size, size - apart], dtype=torch.float64)
        for units, good in ((2, True), (8, False)):  # of eps * size / 2
            moved = exact + torch.tensor([-0.5, 0.5], dtype=torch.float64) * units * eps * size / 2
            read, said = moved.log_softmax(-1), exact.log_softmax(-1)
            fine, off, most = agree(dtype, read, said, torch.tensor(size, dtype=torch.float64))
            if good or eps * size > 0.05:  # below that what is always allowed is more
                assert bool(fine.all()) is good
            assert (off - (read.exp() - said.exp()).abs()).abs().max() == 0
            assert (most > 0).all()


def test_small_logits_have_the_fixed_tolerances() -> None:
    nothing = torch.zeros(1, dtype=torch.float64)
    half = nothing + 0.5
    assert float(allowed(torch.float32, half, nothing + 20)) == pytest.approx(1e-5)
    assert float(allowed(torch.bfloat16, half, nothing)) == pytest.approx(1e-2)
    assert float(allowed(torch.bfloat16, half, nothing + 32)) == pytest.approx(0.125)  # 2 * 2^-7 * 32 / 4
    assert float(allowed(torch.bfloat16, half / 500, nothing + 32)) == pytest.approx(1e-2)
    assert float(allowed_log(torch.float32, nothing - 20, nothing + 20)) == pytest.approx(2e-3)
    assert float(allowed_log(torch.bfloat16, nothing, nothing + 32)) == pytest.approx(1.0)  # 4 * 2^-7 * 32
    assert coarsest(torch.float64, torch.bfloat16, torch.float16) == torch.bfloat16


def test_a_number_that_is_none_does_not_agree() -> None:
    numbers = torch.tensor([-1.0, float("nan")], dtype=torch.float64)
    good, _, _ = agree(torch.float32, numbers, torch.tensor([-1.0, -1.0]).double(), torch.tensor(1.0))
    assert good.tolist() == [True, False]


@each_kind
def test_the_most_probable_word_is_compared_where_the_target_agrees(kind) -> None:
    """Two words share what they had together: no other word's probability changes, and the largest one does."""
    model = subject(kind).model
    tokens = torch.tensor([[3, 14, 15, 9]])
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
    target = int(logits[0, -1].argmin())
    ig_lens(cache, tokens, targets=target, logits=logits)
    changed = logits.clone()
    first, last = logits[0, -1].argmax(), 7 if target != 7 else 8
    assert int(first) != last
    both = [int(first), last]
    changed[0, -1, both] = logits[0, -1, both].logsumexp(0) - math.log(2)
    torch.testing.assert_close(changed.log_softmax(-1)[0, -1, target], logits.log_softmax(-1)[0, -1, target])
    with pytest.raises(ReadoutMismatchError, match=r"logits= are of another run|something between its last block"):
        ig_lens(cache, tokens, targets=target, logits=changed)
