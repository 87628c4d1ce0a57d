"""The direction in the stream that writes a target's logit, with the final norm's scale frozen.

The logit of `y` at the last state `h` is `((h - mean) / s * w + b) . u + b_U`, with `s` the norm's scale at `h` and
`u` the column `y` of `W_U` (for a difference, less the incorrect one's). With `s` kept as it is this is linear in `h`:
`h . d + norm_bias + unembed_bias`, and any parts of `h` share it by their product with `d`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from iglens_tl._core.levels import Levels, levels_of_logits
from iglens_tl._model.head import Transform, norm_formula, transform_of, unembedding
from iglens_tl._model.host import Host


@dataclass(frozen=True)
class Direction:
    """All float64, on the CPU.

    Args:
        vector: `d`, `[rows, d_model]`.
        norm_bias, unembed_bias: what the norm's bias and `b_U` add to the logit, `[rows]`; None where there is none.
        capped: whether the model squeezes its logits afterwards (a soft-cap): then this is the logit before that.
        factor: the scale that the model puts on its logits (1 for most), in all of the above.
    """

    vector: Float[Tensor, "rows d_model"]
    norm_bias: Float[Tensor, "rows"] | None
    unembed_bias: Float[Tensor, "rows"] | None
    capped: bool
    factor: float

    def share(self, parts: Float[Tensor, "part rows d_model"], rows: slice = slice(None)) -> Float[Tensor, "part rows"]:
        """What parts of the last state add to the logit."""
        return torch.einsum("prm,rm->pr", parts.double().cpu(), self.vector[rows])

    def logit(self, logits: Tensor, groups: Sequence[Tensor]) -> Float[Tensor, "rows"]:
        """The logit that this explains, of rows of logits before the model's output transform."""
        levels: Levels = levels_of_logits(logits, [ids.to(logits.device) for ids in groups])
        return self.factor * levels.value("logit").double().cpu()


def direction_of(host: Host, last: Float[Tensor, "rows d_model"], groups: Sequence[Tensor]) -> Direction:
    """The direction of the targets `groups` (each `[rows, 1]`) at the last states.

    Raises:
        UnsupportedModelError: where the final norm or the unembedding cannot be written out (quantised, wrapped).
    """
    return directions_of(host)(last, groups)


def directions_of(host: Host) -> Callable[[Tensor, Sequence[Tensor]], Direction]:
    """`direction_of` for some rows after others: the norm's formula is found once."""
    through = _through_norm(host)
    return lambda last, groups: through(last, *_columns(host, groups))


def _columns(host: Host, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """What writes the targets after the final norm `[rows, d_model]`, and their bias."""
    weight, bias = unembedding(host)
    columns = [ids[:, 0].to(weight.device) for ids in groups]
    u = _difference([weight[:, ids].T.double().cpu() for ids in columns])
    return u, None if bias is None else _difference([bias[ids].double().cpu() for ids in columns])


def mean_direction_of(host: Host, last: Float[Tensor, "rows d_model"]) -> Direction:
    """The direction that writes the mean logit over the vocabulary: what centring takes off every target's."""
    weight, bias = unembedding(host)
    u = weight.mean(-1, dtype=torch.float64).cpu().expand(len(last), -1)
    b_u = None if bias is None else bias.double().mean().cpu().expand(len(last))
    return _through_norm(host)(last, u, b_u)


def _through_norm(host: Host) -> Callable[[Tensor, Tensor, Tensor | None], Direction]:
    """What writes along `u` after the final norm, before it, with the norm's scale frozen at `last`."""
    factor, capped = _scale_of(transform_of(host))
    norm = norm_formula(host)
    wide = None if norm is None else replace(norm, weight=_wide(norm.weight), bias=_wide(norm.bias))

    def through(last: Tensor, u: Tensor, b_u: Tensor | None) -> Direction:
        vector, of_norm = factor * u, None
        if wide is not None:
            of_norm = None if wide.bias is None else vector @ wide.bias
            vector = vector if wide.weight is None else vector * wide.weight
            if wide.centred:
                vector = vector - vector.mean(-1, keepdim=True)
            vector = vector / wide.scale(last.double().cpu())
        return Direction(vector, of_norm, None if b_u is None else factor * b_u, capped, factor)

    return through


def _difference(sides: Sequence[Tensor]) -> Tensor:
    return sides[0] if len(sides) == 1 else sides[0] - sides[1]


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double().cpu()


def _scale_of(transform: Transform | None) -> tuple[float, bool]:
    """The factor of an output transform that only scales; 1 and True for one that does more."""
    if transform is None:
        return 1.0, False
    probe = torch.tensor([[-64.0, -1.0, 0.0, 1.0, 64.0]])
    image = transform(probe.clone())
    factor = float(image[0, 3])
    linear = torch.allclose(image, factor * probe, rtol=1e-6, atol=0)
    return (factor, False) if linear else (1.0, True)
