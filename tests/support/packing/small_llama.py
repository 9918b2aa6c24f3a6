"""A Llama that computes in milliseconds, with random weights that are always the same, and its loss on pieces apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.packing.samples import pieces_of

__all__ = ["k_gradient", "loss_apart", "small_llama"]


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
            # With weights of the usual size, attention hardly changes the loss.
            initializer_range=0.3,
            attn_implementation=attention,
        )
    )


def loss_apart(model: LlamaForCausalLM, items: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The loss of each piece in a row of its own, averaged over all tokens that are learned."""
    total, learned = torch.zeros(()), 0
    for piece in pieces_of(items):
        labels = piece["labels"][1:]
        if count := int((labels != -100).sum()):
            logits = model(input_ids=piece["input_ids"][None], use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            learned += count
    return total / learned


def k_gradient(model: LlamaForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight that attention depends on."""
    model.zero_grad()
    loss.backward()
    found = model.model.layers[0].self_attn.k_proj.weight.grad
    assert found is not None
    return found.clone()
