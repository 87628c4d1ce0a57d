"""A result as the rows of a shard: the long table of `IGLensResult.to_dataframe` with the numbers of each token beside it.

One row for each (prompt, position, segment); a prompt that failed has one row in which only `prompt_index`,
`prompt_hash` and `error` are filled. The columns are the same in every shard, whatever the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from iglens_tl._onset import RULES
from iglens_tl._tables import long_frame, onset_frame

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from iglens_tl.results import IGLensResult

ONSET_FRACTION = 0.5
"""The share that the onset columns ask for (rules "mass" and "crossing")."""

_TEXT, _WHOLE, _NUMBER, _FLAG, _IDS = "text", "whole", "number", "flag", "ids"

COLUMNS: Mapping[str, str] = {
    "prompt_index": _WHOLE,
    "prompt_hash": _TEXT,
    "position": _WHOLE,
    "token": _TEXT,
    "token_id": _WHOLE,
    "target": _TEXT,
    "target_id": _WHOLE,
    "target_ids": _IDS,
    "incorrect": _TEXT,
    "incorrect_id": _WHOLE,
    "incorrect_ids": _IDS,
    "segment_index": _WHOLE,
    "segment": _TEXT,
    "start": _TEXT,
    "end": _TEXT,
    "hidden_state": _WHOLE,
    "credit": _NUMBER,
    "value_start": _NUMBER,
    "value_end": _NUMBER,
    "is_top_start": _FLAG,
    "is_top_end": _FLAG,
    "total": _NUMBER,
    "gap": _NUMBER,
    "model_value": _NUMBER,
    **{f"onset_{rule}": _TEXT for rule in RULES},
    "unit": _TEXT,
    "metric": _TEXT,
    "error": _TEXT,
}
"""The columns of a shard and what they hold; docs/datasets.md says what each means."""


def schema() -> pyarrow.Schema:
    import pyarrow as pa

    kinds: dict[str, pa.DataType] = {
        _TEXT: pa.string(),
        _WHOLE: pa.int64(),
        _NUMBER: pa.float64(),
        _FLAG: pa.bool_(),
        _IDS: pa.list_(pa.int64()),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])


def result_rows(result: IGLensResult, indices: Sequence[int], hashes: Sequence[str | None]) -> pyarrow.Table:
    """The rows of a result.

    Args:
        result: of a batch.
        indices, hashes: the number in the data set and the hash of each of the batch's prompts.
    """
    frame = long_frame(result)
    batch = frame["batch"].to_numpy()
    columns: dict[str, Any] = {name: frame[name].tolist() for name in COLUMNS if name in frame.columns}
    columns["prompt_index"] = np.asarray(indices)[batch]
    columns["prompt_hash"] = [hashes[row] for row in batch]
    columns["segment_index"] = np.tile(np.arange(result.n_segments), len(frame) // result.n_segments)
    columns.update(_ids(result))
    columns.update(_per_token(result))
    columns.update(_per_state(result))
    return _table(columns, len(frame))


def failure_rows(failed: Sequence[tuple[int, str | None, str]]) -> pyarrow.Table:
    """One row for each prompt that failed: its number, hash and reason."""
    indices, hashes, reasons = zip(*failed, strict=True) if failed else ((), (), ())
    return _table({"prompt_index": indices, "prompt_hash": hashes, "error": reasons}, len(failed))


def _ids(result: IGLensResult) -> dict[str, list[Any]]:
    """The ids of targets as lists, and as a number where there is one."""
    found: dict[str, list[Any]] = {}
    for name, ids in (("target", result.target_ids), ("incorrect", result.incorrect_ids)):
        if ids is not None:
            lists = [[i for i in row if i >= 0] for row in ids[result.mask].tolist()]
            found[f"{name}_ids"] = _repeated(lists, result.n_segments)
            found[f"{name}_id"] = _repeated([row[0] if len(row) == 1 else None for row in lists], result.n_segments)
    return found


def _per_token(result: IGLensResult) -> dict[str, Any]:
    onsets: pandas.DataFrame = onset_frame(result, ONSET_FRACTION)
    numbers = {"total": result.total, "gap": result.gap, "model_value": result.model_value}
    found: dict[str, Any] = {
        name: grid[result.mask].repeat_interleave(result.n_segments).numpy()
        for name, grid in numbers.items()
        if grid is not None
    }
    for rule in RULES:
        found[f"onset_{rule}"] = _repeated(onsets[rule].tolist(), result.n_segments)
    return found


def _per_state(result: IGLensResult) -> dict[str, Any]:
    at_mask = result.is_top.permute(1, 2, 0)[result.mask]
    return {
        "is_top_start": at_mask[:, :-1].reshape(-1).numpy(),
        "is_top_end": at_mask[:, 1:].reshape(-1).numpy(),
    }


def _repeated(entries: Sequence[Any], times: int) -> list[Any]:
    return [entry for entry in entries for _ in range(times)]


def _table(columns: Mapping[str, Any], n_rows: int) -> pyarrow.Table:
    import pyarrow as pa

    arrays: list[pa.Array] = []
    for field in schema():
        if field.name not in columns:
            arrays.append(pa.nulls(n_rows, field.type))
            continue
        entries = columns[field.name]
        if COLUMNS[field.name] in (_TEXT, _WHOLE):
            entries = [_clean(entry) for entry in entries]
        arrays.append(pa.array(entries, field.type))
    return pa.Table.from_arrays(arrays, schema=schema())


def _clean(entry: Any) -> Any:
    """Parquet holds UTF-8: a lone surrogate becomes a backslash escape; what is missing becomes null."""
    if isinstance(entry, str):
        return entry.encode("utf-8", "backslashreplace").decode("utf-8")
    return entry if entry is None or isinstance(entry, int) else _whole(entry)


def _whole(entry: Any) -> int | None:
    import pandas as pd

    return None if pd.isna(entry) else int(entry)
