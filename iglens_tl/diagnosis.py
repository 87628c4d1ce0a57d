"""Does the readout's every assumption hold for this model? `doctor` answers in words.

IG-Lens assumes a decoder-only model with one residual stream, in evaluation mode, whose logits are exactly output
transform(unembed(final norm(last state))). `ig_lens` checks the cheap part of this at every call; `doctor` checks all
of it on a short probe, over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iglens_tl._agreement import agree, coarsest
from iglens_tl._checks import shorten
from iglens_tl._fragment import fragment, named
from iglens_tl._model.head import Norm, norm_formula, readout_of, transform_of
from iglens_tl._model.host import Host, hooked_points, host_of
from iglens_tl._model.states import Wanted, check_states_exist, hook_name, run_and_collect

PROBE_LENGTH = 6
_SIGNS = {True: "✓", False: "✗", None: "•"}


@dataclass(frozen=True)
class Finding:
    """One assumption: its name, whether it holds, and what was seen. `ok=None` is a remark that hinders nothing."""

    name: str
    ok: bool | None
    words: str

    def __str__(self) -> str:
        sign = {True: "ok  ", False: "FAIL", None: "note"}[self.ok]
        return f"{sign}  {self.name}: {self.words}"


@dataclass(frozen=True)
class Diagnosis:
    """All findings about a model; `ok` says whether IG-Lens can attribute it."""

    model: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join([f"{self.model}", *(f"  {finding}" for finding in self.findings), f"  {self._verdict()}"])

    def _repr_html_(self) -> str:
        """What a notebook shows: a line for each finding; no script, every text escaped."""
        lines = [named(f"{_SIGNS[finding.ok]} {finding.name}", finding.words) for finding in self.findings]
        return fragment(f"Diagnosis: {self.model}", *lines, note=self._verdict())

    def _verdict(self) -> str:
        return "IG-Lens reads this model's own probability." if self.ok else "IG-Lens cannot attribute this model."


def doctor(model: Any) -> Diagnosis:
    """Check every assumption of the readout on a model.

    Runs three short forward passes and changes nothing. Findings after one that fails may be missing: they need it.

    Args:
        model: a `HookedTransformer` or `TransformerBridge`.

    Returns:
        A `Diagnosis`; print it, or look at `ok` and `findings`.

    Raises:
        TypeError: for what is no TransformerLens model.
    """
    name = str(getattr(getattr(model, "cfg", None), "model_name", None) or type(model).__name__)
    try:
        host = host_of(model)
    except ValueError as error:
        return Diagnosis(name, (Finding("kind of model", False, str(error)),))
    findings = [Finding("kind of model", True, _kind(host))]
    for title, check in _CHECKS.items():
        finding = _tried(title, check, host)
        findings.append(finding)
        if finding.ok is False and title == "residual states":
            break
    return Diagnosis(name, tuple(findings))


def _kind(host: Host) -> str:
    api = "HookedTransformer" if host.kind == "hooked" else "TransformerBridge"
    return f"decoder-only {api} in evaluation mode, {host.n_layers} blocks, d_model {host.d_model}."


def _tried(title: str, check: Callable[[Host], tuple[bool | None, str]], host: Host) -> Finding:
    try:
        return Finding(title, *check(host))
    except ValueError as error:  # ours, in words
        return Finding(title, False, str(error))
    except Exception as error:  # the model's: whatever it raises, that is the finding
        return Finding(title, False, f"{type(error).__name__}: {error}")


def _states(host: Host) -> tuple[bool | None, str]:
    check_states_exist(host, range(0, 2 * host.n_layers + 1, 2))
    try:
        check_states_exist(host, range(1, 2 * host.n_layers, 2))
    except ValueError:
        return True, "the states between blocks are all there; between attention and MLP there are none (no incl_mid)."
    return True, "the states between blocks, and between attention and MLP, are all there."


def _norm(host: Host) -> tuple[bool | None, str]:
    try:
        formula = norm_formula(host)
    except ValueError as error:
        return None, f"read through its module; {error}"
    return True, "none." if formula is None else f"{_formula(formula)}, recomputed for each state."


def _formula(norm: Norm) -> str:
    parts = ["weight" if norm.weight is not None else "no weight", "bias" if norm.bias is not None else "no bias"]
    return f"{'LayerNorm (centred)' if norm.centred else 'RMSNorm'}, eps {norm.eps:g}, {', '.join(parts)}"


def _unembedding(host: Host) -> tuple[bool | None, str]:
    readout = readout_of(host)
    return True, f"{host.d_model} -> {host.d_vocab_out} logits in {str(readout.dtype).removeprefix('torch.')}."


def _transform(host: Host) -> tuple[bool | None, str]:
    transform = transform_of(host)
    if transform is None:
        return True, "none: logits are what the unembedding gives."
    seen = ", ".join(
        f"{x:g} -> {y:.4g}" for x, y in zip((1.0, 100.0), transform(torch.tensor([[1.0, 100.0]]))[0], strict=True)
    )
    return True, f"the model changes its logits after the unembedding ({seen}); it is part of the readout."


def _hooks(host: Host) -> tuple[bool | None, str]:
    hooked = hooked_points(host.norm, host.model.unembed)
    if not hooked:
        return True, "none on final norm and unembedding."
    return None, (
        f"{shorten(hooked, 3)} carry hooks. They are left out of the readout; if they change the run, ig_lens refuses it."
    )


def _identity(host: Host) -> tuple[bool | None, str]:
    tokens = _probe(host)
    last, logits = _last_state(host, tokens)
    readout = readout_of(host)
    with torch.no_grad():
        good, off, most = _compared(readout.logits(last[0]), logits[0], coarsest(readout.dtype, logits.dtype))
    words = f"largest difference in any token's probability {off:.1e} (allowed {most:.2g}) on {tokens.shape[1]} tokens."
    return good, words


def _compared(read: Tensor, said: Tensor, dtype: torch.dtype) -> tuple[bool, float, float]:
    """Two sets of logits: whether all probabilities agree, where they are furthest apart, and how far they may be there."""
    read, said = (logits.detach().double().cpu() for logits in (read, said))
    largest = said.amax(-1, keepdim=True).abs()  # a word of smaller logit has less of the probability, or none at all
    _, off, most = agree(dtype, read.log_softmax(-1), said.log_softmax(-1), largest)
    worst = int((off / most).argmax())
    return bool((off <= most).all()), float(off.flatten()[worst]), float(most.flatten()[worst])


def _padding(host: Host) -> tuple[bool | None, str]:
    tokens = _probe(host)
    if host.max_tokens is not None and host.max_tokens < PROBE_LENGTH + 2:
        return None, f"not tried: the model takes {host.max_tokens} tokens only."
    _, alone = _last_state(host, tokens)
    padded = torch.cat([tokens, tokens[:, :1].expand(1, 2)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, PROBE_LENGTH:] = 0
    _, filled = _last_state(host, padded, mask)
    good, off, most = _compared(filled[0, :PROBE_LENGTH], alone[0], alone.dtype)
    if good:
        return True, f"tokens after a prompt do not change it ({off:.1e}): prompts of unequal length can share a batch."
    return (
        False,
        f"tokens after a prompt change its probabilities by {off:.1e} (allowed {most:.2g}): not a causal model.",
    )


def _probe(host: Host) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(PROBE_LENGTH, host.max_tokens or PROBE_LENGTH)
    return torch.randint(0, host.d_vocab, (1, length), generator=generator)


def _last_state(host: Host, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    device = host.device
    last = Wanted(hook_name(2 * host.n_layers, host.n_layers), lambda full: full)
    kept, logits = run_and_collect(host, tokens.to(device), None if mask is None else mask.to(device), [last])
    return kept[0], logits


_CHECKS: dict[str, Callable[[Host], tuple[bool | None, str]]] = {
    "residual states": _states,
    "final norm": _norm,
    "unembedding": _unembedding,
    "output transform": _transform,
    "hooks on the readout": _hooks,
    "last state gives the model's probability": _identity,
    "padding": _padding,
}
