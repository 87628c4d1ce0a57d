"""The folder of a run: Parquet shards of finished prompts, and `_run.json`, which says what run it is.

A shard holds every row of its prompts. It is written under a name that readers leave out (it begins with a dot), flushed
to the disk and renamed, so that a prompt is there with all its rows or not at all; the shards are the only record of what
is done. `SCHEMA` is documented in docs/datasets.md; a prompt that failed has one row, with its reason in `error`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iglens_tl._checks import shorten

if TYPE_CHECKING:
    import pyarrow

KEY = b"iglens_tl"
FORMAT = 1
RECORD, LOCK = "_run.json", "_lock"
_SHARD = re.compile(r"prompts-(\d+)-n(\d+)\.parquet")
_HALF = re.compile(r"\.[0-9a-f]{32}\.tmp")
_SAFE = "What the folder holds is whole; the same call or command goes on from there."


@dataclass(frozen=True)
class RunFolder:
    """A folder into which runs write their shards."""

    path: Path

    def shards(self) -> list[Path]:
        """The shards that are there, in the order of their lowest prompt."""
        return sorted(path for path in self.path.iterdir() if _SHARD.fullmatch(path.name))

    def n_done(self) -> int:
        """How many prompts are finished, by the names of the shards alone."""
        found = (_SHARD.fullmatch(entry.name) for entry in os.scandir(self.path))
        return sum(int(match.group(2)) for match in found if match is not None)

    def done(self, run: str) -> list[int]:
        """The prompts that the shards hold.

        Raises:
            ValueError: for a shard that is damaged or of another run.
        """
        prompts: list[int] = []
        for path in self.shards():
            about = read_about(path)
            if about["run"] != run:
                raise ValueError(
                    f"{path} is a shard of another run. Move it out of the folder, or choose another folder."
                )
            prompts += about["prompts"]
        refuse_twice(self.path, [index for index, times in Counter(prompts).items() if times > 1])
        return prompts

    def record(self) -> dict[str, Any] | None:
        """What `_run.json` says; None where there is none."""
        try:
            text = (self.path / RECORD).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.path / RECORD} is damaged ({error}); choose another folder.") from error
        written, identity = (record.get("format"), record.get("identity")) if isinstance(record, dict) else (None, None)
        if isinstance(written, int) and written > FORMAT:
            raise ValueError(
                f"{self.path} is of format {written}, this version of iglens_tl reads up to {FORMAT}: upgrade iglens_tl."
            )
        if (
            not isinstance(written, int)
            or not isinstance(identity, dict)
            or not {"data", "model", "settings"} <= set(identity)
        ):
            raise ValueError(f"{self.path / RECORD} is no record of a run of run_dataset; choose another folder.")
        return record

    def start(self, record: Mapping[str, Any]) -> None:
        """Make the folder that of a run.

        Raises:
            ValueError: where it already holds Parquet files, which would be read as part of the run.
        """
        foreign = [path.name for path in self.path.glob("*.parquet")]
        if foreign:
            raise ValueError(
                f"{self.path} holds Parquet files that are of no run of run_dataset ({shorten(foreign, 3)}); they would be "
                "read with its results. Choose another folder."
            )
        text = json.dumps({"format": FORMAT, **record}, indent=2, sort_keys=True)
        self._put(RECORD, text.encode("ascii"), "the record of the run")

    def write(self, table: pyarrow.Table, prompts: Sequence[int], about: Mapping[str, Any]) -> Path:
        """Write a shard; whole, or not at all.

        Args:
            table: every row of `prompts`, by `SCHEMA`.
            prompts: the prompts that are finished with it.
            about: JSON values for the metadata, beside the prompts.

        Raises:
            OSError: where it cannot be written (a full disk, say), in words; no part of it is left.
        """
        import pyarrow as pa
        from pyarrow import parquet

        header = json.dumps({"format": FORMAT, "prompts": sorted(prompts), **about}, sort_keys=True)
        buffer = pa.BufferOutputStream()
        kept = table.schema.metadata or {}
        parquet.write_table(
            table.replace_schema_metadata({**kept, KEY: header}), buffer, compression="zstd", write_page_checksum=True
        )
        what = f"the rows of {len(prompts)} prompts"
        return self._put(f"prompts-{min(prompts):09d}-n{len(prompts)}.parquet", buffer.getvalue(), what)

    def _put(self, name: str, data: Any, what: str) -> Path:
        beside, path = self.path / f".{uuid.uuid4().hex}.tmp", self.path / name
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            _sync_folder(self.path)
        except OSError as error:
            reason = f"{what} could not be written to {self.path}: {error.strerror or error}. {_SAFE}"
            raise OSError(error.errno, reason) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        return path

    def clean(self) -> None:
        """Remove what killed runs left half written; only while no other run writes here."""
        for path in self.path.iterdir():
            if _HALF.fullmatch(path.name):  # by our own names alone: others may keep files here
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Generator[Lock]:
        """Keep other runs out of the folder; the ranks of one run come in by `Lock.share`.

        The lock is the kernel's: it goes with the process, however that ends.
        """
        with (self.path / LOCK).open("ab+", buffering=0) as file:
            yield Lock(self.path, file)


@dataclass(frozen=True)
class Lock:
    """The lock of a folder: taken alone to look and tidy, then shared by the ranks that write."""

    folder: Path
    file: Any

    def take(self) -> None:
        """Alone, or not at all.

        Raises:
            ValueError: where another run is writing into the folder.
        """
        if not _flock(self.file, alone=True):
            self.file.seek(0)
            who = self.file.read().decode().strip() or "another process"
            raise ValueError(
                f"another run is writing into {self.folder} ({who}). Wait for it, stop it, or choose another folder."
            )
        with contextlib.suppress(OSError):  # a full disk is met where it matters, at the next shard
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def share(self) -> None:
        """With the other ranks of this run; waits until the first of them, which looks alone, shares it too."""
        while not _flock(self.file, alone=False):
            time.sleep(0.05)

    def is_last(self) -> bool:
        """Whether no other rank is left, however it ended; asked by a rank that writes no more."""
        return _flock(self.file, alone=True)


def _flock(file: Any, alone: bool) -> bool:
    """Whether the lock was had; also where the system or the file system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sync_folder(path: Path) -> None:
    """Have the rename itself on the disk, where the system lets a folder be flushed."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_about(path: Path) -> dict[str, Any]:
    """What a shard says of itself: its prompts, its run, settings and versions.

    Raises:
        ValueError: for a file that is no whole shard.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_damaged(path, error)) from error
    if KEY not in metadata:
        raise ValueError(f"{path} is a Parquet file, but no shard of a run of iglens_tl. Move it out of the folder.")
    return json.loads(metadata[KEY])


def read_shards(folder: RunFolder, columns: Sequence[str]) -> Iterator[pyarrow.Table]:
    """Some columns of every shard, one shard at a time.

    Raises:
        ValueError: for a shard that is damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    for path in folder.shards():
        try:
            table = parquet.ParquetFile(path, page_checksum_verification=True).read(columns=list(columns))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(_damaged(path, error)) from error
        lacking = [name for name in columns if name not in table.column_names]
        if lacking:
            raise ValueError(_damaged(path, f"no column {shorten(lacking)}"))
        yield table


def _damaged(path: Path, error: object) -> str:
    return f"{path} is no whole Parquet file ({error}). Delete it and run again: its prompts are made anew."


def refuse_twice(folder: Path, prompts: Sequence[int]) -> None:
    """Refuse prompts that several shards hold."""
    if prompts:
        raise ValueError(
            f"several shards in {folder} hold prompt {shorten(sorted(prompts))}. Delete all but one of them and run again."
        )


def open_folder(path: str | Path) -> RunFolder:
    """The folder of a run that has begun.

    Raises:
        FileNotFoundError, ValueError: where there is no such folder, or it is of no run.
    """
    folder = RunFolder(Path(path))
    if not folder.path.exists():
        raise FileNotFoundError(f"there is no folder {str(path)!r}.")
    if not folder.path.is_dir():
        raise ValueError(f"{str(path)!r} is a file; give the folder that run_dataset wrote.")
    if folder.record() is None:
        raise ValueError(f"{path} is no folder of a run of run_dataset: it holds no {RECORD}.")
    return folder
