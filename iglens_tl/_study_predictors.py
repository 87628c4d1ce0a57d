"""What is known of a token without ablating anything: scores of its blocks, and depths at which it is decided.

Everything is read off one forward pass of the prompt (and one backward pass, and the gradients of a straight-path split).
Scores have one number a block; depths count hidden states, 1..n (block `l` is depth `l + 1`), NaN where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iglens_tl._model.direction import direction_of, mean_direction_of
from iglens_tl._model.host import Host
from iglens_tl._model.states import Wanted, hook_name, run_and_collect, state_exists
from iglens_tl._slopes import slopes_of_states
from iglens_tl._trajectory import ordinary_tensors
from iglens_tl.attribution import ig_lens
from iglens_tl.components import split
from iglens_tl.results import IGLensResult

Scores = NDArray[np.float64]
RULES = ("mass", "crossing", "peak", "rank")


@dataclass(frozen=True)
class Reading:
    """A prompt that has been run once: what every predictor is computed from.

    Args:
        tokens: `[1, seq]`, read at the last position.
        target: the id whose probability is followed.
        cache: the states of the stream, by TransformerLens's names.
        logits: the model's own, `[1, seq, d_vocab_out]`.
    """

    host: Host
    tokens: Tensor
    target: int
    cache: Mapping[str, Tensor]
    logits: Tensor

    @property
    def states(self) -> Tensor:
        """`[state, seq, d_model]`, those that enter the blocks and the last."""
        n = self.host.n_layers
        return torch.stack([self.cache[hook_name(2 * i, n)][0] for i in range(n + 1)])

    @property
    def updates(self) -> Tensor:
        """What each block adds, `[block, seq, d_model]`."""
        return self.states.diff(dim=0)

    def result(self, **settings: Any) -> IGLensResult:
        return ig_lens(
            self.host.model,
            self.tokens,
            cache=self.cache,
            logits=self.logits,
            targets=self.target,
            **self.mask,
            **settings,
        )

    @property
    def mask(self) -> dict[str, Any]:
        """All tokens are real, whatever they are: a prompt that was cut may end in the tokenizer's pad token."""
        return {"attention_mask": torch.ones_like(self.tokens)}


def read(host: Host, tokens: Tensor, target: int) -> Reading:
    """Run a prompt, keeping every state of the stream that the model has."""
    halves = [half for half in range(2 * host.n_layers + 1) if state_exists(host, half)]
    names = [hook_name(half, host.n_layers) for half in halves]
    kept, logits = run_and_collect(
        host, tokens.to(host.device), None, [Wanted(name, lambda full: full) for name in names]
    )
    return Reading(host, tokens, target, dict(zip(names, kept, strict=True)), logits)


@ordinary_tensors()
def predictors(reading: Reading, straight: bool = True) -> tuple[dict[str, Scores], dict[str, float]]:
    """Scores of the blocks and depths of the token, by name.

    Args:
        reading: the prompt.
        straight: also the straight-path credits and gradient times update: seconds for a large vocabulary.
    """
    by_metric = {name: reading.result(metric=name) for name in ("prob", "log_prob", "log_odds")}
    prob = by_metric["prob"]
    scores = {
        "credit": _column(prob.attribution),
        "credit_log_prob": _column(by_metric["log_prob"].attribution),
        "credit_log_odds": _column(by_metric["log_odds"].attribution),
        "credit_zero": _column(reading.result(baseline="zero").attribution)[-reading.host.n_layers :],
        "credit_mean": _column(reading.result(baseline="mean").attribution),
        **_sublayers(reading),
        **_directions(reading),
        **_patching(reading),
    }
    if straight:
        scores |= _straight(reading)
    return scores, _depths(by_metric, scores)


def _column(credits: Tensor) -> Scores:
    return credits[:, 0, 0].numpy().astype(np.float64)


def _sublayers(reading: Reading) -> dict[str, Scores]:
    """Attention's and MLP's own credits; NaN where blocks have no state between the two."""
    n = reading.host.n_layers
    if not all(state_exists(reading.host, 2 * layer + 1) for layer in range(n)):
        return dict.fromkeys(("credit_attn", "credit_mlp"), np.full(n, np.nan))
    both = _column(reading.result(incl_mid=True).attribution)
    return {"credit_attn": both[0::2], "credit_mlp": both[1::2]}


def _directions(reading: Reading) -> dict[str, Scores]:
    """DLA by block, raw and with the mean logit taken off, and the norm of what the block adds."""
    last, updates = reading.states[-1, -1:], reading.updates[:, -1:]
    target = torch.tensor([[reading.target]])
    raw = direction_of(reading.host, last, [target]).share(updates)[:, 0].numpy()
    mean = mean_direction_of(reading.host, last).share(updates)[:, 0].numpy()
    norm = updates[:, 0].double().norm(dim=-1).cpu().numpy()
    return {"dla": raw, "dla_centred": raw - mean, "update_norm": norm}


def _patching(reading: Reading) -> dict[str, Scores]:
    """Attribution patching: to first order, what taking each update out costs the probability.

    At the read position alone, and at every position but the first.
    """
    place = reading.tokens.shape[1] - 1
    target = torch.tensor([[reading.target]], device=reading.host.device)
    tokens = reading.tokens.to(reading.host.device)
    slopes = slopes_of_states(reading.host, tokens, reading.states[0][None], place, [target], "prob")
    products = (slopes.double() * reading.updates.double().cpu()).sum(-1)
    return {"patching": products[:, -1].numpy(), "patching_all": products[:, 1:].sum(1).numpy()}


def _straight(reading: Reading) -> dict[str, Scores]:
    found = split(
        reading.host.model, reading.tokens, cache=reading.cache, logits=reading.logits, targets=reading.target,
        unit="block", path="straight", dtype=torch.float32, tolerance=1e-3, **reading.mask,
    )  # fmt: skip
    of_blocks = [i for i, part in enumerate(found.parts) if part.kind == "block"]
    linear = found.linear
    return {
        "straight": _column(found.attribution)[of_blocks],
        "gradient_update": _column(linear)[of_blocks],
    }


def _depths(by_metric: Mapping[str, IGLensResult], scores: Mapping[str, Scores]) -> dict[str, float]:
    prob = by_metric["prob"]
    depths = {f"onset_{rule}": _hidden(prob, rule) for rule in RULES}
    depths |= {f"onset_mass_{name}": _hidden(by_metric[name], "mass") for name in ("log_prob", "log_odds")}
    top = prob.is_top[:, 0, 0].numpy()
    depths["lens_first_top"] = float(top.argmax()) if top.any() else float("nan")
    depths["half_dla"] = half_depth(np.abs(scores["dla"]))
    depths["half_update_norm"] = half_depth(scores["update_norm"])
    return depths


def _hidden(result: IGLensResult, rule: str) -> float:
    state = result.onset(rule).hidden_states[0][0]
    return float("nan") if state is None else float(state)


def half_depth(amounts: Scores) -> float:
    """The hidden state at which half of all amounts (one a block, none negative) have come together."""
    sums = amounts.cumsum()
    return float(np.argmax(sums >= sums[-1] / 2)) + 1
