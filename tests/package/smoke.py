"""Uses each part of an installed tundish once; where torch is installed, on two ranks.

It needs the package and its dependencies alone. `make release-check` runs it in clean environments.

Run: python smoke.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tundish as td

SAMPLES = [np.arange(length) for length in (5, 3, 9, 4, 7, 6)]
TOKENS = sum(len(sample) for sample in SAMPLES)


def check_packing() -> None:
    lengths = [len(sample) for sample in SAMPLES]
    td.pack(lengths, 10, mode="best_fit", seed=0).save("plan")
    plan = td.PackPlan.load("plan", lengths=lengths)
    plan.verify()
    assert (len(plan), plan.stats()["tokens_packed"]) == (4, TOKENS)


def check_command() -> None:
    command = Path(sysconfig.get_path("scripts")) / "tundish"
    shown = subprocess.run(
        [command, "plan", "show", "plan"], capture_output=True, text=True, check=True
    ).stdout
    assert str(TOKENS) in shown, shown


def total(start: int, numbers: Any) -> int:
    return int(numbers[start : start + 10].sum())


def check_shm() -> None:
    numbers = td.shm.node_shared(lambda: np.arange(100))
    with td.shm.SharedPool(total, {"numbers": numbers}, max_workers=2, mp_context="spawn") as pool:
        assert sum(pool.map(range(0, 100, 10))) == numbers.sum()


def check_scatter(rank: int) -> None:
    import torch

    plan = td.PackPlan.load("plan")
    packs = td.loader(SAMPLES, plan, batch_size=1, rank=0, world_size=1) if rank == 0 else None
    tokens = torch.zeros(1, dtype=torch.int64)
    loader = td.DispatchLoader(packs)
    for batch in loader:
        tokens += batch["input_ids"].numel()
    loader.close()
    torch.distributed.all_reduce(tokens)
    assert int(tokens) == TOKENS


def check_checkpoint() -> None:
    import torch

    def train() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    torch.manual_seed(0)
    model, optimizer = train()
    with td.Checkpointer("checkpoints") as checkpointer:
        checkpointer.save(7, model=model, optimizer=optimizer)
        exported = checkpointer.save_hf(7, dict(model.state_dict())).result()
        assert (exported / "model.safetensors").is_file()
        other, other_optimizer = train()
        assert checkpointer.resume(model=other, optimizer=other_optimizer) == 7
    assert torch.equal(other.weight, model.weight)


def check_rtensor(rank: int) -> None:
    import torch
    import torch.distributed as dist

    rewards = torch.arange(8.0)
    sent = [td.rtensor.remotize(rewards) if rank == 0 else None]
    dist.broadcast_object_list(sent)
    received = td.rtensor.localize(sent[0])
    assert torch.equal(received, rewards)
    del received
    td.rtensor.drain(claim=sent[0])
    assert td.rtensor.storage_stats()["num_tensors"] == 0


def check_on_a_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    check_scatter(dist.get_rank())
    check_checkpoint()
    check_rtensor(dist.get_rank())
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        check_packing()
        check_command()
        check_shm()
        if importlib.util.find_spec("torch") is None:
            print("packing, command line and shared memory work; the other parts need torch")
            return
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*torchrun, os.path.abspath(__file__), "rank"], check=True, timeout=300)
        print("all parts work")


if __name__ == "__main__":
    check_on_a_rank() if "rank" in sys.argv else main()
