"""States of the residual stream: from a forward pass that keeps only what is asked for, or from a cache at hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from iglens_tl._checks import MissingActivationError, UnsupportedModelError, shorten
from iglens_tl._core.states import Rows
from iglens_tl._model.host import Host, architecture

Select = Callable[[Tensor], Tensor]
"""What to keep of a full activation `[batch, seq, ...]`."""


@dataclass(frozen=True)
class Wanted:
    """One activation to collect: TransformerLens's name of it and what to keep of it."""

    name: str
    select: Select


def hook_name(half: int, n_layers: int) -> str:
    """TransformerLens's name of the activation that holds a state."""
    if half == 2 * n_layers:
        return f"blocks.{n_layers - 1}.hook_resid_post"
    return f"blocks.{half // 2}.hook_resid_{'mid' if half % 2 else 'pre'}"


def state_exists(host: Host, half: int) -> bool:
    """Whether the model's blocks have this state (parallel blocks have none between attention and MLP)."""
    parallel = bool(getattr(host.model.cfg, "parallel_attn_mlp", False))
    return hook_name(half, host.n_layers) in host.hook_names and not (half % 2 and parallel)


def check_states_exist(host: Host, halves: Sequence[int]) -> None:
    """Refuse, before any forward pass, states that this model's blocks do not have."""
    missing = [hook_name(half, host.n_layers) for half in halves if not state_exists(host, half)]
    if not missing:
        return
    kind = architecture(host.model) or host.name
    if all(name.endswith("mid") for name in missing):
        raise UnsupportedModelError(
            f"incl_mid needs a residual state between attention and MLP, and {kind} has none at {shorten(missing, 3)} "
            "(parallel, attention-only or state-space blocks). Leave incl_mid=False: by layer works."
        )
    raise UnsupportedModelError(f"{kind} exposes no {shorten(missing, 3)}, so its residual states cannot be read.")


def run_and_collect(
    host: Host,
    tokens: Tensor,
    attention_mask: Tensor | None,
    wanted: Sequence[Wanted],
) -> tuple[list[Tensor], Tensor]:
    """One forward pass that keeps what is wanted of its activations, and its logits `[batch, seq, d_vocab_out]`.

    The user's hooks run before those that are added here, and stay where they are.
    """
    names = [item.name for item in wanted]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor, hook: Any, place: int) -> None:  # noqa: ARG001 -- TransformerLens calls it with `hook`
        kept[place] = wanted[place].select(tensor.detach()).clone()

    hooks = [(name, partial(keep, place=place)) for place, name in enumerate(names)]
    extra = {} if attention_mask is None else {"attention_mask": attention_mask}
    with torch.no_grad(), host.hooks(hooks):
        logits = host.model(tokens, return_type="logits", **extra)
    silent = [name for place, name in enumerate(names) if place not in kept]
    if silent:
        raise UnsupportedModelError(
            f"the forward pass of {architecture(host.model) or host.name} never reached {shorten(silent, 3)}, so what is read "
            "there cannot be had."
        )
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
        raise UnsupportedModelError(
            f"the model must return logits [batch, pos, d_vocab] for tokens of shape {tuple(tokens.shape)}; got "
            f"{tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}."
        )
    return [kept[place] for place in range(len(wanted))], logits.detach()


@dataclass(frozen=True)
class CacheView:
    """A cache as `[batch, seq, ...]` tensors, whether or not its batch axis was removed."""

    cache: Any
    host: Host
    batched: bool

    @property
    def shape(self) -> tuple[int, int]:
        """batch, seq."""
        last = self.state(2 * self.host.n_layers)
        return last.shape[0], last.shape[1]

    def find(self, name: str) -> Tensor | None:
        """An activation by its name; the state that enters a block is found as the one that leaves the block before, too."""
        for known in (name, _same_state(name)):
            tensor = None if known is None else _lookup(self.cache, known)
            if tensor is not None:
                return tensor if self.batched else tensor[None]
        return None

    def state(self, half: int) -> Tensor:
        tensor = self.find(hook_name(half, self.host.n_layers))
        if tensor is None:
            raise MissingActivationError(self._missing_message([half]))
        return tensor

    def rows(self, half: int, batch: Tensor, pos: Tensor) -> Rows:
        """A state at the selected places; it stays in the cache until its rows are read."""
        return Rows(self.state(half).detach(), batch, pos)

    def collect(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """What is wanted, from the cache.

        Raises:
            MissingActivationError: names all that the cache lacks, and the `names_filter` that brings it.
        """
        self.require_names([item.name for item in wanted])
        return [item.select(cast(Tensor, self.find(item.name)).detach()) for item in wanted]

    def require_names(self, names: Sequence[str]) -> None:
        missing = [name for name in dict.fromkeys(names) if self.find(name) is None]
        if not missing:
            return
        kinds = sorted({re.sub(r"^blocks\.[0-9]+\.", "", name) for name in names})
        raise MissingActivationError(
            f"the cache lacks {shorten(missing, 4)}. Cache what the call needs with run_with_cache(tokens, "
            f"names_filter=lambda name: name.endswith({tuple(kinds)!r})), or run_with_cache(tokens) for everything."
        )

    def require(self, halves: Sequence[int]) -> None:
        """Check that every state is there, has values, and fits the model."""
        missing = [half for half in halves if self.find(hook_name(half, self.host.n_layers)) is None]
        if missing:
            raise MissingActivationError(self._missing_message(missing))
        first = self.state(halves[0])
        for half in halves:
            self._check(half, self.state(half), first)
        if _lookup(self.cache, f"blocks.{self.host.n_layers}.hook_resid_pre") is not None:
            raise ValueError(
                f"the cache is of another model: it holds block {self.host.n_layers}, and {self.host.name} has "
                f"{self.host.n_layers} blocks."
            )

    def _check(self, half: int, tensor: Tensor, first: Tensor) -> None:
        name = hook_name(half, self.host.n_layers)
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor of floating-point numbers; got {tensor.dtype}, {tensor.layout}."
            )
        if not tensor.numel():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: the cache holds no tokens.")
        if tensor.is_meta:
            raise ValueError(f"{name} lies on the meta device and has no values; run the model on a real device.")
        if tensor.ndim != 3 or tensor.shape[-1] != self.host.d_model:
            raise ValueError(
                f"the cache does not fit the model: {name} has shape {tuple(tensor.shape)}, [batch, pos, d_model = "
                f"{self.host.d_model}] is required. Is it a cache of another model, or one whose batch axis was removed by hand?"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"the states of the cache differ in shape: {tuple(first.shape)} and, at {name}, {tuple(tensor.shape)}."
            )

    def _missing_message(self, halves: Sequence[int]) -> str:
        names = [hook_name(half, self.host.n_layers) for half in halves]
        return (
            f"the cache lacks {shorten(names, 4)}. Cache them with run_with_cache(tokens, names_filter=names), where names = "
            f'[f"blocks.{{l}}.hook_resid_pre" for l in range({self.host.n_layers})] + ["blocks.{self.host.n_layers - 1}'
            '.hook_resid_post"]' + (" and the hook_resid_mid." if any(half % 2 for half in halves) else ".")
        )


def view_of(cache: Any, host: Host) -> CacheView:
    """A cache, or a plain mapping of activation names to tensors, as a `CacheView`."""
    batched = getattr(cache, "has_batch_dim", None)
    if batched is None:
        last = _lookup(cache, hook_name(2 * host.n_layers, host.n_layers))
        batched = last is None or last.ndim == 3
    return CacheView(cache, host, bool(batched))


def _same_state(name: str) -> str | None:
    """`blocks.2.hook_resid_pre` is `blocks.1.hook_resid_post`."""
    match = re.fullmatch(r"blocks\.([1-9][0-9]*)\.hook_resid_pre", name)
    return None if match is None else f"blocks.{int(match.group(1)) - 1}.hook_resid_post"


def _lookup(cache: Any, name: str) -> Tensor | None:
    try:
        found = cache[name]
    except KeyError:
        return None
    return found if isinstance(found, Tensor) else None


_AT_A_TIME = 1 << 18
"""Numbers of a state that are summed together: what becomes of them takes 20 bytes each."""


def prefix_mean(mask: Tensor, batch: Tensor, pos: Tensor, max_memory: int | None = None) -> Select:
    """Mean of a state over the real positions of the prompt at or before each selected one, float64.

    Dimensions are summed a few at a time, of all positions; `max_memory` (bytes) may make them fewer.
    """

    def select(full: Tensor) -> Tensor:
        real = mask.to(full.device)
        count = real.cumsum(1).clamp(min=1)
        at = batch.to(full.device), pos.to(full.device)
        found = torch.empty(len(batch), full.shape[-1], dtype=torch.float64, device=full.device)
        most = _AT_A_TIME if max_memory is None else min(_AT_A_TIME, max_memory // 32)
        size = max(1, most // (full.shape[0] * full.shape[1]))
        for start in range(0, full.shape[-1], size):
            some = slice(start, start + size)
            total = torch.where(real[..., None], full[..., some], 0.0).double().cumsum(1)
            found[:, some] = total[at] / count[at][:, None]
            del total
        return found

    return select


def rows_at(batch: Tensor, pos: Tensor) -> Select:
    """The selected rows, `[rows, ...]`; an activation with a batch axis of 1 (positions) is shared by all prompts."""

    def select(full: Tensor) -> Tensor:
        rows = batch if full.shape[0] > 1 else torch.zeros_like(batch)
        return full[rows.to(full.device), pos.to(full.device)]

    return select
