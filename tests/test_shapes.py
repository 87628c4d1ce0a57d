"""The shapes that the package annotates are enforced while the tests run."""

from __future__ import annotations

import pytest
import torch

from iglens_tl._core.levels import levels_of_logits
from iglens_tl._core.readout import Readout
from iglens_tl._plan import plan_positions
from tests.shapes import ShapeError


def test_a_wrong_shape_is_caught() -> None:
    with pytest.raises((ShapeError, TypeError), match="token_mask"):
        plan_positions(-1, torch.ones(3, dtype=torch.bool))


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises((ShapeError, TypeError), match="groups"):
        levels_of_logits(torch.zeros(2, 5), [torch.zeros(2, 1)])


def test_axes_of_one_name_must_agree() -> None:
    with pytest.raises((ShapeError, TypeError), match="groups"):
        levels_of_logits(torch.zeros(2, 5), [torch.zeros(3, 1, dtype=torch.long)])


def test_a_result_of_another_shape_is_caught() -> None:
    plain = {"d_model": 4, "d_vocab": 6, "device": torch.device("cpu"), "dtype": torch.float32}
    readout = Readout(
        norm=lambda rows: rows, unembed=lambda rows, out: rows[0] @ torch.zeros(4, 6), transform=None, **plain
    )
    with pytest.raises((ShapeError, TypeError), match="return value"):
        readout.logits(torch.zeros(3, 4))
