"""What components put out on reference text: means and donors for mean and resample ablation, computed once.

    mean_l  = mean over reference positions r of the output of the component in block l at r
    donor_l = that output at one reference position

The reference positions are all real positions of the reference prompts but each prompt's first: padding is not read, and
the first position (BOS, or whatever stands there) is an attention sink whose outputs are up to a hundred times larger
than all others and would dominate every mean. Of the positions a seeded sample is kept as donors.

What it does not claim: a mean or a donor is no natural output *here*; it takes away what the component says of this prompt
and leaves what it says of most.

Example::

    from iglens_tl import ablate_layers, reference_updates

    reference = reference_updates(model, sentences, components=("block", "attn"))
    ablate_layers(model, "The capital of France is", targets=" Paris", mode="mean", reference=reference)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iglens_tl import _files
from iglens_tl._checks import UnsupportedModelError, one_of, shorten, whole_number
from iglens_tl._draws import generator_of
from iglens_tl._model.ablating import COMPONENTS, lacking, names_of, output_of
from iglens_tl._model.continuing import CleanRun, Tally, record_run
from iglens_tl._model.host import Host, host_of, provenance
from iglens_tl._model.identity import weights_digest
from iglens_tl._model.tokens import Prompts, prompts_of
from iglens_tl._trajectory import ordinary_tensors


@dataclass(frozen=True, eq=False)
class ReferenceUpdates:
    """Means and donors of components' outputs over reference positions; see `reference_updates`.

    Attributes:
        means: by component, `[layer, d_model]` (heads: `[layer, head, d_head]`), float64; NaN where a block lacks it.
        donors: by component, `[layer, donor, ...]`, float32.
        places: `[donor, 2]`, the prompt and the position that each donor is of.
        n_prompts, n_positions: what the means are over.
        settings: seed and what was asked for.
        provenance: versions and model, with a digest of a sample of its weights.
    """

    means: Mapping[str, Tensor]
    donors: Mapping[str, Tensor]
    places: Tensor
    n_prompts: int
    n_positions: int
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def __repr__(self) -> str:
        return (
            f"ReferenceUpdates({', '.join(self.means)}; mean over {self.n_positions} positions of {self.n_prompts} prompts, "
            f"{len(self.places)} donors; {self.provenance.get('model')})"
        )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file."""
        tensors = {f"mean {name}": tensor for name, tensor in self.means.items()}
        tensors |= {f"donors {name}": tensor for name, tensor in self.donors.items()}
        names = ("n_prompts", "n_positions", "settings", "provenance")
        _files.write(
            path, type(self).__name__, {**tensors, "places": self.places}, {n: getattr(self, n) for n in names}
        )

    @classmethod
    def load(cls, path: str | Path) -> ReferenceUpdates:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError, ValueError: where there is no such file, or it holds something else.
        """
        tensors, plain = _files.read(path, cls.__name__)

        def of(kind: str) -> dict[str, Tensor]:
            return {name: tensors[f"{kind} {name}"] for name in COMPONENTS if f"{kind} {name}" in tensors}

        return cls(of("mean"), of("donors"), tensors["places"], **plain)


@ordinary_tensors()
def reference_updates(
    model: Any,
    input: Any,
    *,
    components: Sequence[str] | None = None,
    max_donors: int = 256,
    seed: int = 0,
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
) -> ReferenceUpdates:
    """Run reference prompts once and keep what mean and resample ablation draw from.

    Args:
        model: as in `ig_lens`.
        input: the reference prompts: strings, or token ids. Each prompt's first token and all padding are left out.
        components: of `"block"`, `"attn"`, `"mlp"`, `"head"`; None for all that the model exposes.
        max_donors: how many positions, drawn with `seed`, are kept for resampling (all where there are fewer).
        seed: of that draw.
        attention_mask, prepend_bos: as in `ig_lens`.

    Returns:
        A `ReferenceUpdates`, on the CPU: `[layer, ...]` means, `[layer, donor, ...]` donors.

    Raises:
        UnsupportedModelError: where no block has a component that is asked for.
        ValueError: where no prompt has a second token.
    """
    host = host_of(model)
    prompts = prompts_of(host, input, prepend_bos, attention_mask)
    return gather_updates(host, prompts, components, max_donors, seed, Tally())


def gather_updates(
    host: Host, prompts: Prompts, components: Sequence[str] | None, max_donors: int, seed: int, tally: Tally
) -> ReferenceUpdates:
    """`reference_updates` of prompts at hand, counting what is run."""
    layers = range(host.n_layers)
    chosen = [component for component in COMPONENTS if len(lacking(host, component, layers)) < host.n_layers]
    if components is not None:
        components = [components] if isinstance(components, str) else list(components)
        if not components:
            raise ValueError(f"components must name some of {', '.join(COMPONENTS)}, or be None for all; got none.")
        chosen = [one_of("components", component, COMPONENTS) for component in components]
    have = {name: [layer for layer in layers if layer not in lacking(host, name, layers)] for name in chosen}
    absent = [name for name, found in have.items() if not found]
    if absent or not chosen:
        raise UnsupportedModelError(f"no block of {host.name} exposes {shorten(absent) or 'a component'}.")
    rows = [row[real] for row, real in zip(prompts.tokens, prompts.mask, strict=True)]
    places = torch.tensor([(i, at) for i, row in enumerate(rows) for at in range(1, len(row))], dtype=torch.int64)
    if not len(places):
        raise ValueError(
            "the reference prompts hold no position beside each prompt's first, which is left out (an attention sink); give "
            "prompts of two tokens and more."
        )
    kept = _sample(len(places), whole_number("max_donors", max_donors, 1), seed)
    sums: dict[str, Tensor] = {}
    donors: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for i, row in enumerate(rows):
        run = record_run(host, row, [name for key in chosen for name in names_of(key, have[key])], tally)
        own = places[kept][places[kept][:, 0] == i][:, 1]
        for name in chosen:
            outputs = _outputs(run, name, have[name])
            total = outputs[:, 1:].double().sum(1)
            sums[name] = sums[name] + total if name in sums else total
            donors[name].append(outputs[:, own].float())
    return ReferenceUpdates(
        means={name: total / len(places) for name, total in sums.items()},
        donors={name: torch.cat(parts, dim=1) for name, parts in donors.items()},
        places=places[kept],
        n_prompts=len(rows),
        n_positions=len(places),
        settings={"components": chosen, "max_donors": max_donors, "seed": seed, "first_positions": "left out"},
        provenance={**provenance(host), "weights": weights_digest(host.model)},
    )


def _sample(n: int, most: int, seed: int) -> Tensor:
    if n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=generator_of(seed, "donors"))[:most].sort().values


def _outputs(run: CleanRun, component: str, have: Sequence[int]) -> Tensor:
    """`[layer, seq, ...]` on the CPU, NaN where a block lacks the component."""
    found = {layer: output_of(run, component, layer).cpu() for layer in have}
    nothing = torch.full_like(found[have[0]], float("nan"))
    return torch.stack([found.get(layer, nothing) for layer in range(run.host.n_layers)])
