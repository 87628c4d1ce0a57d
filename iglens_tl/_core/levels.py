"""What is kept of a row of logits, and how it is reduced to that.

Accuracy: torch's float32 `softmax` over a large vocabulary is off by up to 3e-5. Here the exponentials are summed in
the readout's precision after the row's maximum is taken off, target and rest apart, and everything after that sum is
float64: the error that remains is that of the logits. "Rest" is never `1 - p`, so log-odds of a near-certain token
keep their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PAD = -1
"""Filler in a row of target ids."""

_UNDERFLOW = 1e-30
"""Sums of float32 exponentials below this have lost digits."""


FIELDS = ("log_target", "log_rest", "logit", "log_top", "is_top")

FIELDS_OF = {
    "prob": ("log_target", "is_top"),
    "log_prob": ("log_target", "is_top"),
    "log_odds": ("log_target", "log_rest", "is_top"),
    "logit": ("log_target", "logit", "is_top"),
}
"""What must be kept of every row for its value under a metric, and to see that its logits are finite."""


@dataclass(frozen=True)
class Levels:
    """What is kept of a row's logits; every field float64 but `is_top`.

    Args:
        log_target: log of the target group's probability, `[group, rows]`.
        log_rest: log of one minus that probability, `[group, rows]`.
        logit: the target's logit (log-sum-exp of the logits for a set), `[group, rows]`.
        log_top: log-probability of the most probable token, `[rows]`.
        is_top: whether a token of the first group has the largest logit, `[rows]`.

    `log_rest`, `logit` and `log_top` are kept of no row (`[group, 0]`, `[0]`) where nobody needs them: see `FIELDS_OF`.
    """

    log_target: Float[Tensor, "group rows"]
    log_rest: Float[Tensor, "group _"]
    logit: Float[Tensor, "group _"]
    log_top: Float[Tensor, "_"]
    is_top: Bool[Tensor, "rows"]

    def value(self, metric: str) -> Float[Tensor, "rows"]:
        """The metric of the first group, less that of the second where there is one, `[rows]`."""
        values = _METRICS[metric](self)
        return values[0] if len(values) == 1 else values[0] - values[1]

    def cpu(self) -> Levels:
        """The same, detached and on the CPU."""
        return Levels(*(getattr(self, name).detach().cpu() for name in FIELDS))

    def at(self, rows: slice | Tensor) -> Levels:
        """Those of some rows."""
        every = [getattr(self, name) for name in FIELDS]
        return Levels(*(field[..., rows] if field.shape[-1] else field for field in every))

    @staticmethod
    def empty(n_groups: int, n_rows: int, fields: Sequence[str] = FIELDS) -> Levels:
        """Room for the levels of `n_rows` rows, to be filled with `put`.

        Results kept one by one would lie between the large tensors of the calculation and leave their memory in pieces that
        no next one fits.
        """
        sizes = {name: n_rows if name in fields else 0 for name in FIELDS}
        target, rest, logit = (torch.empty(n_groups, sizes[name], dtype=torch.float64) for name in FIELDS[:3])
        top = torch.empty(sizes["log_top"], dtype=torch.float64)
        return Levels(target, rest, logit, top, torch.empty(sizes["is_top"], dtype=torch.bool))

    def put(self, start: int, part: Levels) -> None:
        """Write the levels of some rows over those from `start` on."""
        for name in FIELDS:
            rows, room = getattr(part, name), getattr(self, name)
            if room.shape[-1]:
                room[..., start : start + rows.shape[-1]] = rows

    @staticmethod
    def join(parts: Sequence[Levels]) -> Levels:
        """Those of all parts' rows, in order; a field that one of them lacks is left out."""
        found: list[Tensor] = []
        for name in FIELDS:
            fields = [getattr(part, name) for part in parts]
            lacks = any(not field.shape[-1] and part.n_rows for field, part in zip(fields, parts, strict=True))
            found.append(fields[0][..., :0] if lacks else torch.cat(fields, dim=-1))
        return Levels(*found)

    @property
    def n_rows(self) -> int:
        return len(self.is_top)

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(getattr(self, name).nbytes for name in FIELDS)


_METRICS: dict[str, Callable[[Levels], Tensor]] = {
    "prob": lambda levels: levels.log_target.exp(),
    "log_prob": lambda levels: levels.log_target,
    "log_odds": lambda levels: levels.log_target - levels.log_rest,
    "logit": lambda levels: levels.logit,
}


def levels_of_logits(
    logits: Float[Tensor, "rows d_vocab"], groups: Sequence[Int[Tensor, "rows _"]], scratch: Tensor | None = None
) -> Levels:
    """Reduce logits to `Levels`; differentiable unless `scratch` is given.

    Args:
        logits: `[rows, d_vocab]`, float32 or float64.
        groups: one or two groups of target ids, each `[rows, width]`, filled up with `PAD`; groups share no id.
        scratch: memory of the logits' shape. With it nothing large is allocated, and `logits` are overwritten.
    """
    top = logits.detach().amax(-1, keepdim=True)
    targets = [_gather(logits, ids) - top.double() for ids in groups]
    log_rest = _log_rest(logits, top, torch.cat(list(groups), dim=-1), scratch)
    return levels_of_sums(targets, log_rest, top[:, 0].double())


def levels_of_sums(targets: Sequence[Tensor], log_rest: Tensor, top: Tensor) -> Levels:
    """From the targets' logits and the log of all others' summed exponentials, both less the largest logit `top`."""
    logs = [torch.logsumexp(target, -1) for target in targets]
    log_total = torch.logsumexp(torch.stack([log_rest, *logs]), 0)
    others = [torch.logsumexp(torch.stack([log_rest, *logs[:i], *logs[i + 1 :]]), 0) for i in range(len(logs))]
    return Levels(
        log_target=torch.stack(logs) - log_total,
        log_rest=torch.stack(others) - log_total,
        logit=torch.stack(logs) + top,
        log_top=-log_total,
        is_top=(targets[0] >= 0).any(-1),
    )


def _gather(logits: Tensor, ids: Tensor) -> Tensor:
    picked = logits.gather(-1, ids.clamp(min=0)).double()
    return picked.masked_fill(ids == PAD, -torch.inf)


def _log_rest(logits: Tensor, top: Tensor, ids: Tensor, scratch: Tensor | None) -> Tensor:
    """Log of the summed `exp(logit - top)` over all tokens but the targets, `[rows]` float64."""
    columns = torch.where(ids == PAD, ids[:, :1], ids)  # a filler points to the row's first id, dropped anyway
    if scratch is None:
        shifted = (logits - top).scatter(-1, columns, -torch.inf)
        shares = shifted.exp()
    else:
        shifted = logits.sub_(top).scatter_(-1, columns, -torch.inf)
        shares = torch.exp(shifted, out=scratch)
    rest = shares.sum(-1).double()
    if bool((rest > _UNDERFLOW).all()):
        return rest.log()
    second = shifted.detach().amax(-1, keepdim=True)  # a near-certain target: scale by the largest of the rest instead
    second = torch.where(second.isfinite(), second, torch.zeros_like(second))
    shares = (shifted - second).exp() if scratch is None else torch.exp(shifted.sub_(second), out=scratch)
    return second[:, 0].double() + shares.sum(-1).double().log()


def wide(logits: Tensor) -> Tensor:
    """In float32, those of half precision."""
    return logits if logits.dtype == torch.float64 else logits.float()
