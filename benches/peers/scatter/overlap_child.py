"""One rank of a training loop, in a process of its own, with the environment that torchrun gives it.

    python benches/peers/scatter/overlap_child.py REQUEST

It takes a JSON request, which `overlap_case` makes, and prints one line of JSON. In each step all ranks compute the
same products, and end with a barrier. Every byte of each batch is read and checked.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from measure import OutputsDiffer

import tundish as td
from scatter.batches import KINDS, total
from scatter.child import timed
from scatter.contestants import CONTESTANTS, isend

_SCATTERS_A_STEP = 10
# The fastest of them gives the length of a step.
_SCATTERS = 20
_WARMUP_STEPS = 3
_SIDE = 128

Batches = Callable[["list[Any] | None", int], Iterator[Any]]


class Products:
    """Matrix products that take `seconds` while all ranks compute them and do nothing else."""

    def __init__(self, seconds: float) -> None:
        self._left = torch.rand(_SIDE, _SIDE)
        self._right = torch.rand(_SIDE, _SIDE)
        self._out = torch.empty(_SIDE, _SIDE)
        self._count = 100
        one = min(slowest(self.run) for _ in range(10)) / self._count
        self._count = max(1, round(seconds / one))
        self.seconds = min(slowest(self.run) for _ in range(5))

    def run(self) -> float:
        """Compute them. Returns how many seconds it took."""
        begin = time.perf_counter()
        for _ in range(self._count):
            torch.mm(self._left, self._right, out=self._out)
        return time.perf_counter() - begin


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    scatter = CONTESTANTS["ours"]()
    gc.collect()
    gc.freeze()
    reply: dict[str, Any] = {}
    for kind, rounds in request["rounds"].items():
        make = KINDS[kind]
        batches = [make(other) for other in range(world)] if rank == 0 else None
        expected = total(make(rank))
        one = min(timed(scatter, batches, expected) for _ in range(_SCATTERS))
        products = Products(_SCATTERS_A_STEP * one)
        found: dict[str, dict[str, list[float]]] = {
            name: {"wait": [], "products": []} for name in ("loader", "isend")
        }
        for _ in range(rounds):
            for name, source in (("loader", by_loader), ("isend", by_isend)):
                gc.collect()
                steps = request["steps"] + _WARMUP_STEPS
                wait, took = loop(source(batches, steps), products, expected)
                found[name]["wait"].append(wait)
                found[name]["products"].append(took)
        reply[kind] = {"step": products.seconds, **found}
    dist.destroy_process_group()
    # See shm/node_child.py.
    time.sleep(0.1)
    print(json.dumps(reply), flush=True)


def by_loader(batches: list[Any] | None, steps: int) -> Iterator[Any]:
    with td.DispatchLoader(None if batches is None else batches * steps) as loader:
        yield from loader


def by_isend(batches: list[Any] | None, steps: int) -> Iterator[Any]:
    for _ in range(steps):
        yield isend(batches)


def loop(batches: Iterator[Any], products: Products, expected: float) -> tuple[float, float]:
    """The mean seconds of a step that this rank waits for its batch, and that its products take."""
    waits, times = [], []
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - begin)
        if batch is None:
            break
        found = total(batch)
        if found != expected:
            raise OutputsDiffer(f"a rank's batch sums to {found} and not to {expected}")
        # Its memory is used again.
        del batch
        times.append(products.run())
        dist.barrier()
    # The last wait is that for the end.
    timed_steps = slice(_WARMUP_STEPS, -1)
    return sum(waits[timed_steps]) / len(waits[timed_steps]), sum(times[_WARMUP_STEPS:]) / len(
        times[_WARMUP_STEPS:]
    )


def slowest(run: Callable[[], float]) -> float:
    """The seconds that the slowest rank takes for `run`, which all ranks call at once."""
    dist.barrier()
    spent = torch.tensor([run()])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


if __name__ == "__main__":
    main()
