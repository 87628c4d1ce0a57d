"""What must hold on an accelerator, written once for a real one (tests/test_cuda.py) and a pretended one (tests/test_devices.py).

Every check makes its models on the CPU, computes there what is expected, moves them, and computes it again. `spread` are
models of four blocks on two GPUs, two blocks each:

- "hooked": embedding, blocks, norm and unembedding where `HookedTransformer` sends its states (`n_devices=2`). It is placed by
  hand: TransformerLens 2.18 and 3.9 put each module on the GPU that has most memory free, which for a small model need not be
  where its forward pass looks for it;
- "bridge": by accelerate, norm and unembedding with the last blocks;
- "bridge, tied": likewise, and an unembedding that is the embedding, so that it lies with the first blocks and the norm does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import iglens_tl
from iglens_tl import ig_lens, logit_lens
from iglens_tl._agreement import TOLERANCE
from tests import models
from tests.families import FAMILIES
from tests.models import BATCH
from tests.oracles import Head
from tests.subjects import fresh, saved, states_of, tiny, word_level
from tests.versions import APIS

Tensor = torch.Tensor
SPREAD = tuple(name for name in ("hooked", "bridge", "bridge, tied") if name.split(",")[0] in APIS)
HALVES = (torch.bfloat16, torch.float16)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""A GPU sums in another order than a CPU, in float32 (TensorFloat-32 is off by default, which is asserted). How much that can
do: these models in float64 differ from themselves in float32 by less than 0.15 of this, in every field of every call."""


def fields(result: Any) -> dict[str, Tensor]:
    """The tensors of a result."""
    named = ((field.name, getattr(result, field.name)) for field in dataclasses.fields(result))
    return {name: value for name, value in named if isinstance(value, Tensor)}


def assert_same(got: Any, wanted: Any) -> None:
    """All numbers of two results agree, and lie on the CPU."""
    found = fields(got)
    assert found.keys() == fields(wanted).keys()
    for name, value in fields(wanted).items():
        assert found[name].device.type == "cpu", name
        torch.testing.assert_close(
            found[name], value, **CLOSE, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


def full_float32() -> None:
    """The tolerances here are those of float32 products, which a user can switch off."""
    assert torch.get_float32_matmul_precision() == "highest"


# --- One device --------------------------------------------------------------------------------------------------

READOUTS: dict[str, Callable[..., Any]] = {
    "default": lambda model, **more: ig_lens(model, BATCH, positions=None, **more),
    "steps": lambda model, **more: ig_lens(model, BATCH, n_steps=3, targets=iglens_tl.TokenSet([3, 4]), **more),
    "midpoint": lambda model, **more: ig_lens(
        model, BATCH, estimator="midpoint", n_steps=3, metric="log_odds", targets=9, **more
    ),
    "mean, mid": lambda model, **more: ig_lens(model, BATCH, positions=None, baseline="mean", incl_mid=True, **more),
    "zero, difference": lambda model, **more: ig_lens(
        model, BATCH, baseline="zero", targets=9, incorrect_targets=3, **more
    ),
    "logit_lens": lambda model, **more: logit_lens(model, BATCH, positions=None, **more),
    "compare": lambda model, **more: iglens_tl.compare(model, BATCH, positions=None, **more),
    "DLA": lambda model, **_: iglens_tl.direct_logit_attribution(model, BATCH, positions=None, unit="head"),
    "split": lambda model, **more: iglens_tl.split(model, BATCH, **more),
}


def readout_as_on_the_cpu(kind: str, device: str, call: str) -> None:
    """A model moved to a device gives the CPU's numbers."""
    full_float32()
    model = fresh(kind).model
    wanted = READOUTS[call](model)
    model.to(device)
    assert model.unembed.W_U.device.type == torch.device(device).type
    assert_same(READOUTS[call](model), wanted)


def credits_add_up(kind: str, device: str, dtype: torch.dtype | None) -> None:
    """Whatever the readout's precision, the values are differences of float64 numbers."""
    model = fresh(kind).model.to(device)
    result = ig_lens(model, BATCH, positions=None, dtype=dtype)
    change = result.values[-1] - result.values[0]
    torch.testing.assert_close(result.attribution.sum(0), change, rtol=0, atol=1e-12)  # rounding of float64 sums
    assert result.gap.abs().max() <= 1e-12
    assert change.abs().max() > 0.01


def half_precision_bound(head: Head, states: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much reading in half precision can be off in probability, `[state, batch, pos]`.

    A logit is `sum_d x_d w_d + b`. Its size before anything cancels is `A = sum_d |x_d w_d| + |b|`. Rounded to a relative
    `eps / 2` are: the state, its norm's scale (an average of the former), the norm's weight and bias, the normed state, the
    unembedding, and the logit; products are summed in float32 or, on a GPU, partly in the half precision. Seven roundings of
    `A`, and one for what is left of them to second order: 4 eps A. A probability `p` moves by at most `p (1 - p)` times the
    spread of these errors over the vocabulary, 8 eps A, which is 2 eps A or less.
    """
    normed, unembed = head.normed(states), head.unembed
    size = normed.abs() @ unembed.abs().T
    size = size if head.unembed_bias is None else size + head.unembed_bias.abs()
    return 2 * torch.finfo(dtype).eps * size.amax(-1)


def half_readout(kind: str, device: str, dtype: torch.dtype) -> None:
    """A float32 model read in half precision: near the float32 readout, and the model's own at the last state."""
    made = fresh(kind)
    states = states_of(made.model.run_with_cache(BATCH)[1]).detach()
    bound = half_precision_bound(made.head, states, dtype)
    model = made.model.to(device)
    wide = ig_lens(model, BATCH, targets=9, positions=None)
    narrow = ig_lens(model, BATCH, targets=9, positions=None, dtype=dtype)
    assert narrow.settings["readout_dtype"] == str(dtype).removeprefix("torch.")
    off = (narrow.values - wide.values).abs()
    assert (off <= bound).all()
    assert off.max() > torch.finfo(torch.float32).eps  # it was read in half precision indeed
    assert (narrow.values[-1] - narrow.model_value).abs().max() <= TOLERANCE[dtype]


def half_companions(kind: str, device: str, dtype: torch.dtype) -> None:
    """The companions take the same `dtype`, and say of a state what `ig_lens` says of it."""
    model = fresh(kind).model.to(device)
    result = ig_lens(model, BATCH, targets=9, positions=None, dtype=dtype)
    levels = logit_lens(model, BATCH, targets=9, positions=None, dtype=dtype)
    # The same rows in chunks of another size: a kernel may round a half-precision logit the other way.
    close = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(levels.prob, result.values, **close)
    table = iglens_tl.compare(model, BATCH, methods=["ig_lens", "logit_lens"], targets=9, positions=None, dtype=dtype)
    torch.testing.assert_close(table.amounts[0], result.attribution, **close)
    torch.testing.assert_close(table.amounts[1], result.values[1:], **close)
    divided = iglens_tl.split(model, BATCH, targets=9, dtype=dtype)
    assert divided.gap.abs().max() <= divided.tolerance
    assert {r.settings["readout_dtype"] for r in (result, levels, table, divided.whole)} == {
        str(dtype).removeprefix("torch.")
    }


def half_model(kind: str, device: str, dtype: torch.dtype) -> None:
    """A half-precision model is read through its own modules, so its last state gives its own probability."""
    model = fresh(kind).model.to(device).to(dtype)
    result = ig_lens(model, BATCH, targets=9, positions=None)
    assert result.settings["readout_dtype"] == str(dtype).removeprefix("torch.")
    assert (result.values[-1] - result.model_value).abs().max() <= TOLERANCE[dtype]
    assert result.gap.abs().max() <= 1e-12


def anything_from_anywhere(kind: str, device: str) -> None:
    """Inputs lie on the CPU or on the device, a lens answers from either, and a cache may have been moved: one set of numbers."""
    model = fresh(kind).model
    mask, targets, base = torch.ones_like(BATCH), torch.tensor([[3], [4]]), torch.linspace(-1, 1, 32)

    def results(there: Callable[[Tensor], Tensor]) -> list[Any]:
        with torch.no_grad():
            logits, cache = model.run_with_cache(BATCH.to(model.cfg.device))
        given: dict[str, Any] = {"targets": there(targets), "attention_mask": there(mask)}
        moved = {name: there(cache[name]) for name in cache.keys()}  # noqa: SIM118 -- a cache iterates over its values
        return [
            ig_lens(model, there(BATCH), baseline=there(base), **given),
            ig_lens(model, there(BATCH), lens=lambda state, _: there(state) * 1, **given),
            ig_lens(model, there(BATCH), lens=lambda state, _: there(state) * 1, estimator="left", n_steps=2, **given),
            ig_lens(model, cache=moved, logits=there(logits), **given),
            logit_lens(model, there(BATCH), cache=moved, logits=there(logits), **given),
            iglens_tl.direct_logit_attribution(model, cache=moved, unit="head", **given),
            iglens_tl.split(model, cache=moved, unit="neuron", baseline=there(base), layers=1, **given),
            iglens_tl.split(model, cache=moved, unit={"all": there(torch.ones(2, 1, 32))}, layers=1, **given),
        ]

    wanted = results(lambda tensor: tensor)
    model.to(device)
    for there in (torch.Tensor.cpu, lambda tensor: tensor.to(device)):
        for got, expected in zip(results(there), wanted, strict=True):
            assert_same(got, expected)


MEMORY = 4_000_000
"""Bytes: of 240 rows of 20,000 logits (19 MB), a fifth."""

BOUNDED: dict[str, Callable[..., Any]] = {
    "default": ig_lens,
    "steps": partial(ig_lens, n_steps=3),
    "midpoint": partial(ig_lens, estimator="midpoint", n_steps=3),
    "bfloat16": partial(ig_lens, dtype=torch.bfloat16),
    "float16": partial(ig_lens, dtype=torch.float16),
    "logit_lens": logit_lens,
}


def memory_is_bounded(kind: str, device: str, gauge: Any, call: str) -> None:
    """The extra peak of a readout stays within `max_memory`, whatever its precision.

    Args:
        kind, device: the model and where it is.
        gauge: `torch.cuda`, or what stands for it.
        call: one of `BOUNDED`.
    """
    model = tiny(kind, d_vocab=20_000).to(device)
    tokens = (torch.arange(60).reshape(2, 30) * 331) % 20_000
    with torch.no_grad():
        cache = model.run_with_cache(tokens.to(device))[1]

    def run() -> Any:
        return BOUNDED[call](cache, tokens, targets=5, positions=None, max_memory=MEMORY)

    run()  # what a library takes once and keeps (cuBLAS's workspace) is there before the count begins
    gauge.synchronize()
    gauge.reset_peak_memory_stats()
    before = gauge.memory_allocated()
    assert run().mask.sum() == 60
    gauge.synchronize()
    extra = gauge.max_memory_allocated() - before
    assert 0.1 * MEMORY < extra <= MEMORY


# --- Two devices -------------------------------------------------------------------------------------------------


def spread(name: str, folder: Path) -> tuple[Any, Any]:
    """A model on the CPU, and the same on cuda:0 and cuda:1."""
    if name == "hooked":
        return models.hooked(n_layers=4), _spread_hooked(models.hooked(n_layers=4))
    llama = FAMILIES["Llama, tied" if name == "bridge, tied" else "Llama"]
    deep = dataclasses.replace(llama, settings={**llama.settings, "num_hidden_layers": 4})
    whole = models.bridge(deep.build(), tokenizer=saved(word_level(), folder))
    whole(torch.tensor([[3]]))
    return whole, _spread_bridge(deep.build(), name == "bridge, tied", folder)


def _spread_hooked(whole: Any) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    settings = {**models._SETTINGS, "n_layers": 4, "n_devices": 2, "device": "cuda"}
    with models.same_randomness():
        model = HookedTransformer(HookedTransformerConfig(**settings)).eval()
    for module in (model.embed, model.pos_embed, *model.blocks[:2]):
        module.to("cuda:0")
    for module in (*model.blocks[2:], model.ln_final, model.unembed):
        module.to("cuda:1")
    model.load_state_dict(whole.state_dict())
    return model


def _spread_bridge(hf_model: Any, tied: bool, folder: Path) -> Any:
    from accelerate import dispatch_model
    from transformer_lens.model_bridge import TransformerBridge

    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0 if tied else 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    tokenizer = saved(word_level(), folder)
    with models.same_randomness():
        model = TransformerBridge.boot_transformers(
            "tiny/llama", hf_model=dispatch_model(hf_model, device_map=places), tokenizer=tokenizer, dtype=torch.float32
        )
    model(torch.tensor([[3]], device="cuda:0"))
    return model


_REFERENCE = [[3, 7, 9, 12, 5], [8, 2, 30, 11, 6, 4], [1, 21, 33, 40, 41, 9]]
_ABLATED = (("block", "mean"), ("attn", "resample"), ("mlp", "placebo"), ("head", "zero"))


def _ablated(component: str, mode: str) -> Callable[[Any], Any]:
    more = {"reference": _REFERENCE} if mode in ("mean", "resample") else {}
    return lambda model: iglens_tl.ablate_layers(
        model, BATCH[:1], component=component, mode=mode, layers=[0, 2, 3], progress=False, **more
    )


CALLS: dict[str, Callable[[Any], Any]] = {
    **READOUTS,
    "compare, full model": lambda model: iglens_tl.compare(
        model,
        BATCH[:1],
        methods=["layer_conductance", "layer_integrated_gradients"],
        layers=2,
        n_steps=2,
        progress=False,
    ),
    "split, heads": lambda model: iglens_tl.split(model, BATCH, unit="head", path="straight", baseline="zero"),
    "split, blocks": lambda model: iglens_tl.split(model, BATCH[:1], unit="block", path="straight"),
    "split, neurons": lambda model: iglens_tl.split(model, BATCH, unit="neuron", baseline="mean", layers=2),
    "split, lens": lambda model: iglens_tl.split(model, BATCH[:1], layers=2, lens=lambda state, _: state.cpu() * 1),
    **{f"ablate, {component}": _ablated(component, mode) for component, mode in _ABLATED},
    "ablate, direct": lambda model: iglens_tl.ablate_layers(
        model, BATCH[:1], component="head", scope="target", effect="direct", layers=[0, 3], progress=False
    ),
    "context": lambda model: iglens_tl.context_need(
        model, BATCH[:1], reference=_REFERENCE, n_foreign=2, progress=False
    ),
    "generate": lambda model: iglens_tl.generate_and_attribute(model, BATCH[0].tolist(), max_new_tokens=2),
}
"""Every call that looks at a model's states."""


def spread_as_on_the_cpu(models_: tuple[Any, Any], call: str) -> None:
    """A model on two devices gives the numbers of the same model on the CPU."""
    full_float32()
    whole, apart = models_
    devices = {parameter.device for parameter in apart.parameters()}
    assert devices == {torch.device("cuda", 0), torch.device("cuda", 1)}
    wanted, got = CALLS[call](whole), CALLS[call](apart)
    assert_same(got, wanted)
    reused = [getattr(result, "settings", {}).get("prefix_reused") for result in (got, wanted)]
    assert reused[0] == reused[1]
