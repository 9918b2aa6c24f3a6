"""Trains a small Llama on packed sequences, from text files to a falling loss.

    torchrun --standalone --nproc-per-node 2 examples/train_packed.py --out out/demo

or, on one process, `python examples/train_packed.py --out out/demo`. It needs `pip install 'tundish[examples]'` and no
network, and takes a minute or two on two cores. A second run reuses the tokens and the plan of the first, and removes
its checkpoints.

The example packs documents of any length into sequences of one length: no token is padding, and no document attends to
another. Rank 0 reads the data for all ranks. Checkpoints are saved while training goes on. The run stops on the way and
resumes from its last checkpoint, and the last export is loaded and compared. At the end, another model trains for some
steps on packs that keep documents whole where they fit (`mode="best_fit"`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Set before transformers is imported, so that nothing is looked up on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from python_corpus import Corpus, corpus_folder, open_corpus, prepare_corpus
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import tundish as td


def main() -> None:
    options = read_options()
    # The ranks share the cores of one machine.
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        # Without torchrun, a group of one rank lets the code below stay the same.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(options)
    finally:
        # Also after an error or Ctrl-C, so that the other ranks do not wait for this one.
        dist.destroy_process_group()


def run(options: argparse.Namespace) -> None:
    # Tokenising may take longer than the timeout of a collective, so the other ranks do not wait in one.
    # If the rank that tokenises fails or is killed, all ranks raise an error.
    folder = corpus_folder(options.out, options.documents, options.vocabulary)
    say(f"tokenising to {folder}")
    td.distributed.build_once_per_node(
        lambda: prepare_corpus(folder, options.documents, options.vocabulary), what="tokenising the documents"
    )
    corpus = open_corpus(folder)

    # One rank of a node plans, and all ranks map its files. A second run finds the plan by its fingerprint.
    plan = td.pack(
        corpus.lengths, options.max_length, seed=options.seed, cache_dir=options.out / "plans", share=True
    )
    report_data(corpus, plan, options)
    if dist.get_rank() == 0:
        plan.plot(options.out / "plan.png")
        report_modes(corpus, options)

    losses, tokens_per_second = train(corpus, plan, options)

    window = max(1, options.steps // 10)
    start, end = float(np.mean(losses[:window])), float(np.mean(losses[-window:]))
    say(f"{'loss':<12}{start:.3f} -> {end:.3f} (means of the first and last {window} steps)")
    say(f"{'speed':<12}{tokens_per_second:,.0f} tokens/s on {dist.get_world_size()} rank(s), no padding")
    say(f"{'picture':<12}{options.out / 'plan.png'}")
    check_fall(start, end)

    losses = train_whole_documents(corpus, options)
    say(f"{'best fit':<12}loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps on whole documents")
    check_fall(losses[0], losses[-1])


def check_fall(start: float, end: float) -> None:
    if not end < start:
        # All ranks have the same losses, so all of them exit here.
        sys.exit(f"the loss did not go down: {start:.3f} at the start, {end:.3f} at the end")


def train(corpus: Corpus, plan: td.PackPlan, options: argparse.Namespace) -> tuple[list[float], float]:
    """Train, and return the loss of each step, averaged over ranks, and the tokens per second of all ranks.

    After three quarters of the steps, a new `Training` resumes from the last checkpoint, as a restarted job would.
    """
    root = options.out / "checkpoints"
    with td.distributed.agreed("removing the checkpoints of an earlier run"):
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
    started = time.perf_counter()
    with td.Checkpointer(root, keep_last=2) as checkpointer:
        first = Training(corpus, plan, options)
        parameters = sum(parameter.numel() for parameter in first.model.parameters())
        say(f"{'model':<12}Llama with {parameters / 1e6:.1f} million parameters")
        losses = first.run(checkpointer, 0, options.steps * 3 // 4)
        checkpointer.wait()
        first.loader.close()

        second = Training(corpus, plan, options)
        step = second.resume(checkpointer)
        say(f"resumed from step {step}")
        losses = losses[:step] + second.run(checkpointer, step, options.steps)
        second.loader.close()
    seconds = time.perf_counter() - started
    with td.distributed.agreed("loading the export"):
        if dist.get_rank() == 0:
            export = root / "hf-latest"
            compare(LlamaForCausalLM.from_pretrained(export), second.exported)
            say(f"{'export':<12}{export.resolve()}, loaded: the weights are identical")
    return losses, len(losses) * second.tokens_of_a_step / seconds


def train_whole_documents(corpus: Corpus, options: argparse.Namespace) -> list[float]:
    """Train another model on packs of whole documents, and return the loss of each step.

    Only documents longer than a pack are cut. The packs are nearly full, and all ranks have the same number of steps.
    """
    plan = td.pack(
        corpus.lengths,
        options.max_length,
        mode="best_fit",
        overlong="split",
        multiple_of=options.batch_size * dist.get_world_size(),
        seed=options.seed,
        share=True,
    )
    say(f"{'best fit':<12}{len(plan):,} packs, {plan.stats()['fill']:.2%} full")
    training = Training(corpus, plan, options)
    losses = training.run(None, 0, max(5, options.steps // 4))
    training.loader.close()
    return losses


class Training:
    """A model in training, with the state that its checkpoints contain."""

    def __init__(self, corpus: Corpus, plan: td.PackPlan, options: argparse.Namespace) -> None:
        self.options = options
        self.tokens_of_a_step = plan.max_length * options.batch_size * dist.get_world_size()
        # All batches, as in a job of one process. A batch is one row of packs; position_ids start at 0 in each piece,
        # by which transformers keeps attention within pieces.
        loader = td.loader(corpus, plan, batch_size=options.batch_size, world_size=1, seed=options.seed)
        # Rank 0 reads, and every rank gets its own batches, one step ahead.
        self.loader = td.DispatchLoader(loader if dist.get_rank() == 0 else None)
        if not len(self.loader):
            sys.exit(f"{plan.num_tokens:,} tokens do not fill one step of {self.tokens_of_a_step:,}")
        torch.manual_seed(options.seed)
        self.model = LlamaForCausalLM(model_config(corpus.vocabulary, options.max_length))
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95)
        )
        warm_up = max(1, options.steps // 10)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )
        # The weights at the last save, to compare with the export.
        self.exported: dict[str, torch.Tensor] = {}

    def run(self, checkpointer: td.Checkpointer | None, done: int, stop: int) -> list[float]:
        """Train from step `done` to step `stop`, saving at intervals to the checkpointer, and return the losses."""
        every = max(1, self.options.steps // 8)
        losses: list[float] = []
        started = time.perf_counter()
        batches = epochs(self.loader)
        for step, batch in zip(range(done + 1, stop + 1), batches, strict=False):
            loss = self.parallel(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            # For the report only; DistributedDataParallel averages the gradients.
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            losses.append(mean.item())
            if checkpointer is not None and (step % every == 0 or step == stop):
                self.save(checkpointer, step)
            if step % max(1, self.options.steps // 10) == 0:
                speed = len(losses) * self.tokens_of_a_step / (time.perf_counter() - started)
                say(f"step {step:>4}/{self.options.steps}   loss {losses[-1]:.3f}   {speed:,.0f} tokens/s")
        return losses

    def save(self, checkpointer: td.Checkpointer, step: int) -> None:
        """Save what resuming needs, and an export. Both are written while training goes on."""
        checkpointer.save(step, **self.state(), hf=True)
        self.exported = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def resume(self, checkpointer: td.Checkpointer) -> int:
        """Load the newest checkpoint and return its step."""
        return checkpointer.resume(**self.state())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.schedule,
            "loader": self.loader,
        }


def compare(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        # Compare bits, because NaN is not equal to NaN.
        if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)):
            raise AssertionError(f"{name} differs from the saved tensor")


def epochs(loader: td.DispatchLoader[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, from the loader's position on; each epoch has its own order."""
    for epoch in itertools.count(loader.epoch):
        loader.set_epoch(epoch)
        yield from loader


def model_config(vocabulary: int, max_length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        # Positions start at 0 in each piece, and no piece is longer than a pack.
        max_position_embeddings=max_length,
    )


def report_data(corpus: Corpus, plan: td.PackPlan, options: argparse.Namespace) -> None:
    stats = plan.stats()
    in_batch, to_pack = padding_shares(corpus.lengths, options.max_length, options.batch_size, options.seed)
    cut = stats["samples_cut"] / max(1, len(corpus))
    say(f"{'documents':<12}{len(corpus):,}, {corpus.text_bytes / 1e6:.1f} MB of Python")
    say(f"{'tokens':<12}{plan.num_tokens:,}, vocabulary {corpus.vocabulary:,}")
    say(
        f"{'packs':<12}{len(plan):,} of {plan.max_length:,} tokens; {cut:.1%} of the documents are cut, "
        f"{stats['tokens_dropped']:,} tokens dropped"
    )
    say(f"{'plan':<12}{plan.path}")
    say(
        f"{'padding':<12}would have been {in_batch:.1%} of all tokens (padded to the longest of a batch) "
        f"or {to_pack:.1%} (to {plan.max_length:,}); packing needs none"
    )


def report_modes(corpus: Corpus, options: argparse.Namespace) -> None:
    """Print what each mode of packing costs for these documents, as `tundish plan compare` does."""
    picture = options.out / "modes.png"
    table = td.packing.compare(corpus.lengths, options.max_length, seed=options.seed, plot=picture)
    for mode, row in table.items():
        say(
            f"{mode:<12}{row['packs']:,} packs, {row['fill']:.2%} full, {row['samples_cut']:,} documents cut, "
            f"{row['seconds'] * 1000:.1f} ms"
        )
    say(f"{'picture':<12}{picture}")


def padding_shares(lengths: np.ndarray, max_length: int, batch_size: int, seed: int) -> tuple[float, float]:
    """Return the share of padding without packing: padded to the longest row of a batch, and to `max_length`.

    The rows are the documents in random order, cut at `max_length`.
    """
    whole_rows = int((lengths // max_length).sum())
    rests = lengths % max_length
    rows = np.concatenate([np.full(whole_rows, max_length), rests[rests > 0]])
    rows = np.random.RandomState(seed).permutation(rows)
    batches = rows[: len(rows) // batch_size * batch_size].reshape(-1, batch_size)
    in_batch = 1 - batches.sum() / max(1, batch_size * batches.max(axis=1, initial=0).sum())
    return float(in_batch), float(1 - rows.sum() / (len(rows) * max_length))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama on packed sequences.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        help="output folder; the checkpoints of an earlier run in it are removed",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens in a pack")
    parser.add_argument("--batch-size", type=int, default=2, help="packs for each rank and step")
    parser.add_argument(
        "--documents", type=int, default=None, help="maximum number of documents (default: all)"
    )
    parser.add_argument("--vocabulary", type=int, default=8192, help="size of the tokenizer's vocabulary")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, smallest in (("steps", 2), ("max_length", 2), ("batch_size", 1), ("vocabulary", 257)):
        if getattr(options, name) < smallest:
            parser.error(f"--{name.replace('_', '-')} must be at least {smallest}")
    if options.documents is not None and options.documents < 1:
        parser.error("--documents must be at least 1")
    return options


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
