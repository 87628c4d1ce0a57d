"""The data of a page as JSON values: every number of a token in an array of its own, exactly, as base64.

An array is `{"shape": [...], "f64": "..."}` (or "f32", "i32", "u16"): little-endian, the token first, so that the page reads one
token's numbers as a slice. Numbers keep all their digits; of the most probable tokens, probabilities are in float32.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iglens_tl._display import quoted
from iglens_tl._layout import (
    DEFAULT_RULE,
    Token,
    onset_labels,
    onset_meaning,
    shown_tokens,
    token_headings,
    where_read,
)
from iglens_tl._onset import RULES, onset_index, rules_of
from iglens_tl._report.beside import Beside
from iglens_tl._report.figure import look, rows
from iglens_tl.companion_results import LogitLensResult
from iglens_tl.results import IGLensResult

_KINDS = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u16": "<u2"}


def payload(result: IGLensResult, others: Beside) -> dict[str, Any]:
    """Everything that the page's script reads."""
    tokens = shown_tokens(result)
    batch, pos = (torch.tensor(axis) for axis in zip(*tokens, strict=True))
    places = (batch, pos)

    def take(grid: Tensor) -> dict[str, Any]:
        return array(grid[..., batch, pos].movedim(-1, 0))

    return {
        "metric": result.metric,
        "unit": result.unit,
        "segments": list(result.segment_labels),
        "states": list(result.state_labels),
        "figure": look(result),
        "tokens": [_token(result, token) for token in tokens],
        "credits": take(result.attribution),
        "values": take(result.values),
        "total": take(result.total),
        "gap": take(result.gap),
        "onsets": _onsets(result, places),
        "methods": [
            {
                "name": column.name,
                "unit": column.unit,
                "amounts": array(column.amounts),
                "under": {name: array(numbers) for name, numbers in column.under.items()},
            }
            for column in others.columns
        ],
        "lens": None if others.lens is None else _lens(result, others.lens, others.lens_places),
    }


def array(numbers: Tensor, kind: str = "f64") -> dict[str, Any]:
    """A tensor for the page; see the module."""
    data = np.ascontiguousarray(numbers.numpy().astype(_KINDS[kind], copy=False)).tobytes()
    return {"shape": list(numbers.shape), kind: base64.b64encode(data).decode("ascii")}


def json_for_script(value: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: plain ASCII, and no `<` that could end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _token(result: IGLensResult, token: Token) -> dict[str, Any]:
    """Who a token is, in words, as printed results put it."""
    less = (
        ""
        if result.incorrect_strings is None
        else f" \N{MINUS SIGN} {quoted(result.incorrect_strings[token[0]][token[1]])}"
    )
    many = f"prompt {token[0]}, " if result.mask.shape[0] > 1 else ""
    return {
        "target": quoted(result.target_strings[token[0]][token[1]]) + less,
        "ids": [i for i in result.target_ids[token].tolist() if i >= 0],
        "where": many + where_read(result, token),
        "value": dict(token_headings(result, token))["value"],
        "model": _finite(None if result.model_value is None else float(result.model_value[token])),
        "batch": token[0],
        "position": int(result.positions[token]),
        **rows(result, token),
    }


def _finite(number: float | None) -> float | None:
    """A number that JSON has, or None."""
    return number if number is not None and math.isfinite(number) else None


def _onsets(result: IGLensResult, places: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
    """Every rule that the result has: its words, its label at each token, and the place of the state at which it is met."""
    found: list[dict[str, Any]] = []
    for rule in RULES:
        labels = onset_labels(result, rule, DEFAULT_RULE[1])
        ends = torch.full(result.mask.shape, -1)
        if rule in rules_of(result):
            index = onset_index(result, rule, DEFAULT_RULE[1])
            # A segment is named by its end: the state that it produces.
            ends = torch.where(index >= 0, index + (RULES[rule] == "segment"), -1)
        found.append(
            {
                "rule": rule,
                "kind": RULES[rule],
                "known": rule in rules_of(result),
                "words": onset_meaning(rule, DEFAULT_RULE[1]),
                "labels": [labels[row][column] for row, column in shown_tokens(result)],
                "ends": array(ends[places], "i32"),
            }
        )
    return found


def _lens(result: IGLensResult, lens: LogitLensResult, places: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    assert places is not None

    def take(grid: Tensor) -> Tensor:
        return grid.movedim((1, 2), (0, 1))[places[0], places[1]]

    ids, place = take(lens.top_ids).unique(return_inverse=True)
    return {
        "prob": None if result.metric == "prob" else array(take(lens.prob)),
        "rank": array(take(lens.rank), "i32"),
        "top": array(place, "u16" if len(ids) < 1 << 16 else "i32"),
        "top_probs": array(take(lens.top_probs), "f32"),
        "ids": ids.tolist(),
        "strings": [quoted(text) for text in _texts(lens, ids.tolist())],
    }


def _texts(lens: LogitLensResult, ids: Sequence[int]) -> list[str]:
    """The text of each id among the most probable tokens."""
    known: dict[int, str] = {}
    for states, texts in zip(lens.top_ids.tolist(), lens.top_strings, strict=True):
        for row_ids, row_texts in zip(states, texts, strict=True):
            for some, their in zip(row_ids, row_texts, strict=True):
                known.update(zip(some, their, strict=False))  # where masked there are ids -1 and no texts
    return [known[i] for i in ids]
