"""One rank of a scatter, in a process of its own, with the environment that torchrun gives it.

    python benches/peers/scatter/child.py REQUEST

It takes a JSON request, which `cases` makes, and prints one line of JSON. All ranks begin a scatter together. It ends
when the last receiver has read and checked every byte of its batch.
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
from scatter.contestants import CONTESTANTS, Scatter

# For each rank, from the barrier to the common start.
_LEAD_SECONDS = 0.0005


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    contestants = {name: CONTESTANTS[name]() for name in request["contestants"]}
    # Else each collection would go through all objects of torch.
    gc.collect()
    gc.freeze()
    reply: dict[str, dict[str, list[float]]] = {}
    for kind, rounds in request["rounds"].items():
        make = KINDS[kind]
        batches = [make(other) for other in range(world)] if rank == 0 else None
        expected = total(make(rank))
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, scatter in contestants.items():
                gc.collect()
                # The first one only warms up.
                for number in range(request["repeats"][name] + 1):
                    spent = timed(scatter, batches, expected)
                    if number:
                        seconds[name].append(spent)
        reply[kind] = seconds
    dist.destroy_process_group()
    # See shm/node_child.py.
    time.sleep(0.1)
    print(json.dumps(reply), flush=True)


def timed(scatter: Scatter, batches: list[Any] | None, expected: float) -> float:
    """Seconds until the last receiver has read its batch."""
    begin = common_start()
    mine = scatter(batches)
    # The source's own batch was not sent.
    found = total(mine) if batches is None else None
    end = time.perf_counter()
    if found not in (None, expected):
        raise OutputsDiffer(f"a rank's batch sums to {found} and not to {expected}")
    return latest(end) - begin


def common_start() -> float:
    """Wait for the time at which all ranks begin, and return it, in seconds of the machine's shared clock.

    A barrier would not do: ranks leave it further apart than a small scatter takes. The batch of a late rank would be
    there before that rank starts its clock.
    """
    begin = latest(time.perf_counter() + _LEAD_SECONDS * dist.get_world_size())
    while time.perf_counter() < begin:
        # There may be more ranks than processors.
        os.sched_yield()
    return begin


def latest(seconds: float) -> float:
    """The maximum over all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
