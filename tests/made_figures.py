"""Results of every kind made by hand, and each figure of them: what `test_plots` reads and `test_plots_browser` renders."""

from __future__ import annotations

from types import SimpleNamespace

import pandas
import torch

from iglens_tl import DatasetSummary, LensComparison, LogitLensResult, SplitResult, plots
from iglens_tl._shares import Part
from tests.made_results import NAN, make, one

HOSTILE = (
    *("<s>", "</s>", "<b>bold</b>", "a<b", "&amp;", "<script>alert(1)</script>", "<br>", "$$", "$x$", "${x}"),
    *(" 2024", "1e5", "2024-01-01", "nan", "", " ", "\n", "\t", "\r\n", "<0xE6>", "\ufffd", "\ud800", "\u202e"),
    *(" the", " the", " naïve", " 東京", " мир", " ไทย", " العربية", " 👩‍🔬", "x" * 60, "'", '"', "%{y}", "=1+1"),
)

LABELS = {
    "x" * 60: "'" + "x" * 16 + "…",
    "<script>alert(1)</script>": "'<script>alert(1)…",
    " العربية": "\u2066' العربية'\u2069",  # isolated, so that an arrow beside it points the right way
}
"""What is shown of those tokens that are not shown as Python writes them."""


def random_values(states, batch, pos, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(states, batch, pos, generator=generator, dtype=torch.float64)


def hostile(**changes):
    """A prompt whose tokens, and whose targets, are all that a label can get wrong."""
    n = len(HOSTILE)
    return make(random_values(4, 1, n), token_strings=(HOSTILE,), targets=[list(HOSTILE)], **changes)


def padded():
    """Two prompts of three positions, of which the first has no first and the second no last one."""
    return make(random_values(5, 2, 3), mask=[[False, True, True], [True, True, False]])


def flat_then_steep():
    """30 segments of which 26 hold next to nothing, a loss among the others: `h_0` is 0.01, the last state 0.75."""
    credits = [1e-5] * 26 + [0.05, 0.3, -0.11, 0.49974]
    return one(torch.tensor([0.01, *credits], dtype=torch.float64).cumsum(0).tolist())


def wordy(n):
    """Tokens, targets and what these are compared with, all longer than a label can be, in a long prompt."""
    texts = tuple(f" Donaudampfschifffahrtsgesellschaft{index}" for index in range(n))
    wrong = torch.full((1, n, 1), 3)
    values = random_values(5, 1, n)
    return make(
        values, token_strings=(texts,), targets=[list(texts)], incorrect_ids=wrong, incorrect_strings=(texts[::-1],)
    )


def nats():
    """Log-probabilities, which start far below zero."""
    return one([-115.86, -23.7, -27.5, -23.5, -31.9, -8.1, -0.2889], metric="log_prob")


def long(n=512, k=30):
    """As many tokens and segments as a map has to hold."""
    texts = tuple(f" word{index}" for index in range(n))
    return make(random_values(k + 1, 1, n), token_strings=(texts,), targets=[list(texts)])


def asked_of(result):
    """What a companion's result repeats of the tokens of `result`."""
    names = ("mask", "positions", "target_ids", "incorrect_ids", "tokens", "token_mask", "token_strings")
    more = ("target_strings", "incorrect_strings", "settings", "provenance")
    return {name: getattr(result, name) for name in (*names, *more)}


def comparison(result=None):
    """Four methods in two units on the segments of a result."""
    result = padded() if result is None else result
    credits, levels = result.attribution, result.values[1:]
    nothing = torch.full((4, *result.mask.shape), NAN, dtype=torch.float64)
    return LensComparison(
        **asked_of(result),
        amounts=torch.stack([credits, levels, 20 * credits - 1, 3 * levels]),
        sums=nothing,
        outside=nothing,
        expected=nothing,
        gap=nothing,
        method_labels=("ig_lens", "logit_lens", "dla", "layer_conductance"),
        segment_labels=result.segment_labels,
        hidden_states=result.hidden_states,
        units=("probability", "probability", "logits", "probability"),
        meanings=("",) * 4,
        expected_names=("",) * 4,
    )


def ablation(compared, labels=None):
    """Stands for an ablation of whole blocks: what the figure reads of one."""
    labels = compared.segment_labels if labels is None else labels
    drops = torch.linspace(-0.2, 0.6, len(labels), dtype=torch.float64)[:, None, None]
    drop = torch.where(compared.mask, drops, NAN)
    asked = {
        name: getattr(compared, name)
        for name in ("positions", "tokens", "target_ids", "incorrect_ids", "target_strings")
    }
    return SimpleNamespace(
        **asked,
        drop=drop,
        layer_labels=tuple(labels),
        unit="probability",
        mask=compared.mask,
        mode="mean",
        effect="total",
    )


def heads(layers=3, count=4):
    """A split of each block's credit among its heads and its MLP."""
    whole = one(random_values(layers + 1, 1, 1)[:, 0, 0].tolist())
    parts, shares = [], []
    generator = torch.Generator().manual_seed(1)
    for layer in range(layers):
        own = torch.randn(count, generator=generator, dtype=torch.float64) / 5
        parts += [Part(f"L{layer}H{head}", "head", layer, layer, head) for head in range(count)]
        parts.append(Part(f"{layer}_mlp", "mlp", layer, layer))
        shares += [own, (whole.attribution[layer, 0, 0] - own.sum())[None]]
    attribution = torch.cat(shares)[:, None, None]
    zero = torch.zeros(layers, 1, 1, dtype=torch.float64)
    return SplitResult(
        whole=whole,
        parts=tuple(parts),
        attribution=attribution,
        gap=zero,
        error=zero,
        nodes=zero.long(),
        linear=attribution,
        sequential=None,
        attn_first=None,
        mlp_first=None,
        unit="head",
        path="sequential",
        tolerance=1e-6,
    )


def lens_of(result, k=2):
    """The logit lens of the same states, whose top tokens are the hostile ones."""
    shape = (*result.values.shape, k)
    numbers = dict.fromkeys(("prob", "log_prob", "logit", "entropy", "kl"), result.values)
    strings = tuple(
        tuple(tuple(("<b>", "$$")[:k] if keep else () for keep in row) for row in result.mask.tolist())
        for _ in result.state_labels
    )
    probs = torch.where(result.mask[..., None], 0.25, NAN).double().expand(shape).contiguous()
    return LogitLensResult(
        **asked_of(result),
        **numbers,
        rank=torch.zeros_like(result.values, dtype=torch.int64),
        top_ids=torch.zeros(shape, dtype=torch.int64),
        top_probs=probs,
        top_strings=strings,
        state_labels=result.state_labels,
        hidden_states=(0, *result.hidden_states),
    )


FIGURES = {
    "waterfall": lambda: plots.waterfall(flat_then_steep()),
    "waterfall, nats": lambda: plots.waterfall(nats()),
    "waterfall, up and down": lambda: plots.waterfall(one(random_values(30, 1, 1)[:, 0, 0].tolist())),
    "waterfall, estimated": lambda: plots.waterfall(with_gap()),
    "waterfall, long words": lambda: plots.waterfall(wordy(1), pos=0),
    "heatmap, labels": lambda: plots.heatmap(hostile(answer="".join(HOSTILE[:2]))),
    "heatmap, both labels": lambda: plots.heatmap(hostile(), top=lens_of(hostile())),
    "heatmap, levels": lambda: plots.heatmap(padded(), value="level"),
    "heatmap, long": lambda: plots.heatmap(long()),
    "trajectories, named": lambda: plots.trajectories(padded()),
    "trajectories, long names": lambda: plots.trajectories(wordy(8)),
    "trajectories, thin": lambda: plots.trajectories(hostile()),
    "gain_loss": lambda: plots.gain_loss(long(60)),
    "comparison": lambda: plots.comparison(comparison(), ablation=ablation(comparison()), pos=1),
    "comparison, 30 blocks": lambda: plots.comparison(comparison(flat_then_steep())),
    "mean_credits": lambda: plots.mean_credits(summary()),
    "heads": lambda: plots.heads(heads(30, 9)),
    "top_parts": lambda: plots.top_parts(heads(30, 9)),
}
"""Every figure, on what strains it most."""


def with_gap():
    """A result of an estimator whose credits miss the total by 0.02."""
    exact = one([0.1, 0.3, 0.8])
    credits = exact.attribution - 0.01
    return one([0.1, 0.3, 0.8], attribution=credits, gap=credits.sum(0) - exact.total, estimator="midpoint")


def summary(k=30):
    """What a run of 40 prompts found, ten tokens each; some of them without an onset, some at the first state."""
    random = torch.Generator().manual_seed(3)
    segments = pandas.DataFrame({
        "segment": [str(index) for index in range(k)],
        "start": [f"{index}_pre" for index in range(k)],
        "end": [*(f"{index}_pre" for index in range(1, k)), "final_post"],
        "hidden_state": range(1, k + 1),
        "mean": torch.randn(k, generator=random, dtype=torch.float64).numpy() / 10,
    })  # fmt: skip
    half = torch.rand(k, generator=random, dtype=torch.float64).numpy() / 20
    segments = segments.assign(
        low=segments["mean"] - half, high=segments["mean"] + half, mean_abs=0.2, n_tokens=400, n_prompts=40
    )
    places = {"mass": "5", "crossing": "0_pre", "peak": "29", "rank": None}
    onsets = [(rule, label, 300, 0.75) for rule, label in places.items()]
    onsets += [(rule, "final_post" if rule in ("crossing", "rank") else "12", 100, 0.25) for rule in places]
    return DatasetSummary(
        n_prompts=50,
        n_done=41,
        n_tokens=400,
        segments=segments,
        onsets=pandas.DataFrame(onsets, columns=["rule", "label", "n_tokens", "share"], dtype=object),
        failures=pandas.DataFrame({"prompt_index": [7], "error": ["<b>"]}),
        confidence=0.95,
        onset_fraction=0.5,
        metric="prob",
        unit="probability",
        settings={},
    )
