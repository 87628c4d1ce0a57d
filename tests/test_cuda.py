"""On a real GPU: the numbers of the CPU, readouts in half precision, memory, and models on two GPUs.

The checks are those of `tests.accelerated`, which run everywhere on a pretended device (tests/test_devices.py). What only a
GPU shows is that its kernels give these numbers, that half precision there is as good as `tests.accelerated` reckons,
what torch's allocator really takes, and that models really spread run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import accelerated
from tests.accelerated import CALLS, HALVES, READOUTS, SPREAD
from tests.subjects import each_kind

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA device: not checked here are a GPU's own kernels (float32 and half precision) and its peak memory; "
    "where tensors are put is checked in tests/test_devices.py",
)
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two CUDA devices: not checked here is that models really run on two; where their tensors are put is checked in "
    "tests/test_devices.py",
)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@each_kind
@pytest.mark.parametrize("call", READOUTS)
def test_a_gpu_gives_the_cpus_numbers(kind: str, call: str) -> None:
    accelerated.readout_as_on_the_cpu(kind, "cuda", call)


@each_kind
@pytest.mark.parametrize("dtype", [None, torch.float64, *HALVES], ids=str)
def test_credits_add_up(kind: str, dtype: torch.dtype | None) -> None:
    accelerated.credits_add_up(kind, "cuda", dtype)


@each_kind
@each_half
def test_a_readout_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    accelerated.half_readout(kind, "cuda", dtype)


@each_kind
@each_half
def test_companions_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    accelerated.half_companions(kind, "cuda", dtype)


@each_kind
@each_half
def test_a_model_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    accelerated.half_model(kind, "cuda", dtype)


@each_kind
def test_inputs_caches_and_lenses_lie_anywhere(kind: str) -> None:
    accelerated.anything_from_anywhere(kind, "cuda")


@each_kind
@pytest.mark.parametrize("call", accelerated.BOUNDED)
def test_memory_stays_within_the_budget(kind: str, call: str) -> None:
    accelerated.memory_is_bounded(kind, "cuda", torch.cuda, call)


@pytest.fixture(scope="module")
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return accelerated.spread(request.param, folder)


@two_gpus
@pytest.mark.parametrize("spread", SPREAD, indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_two_gpus_give_the_cpus_numbers(spread: tuple[Any, Any], call: str) -> None:
    accelerated.spread_as_on_the_cpu(spread, call)
