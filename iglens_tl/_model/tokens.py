"""Prompts as token ids with a padding mask, and token ids as text."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from iglens_tl._checks import shorten
from iglens_tl._model.host import Host, architecture


@dataclass(frozen=True)
class Prompts:
    """Token ids and which of them are real.

    Args:
        tokens: `[batch, seq]` int64 on the CPU.
        mask: False on padding.
        padding: how the mask came about: "none", "given", "added" (strings or lists of unequal length, filled up on the
            right) or "inferred" (from the tokenizer's pad token).
    """

    tokens: Int[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]
    padding: str

    @property
    def attention_mask(self) -> Tensor | None:
        """What to hand to the model: nothing where nothing is padded."""
        return None if bool(self.mask.all()) else self.mask.long()


def prompts_of(
    host: Host, input: Any, prepend_bos: bool | None = None, attention_mask: Any = None, to_run: bool = True
) -> Prompts:
    """Read `input` (string, strings, ids, tensor of ids) as prompts, to run them or (`to_run=False`) to go with a cache.

    Strings are tokenised one by one through the model and filled up on the right, so padding never depends on the
    tokenizer's pad token or side; those that go with a cache are laid out as the model did when it made the cache.

    Raises:
        TypeError, ValueError: for anything else, for ids outside the vocabulary, prompts without tokens, and prompts
            longer than the model's positions.
    """
    strings = isinstance(input, str) or (
        isinstance(input, Sequence) and len(input) > 0 and all(isinstance(item, str) for item in input)
    )
    if strings:
        if attention_mask is not None:
            raise ValueError("attention_mask goes with token ids; strings bring their own padding. Leave it out.")
        texts: list[str] = [input] if isinstance(input, str) else list(input)
        rows = [_encode(host, text, prepend_bos) for text in texts]
        prompts = _fill_up(rows, host) if to_run else _as_the_model_pads(rows, host, texts, prepend_bos)
    else:
        if prepend_bos is not None:
            raise ValueError("prepend_bos applies to strings; token ids are used as they are. Leave it out.")
        prompts = _of_ids(host, input, attention_mask, to_run)
    _check(host, prompts, to_run)
    _warn_double_bos(host, prompts)
    return prompts


def _encode(host: Host, text: str, prepend_bos: bool | None) -> Tensor:
    if host.tokenizer is None:
        raise ValueError(f"the model has no tokenizer, so it cannot read the string {text!r}; give token ids instead.")
    return host.model.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0].cpu().long()


def _fill_up(rows: Sequence[Tensor], host: Host) -> Prompts:
    longest = max(len(row) for row in rows)
    pad = getattr(host.tokenizer, "pad_token_id", None)
    filler = pad if isinstance(pad, int) and 0 <= pad < host.d_vocab else 0
    tokens = torch.full((len(rows), longest), filler, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    mask = torch.arange(longest)[None, :] < torch.tensor([len(row) for row in rows])[:, None]
    return Prompts(tokens, mask, "none" if bool(mask.all()) else "added")


def _as_the_model_pads(rows: Sequence[Tensor], host: Host, texts: list[str], prepend_bos: bool | None) -> Prompts:
    """Prompts where the model's own tokenisation of the whole batch has them, which pads left or right."""
    filled = _fill_up(rows, host)
    if filled.padding == "none":
        return filled
    whole = host.model.to_tokens(texts, prepend_bos=prepend_bos, truncate=False).cpu().long()
    sides = {"right": filled.mask, "left": filled.mask.flip(1)}
    first = str(getattr(host.tokenizer, "padding_side", "right"))
    for side in sorted(sides, key=lambda side: side != first):
        if whole.shape == filled.tokens.shape and torch.equal(whole[sides[side]], torch.cat(list(rows))):
            return Prompts(whole, sides[side], "added")
    raise ValueError(
        "the strings do not tell where the cache has which token: the model tokenises them otherwise as a batch than one by "
        "one. Pass the token ids that the cache was made with, and attention_mask=."
    )


def _of_ids(host: Host, input: Any, attention_mask: Any, to_run: bool) -> Prompts:
    if isinstance(input, Tensor):
        ids = input.detach().cpu()
    else:
        rows = _rows(input)
        if rows is not None:
            if attention_mask is not None and len({len(row) for row in rows}) > 1:
                raise ValueError("attention_mask needs prompts of one length; lists of unequal length bring their own.")
            if len({len(row) for row in rows}) > 1:
                if not to_run:
                    raise ValueError(
                        "lists of unequal length do not say on which side the cache is padded: pass the token ids that it was "
                        "made with as one tensor, and attention_mask=."
                    )
                return _fill_up(rows, host)
            ids = torch.stack(rows)
        else:
            ids = torch.as_tensor(input)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token ids must be whole numbers, got a tensor of {ids.dtype}.")
    ids = ids.long()
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2:
        raise ValueError(f"token ids must have shape [pos] or [batch, pos], got {tuple(ids.shape)}.")
    if attention_mask is not None:
        return Prompts(ids, given_mask(attention_mask, tuple(ids.shape)), "given")
    mask = _inferred_mask(host, ids) if ids.numel() else torch.ones_like(ids, dtype=torch.bool)
    return Prompts(ids, mask, "none" if bool(mask.all()) else "inferred")


def _rows(input: Any) -> list[Tensor] | None:
    """Lists of ids (or of 1-D tensors) as rows; None for what is better read as one array."""
    if not isinstance(input, Sequence) or isinstance(input, (str, bytes)):
        if hasattr(input, "__array__"):
            return None
        raise TypeError(f"input must be a string, a list of strings, or token ids; got {type(input).__name__}.")
    if len(input) == 0:
        raise ValueError("the input holds no tokens: give at least one prompt with at least one token.")
    kinds = {_is_row(item) for item in input}
    if kinds == {False}:
        if any(isinstance(item, (bool, float, str, bytes)) for item in input):
            raise TypeError("input must be all strings or all whole-number token ids, not a mixture.")
        return [torch.as_tensor([int(item) for item in input])]
    if kinds != {True}:
        raise TypeError("input must be a list of ids or a list of lists of ids, not a mixture.")
    rows = [torch.as_tensor(row) for row in input]
    if any(row.ndim != 1 or (len(row) and row.is_floating_point()) for row in rows):
        raise TypeError("every prompt must be a flat list of whole-number token ids.")
    return [row.cpu().long() for row in rows]


def _is_row(item: Any) -> bool:
    """A sequence or array of ids, not a single one."""
    return getattr(item, "ndim", 0) > 0 or (isinstance(item, Sequence) and not isinstance(item, (str, bytes)))


def given_mask(attention_mask: Any, shape: tuple[int, ...], whose: str = "the tokens") -> Tensor:
    """An attention mask as booleans `[batch, seq]`, checked against the shape of what it masks."""
    mask = torch.as_tensor(attention_mask).detach().cpu()
    if mask.ndim == 1:
        mask = mask[None]
    if tuple(mask.shape) != shape:
        raise ValueError(f"attention_mask must have the shape of {whose}, {shape}; got {tuple(mask.shape)}.")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 0 (padding) and 1 (real token) only.")
    return mask.bool()


def _inferred_mask(host: Host, ids: Tensor) -> Tensor:
    """Padding as far as ids tell: runs of the pad token at the ends of a row.

    Where the pad token is also BOS or EOS, the shortest run in the batch is taken for real tokens: padding to the longest
    prompt leaves at least one row without any.
    """
    tokenizer = host.tokenizer
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return torch.ones_like(ids, dtype=torch.bool)
    shared = pad in (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None))
    is_pad = ids == pad
    leading, trailing = is_pad.long().cumprod(1).sum(1), is_pad.flip(1).long().cumprod(1).sum(1)
    if shared:
        leading, trailing = leading - leading.min(), trailing - trailing.min()
    place = torch.arange(ids.shape[1])[None, :]
    return (place >= leading[:, None]) & (place < ids.shape[1] - trailing[:, None])


def _warn_double_bos(host: Host, prompts: Prompts) -> None:
    bos = getattr(host.tokenizer, "bos_token_id", None)
    rows = zip(prompts.tokens, prompts.mask, strict=True)
    twice = [i for i, (row, real) in enumerate(rows) if bos is not None and row[real][:2].tolist() == [bos, bos]]
    if twice:
        warnings.warn(
            f"prompt {shorten(twice)} begins with two BOS tokens (id {bos}), which changes its probabilities: the text or "
            "its chat template already holds one. One is enough: prepend_bos=False for strings.",
            stacklevel=_depth_outside(sys._getframe()),  # pyright: ignore[reportPrivateUsage] -- `inspect.stack()` reads every file
        )


def _depth_outside(frame: FrameType) -> int:
    """The `stacklevel` of a warning raised in `frame` that is to point at the caller of this package."""
    depth = 1
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__", ""))):
        frame, depth = frame.f_back, depth + 1
    return depth


TRANSPARENT = ("iglens_tl", "contextlib", "jaxtyping")
"""Packages whose frames stand between the caller and a warning of ours: the package itself and what decorates it."""


def _is_ours(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in TRANSPARENT)


def _check(host: Host, prompts: Prompts, to_run: bool) -> None:
    tokens, mask = prompts.tokens, prompts.mask
    if tokens.numel() == 0:
        raise ValueError(f"the input holds no tokens (shape {tuple(tokens.shape)}): give at least one token a prompt.")
    empty = (~mask.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"prompt {shorten(empty)} has no tokens (nothing but padding).")
    wrong = tokens[(tokens < 0) | (tokens >= host.d_vocab)].unique().tolist()
    if wrong:
        raise ValueError(f"token ids must lie in [0, {host.d_vocab}), the model's vocabulary; got {shorten(wrong)}.")
    starts = mask.long().argmax(1)
    if to_run and not host.skips_left_padding and bool((starts > 0).any()):
        raise ValueError(
            f"prompt {shorten((starts > 0).nonzero()[:, 0].tolist())} is padded on the left, and the recurrence of "
            f"{architecture(host.model)} runs over padding: its probabilities would not be the prompt's own. Pad on the right, "
            "or pass the prompts as lists."
        )
    if to_run and host.max_tokens is not None and tokens.shape[1] > host.max_tokens:
        raise ValueError(
            f"the prompt has {tokens.shape[1]} tokens and the model takes {host.max_tokens} (n_ctx); shorten it."
        )


def token_text(host: Host, token: int) -> str:
    """A token id as text: its string, bytes that are no character as `<0xE6>`, an id without a string as `<id 45>`."""
    tokenizer = host.tokenizer
    if tokenizer is None:
        return f"<id {token}>"
    try:
        piece = tokenizer.convert_ids_to_tokens(token)
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    except (IndexError, OverflowError, TypeError, ValueError):
        return f"<id {token}>"
    if piece is None or (text == "" and not piece):
        return f"<id {token}>"
    if "\ufffd" in text:
        return _bytes_text(str(piece)) or text
    if str(piece).startswith("\u2581") and not text.startswith(" "):
        text = " " + text  # SentencePiece's decode drops the space that the token stands for
    return text or str(piece)


def _bytes_text(piece: str) -> str | None:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return piece
    table = _byte_of_character()
    if not all(character in table for character in piece):
        return None
    raw = bytes(table[character] for character in piece)
    text = raw.decode("utf-8", errors="backslashreplace")
    return re.sub(r"\\x([0-9a-f]{2})", lambda match: f"<0x{match.group(1).upper()}>", text)


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; the inverse of that table (GPT-2's)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_texts(host: Host, ids: Tensor) -> tuple[tuple[str, ...], ...]:
    """Token ids `[batch, seq]` as text."""
    known = {token: token_text(host, token) for token in ids.unique().tolist()}
    return tuple(tuple(known[token] for token in row) for row in ids.tolist())
