"""The prompts of a study and the positions at which they are read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class StudyPrompt:
    """A prompt, its place in the list, and what kind of text it is (for strata)."""

    index: int
    id: str
    kind: str
    text: str


def read_prompts(prompts: Any) -> list[StudyPrompt]:
    """Prompts from a list of strings or mappings (`prompt`; `id`, `kind` if known), a text file (one a line), or JSON lines.

    Raises:
        ValueError: for no prompt, an empty one, or a line or entry that is none; each is named.
    """
    entries = list(_entries(prompts))
    bad = [f"{place}: {entry!r}"[:80] for place, entry in entries if not _text_of(entry).strip()]
    if bad or not entries:
        raise ValueError(
            'A study needs prompts: strings, or mappings with a non-empty text under "prompt". Got '
            + (f"at {'; '.join(bad[:5])}" if bad else "none")
            + ". Mend or leave out these entries."
        )
    return [_prompt(index, entry) for index, (_, entry) in enumerate(entries)]


def _entries(prompts: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(prompts, (str, Path)):
        path = Path(prompts)
        if not path.is_file():
            raise ValueError(
                f"prompts must be a list, a .txt file with one a line, or a .jsonl file; there is no file {str(path)!r}."
            )
        lines = [
            (f"line {i}", line)
            for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if line.strip()
        ]
        return [(place, _parsed(place, line)) for place, line in lines] if path.suffix in (".jsonl", ".json") else lines
    return [(f"entry {i}", entry) for i, entry in enumerate(prompts)]


def _parsed(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON value ({error}); a .jsonl file has one object a line.") from error


def _text_of(entry: Any) -> str:
    if isinstance(entry, Mapping):
        entry = entry.get("prompt")
    return entry if isinstance(entry, str) else ""


def _prompt(index: int, entry: Any) -> StudyPrompt:
    given: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    return StudyPrompt(
        index, str(given.get("id", f"prompt-{index:05}")), str(given.get("kind", "all")), _text_of(entry)
    )


def seed_of(seed: int, *words: object) -> int:
    """A seed of its own for each use, the same in every run: of the study's seed and of what it is for."""
    return zlib.crc32(json.dumps([seed, *map(str, words)]).encode()) % 2**31


def choose_positions(
    top_probs: Tensor, n_positions: int, min_prob: float, min_position: int, seed: int
) -> tuple[int, ...]:
    """The positions of a prompt that are studied, in order.

    Eligible are those from `min_position` on at which the most probable token has at least `min_prob`. The last position is
    taken if it is eligible; the others are drawn without replacement.

    Args:
        top_probs: the largest probability at each position, `[seq]`.
    """
    eligible = [i for i in range(min_position, len(top_probs)) if float(top_probs[i]) >= min_prob]
    last = [i for i in eligible if i == len(top_probs) - 1]
    others = [i for i in eligible if i not in last]
    n_others = min(len(others), n_positions - len(last))
    drawn = np.random.default_rng(seed).choice(others, n_others, replace=False).tolist() if n_others > 0 else []
    return tuple(sorted([*last, *drawn][:n_positions]))


def kind_of_word(target: str) -> str:
    """What a predicted token is: a word's start, a continuation, a number, or punctuation and space."""
    letters = target.strip()
    if letters[:1].isdigit():
        return "number"
    if letters[:1].isalpha():
        return "word start" if target[:1].isspace() else "continuation"
    return "punctuation or space"


def top_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probability and its token at each position, of logits `[seq, d_vocab]`."""
    wide = logits.double()
    best, ids = wide.max(-1)
    return (best - torch.logsumexp(wide, -1)).exp(), ids
