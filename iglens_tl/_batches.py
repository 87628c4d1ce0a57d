"""Prompts of about one length, batched: which prompts run together depends on the data alone.

Rows are taken a window at a time, tokenised and checked one by one (so that a bad one spoils no batch), ordered by
length, and cut into batches. Neither what is done already nor how many ranks there are changes who is in a batch: each
row's numbers are those of an uninterrupted run of one process, to the bit where the machine computes the same way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iglens_tl._dataset_source import Row, windows
from iglens_tl._model.answers import refuse_overlap, target_ids
from iglens_tl._model.host import Host
from iglens_tl._model.tokens import prompts_of
from iglens_tl._plan import plan_positions
from iglens_tl.targets import TOP

WINDOW = 1024
"""Prompts that are ordered by length together."""

LOGIT_BYTES = 2**29
"""What the model's own logits of a batch may take, in float32: the model computes them at every position."""


@dataclass(frozen=True)
class Item:
    """A prompt that is ready to run, or the reason why it cannot be.

    Args:
        ids: its tokens; empty where there is a `fault`.
        targets, incorrect: as `ig_lens` takes them for a single prompt.
    """

    index: int
    prompt_hash: str | None
    ids: tuple[int, ...]
    targets: Any
    incorrect: Any
    fault: str | None


@dataclass(frozen=True)
class Question:
    """What is asked of every prompt, where the row does not say.

    Args:
        targets, incorrect: one for all prompts, a list with one a prompt, or a tensor `[prompts, pos]`.
        from_rows, incorrect_from_rows: the rows bring their own.
        positions, prepend_bos: as `ig_lens` takes them.
    """

    targets: Any
    incorrect: Any
    from_rows: bool
    incorrect_from_rows: bool
    positions: Any
    prepend_bos: bool | None

    def targets_of(self, row: Row) -> tuple[Any, Any]:
        """The target and the incorrect target of a row; refuses a row that should bring one and does not."""
        return (
            _own(row.target, "target") if self.from_rows else entry(self.targets, row.index),
            _own(row.incorrect, "incorrect target") if self.incorrect_from_rows else entry(self.incorrect, row.index),
        )


def _own(target: Any, what: str) -> Any:
    if target is None:
        raise ValueError(f"the row has no {what}, and others have one")
    return target


def entry(spec: Any, index: int) -> Any:
    """One prompt's part of an argument that may hold one entry a prompt."""
    if isinstance(spec, (list, tuple)) or (isinstance(spec, Tensor) and spec.ndim > 1):
        return spec[index]
    return spec


def batches_of(
    host: Host, rows: Iterable[Row], question: Question, size: int, done: Collection[int]
) -> Iterator[list[Item]]:
    """All batches that hold a prompt which is not done, without the prompts that are."""
    done = set(done)
    for window in windows(rows, WINDOW):
        if all(row.index in done for row in window):
            continue
        for batch in _cut([prepared(host, row, question) for row in window], size, _most_tokens(host)):
            left = [item for item in batch if item.index not in done]
            if left:
                yield left


def _most_tokens(host: Host) -> int:
    return max(1, LOGIT_BYTES // (4 * host.d_vocab_out))


def _cut(items: Sequence[Item], size: int, most_tokens: int) -> Iterator[list[Item]]:
    """Longest first: what does not fit is met early, and the time left is not underrated."""
    batch: list[Item] = []
    for item in sorted(items, key=lambda item: (-len(item.ids), item.index)):
        longest = len(batch[0].ids) if batch else 0
        if batch and (len(batch) == size or longest * (len(batch) + 1) > most_tokens):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def prepared(host: Host, row: Row, question: Question) -> Item:
    """A row, tokenised, with everything checked that needs no forward pass."""
    targets = incorrect = None
    ids: tuple[int, ...] = ()
    fault = row.fault
    if fault is None:
        try:
            targets, incorrect = question.targets_of(row)
            ids = _checked_ids(host, row, targets, incorrect, question)
        except Exception as error:  # tokenizers raise what they like; the row is named, the run goes on
            fault = reason(error, row.index)
    return Item(row.index, row.prompt_hash, ids, targets, incorrect, fault)


def _checked_ids(host: Host, row: Row, targets: Any, incorrect: Any, question: Question) -> tuple[int, ...]:
    if isinstance(row.prompt, str):
        prompts = prompts_of(host, [row.prompt], question.prepend_bos)
    else:  # a prompt of its own has no padding, whatever ids it begins and ends with
        given = list(row.prompt or ())
        prompts = prompts_of(host, torch.tensor([given], dtype=torch.long), None, torch.ones(1, len(given)))
    plan = plan_positions(question.positions, prompts.mask)
    ids, plan = target_ids(host, targets, plan, prompts)
    if incorrect is not None:
        wrong, plan = target_ids(host, incorrect, plan, prompts, "incorrect_targets")
        if ids is not None and wrong is not None:
            refuse_overlap(ids, wrong, plan.mask)
    return tuple(prompts.tokens[0].tolist())


def reason(error: Exception, index: int) -> str:
    """An error as the reason of a failure; the prompt, which ran alone, is named by its number in the data set."""
    text = re.sub(r"\bprompt 0\b", f"prompt {index}", " ".join(str(error).split()))
    if isinstance(error, (ValueError, TypeError)) and text:
        return text
    return f"{type(error).__name__}: {text}"


def padded(batch: Sequence[Item], filler: int) -> tuple[Tensor, Tensor]:
    """The tokens of a batch `[batch, seq]`, filled up on the right, and their mask."""
    longest = max(len(item.ids) for item in batch)
    tokens = torch.full((len(batch), longest), filler, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for place, item in enumerate(batch):
        tokens[place, : len(item.ids)] = torch.tensor(item.ids)
        mask[place, : len(item.ids)] = 1
    return tokens, mask


def together(specs: Sequence[Any]) -> Any:
    """The targets of a batch as one argument of `ig_lens`: a list, a stacked tensor, or what all of them share."""
    first = specs[0]
    if first is None or first is TOP or all(spec is first for spec in specs):
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.stack(list(specs))
    return list(specs)
