"""What makes two runs the same run: the data, the model and the settings, as JSON values that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._dataset_source import Facts
from iglens_tl._shards import RunFolder

_ABSENT = object()


def identity_of(facts: Facts, model: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Data, model and settings of a run.

    Args:
        facts: of the data; the same rows in another form (a list, a file) are the same data.
        model: JSON values that tell models apart.
        settings: the keywords of the call.
    """
    data = {"rows": facts.n_rows, "sha256": facts.digest}
    return {"data": data, "model": dict(model), "settings": {name: _told(value) for name, value in settings.items()}}


def _told(value: Any) -> Any:
    """A setting as a JSON value: tensors and long lists by their digest."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor {list(value.shape)} {value.dtype}, sha256 {hashlib.sha256(raw).hexdigest()[:16]}"
    if isinstance(value, (list, tuple)):
        text = repr(value)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return text if len(text) <= 200 else f"list of {len(value)}, sha256 {digest}"
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)


def run_digest(identity: Mapping[str, Any]) -> str:
    """What stands in every shard of the run."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def begin(folder: RunFolder, identity: Mapping[str, Any]) -> list[int]:
    """Make the folder that of this run, or go on in it: gives the prompts that are done.

    Raises:
        ValueError: where the folder is of another run; every difference is named.
    """
    record = folder.record()
    if record is None:
        folder.start({"identity": identity})
        return []
    plain = json.loads(json.dumps(identity))
    found = list(_differences(record["identity"], plain))
    if found:
        raise ValueError(
            f"{folder.path} holds another run: {shorten(found, 8)}. Choose another folder for this run, or repeat the call as "
            "it was."
        )
    return folder.done(run_digest(plain))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for part in ("data", "model", "settings"):
        for name in sorted({*old[part], *new[part]}):
            before, now = old[part].get(name, _ABSENT), new[part].get(name, _ABSENT)
            if before != now:
                yield f"{part}: {name} {_said(before)} there, {_said(now)} here"


def _said(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
