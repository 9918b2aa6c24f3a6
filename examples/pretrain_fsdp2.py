"""Pretrains a small Llama with FSDP2 on packed text; run it again, on any number of ranks, to go on after a kill.

    torchrun --standalone --nproc-per-node 2 examples/pretrain_fsdp2.py --out out/fsdp2

The text is Python's own standard library, a byte a token. Each rank reads its own packs, writes its own shards, and
loads the shards that it needs. It needs `pip install 'tundish[hf]'` and no network.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import tundish as td

# Packs of a step, of all ranks together: as long as it stays the same, so does the order of the data.
GLOBAL_BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{td.distributed.local_rank()}"
        torch.cuda.set_device(device)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    plan = td.pack([len(text) for text in texts], 128, seed=0, share=True)
    loader = td.loader(texts, plan, batch_size=GLOBAL_BATCH // dist.get_world_size(), seed=0)

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with td.Checkpointer(options.out, keep_last=2) as checkpointer:
        start = checkpointer.resume(**state)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        for step, batch in zip(range(start + 1, options.steps + 1), epochs, strict=False):
            loss = model(**td.tree.map(lambda tensor: tensor.to(device), batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % 10 == 0 or step == options.steps:
                # The last one is an export too, which `from_pretrained` loads.
                checkpointer.save(step, **state, hf=step == options.steps)
                if dist.get_rank() == 0:
                    print(f"after {start}: step {step}, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
