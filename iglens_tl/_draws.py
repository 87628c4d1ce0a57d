"""Random numbers that depend on a seed and on what they are for, never on the order or the batch they are asked in.

A generator of its own for each (seed, words) leaves torch's global random state alone, and row i of a batch draws what it
would draw alone.
"""

from __future__ import annotations

import hashlib

import torch


def generator_of(seed: int, *words: object) -> torch.Generator:
    """A CPU generator seeded by all of these."""
    digest = hashlib.sha256(repr((seed, *words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
