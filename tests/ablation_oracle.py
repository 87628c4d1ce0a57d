"""Ablations of a plain Hugging Face Llama with torch hooks, written out by hand. Nothing here comes from the package.

`Plain` runs a batch in which every row is the same prompt and has an edit of its own: at one block, one component and some
positions, its output becomes a given vector. Outputs are those that a Llama adds to its stream: of `layer` (less its
input), of `self_attn`, of `mlp`; of a head, the head's part of what goes into `o_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Edit:
    """In this row, the component's output at these positions becomes `value` (`[width]` or `[positions, width]`)."""

    component: str
    layer: int
    positions: Sequence[int]
    value: Tensor
    head: int = 0


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def with_first(out: Any, tensor: Tensor) -> Any:
    return (tensor, *out[1:]) if isinstance(out, tuple) else tensor


class Plain:
    """A Llama of Hugging Face's own, with eager attention."""

    def __init__(self, hf_model: Any) -> None:
        self.model = hf_model.eval()
        self.layers = hf_model.model.layers
        self.known: dict[Any, Tensor] = {}
        self.d_head = hf_model.config.hidden_size // hf_model.config.num_attention_heads

    def prob(self, tokens: Sequence[int], target: int, edits: Sequence[Sequence[Edit]], at: int = -1) -> Tensor:
        """The target's probability at a position under each list of edits, `[row]` in float64."""
        z = self._run(tokens, edits)[:, at].double()
        return (z[:, target] - z.logsumexp(-1)).exp()

    def _run(self, tokens: Sequence[int], edits: Sequence[Sequence[Edit]]) -> Tensor:
        wanted = {(edit.component, edit.layer) for row in edits for edit in row}
        with torch.no_grad(), ExitStack() as stack:
            for component, layer in wanted:
                handle = self._hook(component, layer, edits)
                stack.callback(handle.remove)
            return self.model(torch.tensor([list(tokens)] * len(edits)), use_cache=False).logits

    def _hook(self, component: str, layer: int, edits: Sequence[Sequence[Edit]]) -> Any:
        rows = [(i, e) for i, row in enumerate(edits) for e in row if (e.component, e.layer) == (component, layer)]
        block = self.layers[layer]

        def changed(tensor: Tensor, before: Tensor | None, columns: Callable[[Edit], slice]) -> Tensor:
            tensor = tensor.clone()
            for i, edit in rows:
                at, value = list(edit.positions), edit.value.to(tensor.dtype)
                tensor[i, at, columns(edit)] = value if before is None else before[i, at] + value
            return tensor

        every = slice(None)
        if component == "head":
            width = self.d_head
            return block.self_attn.o_proj.register_forward_pre_hook(
                lambda m, args: (changed(args[0], None, lambda e: slice(e.head * width, (e.head + 1) * width)),)
            )
        if component == "block":
            return block.register_forward_hook(
                lambda m, args, out: with_first(out, changed(first(out), args[0], lambda e: every))
            )
        module = block.self_attn if component == "attn" else block.mlp
        return module.register_forward_hook(
            lambda m, args, out: with_first(out, changed(first(out), None, lambda e: every))
        )

    def outputs(self, tokens: Sequence[int], component: str) -> Tensor:
        """What the component puts out in every block at each position, `[layer, pos, width]`; all heads side by side."""
        key = (tuple(tokens), component)
        if key not in self.known:
            found: list[Tensor] = []
            with torch.no_grad(), ExitStack() as stack:
                for block in self.layers:
                    stack.callback(self._listen(block, component, found).remove)
                self.model(torch.tensor([list(tokens)]), use_cache=False)
            self.known[key] = torch.stack([output[0] for output in found])
        return self.known[key]

    def _listen(self, block: Any, component: str, found: list[Tensor]) -> Any:
        if component == "head":
            return block.self_attn.o_proj.register_forward_pre_hook(lambda m, args: found.append(args[0]))
        if component == "block":
            return block.register_forward_hook(lambda m, args, out: found.append(first(out) - args[0]))
        module = block.self_attn if component == "attn" else block.mlp
        return module.register_forward_hook(lambda m, args, out: found.append(first(out)))

    def mean(self, prompts: Sequence[Sequence[int]], component: str) -> Tensor:
        """The mean over all positions of all prompts but each prompt's first, `[layer, width]` in float64."""
        return torch.cat([self.outputs(prompt, component)[:, 1:].double() for prompt in prompts], dim=1).mean(1)
