"""Averaged gradients against closed forms and against a 512-point rule written out in `oracles`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from iglens_tl._core.averaging import average_gradients, clenshaw_curtis
from iglens_tl._core.readout import DEFAULT_BUDGET, Readout
from iglens_tl._core.segments import Path
from tests import oracles

D_MODEL, D_VOCAB = 16, 40


def head(scale: float = 1.0, norm: str = "rms", seed: int = 0) -> oracles.Head:
    generator = torch.Generator().manual_seed(seed)
    unembed = torch.randn(D_VOCAB, D_MODEL, generator=generator, dtype=torch.float64) * scale
    weight = 1 + 0.3 * torch.randn(D_MODEL, generator=generator, dtype=torch.float64)
    return oracles.Head(norm, unembed, weight=None if norm == "none" else weight)


def readout_of(model: oracles.Head) -> Readout:
    return Readout(
        model.normed, lambda rows, _: rows @ model.unembed.T, None, D_MODEL, D_VOCAB, torch.device("cpu"), torch.float64
    )


def states(n: int, rows: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, D_MODEL, generator=generator, dtype=torch.float64) for _ in range(n)]


def tops(model: oracles.Head, state: torch.Tensor) -> list[int]:
    """What each row reads as: a target whose probability does change."""
    return model.logits(state).argmax(-1).tolist()


def averaged(model: oracles.Head, points: list[torch.Tensor], targets: list[int], **settings):
    path = Path(points, [torch.tensor(targets)[:, None]])
    scale = torch.stack(points).diff(dim=0).norm(dim=-1)
    readout = dataclasses.replace(readout_of(model), budget=settings.pop("budget", DEFAULT_BUDGET))
    settings = {"metric": "prob", "tolerance": 1e-6, "max_nodes": 4097, **settings}
    return average_gradients(readout, path, scale=scale, **settings)


def fixed_rule(model: oracles.Head, start, end, target: int, n: int = 512) -> torch.Tensor:
    """The averaged gradient by n Gauss-Legendre nodes."""
    nodes, weights = (torch.from_numpy(array) / 2 for array in np.polynomial.legendre.leggauss(n))
    points = (start + (nodes[:, None] + 0.5) * (end - start)).requires_grad_(True)
    (gradients,) = torch.autograd.grad(model.prob(points, torch.full((n,), target)).sum(), points)
    return weights @ gradients


@pytest.mark.parametrize("n", [2, 4, 8, 64, 1024])
def test_weights_and_nodes(n):
    nodes, weights = clenshaw_curtis(n)
    assert len(nodes) == len(weights) == n + 1
    assert (nodes[0], nodes[n // 2], nodes[-1]) == (0.0, 0.5, 1.0), "ends and middle are hit exactly"
    assert (weights > 0).all()
    for power in range(n + 1):  # exact up to degree n
        assert abs(float((weights * nodes**power).sum()) - 1 / (power + 1)) <= 1e-13
    coarse = clenshaw_curtis(max(n // 2, 2))[0]
    assert torch.allclose(nodes[:: max(1, n // (len(coarse) - 1))], coarse, rtol=0, atol=1e-16), "nested"


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("norm", ["rms", "layer", "none"])
def test_directions_are_those_of_a_512_point_rule(norm, scale):
    """`scale` sharpens the softmax: at 3, logits change by 30; 512 nodes would not do much beyond."""
    model, points = head(scale, norm), states(3, 2)
    targets = tops(model, points[1])
    found = averaged(model, points, targets)
    for segment in range(2):
        for row, target in enumerate(targets):
            exact = fixed_rule(model, points[segment][row], points[segment + 1][row], target)
            length = float((points[segment + 1][row] - points[segment][row]).norm())
            # Any part as long as the segment is known to 1e-7: the estimate, of which the tolerance is 1e-6, is cautious.
            assert float((found.directions[segment, row] - exact).norm()) * length <= 1e-7
    assert (found.error <= 1e-6).all()


def test_the_estimated_error_is_no_smaller_than_the_true_one():
    model, points = head(1.0), states(5, 3)
    targets = tops(model, points[2])
    for nodes in (9, 17, 33, 65):
        found = averaged(model, points, targets, max_nodes=nodes, tolerance=1e-14)
        exact = averaged(model, points, targets, tolerance=1e-12)
        lengths = torch.stack(points).diff(dim=0).norm(dim=-1)
        true = (found.directions - exact.directions).norm(dim=-1) * lengths
        assert (found.nodes[1:3] == nodes).all()
        assert (true <= found.error + 1e-12).all(), nodes


def test_only_the_segments_that_need_it_are_refined():
    model = head(10.0)
    first, last = states(2, 1)
    near = last + 1e-3 * states(1, 1, seed=5)[0]
    found = averaged(model, [first, last, near], tops(model, last))
    assert found.nodes[1, 0] == 9
    assert found.nodes[0, 0] >= 65


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_no_more_than_twice_the_nodes_of_a_fixed_rule_on_the_hardest_segment(scale):
    """The fixed rule is Gauss's with the fewest nodes, from a list, whose parts are as right as the adaptive ones."""
    model, points = head(scale), states(5, 1)
    targets = tops(model, points[2])
    found = averaged(model, points, targets)
    exact = averaged(model, points, targets, tolerance=1e-13)
    hardest = int(found.nodes[:, 0].argmax())
    start, end = points[hardest][0], points[hardest + 1][0]
    length = float((end - start).norm())
    reached = float((found.directions - exact.directions).norm(dim=-1)[hardest, 0]) * length

    def off(n: int) -> float:
        return float((fixed_rule(model, start, end, targets[0], n) - exact.directions[hardest, 0]).norm()) * length

    needed = next(n for n in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if off(n) <= max(reached, 1e-12))
    assert int(found.nodes[hardest, 0]) - 1 <= 2 * needed


def test_rows_chunks_and_blocks_change_nothing():
    model, points, targets = head(3.0), states(4, 5), [1, 2, 3, 4, 5]
    whole = averaged(model, points, targets)
    pieces = averaged(model, points, targets, budget=2 * 8 * (D_VOCAB * 6 + D_MODEL * 24) * 7)
    assert torch.equal(whole.nodes, pieces.nodes)
    assert (whole.directions - pieces.directions).abs().max() <= 1e-15


def test_a_linear_readout_has_one_gradient():
    """Without a norm the logit is linear: its averaged gradient is the unembedding's row, whatever the segment."""
    model, points = head(norm="none"), states(2, 2)
    found = averaged(model, points, [3, 7], metric="logit")
    assert torch.allclose(found.directions[0], model.unembed[[3, 7]], rtol=0, atol=1e-14)
    assert (found.nodes == 9).all()


def test_too_few_nodes_leave_an_error_that_says_so():
    model, points = head(30.0), states(2, 1)
    found = averaged(model, points, tops(model, points[1]), max_nodes=17)
    assert found.error[0, 0] > 1e-6
    assert found.nodes[0, 0] == 17
