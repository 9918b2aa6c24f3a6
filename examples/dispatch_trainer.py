"""The Trainer of transformers with data that only one rank can read, resumed in the middle of an epoch.

    torchrun --standalone --nproc-per-node 2 examples/dispatch_trainer.py --out out/trainer
    torchrun --standalone --nproc-per-node 2 examples/dispatch_trainer.py --out out/trainer --steps 40 --resume

Needs `pip install 'tundish[hf]'` and no network. The data is a stream: sentences that are made up one after the other,
by one generator. Each rank trains on its own of them, and all of them together see each once, also over the resumption.

A method and a callback are all that it takes: `get_train_dataloader` gives the Trainer what a `DispatchLoader` hands
out, and the callback keeps the loader's state in that of the Trainer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing here is to be looked up on a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import tundish as td

VOCABULARY = 64


class Sentences:
    """Batches of made-up sentences: a fixed order that nobody could read from its middle, nor on two ranks."""

    def __init__(self, batches: int, batch_size: int) -> None:
        self.batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.batches):
            # Each word is the one before plus a step that the sentence keeps.
            first = torch.randint(VOCABULARY, (self.batch_size, 1), generator=generator)
            step = torch.randint(1, 4, (self.batch_size, 1), generator=generator)
            words = (first + step * torch.arange(16)) % VOCABULARY
            yield {"input_ids": words, "labels": words.clone()}

    def __len__(self) -> int:
        return self.batches


class Batches:
    """What the Trainer sees of the loader: no `set_epoch`, by which it would send a resumed loader to another place.

    The Trainer reckons its epochs from its steps; the loader counts its own.
    """

    def __init__(self, loader: td.DispatchLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        has_begun = False
        for batch in self.loader:
            has_begun = True
            yield batch
        if not has_begun:
            # Of an epoch at whose end the run was saved nothing is left, and the Trainer would stop there.
            yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class LoaderState(TrainerCallback, ExportableState):
    """Keeps where the loader stands in the Trainer's state, and goes on there."""

    def __init__(self, loader: td.DispatchLoader[Any]) -> None:
        self.loader = loader

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"loader": self.loader.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 (the Trainer's)
        known = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and known:
            self.loader.load_state_dict(known["attributes"]["loader"])


class DispatchTrainer(td.hf.TundishTrainerMixin, Trainer):
    """Reads on the first rank, and saves while it trains."""

    def __init__(self, loader: td.DispatchLoader[Any], **options: Any) -> None:
        super().__init__(**options)
        self.loader = loader
        self.add_callback(LoaderState(loader))

    def get_train_dataloader(self) -> Any:
        # Not to be prepared by Accelerate, which would deal its batches out once more.
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
        # The loader knows by itself where to go on.
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
            print(f"epoch {state['epoch']}, {state['batches']} of its {len(sentences)} batches handed out")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with the Trainer on data that one rank reads.")
    parser.add_argument(
        "--out", type=Path, default=Path("out/trainer"), help="folder for all that is written"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--resume", action="store_true", help="go on where the last run in this folder was saved"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
