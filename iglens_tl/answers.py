"""A given answer of several tokens, attributed by the chain rule.

    log P(answer | prompt) = sum_i log p(answer_i | prompt, answer_1 ... answer_{i-1})

Each answer token's log-probability is attributed at the position that predicts it, so its credits [nats] sum to its
log-probability at the last state less that at the baseline, and the credits of all tokens, added layer by layer, sum to
that of the whole answer. One forward pass over prompt and answer does for all.

What it does not claim: a layer's credits for two tokens are of two positions, so their sum is a ledger, not a
mechanism; and the first states are far from any answer (log p of -100 and less), so that credits in nats lie early where
credits in probability lie late.

Example::

    from iglens_tl import attribute_answer

    result = attribute_answer(model, "The capital of Vietnam is", " Ho Chi Minh City")
    print(result.log_prob)      # log P(answer | prompt), in nats
    print(result)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from iglens_tl._checks import plain, shorten
from iglens_tl._model.host import Host, host_of
from iglens_tl._model.tokens import prompts_of, token_text
from iglens_tl._request import Lens
from iglens_tl.answer_result import AnswerResult
from iglens_tl.attribution import ig_lens


def attribute_answer(
    model: Any,
    prompt: Any,
    answer: Any,
    *,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> AnswerResult:
    """Attribute log P(answer | prompt) to the segments of the residual stream, token by token and summed.

    Args:
        model: a `HookedTransformer` or a `TransformerBridge`.
        prompt: one prompt: a string, or token ids `[pos]` or `[1, pos]`.
        answer: the answer: a string, tokenised by itself and put behind the prompt's tokens (a leading space counts), or
            token ids.
        layers, incl_mid, baseline, estimator, n_steps, lens, dtype, prepend_bos, max_memory: as in `ig_lens`.

    Returns:
        An `AnswerResult`: `tokens`, an `IGLensResult` with one entry of the `pos` axis for each answer token (metric
        "log_prob"); `attribution` `[segment]`, the credits summed over tokens, and `log_prob`, all in nats.

    Raises:
        ValueError, TypeError: for several prompts, an answer without tokens, ids outside the vocabulary, and all that
            `ig_lens` refuses.
    """
    host = host_of(model)
    before = _prompt_ids(host, prompt, prepend_bos)
    after = _answer_ids(host, answer)
    result = ig_lens(
        model,
        [*before, *after[:-1]],
        targets=torch.tensor([after]),
        positions=range(len(before) - 1, len(before) - 1 + len(after)),
        attention_mask=[1] * (len(before) + len(after) - 1),  # a pad token inside is no padding
        metric="log_prob",
        layers=layers,
        incl_mid=incl_mid,
        baseline=baseline,
        estimator=estimator,
        n_steps=n_steps,
        lens=lens,
        dtype=dtype,
        max_memory=max_memory,
    )
    settings = {**result.settings, "prepend_bos": prepend_bos, "prompt_tokens": len(before)}
    text = answer if isinstance(answer, str) else "".join(token_text(host, token) for token in after)
    return AnswerResult(replace(result, answer=text, settings=settings))


def _prompt_ids(host: Host, prompt: Any, prepend_bos: bool | None) -> list[int]:
    prompts = prompts_of(host, prompt, prepend_bos)
    if len(prompts.tokens) != 1:
        raise ValueError(
            f"attribute_answer takes one prompt a call, got {len(prompts.tokens)}: answers differ in length. Call it once for "
            "each."
        )
    return prompts.tokens[0][prompts.mask[0]].tolist()


def _answer_ids(host: Host, answer: Any) -> list[int]:
    if isinstance(answer, str):
        if host.tokenizer is None:
            raise ValueError(f"the model has no tokenizer, so the answer {answer!r} has no tokens; give token ids.")
        ids: Any = host.model.to_tokens(answer, prepend_bos=False)[0].tolist() if answer else []
    else:
        ids = plain(answer.detach() if isinstance(answer, Tensor) else answer)
        ids = ids[0] if isinstance(ids, Sequence) and len(ids) == 1 and isinstance(ids[0], Sequence) else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ValueError(f"answer must be a string or a list of token ids with at least one token; got {answer!r}.")
    numbers: list[Any] = list(ids)
    if any(isinstance(token, bool) or not isinstance(token, int) for token in numbers):
        raise TypeError(f"answer as a list must hold whole-number token ids; got {shorten(map(repr, numbers))}.")
    wrong = [token for token in numbers if not 0 <= token < host.d_vocab_out]
    if wrong:
        raise ValueError(
            f"answer: token ids must lie in [0, {host.d_vocab_out}), the width of the logits; got {shorten(wrong)}."
        )
    return numbers
