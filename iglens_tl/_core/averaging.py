"""Path-averaged gradients of the readout: the direction along which a segment's parts are credited.

Along the straight segment `h(a) = start + a (end - start)` the averaged gradient is `g = integral_0^1 grad f(h(a)) da`.
By the gradient theorem `<g, end - start> = f(end) - f(start)`, so for any parts `c_i` with `sum_i c_i = end - start` the
credits `<g, c_i>` add up to the segment's own (Aumann and Shapley's value on the path), whatever the order of the parts.

The rule is Clenshaw and Curtis's with its nodes doubled until it has converged: nested, so no gradient is computed
twice, and as good as Gauss's in practice. Each segment of each row goes as far as it needs. It has converged where two
things hold:

- the known change is met: `|<g, end - start> - (f(end) - f(start))| <= tolerance`. The sum of the parts is then right,
  but parts can err against each other;
- the whole vector has settled: `|g_n - g_(n/2)| * scale <= tolerance`, with `scale` the length of the longest part.
  By Cauchy and Schwarz this bounds the change of every part, in any direction, not that of the sum alone.

The larger of both is `error`, the estimate that is reported. The change `g_n - g_(n/2)` is the error of the coarser rule;
convergence is geometric, so the finer rule gains at least what the last doubling gained (`|g_n - g_(n/2)| / |g_(n/2) -
g_(n/4)|`). A tenth of that gain is believed.

Reference: Trefethen, "Is Gauss Quadrature Better than Clenshaw-Curtis?", SIAM Review 50 (2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._core.readout import COPIES, COPIES_OF_GRADIENTS, Readout, value_and_gradient
from iglens_tl._core.segments import Path

FIRST_LEVEL = 8
"""Intervals of the coarsest rule that is believed; it is compared with its own half and quarter."""

_SAFETY = 10


@dataclass(frozen=True)
class Averages:
    """Averaged gradients and how well they are known.

    Args:
        directions: `[segment, rows, d_model]`, metric per unit of the residual stream, float64 on the CPU.
        error: `[segment, rows]`, what any part no longer than `scale` may be off by, in the metric's unit.
        nodes: `[segment, rows]`, gradients that were computed.
    """

    directions: Float[Tensor, "segment rows d_model"]
    error: Float[Tensor, "segment rows"]
    nodes: Int[Tensor, "segment rows"]


@lru_cache(maxsize=16)
def clenshaw_curtis(n: int) -> tuple[Float[Tensor, "node"], Float[Tensor, "node"]]:
    """Nodes and weights on [0, 1] of the rule with `n` intervals (even), `n + 1` nodes, both ends among them.

    >>> nodes, weights = clenshaw_curtis(2)
    >>> nodes.tolist(), [round(w, 12) for w in weights.tolist()]
    ([0.0, 0.5, 1.0], [0.166666666667, 0.666666666667, 0.166666666667])
    """
    k = torch.arange(n + 1, dtype=torch.float64)
    nodes = torch.sin(torch.pi * k / (2 * n)).square()  # (1 - cos) / 2, with all digits at the ends
    order = torch.arange(1, n // 2 + 1, dtype=torch.float64)
    factor = torch.where(order == n // 2, 1.0, 2.0) / (4 * order.square() - 1)
    waves = torch.cos(2 * torch.pi * torch.outer(k, order) / n)
    weights = (1 - waves @ factor) / n
    weights[0] = weights[-1] = 0.5 / (n**2 - 1)
    nodes[n // 2], nodes[n] = 0.5, 1.0
    return nodes, weights


def average_gradients(
    readout: Readout,
    path: Path,
    metric: str,
    scale: Float[Tensor, "segment rows"],
    tolerance: float,
    max_nodes: int,
    advance: Callable[[int], object] | None = None,
) -> Averages:
    """The averaged gradient of every segment of every row.

    Args:
        readout: the model's readout; float64 unless the tolerance is coarse. Half of what it may take is for logits, half for
            the gradients that are kept meanwhile (more where a single segment needs more than 64 of them).
        path: the states and target ids.
        metric: see `Levels.value`.
        scale: the length of the longest part of each segment and row.
        tolerance: in the metric's unit, for each part.
        max_nodes: gradients that a segment of a row may take; where they do not suffice, `error` stays above `tolerance`.
        advance: told how many gradients have been computed, now and then.
    """
    m, n = path.n_segments, path.n_tokens
    size = readout.d_model
    half = replace(readout, budget=max(1, readout.budget // 2))
    per_block = max(1, half.budget // (8 * size * 8 * FIRST_LEVEL))
    solver = _Solver(half, path, metric, scale.reshape(-1), tolerance, max_nodes, advance)
    blocks = [solver.solve(torch.arange(i, min(i + per_block, m * n))) for i in range(0, m * n, per_block)]
    directions, error, nodes = (torch.cat(part) for part in zip(*blocks, strict=True))
    return Averages(directions.reshape(m, n, size), error.reshape(m, n), nodes.reshape(m, n))


def gradients_at(readout: Readout, path: Path, state: int, metric: str) -> Float[Tensor, "rows d_model"]:
    """The gradient of the metric at one state of the path, float64 on the CPU."""
    chunk = readout.rows_per_chunk(COPIES, COPIES_OF_GRADIENTS)
    found = torch.empty(path.n_tokens, readout.d_model, dtype=torch.float64)
    for token in torch.arange(path.n_tokens).split(chunk):
        _, gradient = value_and_gradient(readout, path.rows(state, token), path.target_rows(token), metric)
        found[token] = gradient.double().cpu()
    return found


@dataclass(frozen=True)
class _Solver:
    """One call's settings; a task is a segment of a row, numbered `segment * rows + row`."""

    readout: Readout
    path: Path
    metric: str
    scale: Tensor
    tolerance: float
    max_nodes: int
    advance: Callable[[int], object] | None

    def solve(self, tasks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Directions, errors and node counts of some tasks."""
        directions = torch.zeros(len(tasks), self.readout.d_model, dtype=torch.float64)
        error = torch.full((len(tasks),), torch.inf, dtype=torch.float64)
        nodes = torch.zeros(len(tasks), dtype=torch.int64)
        open_ = torch.arange(len(tasks))
        n = FIRST_LEVEL
        values, gradients = self._evaluate(tasks, clenshaw_curtis(n)[0])
        while True:
            directions[open_], error[open_] = self._judge(tasks[open_], values, gradients)
            nodes[open_] = n + 1
            keep = ~(error[open_] <= self.tolerance)
            open_, values, gradients = open_[keep], values[keep], gradients[keep]
            if not len(open_) or 2 * n + 1 > self.max_nodes:
                return directions, error, nodes
            n *= 2
            new_values, new_gradients = self._evaluate(tasks[open_], clenshaw_curtis(n)[0][1::2])
            values, gradients = _interleave(values, new_values), _interleave(gradients, new_gradients)

    def _evaluate(self, tasks: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[task, node]` and gradients `[task, node, d_model]` at fractions of the way."""
        count = len(fractions)
        chunk = self.readout.rows_per_chunk(COPIES, COPIES_OF_GRADIENTS)
        values = torch.empty(len(tasks) * count, dtype=torch.float64)
        gradients = torch.empty(len(tasks) * count, self.readout.d_model, dtype=torch.float64)
        for start in range(0, len(values), chunk):
            rows = slice(start, min(start + chunk, len(values)))
            index = torch.arange(rows.start, rows.stop)
            points, ids = self._points(tasks[index // count], fractions[index % count])
            value, gradient = value_and_gradient(self.readout, points, ids, self.metric)
            values[rows], gradients[rows] = value.cpu(), gradient.double().cpu()
            if self.advance is not None:
                self.advance(len(index))
        return values.reshape(len(tasks), count), gradients.reshape(len(tasks), count, -1)

    def _points(self, tasks: Tensor, fractions: Tensor) -> tuple[Tensor, list[Tensor]]:
        token = tasks % self.path.n_tokens
        start, end = self._ends(tasks)
        weight = fractions.to(self.readout.device, self.readout.dtype)[:, None]
        return torch.lerp(start, end, weight), self.path.target_rows(token)

    def _ends(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Start and end states of tasks (ascending), in the readout's dtype on its device."""
        segment, token = tasks // self.path.n_tokens, tasks % self.path.n_tokens
        runs = [(int(s), token[segment == s]) for s in segment.unique_consecutive()]

        def rows(offset: int) -> Tensor:
            states = [self.path.rows(s + offset, chosen) for s, chosen in runs]
            return torch.cat([state.to(self.readout.device, self.readout.dtype) for state in states])

        return rows(0), rows(1)

    def _judge(self, tasks: Tensor, values: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The averages by the finest rule and their estimated errors."""
        fine, coarse, coarser = (_apply(gradients, step) for step in (1, 2, 4))
        start, end = self._ends(tasks)
        along = (fine * (end.double() - start.double()).cpu()).sum(-1)
        off = (along - (values[:, -1] - values[:, 0])).abs()
        last, before = (fine - coarse).norm(dim=-1), (coarse - coarser).norm(dim=-1)
        gain = (_SAFETY * last / before).nan_to_num(1.0).clamp(max=1.0)
        return fine, torch.maximum(off, last * gain * self.scale[tasks])


def _apply(gradients: Tensor, step: int) -> Tensor:
    """The rule on every `step`-th node: `[task, node, d_model] -> [task, d_model]`."""
    chosen = gradients[:, ::step]
    return torch.einsum("tnd,n->td", chosen, clenshaw_curtis(chosen.shape[1] - 1)[1])


def _interleave(old: Tensor, new: Tensor) -> Tensor:
    """Nodes of the coarser rule and those between them, in order along axis 1."""
    both = old.new_empty(old.shape[0], old.shape[1] + new.shape[1], *old.shape[2:])
    both[:, ::2], both[:, 1::2] = old, new
    return both
