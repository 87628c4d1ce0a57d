"""`doctor`: which assumption of the readout holds, in words, and nothing left behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from iglens_tl import Diagnosis, doctor
from tests import models
from tests.families import FAMILIES
from tests.subjects import KINDS, each_kind, fresh, one_kind, subject, tiny
from tests.watching import Count, forwards, refused, untouched

TITLES = [
    "kind of model",
    "residual states",
    "final norm",
    "unembedding",
    "output transform",
    "hooks on the readout",
    "last state gives the model's probability",
    "padding",
]


def found(diagnosis: Diagnosis) -> dict[str, tuple[bool | None, str]]:
    return {finding.name: (finding.ok, finding.words) for finding in diagnosis.findings}


@each_kind
def test_a_sound_model(kind: str) -> None:
    model = subject(kind).model
    with untouched(model), forwards(model) as count:
        diagnosis = doctor(model)
    assert count.runs == 3
    assert diagnosis.ok
    findings = found(diagnosis)
    assert list(findings) == TITLES
    assert all(ok is True for ok, _ in findings.values())
    api = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[kind]
    norm = {"hooked": "LayerNorm (centred), eps 1e-05, weight, bias", "bridge": "RMSNorm, eps 1e-06, weight, no bias"}[
        kind
    ]
    assert f"decoder-only {api} in evaluation mode, 3 blocks, d_model 32" in findings["kind of model"][1]
    assert norm in findings["final norm"][1]
    assert "32 -> 50 logits in float32" in findings["unembedding"][1]
    assert "none" in findings["output transform"][1]
    assert "between attention and MLP, are all there" in findings["residual states"][1]


@each_kind
def test_the_words_are_one_line_a_finding_and_a_verdict(kind: str) -> None:
    diagnosis = doctor(subject(kind).model)
    lines = str(diagnosis).splitlines()
    assert lines[0] == diagnosis.model
    assert len(lines) == len(TITLES) + 2
    for title, line in zip(TITLES, lines[1:-1], strict=True):
        assert line.startswith(f"  ok    {title}: ")
    assert lines[-1] == "  IG-Lens reads this model's own probability."
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.model = "another"  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "title", "words"),
    [
        ({"normalization_type": "RMS", "final_rms": True}, "final norm", "RMSNorm, eps 1e-05, weight"),
        ({"normalization_type": "LNPre"}, "final norm", "LayerNorm (centred), eps 1e-05, no weight, no bias"),
        ({"normalization_type": None}, "final norm", "none."),
        ({"output_logits_soft_cap": 3.0}, "output transform", "1 -> 0.9645, 100 -> 3"),
        ({"parallel_attn_mlp": True}, "residual states", "there are none (no incl_mid)"),
        ({"attn_only": True}, "residual states", "there are none (no incl_mid)"),
        ({"d_vocab_out": 7}, "unembedding", "32 -> 7 logits"),
    ],
    ids=str,
)
def test_what_is_special_about_a_model_is_said(kind: str, settings: dict[str, Any], title: str, words: str) -> None:
    model = tiny(kind, **settings)
    # Without a norm the stream of norm 1,000 would make logits whose softmax float32 cannot hold.
    weights = [
        p for name, p in model.named_parameters() if "W_U" in name or ("unembed" in name and name.endswith("weight"))
    ]
    for weight in weights:
        weight.data *= 0.003 if settings.get("normalization_type", "") is None else 1.0
    with untouched(model):
        diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)
    ok, said = found(diagnosis)[title]
    assert ok is True
    assert words in said


@each_kind
def test_hooks_that_only_watch_are_a_remark(kind: str) -> None:
    model = fresh(kind).model
    count = Count()
    model.add_hook("ln_final.hook_scale", count)
    with untouched(model):
        diagnosis = doctor(model)
    assert diagnosis.ok
    ok, words = found(diagnosis)["hooks on the readout"]
    assert ok is None
    assert "ln_final.hook_scale" in words
    assert "left out of the readout" in words
    assert "  note  hooks on the readout: " in str(diagnosis)
    assert count.runs == 3  # of the runs, and of no readout


@each_kind
def test_hooks_that_change_the_run_are_found_out(kind: str) -> None:
    model = subject(kind).model

    def double(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return 2 * tensor

    with untouched(model), model.hooks(fwd_hooks=[("ln_final.hook_scale", double)]):
        diagnosis = doctor(model)
    assert not diagnosis.ok
    ok, words = found(diagnosis)["last state gives the model's probability"]
    assert ok is False
    assert "largest difference in any token's probability" in words
    assert "allowed 1e-05" in words
    assert "  FAIL  last state" in str(diagnosis)
    assert str(diagnosis).endswith("IG-Lens cannot attribute this model.")


@each_kind
def test_weights_that_are_no_numbers_are_found_out(kind: str) -> None:
    model = fresh(kind).model
    model.blocks[1].attn.W_O.data[:] = float("nan")
    with untouched(model):
        diagnosis = doctor(model)
    assert not diagnosis.ok
    assert found(diagnosis)["last state gives the model's probability"][0] is False


@each_kind
def test_a_model_that_looks_ahead_is_found_out(kind: str) -> None:
    """Nothing in its configuration says so; two more tokens at the end change what comes before."""
    model = subject(kind).model

    def look_ahead(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return tensor + tensor.mean(1, keepdim=True)

    with untouched(model), model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", look_ahead)]):
        diagnosis = doctor(model)
    ok, words = found(diagnosis)["padding"]
    assert ok is False
    assert "tokens after a prompt change its probabilities" in words
    assert "not a causal model" in words
    assert found(diagnosis)["last state gives the model's probability"][0] is True


@each_kind
def test_a_model_that_breaks_is_found_out_whatever_it_raises(kind: str) -> None:
    model = subject(kind).model

    def breaks(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        raise AttributeError("no attribute 'embed_positions'")

    with untouched(model), model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", breaks)]):
        diagnosis = doctor(model)
    ok, words = found(diagnosis)["last state gives the model's probability"]
    assert ok is False
    assert words == "AttributeError: no attribute 'embed_positions'"


@pytest.mark.bridge
def test_a_model_in_training_mode() -> None:
    model = tiny("bridge").train()
    with untouched(model):
        diagnosis = doctor(model)
    assert [finding.name for finding in diagnosis.findings] == ["kind of model"]
    assert not diagnosis.ok
    assert "evaluation mode" in str(diagnosis)
    assert "Call model.eval() first" in str(diagnosis)


@pytest.mark.hooked
def test_an_encoder() -> None:
    model = models.hooked(attention_dir="bidirectional")
    with untouched(model):
        diagnosis = doctor(model)
    assert not diagnosis.ok
    assert "encoder" in found(diagnosis)["kind of model"][1]


@pytest.mark.bridge
def test_a_model_that_projects_before_its_unembedding() -> None:
    model = models.bridge(FAMILIES["OPT, projected"].build())
    diagnosis = doctor(model)
    assert not diagnosis.ok
    assert "project_out" in found(diagnosis)["kind of model"][1]


@pytest.mark.parametrize("thing", [5, None, torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_model(thing: Any) -> None:
    with pytest.raises(TypeError, match="needs a HookedTransformer, a TransformerBridge"):
        doctor(thing)


def test_a_raw_hugging_face_model() -> None:
    model = FAMILIES["GPT-2"].build()
    model.cfg = model.config
    with refused(model, TypeError, "GPT2LMHeadModel", "boot_transformers"):
        doctor(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_ctx", [1, 5])
def test_a_model_of_very_few_positions(kind: str, n_ctx: int) -> None:
    model = tiny(kind, n_ctx=n_ctx)
    with untouched(model):
        diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)
    assert f"on {n_ctx} tokens" in found(diagnosis)["last state gives the model's probability"][1]
    assert found(diagnosis)["padding"] == (None, f"not tried: the model takes {n_ctx} tokens only.")


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    model = fresh(kind).model.to(dtype)
    with untouched(model):
        diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)
    assert f"logits in {str(dtype).removeprefix('torch.')}" in found(diagnosis)["unembedding"][1]


@each_kind
def test_a_model_with_words_that_have_no_probability(kind: str) -> None:
    """Of logits of minus infinity no difference can be taken; that of their probabilities is nought."""
    model = fresh(kind).model
    unembed = model.unembed
    if kind == "hooked":
        unembed.b_U.data[10:20] = -torch.inf
    else:
        bias = torch.zeros(model.cfg.d_vocab)
        bias[10:20] = -torch.inf
        unembed.original_component.bias = torch.nn.Parameter(bias)
    diagnosis = doctor(model)
    assert diagnosis.ok, str(diagnosis)


class _Strange(torch.nn.Module):
    """A norm that follows no known formula."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows / (1 + rows.abs().amax(-1, keepdim=True))


@pytest.mark.hooked
def test_a_norm_of_no_known_formula_is_read_through_its_module() -> None:
    model = models.hooked()
    model.ln_final = _Strange().eval()
    with untouched(model):
        diagnosis = doctor(model)
    ok, words = found(diagnosis)["final norm"]
    assert ok is None
    assert "read through its module" in words
    assert "follows no formula" in words
    assert diagnosis.ok, str(diagnosis)


@one_kind
def test_inside_inference_mode(kind: str) -> None:
    model = subject(kind).model
    with torch.inference_mode():
        inside = doctor(model)
    assert inside == doctor(model)
