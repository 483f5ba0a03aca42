"""`transformers` models from small configurations with random weights; nothing is downloaded.

As in ``models``, every function returns ``(model, args, kwargs)`` in train mode at a size and
leaves the caller's random generator alone. The labels are among ``kwargs``, so ``.loss`` of the
output is the loss. Generation caches are off: a training step never reads them, and a cache among
the outputs keeps every key and value alive. Dropout keeps each model's own default: on in GPT-2,
BERT and T5 (0.1), off in Llama and ViT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from models import Example, Size

__all__ = [
    "HF_EXAMPLES",
    "bert_example",
    "gpt2_example",
    "hf_llama_example",
    "t5_example",
    "vit_example",
]


def _example(
    build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], seed: int
) -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train(), (), inputs()


def gpt2_example(size: Size = "bench", *, dropout: float = 0.1, seed: int = 0) -> Example:
    """GPT-2 on random tokens; dropout on residuals, embeddings and attention weights."""
    bench = size == "bench"
    batch, seq, vocab = (3, 256, 2048) if bench else (2, 64, 256)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=seq,
        n_embd=256 if bench else 64,
        n_layer=6 if bench else 4,
        n_head=8 if bench else 4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )

    def inputs() -> dict[str, Any]:
        ids = torch.randint(vocab, (batch, seq))
        return {"input_ids": ids, "labels": ids.clone()}

    def build() -> nn.Module:
        model = GPT2LMHeadModel(config)
        # Its class name tells transformers no loss; the warning about it cannot be traced.
        model.loss_type = "ForCausalLM"
        return model

    return _example(build, inputs, seed)


def hf_llama_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """Llama with grouped-query attention on random tokens."""
    bench = size == "bench"
    batch, seq, vocab = (4, 256, 2048) if bench else (2, 64, 256)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256 if bench else 64,
        intermediate_size=704 if bench else 176,
        num_hidden_layers=8 if bench else 4,
        num_attention_heads=8 if bench else 4,
        num_key_value_heads=4 if bench else 2,
        max_position_embeddings=seq,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )

    def inputs() -> dict[str, Any]:
        ids = torch.randint(vocab, (batch, seq))
        return {"input_ids": ids, "labels": ids.clone()}

    return _example(lambda: LlamaForCausalLM(config), inputs, seed)


def bert_example(size: Size = "bench", *, dropout: float = 0.1, seed: int = 0) -> Example:
    """BERT filling in the 15 % of tokens that are masked; one sentence is padded."""
    bench = size == "bench"
    batch, seq, vocab = (4, 192, 2048) if bench else (2, 64, 256)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=256 if bench else 64,
        num_hidden_layers=8 if bench else 4,
        num_attention_heads=8 if bench else 4,
        intermediate_size=1024 if bench else 256,
        max_position_embeddings=seq,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )

    def inputs() -> dict[str, Any]:
        ids = torch.randint(5, vocab, (batch, seq))
        mask = torch.ones(batch, seq, dtype=torch.long)
        mask[-1, seq - seq // 4 :] = 0
        chosen = (torch.rand(batch, seq) < 0.15) & (mask == 1)
        labels = torch.where(chosen, ids, -100)
        return {"input_ids": ids.masked_fill(chosen, 4), "attention_mask": mask, "labels": labels}

    return _example(lambda: BertForMaskedLM(config), inputs, seed)


def vit_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """ViT classifying random images."""
    bench = size == "bench"
    batch, image, classes = (8, 128, 100) if bench else (4, 32, 10)
    config = ViTConfig(
        image_size=image,
        patch_size=8 if bench else 4,
        hidden_size=192 if bench else 64,
        num_hidden_layers=8 if bench else 4,
        num_attention_heads=6 if bench else 4,
        intermediate_size=768 if bench else 256,
        num_labels=classes,
    )

    def inputs() -> dict[str, Any]:
        images = torch.randn(batch, 3, image, image)
        return {"pixel_values": images, "labels": torch.randint(classes, (batch,))}

    return _example(lambda: ViTForImageClassification(config), inputs, seed)


def t5_example(size: Size = "bench", *, dropout: float = 0.1, seed: int = 0) -> Example:
    """T5, encoder and decoder, on random token pairs."""
    bench = size == "bench"
    batch, seq, vocab = (3, 160, 2048) if bench else (2, 48, 256)
    config = T5Config(
        vocab_size=vocab,
        d_model=256 if bench else 64,
        d_kv=32 if bench else 16,
        d_ff=1024 if bench else 128,
        num_layers=5 if bench else 3,
        num_heads=8 if bench else 4,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )

    def inputs() -> dict[str, Any]:
        return {
            "input_ids": torch.randint(2, vocab, (batch, seq)),
            "labels": torch.randint(2, vocab, (batch, seq * 3 // 4)),
        }

    return _example(lambda: T5ForConditionalGeneration(config), inputs, seed)


HF_EXAMPLES: dict[str, Callable[..., Example]] = {
    "gpt2": gpt2_example,
    "hf_llama": hf_llama_example,
    "bert": bert_example,
    "vit": vit_example,
    "t5": t5_example,
}
