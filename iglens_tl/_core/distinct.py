"""Rows that ask the same question: the same state to the bit, and the same targets. They are read once.

Two prompts with a common beginning have the same states there; a zero baseline, and the embedding of a word that occurs twice
in a model without position embeddings, are one state for many tokens. Each row gets a key, a sum of the integers that its
numbers are in memory (exact in any order), and rows of one key are compared before they are taken for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

Rows = Callable[[Tensor], Tensor]
"""`row numbers -> states [rows, d_model]`."""

Groups = Callable[[Tensor], Sequence[Tensor]]
"""`row numbers -> groups of target ids, each [rows, width]`."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def distinct(
    rows: Rows, groups: Groups, n_rows: int, at_a_time: int = 512
) -> tuple[Int[Tensor, "distinct"], Int[Tensor, "rows"]] | None:
    """The first row of each kind, ascending, and for every row which of these it is like; None where no two are alike."""
    keys = torch.empty(n_rows, dtype=torch.int64)
    for index in _at_a_time(n_rows, at_a_time):
        keys[index] = _keys(rows(index), groups(index))
    if not _repeats(keys):
        return None
    kinds, order = keys.sort()
    new = torch.ones(n_rows, dtype=torch.bool)
    torch.ne(kinds[1:], kinds[:-1], out=new[1:])
    del keys, kinds  # of each row a number, of which not many should be held together
    kind = torch.empty_like(order).scatter_(0, order, new.cumsum(0).sub_(1))
    everyone = torch.arange(n_rows)
    first = torch.full((int(new.sum()),), n_rows).scatter_reduce_(0, kind, everyone, "amin")
    first, order = first.sort()
    like = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[kind]
    del kind, order
    repeated = (first[like] != everyone).nonzero()[:, 0]
    if all(_same(rows, groups, index, first[like[index]]) for index in repeated.split(at_a_time)):
        return first, like
    return None  # two questions with one key, which chance alone does not bring about


def _repeats(keys: Tensor) -> bool:
    """Whether a key occurs twice; sorted in place, which takes a third of the memory that an order takes."""
    kinds = keys.clone()
    kinds.numpy().sort()
    return bool((kinds[1:] == kinds[:-1]).any())


def _at_a_time(n_rows: int, size: int) -> Iterator[Tensor]:
    return (torch.arange(start, min(start + size, n_rows)) for start in range(0, n_rows, size))


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(_INTEGERS[rows.dtype.itemsize])


def _keys(rows: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """`[rows]` int64; overflows wrap around."""
    bits = _bits(rows)
    keys = bits.to(torch.int64, copy=True).mul_(_factors(bits.shape[-1], 1).to(bits.device)).sum(-1).cpu()
    for place, ids in enumerate(groups):
        keys += (ids.cpu() * _factors(ids.shape[-1], 2 + place)).sum(-1)
    return keys


def _factors(size: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (size,), generator=draw) * 2 + 1


def _same(rows: Rows, groups: Groups, one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bits(rows(one)), _bits(rows(other))) and all(
        torch.equal(a, b) for a, b in zip(groups(one), groups(other), strict=True)
    )
