"""A result in one safetensors file: its tensors, and everything else as JSON under one metadata key.

The bytes depend on the contents alone (one metadata key, sorted JSON keys, ASCII only), so a file that is loaded and
saved again is the same file.
"""

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

KEY = "iglens_tl"
FORMAT = 1


def write(path: str | Path, kind: str, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Write `tensors` and `plain` (JSON values) as a file that says it holds a `kind`; whole, or not at all."""
    header = json.dumps({"format": FORMAT, "kind": kind, "fields": plain}, ensure_ascii=True, sort_keys=True)
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    replace_whole(Path(path), safetensors.torch.save(own, {KEY: header}))


def replace_whole(path: Path, data: bytes) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the other fields of a file that `write` made.

    Raises:
        FileNotFoundError: where there is no such file.
        ValueError: for a file that is no safetensors file, none of this package, of a newer format or of another kind.
    """
    data = Path(path).read_bytes()
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a (whole) safetensors file: {error}.") from error
    return tensors, _fields_of(path, kind, _metadata(data))


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file: eight bytes of length, then a JSON header of that length."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {})


def _fields_of(path: str | Path, kind: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        raise ValueError(
            f'{path} is a safetensors file, but holds no result of iglens_tl: it has no metadata key "{KEY}" '
            f"(it has {sorted(metadata) or 'none'})."
        )
    header = json.loads(metadata[KEY])
    if header["format"] > FORMAT:
        raise ValueError(
            f"{path} is of format {header['format']}, this version of iglens_tl reads up to {FORMAT}: "
            "upgrade iglens_tl."
        )
    if header["kind"] != kind:
        found = header["kind"]
        raise ValueError(f"{path} holds another kind of result, {found}, not {kind}: use {found}.load.")
    return header["fields"]
