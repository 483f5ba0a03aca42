"""Small models of many kinds, for the matrix: ``MODELS[name]()`` -> (model, args, kwargs).

``transformers`` architectures from small configurations, and convolutional, diffusion-style, graph,
audio and recurrent models written out here and in ``other_models``. Each returns its own loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSemanticSegmentation,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    CLIPConfig,
    CLIPModel,
)

from other_models import OTHERS

__all__ = ["MODELS"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

VOCAB, BATCH, LENGTH = 96, 4, 32
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
ENCODER_DECODER = {
    **TEXT,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
T5 = {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5["decoder_start_token_id"] = 1
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_labels": 5,
}
SPEECH = {
    **TEXT,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
}


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def text_inputs() -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_inputs() -> dict[str, Any]:
    tokens, mask = ids(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def pair_inputs() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids(LENGTH // 2)}


def image_inputs(size: int = 32) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(5, (BATCH,)),
    }


def wave_inputs() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 640), "labels": torch.randint(3, VOCAB, (BATCH, 6))}


def built(
    head: Any, kind: str, inputs: Callable[[], dict[str, Any]], options: dict[str, Any]
) -> Example:
    """A model of an architecture from the head's class, with its inputs."""
    config = AutoConfig.for_model(kind, **options)
    # As a user does for a fixed task; else the first call writes it into the configuration.
    if "num_labels" in options and head is AutoModelForImageClassification:
        config.problem_type = "single_label_classification"
    return head.from_config(config), (), inputs()


def clip() -> Example:
    text = {**TEXT, "projection_dim": 16}
    config = CLIPConfig(text_config=text, vision_config=dict(VISION), projection_dim=16)
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(BATCH, 3, 32, 32)}
    return CLIPModel(config), (), {**inputs, "return_loss": True}


def whisper() -> Example:
    options = {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 32}
    options["max_target_positions"] = 64
    config = AutoConfig.for_model("whisper", **options)
    inputs = {"input_features": torch.randn(BATCH, 16, 64), "labels": ids(16)}
    return AutoModelForSpeechSeq2Seq.from_config(config), (), inputs


def spectrogram() -> Example:
    options = {**VISION, "num_mel_bins": 32, "max_length": 64}
    config = AutoConfig.for_model("audio-spectrogram-transformer", **options)
    config.problem_type = "single_label_classification"
    inputs = {"input_values": torch.randn(BATCH, 64, 32), "labels": torch.randint(5, (BATCH,))}
    return AutoModelForAudioClassification.from_config(config), (), inputs


def segformer() -> Example:
    config = AutoConfig.for_model(
        "segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    )
    inputs = {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(5, (BATCH, 32, 32)),
    }
    return AutoModelForSemanticSegmentation.from_config(config), (), inputs


# ------------------------------------------------------------------ what differs from the default

CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "biogpt": {},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 16},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "qwen2_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 32},
    "gemma": GROUPED,
    "gemma2": {**GROUPED, "sliding_window": 16},
    "gemma3_text": {**GROUPED, "sliding_window": 16},
    "phi": {},
    "phi3": {**GROUPED, "original_max_position_embeddings": 64},
    "stablelm": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "starcoder2": GROUPED,
    "granite": GROUPED,
    "glm": GROUPED,
    "nemotron": GROUPED,
    "persimmon": {},
    "smollm3": GROUPED,
    "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "mamba": {"state_size": 4, "time_step_rank": 4},
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "mpnet": {},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2},
    "roformer": {"embedding_size": 32},
    "convbert": {"embedding_size": 32},
    "squeezebert": {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2},
    "fnet": {"tpu_short_seq_length": LENGTH},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "ernie": {},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
}
PAIRS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "longt5": {**T5, "local_radius": 7},
    "bart": ENCODER_DECODER,
    "mbart": ENCODER_DECODER,
    "pegasus": ENCODER_DECODER,
    "marian": ENCODER_DECODER,
    "blenderbot": ENCODER_DECODER,
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": VISION,
    "deit": {**VISION, "architectures": ["DeiTForImageClassification"]},
    "beit": VISION,
    "dinov2": {**VISION, "mlp_ratio": 2},
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": 5,
    },
    "convnext": {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
    "convnextv2": {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
    "regnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "groups_width": 8,
        "num_labels": 5,
    },
    "mobilenet_v2": {"depth_multiplier": 0.35, "num_labels": 5},
    "poolformer": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "num_labels": 5,
    },
}
WAVES: dict[str, dict[str, Any]] = {"wav2vec2": {}, "hubert": {}}


def _table() -> dict[str, Callable[[], Example]]:
    found: dict[str, Callable[[], Example]] = {}
    for kinds, head, inputs, common in (
        (CAUSAL, AutoModelForCausalLM, text_inputs, TEXT),
        (MASKED, AutoModelForMaskedLM, masked_inputs, TEXT),
        (PAIRS, AutoModelForSeq2SeqLM, pair_inputs, {}),
        (IMAGES, AutoModelForImageClassification, image_inputs, {}),
        (WAVES, AutoModelForCTC, wave_inputs, SPEECH),
    ):
        for kind, options in kinds.items():
            found[kind] = functools.partial(built, head, kind, inputs, {**common, **options})
    found["segformer"] = segformer
    found["audio-spectrogram-transformer"] = spectrogram
    found["whisper"] = whisper
    found["clip"] = clip
    return {**found, **OTHERS}


MODELS = _table()
