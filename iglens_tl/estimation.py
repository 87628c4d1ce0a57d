"""What a call will cost, before it is made: rows, products, bytes and forward passes.

The cost of IG-Lens is the unembedding of every state of every token: `rows` rows of `d_model` times the
`[d_model, d_vocab]` matrix, `2 * rows * d_model * d_vocab` floating-point operations. Nothing is run to know it.

What it does not say: seconds (they depend on the machine; `make bench` measures ratios), and what the model's own forward
pass takes.

Example::

    print(estimate(model, prompts, positions=None))
    # 3,968 rows (31 states x 128 tokens), 0.22 TFLOP, 1.05 MB of logits at a time, 9.1 MB of states, 1 forward pass
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import ESTIMATORS, memory_size, one_of, whole_number
from iglens_tl._core.levels import FIELDS_OF, Levels
from iglens_tl._core.quadrature import quadrature
from iglens_tl._core.readout import COPIES, COPIES_OF_GRADIENTS
from iglens_tl._model.head import readout_of
from iglens_tl._request import Lens, Request, Settled, settle
from iglens_tl._trajectory import COMPARED, ordinary_tensors, rows_for_top
from iglens_tl.targets import TOP


@dataclass(frozen=True)
class Estimate:
    """The cost of an `ig_lens` call.

    Attributes:
        n_states: states on the path, K + 1.
        n_tokens: selected positions of all prompts.
        rows: rows that pass through norm and unembedding: `(K + 1) * n_tokens` for the default call, and those of steps,
            nodes. An upper bound: states that are the same for the same target (a prompt's beginning that another prompt
            shares, a zero baseline) are read once. A `TOP` that is read through a `lens` costs a row a token more.
        gradient_rows: how many of them are read with a gradient, which costs about three times as much.
        flops: of the unembedding's matrix products, gradients included.
        chunk_rows: rows that are read at a time, for probabilities (what is kept for log-odds takes the place of some); more
            where many ask the same question, and of last states that are read to say what `TOP` is.
        logits_bytes: what their logits take (those of a tile of the vocabulary, where it is read in tiles; whole rows where the
            last states must say what `TOP` is; seven times whole rows where gradients are taken): the part of the extra memory
            that grows with the vocabulary, and with neither layers nor tokens. All of it stays within `max_memory`.
        state_bytes: the states that are kept, `(K + 1) * n_tokens * d_model` numbers; 0 with a cache, where they stay.
        forwards: forward passes of the model: 1 with a model, 0 with a cache.
    """

    n_states: int
    n_tokens: int
    rows: int
    gradient_rows: int
    flops: int
    chunk_rows: int
    logits_bytes: int
    state_bytes: int
    forwards: int

    def __str__(self) -> str:
        once = self.n_states * self.n_tokens
        more = f" and {self.rows - once:,} more" if self.rows > once else ""
        passes = "no forward pass" if not self.forwards else f"{self.forwards} forward pass"
        return (
            f"{self.rows:,} rows ({self.n_states} states x {self.n_tokens:,} tokens{more}), {self.flops / 1e12:.3g} TFLOP, "
            f"{self.logits_bytes / 1e6:.3g} MB of logits at a time, {self.state_bytes / 1e6:.3g} MB of states, {passes}"
        )


@ordinary_tensors()
def estimate(
    model_or_cache: Any,
    input: Any = None,
    *,
    targets: Any = TOP,
    incorrect_targets: Any = None,
    cache: Any = None,
    positions: Any = -1,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    logits: Tensor | None = None,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> Estimate:
    """What `ig_lens` with these arguments will cost; checks them as `ig_lens` does, and runs nothing.

    Args:
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, estimator, n_steps, lens,
            dtype, logits, attention_mask, prepend_bos, max_memory: as in `ig_lens`.

    Returns:
        An `Estimate`; `print` says it in a line.

    Raises:
        ValueError, TypeError: as `ig_lens`, as far as no forward pass is needed to see it.
    """
    one_of("estimator", estimator, ESTIMATORS)
    n_steps, budget = whole_number("n_steps", n_steps, 1), memory_size(max_memory)
    request = Request(
        model_or_cache, input, targets, incorrect_targets, cache, positions, layers, incl_mid, baseline, lens, dtype,
        logits, attention_mask, prepend_bos,
    )  # fmt: skip
    settled = settle(request)
    width = sum(grid.shape[-1] for grid in (settled.target_ids, settled.incorrect_ids) if grid is not None)
    readout = replace(readout_of(settled.host, dtype, budget), n_targets=max(1, width))
    n_states, n_tokens = len(settled.states.state_labels), int(settled.positions.mask.sum())
    inner, nodes = _inner_points(estimator, n_steps)
    once, gradient_rows = n_states * n_tokens, (n_states - 1) * nodes * n_tokens
    of_top = n_tokens if _reads_top(settled, request) else 0  # of the last states, which only a lens makes read again
    again = of_top if request.lens is not None else 0
    rows = once + (n_states - 1) * inner * n_tokens + gradient_rows + again
    said = settled.view is None or settled.logits is not None
    before = once - (n_tokens if of_top > again else 0)  # the last states have been read already
    fields = (*FIELDS_OF["prob"], *COMPARED) if said else FIELDS_OF["prob"]
    kept = Levels.empty(1 + (request.incorrect_targets is not None), before, fields).nbytes
    chunk, words = readout.tile(before, kept)
    whole = min(of_top, rows_for_top(readout)) * readout.d_vocab
    if gradient_rows:
        chunk, words = min(gradient_rows, readout.rows_per_chunk(COPIES, COPIES_OF_GRADIENTS)), COPIES * readout.d_vocab
    item = torch.finfo(readout.dtype).bits // 8
    return Estimate(
        n_states=n_states,
        n_tokens=n_tokens,
        rows=rows,
        gradient_rows=gradient_rows,
        flops=2 * (rows + 2 * gradient_rows) * readout.d_model * readout.d_vocab,
        chunk_rows=chunk,
        logits_bytes=max(chunk * words, whole) * max(item, 4),
        state_bytes=0 if settled.view is not None else once * readout.d_model * item,
        forwards=int(settled.view is None),
    )


def _inner_points(estimator: str, n_steps: int) -> tuple[int, int]:
    """Points inside a segment that are read, without and with a gradient."""
    if estimator == "prediction_aware":
        return n_steps - 1, 0
    return 0, len(quadrature(estimator, n_steps)[0])


def _reads_top(settled: Settled, request: Request) -> bool:
    """Whether the last states are read, as whole rows, because no logits say what `TOP` is."""
    asked = settled.target_ids is None or request.incorrect_targets is TOP
    return asked and settled.view is not None and settled.logits is None
