"""Learned lenses through `lens=`: translators of the tuned lens's shape, and TransformerLens 4's Jacobian lens.

The recipes are those of docs/companions.md. Whatever a lens does to earlier states, it leaves the last one alone, and the
credits still sum to the model's own probability less that of the first (translated) state.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from iglens_tl import ReadoutMismatchError, compare, ig_lens, logit_lens
from tests.models import BATCH, same_randomness
from tests.subjects import D_MODEL, N_LAYERS, cached, each_kind, residual_names, states_of, subject
from tests.versions import TL_MAJOR


class TunedLens(torch.nn.Module):
    """The shape of `tuned_lens.nn.TunedLens`: a residual affine translator for the state that enters each block."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        with same_randomness():
            self.layer_translators = torch.nn.ModuleList(torch.nn.Linear(D_MODEL, D_MODEL) for _ in range(N_LAYERS))
        for parameter in self.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)

    def transform_hidden(self, h, idx):
        return h + self.layer_translators[idx](h)


class _JacobianShaped:
    """What TransformerLens before 4 lacks: a matrix for the output of every block but the last."""

    def __init__(self, jacobians, *, n_prompts, d_model):
        self.jacobians = jacobians

    def transport(self, residual, layer):
        return residual @ self.jacobians[layer].T


def _jacobian_class():
    return importlib.import_module("transformer_lens.tools.analysis.jacobian_lens").JacobianLens


def jacobian_lens():
    generator = torch.Generator().manual_seed(1)
    matrices = {
        layer: torch.eye(D_MODEL) + 0.1 * torch.randn(D_MODEL, D_MODEL, generator=generator)
        for layer in range(N_LAYERS - 1)
    }
    kind = {2: lambda: _JacobianShaped, 3: lambda: _JacobianShaped, 4: _jacobian_class}[TL_MAJOR]()
    return kind(matrices, n_prompts=1, d_model=D_MODEL)


def through_tuned(tuned):
    """Translator `i` reads the state that enters block `i`; the last state is the model's own."""
    return lambda state, index: state if index == N_LAYERS else tuned.transform_hidden(state, index)


def through_jacobian(jacobian):
    """Matrix `l` transports the output of block `l`, which is state `l + 1`; the embedding has none."""
    return lambda state, index: state if index in (0, N_LAYERS) else jacobian.transport(state, index - 1)


LENSES = {"tuned": lambda: through_tuned(TunedLens()), "jacobian": lambda: through_jacobian(jacobian_lens())}


@each_kind
@pytest.mark.parametrize("name", LENSES)
def test_credits_through_a_learned_lens_sum_to_the_models_own_probability(kind, name):
    model, head, lens = subject(kind).model, subject(kind).head, LENSES[name]()
    result = ig_lens(model, BATCH, targets=7, lens=lens)
    with torch.no_grad():
        own = model(BATCH)[:, -1:].double().softmax(-1)[..., 7]
        states = states_of(cached(model, BATCH, names_filter=residual_names()))[:, :, -1:]
        seen = torch.stack([lens(state, i) for i, state in enumerate(states)])
    read = head.prob(seen, torch.tensor(7).expand(seen.shape[:-1]))
    assert (result.values - read).abs().max() <= 1e-6
    assert (result.values[-1] - own).abs().max() <= 1e-6
    assert (result.attribution.sum(0) - (own - result.values[0])).abs().max() <= 1e-6
    plain = ig_lens(model, BATCH, targets=7)
    assert (result.attribution - plain.attribution).abs().max() > 1e-3, "the lens is seen"


@each_kind
@pytest.mark.parametrize("name", LENSES)
def test_every_function_takes_it(kind, name):
    model, lens = subject(kind).model, LENSES[name]()
    result = ig_lens(model, BATCH, targets=7, lens=lens)
    # ig_lens reads in tiles of the vocabulary, logit_lens whole rows: float32 products of other shapes
    assert (logit_lens(model, BATCH, targets=7, lens=lens).prob - result.values).abs().max() <= 1e-6
    table = compare(model, BATCH, targets=7, lens=lens)
    assert torch.equal(table.amounts[0], result.attribution)
    plain = compare(model, BATCH, targets=7)
    assert torch.equal(table.amounts[2], plain.amounts[2]), "DLA is of the model's own states"
    assert table.gap[2].abs().max() <= 1e-4


@each_kind
def test_a_lens_that_changes_the_last_state_is_refused(kind):
    tuned = TunedLens()
    with pytest.raises(ReadoutMismatchError, match="at the last state it must be the identity"):
        logit_lens(
            subject(kind).model, BATCH, targets=7, lens=lambda state, i: tuned.transform_hidden(state, min(i, 2))
        )
