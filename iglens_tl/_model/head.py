"""A model's own readout: `ln_final`, `unembed` and output transform, as the core's `Readout`.

In the model's own precision the model's own modules are called, so the last state gives its logits to the bit. The
unembedding product is written out where the module is a plain linear map (`HookedTransformer` 3.9 copies the whole
matrix at every call); a quantised or wrapped unembedding is called as it is. In another precision (`dtype=`) the norm is
written out from its weights: which formula it follows is settled by trying the candidates on the module itself, never
by a configuration string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import UnsupportedModelError
from iglens_tl._core.readout import DEFAULT_BUDGET, Readout
from iglens_tl._memory import share_of_free
from iglens_tl._model.host import Host, architecture, quiet

Transform = Callable[[Tensor], Tensor]
Unembed = Callable[[Tensor, Tensor | None], Tensor]


def readout_of(host: Host, dtype: torch.dtype | None = None, max_memory: int | None = None) -> Readout:
    """The model's readout in its own precision, or in `dtype`.

    Args:
        max_memory: bytes that reading may take; None is an eighth of what is free, and no more than is of use. A copy of
            the unembedding in another `dtype` is made where whole rows of logits are read (gradients, `TOP` of a cache), and only
            if it takes no more than half of these bytes (an eighth of what is free); else a few words are cast at a time.

    Raises:
        UnsupportedModelError: where `dtype` asks for another precision and the norm follows no known formula or the
            unembedding is quantised.
    """
    weight, bias = _linear(host)
    own = weight.dtype if weight is not None else _dtype_of(host.model.unembed, default=_dtype_of(host.model))
    device = weight.device if weight is not None else _device_of(host.model.unembed)
    dtype = own if dtype is None else dtype
    norm = _module_norm(host, own) if dtype == own else _written_norm(host, device, dtype)
    most = DEFAULT_BUDGET if device.type == "cpu" else 8 * DEFAULT_BUDGET
    budget = share_of_free(device, most) if max_memory is None else max_memory
    linear: tuple[Tensor, Tensor | None] | None = None
    if dtype != own:
        linear = _matrix(host, weight, bias, dtype)
        copy = linear[0].numel() * dtype.itemsize
        whole = copy <= (budget // 2 if max_memory is not None else share_of_free(device, copy))
        unembed = _cast_product(*linear, dtype, None if whole else budget // 4)
        if max_memory is not None:
            kept = (copy if whole else budget // 4) + (0 if linear[1] is None else linear[1].nbytes)
            budget = max(1, budget - kept)
    elif weight is not None and own.itemsize >= 4:
        linear = weight, bias
        unembed = _product(weight, bias)
    else:
        unembed = _module_unembed(host)
    if dtype.itemsize < 4:
        linear = None  # sums of half-precision exponentials lose digits: such logits are read whole, in float32
    return Readout(norm, unembed, transform_of(host), host.d_model, host.d_vocab_out, device, dtype, linear, budget)


def transform_of(host: Host) -> Transform | None:
    """What the model does to the logits after the unembedding; None where it does nothing."""
    adapter = getattr(host.model, "adapter", None)
    of_adapter: Any = getattr(adapter, "apply_output_logits_transform", None)
    if of_adapter is not None:
        # TransformerLens 3.x scales Cohere's logits again after compatibility mode has folded the scale into W_U.
        folded = bool(getattr(adapter, "_logit_scale_already_folded", False))
        capped = (getattr(host.model.cfg, "output_logits_soft_cap", None) or -1.0) > 0
        return None if (folded and not capped) or _changes_nothing(of_adapter) else of_adapter
    cap = float(getattr(host.model.cfg, "output_logits_soft_cap", None) or -1.0)
    return None if cap <= 0 else lambda logits: cap * torch.tanh(logits / cap)


def _changes_nothing(transform: Transform) -> bool:
    probe = torch.tensor([[-200.0, -3.0, 0.0, 0.5, 200.0]])
    return torch.equal(transform(probe.clone()), probe)


def _linear(host: Host) -> tuple[Tensor | None, Tensor | None]:
    """`W_U` and `b_U` where the unembedding is exactly `x @ W_U + b_U`, else Nones."""
    module = host.model.unembed
    if host.kind == "hooked":
        hooked = any(vars(module)[name] for name in ("_forward_hooks", "_forward_pre_hooks"))
        plain = (
            type(module).__module__.startswith("transformer_lens.") and module.W_U.is_floating_point() and not hooked
        )
        return (module.W_U.detach(), module.b_U.detach()) if plain else (None, None)
    inner: Any = getattr(module, "original_component", None)
    if type(inner) is not torch.nn.Linear or not inner.weight.is_floating_point() or inner.weight.is_meta:
        return None, None
    hooked = any(vars(inner)[name] for name in ("_forward_hooks", "_forward_pre_hooks"))
    if hooked or module.W_U.data_ptr() != inner.weight.data_ptr():
        return None, None
    bias: Tensor | None = getattr(inner, "bias")  # noqa: B009 -- torch declares it never None, which it can be
    return inner.weight.detach().T, None if bias is None else bias.detach()


def unembedding(host: Host) -> tuple[Tensor, Tensor | None]:
    """`W_U` `[d_model, d_vocab]` and `b_U`, detached; not to be written to.

    Raises:
        UnsupportedModelError: where the unembedding is no plain linear map.
    """
    weight, bias = _linear(host)
    if weight is None:
        kind = type(getattr(host.model.unembed, "original_component", host.model.unembed)).__name__
        raise UnsupportedModelError(
            f"the logits of {architecture(host.model) or host.name} cannot be shared out: its unembedding is {kind} (quantised, "
            "offloaded or wrapped), not a matrix. ig_lens and logit_lens read through the module itself."
        )
    return weight, bias


def _product(weight: Tensor, bias: Tensor | None) -> Unembed:
    def unembed(rows: Tensor, out: Tensor | None) -> Tensor:
        if bias is None:
            return torch.mm(rows, weight, out=out) if out is not None else rows @ weight
        return torch.addmm(bias, rows, weight, out=out) if out is not None else torch.addmm(bias, rows, weight)

    return unembed


def _module_unembed(host: Host) -> Unembed:
    module = host.model.unembed

    def unembed(rows: Tensor, out: Tensor | None) -> Tensor:
        with quiet(module):
            logits = module(rows[None])[0].to(rows.device)  # an offloaded module answers from where it runs
        return logits if out is None else out.copy_(logits)

    return unembed


def _module_norm(host: Host, dtype: torch.dtype) -> Transform:
    return (lambda rows: rows) if host.norm is None else _through(host.norm, dtype)


def _through(module: torch.nn.Module, dtype: torch.dtype) -> Transform:
    """The module on rows of any device; a tied unembedding lies with the embedding, the norm with the last block."""

    def norm(rows: Tensor) -> Tensor:
        with quiet(module):
            return module(rows.to(_device_of(module, default=rows.device))[None])[0].to(rows.device, dtype)

    return norm


def _matrix(host: Host, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if weight is None:
        raise UnsupportedModelError(
            f"dtype={dtype} needs the unembedding as a floating-point matrix; that of {architecture(host.model) or host.name} "
            f"is {type(getattr(host.model.unembed, 'original_component', host.model.unembed)).__name__} (quantised, "
            "offloaded or wrapped). Leave dtype=None to read through the module itself."
        )
    return weight, None if bias is None else bias.to(dtype)


def _cast_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, room: int | None) -> Unembed:
    """The product in another precision; with room (bytes) for no whole copy of the matrix it is cast in pieces."""
    if room is None:

        @cache  # made where it is first needed: reading in tiles needs none
        def copied() -> Unembed:
            return _product(weight.to(dtype), bias)

        return lambda rows, out: copied()(rows, out)  # noqa: PLW0108 -- not made before it is called

    words = max(64, room // (weight.shape[0] * dtype.itemsize))

    def unembed(rows: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return _InPieces.apply(rows, weight, bias, words)
        return _in_pieces(rows, weight, bias, words, out)

    return unembed


def _pieces(size: int, words: int) -> Iterator[slice]:
    return (slice(start, start + words) for start in range(0, size, words))


def _in_pieces(rows: Tensor, weight: Tensor, bias: Tensor | None, words: int, out: Tensor) -> Tensor:
    for some in _pieces(weight.shape[1], words):
        torch.mm(rows, weight[:, some].to(rows.dtype), out=out[:, some])
    return out if bias is None else out.add_(bias)


class _InPieces(torch.autograd.Function):
    """`rows @ weight + bias` with a weight of another dtype that is cast in pieces, here and on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, words: int) -> Tensor:
        ctx.weight, ctx.words = weight, words
        return _in_pieces(rows, weight, bias, words, rows.new_empty(len(rows), weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        found = gradient.new_zeros(len(gradient), ctx.weight.shape[0])
        for some in _pieces(ctx.weight.shape[1], ctx.words):
            found.addmm_(gradient[:, some], ctx.weight[:, some].to(gradient.dtype).T)
        return found, None, None, None


@dataclass(frozen=True)
class Norm:
    """A final norm written out: `(x - mean if centred) / sqrt(mean(x^2) + eps) * weight + bias`."""

    centred: bool
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        scale = self.scale(wide)
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide / scale
        if self.weight is not None:
            wide = wide * self.weight.to(wide.dtype)
        if self.bias is not None:
            wide = wide + self.bias.to(wide.dtype)
        return wide.to(rows.dtype)

    def scale(self, rows: Tensor) -> Tensor:
        """What rows `[..., d_model]` are divided by, `[..., 1]`."""
        if self.centred:
            rows = rows - rows.mean(-1, keepdim=True)
        return (rows.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def frozen(self, parts: Tensor, whole: Tensor) -> Tensor:
        """Parts `[part, rows, d_model]` through the norm with the scale of their sum `whole`; its bias is left out."""
        if self.centred:
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts / self.scale(whole)
        return parts if self.weight is None else parts * self.weight.to(parts.device, parts.dtype)


def norm_formula(host: Host) -> Norm | None:
    """The formula of the final norm as its module computes it; None for a model without one.

    Of the candidates the closest is taken, since in half precision several are close: a norm that multiplies by one plus
    its weight differs little from one that multiplies by the weight, where the weight is large.

    Raises:
        UnsupportedModelError: where no candidate reproduces the module.
    """
    module = host.norm
    if module is None:
        return None
    found = formula_of(host, module)
    if found is None:
        raise UnsupportedModelError(
            f"the final norm of {architecture(host.model) or host.name} follows no formula that can be written out (or its "
            "weights are offloaded). Call ig_lens or logit_lens with dtype=None, which read through the module itself."
        )
    return found


def formula_of(host: Host, module: torch.nn.Module) -> Norm | None:
    """The formula that a norm of the model follows, settled by trying the candidates on it; None where none does."""
    own = _dtype_of(module, default=_dtype_of(host.model.unembed))
    device = _device_of(module, default=_device_of(host.model.unembed))
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(6, host.d_model, generator=generator) * torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10, 100])[:, None]
    probe = (probe + 0.1).to(device, own)  # off-centre, and small enough for eps to show
    tolerance = 64 * torch.finfo(own if own.itemsize < 8 else torch.float32).eps
    with torch.no_grad():
        truth = _through(module, own)(probe).double()

        def error(candidate: Norm) -> float:
            return float(((candidate(probe).double() - truth).abs() / (1 + truth.abs())).max())

        best = min(_candidates(module, host.model.cfg), key=error)
        return best if error(best) <= tolerance else None


def _candidates(module: Any, cfg: Any) -> Iterator[Norm]:
    inner = getattr(module, "original_component", None)
    holders = [holder for holder in (inner, module) if holder is not None]
    found_weights = [getattr(holder, name, None) for holder in holders for name in ("weight", "w")]
    found_biases = [getattr(holder, name, None) for holder in holders for name in ("bias", "b")]
    tensors = [tensor.detach() for tensor in found_weights if isinstance(tensor, Tensor) and not tensor.is_meta]
    weights = [*tensors, *(1.0 + tensor.double() for tensor in tensors), None]
    given = (tensor for tensor in found_biases if isinstance(tensor, Tensor) and not tensor.is_meta)
    biases = [*(tensor.detach() for tensor in given), None]
    found_eps = [getattr(holder, name, None) for holder in holders for name in ("eps", "variance_epsilon")]
    epsilons = [float(eps) for eps in (*found_eps, getattr(cfg, "eps", None)) if isinstance(eps, (int, float, Tensor))]
    for centred, weight, bias, eps in product((False, True), weights, biases, dict.fromkeys(epsilons)):
        yield Norm(centred, weight, bias, eps)


def _written_norm(host: Host, device: torch.device, dtype: torch.dtype) -> Transform:
    formula = norm_formula(host)
    if formula is None:
        return lambda rows: rows
    weight, bias = (None if t is None else t.to(device, dtype) for t in (formula.weight, formula.bias))
    return Norm(formula.centred, weight, bias, formula.eps)


def _dtype_of(module: torch.nn.Module, default: torch.dtype = torch.float32) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)


def _device_of(module: torch.nn.Module, default: torch.device | None = None) -> torch.device:
    return next((p.device for p in module.parameters() if not p.is_meta), default or torch.device("cpu"))
