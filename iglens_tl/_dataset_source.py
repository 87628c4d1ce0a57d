"""The rows of a data set: a prompt each, with its own target where the data have one.

A data set is a list, a text file (one prompt a line), a JSON-lines file, a Parquet file or a Hugging Face
`datasets.Dataset`. A row that cannot be read keeps its number and says what is wrong with it, so that one bad line does
not end a run. Rows are read anew at each pass: a data set need not fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iglens_tl._checks import plain, shorten
from iglens_tl.targets import TokenSet

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of a file that holds one JSON value a line."""


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold prompt, target and incorrect target."""

    prompt: str = "prompt"
    target: str = "target"
    incorrect: str = "incorrect_target"


@dataclass(frozen=True)
class Row:
    """One row: `index` counts from 0 (a line's number less one); `fault` says why it cannot be used, else None."""

    index: int
    prompt: str | tuple[int, ...] | None
    target: Any = None
    incorrect: Any = None
    fault: str | None = None

    @property
    def prompt_hash(self) -> str | None:
        """The first 16 hexadecimal digits of the SHA-256 of the text (UTF-8) or of the ids (as a JSON list)."""
        if self.prompt is None:
            return None
        text = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Source:
    """A data set that can be read again and again.

    Args:
        name: what it is, in words.
        read: gives a fresh iterator over the raw rows; a row that cannot be read comes as a `Broken`.
        columns: where prompt and targets stand in a row with columns.
    """

    name: str
    read: Callable[[], Iterator[Any]]
    columns: Columns

    def rows(self) -> Iterator[Row]:
        return (_row(index, raw, self.columns) for index, raw in enumerate(self.read()))


@dataclass(frozen=True)
class Facts:
    """What one pass over the rows tells: how many, what they hold, and a digest of all of it."""

    n_rows: int
    digest: str
    has_targets: bool
    has_incorrect: bool


@dataclass(frozen=True)
class Broken:
    """A row that could not be read, and why."""

    reason: str


def source_of(prompts: Any, columns: Columns) -> Source:
    """Accept a data set in any of its forms; reads nothing yet.

    Raises:
        FileNotFoundError: for a path to nothing.
        TypeError: for anything else than a path, a list or a `datasets.Dataset`.
    """
    if isinstance(prompts, (str, Path)):
        return _file(Path(prompts), columns)
    if _is_hf_dataset(prompts):
        wanted = [name for name in vars(columns).values() if name in prompts.column_names]
        chosen = prompts.select_columns(wanted) if wanted else prompts
        return Source("datasets.Dataset", lambda: iter(chosen), columns)
    if isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes)):
        rows: Sequence[Any] = prompts
        return Source("list", lambda: iter(rows), columns)
    raise TypeError(
        "prompts must be a list (of strings, lists of token ids, or mappings with columns), the path of a text, JSON-lines "
        f"({', '.join(JSON_LINES)}) or Parquet file, or a datasets.Dataset (one split); got {type(prompts).__name__}."
    )


def _is_hf_dataset(thing: Any) -> bool:
    return any(cls.__module__.split(".")[0] == "datasets" and cls.__name__ == "Dataset" for cls in type(thing).__mro__)


def _file(path: Path, columns: Columns) -> Source:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {str(path)!r} to read prompts from (a single prompt goes in a list: [prompt])."
        )
    if path.suffix.lower() == ".parquet":
        return Source("Parquet", lambda: _parquet_rows(path, columns), columns)
    if path.suffix.lower() in JSON_LINES:
        return Source("JSON lines", lambda: map(_json, _lines(path)), columns)
    return Source("text", lambda: _lines(path), columns)


def _lines(path: Path) -> Iterator[str | Broken]:
    """Lines end at a line feed alone (and its carriage return), not at the other breaks that Unicode knows."""
    with path.open("rb") as file:
        for number, raw in enumerate(file):
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            try:
                text = line.decode("utf-8-sig" if number == 0 else "utf-8")
            except UnicodeDecodeError as error:
                yield Broken(f"the line is not UTF-8: {error.reason} at byte {error.start}")
                continue
            yield text if text.strip() else Broken("the line is empty")


def _json(line: str | Broken) -> Any:
    if isinstance(line, Broken):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Broken(f"the line is no JSON: {error}")


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            wanted = [name for name in vars(columns).values() if name in there] or there
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {error}") from error


def _row(index: int, raw: Any, columns: Columns) -> Row:
    if isinstance(raw, Broken):
        return Row(index, None, fault=raw.reason)
    target = incorrect = None
    if isinstance(raw, Mapping):
        target, incorrect = raw.get(columns.target), raw.get(columns.incorrect)
        if raw.get(columns.prompt) is None:
            return Row(index, None, fault=f"there is no {columns.prompt!r}; there is {_listed(raw)}")
        raw = raw[columns.prompt]
    prompt = _prompt(raw)
    if prompt is None:
        return Row(index, None, fault=f"a prompt must be text or a list of token ids, got {_shown(raw)}")
    try:
        return Row(index, prompt, _target(target), _target(incorrect))
    except (TypeError, ValueError) as error:
        return Row(index, prompt, fault=f"the target is none: {error}")


def _listed(raw: Mapping[Any, Any]) -> str:
    return shorten(repr(name) for name, value in raw.items() if value is not None) or "nothing"


def _shown(raw: Any) -> str:
    text = repr(raw)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({type(raw).__name__})"


def _prompt(raw: Any) -> str | tuple[int, ...] | None:
    if isinstance(raw, str):
        return raw
    ids = [plain(i) for i in raw] if isinstance(raw, (list, tuple)) else plain(raw)
    if isinstance(ids, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return tuple(ids)
    return None


def _target(raw: Any) -> Any:
    """A token string, an id, a `TokenSet` for a list of them, None for none."""
    value = plain(raw)
    if isinstance(value, float) and value.is_integer():  # a column of ids with gaps is one of floats in many a table
        value = int(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, (list, tuple)):
        return TokenSet(value)
    if value is None or isinstance(value, (str, int, TokenSet)):
        return value
    raise TypeError(f"it must be a token string, a token id or a list of them, got {_shown(raw)}")


def facts_of(source: Source) -> Facts:
    """Read every row once.

    Raises:
        ValueError: where there are no rows, or not one of them can be used.
    """
    digest = hashlib.sha256()
    n_rows, usable, has_targets, has_incorrect, first_fault = 0, 0, False, False, ""
    for row in source.rows():
        n_rows += 1
        usable += row.fault is None
        first_fault = first_fault or row.fault or ""
        has_targets |= row.target is not None
        has_incorrect |= row.incorrect is not None
        content = [row.prompt, _plain_target(row.target), _plain_target(row.incorrect), row.fault]
        digest.update(json.dumps(content, default=repr).encode("ascii") + b"\n")
    if not n_rows:
        raise ValueError(f"the data set ({source.name}) has no rows: give at least one prompt.")
    if not usable:
        raise ValueError(
            f"not one of the {n_rows} rows of the data set ({source.name}) can be used; row 0: {first_fault}. Name the columns "
            f"with prompt_column= (now {source.columns.prompt!r}), target_column= and incorrect_column=."
        )
    return Facts(n_rows, digest.hexdigest()[:32], has_targets, has_incorrect)


def _plain_target(target: Any) -> Any:
    return list(target.tokens) if isinstance(target, TokenSet) else target


def windows(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """The rows in order, `size` at a time."""
    window: list[Row] = []
    for row in rows:
        window.append(row)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window
