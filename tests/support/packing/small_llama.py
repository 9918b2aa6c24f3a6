"""A Llama that computes in milliseconds, with random weights that are always the same."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["small_llama"]


def small_llama(vocabulary: int, attention: str | None = None) -> LlamaForCausalLM:
    """The model; `attention` is transformers' `attn_implementation`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            # Weights of the usual size give a loss that hardly depends on what is attended to.
            initializer_range=0.3,
            attn_implementation=attention,
        )
    )
