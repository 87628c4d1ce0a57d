"""A greedy answer and where each of its tokens was produced: prompt -> answer -> token-by-layer map.

The answer's tokens are the argmax of the model's own logits, one forward pass of the whole sequence a token, until an
end-of-text token or `max_new_tokens`. One more forward pass over prompt and answer then attributes every token at the
position that predicts it (see `iglens_tl.attribution` for what a credit is, its sign and its unit). Inside
`with model.hooks(...)` it is the hooked run that is generated and attributed.

What it does not claim: that the answer is the model's best (greedy decoding is one path), nor that a layer's credit for
one token says how it worked on the next; `attribute_answer` sums a given answer by the chain rule.

Example::

    from iglens_tl import generate_and_attribute
    from iglens_tl.demo import demo_model

    result = generate_and_attribute(demo_model(), "What is the capital of Vietnam?", chat=True)
    print(result.answer)
    print(result.to_text(levels=True))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from iglens_tl._checks import ESTIMATORS, METRICS, memory_size, one_of, shorten, whole_number
from iglens_tl._model.greedy import Generated, chat_ids, greedy, stop_ids, template_of, text_of
from iglens_tl._model.host import Host, host_of
from iglens_tl._model.tokens import prompts_of, token_text
from iglens_tl._request import Lens, Request, settle
from iglens_tl.attribution import ig_lens
from iglens_tl.results import IGLensResult
from iglens_tl.targets import TOP

MAX_NEW_TOKENS = 80

# How far the value of a token in the run that is attributed may be from its value in the step that chose it: a
# probability outright, the other metrics relative to max(1, value). The same numbers in sequences of two lengths
# differ by 1e-6 in float32 (matrix products in another order) and by up to a unit in the last place in half precision.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1


def generate_and_attribute(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    chat: bool = False,
    stop_tokens: Sequence[str | int] | None = None,
    layers: Any = None,
    incl_mid: bool = False,
    baseline: Any = "embed",
    metric: str = "prob",
    estimator: str = "prediction_aware",
    n_steps: int = 1,
    lens: Lens | None = None,
    dtype: torch.dtype | None = None,
    prepend_bos: bool | None = None,
    max_memory: int | float | str | None = None,
) -> IGLensResult:
    """Let the model answer greedily, then attribute every token of the answer to the segments that produced it.

    Args:
        model: a `HookedTransformer` or a `TransformerBridge`; inside `with model.hooks(...)` it is the hooked run that
            is generated and attributed. A hook must then do the same at every length of the input: name positions
            counted from the start.
        prompt: one prompt: a string, or token ids `[pos]` or `[1, pos]`.
        max_new_tokens: the longest answer.
        chat: put the prompt into the tokenizer's chat template, as the user's turn.
        stop_tokens: ids, or strings of one token each, that end the answer ([] for none). None for every token that the
            tokenizer or the model's generation settings know as the end of a text or of a turn.
        layers, incl_mid, baseline, metric, estimator, n_steps, lens, dtype, prepend_bos, max_memory: as in `ig_lens`.

    Returns:
        An `IGLensResult` with one entry of the `pos` axis for each new token, the end-of-text token included where it
        was produced, read at the position that predicts it; `answer` is the new text without that token, and
        `settings["generation"]` says how it came about.

    Raises:
        ValueError, TypeError: for arguments that cannot be met (more than one prompt, no chat template, prompt and
            answer longer than the model takes, ...), and where a token's probability in the attributed run is not that
            of the run that generated it.
    """
    one_of("metric", metric, tuple(METRICS))
    one_of("estimator", estimator, ESTIMATORS)
    whole_number("n_steps", n_steps, 1)
    whole_number("max_new_tokens", max_new_tokens, 1)
    memory_size(max_memory)
    host = host_of(model)
    ids = _prompt_ids(host, prompt, chat, prepend_bos)
    _check_length(host, len(ids), max_new_tokens)
    stops = stop_ids(host, stop_tokens)
    shared: dict[str, Any] = {
        "layers": layers, "incl_mid": incl_mid, "baseline": baseline, "lens": lens, "dtype": dtype,
    }  # fmt: skip
    settle(Request(model, ids, TOP, **shared))  # refuses what cannot be attributed before anything is generated
    new = greedy(host, ids, max_new_tokens, stops, metric)
    result = ig_lens(
        model,
        [*ids, *new.ids[:-1]],
        targets=torch.tensor([new.ids]),
        positions=range(len(ids) - 1, len(ids) - 1 + len(new.ids)),
        attention_mask=[1] * (len(ids) + len(new.ids) - 1),  # a generated pad token is no padding
        metric=metric,
        estimator=estimator,
        n_steps=n_steps,
        max_memory=max_memory,
        **shared,
    )
    _check_same_run(host, new, result)
    generation = {
        "prompt_tokens": len(ids), "max_new_tokens": max_new_tokens, "chat": chat,
        "stop_tokens": sorted(stops), "ended_by": "stop token" if new.stopped else "max_new_tokens",
    }  # fmt: skip
    answer = text_of(host, new.ids[:-1] if new.stopped else new.ids)
    return replace(
        result, answer=answer, settings={**result.settings, "prepend_bos": prepend_bos, "generation": generation}
    )


def has_chat_template(model: Any) -> bool:
    """Whether the model's tokenizer has a chat template."""
    return template_of(host_of(model)) is not None


def chat_tokens(model: Any, prompt: str) -> list[int]:
    """The prompt as the user's turn in the tokenizer's chat template, ready for the answer.

    Raises:
        ValueError: for an empty prompt, and where there is no template or it cannot take a single user's turn.
    """
    if not prompt.strip():
        raise ValueError(f"the prompt is empty ({prompt!r}); the chat template needs the user's words.")
    return chat_ids(host_of(model), prompt)


def _prompt_ids(host: Host, prompt: Any, chat: bool, prepend_bos: bool | None) -> list[int]:
    """The ids of the one prompt, padding left out."""
    if chat:
        if not isinstance(prompt, str):
            raise TypeError(
                f"chat=True takes the user's words as one string, got {type(prompt).__name__}; token ids and lists go "
                "with chat=False."
            )
        if prepend_bos is not None:
            raise ValueError("prepend_bos does not go with chat=True: the template writes its own BOS. Leave it out.")
        prompt = chat_tokens(host.model, prompt)
    prompts = prompts_of(host, prompt, prepend_bos)
    if len(prompts.tokens) != 1:
        raise ValueError(
            f"generate_and_attribute takes one prompt a call, got {len(prompts.tokens)}, and answers differ in length. Call "
            "it once for each."
        )
    return prompts.tokens[0][prompts.mask[0]].tolist()


def _check_length(host: Host, prompt: int, new: int) -> None:
    longest = host.max_tokens
    needed = prompt + new - 1  # the last new token is never an input
    if longest is not None and needed > longest:
        raise ValueError(
            f"the prompt has {prompt} tokens and max_new_tokens={new} makes an input of up to {needed}, but the model "
            f"takes {longest} (n_ctx): set max_new_tokens to at most {longest - prompt + 1}, or shorten the prompt."
        )


def _check_same_run(host: Host, new: Generated, result: IGLensResult) -> None:
    """The run over the whole answer must be the run that chose its tokens."""
    assert result.model_value is not None
    chosen = torch.tensor(new.values, dtype=torch.float64)
    again = result.model_value[0]
    half = any(parameter.dtype.itemsize < 4 for parameter in host.model.parameters())
    scale = 1.0 if result.metric == "prob" else chosen.abs().clamp(min=1)
    off = ~((again - chosen).abs() <= (_HALF_TOLERANCE if half else _TOLERANCE) * scale)
    if not bool(off.any()):
        return
    wrong = [
        f"{token_text(host, new.ids[i])!r} {new.values[i]:.5g} when chosen, {float(again[i]):.5g} in the whole run"
        for i in off.nonzero()[:, 0].tolist()
    ]
    raise ValueError(
        f"the run over prompt and answer is not the run that generated it ({result.metric} of {shorten(wrong, 3)}): "
        "something depends on the length of the input or on chance. Let hooks name positions counted from the start "
        "(not -1), and draw no random numbers."
    )
