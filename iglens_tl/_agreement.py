"""How far a readout of the last state may be from what the model says: by dtype, and by what rounding does to large logits.

A logit near 20 has neighbours 0.125 away in bfloat16. Two logits that are each off by half a unit in the last place move
the log-probability between them by up to `eps * size`, and a probability by `p * (1 - p)` of that; the rounding of states and
weights before the product adds about as much. Measured on SmolLM2-135M in bfloat16 and float16 (795 positions, every word,
model and readout of unlike dtypes): at most 0.9 for the most probable word, 2.8 for any, of `eps * size`.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
"""How far the readout of the last state may be from the model's own probability, by the coarsest dtype involved.

Measured: 0 through the model's own modules, up to 3e-6 in float32 where the product runs in another order; a readout
that skips a step of the model is off by 1e-3 and more.
"""

LOG_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""The same for log-probabilities, relative to the size of the logits: a token of no probability is checked as well."""

_ROUNDING = 4.0
"""Of `eps * size`: what rounding may do to a log-probability."""


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def allowed(dtype: torch.dtype, p: Tensor, size: Tensor) -> Tensor:
    """By how much a probability may be off.

    Args:
        dtype: the coarsest involved.
        p: the probability, where rounding moves it most: of both, the one nearer to 1/2.
        size: of the logits that decide it, absolute.
    """
    rounding = _ROUNDING / 2 * torch.finfo(dtype).eps * size * p * (1 - p)
    return rounding.clamp(min=TOLERANCE[dtype])


def allowed_log(dtype: torch.dtype, log_p: Tensor, size: Tensor) -> Tensor:
    """By how much a log-probability may be off: as `allowed`."""
    relative = LOG_TOLERANCE[dtype] * log_p.abs().clamp(min=10) / 10
    return torch.maximum(relative, _ROUNDING * torch.finfo(dtype).eps * size)


def agree(dtype: torch.dtype, read: Tensor, said: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two log-probabilities of one token: whether they agree, how far the probabilities are apart, and how far they may be."""
    p, q = read.exp(), said.exp()
    nearer = torch.where((p - 0.5).abs() < (q - 0.5).abs(), p, q)
    off, most = (p - q).abs(), allowed(dtype, nearer, size)
    return (off <= most) & ((read - said).abs() <= allowed_log(dtype, said, size)), off, most
