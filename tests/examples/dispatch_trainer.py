"""Trains with the transformers Trainer on a stream that only rank 0 reads, and resumes in the middle of an epoch.

A script for tests. The data is a stream of generated sentences. Each rank trains on
its own sentences, and all ranks together see each sentence once, also after resuming.

The Trainer needs one method and one callback: `get_train_dataloader` returns the batches of a `DispatchLoader`, and the
callback keeps the loader's state in the Trainer's state.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before transformers is imported, so that nothing is looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import tundish as td

VOCABULARY = 64


class Sentences:
    """A stream of batches of generated sentences. It can only be read from the start, and on one rank."""

    def __init__(self, batches: int, batch_size: int) -> None:
        self.batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            # Each word is the previous word plus the step of its sentence.
            first = torch.randint(VOCABULARY, (self.batch_size, 1), generator=generator)
            step = torch.randint(1, 4, (self.batch_size, 1), generator=generator)
            words = (first + step * torch.arange(16)) % VOCABULARY
            yield {"input_ids": words, "labels": words.clone()}

    def __len__(self) -> int:
        return self.batches


class Batches:
    """Hides the loader's `set_epoch` from the Trainer, which would move a resumed loader to another position.

    The Trainer computes its epochs from its steps; the loader counts its own.
    """

    def __init__(self, loader: td.DispatchLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        has_begun = False
        for batch in self.loader:
            has_begun = True
            yield batch
        if not has_begun:
            # The run was saved at the end of an epoch. Without a batch, the Trainer would stop.
            yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class LoaderState(TrainerCallback, ExportableState):
    """Saves the loader's state in the Trainer's state and restores it when training starts."""

    def __init__(self, loader: td.DispatchLoader[Any]) -> None:
        self.loader = loader

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"loader": self.loader.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        known = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and known:
            self.loader.load_state_dict(known["attributes"]["loader"])


class DispatchTrainer(td.hf.TundishTrainerMixin, Trainer):
    """A Trainer that reads on rank 0 and saves in the background."""

    def __init__(self, loader: td.DispatchLoader[Any], **options: Any) -> None:
        super().__init__(**options)
        self.loader = loader
        self.add_callback(LoaderState(loader))

    def get_train_dataloader(self) -> Any:
        # Not prepared by Accelerate, which would shard the batches again.
        return Batches(self.loader)


def main() -> None:
    options = read_options()
    arguments = TrainingArguments(
        str(options.out),
        max_steps=options.steps,
        save_steps=5,
        logging_steps=5,
        learning_rate=3e-3,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        # The loader resumes by itself.
        ignore_data_skip=True,
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    sentences = Sentences(batches=100, batch_size=8) if arguments.process_index == 0 else None
    with td.DispatchLoader(sentences, device=arguments.device) as loader:
        trainer = DispatchTrainer(loader, model=model, args=arguments)
        trainer.train(resume_from_checkpoint=options.resume)
        if arguments.process_index == 0:
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            state = loader.state_dict()
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            print(f"epoch {state['epoch']}, {state['batches']} of its {len(sentences)} batches used")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train with the transformers Trainer on data that one rank reads."
    )
    parser.add_argument("--out", type=Path, default=Path("out/trainer"), help="output folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="resume the last run in this folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
