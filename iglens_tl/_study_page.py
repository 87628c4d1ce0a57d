"""A study as a Markdown page: what was asked, the verdict by rule, every table with its controls, cost and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iglens_tl import _study_analysis as analysis
from iglens_tl._fragment import bars, line, table
from iglens_tl._layout import Column
from iglens_tl._study_analysis import Measurements
from iglens_tl._study_statistics import N_RESAMPLES, mean_interval

if TYPE_CHECKING:
    import pandas

_RULE = {
    "holds": "**The onset holds** as a predictor of the block whose removal hurts most: the credit's hit rate exceeds that of "
    "every control.",
    "does not hold": "**The onset does not hold** as a predictor of the block whose removal hurts most: a control that looks at "
    "nothing of the credit predicts it at least as well.",
    "mixed": "**Mixed**: the credit is not beaten outright by a control, nor does it beat all of them with and without block 0.",
}
_BY_RULE = (
    "By the rule that `PLAN.md` fixed before the numbers (point 6 of its analysis); the tables that it rests on follow."
)
_PRIMARY = """## Primary test: the credit less each rival

Outcome: total effect of removing a block's update at the read position (`{outcome}`). Positive: the credit predicts better.
p-values are Holm-corrected over all {n} rows.

"""
_OVERVIEW = """## Every outcome

Mean rank correlation over blocks of each predictor (rows) with each outcome (columns), then top-1 hit rates, with intervals. Not
tested. A placebo against itself is 1 by construction, and so is the last block's credit its direct effect.

"""
_DEPTHS = """## Across tokens: does the depth predict the causal depth?

Spearman's rho over pairs, and the mean absolute error in blocks; *worse than constant* is the error less that of the median
causal depth on the other half of the prompts (positive: a constant is nearer).

"""
_VARIANTS = """## Variants, {title}

The variant with the best mean rho on the prompts with an even index, on those with an odd one.

"""
_LIMITS = """## Limits

- One model of 135M parameters and short prompts of our own: nothing here is shown for larger models or long contexts.
- Ablated states are off the model's distribution. Without the first block the token itself is lost; that says little about
  where its successor is decided. The placebo (a random change as large as the removed update) shows how much of a drop is the
  size of the disturbance.
- A drop says that something is needed where it is, not that it is computed there; later blocks can make up for what is missing.
- The last block's credit *is* its direct effect, the same number by construction, so some agreement with direct effects is no
  finding.
- Pairs of a prompt are not independent; intervals resample prompts. Only the primary table is tested, with Holm's correction.
- A credit says where norm and unembedding can read the token, exactly, by its definition. None of this makes a credit wrong: it
  says what a credit does not mean."""
_BLOCKS = ((0, "all blocks"), (1, "without block 0"))


def page(
    m: Measurements, settings: Mapping[str, Any], made_by: Mapping[str, Any], departures: str = "", n: int = N_RESAMPLES
) -> str:
    """See `OnsetStudy.to_markdown`; `n` resamples for an interval, five times as many for the primary test."""
    primary = analysis.primary(m, 5 * n + 4)
    sections = [
        "# Does the onset hold? Results",
        _data(m, settings, made_by),
        f"## Verdict\n\n{_RULE[analysis.verdict(primary)]}\n\n{_BY_RULE}",
        "## Where removal hurts most\n\n" + _markdown(_percent(analysis.where_it_hurts(m, list(analysis.OUTCOMES)))),
        _PRIMARY.format(outcome=analysis.PRIMARY, n=len(primary)) + _markdown(_differences(primary)),
        *(
            f"## Every predictor on the primary outcome, {title}\n\n" + _agreement(m, first, n)
            for first, title in _BLOCKS
        ),
        _OVERVIEW + _overview(m, n),
        "## Strata, primary outcome\n\n" + _strata(m, n),
        _DEPTHS + _depths(m, n),
        *(_VARIANTS.format(title=title) + _variants(m, first, n) for first, title in _BLOCKS),
        "## Cost\n\n" + _cost(m),
        _LIMITS,
        "## Departures from the plan\n\n" + (departures.strip() or "None."),
    ]
    return "\n\n".join(sections) + "\n"


def summary(m: Measurements) -> str:
    """The primary outcome in a few lines."""
    lines = [
        f"outcome: {analysis.PRIMARY}, all blocks (95 % intervals over prompts)",
        f"{'predictor':<18} {'top-1 hit':<22} rank correlation",
    ]
    for row in _summary_rows(m):
        lines.append(f"{row['predictor']:<18} {_interval(row, 'top1'):<22} {_interval(row, 'rho')}")
    return "\n".join(lines)


def summary_table(m: Measurements) -> str:
    """The same as an HTML table with bars."""
    rows = _summary_rows(m)
    columns = [Column("predictor", [row["predictor"] for row in rows], right=False)]
    for measure, title in (("top1", "top-1 hit"), ("rho", "rank correlation")):
        columns.append(Column(title, [_interval(row, measure) for row in rows]))
        columns.append(bars([row[measure] for row in rows], 1.0))
    return line(f"outcome: {analysis.PRIMARY}, all blocks (95 % intervals over prompts)") + table(columns)


def _summary_rows(m: Measurements) -> list[dict[str, Any]]:
    found = analysis.agreement(m, analysis.PRIMARY, 0, n_resamples=499)
    return _records(
        found[found["predictor"].isin(("credit", "straight", "DLA", "patching", "update norm", *analysis.CONTROLS))]
    )


def _data(m: Measurements, settings: Mapping[str, Any], made_by: Mapping[str, Any]) -> str:
    pairs, names = m.pairs, ("iglens_tl", "transformer_lens", "transformers", "torch")
    kinds, words = (_counts(pairs[column].value_counts(sort=False).to_dict()) for column in ("kind", "word_kind"))
    versions = ", ".join(f"{name} {made_by[name]}" for name in names if made_by.get(name))
    chosen = ", ".join(f"`{name}={value!r}`" for name, value in settings.items())
    return (
        f"{len(pairs)} pairs of a prompt and a position, from {pairs['prompt_index'].nunique()} prompts ({kinds}); predicted "
        f"tokens: {words}. {int((~m.monotone).sum())} trajectories are not monotone (a credit below {analysis.MONOTONE}). Median "
        f"probability of the target: {pairs['prob'].median():.3f}.\n\n"
        f"Model: {made_by.get('model')} ({made_by.get('api')}, {made_by.get('model_dtype')}, {m.n_blocks} blocks). {versions}. "
        f"{chosen}.\n\n"
        "Produced by `OnsetStudy.to_markdown()` from the stored measurements; the plan, `PLAN.md`, was fixed before them. "
        "Intervals are 95 %, by a bootstrap over prompts."
    )


def _counts(numbers: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(numbers.items()))


def _interval(row: Mapping[str, Any], name: str) -> str:
    if not math.isfinite(row[name]):
        return "-"
    ends = [row[f"{name}_low"], row[f"{name}_high"]]
    if not all(map(math.isfinite, ends)):  # one prompt alone
        return f"{row[name]:+.3f}"
    return f"{row[name]:+.3f} [{ends[0]:+.3f}, {ends[1]:+.3f}]"


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]).replace("|", "\\|") for name in names) + " |" for row in rows]
    lines[0] = "| " + " | ".join(name.replace("|", "\\|") for name in names) + " |"
    return "\n".join(lines)


def _records(table: Any) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _percent(table: pandas.DataFrame) -> list[dict[str, Any]]:
    places = ("block 0", "last block", "another")
    return [
        {"outcome": row["outcome"]}
        | {f"largest in {name}": f"{100 * row[name]:.0f} %" for name in places}
        | {"median block": f"{row['median block']:.0f}", "median of the largest": f"{row['median largest']:+.3f}"}
        for row in _records(table)
    ]


def _differences(table: pandas.DataFrame) -> list[dict[str, Any]]:
    return [
        {"blocks": row["blocks"], "rival": row["rival"], "measure": {"top1": "top-1 hit", "rho": "rho"}[row["measure"]],
         "credit less rival": f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]",
         "p (Holm)": "-" if not math.isfinite(row["p_holm"]) else f"{row['p_holm']:.3f}", "pairs": row["n_pairs"]}
        for row in _records(table)
    ]  # fmt: skip


def _agreement(m: Measurements, first: int, n: int) -> str:
    rows = _records(analysis.agreement(m, analysis.PRIMARY, first, n))
    return _markdown(
        [
            {"predictor": row["predictor"], "rho": _interval(row, "rho"), "top-1 hit": _interval(row, "top1"),
             "top-3 hit": _interval(row, "top3"), "pairs": row["top1_n"]}
            for row in rows
        ]
    )  # fmt: skip


def _overview(m: Measurements, n: int) -> str:
    parts: list[str] = []
    for first, title in _BLOCKS:
        for measure, name in (("rho", "rank correlation"), ("top1", "top-1 hit rate")):
            rows = [_overview_row(m, predictor, first, measure, n) for predictor in analysis.PREDICTORS]
            parts.append(f"**{name}, {title}**\n\n" + _markdown(rows))
    return "\n\n".join(parts)


def _overview_row(m: Measurements, predictor: str, first: int, measure: str, n: int) -> dict[str, Any]:
    row, score = {"predictor": predictor}, m.score(predictor)[:, first:]
    for outcome in analysis.OUTCOMES:
        values = analysis.measures(score, m.effect(outcome)[:, first:])[measure]
        found = mean_interval(values, m.prompts, n)
        row[outcome] = f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]" if found.n_pairs else "-"
    return row


def _strata(m: Measurements, n: int) -> str:
    parts: list[str] = []
    for first, title in _BLOCKS:
        rows = [
            {"stratum": row["stratum"], "pairs": row["pairs"]}
            | {
                f"{name}: {short}": _interval(row, f"{name} {measure}")
                for name in ("credit", "first block", "last block", "update norm")
                for measure, short in (("top1", "top-1"), ("rho", "rho"))
                if f"{name} {measure}" in row
            }
            for row in _records(analysis.strata(m, analysis.PRIMARY, first, n))
        ]
        parts.append(f"**{title}**\n\n" + _markdown(rows))
    return "\n\n".join(parts)


def _depths(m: Measurements, n: int) -> str:
    rows: list[dict[str, Any]] = []
    for row in _records(analysis.depths(m, n)):
        own = row["predictor"] == "constant"  # which has no correlation, and is not worse than itself
        cells = {"rho": "-" if own else _interval(row, "rho"), "mean error": _interval(row, "error")}
        cells["worse than constant"] = "-" if own else _interval(row, "worse")
        rows.append({"causal depth": row["causal"], "predictor": row["predictor"], **cells, "pairs": row["error_n"]})
    return _markdown(rows)


def _variants(m: Measurements, first: int, n: int) -> str:
    names = ("rho", "rho less credit's", "top1", "top1 less credit's")
    return _markdown(
        [
            {
                "outcome": row["outcome"],
                "best on the tuning half": row["variant"],
                "tuning rho": f"{row['tuning rho']:+.3f}",
            }
            | {name: _interval(row, name) for name in names}
            for row in _records(analysis.variants(m, first, n))
        ]
    )


def _cost(m: Measurements) -> str:
    pairs = m.pairs
    seconds, forwards, blocks = (float(pairs[name].mean()) for name in ("seconds", "forwards", "block_evaluations"))
    return (
        f"A pair took {seconds:.1f} s, {forwards:.0f} whole forward passes and {blocks:.0f} block evaluations on average (one "
        f"block on one sequence; a forward pass has {m.n_blocks})."
    )
