"""Fine-tunes a small model with TRL's `SFTTrainer` on packed chats; run it again to go on after a kill.

    python examples/sft_trl.py --out out/sft

TRL tokenizes the chats and masks the prompts. tundish packs them, whole chats by best fit, and saves in the background.
The chats are generated additions: the prompt is "12+7=", and the completion "19". It needs
`pip install 'tundish[examples]'` and no network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tundish as td


class Trainer(td.hf.TundishTrainerMixin, SFTTrainer):
    """TRL's trainer, which saves to a `td.Checkpointer` and resumes from it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with TRL on packed chats.")
    parser.add_argument("--out", type=Path, default=Path("out/sft"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    words = {symbol: number for number, symbol in enumerate(["<eos>", "<pad>", *"0123456789+="])}
    letters = Tokenizer(WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape))

    td.hf.use_in_trl()
    arguments = SFTConfig(
        str(options.out),
        packing=True,
        max_length=128,
        max_steps=options.steps,
        save_steps=10,
        logging_steps=5,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    trainer = Trainer(model, arguments, train_dataset=additions(2000), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=any(options.out.glob("dcp-*")))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} at step {trainer.state.global_step}")


def additions(count: int) -> Dataset:
    draws = np.random.default_rng(0).integers(0, 100, (count, 2)).tolist()
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in draws])


if __name__ == "__main__":
    main()
