"""The head-once readout: a residual state -> a value of a target token, in row chunks.

`f(h) = value(softmax(transform(unembed(norm(h)))))[y]` is pointwise in `h`: rows are independent, so all states of all
tokens are stacked to `[rows, d_model]` and read together. Of a chunk's logits only a few numbers a row are kept (log of
the target's share, of the rest's, the largest logit). Rows on their way make room for what is kept of all, so memory
hardly depends on the layers or the positions.

A plain matrix is multiplied a tile of rows and words at a time, and each tile is folded into a running log-sum-exp while it
is in the processor's cache: the logits of a row never exist together, and reading costs little more than the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._core.distinct import Groups, Rows, distinct
from iglens_tl._core.levels import FIELDS, Levels, levels_of_logits, levels_of_sums, wide

BLOCK_ELEMENTS = 1 << 20
"""Logits handled at a time after the matrix product: 4 MB in float32, which stays in the cache."""

TILE_ROWS, TILE_ELEMENTS = 512, 1 << 18
"""Rows, and logits, of a tile: 1 MB in float32, what a core's cache holds beside the weights (measured: benchmarks/)."""

ROW_ELEMENTS = 1 << 19
"""Elements of the rows of a tile: a wide model's rows are fewer, and enough to make the product wait for arithmetic alone."""

DEFAULT_BUDGET = 64 * 2**20
"""Bytes that reading may take where nobody names a budget; more does not make it faster (measured: benchmarks/)."""

_NARROWEST = 64
"""Words of a tile, at least (where the vocabulary has so many)."""

_COPIES_OF_ROWS = 6
"""What becomes of a state `[d_model]` on its way: as it came, together with others, and four more inside the norm."""

_FEWEST_COPIES = 4
"""How many of these there are at a time where the norm is an RMSNorm that makes the fewest."""

COPIES_OF_GRADIENTS = 24
"""The same with a gradient: what the graph keeps of the norm, what comes back, and the way in float64."""

COPIES = 7
"""Arrays as large as the logits that a gradient takes: logits, shifted, exponentials, those of a near-certain target once more,
and their gradients."""

_BYTES_A_TARGET = 96
"""What finding a target's logit takes: ids and logits, where they are, masks, and each less the largest."""

_KEYED = 1 << 16
"""Elements of rows that are compared at a time."""

Probe = Callable[[Tensor, int], None]
"""Looks at a block of logits `[rows, d_vocab]` and the number of its first row, before they are reduced."""


@dataclass(frozen=True)
class Readout:
    """A model's final norm, unembedding and output transform as functions of rows.

    Args:
        norm: `[rows, d_model] -> [rows, d_model]`.
        unembed: `[rows, d_model] -> [rows, d_vocab]`; may write into the tensor that it is handed as second argument.
        transform: what the model does to the logits after the unembedding (soft-cap, scale), or None for nothing.
        d_model, d_vocab: widths of the residual stream and of the logits.
        device, dtype: where, and in what precision, rows are read.
        linear: `W_U` `[d_model, d_vocab]` and `b_U` where `unembed` is exactly `rows @ W_U + b_U`, for reading in tiles; a
            `W_U` of another dtype than the readout's is cast a tile at a time.
        budget: bytes that reading may take beyond its results: logits, rows, and what is made of both; one row at least.
        n_targets: target ids of a row, of all groups: what is made of a wide set counts, too.
    """

    norm: Callable[[Tensor], Tensor]
    unembed: Callable[[Tensor, Tensor | None], Tensor]
    transform: Callable[[Tensor], Tensor] | None
    d_model: int
    d_vocab: int
    device: torch.device
    dtype: torch.dtype
    linear: tuple[Tensor, Tensor | None] | None = None
    budget: int = DEFAULT_BUDGET
    n_targets: int = 1

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
        return wide(logits)

    def rows_per_chunk(self, copies: int = 1, copies_of_rows: int = _COPIES_OF_ROWS, budget: int | None = None) -> int:
        """How many rows, so often, and their logits `copies` times over, fit the budget; at least one."""
        item = max(4, self.dtype.itemsize)
        copies += 2 * (self.transform is not None)  # before the transform and inside it
        copies += self.linear is None  # what a module makes, or what is cast to float32
        row = item * (copies * self.d_vocab + copies_of_rows * self.d_model) + _BYTES_A_TARGET * self.n_targets
        return max(1, (self.budget if budget is None else budget) // row)

    def rows_at_a_time(self, copies: int, itemsize: int, most: int) -> int:
        """How many rows alone, so often and of so many bytes an element, fit the budget, of `most` elements; at least one."""
        row = copies * itemsize * self.d_model + _BYTES_A_TARGET * self.n_targets
        return max(1, min(most // self.d_model, self.budget // row))

    def chunk(self, n_rows: int, kept: int = 0) -> int:
        """Rows that are read at a time where the logits of each exist together, with what is made of them."""
        budget = self._beside(kept)
        scratch = min(budget // 2, 4 * self.block_elements)
        return max(1, min(n_rows, self.rows_per_chunk(budget=budget - scratch)))

    def tile(self, n_rows: int, kept: int = 0) -> tuple[int, int]:
        """Rows and words whose logits are held at a time when `n_rows` rows are read.

        Args:
            n_rows: how many rows there are.
            kept: bytes that are held of all rows meanwhile. Fewer rows are on their way beside it, so that more tokens do not
                take more memory, but at least half as many: one at a time would take for ever.
        """
        if not self.in_tiles:
            return self.chunk(n_rows, kept), self.d_vocab
        item = self.dtype.itemsize
        row = _COPIES_OF_ROWS * item * self.d_model + _BYTES_A_TARGET * self.n_targets
        column = self.casts * item * self.d_model
        # no less than a row of logits: products of a few words alone would take for ever
        budget = max(self._beside(kept), row + item * self.d_vocab, row + _NARROWEST * (column + item))
        most = min(TILE_ROWS, ROW_ELEMENTS // self.d_model)
        beside = max(most // 2, most - kept // (_FEWEST_COPIES * item * self.d_model))
        rows = max(1, min(n_rows, beside, budget // 2 // row))
        words = max(1, TILE_ELEMENTS // rows // _NARROWEST) * _NARROWEST  # whole numbers of it are multiplied faster
        words = min(words, (budget - rows * row) // (item * rows + column))
        return rows, max(1, min(words, self.d_vocab))

    def _beside(self, kept: int) -> int:
        """What the budget leaves beside that, but at least half of it."""
        return max(1, self.budget - kept, self.budget // 2)

    @property
    def casts(self) -> bool:
        """Whether the unembedding is of another dtype than the readout."""
        return self.linear is not None and self.linear[0].dtype != self.dtype


def read(
    readout: Readout,
    rows: Rows,
    groups: Groups,
    n_rows: int,
    probe: Probe | None = None,
    fields: Sequence[str] = FIELDS,
) -> Levels:
    """Read `n_rows` rows in chunks, without gradients; rows that ask the same question are read once.

    Args:
        readout: the model's norm, unembedding and output transform, and the bytes that may be taken.
        rows: `row numbers -> [rows, d_model]`, so that the stack of all rows need not exist.
        groups: `row numbers ->` their target ids (see `levels_of_logits`).
        n_rows: how many rows there are.
        probe: what else is to be taken from the same logits, of every row; it must not change them.
        fields: what to keep of each row, of `FIELDS`.

    Returns:
        `Levels` of all rows, on the CPU.
    """
    with torch.no_grad():
        if probe is not None:
            return _in_chunks(readout, rows, groups, n_rows, fields, probe)
        read_rows = _in_tiles if readout.in_tiles else _in_chunks
        item = max(4, readout.dtype.itemsize)
        # a state of 4 bytes a number as it came and with others, and as integers of 8
        found = distinct(rows, groups, n_rows, readout.rows_at_a_time(_COPIES_OF_ROWS, item, _KEYED))
        if found is None:
            return read_rows(readout, rows, groups, n_rows, fields)
        first, like = found
        levels = read_rows(readout, lambda i: rows(first[i]), lambda i: groups(first[i]), len(first), fields)
    return levels.at(like)


def _in_chunks(
    readout: Readout, rows: Rows, groups: Groups, n_rows: int, fields: Sequence[str], probe: Probe | None = None
) -> Levels:
    """Levels of all rows, whole rows of logits at a time."""
    found = Levels.empty(len(groups(torch.arange(0))), n_rows, fields)
    chunk = readout.chunk(n_rows, found.nbytes)
    plain = readout.transform is None and readout.dtype in (torch.float32, torch.float64)
    buffer = torch.empty(chunk, readout.d_vocab, dtype=readout.dtype, device=readout.device) if plain else None
    for start in range(0, n_rows, chunk):
        some = torch.arange(start, min(start + chunk, n_rows))
        logits = readout.logits(rows(some), None if buffer is None else buffer[: len(some)])
        ids = [group.to(readout.device) for group in groups(some)]
        for first, part in levels_in_blocks(readout, logits, ids, start, probe):
            found.put(first, part)
        del logits  # or it would still be held while the next ones are made
    return found


def _in_tiles(readout: Readout, rows: Rows, groups: Groups, n_rows: int, fields: Sequence[str]) -> Levels:
    """The same without ever holding a row's logits together."""
    found = Levels.empty(len(groups(torch.arange(0))), n_rows, fields)
    chunk, words = readout.tile(n_rows, found.nbytes)
    buffer = torch.empty(chunk * words, dtype=readout.dtype)
    most = words if readout.casts else readout.d_vocab  # where nothing is cast, few rows take more words at a time
    for start in range(0, n_rows, chunk):
        some = torch.arange(start, min(start + chunk, n_rows))
        found.put(start, _levels_in_tiles(readout, rows(some), groups(some), buffer, most))
    return found


def _levels_in_tiles(
    readout: Readout, rows: Tensor, groups: Sequence[Tensor], buffer: Tensor, most_words: int
) -> Levels:
    """Levels of a few rows; `highest` and `total` are the running log-sum-exp of all words but the targets, float64."""
    assert readout.linear is not None
    weight, bias = readout.linear
    normed = readout.norm(rows.to(readout.device, readout.dtype))
    n, width = len(normed), min(len(buffer) // len(normed), most_words)
    ids = torch.cat(list(groups), dim=-1)
    targets = torch.full(ids.shape, -torch.inf, dtype=torch.float64)
    highest = torch.full((n, 1), -torch.inf, dtype=readout.dtype)
    total = torch.zeros(n, 1, dtype=torch.float64)
    for start in range(0, readout.d_vocab, width):
        stop = min(start + width, readout.d_vocab)
        tile = buffer[: n * (stop - start)].view(n, stop - start)
        if bias is None:
            torch.mm(normed, weight[:, start:stop].to(readout.dtype), out=tile)
        else:
            torch.addmm(bias[start:stop], normed, weight[:, start:stop].to(readout.dtype), out=tile)
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
    return levels_of_sums(shifted, log_rest, top[:, 0])


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
