"""Which of several processes this is, and what they agree on; `accelerate` (or `torchrun`) starts them.

A process that was not launched as one of several is the only one. Ranks speak with each other at the start of a run alone:
what the first of them finds and decides holds for all, and none begins before all are there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process is number `index` of `count`."""

    index: int
    count: int

    def share(self, batches: Iterable[T]) -> Iterator[T]:
        """Every `count`-th batch, dealt out in turn."""
        return (batch for place, batch in enumerate(batches) if place % self.count == self.index)


def ranks_for(device_type: str) -> Ranks:
    """The place of this process; joins the others, where it was launched with others and has not joined them yet.

    Args:
        device_type: of the model: "cpu" joins through gloo, others through what accelerate chooses for the device.
    """
    from accelerate import PartialState

    state = PartialState(cpu=device_type == "cpu")
    return Ranks(int(state.process_index), int(state.num_processes))


def ranks_here() -> Ranks:
    """The place of this process among those it was launched with, as the launcher says; joins nobody."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def launched_device() -> str | None:
    """The GPU of a process that was launched as one of several, None elsewhere."""
    import torch

    place = os.environ.get("LOCAL_RANK")
    if place is None or not torch.cuda.is_available():
        return None
    return f"cuda:{int(place) % torch.cuda.device_count()}"


def first_decides(ranks: Ranks, decide: Callable[[], T]) -> T:
    """What the first rank decides, at every rank; where the first one refuses, all do, with its error."""
    if ranks.count == 1:
        return decide()
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None]
    if ranks.index == 0:
        try:
            box = [(decide(), None)]
        except Exception as error:
            box = [(None, error)]
    broadcast_object_list(box)
    value, error = box[0]
    if error is not None:
        raise error
    return value


def wait_for_all(ranks: Ranks) -> None:
    """Go on when every rank has come to this place."""
    if ranks.count > 1:
        from accelerate.utils import wait_for_everyone

        wait_for_everyone()


def leave() -> None:
    """Say goodbye to the other ranks, at the end of a process that was launched with them."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
