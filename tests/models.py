"""Tiny seeded models for the tests: nothing is downloaded, nothing needs a tokenizer, every parameter is redrawn.

Norm weights are far from one and biases far from nought, so that a skipped weight or bias shows.

- `hooked(**settings)`: a `HookedTransformer` (TransformerLens 2.x, 3.x); `HOOKED` names the settings that are swept.
- `native(**settings)`: a `TransformerBridge` without a Hugging Face model (3.x, 4.x); `NATIVE` likewise.
- `bridge(model)`, `compatible(bridge)`, `converted(model)`: a Hugging Face model (see `tests.families`) as a bridge, as
  a bridge in compatibility mode, as a `HookedTransformer` through TransformerLens's own converters.

Take Hugging Face logits *before* wrapping: the bridge replaces modules inside the model that it is given.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5]])
BATCH = torch.tensor([[3, 14, 15, 9, 26, 5], [2, 40, 7, 7, 31, 11]])


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Give the global random states back as they were: building a model draws from them, and seeds them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


# --- TransformerLens's own models --------------------------------------------------------------------------------

_SETTINGS: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 32,
    "d_head": 8,
    "n_heads": 4,
    "d_mlp": 64,
    "n_ctx": 32,
    "d_vocab": 50,
    "act_fn": "gelu",
    "normalization_type": "LN",
    "device": "cpu",
    "dtype": torch.float32,
}
_LLAMA_LIKE: dict[str, Any] = {
    "normalization_type": "RMS",
    "final_rms": True,
    "gated_mlp": True,
    "act_fn": "silu",
    "positional_embedding_type": "rotary",
    "n_key_value_heads": 2,
    "rotary_dim": 8,
}
_GEMMA_2_LIKE: dict[str, Any] = dict(
    **_LLAMA_LIKE, output_logits_soft_cap=3.0, attn_scores_soft_cap=5.0, use_normalization_before_and_after=True
)

HOOKED: dict[str, dict[str, Any]] = {
    "LN": {},
    "LN, final RMS": {"final_rms": True},
    "LNPre": {"normalization_type": "LNPre"},
    "LNPre, final RMS": {"normalization_type": "LNPre", "final_rms": True},
    "RMS": {"normalization_type": "RMS", "final_rms": True},
    "RMSPre": {"normalization_type": "RMSPre", "final_rms": True},
    "no norm": {"normalization_type": None, "scale": 0.003},  # a stream of norm 1000: its logits must stay readable
    "large eps": {"eps": 0.5},
    "attention only": {"attn_only": True},
    "parallel": {"parallel_attn_mlp": True},
    "grouped heads, rotary, gated MLP": _LLAMA_LIKE,
    "soft-cap": {**_LLAMA_LIKE, "output_logits_soft_cap": 3.0},
    "soft-cap 0": {"output_logits_soft_cap": 0.0},
    "post-norms and soft-caps, as Gemma-2": _GEMMA_2_LIKE,
    "narrow output vocabulary": {"d_vocab_out": 7},
    "shortformer positions": {"positional_embedding_type": "shortformer"},
    "ALiBi": {"positional_embedding_type": "alibi"},
    "one layer": {"n_layers": 1},
}

NATIVE: dict[str, dict[str, Any]] = {
    "LN": {},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS", "final_rms": True},
    "RMSPre": {"normalization_type": "RMSPre", "final_rms": True},
    "no norm": {"normalization_type": None},
    "attention only": {"attn_only": True},
    "parallel": {"parallel_attn_mlp": True},
    "soft-cap": {"output_logits_soft_cap": 3.0},
}


def hooked(seed: int = 0, scale: float = 1.0, **overrides: Any) -> Any:
    """A 3-layer, d_model 32, 50-word `HookedTransformer`; `scale` multiplies `W_U` (sharper softmax)."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    with same_randomness():
        model = HookedTransformer(HookedTransformerConfig(**{**_SETTINGS, "seed": seed, **overrides})).eval()
    _redraw_lens(model, seed)
    model.unembed.W_U.data *= scale
    return model


def native(seed: int = 0, **overrides: Any) -> Any:
    """The same as a `TransformerBridge` that TransformerLens builds by itself."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    with same_randomness():
        model = TransformerBridge.boot_native(TransformerBridgeConfig(**{**_SETTINGS, "seed": seed, **overrides}))
    return redraw(model.original_model, seed) and model.eval()


def _redraw_lens(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.2)
        if "ln" in name and name.endswith(".w"):
            parameter.data = 1 + 0.5 * torch.randn(parameter.shape, generator=generator)


def folded(model: Any) -> Any:
    """The `HookedTransformer` with norms folded and weights centred, as `from_pretrained` does by default.

    And leaves out what it leaves out: `process_weights_` itself would change a model whose norms stand behind its
    sublayers, that has an RMSNorm at the end, or a soft-cap (a shift of all logits is no shift behind a tanh).
    """
    cfg = model.cfg
    norms_in_front = cfg.original_architecture not in {"Olmo2ForCausalLM", "Olmo3ForCausalLM"}
    plain_positions = cfg.positional_embedding_type != "shortformer"
    model.process_weights_(
        fold_ln=cfg.normalization_type in {"LN", "RMS"} and norms_in_front and plain_positions,
        center_writing_weights=cfg.normalization_type in {"LN", "LNPre"} and not cfg.final_rms and plain_positions,
        center_unembed=not (cfg.output_logits_soft_cap or -1.0) > 0,
        refactor_factored_attn_matrices=False,
    )
    return model.eval()


# --- Hugging Face models -----------------------------------------------------------------------------------------


def redraw(hf_model: Any, seed: int = 0, std: float = 0.2) -> Any:
    """Redraw every parameter of a Hugging Face model in place, norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in hf_model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
        elif "norm" in name.lower() or "ln" in name.lower():
            centre = 1.0 if name.endswith("weight") else 0.0
            parameter.data = centre + 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return hf_model.eval()


def bridge(hf_model: Any, architecture: str = "", tokenizer: Any = None) -> Any:
    """Wrap a Hugging Face model (redrawn, in eval mode) in a `TransformerBridge` without touching any hub."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    with same_randomness():
        return build_bridge_from_module(
            hf_model,
            architecture or type(hf_model).__name__,
            hf_config=hf_model.config,
            tokenizer=tokenizer,
            dtype=torch.float32,
            device="cpu",
        )


def compatible(bridged: Any) -> Any:
    """The bridge in compatibility mode: norms folded and weights centred, as `HookedTransformer` has them."""
    with same_randomness():
        bridged.enable_compatibility_mode()
    return bridged


def converted(hf_model: Any, settings: dict[str, Any] | None = None) -> Any:
    """The model as a `HookedTransformer`, by TransformerLens's own converters, unfolded.

    `settings` replaces the configuration where TransformerLens finds it by the name of a published model alone.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig, loading_from_pretrained

    with tempfile.TemporaryDirectory(prefix="tiny_") as folder, same_randomness():
        if settings is None:
            hf_model.config.save_pretrained(folder)
            settings = loading_from_pretrained.convert_hf_model_config(str(Path(folder)))
        config = HookedTransformerConfig(
            **{
                **settings,
                "original_architecture": type(hf_model).__name__,
                "tokenizer_name": None,
                "device": "cpu",
                "dtype": torch.float32,
                "init_weights": False,
                "n_ctx": 64,
            }
        )
        weights = loading_from_pretrained.get_pretrained_state_dict(folder, config, hf_model=hf_model)
        model = HookedTransformer(config)
    model.load_state_dict(weights, strict=False)
    return model.eval()


def word_tokenizer(folder: Path, bos: int = 2, eos: int = 3, pad: int = 4, size: int = 50) -> Any:
    """A whitespace tokenizer over the words w0 ... w{size-1}; ids are the numbers in the words.

    Saved and loaded again, because TransformerLens loads a tokenizer anew from the folder in its `name_or_path`: the
    folder must stay.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=f"w{bos}", eos_token=f"w{eos}", pad_token=f"w{pad}", unk_token="w1"
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
