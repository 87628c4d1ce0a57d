"""Greedy decoding by the model's own forward pass: chat prompts as ids, end-of-text tokens, the argmax loop.

The loop runs the whole sequence at every step and keeps no key-value cache. TransformerLens's bridges ignore theirs
under some versions of transformers (the text then degenerates silently), and a hook meets the positions that it meets
in the run that is attributed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from iglens_tl._core.levels import levels_of_logits
from iglens_tl._model.answers import token_id
from iglens_tl._model.host import Host
from iglens_tl._model.tokens import token_text

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>")
"""Tokens that end an answer of common chat models without being the tokenizer's `eos_token`."""


@dataclass(frozen=True)
class Generated:
    """A greedy continuation.

    Args:
        ids: the new tokens, the end-of-text token included where it was produced.
        values: what each step's own logits gave to the token it chose, in the metric asked for.
        stopped: whether the last id is an end-of-text token.
    """

    ids: list[int]
    values: list[float]
    stopped: bool


def template_of(host: Host) -> Any:
    """The tokenizer's chat template, None where there is none."""
    return getattr(host.tokenizer, "chat_template", None) or None


def chat_ids(host: Host, prompt: str) -> list[int]:
    """The prompt as a user's turn in the tokenizer's chat template, ready for the answer.

    The template writes the special tokens itself, so none are added when its text is tokenised.

    Raises:
        ValueError: where there is no template, or it cannot be filled in.
    """
    if template_of(host) is None:
        raise ValueError(
            f"chat=True needs a tokenizer with a chat template, and that of {host.name} has none. Leave chat=False and "
            "write the prompt as the model is to see it."
        )
    turns = [{"role": "user", "content": prompt}]
    try:
        text = host.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise ValueError(
            f"the chat template of {host.name} cannot take a single user's turn ({type(error).__name__}: {error}). "
            "Leave chat=False and write the prompt as the model is to see it."
        ) from error
    ids: list[int] = host.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def stop_ids(host: Host, stop_tokens: Sequence[str | int] | None) -> frozenset[int]:
    """The tokens that end an answer: those given, or all that tokenizer and generation settings know as an end."""
    if stop_tokens is not None:
        return frozenset(token_id(host, token, "stop_tokens") for token in stop_tokens)
    settings = getattr(getattr(host.model, "original_model", None), "generation_config", None)
    found = [
        *_as_ids(getattr(host.tokenizer, "eos_token_id", None)),
        *_as_ids(getattr(settings, "eos_token_id", None)),
        *(known for name in _END_OF_TURN for known in _id_of_special(host.tokenizer, name)),
    ]
    return frozenset(found_id for found_id in found if 0 <= found_id < host.d_vocab_out)


def _as_ids(eos: Any) -> list[int]:
    return [] if eos is None else [int(eos)] if isinstance(eos, int) else [int(one) for one in eos]


def _id_of_special(tokenizer: Any, name: str) -> list[int]:
    """The id of a token by its name; none where the tokenizer would give its unknown token."""
    if tokenizer is None:
        return []
    found = tokenizer.convert_tokens_to_ids(name)
    return [found] if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == name else []


def greedy(host: Host, prompt: Sequence[int], max_new_tokens: int, stops: frozenset[int], metric: str) -> Generated:
    """Append the most probable token until an end-of-text token or `max_new_tokens`; inside hooks, of the hooked run.

    Raises:
        ValueError: where the logits hold no number to take the largest of.
    """
    tokens = torch.tensor([list(prompt)], device=host.device)
    ids: list[int] = []
    values: list[float] = []
    # `disable=None`: silent where stderr is no terminal. `delay`: a bar for what takes long, none for what does not.
    with tqdm(
        total=max_new_tokens, desc="generating", unit="token", file=sys.stderr, disable=None, delay=2, leave=False
    ) as bar:
        while len(ids) < max_new_tokens and not (ids and ids[-1] in stops):
            token, value = _step(host, tokens, metric)
            ids.append(token)
            values.append(value)
            tokens = torch.cat([tokens, torch.tensor([[token]], device=tokens.device)], dim=1)
            bar.update()
    return Generated(ids, values, ids[-1] in stops)


def _step(host: Host, tokens: Tensor, metric: str) -> tuple[int, float]:
    """The most probable next token and its value under `metric`."""
    with torch.no_grad():
        last = host.model(tokens, return_type="logits")[:, -1]
        if bool(last.isnan().any()):
            raise ValueError(
                f"the model's logits after {tokens.shape[1]} tokens are NaN, so there is no most probable token. Look at "
                "the run that made them (an overflow in half precision, a hook that divides by zero)."
            )
        top = last.argmax(-1, keepdim=True)
        levels = levels_of_logits(last if last.dtype == torch.float64 else last.float(), [top])
    return int(top), float(levels.value(metric))


def text_of(host: Host, ids: Sequence[int]) -> str:
    """Token ids as one text, exactly: special tokens stay, spaces are not tidied up."""
    tokenizer = host.tokenizer
    if tokenizer is None or any(one >= len(tokenizer) for one in ids):
        return "".join(token_text(host, one) for one in ids)
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
