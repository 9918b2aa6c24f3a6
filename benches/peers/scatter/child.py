"""One rank of a scatter, in a process of its own, with the environment that torchrun gives it.

    python benches/peers/scatter/child.py REQUEST

Owns nothing but its reply: takes a JSON request (made in `cases`) and prints one line of JSON. What always holds: a
scatter begins on all ranks together and is over when the last receiver has read every byte of its batch; each batch is
checked.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from measure import OutputsDiffer

from scatter.batches import KINDS, total
from scatter.contestants import WAYS, Scatter

# A rank, between the last one's coming and the start.
_LEAD_SECONDS = 0.0005


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ways = {name: WAYS[name]() for name in request["ways"]}
    # To look through all of torch in each round would take longer than the rounds.
    gc.collect()
    gc.freeze()
    reply: dict[str, dict[str, float]] = {}
    for kind, rounds in request["rounds"].items():
        make = KINDS[kind]
        batches = [make(other) for other in range(world)] if rank == 0 else None
        expected = total(make(rank))
        for scatter in ways.values():
            if (prepare := getattr(scatter, "prepare", None)) is not None:
                prepare(batches)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, scatter in ways.items():
                gc.collect()
                # The first has everything warm.
                for number in range(request["repeats"][name] + 1):
                    spent = timed(scatter, batches, expected)
                    if number:
                        seconds[name].append(spent)
        reply[kind] = {name: min(times) for name, times in seconds.items()}
    dist.destroy_process_group()
    # See shm/node_child.py.
    time.sleep(0.1)
    print(json.dumps(reply), flush=True)


def timed(scatter: Scatter, batches: list[Any] | None, expected: float) -> float:
    """Seconds until the last receiver has read its batch."""
    begin = common_start()
    mine = scatter(batches)
    # What the source has did not travel.
    found = total(mine) if batches is None else None
    end = time.perf_counter()
    if found not in (None, expected):
        raise OutputsDiffer(f"a rank's batch sums to {found} and not to {expected}")
    return latest(end) - begin


def common_start() -> float:
    """The time, on the clock that all ranks of a machine share, at which they all begin: now.

    They leave a barrier one after the other, by more than a small scatter takes: the batch of who comes late is there
    already, and on his own watch it came in no time.
    """
    begin = latest(time.perf_counter() + _LEAD_SECONDS * dist.get_world_size())
    while time.perf_counter() < begin:
        # There may be more ranks than processors.
        os.sched_yield()
    return begin


def latest(seconds: float) -> float:
    """The latest of the times of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
