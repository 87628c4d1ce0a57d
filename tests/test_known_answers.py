"""Numbers computed without this package: Hugging Face forward passes, readouts written out by hand in float64.

`tests/data/tiny`: four tiny models with their weights, every position, next token and top token.
`tests/data/smollm2_known_answers.json`: SmolLM2-135M on eight prompts, in every way in, with baselines, subsets of
layers, states inside blocks, and two integrating estimators.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from iglens_tl import NEXT, TOP, ig_lens
from tests.models import bridge, compatible, converted, folded
from tests.support import WAYS
from tests.versions import TL_MAJOR

DATA = Path(__file__).parent / "data"

# Two float32 forward passes of the tiny models differ by 3e-7 in p from the float64 one that the answers come from;
# TransformerLens adds in another order again, and folding once more: 6e-7 at most.
TINY = 2e-6
TINY_NATS = 2e-5  # the least probable of these tokens has logits of size 10: a relative 1e-6 of them
# SmolLM2 in float32 against float64: 7.5e-6 in p. TransformerLens's own forward pass adds a few 1e-6.
SMOLLM2 = 2e-5
SMOLLM2_NATS = 1e-4  # log-probabilities down to -200 nats, of logits that carry a relative error of 1e-6
# At position 0 a stream of norm 100 jumps to 22,712: the states before the jump differ between float32 forward passes by
# up to 3e-4 nats (HookedTransformer 2.18), whatever precision they are read in.
SMOLLM2_NATS_AT_0 = 5e-4
# Onsets whose running mass passes the half closer than this may fall on either side of it.
CLEAR = 1e-3


def column(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def far(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, of tensors that must have one shape."""
    assert left.shape == right.shape
    return float((left - right).abs().max())


def margin(credits: torch.Tensor) -> torch.Tensor:
    """How clear of one half the running share of |credit| stays, for each column."""
    share = credits.abs().cumsum(0) / credits.abs().sum(0)
    return (share - 0.5).abs().amin(0)


# --- Four tiny models --------------------------------------------------------------------------------------------

TINY_ANSWERS = json.loads((DATA / "tiny_known_answers.json").read_text())
_GEMMA_2 = {
    "n_layers": 4,
    "d_model": 48,
    "d_head": 12,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_mlp": 96,
    "d_vocab": 200,
    "gated_mlp": True,
    "act_fn": "gelu_pytorch_tanh",
    "eps": 1e-6,
    "normalization_type": "RMS",
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 12,
    "rotary_base": 10000,
    "use_normalization_before_and_after": True,
    "attn_scores_soft_cap": 50.0,
    "output_logits_soft_cap": 3.0,
    "use_local_attn": True,
    "window_size": 64,
    "attn_types": ["local", "global", "local", "global"],
}
HOOKED_SETTINGS = {"gemma2": _GEMMA_2}  # TransformerLens's converter knows Gemma by the names of published models only


def tiny_model(name: str, way: str) -> Any:
    """The stored model, wrapped; eager attention, since the others leave out Gemma-2's soft-cap of the scores."""
    import transformers

    entry = TINY_ANSWERS[name]
    config = transformers.AutoConfig.from_pretrained(DATA / entry["path"], attn_implementation="eager")
    config.n_ctx = 64  # the converter of GPT-2 asks for it
    config.rotary_pct = 0.5  # transformers 4 does not find GPT-NeoX's where transformers 5 has put it
    hf_model = getattr(transformers, entry["class_name"]).from_pretrained(DATA / entry["path"], config=config).eval()
    return {
        "hooked": lambda: converted(hf_model, HOOKED_SETTINGS.get(name)),
        "folded": lambda: folded(converted(hf_model, HOOKED_SETTINGS.get(name))),
        "bridge": lambda: bridge(hf_model),
        "compatible": lambda: compatible(bridge(hf_model)),
    }[way]()


@pytest.mark.parametrize("way", WAYS[TL_MAJOR])
@pytest.mark.parametrize("name", [name for name in TINY_ANSWERS if name != "_meta"])
def test_tiny_models(name, way):
    model = tiny_model(name, way)
    (sequence,) = TINY_ANSWERS[name]["sequences"]
    tokens = torch.tensor([sequence["token_ids"]])
    for kind, targets in (("next_token", NEXT), ("argmax", TOP)):
        known = sequence[kind]
        n = len(known["positions"])
        result = ig_lens(model, tokens, targets=targets, positions=None)
        nats = ig_lens(model, tokens, targets=targets, positions=None, metric="log_prob")
        credits = result.attribution[:, 0, :n]
        assert result.mask[0].tolist() == [True] * n + [False] * (tokens.shape[1] - n)
        assert result.target_ids[0, :n, 0].tolist() == known["targets"]
        assert far(result.values[:, 0, :n], column(known["f"])) <= TINY
        assert far(credits, column(known["credits"])) <= TINY
        assert far(nats.values[:, 0, :n], column(known["logprob"])) <= TINY_NATS
        assert far(result.model_value[0, :n], column(known["model_prob"])) <= TINY
        clear = margin(column(known["credits"])) >= CLEAR
        assert int(clear.sum()) >= n - 1  # one onset of all is too close to call
        onset = result.onset().index[0, :n] + 1  # the answers count hidden states
        assert torch.equal(onset[clear], torch.tensor(known["onset"])[clear])


@pytest.mark.parametrize(("wrong", "least"), [("f_WITHOUT_softcap_wrong", 0.9), ("f_final_double_norm_wrong", 1e-3)])
def test_tiny_answers_would_catch_a_wrong_readout(wrong, least):
    """What the readouts without soft-cap, or with the final norm applied twice, would give is far from the answers."""
    known = TINY_ANSWERS["gemma2"]["sequences"][0]["argmax"]
    right = column(known["f"])
    mistaken = column(known[wrong])
    assert (mistaken - (right if mistaken.ndim == right.ndim else right[-1])).abs().max() > least


# --- SmolLM2 -----------------------------------------------------------------------------------------------------

PROMPTS = json.loads((DATA / "smollm2_known_answers.json").read_text())["prompts"]
LAYERS = 30
SUBSET = [6, 12, 18, 24, 30]
_names = [f"blocks.{layer}.hook_resid_{part}" for layer in range(LAYERS) for part in ("pre", "mid")]
NAMES = [*_names, f"blocks.{LAYERS - 1}.hook_resid_post"]


def _kind(prompt: dict[str, Any]) -> str:
    return str(prompt["kind"])


by_prompt = pytest.mark.parametrize("known", PROMPTS, ids=_kind)


class Run:
    """One prompt through one model, its states kept, so that every question about it costs a readout only."""

    def __init__(self, model: Any, known: dict[str, Any]) -> None:
        self.model, self.known = model, known
        self.tokens = torch.tensor([known["token_ids"]])
        with torch.no_grad():
            self.logits, self.cache = model.run_with_cache(self.tokens, names_filter=NAMES)

    def ask(self, **settings: Any) -> Any:
        settings = {"targets": self.known["target_id"], **settings}
        return ig_lens(self.model, self.tokens, cache=self.cache, logits=self.logits, **settings)

    def mean_of(self, state: int) -> torch.Tensor:
        return self.cache[f"blocks.{state}.hook_resid_pre"][0].double().mean(0).float()


@pytest.mark.smollm2
@by_prompt
def test_smollm2_credits(smollm2, known):
    result = ig_lens(smollm2, torch.tensor([known["token_ids"]]), targets=known["target_id"])
    credits = result.attribution[:, 0, 0]
    assert result.positions.tolist() == [[known["pos"]]]
    assert far(result.values[:, 0, 0], column(known["f"])) <= SMOLLM2
    assert far(credits, column(known["credits"])) <= SMOLLM2
    assert abs(float(credits.sum() - result.total)) <= 1e-12
    assert abs(float(result.model_value) - known["prob"]) <= SMOLLM2
    assert known["onset_margin"] >= CLEAR
    assert result.onset().index.tolist() == [[known["onset"] - 1]]


@pytest.mark.smollm2
@by_prompt
def test_smollm2_other_paths(smollm2, known):
    """Log-probability, states inside blocks, baselines and subsets, all on the states of one forward pass."""
    run, baselines = Run(smollm2, known), known["baselines"]
    nats = run.ask(metric="log_prob")
    assert far(nats.values[:, 0, 0], column(known["logprob"])) <= (SMOLLM2_NATS if known["pos"] else SMOLLM2_NATS_AT_0)

    halves = run.ask(incl_mid=True)
    assert far(halves.values[1::2, 0, 0], column(known["f_resid_mid"])) <= SMOLLM2
    assert far(halves.attribution[:, 0, 0], column(known["credits_attn_then_mlp"]).reshape(-1)) <= SMOLLM2

    subset = run.ask(layers=SUBSET)
    assert far(subset.attribution[:, 0, 0], column(baselines["h0_subset"]["subset"]["credits"])) <= SMOLLM2

    for name, path, settings in (
        ("zero", "all", {"baseline": "zero"}),
        ("zero", "subset", {"baseline": "zero", "layers": SUBSET}),
        ("mean_h1", "all", {"baseline": "mean"}),
        ("mean_h6", "subset", {"baseline": "mean", "layers": SUBSET}),
        ("mean_h6", "all", {"baseline": run.mean_of(6)}),
        ("mean_h1", "subset", {"baseline": run.mean_of(1), "layers": SUBSET}),
        ("mean_h0", "all", {"baseline": run.mean_of(0)}),
        ("mean_h0", "subset", {"baseline": run.mean_of(0), "layers": SUBSET}),
    ):
        result, answer = run.ask(**settings), baselines[name][path]
        assert abs(float(result.values[0]) - baselines[name]["f_baseline"]) <= SMOLLM2, (name, path)
        assert far(result.attribution[:, 0, 0], column(answer["credits"])) <= SMOLLM2, (name, path)
        assert abs(float(result.total) - answer["sum"]) <= SMOLLM2, (name, path)
        assert [*result.hidden_states] == answer["layers"], (name, path)
        assert margin(column(answer["credits"])) >= CLEAR, (name, path)
        assert result.hidden_states[int(result.onset().index)] == answer["onset"], (name, path)


@pytest.mark.smollm2
@pytest.mark.parametrize("known", [p for p in PROMPTS if p.get("all_positions")], ids=_kind)
def test_smollm2_at_all_positions(smollm2, known):
    answer = known["all_positions"]
    n = len(answer["positions"])
    result = ig_lens(smollm2, torch.tensor([known["token_ids"]]), targets=NEXT, positions=None)
    credits = result.attribution[:, 0, :n]
    assert result.mask[0].tolist() == [True] * n + [False]
    assert result.target_ids[0, :n, 0].tolist() == answer["targets"]
    assert far(result.values[:, 0, :n], column(answer["f"])) <= SMOLLM2
    assert far(credits, column(answer["credits"])) <= SMOLLM2
    assert far(result.model_value[0, :n], column(answer["model_prob"])) <= SMOLLM2
    clear = margin(column(answer["credits"])) >= CLEAR
    assert int(clear.sum()) >= n - 1
    assert torch.equal(result.onset().index[0, :n][clear] + 1, torch.tensor(answer["onset"])[clear])


@pytest.mark.smollm2
@pytest.mark.parametrize("known", [p for p in PROMPTS if p.get("ig_riemann")], ids=_kind)
def test_smollm2_midpoint_rule(smollm2_default, known):
    """The same rule at the same number of steps has the same discretisation error: it is compared, not bounded."""
    run = Run(smollm2_default, known)
    for steps in (4, 16):
        result = run.ask(estimator="midpoint", n_steps=steps)
        assert far(result.attribution[:, 0, 0], column(known["ig_riemann"][str(steps)])) <= SMOLLM2, steps
    coarse = column(known["ig_riemann"]["4"]) - column(known["credits"])
    assert coarse.abs().max() > 10 * SMOLLM2, "four steps must be told from the exact credit"


@pytest.mark.smollm2
def test_smollm2_gauss_legendre(smollm2_default):
    known = PROMPTS[0]
    result = Run(smollm2_default, known).ask(estimator="gauss_legendre", n_steps=32)
    assert far(result.attribution[:, 0, 0], column(known["ig_gauss_legendre_32"])) <= SMOLLM2
    assert far(result.attribution[:, 0, 0], column(known["credits"])) <= SMOLLM2
