"""What else a state's logits say: the target's rank, the entropy, the most probable tokens, the distance to the end.

Taken as a `Probe` from the very logits that `read` reduces to `Levels`, block by block, and only when asked for. Tokens are
taken a few at a time, all their states together, so that the last distribution of each is read once and held.

- rank: how many tokens have a strictly larger logit than the target (0: none has); a set is ranked by its best member.
- entropy: `-sum_v p_v log p_v` [nats].
- kl: `sum_v q_v (log q_v - log p_v)` [nats], from the distribution `q` of the token's last state to the state's `p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._core.levels import PAD, Levels
from iglens_tl._core.readout import Readout
from iglens_tl._core.segments import Path, read_states


@dataclass(frozen=True)
class Spectrum:
    """Of every row, states first: `[state * tokens]` on the CPU, `top` fields `[state * tokens, k]`."""

    rank: Int[Tensor, "rows"]
    entropy: Float[Tensor, "rows"]
    kl: Float[Tensor, "rows"]
    top_ids: Int[Tensor, "rows k"]
    top_log_probs: Float[Tensor, "rows k"]

    @staticmethod
    def empty(n_rows: int, top_k: int) -> Spectrum:
        """Room for that of `n_rows` rows."""
        whole = torch.empty(n_rows, dtype=torch.int64)
        entropy, kl = torch.empty(2, n_rows, dtype=torch.float64)
        tops = torch.empty(n_rows, top_k, dtype=torch.float64)
        return Spectrum(whole, entropy, kl, torch.empty_like(tops, dtype=torch.int64), tops)

    def at(self, rows: Tensor) -> Spectrum:
        """That of some rows."""
        return Spectrum(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def join(parts: Sequence[Spectrum]) -> Spectrum:
        """That of all parts' rows, in order."""
        return Spectrum(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Spectrum)))


def read_spectrum(readout: Readout, path: Path, top_k: int) -> tuple[Levels, Spectrum]:
    """Levels and spectrum of every state, as `read_states` numbers them; `kl` is to the last state of the path.

    Args:
        readout: of the model.
        path: of two states or more.
        top_k: how many tokens to keep; at most the vocabulary.
    """
    own = replace(readout, budget=max(1, readout.budget // _SHARES))
    last, k = len(path.states) - 1, min(top_k, readout.d_vocab)
    numbers = torch.arange(len(path.states) * path.n_tokens).reshape(len(path.states), -1)
    some = torch.arange(path.n_tokens).split(own.rows_per_chunk())
    levels: list[Levels] = []
    spectra: list[Spectrum] = []
    for tokens in some:
        part = Path([path.rows(i, tokens) for i in (last, *range(last))], path.target_rows(tokens))
        probe = _Probe(part.groups[0], Spectrum.empty(len(part.states) * len(tokens), k))
        levels.append(read_states(own, part, probe))
        spectra.append(probe.found)
    order = torch.cat([numbers.roll(1, 0)[:, tokens].flatten() for tokens in some]).argsort()
    return Levels.join(levels).at(order), Spectrum.join(spectra).at(order)


_SHARES = 6
"""Of the budget: one for the last distributions, one for logits, and what is made of half as many of these at a time."""


class _Probe:
    """Collects the spectrum of some tokens at every state, of which the last one comes first and is held.

    Args:
        ids: the targets of the tokens, `[tokens, width]`.
        found: of all rows, to be filled. (Small results made between large intermediate ones would leave the memory of these
            in pieces that no next one fits.)
    """

    def __init__(self, ids: Tensor, found: Spectrum) -> None:
        self._ids, self.found = ids, found
        self._final: Tensor | None = None

    def __call__(self, logits: Tensor, start: int) -> None:
        n, stop = len(self._ids), start + len(logits)
        log_p = _log_softmax(logits)
        if self._final is None:
            self._final = torch.empty(n, logits.shape[-1], dtype=log_p.dtype, device=log_p.device)
        self._final[start : min(stop, n)] = log_p[: max(0, n - start)]
        tokens = torch.arange(start, stop) % n
        final = self._final[tokens.to(log_p.device)]
        p, q = log_p.exp(), final.exp()
        ids = self._ids[tokens].to(logits.device)
        best = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids == PAD, -torch.inf).amax(-1, keepdim=True)
        rows = slice(start, stop)
        self.found.rank[rows] = (logits > best).sum(-1).cpu()
        self.found.entropy[rows] = -_expected(p, log_p).cpu()
        self.found.kl[rows] = _expected(q, final - log_p).clamp(min=0).cpu()
        logs, top_ids = log_p.topk(self.found.top_ids.shape[-1])
        self.found.top_ids[rows], self.found.top_log_probs[rows] = top_ids.cpu(), logs.double().cpu()


def _log_softmax(logits: Tensor) -> Tensor:
    """`logit - logsumexp`, the sum in float64: torch's float32 `log_softmax` is off by 3e-5 over a large vocabulary."""
    top = logits.amax(-1, keepdim=True)
    shifted = logits - top
    return shifted - shifted.exp().sum(-1, keepdim=True, dtype=torch.float64).log().to(logits.dtype)


def _expected(weight: Tensor, value: Tensor) -> Tensor:
    """`sum_v weight_v value_v` in float64, a weight of nought counting for nothing whatever its value."""
    return torch.where(weight > 0, weight * value, 0.0).sum(-1, dtype=torch.float64)
