"""Child processes that run `run_dataset`: forked from a server that has everything imported, so that each starts at once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import accelerate.utils  # noqa: F401
import pyarrow.parquet
import scipy.stats  # noqa: F401 -- imported here so that the children need not
import torch

import iglens_tl.dataset
from iglens_tl._shards import RunFolder
from tests import subjects

torch.set_num_threads(1)  # a fork of a process with a pool of threads would hang

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.dataset_worker"])
N_PROMPTS = 500


def prompts(n: int = N_PROMPTS) -> list[list[int]]:
    """Token ids of 1 to 12 tokens; some twice, for which the rows must not be mistaken for each other."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 13, (n,), generator=generator).tolist()
    rows = [torch.randint(5, 50, (length,), generator=generator).tolist() for length in lengths]
    return [*rows[: n - 3], *rows[:3]]


@functools.cache
def model() -> Any:
    return subjects.tiny(subjects.KINDS[0])


model()  # here, so that TransformerLens is loaded in the server, and the children have the model at once


def run(out: str, seconds: Any = None, die_at_shard: int | None = None, place: Any = None, n: int = N_PROMPTS) -> None:
    """Run the data set; `seconds` gets how long it took, `place` is (rank, ranks, port)."""
    if place is not None:
        rank, ranks, port = place
        settings = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in settings.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["OMP_NUM_THREADS"] = "1"
    if die_at_shard is not None:
        _die_at(die_at_shard)
    subject = model()
    start = time.perf_counter()
    if seconds is not None:
        seconds.value = -1.0  # it has begun
    iglens_tl.dataset.run_dataset(subject, prompts(n), out, positions=None, batch_size=4)
    if seconds is not None:
        seconds.value = time.perf_counter() - start


def _die_at(shard: int) -> None:
    write = RunFolder.write
    written: list[int] = []

    def counted(self: RunFolder, *args: Any) -> Any:
        written.append(1)
        if len(written) == shard:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args)

    RunFolder.write = counted  # type: ignore[method-assign]


def start(*args: Any, **kwargs: Any) -> BaseProcess:
    process = SERVER.Process(target=run, args=args, kwargs=kwargs)
    process.start()
    return process


def finished(*processes: BaseProcess) -> list[int | None]:
    """Exit codes; a process that hangs is killed."""
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(out: Any) -> pyarrow.Table:
    """All rows of a folder, in the order of the data."""
    found = pyarrow.parquet.read_table(out)
    order = [(name, "ascending") for name in ("prompt_index", "position", "segment_index")]
    return found.sort_by(order).combine_chunks().replace_schema_metadata(None)
