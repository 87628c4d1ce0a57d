"""One straight segment of the path: the change of the readout along it, under each estimator.

A segment runs from `start` to `end`; by the gradient theorem the integrated gradient of `f` along it is
`f(end) - f(start)`. The prediction-aware estimator (after IDGI) credits each step with its observed change of `f`, so
its sum is that difference at any number of steps and needs no gradient. The integrating estimators sum
`<grad f, end - start>` over quadrature nodes; they approach it as the nodes get denser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from iglens_tl._core.levels import FIELDS, FIELDS_OF, Levels
from iglens_tl._core.quadrature import quadrature
from iglens_tl._core.readout import COPIES, COPIES_OF_GRADIENTS, Probe, Readout, read, value_and_gradient
from iglens_tl._core.states import States


@dataclass(frozen=True)
class Path:
    """The states that the path runs through, each `[tokens, d_model]`, and the target ids of each token.

    Args:
        states: K + 1 tensors `[tokens, d_model]`, of any dtype and on any device (`States`: rows of larger ones).
        groups: one or two groups of target ids `[tokens, width]` on the CPU (see `Levels`).
    """

    states: Sequence[Tensor]
    groups: Sequence[Int[Tensor, "tokens _"]]

    @property
    def n_tokens(self) -> int:
        return len(self.groups[0])

    @property
    def n_segments(self) -> int:
        return len(self.states) - 1

    @property
    def dtype(self) -> torch.dtype:
        """That of the last state."""
        return self.rows(-1, torch.arange(0)).dtype

    def rows(self, state: int, tokens: Tensor) -> Tensor:
        """A state of some tokens, `[rows, d_model]`, in its own dtype on its own device."""
        if isinstance(self.states, States):
            return self.states.rows(state, tokens)
        return self.states[state][tokens.to(self.states[state].device)]

    def target_rows(self, tokens: Tensor) -> list[Tensor]:
        """The target ids of rows that belong to these tokens."""
        return [ids[tokens] for ids in self.groups]


def read_states(readout: Readout, path: Path, probe: Probe | None = None, fields: Sequence[str] = FIELDS) -> Levels:
    """Levels at every state; the fields' last axis is `(K + 1) * tokens`, states first."""
    n = path.n_tokens

    def rows(index: Tensor) -> Tensor:
        return _states_at(path, index // n, index % n, readout)

    def groups(index: Tensor) -> list[Tensor]:
        return path.target_rows(index % n)

    return read(readout, rows, groups, n * len(path.states), probe, fields)


def read_steps(
    readout: Readout,
    path: Path,
    values: Float[Tensor, "state tokens"],
    metric: str,
    n_steps: int,
) -> Float[Tensor, "segment step tokens"]:
    """The observed change of the metric in each of `n_steps` equal steps of each segment.

    The end states are not read again: their `values` are given, so that steps and credits speak of the same numbers.
    """
    inner, n, m = n_steps - 1, path.n_tokens, path.n_segments
    if inner == 0:
        return values.diff(dim=0)[:, None]
    fractions = torch.arange(1, n_steps, dtype=torch.float64) / n_steps

    def rows(index: Tensor) -> Tensor:
        segment, step, token = _unravel(index, inner, n)
        return _between(path, segment, token, fractions[step], readout)

    def groups(index: Tensor) -> list[Tensor]:
        return path.target_rows(index % n)

    levels = read(readout, rows, groups, m * inner * n, fields=FIELDS_OF[metric])
    between = levels.value(metric).reshape(m, inner, n)
    return torch.cat([values[:-1, None], between, values[1:, None]], dim=1).diff(dim=1)


def integrate(readout: Readout, path: Path, metric: str, rule: str, n_steps: int) -> Float[Tensor, "segment tokens"]:
    """Integrated gradients of the metric along each segment by a quadrature rule, float64 sums."""
    nodes, weights = quadrature(rule, n_steps)
    n, m, k = path.n_tokens, path.n_segments, len(nodes)
    credits = torch.zeros(m * n, dtype=torch.float64)
    chunk = readout.rows_per_chunk(COPIES, COPIES_OF_GRADIENTS)
    for start in range(0, m * k * n, chunk):
        segment, node, token = _unravel(torch.arange(start, min(start + chunk, m * k * n)), k, n)
        points = _between(path, segment, token, nodes[node], readout)
        _, gradient = value_and_gradient(readout, points, path.target_rows(token), metric)
        along = (gradient.double() * _difference(path, segment, token, readout)).sum(-1).cpu()
        credits.index_add_(0, segment * n + token, along * weights[node])
    return credits.reshape(m, n)


def _unravel(index: Tensor, n_nodes: int, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row number -> (segment, node, token)."""
    return index // (n_nodes * n_tokens), index // n_tokens % n_nodes, index % n_tokens


def _states_at(path: Path, state: Tensor, token: Tensor, readout: Readout) -> Tensor:
    """A state of a token a row; consecutive rows share a state, so they are taken run by run."""
    runs, sizes = state.unique_consecutive(return_counts=True)
    pieces = [
        path.rows(index, chosen).to(readout.device, readout.dtype)
        for index, chosen in zip(runs.tolist(), token.split(sizes.tolist()), strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _ends(path: Path, segment: Tensor, token: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
    """Start and end state of each row."""
    return _states_at(path, segment, token, readout), _states_at(path, segment + 1, token, readout)


def _between(path: Path, segment: Tensor, token: Tensor, fractions: Tensor, readout: Readout) -> Tensor:
    start, end = _ends(path, segment, token, readout)
    return torch.lerp(start, end, fractions.to(readout.device, readout.dtype)[:, None])


def _difference(path: Path, segment: Tensor, token: Tensor, readout: Readout) -> Tensor:
    start, end = _ends(path, segment, token, readout)
    return end.double() - start.double()
