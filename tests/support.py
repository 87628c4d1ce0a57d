"""What each version of TransformerLens makes of each family, and what `ig_lens` does with it.

A pair of family and way in is one of four things, and `tests/test_architectures.py` asserts which:

- exact: the wrapped model has the Hugging Face model's probabilities, and `ig_lens` has them too;
- as wrapped: TransformerLens's own version of the model computes other probabilities than the Hugging Face model;
  `ig_lens` gives those of the model it was handed;
- refused: `ig_lens` raises, with the reason;
- absent: TransformerLens has no such model, or cannot run it.

Everything that is not listed here is exact. Print the table with `python -m tests.support`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.families import FAMILIES
from tests.versions import TL_MAJOR

WAYS = {2: ("hooked", "folded"), 3: ("hooked", "folded", "bridge", "compatible"), 4: ("bridge", "compatible")}
WAY_NAMES = {
    "hooked": "HookedTransformer",
    "folded": "HookedTransformer, folded",
    "bridge": "TransformerBridge",
    "compatible": "TransformerBridge, compatibility mode",
}
_HOOKED, _BRIDGE = ("hooked", "folded"), ("bridge", "compatible")

Kind = Literal["exact", "as wrapped", "refused", "absent"]


@dataclass(frozen=True)
class Status:
    """One cell of the table. `pattern` is in the message of the error that must come."""

    kind: Kind
    reason: str = ""
    pattern: str = ""


_CONVERTED = """GPT-2; GPT-J; GPT-Neo; GPT-NeoX; GPT-NeoX, sequential; OPT; BLOOM; Phi; Phi-3; Llama; Llama, tied;
Llama, head with a bias; Mistral; Mixtral; Qwen2; Qwen3; Gemma; Gemma-2; Gemma-3; Apertus; GPT-OSS"""
_CONVERTED_BY_3 = "OLMo; OLMo-2; OLMo-3; OLMoE"


def _names(text: str) -> set[str]:
    return {name.strip() for name in text.replace("\n", " ").split(";")}


CONVERTED = {2: _names(_CONVERTED), 3: _names(_CONVERTED) | _names(_CONVERTED_BY_3), 4: set[str]()}
"""The families that TransformerLens can turn into a HookedTransformer."""

_NO_CONVERTER = Status("absent", "no converter", "not currently supported")
_LISTED: dict[tuple[int, str, str], Status] = {}


def _list(status: Status, majors: tuple[int, ...], families: str, ways: tuple[str, ...]) -> None:
    _LISTED.update({(m, f, w): status for m in majors for f in _names(families) for w in ways if w in WAYS[m]})


_list(
    Status("absent", "the converter expects embeddings as wide as the stream", "size mismatch"),
    (2, 3),
    "OPT, projected",
    _HOOKED,
)
_list(
    Status("absent", "the converter expects norms before the sublayers", "NoneType"),
    (2, 3),
    "OPT, post-norm, projected",
    _HOOKED,
)
_list(
    Status("absent", "the bridge cannot run its attention", "no attribute 'embed_positions'"),
    (3, 4),
    "CodeGen",
    _BRIDGE,
)
_list(
    Status("absent", "the bridge cannot split its grouped heads", "split_with_sizes"),
    (3, 4),
    "Falcon, new decoder",
    _BRIDGE,
)
_list(
    Status("absent", "the bridge cannot run its linear attention", "no attribute 'causal_conv1d_fn'"),
    (3,),
    "Qwen3-Next",
    _BRIDGE,
)
_list(
    Status("absent", "TransformerLens refuses compatibility mode", "does not support compatibility mode"),
    (3, 4),
    "VaultGemma",
    ("compatible",),
)
_list(
    Status("absent", "compatibility mode fails to fold its weights", "must match the size of tensor"),
    (3, 4),
    "Falcon-H1",
    ("compatible",),
)
_list(
    Status("refused", "projects between the last block and the logits", "project_out"),
    (3, 4),
    "OPT, projected; OPT, post-norm, projected",
    _BRIDGE,
)
_list(
    Status("refused", "the bridge declares a final norm and has none", "exposes no ln_final"),
    (3, 4),
    "GPT-1",
    _BRIDGE,
)
_list(
    Status("as wrapped", "2.x always builds parallel blocks"),
    (2,),
    "GPT-NeoX, sequential",
    _HOOKED,
)
_list(
    Status("as wrapped", "the converter drops a bias of the unembedding"),
    (2, 3),
    "Llama, head with a bias",
    _HOOKED,
)
_list(
    Status("as wrapped", "2.x does not reproduce the model"),
    (2,),
    "Apertus; GPT-OSS",
    _HOOKED,
)
_list(
    Status("as wrapped", "3.x does not reproduce its attention"),
    (3,),
    "Cohere; Cohere-2; HunYuan",
    _BRIDGE,
)
_list(
    Status("as wrapped", "folding the norms changes its experts"),
    (3, 4),
    "GPT-OSS",
    ("folded", "compatible"),
)


def status(family: str, way: str, major: int = TL_MAJOR) -> Status:
    """What is asserted of a family through a way in, under a major version of TransformerLens."""
    listed = _LISTED.get((major, family, way))
    if listed is not None:
        return listed
    if way in _HOOKED and family not in CONVERTED[major]:
        return _NO_CONVERTER
    return Status("exact")


def cells(kind: Kind, major: int = TL_MAJOR) -> list[tuple[str, str]]:
    """Every (family, way) of one kind."""
    return [(family, way) for way in WAYS[major] for family in FAMILIES if status(family, way, major).kind == kind]


_SIGNS = {"exact": "✓", "as wrapped": "✓", "refused": "refused", "absent": "-"}


def table() -> Iterator[str]:
    """The support table as lines of Markdown, reasons as numbered notes below it."""
    columns = [(major, way) for major in sorted(WAYS) for way in WAYS[major]]
    short = {"hooked": "Hooked", "folded": "folded", "bridge": "Bridge", "compatible": "compat."}
    notes: list[str] = []

    def cell(family: str, major: int, way: str) -> str:
        found = status(family, way, major)
        if not found.reason or found == _NO_CONVERTER:
            return _SIGNS[found.kind]
        if found.reason not in notes:
            notes.append(found.reason)
        return f"{_SIGNS[found.kind]} [{notes.index(found.reason) + 1}]"

    yield "| family | " + " | ".join(f"{major}.x {short[way]}" for major, way in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for family in FAMILIES:
        yield f"| {family} | " + " | ".join(cell(family, major, way) for major, way in columns) + " |"
    yield ""
    yield "✓: the last state gives the model's own probability and every state that of an independent float64 readout."
    yield "✓ with a note: of the model as TransformerLens has it, whose probabilities are not Hugging Face's."
    yield "refused: `ig_lens` raises `UnsupportedModelError`. -: TransformerLens cannot load or run it this way."
    yield ""
    yield from (f"[{number}] {note}." for number, note in enumerate(notes, start=1))


if __name__ == "__main__":
    print("\n".join(table()))
