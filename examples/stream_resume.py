"""Trains on a stream that one rank reads for all; run it again to go on at the next batch after a kill.

    python examples/stream_resume.py --out out/stream
    torchrun --standalone --nproc-per-node 2 examples/stream_resume.py --out out/stream

The stream is a Hugging Face dataset with `streaming=True` over Parquet files, which the script writes: Python's own
modules, a byte a token. It is packed as it comes, in two workers. It needs `pip install 'tundish[arrow,hf]'` and no
network.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import tundish as td


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a stream, and resume at the next batch.")
    parser.add_argument("--out", type=Path, default=Path("out/stream"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    td.distributed.build_once_per_node(lambda: write_files(options.out / "data"), what="writing the files")

    source = None
    if rank == 0:
        files = str(options.out / "data" / "*.parquet")
        documents = load_dataset("parquet", data_files=files, split="train", streaming=True)
        stream = td.PackedStream(documents, max_length=128, mode="hard")
        source = td.loader(stream, batch_size=4, num_workers=2)

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model

    with td.DispatchLoader(source) as loader, td.Checkpointer(options.out / "saved") as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer, loader=loader)
        for step, batch in zip(range(start + 1, options.steps + 1), loader, strict=False):
            loss = parallel(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                checkpointer.save(step, model=model, optimizer=optimizer, loader=loader)
                if rank == 0:
                    print(f"after {start}: step {step}, loss {loss.item():.4f}", flush=True)


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    for number in range(4):
        tokens = [list(module.read_bytes()) for module in modules[number::4]]
        pa.parquet.write_table(pa.table({"input_ids": tokens}), folder / f"{number}.parquet")


if __name__ == "__main__":
    main()
