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
from iglens_tl._model.answers import target_ids
from iglens_tl._model.host import Host
from iglens_tl._plan import plan_positions
from iglens_tl._request import Request, settle
from iglens_tl.targets import NEXT, TOP, Target


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
    token = torch.zeros(1, 1, dtype=torch.long)
    baseline = "embed" if per_prompt(settings["baseline"]) else settings["baseline"]
    settle(
        Request(
            host.model,
            token,
            TOP,
            attention_mask=torch.ones_like(token),
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
    plan = plan_positions(-1, torch.ones(1, 1, dtype=torch.bool))
    for name, spec in zip(("targets", "incorrect_targets"), both, strict=True):
        shared = not (
            spec is None or isinstance(spec, (Target, list, tuple)) or (isinstance(spec, Tensor) and spec.ndim)
        )
        if shared:
            target_ids(host, spec, plan, None, name)
