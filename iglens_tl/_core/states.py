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
        full: `[any, d_model]`.
        index: which of its rows, `[tokens]`, on its device.
    """

    full: Tensor
    index: Tensor


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
        return state.full[state.index] if isinstance(state, Rows) else state

    def rows(self, index: int, tokens: Tensor) -> Tensor:
        """A state of some tokens, `[rows, d_model]`; nothing else is made."""
        state = self._states[index]
        if isinstance(state, Rows):
            return state.full[state.index[tokens.to(state.index.device)]]
        return state[tokens.to(state.device)]
