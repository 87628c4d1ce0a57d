"""No family is silently wrong: `ig_lens` gives the probability of the model it was given, or refuses.

For every family and way in (see `tests.support`), at every position, for the model's own top token and for the next
token of the input: the last state has the untouched model's probability, each state that of a float64 readout written
out by hand, and the credits add up.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from iglens_tl import NEXT, TOP, UnsupportedModelError, ig_lens
from tests import oracles, support
from tests.families import FAMILIES
from tests.models import BATCH, HOOKED, NATIVE, TOKENS, bridge, compatible, converted, folded, hooked, native
from tests.strangers import STRANGERS
from tests.versions import APIS, TL_MAJOR

# Float32 forward passes of one model that add in another order (bridge, folded weights) differ by up to 1e-6 in p here.
SAME_PROBABILITY = 2e-6
# Float32 readout against float64 readout of the same float32 states: up to 4e-7 here.
SAME_READOUT = 1e-6
# Sums of up to four float64 numbers below 1.
ADDS_UP = 1e-12
# A model is called another one from here on; those that are called the same differ by SAME_PROBABILITY at most.
ANOTHER_MODEL = 1e-4

BY_WAY = {
    "hooked": lambda family, hf_model: converted(hf_model, family.hooked),
    "folded": lambda family, hf_model: folded(converted(hf_model, family.hooked)),
    "bridge": lambda family, hf_model: bridge(hf_model, family.architecture),
    "compatible": lambda family, hf_model: compatible(bridge(hf_model, family.architecture)),
}


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return (out if isinstance(out, torch.Tensor) else out.logits).clone()


def states_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The residual stack `[layers + 1, batch, pos, d_model]` from TransformerLens's own cache."""
    n = model.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)] + [f"blocks.{n - 1}.hook_resid_post"]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names)
    return torch.stack([cache[name] for name in names])


def assert_reads(model: Any, head: oracles.Head, logits: torch.Tensor, tokens: torch.Tensor = BATCH) -> None:
    """The whole contract of one model: targets, last state, every state, credits, sum."""
    states = states_of(model, tokens)
    n = len(states) - 1
    assert_result(ig_lens(model, tokens, targets=TOP, positions=None), states, head, logits, logits.argmax(-1), n)
    shorter = slice(None, -1)
    following = ig_lens(model, tokens, targets=NEXT, positions=None)
    assert following.mask.tolist() == [[True] * (tokens.shape[1] - 1) + [False]] * len(tokens)
    assert following.values[..., -1].isnan().all(), "the last token is followed by nothing"
    assert_result(following, states[:, :, shorter], head, logits[:, shorter], tokens[:, 1:], n, shorter)


def assert_result(result, states, head, logits, targets, n_layers, columns=slice(None)) -> None:
    values = result.values[..., columns]
    credits = result.attribution[..., columns]
    total = result.total[..., columns]
    own = oracles.model_prob(logits, targets)
    read = head.prob(states, targets.expand(len(states), *targets.shape))
    assert result.segment_labels == tuple(str(layer) for layer in range(n_layers))
    assert values.shape == read.shape
    assert credits.shape == read[1:].shape
    assert torch.equal(result.target_ids[:, columns, 0], targets)
    assert (values[-1] - own).abs().max() <= SAME_PROBABILITY
    assert (result.model_value[..., columns] - own).abs().max() <= SAME_PROBABILITY
    assert (values - read).abs().max() <= SAME_READOUT
    assert (credits - oracles.credits(read)).abs().max() <= SAME_READOUT
    assert (credits.sum(0) - total).abs().max() <= ADDS_UP
    assert (values[-1] - values[0] - total).abs().max() <= ADDS_UP
    assert result.gap[..., columns].abs().max() <= ADDS_UP


# --- The zoo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "way"), support.cells("exact"))
def test_exact(name, way):
    family = FAMILIES[name]
    hf_model = family.build()
    logits, head = logits_of(hf_model, BATCH), family.read_head(hf_model)
    assert_reads(BY_WAY[way](family, hf_model), head, logits)


@pytest.mark.parametrize(("name", "way"), support.cells("as wrapped"))
def test_as_wrapped(name, way):
    family = FAMILIES[name]
    hf_model = family.build()
    logits = logits_of(hf_model, BATCH)
    # A converter may drop part of the head; the bridge's head is the Hugging Face module.
    head = oracles.lens_head(converted(hf_model, family.hooked)) if way in {"hooked", "folded"} else None
    head = head or family.read_head(hf_model)
    model = BY_WAY[way](family, hf_model)
    own = logits_of(model, BATCH)
    assert (own.softmax(-1) - logits.softmax(-1)).abs().max() > ANOTHER_MODEL, "TransformerLens is right by now"
    assert_reads(model, head, own)


def _refused_model(name: str, way: str) -> Any:
    return STRANGERS[name].build() if way == "stranger" else BY_WAY[way](FAMILIES[name], FAMILIES[name].build())


def _refusals() -> list[tuple[str, str, str]]:
    listed = [(name, way, support.status(name, way).pattern) for name, way in support.cells("refused")]
    return listed + [(name, "stranger", stranger.pattern) for name, stranger in STRANGERS.items()]


@pytest.mark.parametrize(("name", "way", "pattern"), _refusals())
def test_refused(name, way, pattern):
    model = _refused_model(name, way)
    with pytest.raises(UnsupportedModelError, match=pattern):
        ig_lens(model, TOKENS)


@pytest.mark.parametrize(("name", "way"), support.cells("absent"))
def test_absent(name, way):
    """TransformerLens itself cannot load or run the model: should that change, the family must be swept."""
    family = FAMILIES[name]
    with pytest.raises(Exception, match=support.status(name, way).pattern):
        logits_of(BY_WAY[way](family, family.build()), BATCH)


def test_every_family_has_its_place_and_enough_are_exact():
    kinds = ("exact", "as wrapped", "refused", "absent")
    placed = [cell for kind in kinds for cell in support.cells(kind)]
    assert sorted(placed) == sorted((name, way) for name in FAMILIES for way in support.WAYS[TL_MAJOR])
    through_bridge = {name for name, way in support.cells("exact") if way == "bridge"}
    through_hooked = {name for name, way in support.cells("exact") if way == "hooked"}
    assert len(through_bridge) >= 50 * ("bridge" in APIS)
    assert len(through_hooked) >= 17 * ("hooked" in APIS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_reads_the_untouched_model(name):
    """The float64 head on what enters the model's own final norm gives the model's own logits: no package involved."""
    family = FAMILIES[name]
    hf_model = family.build()
    seen: list[torch.Tensor] = []
    point = hf_model.get_output_embeddings()
    norm = hf_model.get_submodule(family.head.at) if family.head.at else None
    head = family.read_head(hf_model)

    def keep(module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

    handle = (norm or point).register_forward_pre_hook(keep, with_kwargs=True)
    logits = logits_of(hf_model, BATCH)
    handle.remove()
    read = head if norm is not None else oracles.Head("none", head.unembed, unembed_bias=head.unembed_bias)
    # Logits of size up to 10 in float32: 2e-6 each.
    assert (read.logits(seen[-1]) - logits).abs().max() <= 1e-5


# --- TransformerLens's own models --------------------------------------------------------------------------------

_CHANGED_BY_FOLDING = {"LN, final RMS"}  # its final norm becomes a LayerNorm: tests/test_traps_readout.py has it
_OWN = [
    (name, way)
    for way in support.WAYS[TL_MAJOR]
    for name in (HOOKED if way in {"hooked", "folded"} else NATIVE)
    if not (way == "folded" and name in _CHANGED_BY_FOLDING)
]


@pytest.mark.parametrize(("name", "way"), _OWN)
def test_transformer_lens_models(name, way):
    build, process = {
        "hooked": (lambda: hooked(**HOOKED[name]), lambda model: model),
        "folded": (lambda: hooked(**HOOKED[name]), folded),
        "bridge": (lambda: native(**NATIVE[name]), lambda model: model),
        "compatible": (lambda: native(**NATIVE[name]), compatible),
    }[way]
    model = build()
    tokens = BATCH % model.cfg.d_vocab_out
    logits, head = logits_of(model, tokens), oracles.lens_head(model)
    assert_reads(process(model), head, logits, tokens)


# --- The test can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda head: {"weight": head.weight * 1.001},
        lambda head: {"bias": None},
        lambda head: {"eps": head.eps + 1e-3},
        lambda head: {"norm": "rms"},
        lambda head: {"unembed": head.unembed.roll(1, 0)},
        lambda head: {"scale": 1.001},
        lambda head: {"cap": 30.0},
        lambda head: {"unembed_bias": torch.linspace(0, 0.01, len(head.unembed), dtype=torch.float64)},
    ],
    ids=["weight", "no bias", "eps", "kind of norm", "words shifted", "scale", "cap", "unembedding bias"],
)
def test_a_slightly_wrong_head_is_noticed(spoil):
    family = FAMILIES["GPT-2"]
    hf_model = family.build()
    logits, head = logits_of(hf_model, BATCH), family.read_head(hf_model)
    way = support.WAYS[TL_MAJOR][0]
    model = BY_WAY[way](family, hf_model)
    assert_reads(model, head, logits)
    with pytest.raises(AssertionError):
        assert_reads(model, replace(head, **spoil(head)), logits)


def test_a_dropped_layer_is_noticed():
    family = FAMILIES["GPT-2"]
    hf_model = family.build()
    logits, head = logits_of(hf_model, BATCH), family.read_head(hf_model)
    model = BY_WAY[support.WAYS[TL_MAJOR][0]](family, hf_model)
    result = ig_lens(model, BATCH, positions=None, layers=[1, 3])
    with pytest.raises(AssertionError):
        assert_result(result, states_of(model, BATCH), head, logits, logits.argmax(-1), 3)


# --- What the installed version must have ------------------------------------------------------------------------


def test_the_installed_version_has_the_apis_that_it_must_have():
    import transformer_lens

    found = set()
    with contextlib.suppress(ImportError):  # 4.x raises it for the name that it has dropped
        found |= {"hooked"} if transformer_lens.HookedTransformer else set()
    with contextlib.suppress(ImportError):
        found |= {"bridge"} if importlib.import_module("transformer_lens.model_bridge").TransformerBridge else set()
    assert found == APIS
