"""Results made by hand, for the tests of everything that reads a result."""

import contextlib

import jaxtyping
import pytest
import torch

from iglens_tl.results import IGLensResult

NAN = float("nan")


@contextlib.contextmanager
def refused(message):
    """A ValueError that says `message`; where the tests run with a shape checker, its error, which then comes first."""
    with pytest.raises((ValueError, jaxtyping.TypeCheckError)) as caught:
        yield
    if isinstance(caught.value, ValueError):
        caught.match(message)


def make(values, *, is_top=None, mask=None, targets=None, **changes):
    """A result with the given values [segment+1][batch][pos]; all else follows from them or from `changes`."""
    values = torch.as_tensor(values, dtype=torch.float64)
    states, batch, pos = values.shape
    mask = torch.ones(batch, pos, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    values = torch.where(mask, values, NAN)
    k = states - 1
    targets = [[f" t{row}{column}" for column in range(pos)] for row in range(batch)] if targets is None else targets
    ids = 100 + torch.arange(batch * pos).reshape(batch, pos, 1)
    fields = {
        "attribution": values.diff(dim=0),
        "values": values,
        "total": values[-1] - values[0],
        "gap": values.diff(dim=0).sum(0) - (values[-1] - values[0]),
        "model_value": None,
        "is_top": torch.zeros(states, batch, pos, dtype=torch.bool) if is_top is None else torch.as_tensor(is_top),
        "mask": mask,
        "positions": torch.where(mask, torch.arange(pos).expand(batch, pos), -1),
        "target_ids": torch.where(mask[..., None], ids, -1),
        "incorrect_ids": None,
        "steps": None,
        "tokens": 10 * torch.arange(batch)[:, None] + torch.arange(pos),
        "token_mask": mask.clone(),
        "token_strings": tuple(tuple(f"w{row}{column}" for column in range(pos)) for row in range(batch)),
        "target_strings": tuple(
            tuple(text if keep else "" for text, keep in zip(row, keeps, strict=True))
            for row, keeps in zip(targets, mask.tolist(), strict=True)
        ),
        "incorrect_strings": None,
        "state_labels": (*(f"{i}_pre" for i in range(k)), "final_post"),
        "segment_labels": tuple(str(i) for i in range(k)),
        "hidden_states": tuple(range(1, k + 1)),
        "metric": "prob",
        "estimator": "prediction_aware",
        "settings": {"baseline": "embed"},
        "provenance": {"iglens_tl": "0.1.0"},
    }
    return IGLensResult(**{**fields, **changes})


def one(levels, **changes):
    """A result of a single token whose values are `levels`."""
    return make([[[level]] for level in levels], **changes)


def rich():
    """Two prompts of three positions, the first entry of the second prompt masked; every optional field present."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(5, 2, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [False, True, True]])
    ids = torch.tensor([[[5, 7], [6, -1], [5, 7]], [[-1, -1], [8, -1], [5, 7]]])
    return make(
        values,
        mask=mask,
        is_top=values > 0.5,
        targets=[[" cat| dog", " a", " cat| dog"], ["", " b", " cat| dog"]],
        target_ids=ids,
        incorrect_ids=torch.where(mask, 3, -1)[..., None],
        incorrect_strings=((" x", " x", " x"), ("", " x", " x")),
        model_value=torch.where(mask, values[-1], NAN),
        steps=torch.where(mask, torch.rand(4, 2, 2, 3, generator=generator, dtype=torch.float64), NAN),
        token_strings=(("<s>", "the", "the"), ("<pad>", "\ud800", "a\nb")),
        hidden_states=(1, None, 3, 4),
        answer="the",
    )
