"""Nodes and weights on [0, 1] for each quadrature rule.

An estimator of `integral_0^1 g(a) da` is `sum_i weights[i] * g(nodes[i])`; the weights of every rule sum to one.
`midpoint` and `trapezoid` converge at second order in the number of steps, `left` and `right` at first order,
`gauss_legendre` with n nodes is exact for polynomials of degree 2n - 1.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

RULES = ("midpoint", "trapezoid", "left", "right", "gauss_legendre")


def quadrature(rule: str, n_steps: int) -> tuple[Float[Tensor, "node"], Float[Tensor, "node"]]:
    """Nodes and weights of a rule on [0, 1], in float64.

    Args:
        rule: one of `RULES`.
        n_steps: number of equal intervals; for `gauss_legendre` the number of nodes. At least 1.

    Returns:
        `nodes`, `weights`: each `[node]`; `n_steps` of them, and `n_steps + 1` for `trapezoid`.

    Raises:
        ValueError: for an unknown rule or `n_steps < 1`.

    >>> nodes, weights = quadrature("trapezoid", 2)
    >>> nodes.tolist(), weights.tolist()
    ([0.0, 0.5, 1.0], [0.25, 0.5, 0.25])
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}.")
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}.")
    if rule == "gauss_legendre":
        points, masses = np.polynomial.legendre.leggauss(n_steps)
        return torch.from_numpy((points + 1) / 2), torch.from_numpy(masses / 2)
    grid = torch.arange(n_steps + 1, dtype=torch.float64) / n_steps
    equal = torch.full((n_steps,), 1 / n_steps, dtype=torch.float64)
    if rule == "midpoint":
        return (grid[:-1] + grid[1:]) / 2, equal
    if rule == "left":
        return grid[:-1], equal
    if rule == "right":
        return grid[1:], equal
    ends = torch.tensor([0.5 / n_steps], dtype=torch.float64)
    return grid, torch.cat([ends, equal[1:], ends])
