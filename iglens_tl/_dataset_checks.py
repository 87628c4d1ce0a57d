"""What would be wrong for every prompt of a data set is refused before the first one runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from iglens_tl._asked import refuse_sets
from iglens_tl._batches import Question
from iglens_tl._checks import ESTIMATORS, METRICS, memory_size, one_of, whole_number
from iglens_tl._dataset_source import Columns, Facts
from iglens_tl._model.answers import refuse_overlap, target_ids
from iglens_tl._model.host import Host
from iglens_tl._plan import PositionPlan, plan_positions
from iglens_tl._request import Request, settle
from iglens_tl.targets import NEXT, TOP, Target

_LONG = 2**16
"""Tokens of a prompt that stands for any, where the model has no longest."""


def check_numbers(settings: Mapping[str, Any], max_memory: Any) -> None:
    """Refuse what can be seen without the model or the data."""
    one_of("metric", settings["metric"], tuple(METRICS))
    one_of("estimator", settings["estimator"], ESTIMATORS)
    whole_number("n_steps", settings["n_steps"], 1)
    memory_size(max_memory)


def check_against_rows(question: Question, baseline: Any, facts: Facts, columns: Columns) -> None:
    """Refuse targets that come from two sides, and lists that do not fit the rows."""
    sides = (
        ("targets", question.targets, TOP, facts.has_targets, columns.target),
        ("incorrect_targets", question.incorrect, None, facts.has_incorrect, columns.incorrect),
    )
    for name, spec, default, from_rows, column in sides:
        if from_rows and spec is not default:
            raise ValueError(
                f"the rows have a column {column!r}, and {name}= came as well: leave {name}= out, or name another column."
            )
        if isinstance(spec, (list, tuple)) and any(isinstance(item, Target) for item in spec):
            raise TypeError(f"{name} as a list must hold a token for each prompt; TOP and NEXT are for all prompts.")
        _check_entries(name, spec, facts)
    _check_entries("baseline", baseline, facts)


def _check_entries(name: str, spec: Any, facts: Facts) -> None:
    if per_prompt(spec) and len(spec) != facts.n_rows:
        raise ValueError(f"{name} must have one entry a prompt: {facts.n_rows} prompts, {len(spec)} entries.")


def per_prompt(spec: Any) -> bool:
    """Whether an argument holds one entry a prompt: a list, or a tensor whose first axis is the prompts."""
    return isinstance(spec, (list, tuple)) or (isinstance(spec, Tensor) and spec.ndim > 1)


def check_settings(host: Host, question: Question, settings: Mapping[str, Any]) -> None:
    """Refuse settings that no prompt could meet; runs nothing."""
    token = torch.zeros(1, host.max_tokens or _LONG, dtype=torch.long)  # the longest prompt that there could be
    plan = _longest_plan(question.positions, token)
    # Whether every prompt has as many positions: else what goes by position can be judged of a single prompt only.
    fixed = not (question.positions is None or isinstance(question.positions, slice))
    baseline = settings["baseline"]
    if per_prompt(baseline):
        baseline = baseline[:1] if fixed or baseline.ndim == 2 else baseline[:1, :1]
    settle(
        Request(
            host.model,
            token,
            TOP,
            attention_mask=torch.ones_like(token),
            positions=question.positions if fixed else -1,
            layers=settings["layers"],
            incl_mid=settings["incl_mid"],
            baseline=baseline,
            lens=settings["lens"],
            dtype=settings["dtype"],
        )
    )
    both = (question.targets, question.incorrect)
    if settings["metric"] == "logit":
        refuse_sets(Request(host.model, None, *both), 'metric="logit"')
    if question.positions == -1 and any(spec is NEXT for spec in both):
        raise ValueError(
            "targets=NEXT: the last token of a prompt has no next token. Select earlier positions, for example "
            "positions=None or positions=-2."
        )
    if isinstance(question.targets, Target) and question.targets is question.incorrect:
        raise ValueError(
            f"targets and incorrect_targets are both {question.targets.name}: their difference says nothing."
        )
    _check_targets(host, both, plan if fixed else plan_positions(-1, torch.ones(1, 1, dtype=torch.bool)), fixed)


def _longest_plan(positions: Any, token: Tensor) -> PositionPlan:
    try:
        return plan_positions(positions, torch.ones_like(token, dtype=torch.bool))
    except ValueError as error:
        raise ValueError(
            f"positions={positions!r}: not even a prompt of {token.shape[1]:,} tokens has such a position."
        ) from error


def _check_targets(host: Host, both: tuple[Any, Any], plan: PositionPlan, fixed: bool) -> None:
    """Refuse targets that all prompts share and that are none, or that have another shape than any prompt's positions."""
    found: list[Tensor | None] = []
    for name, spec in zip(("targets", "incorrect_targets"), both, strict=True):
        if spec is None or isinstance(spec, (Target, list, tuple)):
            continue
        standin = _standin(spec, fixed)
        ids, _ = target_ids(host, spec if standin is None else standin, plan, None, name)
        found.append(ids if standin is None else None)
    if len(found) == 2 and found[0] is not None and found[1] is not None:
        refuse_overlap(found[0], found[1], plan.mask)


def _standin(spec: Any, fixed: bool) -> Tensor | None:
    """Ids in the shape of one prompt's, as far as that can be judged, where a tensor is not the same for all; else None."""
    if not isinstance(spec, Tensor) or not spec.ndim or (fixed and not per_prompt(spec)):
        return None
    one = spec[0] if per_prompt(spec) else spec
    return torch.zeros_like(one if fixed else one.reshape(-1)[:1])
