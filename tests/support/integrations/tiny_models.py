"""A model and a tokenizer that are made in milliseconds, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64


def llama(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": 0, "<pad>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), eos_token="<eos>", pad_token="<pad>"
    )


def draw_chats(count: int, *masks: str, longest: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Tokenized samples with the given masks, in which about a third of the tokens are 0; the last is 1."""
    draws = np.random.default_rng(seed)
    rows = []
    for length in draws.integers(2, longest + 1, count).tolist():
        row = {"input_ids": draws.integers(2, VOCABULARY, length).tolist()}
        for mask in masks:
            row[mask] = [*(draws.random(length - 1) > 0.35).astype(int).tolist(), 1]
        rows.append(row)
    return rows
