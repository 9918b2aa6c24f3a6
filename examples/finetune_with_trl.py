"""Fine-tunes a small model with TRL's `SFTTrainer` on packs of whole chats, and resumes.

    python examples/finetune_with_trl.py --out out/trl
    python examples/finetune_with_trl.py --out out/trl --steps 120 --resume

It needs `pip install 'tundish[examples]'` and no network. The chats are generated additions: the prompt is "12+7=", and
the completion "19". The model learns the completions only.

`td.hf.pack_dataset` takes the place of `trl.pack_dataset`. Its rows are read from the samples while training goes on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Set before transformers is imported, so that nothing is looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tundish as td

SYMBOLS = ["<eos>", "<pad>", *"0123456789+="]
MAX_LENGTH = 128


class Trainer(td.hf.TundishTrainerMixin, SFTTrainer):
    """TRL's trainer, which saves in the background."""


def main() -> None:
    options = read_options()
    chats = additions(2000)
    packs = td.hf.pack_dataset(chats, MAX_LENGTH, seed=0)
    tokens = sum(len(chat) for chat in chats["input_ids"])
    print(f"{len(chats)} chats in {len(packs)} packs, filled to {tokens / (len(packs) * MAX_LENGTH):.1%}")

    arguments = SFTConfig(
        str(options.out),
        max_steps=options.steps,
        save_steps=20,
        logging_steps=5,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        # The packs are ready to be trained on.
        dataset_kwargs={"skip_prepare_dataset": True},
        # The collator needs the bounds of the chats.
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=small_model(),
        args=arguments,
        train_dataset=packs,
        data_collator=td.PackedCollator(),
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} at step {trainer.state.global_step}")


def additions(count: int) -> Dataset:
    """Tokenized chats, with masks that say which tokens are the completions."""
    ids = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    draws = np.random.default_rng(0)
    rows = []
    for first, second in draws.integers(0, 100, (count, 2)).tolist():
        prompt = [ids[symbol] for symbol in f"{first}+{second}="]
        completion = [*(ids[symbol] for symbol in str(first + second)), ids["<eos>"]]
        mask = [0] * len(prompt) + [1] * len(completion)
        rows.append({"input_ids": prompt + completion, "completion_mask": mask})
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), eos_token="<eos>", pad_token="<pad>"
    )


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SYMBOLS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a small model with TRL on packs of whole chats.")
    parser.add_argument("--out", type=Path, default=Path("out/trl"), help="output folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="resume the last run in this folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
