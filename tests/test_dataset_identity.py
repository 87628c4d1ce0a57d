"""A run is gone on with only by the same run: a `lens` and hooks are told apart by what they do and hold, in any process."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from iglens_tl import run_dataset
from iglens_tl._model.host import hook_functions, host_of
from iglens_tl._model.identity import function_identity
from tests.subjects import D_MODEL, N_LAYERS, each_kind, fresh

PROMPTS = [[i % 50, (7 * i) % 50] for i in range(12)]
POINT = "blocks.1.hook_resid_pre"
ITS_OWN_NAME = r"blocks\.1\.hook_(resid_pre|in)"
"""As the point calls itself: a bridge has other names for it."""


class Translators(torch.nn.Module):
    """One for each state; nothing at the last."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(N_LAYERS, D_MODEL, D_MODEL, generator=generator) / 10)

    def forward(self, state: Tensor, index: int) -> Tensor:
        return state if index == N_LAYERS else state + state @ self.weight[index]


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, state: Tensor, index: int) -> Tensor:
        return state if index == N_LAYERS else state * self.factor


def closure(factor: float) -> Callable[[Tensor, int], Tensor]:
    return lambda state, index: state if index == N_LAYERS else state * factor


def default(factor: float) -> Callable[[Tensor, int], Tensor]:
    def scaled(state: Tensor, index: int, by: float = factor) -> Tensor:
        return state if index == N_LAYERS else state * by

    return scaled


def part(factor: float) -> Callable[[Tensor, int], Tensor]:
    return partial(default(1.0), by=factor)


LENSES = {"module": Translators, "object": Scaled, "closure": closure, "default": default, "partial": part}


def hook(factor: float) -> Callable[..., Tensor]:
    return lambda state, hook: state * factor


def interrupted(model: Any, out: Path, **settings: Any) -> None:
    run_dataset(model, PROMPTS, out, batch_size=4, **settings)
    next(out.glob("*.parquet")).unlink()


@each_kind
@pytest.mark.parametrize("make", LENSES.values(), ids=LENSES)
def test_a_run_goes_on_with_the_same_lens_and_no_other(make, kind, tmp_path) -> None:
    model = fresh(kind).model
    interrupted(model, tmp_path, lens=make(2))
    with pytest.raises(ValueError, match=r"holds another run: settings: lens '.*' there, '.*' here"):
        run_dataset(model, PROMPTS, tmp_path, lens=make(3))
    with pytest.raises(ValueError, match="holds another run: settings: lens"):
        run_dataset(model, PROMPTS, tmp_path)
    assert run_dataset(model, PROMPTS, tmp_path, batch_size=4, lens=make(2)).is_complete


@each_kind
def test_a_run_goes_on_with_the_same_hooks_and_no_other(kind, tmp_path) -> None:
    model = fresh(kind).model
    with model.hooks(fwd_hooks=[(POINT, hook(2.0))]):
        interrupted(model, tmp_path)
    for others in ([(POINT, hook(3.0))], [(POINT, hook(2.0)), (POINT, hook(1.0))], []):
        with model.hooks(fwd_hooks=others), pytest.raises(ValueError, match="holds another run: model: hooks"):
            run_dataset(model, PROMPTS, tmp_path)
    with model.hooks(fwd_hooks=[(POINT, hook(2.0))]):
        assert run_dataset(model, PROMPTS, tmp_path, batch_size=4).is_complete
    (told,) = json.loads((tmp_path / "_run.json").read_text())["identity"]["model"]["hooks"]
    assert re.match(rf"{ITS_OWN_NAME}: tests\.test_dataset_identity\.hook\.<locals>\.<lambda> [0-9a-f]{{16}}$", told)


@each_kind
def test_what_cannot_be_told_apart_is_refused_at_the_start(kind, tmp_path) -> None:
    model = fresh(kind).model
    numbers = (i for i in range(3))
    with pytest.raises(TypeError, match=r"lens cannot be pickled \(.*generator.*Let it hold tensors"):
        run_dataset(model, PROMPTS, tmp_path, lens=lambda state, _: state * len([numbers]))
    with (
        model.hooks(fwd_hooks=[(POINT, lambda state, hook: state * len([numbers]))]),
        pytest.raises(TypeError, match=rf"the hook on {ITS_OWN_NAME} cannot be pickled"),
    ):
        run_dataset(model, PROMPTS, tmp_path)
    assert not list(tmp_path.iterdir())


@each_kind
def test_telling_apart_leaves_the_model_as_it_was(kind) -> None:
    model = fresh(kind).model
    before = [set(vars(module)) for module in model.modules()]
    function_identity(host_of(model), lambda state, _: model.unembed.W_U, "lens")
    assert [set(vars(module)) for module in model.modules()] == before
    again = copy.deepcopy(model)
    assert type(again) is type(model), "deepcopy asks for __reduce_ex__, too"


SCRIPT = """
import torch
from iglens_tl._model.host import hook_functions, host_of
from iglens_tl._model.identity import function_identity
from tests.subjects import fresh
from tests.test_dataset_identity import LENSES, POINT

model = fresh({kind!r}).model
host = host_of(model)
weight = torch.arange(4.0)

class Held:
    def __init__(self):
        self.weight = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.weight.weight.fill_(3)

    def __call__(self, state, index):
        return self.weight(state)

def of_the_model(state, hook):
    return state @ model.unembed.W_U * weight.sum()

for make in LENSES.values():
    print(function_identity(host, make(2), "lens"))
print(function_identity(host, Held(), "lens"))
with model.hooks(fwd_hooks=[(POINT, of_the_model)]):
    for point, function in hook_functions(model):
        print(point, function_identity(host, function, "hook"))
"""


@each_kind
def test_another_process_tells_the_same(kind) -> None:
    """Also of what refers to the model, which keeps what differs from process to process."""
    script = SCRIPT.replace("{kind!r}", repr(kind))
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) == len(LENSES) + 2


@each_kind
def test_hooks_are_those_that_were_added_through_transformer_lens(kind) -> None:
    """A hook of PyTorch's own on the same point (a bridge wires itself with such) is not the user's."""
    model = fresh(kind).model
    mine = hook(2.0)
    bare = model.hook_dict[POINT].register_forward_hook(lambda module, given, state: None)
    assert hook_functions(model) == []
    with model.hooks(fwd_hooks=[(POINT, mine)]):
        ((_, function),) = hook_functions(model)
    assert function is mine
    bare.remove()
