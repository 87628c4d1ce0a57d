"""Where tensors are put, on pretended accelerators (`tests.devices`): no call mixes devices, all numbers are the CPU's.

A pretended device computes on the CPU, so nothing here says how a GPU rounds or how much memory its kernels take; that is
tests/test_cuda.py, which runs the same checks (`tests.accelerated`) where there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from iglens_tl import ig_lens
from tests import accelerated
from tests.accelerated import CALLS, HALVES, READOUTS, SPREAD
from tests.devices import Ledger, MixedDevicesError, place, pretended
from tests.models import BATCH
from tests.subjects import each_kind, fresh, one_kind, residual_names

Tensor = torch.Tensor
CUDA = [torch.device("cuda", i) for i in range(3)]


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with pretended() as ledger:
        yield ledger


# --- The pretence ------------------------------------------------------------------------------------------------


def on(device: int, *shape: int) -> Tensor:
    return torch.ones(shape, device=CUDA[device])


MIXED: dict[str, Callable[[], Any]] = {
    "addition": lambda: on(0, 2) + on(1, 2),
    "with the CPU": lambda: torch.ones(2) * on(0, 2),
    "a product": lambda: on(0, 2, 2) @ on(1, 2, 2),
    "a fused product": lambda: torch.addmm(on(1, 2), on(0, 2, 2), on(0, 2, 2)),
    "a list": lambda: torch.cat([on(0, 2), on(1, 2)]),
    "a list of numbers": lambda: torch.stack([torch.tensor(1.0), on(0)]),
    "out": lambda: torch.mm(on(0, 2, 2), on(0, 2, 2), out=torch.empty(2, 2)),
    "in place": lambda: on(0, 2).add_(torch.ones(2)),
    "a number on another accelerator": lambda: torch.ones(2) + on(0),
    "gather": lambda: on(0, 2, 2).gather(1, torch.zeros(2, 1, dtype=torch.long)),
    "an index elsewhere": lambda: torch.ones(2)[on(0, 1).long()],
    "a value elsewhere": lambda: on(0, 2).__setitem__(torch.tensor([0]), torch.ones(1)),
    "a module": lambda: torch.nn.LayerNorm(2).to("cuda:1")(on(0, 2)),
    "equal": lambda: torch.equal(on(0, 2), torch.ones(2)),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
@pytest.mark.usefixtures("ledger")
def test_the_pretence_refuses_what_torch_refuses(mixed: Callable[[], Any]) -> None:
    with pytest.raises(MixedDevicesError, match="device"):
        mixed()


@pytest.mark.usefixtures("ledger")
def test_the_pretence_refuses_arrays_and_generators_elsewhere() -> None:
    with pytest.raises(TypeError, match="NumPy"):
        on(0, 2).numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, generator=torch.Generator(), device="cuda")


def _assigned(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


ALLOWED: dict[str, tuple[Callable[[], Tensor], torch.device]] = {
    "a factory": (lambda: torch.arange(3, device="cuda"), CUDA[0]),
    "like another": (lambda: torch.zeros_like(on(1, 2)), CUDA[1]),
    "one kind": (lambda: (on(1, 2) + 1).exp().double()[0], CUDA[1]),
    "a number on the CPU": (lambda: on(1, 2) * torch.tensor(2.0), CUDA[1]),
    "an index on the CPU": (lambda: on(1, 2)[torch.tensor([0])], CUDA[1]),
    "a plain assignment": (lambda: _assigned(on(1, 2), slice(0, 1), torch.ones(1)), CUDA[1]),
    "a number into a mask": (lambda: _assigned(on(1, 2), torch.tensor([True, False]), 0.0), CUDA[1]),
    "copy_": (lambda: on(1, 2).copy_(torch.ones(2)), CUDA[1]),
    "to": (lambda: torch.ones(2).to("cuda:1", torch.float64), CUDA[1]),
    "to a number": (lambda: torch.ones(2).to(1), CUDA[1]),
    "to another's": (lambda: torch.ones(2).to(on(2, 1)), CUDA[2]),
    "cpu": (lambda: on(1, 2).cpu(), torch.device("cpu")),
    "unpacked": (lambda: next(iter(on(1, 2))), CUDA[1]),
    "a pair": (lambda: on(1, 2).sort().values, CUDA[1]),
    "a view": (lambda: on(1, 2, 2).T, CUDA[1]),
    "a module": (lambda: torch.nn.LayerNorm(2).to("cuda:1")(on(1, 2)), CUDA[1]),
    "a parameter": (lambda: torch.nn.Parameter(on(1, 2)), CUDA[1]),
}


@pytest.mark.parametrize(("allowed", "where"), ALLOWED.values(), ids=ALLOWED)
@pytest.mark.usefixtures("ledger")
def test_the_pretence_puts_results_where_torch_puts_them(allowed: Callable[[], Tensor], where: torch.device) -> None:
    result = allowed()
    assert place(result) == result.device == where


@pytest.mark.usefixtures("ledger")
def test_the_pretence_moves_by_copying_and_leaves_at_home_what_is_there() -> None:
    tensor = torch.ones(2)
    moved = tensor.to("cuda")
    moved.zero_()
    assert tensor.tolist() == [1, 1]
    assert moved.to("cuda:0") is moved
    assert moved.cuda() is moved
    assert tensor.cpu() is tensor


@pytest.mark.usefixtures("ledger")
def test_the_pretence_hands_gradients_back_where_they_belong() -> None:
    leaf = on(0, 2).requires_grad_(True)
    (gradient,) = torch.autograd.grad((leaf.to("cuda:1") * on(1, 2)).sum(), leaf)
    assert gradient.device == CUDA[0]
    assert gradient.tolist() == [1, 1]


def test_the_ledger_counts_what_exists(ledger: Ledger) -> None:
    kept = torch.zeros(1000, device="cuda")
    view = kept[:10]
    torch.zeros(5000, device="cuda")
    assert (ledger.now, ledger.peak) == (4000, 24_000)
    del kept
    assert ledger.now == 4000
    del view
    ledger.restart()
    assert (ledger.now, ledger.peak) == (0, 0)


def test_the_pretence_ends() -> None:
    with pretended():
        far = torch.ones(2, device="cuda")
    assert far.device.type == "cpu"
    assert torch.nn.Parameter(torch.ones(1)).device.type == "cpu"
    assert torch.cuda.device_count() == REAL_GPUS


REAL_GPUS = torch.cuda.device_count()


# --- One device --------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("call", READOUTS)
@pytest.mark.usefixtures("ledger")
def test_an_accelerator_gives_the_cpus_numbers(kind: str, call: str) -> None:
    accelerated.readout_as_on_the_cpu(kind, "cuda", call)


@each_kind
@pytest.mark.parametrize("dtype", [None, torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("ledger")
def test_credits_add_up(kind: str, device: str, dtype: torch.dtype | None) -> None:
    accelerated.credits_add_up(kind, device, dtype)


@each_kind
@pytest.mark.parametrize("check", [accelerated.half_readout, accelerated.half_companions, accelerated.half_model])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("ledger")
def test_half_precision(kind: str, device: str, dtype: torch.dtype, check: Callable[..., None]) -> None:
    check(kind, device, dtype)


@each_kind
@pytest.mark.usefixtures("ledger")
def test_inputs_caches_and_lenses_lie_anywhere(kind: str) -> None:
    accelerated.anything_from_anywhere(kind, "cuda")


@one_kind
@pytest.mark.parametrize("call", accelerated.BOUNDED)
@pytest.mark.usefixtures("ledger")
def test_memory_stays_within_the_budget(kind: str, call: str) -> None:
    accelerated.memory_is_bounded(kind, "cuda", torch.cuda, call)


# --- Several devices ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Models on two pretended devices by name, made once."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return functools.cache(lambda name: accelerated.spread(name, folder))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call) for name in SPREAD for call in (READOUTS if name == "bridge" else CALLS)
    ],  # the tied one is as spread
)
@pytest.mark.usefixtures("ledger")
def test_models_on_two_devices_give_the_cpus_numbers(
    spread: Callable[[str], tuple[Any, Any]], name: str, call: str
) -> None:
    accelerated.spread_as_on_the_cpu(spread(name), call)


@each_kind
@pytest.mark.parametrize("arguments", [{}, {"n_steps": 3}, {"estimator": "right", "n_steps": 2}], ids=str)
@pytest.mark.usefixtures("ledger")
def test_states_of_a_cache_lie_on_as_many_devices_as_there_are(kind: str, arguments: dict[str, Any]) -> None:
    """Each state on another device, and the readout on the CPU or on one of them."""
    model = fresh(kind).model
    with torch.no_grad():
        cache = model.run_with_cache(BATCH)[1]
    given = {"targets": 9, "positions": None, "attention_mask": torch.ones_like(BATCH), **arguments}
    wanted = ig_lens(model, cache=cache, **given)
    apart = {name: cache[name].to(CUDA[i % 3]) for i, name in enumerate(residual_names())}
    accelerated.assert_same(ig_lens(model, cache=apart, **given), wanted)
    model.to("cuda:1")
    accelerated.assert_same(ig_lens(model, cache=apart, **given), wanted)


READ = [{}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"estimator": "midpoint", "n_steps": 2}]


@each_kind
@pytest.mark.parametrize("arguments", READ, ids=str)
@pytest.mark.parametrize("unembedding", ["cpu", "cuda:0"])
@pytest.mark.usefixtures("ledger")
def test_norm_and_unembedding_lie_apart(kind: str, unembedding: str, arguments: dict[str, Any]) -> None:
    """As with a tied unembedding, which stays with the embedding while the norm goes with the last block."""
    model = fresh(kind).model
    with torch.no_grad():
        logits, cache = model.run_with_cache(BATCH)
    given = {"positions": None, "attention_mask": torch.ones_like(BATCH), "logits": logits, **arguments}
    wanted = ig_lens(model, cache=cache, **given)
    model.unembed.to(unembedding)
    model.ln_final.to("cuda:1")
    accelerated.assert_same(ig_lens(model, cache=cache, **given), wanted)


@pytest.mark.bridge
@pytest.mark.parametrize("arguments", [{}, {"estimator": "midpoint", "n_steps": 2}], ids=str)
@pytest.mark.usefixtures("ledger")
def test_an_unembedding_answers_from_where_it_ran(arguments: dict[str, Any]) -> None:
    """As an offloaded one does, whose weights are nowhere between two calls."""
    model = fresh("bridge").model
    with torch.no_grad():
        logits, cache = model.run_with_cache(BATCH)
    given = {"cache": cache, "positions": None, "attention_mask": torch.ones_like(BATCH), "logits": logits, **arguments}
    wanted = ig_lens(model, **given)
    model.unembed.original_component.register_forward_hook(lambda _, args, out: out.to("cuda:1"))
    accelerated.assert_same(ig_lens(model, **given), wanted)
