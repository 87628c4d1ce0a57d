"""What makes two models the same model, as far as can be told quickly: configuration, dtype, and a sample of the weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from iglens_tl._model.host import Host, hooked_points, provenance

SAMPLE = 256
"""Elements of each parameter that are looked at, evenly spaced."""

_VERSIONS = ("iglens_tl", "transformer_lens", "transformers", "torch")


def model_identity(host: Host) -> dict[str, Any]:
    """Name, architecture, dtype, flags, the points that carry hooks, and a digest of the weights; without versions."""
    about = {name: value for name, value in provenance(host).items() if name not in _VERSIONS}
    return {**about, "hooks": hooked_points(host.model), "weights": weights_digest(host.model)}


def weights_digest(model: torch.nn.Module) -> str:
    """A training step, a merged adapter and folding change it; a single weight changed by hand may not."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample = flat[:: -(-len(flat) // SAMPLE)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
