"""States that stay where they are, in a cache of many positions, until some of their rows are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows of a larger tensor.

    Args:
        full: `[batch, pos, d_model]`.
        batch, pos: where the rows are, each `[tokens]` on the CPU; states share them.
    """

    full: Tensor
    batch: Tensor
    pos: Tensor

    def at(self, tokens: Tensor | slice) -> Tensor:
        device = self.full.device
        return self.full[self.batch[tokens].to(device), self.pos[tokens].to(device)]


class States(Sequence[Tensor]):
    """The states of a path: a sequence of `[tokens, d_model]`, each made when it is asked for."""

    def __init__(self, states: Iterable[Tensor | Rows]) -> None:
        self._states = tuple(states)

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> States: ...

    def __getitem__(self, index: int | slice) -> Tensor | States:
        if isinstance(index, slice):
            return States(self._states[index])
        state = self._states[index]
        return state.at(slice(None)) if isinstance(state, Rows) else state

    def rows(self, index: int, tokens: Tensor) -> Tensor:
        """A state of some tokens, `[rows, d_model]`; nothing else is made."""
        state = self._states[index]
        if isinstance(state, Rows):
            return state.at(tokens)
        return state[tokens.to(state.device)]
