"""A result as a long table, and a table as CSV or JSON text.

One row for each (batch, position, segment), in this order, where `mask` is True. A row is keyed by its position, never
by its token's text, so a token that occurs twice keeps two rows.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from iglens_tl._fields import OfTokens, ResultFields
from iglens_tl._onset import RULES, names_at, onset_index, pick, rules_of

if TYPE_CHECKING:
    import pandas

# What a spreadsheet takes for the start of a formula (OWASP's list, with the full-width forms), and the apostrophe
# itself, so that taking one leading apostrophe away always gives the text back.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20", "'")


def long_frame(result: ResultFields) -> "pandas.DataFrame":
    """The long table; see `IGLensResult.to_dataframe` for the columns."""
    import pandas as pd

    k = result.n_segments
    n = int(result.mask.sum())
    columns: dict[str, Any] = {name: column.repeat(k) for name, column in token_columns(result).items()}
    columns["segment"] = _tiled(result.segment_labels, range(k), n)
    columns["start"] = _tiled(result.state_labels, range(k), n)
    columns["end"] = _tiled(result.state_labels, range(1, k + 1), n)
    columns["hidden_state"] = pd.array(list(result.hidden_states) * n, dtype="Int64")
    columns["credit"] = _at_mask(result, result.attribution)
    columns["value_start"] = _at_mask(result, result.values[:-1])
    columns["value_end"] = _at_mask(result, result.values[1:])
    columns["unit"] = repeated(result.unit, n * k)
    columns["metric"] = repeated(result.metric, n * k)
    return frame_of(columns)


def onset_frame(result: ResultFields, fraction: float) -> "pandas.DataFrame":
    """Every rule side by side; see `IGLensResult.onsets` for the columns."""
    import pandas as pd

    mask = result.mask.flatten().tolist()
    columns: dict[str, Any] = dict(token_columns(result))
    for rule in RULES:
        labels: Sequence[str | None] = [None] * int(result.mask.sum())
        hidden: Sequence[int | None] = labels  # both all None
        if rule in rules_of(result):
            index = onset_index(result, rule, fraction)
            names, states = names_at(rule, result)
            labels, hidden = _kept(pick(names, index), mask), _kept(pick(states, index), mask)
        columns[rule] = objects(labels)
        columns[f"{rule}_hidden_state"] = pd.array(list(hidden), dtype="Int64")
    return frame_of(columns)


def frame_of(columns: dict[str, Any]) -> "pandas.DataFrame":
    """A frame whose text columns are of object dtype: pandas 3's own string type cannot hold a lone surrogate."""
    import pandas as pd

    texts = {
        name: pd.Series(column, dtype=object)
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and column.dtype == object
    }
    return pd.DataFrame({**columns, **texts})


def token_columns(result: OfTokens) -> dict[str, Any]:
    """What is said of a token, one entry for each (batch, position) where `mask` is True."""
    batch, _ = result.mask.nonzero(as_tuple=True)
    columns: dict[str, Any] = {"batch": batch.numpy(), "position": result.positions[result.mask].numpy()}
    columns.update(_own_columns(result, batch))
    columns.update(_named_columns(result, "target", result.target_strings, result.target_ids))
    if result.incorrect_ids is not None and result.incorrect_strings is not None:
        columns.update(_named_columns(result, "incorrect", result.incorrect_strings, result.incorrect_ids))
    return columns


def _own_columns(result: OfTokens, batch: Tensor) -> dict[str, Any]:
    import pandas as pd

    position = result.positions[result.mask]
    pairs = list(zip(batch.tolist(), position.tolist(), strict=True))
    strings = result.token_strings
    ids = [None] * len(pairs) if result.tokens is None else result.tokens[batch, position].tolist()
    return {
        "token": objects([None if strings is None else strings[row][place] for row, place in pairs]),
        "token_id": pd.array(ids, dtype="Int64"),
    }


def _named_columns(
    result: OfTokens, name: str, strings: Sequence[Sequence[str]], ids: Tensor
) -> dict[str, npt.NDArray[Any]]:
    """The text and the id of a target; where any target is a set, every id is text, `"5|7"`."""
    chosen = ids[result.mask]
    texts = objects(_kept(strings, result.mask.flatten().tolist()))
    if ids.shape[-1] == 1:
        return {name: texts, f"{name}_id": chosen[:, 0].numpy()}
    joined = ["|".join(str(i) for i in row if i >= 0) for row in chosen.tolist()]
    return {name: texts, f"{name}_id": objects(joined)}


def _kept(grid: Iterable[Iterable[Any]], mask: Sequence[bool]) -> list[Any]:
    return [entry for entry, keep in zip(chain.from_iterable(grid), mask, strict=True) if keep]


def _at_mask(result: ResultFields, per_segment: Tensor) -> npt.NDArray[np.float64]:
    return per_segment.permute(1, 2, 0)[result.mask].reshape(-1).numpy()


def _tiled(labels: Sequence[str], codes: Sequence[int], times: int) -> "pandas.Categorical":
    """Labels in the order of the path, so that a pivot or a sort does not put "10" before "2"."""
    import pandas as pd

    return pd.Categorical.from_codes(np.tile(np.array(codes), times), categories=list(labels), ordered=True)


def objects(entries: Sequence[str | None]) -> npt.NDArray[Any]:
    column = np.empty(len(entries), dtype=object)
    column[:] = entries
    return column


def repeated(text: str, times: int) -> npt.NDArray[Any]:
    return np.full(times, text, dtype=object)


def csv_text(frame: "pandas.DataFrame", spreadsheet_safe: bool) -> str:
    """A table as CSV: every text quoted, so that a newline or a carriage return inside it ends no row."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(frame.columns)
    columns = [_plain(frame[name].tolist(), missing="") for name in frame.columns]
    if spreadsheet_safe:
        columns = [[_without_formula(entry) for entry in column] for column in columns]
    writer.writerows(zip(*columns, strict=True))
    return buffer.getvalue()


def json_text(frame: "pandas.DataFrame") -> str:
    """A table as a JSON list with one object a row, one row a line; what is not a finite number is null."""
    columns = [_plain(frame[name].tolist(), missing=None) for name in frame.columns]
    rows = (dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True))
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]\n" if lines else "[]\n"


def _plain(column: Sequence[Any], missing: str | None) -> list[Any]:
    import pandas as pd

    def plain(entry: Any) -> Any:
        if isinstance(entry, float):
            return entry if math.isfinite(entry) or (missing == "" and math.isinf(entry)) else missing
        return missing if entry is None or entry is pd.NA else entry

    return [plain(entry) for entry in column]


def _without_formula(entry: Any) -> Any:
    return "'" + entry if isinstance(entry, str) and entry.startswith(_FORMULA_STARTS) else entry


@runtime_checkable
class TextStream(Protocol):
    """What text can be written to: an open file, `sys.stdout`, `io.StringIO`."""

    def write(self, s: str, /) -> object: ...


def write_text(text: str, target: str | Path | TextStream) -> None:
    """To a path as UTF-8, or to an open text stream; a lone surrogate, as a backslash escape."""
    data = text.encode("utf-8", errors="backslashreplace")
    if isinstance(target, TextStream):
        target.write(data.decode("utf-8"))
    else:
        Path(target).write_bytes(data)
