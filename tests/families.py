"""The zoo of tiny Hugging Face language models, and what each version of TransformerLens makes of them.

`FAMILIES` is the whole list; `head` says, by hand, how a family reads its last residual stream. What each version of
TransformerLens makes of them is in `tests.support`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.models import redraw, same_randomness
from tests.oracles import Head, HeadSpec, hugging_face_head


@dataclass(frozen=True)
class Family:
    """One tiny Hugging Face model: its class, the settings of its configuration, where its head is."""

    name: str
    model_class: str
    head: HeadSpec
    settings: dict[str, Any]
    config_class: str = ""
    architecture: str = ""  # TransformerLens's name for the class, where it is another
    hooked: dict[str, Any] | None = None  # HookedTransformerConfig, where TransformerLens knows it by name only
    std: float = 0.2
    finish: Callable[[Any], None] | None = None

    def build(self) -> Any:
        """The redrawn model, in eval mode, on the CPU, in float32."""
        import transformers

        config_class = self.config_class or self.model_class.replace("ForCausalLM", "Config")
        with same_randomness():
            config = getattr(transformers, config_class)(**self.settings)
            config.architectures = [self.model_class]
            config._attn_implementation = "eager"  # what the bridge switches to; others leave out Gemma-2's soft-cap
            model = getattr(transformers, self.model_class)(config)
        redraw(model, std=self.std)
        if self.finish is not None:
            self.finish(model)
        return model

    def read_head(self, hf_model: Any) -> Head:
        """The float64 head of the untouched model."""
        return hugging_face_head(hf_model, self.head)


def _bias_on_head(model: Any) -> None:
    """Give a model an unembedding bias, which its configuration cannot ask for."""
    generator = torch.Generator().manual_seed(1)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(50, generator=generator))


_LN_F = HeadSpec("layer", "transformer.ln_f", "layer_norm_epsilon")
_RMS = HeadSpec("rms", "model.norm", "rms_norm_eps")
_RMS_LAST = HeadSpec("rms", "model.final_layernorm", "rms_norm_eps")
_GEMMA = HeadSpec("rms+1", "model.norm", "rms_norm_eps")
_GEMMA_CAPPED = HeadSpec("rms+1", "model.norm", "rms_norm_eps", cap="final_logit_softcapping")
_MAMBA = HeadSpec("rms", "backbone.norm_f", "layer_norm_epsilon")
_COHERE = HeadSpec("layer", "model.norm", "layer_norm_eps", multiply="logit_scale")
_GRANITE = HeadSpec("rms", "model.norm", "rms_norm_eps", divide="logits_scaling")
_OPT = HeadSpec("layer", "model.decoder.final_layer_norm", project="model.decoder.project_out")
_OPT_POST_NORM = HeadSpec("none", project="model.decoder.project_out")

_IDS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 4}
_GPT: dict[str, Any] = dict(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, **_IDS)
_GPT_ROTARY: dict[str, Any] = dict(**_GPT, rotary_dim=4)
_BASE: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    **_IDS,
)
_GROUPED: dict[str, Any] = dict(**_BASE, num_key_value_heads=2)
_HEADED: dict[str, Any] = dict(**_GROUPED, head_dim=8)
_SLIDING: dict[str, Any] = dict(**_HEADED, query_pre_attn_scalar=8, sliding_window=4)
_GPT_NEO: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    max_position_embeddings=64,
    **_IDS,
)
_OPT_BASE: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    **_IDS,
)
_FALCON: dict[str, Any] = dict(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, **_IDS)
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK: dict[str, Any] = dict(
    **_BASE,
    num_key_value_heads=4,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
_QWEN3_NEXT: dict[str, Any] = dict(
    **_HEADED,
    **_EXPERTS,
    shared_expert_intermediate_size=24,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)
_SSM: dict[str, Any] = dict(vocab_size=50, hidden_size=32, state_size=8, num_hidden_layers=3, **_IDS)
_FALCON_H1: dict[str, Any] = dict(
    **_GROUPED,
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_chunk_size=8,
    lm_head_multiplier=2.0,
)
_JAMBA: dict[str, Any] = dict(
    **_GROUPED,
    num_experts=2,
    use_mamba_kernels=False,
    mamba_d_state=8,
    attn_layer_period=3,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
)
_BAMBA: dict[str, Any] = dict(
    **_GROUPED, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
)
_ZAMBA2: dict[str, Any] = dict(
    **_BASE,
    mamba_d_state=8,
    mamba_headdim=8,
    mamba_ngroups=1,
    n_mamba_heads=8,
    chunk_size=8,
    layers_block_type=["mamba", "hybrid", "mamba"],
    num_mem_blocks=1,
    use_mem_rope=True,
)

# HookedTransformerConfig of families that TransformerLens's converter knows by the names of published models only.
_HOOKED_GATED: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 32,
    "d_head": 8,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_mlp": 64,
    "d_vocab": 50,
    "gated_mlp": True,
    "act_fn": "silu",
    "normalization_type": "RMS",
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 8,
    "rotary_base": 10000,
}
_HOOKED_GEMMA: dict[str, Any] = {**_HOOKED_GATED, "act_fn": "gelu_pytorch_tanh", "eps": 1e-6}
_HOOKED_GEMMA_2: dict[str, Any] = dict(
    **_HOOKED_GEMMA,
    use_normalization_before_and_after=True,
    attn_scores_soft_cap=50.0,
    output_logits_soft_cap=3.0,
    use_local_attn=True,
    window_size=4,
    attn_types=["local", "global", "local"],
)
_HOOKED_GEMMA_3: dict[str, Any] = dict(
    **{**_HOOKED_GEMMA, "rotary_base": 1000000},
    rotary_base_local=10000,
    use_normalization_before_and_after=True,
    use_qk_norm=True,
    use_local_attn=True,
    window_size=4,
    attn_types=["local", "local", "local"],
)
_HOOKED_PHI: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 32,
    "d_head": 8,
    "n_heads": 4,
    "d_mlp": 64,
    "d_vocab": 50,
    "act_fn": "gelu_new",
    "normalization_type": "LN",
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "rotary_base": 10000,
    "parallel_attn_mlp": True,
}
_HOOKED_OLMO: dict[str, Any] = {**_HOOKED_GATED, "normalization_type": "LN", "final_rms": False, "eps": 1e-5}
_HOOKED_OLMO.pop("n_key_value_heads")
_HOOKED_OLMO_2: dict[str, Any] = {**_HOOKED_GATED, "eps": 1e-5}
_HOOKED_OLMO_2.pop("n_key_value_heads")

_ALL = [
    Family("GPT-2", "GPT2LMHeadModel", _LN_F, dict(**_GPT, n_ctx=64), "GPT2Config"),
    Family("GPT-J", "GPTJForCausalLM", _LN_F, _GPT_ROTARY),
    Family("GPT-Neo", "GPTNeoForCausalLM", _LN_F, _GPT_NEO),
    Family(
        "GPT-NeoX",
        "GPTNeoXForCausalLM",
        HeadSpec("layer", "gpt_neox.final_layer_norm", "layer_norm_eps"),
        dict(**_BASE, rotary_pct=0.5),
    ),
    Family(
        "GPT-NeoX, sequential",
        "GPTNeoXForCausalLM",
        HeadSpec("layer", "gpt_neox.final_layer_norm", "layer_norm_eps"),
        dict(**_BASE, rotary_pct=0.5, use_parallel_residual=False),
    ),
    Family("GPT-BigCode", "GPTBigCodeForCausalLM", _LN_F, _GPT),
    Family("CodeGen", "CodeGenForCausalLM", _LN_F, _GPT_ROTARY),
    Family("OPT", "OPTForCausalLM", _OPT, dict(**_OPT_BASE, word_embed_proj_dim=32)),
    Family("OPT, projected", "OPTForCausalLM", _OPT, dict(**_OPT_BASE, word_embed_proj_dim=16)),
    Family(
        "OPT, post-norm, projected",
        "OPTForCausalLM",
        _OPT_POST_NORM,
        dict(**_OPT_BASE, word_embed_proj_dim=16, do_layer_norm_before=False),
    ),
    Family("BLOOM", "BloomForCausalLM", _LN_F, dict(vocab_size=50, hidden_size=32, n_layer=3, n_head=4, **_IDS)),
    Family(
        "MPT",
        "MptForCausalLM",
        HeadSpec("layer", "transformer.norm_f", "layer_norm_epsilon"),
        dict(vocab_size=50, d_model=32, n_layers=3, n_heads=4, max_seq_len=64, expansion_ratio=2, **_IDS),
    ),
    Family("Falcon", "FalconForCausalLM", _LN_F, _FALCON),
    Family(
        "Falcon, new decoder",
        "FalconForCausalLM",
        _LN_F,
        dict(**_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    ),
    Family(
        "Phi",
        "PhiForCausalLM",
        HeadSpec("layer", "model.final_layernorm", "layer_norm_eps"),
        dict(**_BASE, partial_rotary_factor=0.5),
        hooked=_HOOKED_PHI,
    ),
    Family("Phi-3", "Phi3ForCausalLM", _RMS, _GROUPED),
    Family(
        "Phi-MoE",
        "PhimoeForCausalLM",
        HeadSpec("layer", "model.norm", "rms_norm_eps"),
        dict(**_GROUPED, num_local_experts=4, lm_head_bias=True),
        architecture="PhiMoEForCausalLM",
    ),
    Family("Llama", "LlamaForCausalLM", _RMS, _GROUPED),
    Family("Llama, tied", "LlamaForCausalLM", _RMS, dict(**_GROUPED, tie_word_embeddings=True)),
    Family("Llama, head with a bias", "LlamaForCausalLM", _RMS, _GROUPED, finish=_bias_on_head),
    Family("Mistral", "MistralForCausalLM", _RMS, dict(**_GROUPED, sliding_window=4)),
    Family("Mixtral", "MixtralForCausalLM", _RMS, dict(**_GROUPED, num_local_experts=4)),
    Family("Qwen2", "Qwen2ForCausalLM", _RMS, _GROUPED),
    Family("Qwen2-MoE", "Qwen2MoeForCausalLM", _RMS, dict(**_GROUPED, **_EXPERTS, shared_expert_intermediate_size=24)),
    Family("Qwen3", "Qwen3ForCausalLM", _RMS, _HEADED),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", _RMS, dict(**_HEADED, **_EXPERTS)),
    Family("Qwen3-Next", "Qwen3NextForCausalLM", _GEMMA, _QWEN3_NEXT),
    Family("Gemma", "GemmaForCausalLM", _GEMMA, _HEADED, hooked=_HOOKED_GEMMA, std=0.1),
    Family(
        "Gemma-2",
        "Gemma2ForCausalLM",
        _GEMMA_CAPPED,
        dict(**_SLIDING, final_logit_softcapping=3.0),
        hooked=_HOOKED_GEMMA_2,
    ),
    Family("Gemma-3", "Gemma3ForCausalLM", _GEMMA, _SLIDING, "Gemma3TextConfig", hooked=_HOOKED_GEMMA_3, std=0.1),
    Family("VaultGemma", "VaultGemmaForCausalLM", _GEMMA_CAPPED, dict(**_SLIDING, final_logit_softcapping=3.0)),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        HeadSpec("rms+1", "model.final_norm", "rms_norm_eps", cap="logits_soft_cap"),
        dict(**_HEADED, attention_window_size=8, logits_soft_cap=3.0),
    ),
    Family("OLMo", "OlmoForCausalLM", HeadSpec("layer, plain"), _BASE, hooked=_HOOKED_OLMO),
    Family("OLMo-2", "Olmo2ForCausalLM", _RMS, _BASE, hooked=_HOOKED_OLMO_2),
    Family("OLMo-3", "Olmo3ForCausalLM", _RMS, dict(**_GROUPED, sliding_window=4)),
    Family("OLMoE", "OlmoeForCausalLM", _RMS, dict(**_GROUPED, num_experts=4, num_experts_per_tok=2)),
    Family("Cohere", "CohereForCausalLM", _COHERE, dict(**_GROUPED, logit_scale=2.0)),
    Family("Cohere-2", "Cohere2ForCausalLM", _COHERE, dict(**_GROUPED, logit_scale=2.0, sliding_window=4)),
    Family(
        "Granite",
        "GraniteForCausalLM",
        _GRANITE,
        dict(
            **_GROUPED, logits_scaling=0.5, embedding_multiplier=2.0, residual_multiplier=0.7, attention_multiplier=0.3
        ),
    ),
    Family(
        "Granite-MoE",
        "GraniteMoeForCausalLM",
        _GRANITE,
        dict(**_GROUPED, num_local_experts=4, logits_scaling=0.5, embedding_multiplier=2.0, residual_multiplier=0.7),
    ),
    Family("StableLM", "StableLmForCausalLM", HeadSpec("layer", "model.norm", "layer_norm_eps"), _GROUPED),
    Family("StarCoder2", "Starcoder2ForCausalLM", HeadSpec("layer", "model.norm", "norm_epsilon"), _GROUPED),
    Family("SmolLM3", "SmolLM3ForCausalLM", _RMS, _GROUPED),
    Family("GLM", "GlmForCausalLM", _RMS, _HEADED),
    Family("GLM-4", "Glm4ForCausalLM", _RMS, _HEADED),
    Family("DeepSeek-V2", "DeepseekV2ForCausalLM", _RMS, _DEEPSEEK),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", _RMS, _DEEPSEEK),
    Family("Nemotron", "NemotronForCausalLM", HeadSpec("layer+1", "model.norm", "norm_eps"), _HEADED),
    Family("EXAONE-4", "Exaone4ForCausalLM", _RMS, dict(**_HEADED, sliding_window=4)),
    Family("ERNIE-4.5", "Ernie4_5ForCausalLM", _RMS, _HEADED),
    Family("Apertus", "ApertusForCausalLM", _RMS, _GROUPED),
    Family("Arcee", "ArceeForCausalLM", _RMS, _GROUPED),
    Family("Seed-OSS", "SeedOssForCausalLM", _RMS, _HEADED),
    Family("HunYuan", "HunYuanDenseV1ForCausalLM", _RMS, _HEADED),
    Family(
        "GPT-OSS",
        "GptOssForCausalLM",
        _RMS,
        dict(**_HEADED, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    ),
    Family(
        "XGLM",
        "XGLMForCausalLM",
        HeadSpec("layer", "model.layer_norm"),
        dict(
            vocab_size=50, d_model=32, ffn_dim=64, num_layers=3, attention_heads=4, max_position_embeddings=64, **_IDS
        ),
    ),
    Family("Mamba", "MambaForCausalLM", _MAMBA, _SSM),
    Family("Mamba-2", "Mamba2ForCausalLM", _MAMBA, dict(**_SSM, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)),
    Family("Falcon-Mamba", "FalconMambaForCausalLM", _MAMBA, _SSM),
    Family(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        HeadSpec("rms", "model.final_layernorm", "rms_norm_eps", multiply="lm_head_multiplier"),
        _FALCON_H1,
    ),
    Family("Jamba", "JambaForCausalLM", _RMS_LAST, _JAMBA),
    Family("Bamba", "BambaForCausalLM", _RMS_LAST, _BAMBA),
    Family("Zamba2", "Zamba2ForCausalLM", _RMS_LAST, _ZAMBA2),
    Family(
        "RWKV",
        "RwkvForCausalLM",
        HeadSpec("layer", "rwkv.ln_out"),
        dict(vocab_size=50, hidden_size=32, num_hidden_layers=3, context_length=64, **_IDS),
    ),
    Family(
        "LFM2",
        "Lfm2ForCausalLM",
        HeadSpec("rms", "model.embedding_norm", "norm_eps"),
        dict(**_GROUPED, full_attn_idxs=[1]),
    ),
    Family(
        "GPT-1",
        "OpenAIGPTLMHeadModel",
        HeadSpec("none"),
        {k: v for k, v in _GPT.items() if k not in _IDS},
        "OpenAIGPTConfig",
    ),
]
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
