"""The head-once readout: a residual state -> a value of a target token, in row chunks.

`f(h) = value(softmax(transform(unembed(norm(h)))))[y]` is pointwise in `h`: rows are independent, so all states of all
tokens are stacked to `[rows, d_model]` and read together. Of a chunk's logits only a few numbers a row are kept (log of
the target's share, of the rest's, the largest logit), so memory depends on neither the layers nor the positions.

A plain matrix is multiplied a tile of rows and words at a time, and each tile is folded into a running log-sum-exp while it
is in the processor's cache: the logits of a row never exist together, and reading costs little more than the product.

Accuracy: torch's float32 `softmax` over a large vocabulary is off by up to 3e-5. Here the exponentials are summed in
the readout's precision after the row's maximum is taken off, target and rest apart, and everything after that sum is
float64: the error that remains is that of the logits. "Rest" is never `1 - p`, so log-odds of a near-certain token
keep their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from iglens_tl._core.distinct import Groups, Rows, distinct

BLOCK_ELEMENTS = 1 << 20
"""Logits handled at a time after the matrix product: 4 MB in float32, which stays in the cache."""

TILE_ROWS, TILE_ELEMENTS = 512, 1 << 18
"""Rows, and logits, of a tile: 1 MB in float32, what a core's cache holds beside the weights (measured: benchmarks/)."""

DEFAULT_BUDGET = 64 * 2**20
"""Bytes for a chunk of logits where nobody names a budget; more does not make it faster (measured: benchmarks/)."""

_NARROWEST = 64
"""Words of a tile, at least (where the vocabulary has so many)."""

_COPIES_OF_ROWS = 4
"""What the norm makes of a state `[d_model]` on its way: itself, its square, the normed one, and one to spare."""

_KEYED = 1 << 18
"""Elements of rows that are compared at a time."""

PAD = -1
"""Filler in a row of target ids."""

Probe = Callable[[Tensor, int], None]
"""Looks at a block of logits `[rows, d_vocab]` and the number of its first row, before they are reduced."""

_UNDERFLOW = 1e-30
"""Sums of float32 exponentials below this have lost digits."""


@dataclass(frozen=True)
class Readout:
    """A model's final norm, unembedding and output transform as functions of rows.

    Args:
        norm: `[rows, d_model] -> [rows, d_model]`.
        unembed: `[rows, d_model] -> [rows, d_vocab]`; may write into the tensor that it is handed as second argument.
        transform: what the model does to the logits after the unembedding (soft-cap, scale), or None for nothing.
        d_model, d_vocab: widths of the residual stream and of the logits.
        device, dtype: where, and in what precision, rows are read.
        linear: `W_U` `[d_model, d_vocab]` and `b_U` where `unembed` is exactly `rows @ W_U + b_U`, for reading in tiles.
        default_budget: bytes for a chunk of logits where a call names no budget.
    """

    norm: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor, Tensor | None], Tensor]
    transform: Callable[[Tensor], Tensor] | None
    d_model: int
    d_vocab: int
    device: torch.device
    dtype: torch.dtype
    linear: tuple[Tensor, Tensor | None] | None = None
    default_budget: int = DEFAULT_BUDGET

    @property
    def in_tiles(self) -> bool:
        """Whether rows are read a tile of the vocabulary at a time."""
        return self.linear is not None and self.transform is None and self.device.type == "cpu"

    @property
    def block_elements(self) -> int:
        """Logits handled at a time after the product: on an accelerator launches cost more than traffic."""
        return BLOCK_ELEMENTS if self.device.type == "cpu" else 64 * BLOCK_ELEMENTS

    def logits(self, rows: Float[Tensor, "rows d_model"], out: Tensor | None = None) -> Float[Tensor, "rows d_vocab"]:
        """Logits of rows; half-precision logits come back in float32."""
        logits = self.unembed(self.norm(rows.to(self.device, self.dtype)), out)
        if self.transform is not None:
            logits = self.transform(logits)
        return logits if logits.dtype == torch.float64 else logits.float()

    def rows_per_chunk(self, budget: int | None, copies: int = 1) -> int:
        """How many rows, and their logits `copies` times over, fit the budget (bytes); at least one."""
        item = 8 if self.dtype == torch.float64 else 4
        copies += (self.transform is not None) + (self.dtype.itemsize < 4)  # before the transform, and before the cast
        row = item * (copies * self.d_vocab + _COPIES_OF_ROWS * self.d_model)
        return max(1, (self.default_budget if budget is None else budget) // row)

    def chunk(self, n_rows: int, budget: int | None) -> int:
        """Rows that are read at a time where the logits of each exist together, with what is made of them."""
        whole = self.default_budget if budget is None else budget
        scratch = min(whole // 2, 4 * self.block_elements)
        return max(1, min(n_rows, self.rows_per_chunk(whole - scratch)))

    def tile(self, n_rows: int, budget: int | None) -> tuple[int, int]:
        """Rows and words whose logits are held at a time when `n_rows` rows are read."""
        if not self.in_tiles:
            return self.chunk(n_rows, budget), self.d_vocab
        elements, most = TILE_ELEMENTS, TILE_ROWS
        if budget is not None:
            floor = self.d_vocab  # a row of logits: products of a few words alone would take for ever
            elements = max(floor, min(elements, budget // self.dtype.itemsize))
            most = min(most, max(_NARROWEST, budget // (self.dtype.itemsize * _COPIES_OF_ROWS * self.d_model)))
        rows = max(1, min(n_rows, most, elements // _NARROWEST))
        return rows, max(1, min(elements // rows, self.d_vocab))


@dataclass(frozen=True)
class Levels:
    """What is kept of a row's logits; every field float64 but `is_top`.

    Args:
        log_target: log of the target group's probability, `[group, rows]`.
        log_rest: log of one minus that probability, `[group, rows]`.
        logit: the target's logit (log-sum-exp of the logits for a set), `[group, rows]`.
        log_top: log-probability of the most probable token, `[rows]`.
        is_top: whether a token of the first group has the largest logit, `[rows]`.
    """

    log_target: Float[Tensor, "group rows"]
    log_rest: Float[Tensor, "group rows"]
    logit: Float[Tensor, "group rows"]
    log_top: Float[Tensor, "rows"]
    is_top: Bool[Tensor, "rows"]

    def value(self, metric: str) -> Float[Tensor, "rows"]:
        """The metric of the first group, less that of the second where there is one, `[rows]`."""
        values = _METRICS[metric](self)
        return values[0] if len(values) == 1 else values[0] - values[1]

    def cpu(self) -> Levels:
        """The same, detached and on the CPU."""
        return Levels(*(getattr(self, name).detach().cpu() for name in _FIELDS))

    def at(self, rows: slice | Tensor) -> Levels:
        """Those of some rows."""
        return Levels(*(getattr(self, name)[..., rows] for name in _FIELDS))

    @staticmethod
    def empty(n_groups: int, n_rows: int) -> Levels:
        """Room for the levels of `n_rows` rows, to be filled with `put`.

        Results kept one by one would lie between the large tensors of the calculation and leave their memory in pieces that
        no next one fits.
        """
        target, rest, logit = torch.empty(3, n_groups, n_rows, dtype=torch.float64)
        return Levels(
            target, rest, logit, torch.empty(n_rows, dtype=torch.float64), torch.empty(n_rows, dtype=torch.bool)
        )

    def put(self, start: int, part: Levels) -> None:
        """Write the levels of some rows over those from `start` on."""
        for name in _FIELDS:
            rows: Tensor = getattr(part, name)
            getattr(self, name)[..., start : start + rows.shape[-1]] = rows

    @staticmethod
    def join(parts: Sequence[Levels]) -> Levels:
        """Those of all parts' rows, in order."""
        return Levels(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in _FIELDS))


_FIELDS = ("log_target", "log_rest", "logit", "log_top", "is_top")
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
    return _levels(targets, log_rest, top[:, 0].double())


def _levels(targets: Sequence[Tensor], log_rest: Tensor, top: Tensor) -> Levels:
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
    return second[:, 0].double() + (shifted - second).exp().sum(-1).double().log()


def read(
    readout: Readout, rows: Rows, groups: Groups, n_rows: int, budget: int | None = None, probe: Probe | None = None
) -> Levels:
    """Read `n_rows` rows in chunks, without gradients; rows that ask the same question are read once.

    Args:
        readout: the model's norm, unembedding and output transform.
        rows: `row numbers -> [rows, d_model]`, so that the stack of all rows need not exist.
        groups: `row numbers ->` their target ids (see `levels_of_logits`).
        n_rows: how many rows there are.
        budget: bytes that a chunk of logits may take.
        probe: what else is to be taken from the same logits, of every row; it must not change them.

    Returns:
        `Levels` of all rows, on the CPU.
    """
    with torch.no_grad():
        if probe is not None:
            return _in_chunks(readout, rows, groups, torch.arange(n_rows), budget, probe)
        first, like = distinct(rows, groups, n_rows, max(1, _KEYED // readout.d_model))
        read_rows = _in_tiles if readout.in_tiles else _in_chunks
        levels = read_rows(readout, rows, groups, first, budget)
    return levels if len(first) == n_rows else levels.at(like)


def _in_chunks(
    readout: Readout, rows: Rows, groups: Groups, index: Tensor, budget: int | None, probe: Probe | None = None
) -> Levels:
    """Levels of the rows of an index, whole rows of logits at a time."""
    chunk = readout.chunk(len(index), budget)
    plain = readout.transform is None and readout.dtype in (torch.float32, torch.float64)
    buffer = torch.empty(chunk, readout.d_vocab, dtype=readout.dtype, device=readout.device) if plain else None
    found = Levels.empty(len(groups(index[:1])), len(index))
    for start in range(0, len(index), chunk):
        some = index[start : start + chunk]
        logits = readout.logits(rows(some), None if buffer is None else buffer[: len(some)])
        ids = [group.to(readout.device) for group in groups(some)]
        for first, part in levels_in_blocks(readout, logits, ids, start, probe):
            found.put(first, part)
    return found


def _in_tiles(readout: Readout, rows: Rows, groups: Groups, index: Tensor, budget: int | None) -> Levels:
    """The same without ever holding a row's logits together."""
    chunk, words = readout.tile(len(index), budget)
    buffer = torch.empty(chunk * words, dtype=readout.dtype)
    found = Levels.empty(len(groups(index[:1])), len(index))
    for start in range(0, len(index), chunk):
        some = index[start : start + chunk]
        found.put(start, _levels_in_tiles(readout, rows(some), groups(some), buffer))
    return found


def _levels_in_tiles(readout: Readout, rows: Tensor, groups: Sequence[Tensor], buffer: Tensor) -> Levels:
    """Levels of a few rows; `highest` and `total` are the running log-sum-exp of all words but the targets, float64."""
    assert readout.linear is not None
    weight, bias = readout.linear
    normed = readout.norm(rows.to(readout.device, readout.dtype))
    n, width = len(normed), min(len(buffer) // len(normed), readout.d_vocab)
    ids = torch.cat(list(groups), dim=-1)
    targets = torch.full(ids.shape, -torch.inf, dtype=torch.float64)
    highest = torch.full((n, 1), -torch.inf, dtype=readout.dtype)
    total = torch.zeros(n, 1, dtype=torch.float64)
    for start in range(0, readout.d_vocab, width):
        stop = min(start + width, readout.d_vocab)
        tile = buffer[: n * (stop - start)].view(n, stop - start)
        if bias is None:
            torch.mm(normed, weight[:, start:stop], out=tile)
        else:
            torch.addmm(bias[start:stop], normed, weight[:, start:stop], out=tile)
        row, place = ((ids >= start) & (ids < stop)).nonzero(as_tuple=True)
        column = ids[row, place] - start
        targets[row, place] = tile[row, column].double()
        tile[row, column] = -torch.inf
        higher = torch.maximum(highest, tile.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -torch.inf, 0)  # a tile may hold nothing but targets
        shares = tile.sub_(shift).exp_().sum(-1, keepdim=True).double()
        total = total * (highest - shift).double().exp() + shares
        highest = higher
    top = torch.maximum(highest.double(), targets.amax(-1, keepdim=True))
    log_rest = (total.log() + highest.double() - top)[:, 0]
    shifted = (targets - top).split([group.shape[-1] for group in groups], dim=-1)
    return _levels(shifted, log_rest, top[:, 0])


def levels_in_blocks(
    readout: Readout, logits: Tensor, groups: Sequence[Tensor], first: int = 0, probe: Probe | None = None
) -> Iterator[tuple[int, Levels]]:
    """Reduce a chunk, and overwrite it, a few rows at a time, so that the passes after the product find it in the cache.

    Yields:
        the number of a block's first row, counted from `first`, and its levels on the CPU.
    """
    block = min(len(logits), max(1, readout.block_elements // logits.shape[-1]))
    scratch = torch.empty(block, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    for start in range(0, len(logits), block):
        some = logits[start : start + block]
        if probe is not None:
            probe(some, first + start)
        ids = [group[start : start + block] for group in groups]
        yield first + start, levels_of_logits(some, ids, scratch[: len(some)]).cpu()


def value_and_gradient(
    readout: Readout, rows: Float[Tensor, "rows d_model"], groups: Sequence[Int[Tensor, "rows _"]], metric: str
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows d_model"]]:
    """A metric of each row and its gradient with respect to the row, through norm, unembedding and softmax.

    Works with gradients disabled globally and inside `torch.inference_mode`; parameters get no `.grad`.

    Returns:
        values `[rows]` (float64) and gradients `[rows, d_model]` in the readout's dtype, on its device.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = rows.detach().to(readout.device, readout.dtype, copy=True).requires_grad_(True)
        ids = [group.to(readout.device) for group in groups]
        values = levels_of_logits(readout.logits(leaf), ids).value(metric)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient
