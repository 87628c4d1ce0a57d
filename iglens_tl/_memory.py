"""How much memory a call may take where its caller names no `max_memory`: a share of what is free."""

from __future__ import annotations

import psutil
import torch

SHARE = 8
"""One part in so many of what is free."""


def free_memory(device: torch.device) -> int:
    """Bytes that could be had on a device now; of a device that is not CUDA, those of the machine."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)


def share_of_free(device: torch.device, most: int) -> int:
    """An eighth of what is free, and no more than `most` bytes."""
    return max(1, min(most, free_memory(device) // SHARE))
