"""Models that are no decoder-only language models: `ig_lens` must refuse each of them, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.models import bridge, redraw, same_randomness
from tests.versions import TL_MAJOR


@dataclass(frozen=True)
class Stranger:
    """A model to be refused: under which versions it can be had, and what the message must say."""

    name: str
    build: Callable[[], Any]
    majors: tuple[int, ...]
    pattern: str


def _hugging_face(model_class: str, config_class: str, settings: dict[str, Any]) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        with same_randomness():
            model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
        return bridge(redraw(model))

    return build


def _hooked_encoder() -> Any:
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    with same_randomness():
        config = HookedTransformerConfig(
            n_layers=2,
            d_model=32,
            d_head=8,
            n_heads=4,
            d_mlp=64,
            n_ctx=32,
            d_vocab=50,
            act_fn="gelu",
            attention_dir="bidirectional",
            normalization_type="LN",
            device="cpu",
            seed=0,
        )
        return HookedEncoder(config).eval()


def _hooked_encoder_decoder() -> Any:
    from transformer_lens import HookedEncoderDecoder, HookedTransformerConfig

    with same_randomness():
        config = HookedTransformerConfig(
            n_layers=2,
            d_model=32,
            d_head=8,
            n_heads=4,
            d_mlp=64,
            n_ctx=32,
            d_vocab=50,
            act_fn="relu",
            attention_dir="bidirectional",
            positional_embedding_type="relative_positional_bias",
            relative_attention_max_distance=8,
            relative_attention_num_buckets=4,
            normalization_type="RMS",
            use_attn_scale=False,
            decoder_start_token_id=0,
            tie_word_embeddings=True,
            device="cpu",
            seed=0,
        )
        return HookedEncoderDecoder(config).eval()


def _both_ways() -> Any:
    """A HookedTransformer whose positions see the ones that follow: it has no next token to predict."""
    from tests.models import hooked

    return hooked(attention_dir="bidirectional")


_BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 4,
}
_T5 = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 4,
}

_MODERN_BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 4,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}

_ENCODER = "encoder"
_ALL = [
    Stranger("BERT", _hugging_face("BertForMaskedLM", "BertConfig", _BERT), (3, 4), _ENCODER),
    Stranger(
        "BERT as a decoder",  # a head of its own between the last block and the unembedding
        _hugging_face("BertLMHeadModel", "BertConfig", {**_BERT, "is_decoder": True}),
        (3, 4),
        "mlm_head|encoder",
    ),
    Stranger(
        "ModernBERT as a decoder",
        _hugging_face("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", _MODERN_BERT),
        (3, 4),
        "prediction_head",
    ),
    Stranger("ViT", _hugging_face("ViTForImageClassification", "ViTConfig", _VIT), (3, 4), "vocabulary"),
    Stranger("RoBERTa", _hugging_face("RobertaForMaskedLM", "RobertaConfig", _BERT), (4,), _ENCODER),
    Stranger("T5", _hugging_face("T5ForConditionalGeneration", "T5Config", _T5), (3, 4), _ENCODER),
    Stranger("BART", _hugging_face("BartForConditionalGeneration", "BartConfig", _BART), (3, 4), _ENCODER),
    Stranger("HookedEncoder", _hooked_encoder, (2, 3), _ENCODER),
    Stranger("HookedEncoderDecoder", _hooked_encoder_decoder, (2, 3), _ENCODER),
    Stranger("bidirectional HookedTransformer", _both_ways, (2, 3), _ENCODER),
]
STRANGERS = {stranger.name: stranger for stranger in _ALL if TL_MAJOR in stranger.majors}
