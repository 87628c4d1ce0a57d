"""A study on disk: one Parquet file a prompt, whole or not there, beside a note of what the study is.

study.json               settings, model, and a digest of the prompts: what a run that goes on must share
prompts/00012.parquet    the rows of prompt 12 (a prompt without an eligible position has a file without rows)
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iglens_tl._study_prompts import StudyPrompt

if TYPE_CHECKING:
    import pandas

KEY = b"iglens_tl"
FORMAT = 1
_IGNORED = ("torch", "transformer_lens", "transformers", "python", "iglens_tl", "device")
"""What may differ between the runs that make up a study: it is noted, and does not change what is asked."""


@dataclass(frozen=True)
class StudyFolder:
    """A folder that holds a study, opened to go on with it."""

    path: Path

    @classmethod
    def open(
        cls,
        path: str | Path,
        settings: Mapping[str, Any],
        made_by: Mapping[str, Any],
        lists: Sequence[Sequence[StudyPrompt]],
    ) -> StudyFolder:
        """Begin a study in an empty or absent folder, or find the same one there.

        Raises:
            ValueError: where something else lies there; it says what differs.
        """
        folder, note = cls(Path(path)), {"format": FORMAT, "settings": dict(settings), "provenance": dict(made_by)}
        note["prompts"] = {
            name: _digest(prompts) for name, prompts in zip(("studied", "reference"), lists, strict=True)
        }
        note = json.loads(json.dumps(note))
        if folder._note.is_file():
            _refuse_other(folder.path, folder.note(), note)
        else:
            if folder.path.exists() and any(folder.path.iterdir()):
                raise ValueError(f"{folder.path} holds something other than a study; give `out` a folder of its own.")
            folder._rows.mkdir(parents=True, exist_ok=True)
            _write(folder._note, json.dumps(note, indent=1).encode())
        for left in folder._rows.glob("*.tmp"):  # of a run that was killed while it wrote
            left.unlink(missing_ok=True)
        return folder

    @property
    def _note(self) -> Path:
        return self.path / "study.json"

    @property
    def _rows(self) -> Path:
        return self.path / "prompts"

    def note(self) -> dict[str, Any]:
        return json.loads(self._note.read_text(encoding="utf-8"))

    def has(self, index: int) -> bool:
        return self._file(index).is_file()

    def _file(self, index: int) -> Path:
        return self._rows / f"{index:05}.parquet"

    def write(self, index: int, columns: Mapping[str, Any]) -> None:
        import pandas as pd

        write_table(self._file(index), pd.DataFrame(dict(columns)), {})

    def table(self) -> pandas.DataFrame:
        """All rows that are there, in the order of the prompts."""
        import pandas as pd

        tables = [read_table(file)[0] for file in sorted(self._rows.glob("*.parquet"))]
        kept = [table for table in tables if len(table)]
        return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()


def write_table(path: Path, table: pandas.DataFrame, note: Mapping[str, Any]) -> None:
    """Write a table as Parquet with a note among its metadata; whole, or not at all. Measured numbers are kept as float32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    doubles = table.select_dtypes("float64").columns
    arrow = pa.Table.from_pandas(table.astype(dict.fromkeys(doubles, "float32")), preserve_index=False)
    arrow = arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), KEY: json.dumps(dict(note)).encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(arrow, sink, compression="zstd")
    _write(path, sink.getvalue().to_pybytes())


def read_table(path: str | Path) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """A table that `write_table` wrote, float64 again, and its note.

    Raises:
        ValueError: for a Parquet file of something else.
    """
    import pyarrow.parquet as pq

    arrow = pq.read_table(path)
    metadata = arrow.schema.metadata or {}
    if KEY not in metadata:
        raise ValueError(f"{path} holds no study of iglens_tl: its metadata has no key {KEY.decode()!r}.")
    table = arrow.to_pandas()
    return table.astype(dict.fromkeys(table.select_dtypes("float32").columns, "float64")), json.loads(metadata[KEY])


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _digest(prompts: Sequence[StudyPrompt]) -> str:
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()


def _refuse_other(path: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differing = [
        f"{group}.{name}: there {there[group].get(name)!r}, asked for {asked[group].get(name)!r}"
        for group in ("settings", "prompts", "provenance")
        for name in sorted({*there[group], *asked[group]} - set(_IGNORED))
        if there[group].get(name) != asked[group].get(name)
    ]
    if there["format"] != asked["format"]:
        differing.append(f"format: there {there['format']}, this version writes {asked['format']}")
    if differing:
        raise ValueError(
            f"{path} holds another study ({'; '.join(differing)}). Give `out` another folder, or repeat that call."
        )
