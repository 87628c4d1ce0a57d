"""Bridges whose weights are offloaded by accelerate, which is put on and taken off again at every call of a module.

What goes through the model's own modules works as ever; what needs a weight itself is refused, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from iglens_tl import (
    UnsupportedModelError,
    ablate_layers,
    compare,
    direct_logit_attribution,
    doctor,
    ig_lens,
    logit_lens,
    split,
)
from tests import models
from tests.accelerated import assert_same
from tests.families import FAMILIES
from tests.models import BATCH
from tests.subjects import fresh, saved, word_level

pytestmark = pytest.mark.offloads


@pytest.fixture(scope="module", params=["disk", "cpu"])
def offloaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of which every weight is on the meta device."""
    from accelerate import cpu_offload, dispatch_model
    from transformer_lens.model_bridge import TransformerBridge

    hf_model, folder = FAMILIES["Llama"].build(), tmp_path_factory.mktemp("model")
    if request.param == "cpu":
        cpu_offload(hf_model, execution_device=torch.device("cpu"))
    else:
        names = [
            "model.embed_tokens",
            "model.rotary_emb",
            *(f"model.layers.{i}" for i in range(3)),
            "model.norm",
            "lm_head",
        ]
        dispatch_model(hf_model, dict.fromkeys(names, "disk"), offload_dir=folder, main_device="cpu", force_hooks=True)
    tokenizer = saved(word_level(), Path(folder))
    with models.same_randomness():
        bridge = TransformerBridge.boot_transformers(
            "tiny/llama", hf_model=hf_model, tokenizer=tokenizer, dtype=torch.float32
        )
    assert all(parameter.is_meta for parameter in bridge.parameters())
    return bridge


WORKS: dict[str, Callable[[Any], Any]] = {
    "ig_lens": lambda model: ig_lens(model, BATCH, positions=None),
    "integrated": lambda model: ig_lens(model, BATCH, estimator="midpoint", n_steps=2),
    "logit_lens": lambda model: logit_lens(model, BATCH),
    "compare": lambda model: compare(model, BATCH, methods=["ig_lens", "logit_lens"]),
    "ablate_layers": lambda model: ablate_layers(model, BATCH[:1], progress=False),
}


@pytest.mark.parametrize("call", WORKS.values(), ids=WORKS)
def test_what_goes_through_the_modules_works(offloaded: Any, call: Callable[[Any], Any]) -> None:
    assert_same(call(offloaded), call(fresh("bridge").model))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another precision": (lambda model: ig_lens(model, BATCH, dtype=torch.float64), "offloaded.*dtype=None"),
    "split": (lambda model: split(model, BATCH), "offloaded"),
    "DLA": (lambda model: direct_logit_attribution(model, BATCH), "offloaded"),
    "heads": (lambda model: split(model, BATCH, unit="head"), "offloaded"),
    "neurons": (lambda model: split(model, BATCH, unit="neuron"), "offloaded"),
    "ablated heads": (lambda model: ablate_layers(model, BATCH, component="head", progress=False), "offloaded"),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_a_weight_is_refused_with_the_reason(offloaded: Any, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        call(offloaded)


def test_the_doctor_looks_at_an_offloaded_model(offloaded: Any) -> None:
    assert "offloaded" in str(doctor(offloaded))
