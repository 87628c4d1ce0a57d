"""Slow second derivations in float64, written out by hand. Nothing here comes from the package under test.

A `Head` is what turns the last residual stream into logits: a norm, a projection, an unembedding, an output transform.
`lens_head` and `hugging_face_head` copy one out of a model's raw parameters; both must be called *before* the model is
folded, centred or wrapped, and then describe every processed form of it too, since none of that changes a probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class HeadSpec:
    """Where one Hugging Face family keeps its head. Names of parameters, and names or values of settings.

    norm: "layer" (w, b), "layer+1" (1 + w, b), "layer, plain" (neither), "rms" (w), "rms+1" (1 + w), "none".
    """

    norm: str
    at: str = ""
    eps: str | float = 1e-5
    project: str = ""
    cap: str = ""
    multiply: str = ""
    divide: str = ""


@dataclass(frozen=True)
class Head:
    """Final norm, unembedding and output transform of one model, all in float64."""

    norm: str
    unembed: Tensor  # [d_vocab, d_model]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    unembed_bias: Tensor | None = None
    project: Tensor | None = None  # [d_projected, d_model]
    cap: float | None = None
    scale: float = 1.0

    def normed(self, state: Tensor) -> Tensor:
        """What the final norm makes of a state: one branch a kind of norm, its statistics taken from that state."""
        h = state.double()
        if self.norm == "none":
            return h
        if self.norm.startswith("layer"):
            h = h - h.mean(-1, keepdim=True)
        h = h / (h.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        if self.weight is not None:
            h = h * (1 + self.weight if self.norm.endswith("+1") else self.weight)
        return h if self.bias is None else h + self.bias

    def logits(self, state: Tensor) -> Tensor:
        """`[..., d_model]` to `[..., d_vocab]`, the output transform included."""
        h = self.normed(state)
        if self.project is not None:
            h = h @ self.project.T
        z = h @ self.unembed.T
        if self.unembed_bias is not None:
            z = z + self.unembed_bias
        z = z * self.scale
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)

    def log_prob(self, state: Tensor, target: Tensor) -> Tensor:
        """Log-probability [nats] of `target[...]` at `state[..., d_model]`."""
        z = self.logits(state)
        chosen = torch.gather(z, -1, target[..., None]).squeeze(-1)
        return chosen - torch.logsumexp(z, -1)

    def prob(self, state: Tensor, target: Tensor) -> Tensor:
        """Probability of `target[...]` at `state[..., d_model]`."""
        return self.log_prob(state, target).exp()


def hugging_face_head(hf_model: Any, spec: HeadSpec) -> Head:
    """The head of an untouched Hugging Face model, by the names that `spec` gives."""
    state, config = hf_model.state_dict(), hf_model.config

    def parameter(name: str) -> Tensor | None:
        return state[name].detach().clone().double() if name in state else None

    def setting(name: str, default: float) -> float:
        return default if not name else float(getattr(config, name))

    unembed = hf_model.get_output_embeddings()
    assert spec.norm in {"none", "layer, plain"} or f"{spec.at}.weight" in state, f"no {spec.at}.weight"
    return Head(
        norm=spec.norm.removesuffix(", plain"),
        unembed=unembed.weight.detach().clone().double(),
        weight=parameter(f"{spec.at}.weight"),
        bias=parameter(f"{spec.at}.bias"),
        eps=spec.eps if isinstance(spec.eps, float) else setting(spec.eps, 0.0),
        unembed_bias=None if unembed.bias is None else unembed.bias.detach().clone().double(),
        project=parameter(f"{spec.project}.weight"),
        cap=setting(spec.cap, 0.0) or None,
        scale=setting(spec.multiply, 1.0) / setting(spec.divide, 1.0),
    )


def lens_head(model: Any) -> Head:
    """The head of one of TransformerLens's own models, of either kind, that nobody has folded or centred yet."""
    if hasattr(model, "original_model"):  # boot_native: linear maps stored as [out, in], behind a wrapper
        state = {k.replace("._original_component", ""): v for k, v in model.original_model.state_dict().items()}
        unembed, names = state["head.weight"], ("ln_out.weight", "ln_out.bias", "head.bias")
    else:
        state = model.state_dict()
        unembed, names = state["unembed.W_U"].T, ("ln_final.w", "ln_final.b", "unembed.b_U")
    config = model.cfg
    kind, cap = config.normalization_type, config.output_logits_soft_cap
    rms = kind is not None and (kind.startswith("RMS") or config.final_rms)
    weight, bias, unembed_bias = (state[n].detach().clone().double() if n in state else None for n in names)
    return Head(
        norm="none" if kind is None else "rms" if rms else "layer",
        unembed=unembed.detach().clone().double(),
        weight=weight,
        bias=bias,
        eps=config.eps,
        unembed_bias=unembed_bias,
        cap=cap if cap is not None and cap > 0 else None,
    )


def model_prob(logits: Tensor, target: Tensor) -> Tensor:
    """The model's own probability from its float32 logits, in float64: `exp(logit - logsumexp)`.

    Float32 `softmax` over a large vocabulary is off by up to 3e-5 on a CPU; this is not.
    """
    z = logits.double()
    return (torch.gather(z, -1, target[..., None]).squeeze(-1) - torch.logsumexp(z, -1)).exp()


def credits(values: Tensor) -> Tensor:
    """Differences of neighbouring states, `values[K+1, n]` to `[K, n]`, one number at a time."""
    flat = values.reshape(values.shape[0], -1).tolist()
    out = [[flat[k + 1][i] - flat[k][i] for i in range(len(flat[0]))] for k in range(len(flat) - 1)]
    return torch.tensor(out, dtype=torch.float64).reshape(values.shape[0] - 1, *values.shape[1:])


def onset(credit: list[float], fraction: float = 0.5) -> int:
    """Index of the first segment at which the running sum of |credit| reaches `fraction` of all of it."""
    whole = math.fsum(abs(c) for c in credit)
    running = 0.0
    for k, c in enumerate(credit):
        running += abs(c)
        if running >= fraction * whole:
            return k
    raise AssertionError("the credits have no mass")


def gradient(head: Head, state: Tensor, target: int) -> Tensor:
    """Gradient of the probability with respect to one state `[d_model]`, by float64 autograd."""
    h = state.double().clone().requires_grad_(True)
    with torch.enable_grad():
        value = head.prob(h, torch.tensor(target))
        (grad,) = torch.autograd.grad(value, h)
    return grad


def integrated_gradient(head: Head, start: Tensor, end: Tensor, target: int, rule: str, n: int) -> float:
    """`integral over t of grad f(start + t (end - start)) . (end - start)` for one segment, node by node.

    rule: "left", "right", "midpoint", "trapezoid" (n intervals) or "gauss_legendre" (n nodes).
    """
    start, end = start.double(), end.double()
    total = 0.0
    for t, weight in _nodes(rule, n):
        total += weight * float(gradient(head, start + t * (end - start), target) @ (end - start))
    return total


def _nodes(rule: str, n: int) -> list[tuple[float, float]]:
    if rule == "gauss_legendre":
        nodes, weights = np.polynomial.legendre.leggauss(n)
        return [((1 + float(x)) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]
    if rule == "trapezoid":
        return [(i / n, (0.5 if i in (0, n) else 1.0) / n) for i in range(n + 1)]
    shift = {"left": 0.0, "midpoint": 0.5, "right": 1.0}[rule]
    return [((i + shift) / n, 1 / n) for i in range(n)]


def directional_derivative(head: Head, state: Tensor, direction: Tensor, target: int, step: float = 1e-5) -> float:
    """Central difference of the probability along `direction`: autograd's second opinion."""
    state, direction, y = state.double(), direction.double(), torch.tensor(target)
    ahead, behind = head.prob(state + step * direction, y), head.prob(state - step * direction, y)
    return float((ahead - behind) / (2 * step))
