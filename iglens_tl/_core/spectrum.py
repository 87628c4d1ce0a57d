"""What else a state's logits say: the target's rank, the entropy, the most probable tokens, the distance to the end.

Taken as a `Probe` from the very logits that `read` reduces to `Levels`, block by block, and only when asked for.

- rank: how many tokens have a strictly larger logit than the target (0: none has); a set is ranked by its best member.
- entropy: `-sum_v p_v log p_v` [nats].
- kl: `sum_v q_v (log q_v - log p_v)` [nats], from the distribution `q` of the token's last state to the state's `p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._core.readout import DEFAULT_BUDGET, PAD, Readout
from iglens_tl._core.segments import Path


@dataclass(frozen=True)
class Spectrum:
    """Of every row, states first: `[state * tokens]` on the CPU, `top` fields `[state * tokens, k]`."""

    rank: Int[Tensor, "rows"]
    entropy: Float[Tensor, "rows"]
    kl: Float[Tensor, "rows"]
    top_ids: Int[Tensor, "rows k"]
    top_log_probs: Float[Tensor, "rows k"]


class SpectrumProbe:
    """Collects a `Spectrum` while the states of a path are read.

    Args:
        readout: of the model.
        path: the states that are read; the last is the one that `kl` compares with.
        top_k: how many tokens to keep; at most the vocabulary.
    """

    def __init__(self, readout: Readout, path: Path, top_k: int) -> None:
        self._readout, self._path, self._k = readout, path, min(top_k, readout.d_vocab)
        self._parts: list[Sequence[Tensor]] = []
        # The last distribution of all tokens where it fits; else that of a block's tokens is read again for each block.
        small = path.n_tokens * readout.d_vocab * 4 <= DEFAULT_BUDGET
        self._final = self._read_final(torch.arange(path.n_tokens)) if small else None

    def _read_final(self, tokens: Tensor) -> Tensor:
        last = self._path.states[-1]
        with torch.no_grad():
            return _log_softmax(self._readout.logits(last[tokens.to(last.device)]))

    def __call__(self, logits: Tensor, start: int) -> None:
        tokens = torch.arange(start, start + len(logits)) % self._path.n_tokens
        final = self._read_final(tokens) if self._final is None else self._final[tokens.to(self._final.device)]
        log_p = _log_softmax(logits)
        p, q = log_p.exp(), final.exp()
        ids = self._path.groups[0][tokens].to(logits.device)
        best = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids == PAD, -torch.inf).amax(-1, keepdim=True)
        kept = (
            (logits > best).sum(-1),
            -_expected(p, log_p),
            _expected(q, final - log_p).clamp(min=0),
            *reversed(log_p.topk(self._k)),
        )
        self._parts.append([part.cpu() for part in kept])

    def spectrum(self) -> Spectrum:
        """What was collected."""
        rank, entropy, kl, ids, logs = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        return Spectrum(rank, entropy, kl, ids, logs.double())


def _log_softmax(logits: Tensor) -> Tensor:
    """`logit - logsumexp`, the sum in float64: torch's float32 `log_softmax` is off by 3e-5 over a large vocabulary."""
    top = logits.amax(-1, keepdim=True)
    shifted = logits - top
    return shifted - shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log().to(logits.dtype)


def _expected(weight: Tensor, value: Tensor) -> Tensor:
    """`sum_v weight_v value_v` in float64, a weight of nought counting for nothing whatever its value."""
    return torch.where(weight > 0, weight * value, 0.0).sum(-1, dtype=torch.float64)
