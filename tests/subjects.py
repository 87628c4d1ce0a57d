"""The models that the contract tests call: one for each way into TransformerLens that the installed version must have.

`KINDS` names them ("hooked", "bridge"); `subject(kind)` is shared by all tests and must come out of each as it went in;
`fresh(kind)` is the test's own to break. `speaking(...)` is one with a tokenizer of words w00 ... w49 whose ids are the
numbers in the words (two digits, so that no special token is found inside another word).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.families import FAMILIES
from tests.oracles import Head, lens_head
from tests.versions import APIS

KINDS = tuple(kind for kind in ("hooked", "bridge") if kind in APIS)
each_kind = pytest.mark.parametrize("kind", KINDS)
one_kind = pytest.mark.parametrize("kind", KINDS[-1:])  # for what no way into TransformerLens could change
N_LAYERS, D_MODEL, D_VOCAB = 3, 32, 50

LENGTHS = (6, 3, 4, 1)
ROWS = tuple(torch.tensor(row) for row in ([3, 14, 15, 9, 26, 5], [40, 7, 31], [11, 2, 22, 8], [19]))
"""Prompts of different lengths, without the pad token (4)."""


@dataclass(frozen=True)
class Subject:
    """A tiny model and the float64 head that was copied out of it before TransformerLens touched it."""

    model: Any
    head: Head


def fresh(kind: str) -> Subject:
    """A model of one's own: `HookedTransformer` with LayerNorm, or a Llama-like `TransformerBridge` (RMSNorm)."""
    if kind == "hooked":
        model = models.hooked()
        return Subject(model, lens_head(model))
    llama = FAMILIES["Llama"]
    hf_model = llama.build()
    head = llama.read_head(hf_model)
    bridge = models.bridge(hf_model)
    bridge(torch.tensor([[3]]))  # at its first run a bridge wires itself with hooks of its own
    return Subject(bridge, head)


@functools.cache
def _shared(kind: str) -> tuple[Subject, float]:
    made = fresh(kind)
    return made, _weight(made.model)


def _weight(model: Any) -> float:
    return sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())


def subject(kind: str) -> Subject:
    """The shared model of a kind."""
    made, weight = _shared(kind)
    assert _weight(made.model) == weight, "a test before this one changed the shared model"
    return made


def tiny(kind: str = KINDS[0], **settings: Any) -> Any:
    """A model with settings of `HookedTransformerConfig`, as a `HookedTransformer` or a bridge without a Hugging Face model."""
    model = models.hooked(**settings) if kind == "hooked" else models.native(**settings)
    model(torch.tensor([[3]]))
    return model


def word_level(size: int = D_VOCAB) -> Any:
    """The words w00, w01, ... between spaces, one token each; w01 is the unknown word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"w{i:02}": i for i in range(size)}, unk_token="w01"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def saved(inner: Any, folder: Path, bos: int = 2, eos: int = 3, pad: int = 4) -> Any:
    """A tokenizer that lies in a folder: TransformerLens loads it anew from its `name_or_path`, so the folder must stay."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    special = {name: inner.id_to_token(i) for name, i in (("bos_token", bos), ("eos_token", eos), ("pad_token", pad))}
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=inner.id_to_token(1), **special).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def speaking(kind: str, folder: Path, side: str = "right", tokenizer: Any = None, **special: int) -> Any:
    """A model with a tokenizer, of words unless another is given; token 1 is the unknown word.

    `special` are the ids of bos, eos and pad (2, 3 and 4).
    """
    inner = word_level() if tokenizer is None else tokenizer
    tokenizer = saved(inner, folder, **special)
    tokenizer.padding_side = side
    d_vocab = max(D_VOCAB, inner.get_vocab_size())
    if kind == "bridge":
        llama = FAMILIES["Llama"]
        sized = dataclasses.replace(llama, settings={**llama.settings, "vocab_size": d_vocab})
        bridge = models.bridge(sized.build(), tokenizer=tokenizer)
        bridge(torch.tensor([[3]]))
        return bridge
    model = models.hooked(d_vocab=d_vocab)
    model.set_tokenizer(tokenizer, default_padding_side=side)
    return model


def cached(model: Any, tokens: torch.Tensor, **settings: Any) -> Any:
    """The cache of a run without gradients."""
    with torch.no_grad():
        return model.run_with_cache(tokens, **settings)[1]


def residual_names(n_layers: int = N_LAYERS) -> list[str]:
    """The activations that hold the states between blocks."""
    return [f"blocks.{i}.hook_resid_pre" for i in range(n_layers)] + [f"blocks.{n_layers - 1}.hook_resid_post"]


def states_of(cache: Any, n_layers: int = N_LAYERS) -> torch.Tensor:
    """All states between blocks, `[state, batch, pos, d_model]`."""
    return torch.stack([cache[name] for name in residual_names(n_layers)])


def padded(side: str, filler: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """`ROWS` as one tensor filled up on a side, and its attention mask."""
    width = max(LENGTHS)
    tokens, mask = torch.full((len(ROWS), width), filler), torch.zeros(len(ROWS), width, dtype=torch.long)
    for i, row in enumerate(ROWS):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask


def words(ids: Any) -> str:
    """Token ids as the words that stand for them."""
    return " ".join(f"w{int(i):02}" for i in ids)
