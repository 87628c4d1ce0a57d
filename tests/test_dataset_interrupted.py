"""A run over a data set that is killed, runs out of disk, or is spread over processes has the rows of one that was not."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iglens_tl import NEXT, ig_lens, run_dataset, summarize
from iglens_tl._shards import RunFolder
from tests import dataset_worker as worker

N_KILLS = 10


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run of one process from start to end, and how long it took."""
    out = tmp_path_factory.mktemp("whole") / "run"
    seconds = worker.SERVER.Value("d", 0.0)
    assert worker.finished(worker.start(str(out), seconds)) == [0]
    return out, seconds.value


def assert_same_rows(out: Path, whole: Path) -> None:
    """Every row once, and every number the same to the bit: who is in a batch is the same."""
    found, expected = worker.table(out), worker.table(whole)
    keys = list(zip(*(found[name].to_pylist() for name in ("prompt_index", "position", "segment_index")), strict=True))
    assert max(Counter(keys).values()) == 1
    assert found.equals(expected)


def test_a_run_killed_ten_times_has_every_row_once(uninterrupted: tuple[Path, float], tmp_path: Path) -> None:
    whole, whole_seconds = uninterrupted
    chance, seconds = random.Random(0), worker.SERVER.Value("d", 0.0)
    progress = [0]
    for _ in range(N_KILLS):
        seconds.value = 0.0
        process = worker.start(str(tmp_path), seconds)
        while seconds.value == 0.0:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, whole_seconds / (N_KILLS - 2)))
        assert seconds.value == -1.0, "it ended before it was killed"
        process.kill()
        assert worker.finished(process) == [-signal.SIGKILL]
        progress.append(RunFolder(tmp_path).n_done())
    assert progress == sorted(progress)
    assert 0 < progress[-1] < worker.N_PROMPTS
    (tmp_path / f".{'0a' * 16}.tmp").write_bytes(b"half a shard")
    (tmp_path / ".mine.tmp").write_bytes(b"somebody's own")
    assert worker.finished(worker.start(str(tmp_path), seconds)) == [0]
    assert_same_rows(tmp_path, whole)
    assert [path.name for path in tmp_path.glob(".*.tmp")] == [".mine.tmp"], "only what a run left behind is removed"


def test_the_rows_are_those_of_ig_lens(uninterrupted: tuple[Path, float]) -> None:
    """Alone and in a batch a prompt has the same numbers up to float32 noise (2e-7 measured)."""
    frame = worker.table(uninterrupted[0]).to_pandas()
    model = worker.model()
    for index in (0, 17, worker.N_PROMPTS - 1):
        expected = ig_lens(model, [worker.prompts()[index]], positions=None).to_dataframe()
        rows = frame[frame["prompt_index"] == index]
        assert rows["segment"].tolist() == expected["segment"].astype(str).tolist()
        for name in ("position", "token_id", "target_id", "hidden_state"):
            assert rows[name].tolist() == expected[name].tolist()
        for name in ("credit", "value_start", "value_end"):
            assert rows[name].tolist() == pytest.approx(expected[name].tolist(), abs=1e-6)


def launch(out: Path, ranks: int, dying: int | None = None) -> list[int | None]:
    port = worker.free_port()
    return worker.finished(
        *(
            worker.start(str(out), place=(rank, ranks, port), die_at_shard=9 if rank == dying else None)
            for rank in range(ranks)
        )
    )


def ranks_of(out: Path) -> Counter[tuple[int, int]]:
    from iglens_tl._shards import read_about

    return Counter(tuple(read_about(path)["rank"]) for path in RunFolder(out).shards())


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_processes_give_the_rows_of_one(ranks: int, uninterrupted: tuple[Path, float], tmp_path: Path) -> None:
    assert launch(tmp_path, ranks) == [0] * ranks
    wrote = ranks_of(tmp_path)
    assert sorted(wrote) == [(rank, ranks) for rank in range(ranks)]
    assert max(wrote.values()) - min(wrote.values()) <= 1
    assert_same_rows(tmp_path, uninterrupted[0])


def test_a_rank_that_was_killed_is_made_up_for_by_another_number_of_ranks(
    uninterrupted: tuple[Path, float], tmp_path: Path
) -> None:
    codes = launch(tmp_path, 3, dying=1)
    assert codes[1] == -signal.SIGKILL
    assert ranks_of(tmp_path)[1, 3] == 8
    assert RunFolder(tmp_path).n_done() < worker.N_PROMPTS
    assert launch(tmp_path, 2) == [0, 0]
    left = ranks_of(tmp_path)
    assert abs(left[0, 2] - left[1, 2]) <= 1  # what was left is shared, not left to one
    assert_same_rows(tmp_path, uninterrupted[0])


def test_ranks_that_disagree_about_the_run_are_refused(tmp_path: Path) -> None:
    port = worker.free_port()
    processes = [worker.start(str(tmp_path), place=(rank, 2, port), n=40 + rank) for rank in (0, 1)]
    assert worker.finished(*processes) == [0, 1]


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    rows, model = worker.prompts(8), worker.model()
    run_dataset(model, rows, tmp_path)
    with RunFolder(tmp_path).locked() as lock:
        lock.take()
        with pytest.raises(
            ValueError, match=rf"another run is writing into .*process {os.getpid()} on .*choose another"
        ):
            run_dataset(model, rows, tmp_path)
    run_dataset(model, rows, tmp_path)


# --- a disk that is full -------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = worker.prompts(40), worker.model()
    flush, calls = os.fsync, []

    def full_at_the_third_shard(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 6:  # the record and two shards, file and folder each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    monkeypatch.setattr(os, "fsync", full_at_the_third_shard)
    with pytest.raises(
        OSError, match=r"the rows of 4 prompts could not be written to .*No space left.*same call"
    ) as full:
        run_dataset(model, rows, tmp_path / "run", batch_size=4)
    assert full.value.errno == errno.ENOSPC
    assert not list((tmp_path / "run").glob(".*.tmp"))
    assert summarize(tmp_path / "run").n_done == 8
    monkeypatch.undo()
    assert run_dataset(model, rows, tmp_path / "run", batch_size=4).is_complete
    run_dataset(model, rows, tmp_path / "whole", batch_size=4)
    assert_same_rows(tmp_path / "run", tmp_path / "whole")


def _limited(out: str, codes: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # the kernel refuses the byte after these
    try:
        run_dataset(worker.model(), worker.prompts(60), out, batch_size=8, positions=None)
    except OSError as error:
        codes.value = error.errno


def test_the_kernel_may_refuse_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    code = worker.SERVER.Value("i", 0)
    process = worker.SERVER.Process(target=_limited, args=(str(tmp_path), code))
    process.start()
    assert worker.finished(process) == [0]
    assert code.value == errno.EFBIG
    assert not list(tmp_path.glob("*.parquet"))
    assert not list(tmp_path.glob(".*.tmp"))
    assert run_dataset(worker.model(), worker.prompts(60), tmp_path, batch_size=8, positions=None).is_complete


def test_a_smaller_batch_goes_on_with_the_prompts_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, model = worker.prompts(60), worker.model()
    write, written = RunFolder.write, []

    def twice(self: RunFolder, *args: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(write(self, *args))

    monkeypatch.setattr(RunFolder, "write", twice)
    with pytest.raises(KeyboardInterrupt):
        run_dataset(model, rows, tmp_path, batch_size=16, targets=NEXT, positions=slice(0, 3))
    monkeypatch.undo()
    assert summarize(tmp_path).n_done == 32
    summary = run_dataset(model, rows, tmp_path, batch_size=5, targets=NEXT, positions=slice(0, 3))
    assert summary.is_complete
    assert sorted(set(worker.table(tmp_path)["prompt_index"].to_pylist())) == list(range(60))
