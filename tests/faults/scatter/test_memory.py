"""Thousands of steps take no more memory, descriptors and mappings than the first ones.

A few seconds in every run; 10,000 steps under `make soak`.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes
from support.soak import IS_SOAK

import tundish as td

STEPS = 10_000 if IS_SOAK else 1_200
# Steps between two measurements.
EVERY = 300
# Batches with different schemas and sizes; more than a cache holds.
KINDS = 75
# Python and the allocator keep more or less memory, and torch keeps records of the last barriers.
SLACK_BYTES = 3 << 20
LATER_SLACK_BYTES = 1 << 20
SLACK_DESCRIPTORS = 4
SLACK_MAPPINGS = 8


class Held(NamedTuple):
    """Bytes in memory, open descriptors and mappings of a process."""

    resident: int
    descriptors: int
    mappings: int


def held() -> Held:
    gc.collect()
    # The allocator gives back the memory of freed batches.
    ctypes.CDLL(None).malloc_trim(0)
    facts = Path("/proc/self/status").read_text().splitlines()
    resident = sum(int(line.split()[1]) << 10 for line in facts if line.startswith(("RssAnon:", "RssShmem:")))
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return Held(resident, len(os.listdir("/proc/self/fd")), mappings)


def batch(number: int) -> dict[str, Any]:
    kind = number % KINDS
    return {
        # From a few bytes to more than a message holds.
        "x": torch.full((50 * kind * kind + 1_300_000 * (kind % 25 == 24),), number % 128, dtype=torch.uint8),
        **{f"small {i}": torch.full((i,), number) for i in range(kind % 5)},
        "n": number,
    }


def a_step(rank: int, number: int) -> None:
    # In turns one batch for both ranks, and one for each.
    is_each = number % 2
    given = [batch(number), batch(number + is_each)] if rank == 0 else None
    assert td.scatter_batch(given)["n"] == number + is_each * rank
    # So that the batches on their way do not depend on the machine's speed.
    dist.barrier()


def many_steps(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    for number in range(STEPS):
        a_step(rank, number)
        if number % EVERY == 0:
            line.say(*held())
    line.say(*held())
    [stats] = td.scatter.stats()
    line.say(stats["in_use_bytes"] + stats["cached_bytes"] + stats["escaped_bytes"])


@pytest.mark.timeout(1200 if IS_SOAK else 120)
@pytest.mark.parametrize("node", [2, 1])
def test_thousands_of_steps_take_no_more_memory_than_the_first_ones(node: int, tmp_path: Path) -> None:
    with Job(many_steps, 2, tmp_path, seconds=60.0) as job:
        job.tell_all(node)
        measurements: list[list[Held]] = [[], []]
        for _ in range(0, STEPS + EVERY, EVERY):
            for rank in range(2):
                measurements[rank].append(Held(*job.hear(rank)))
        for rank, (_, warm, *later) in enumerate(measurements):
            half, end = later[(len(later) - 1) // 2], later[-1]
            for one in later:
                assert one.resident - warm.resident < SLACK_BYTES, measurements[rank]
                assert one.descriptors - warm.descriptors <= SLACK_DESCRIPTORS, measurements[rank]
                assert one.mappings - warm.mappings <= SLACK_MAPPINGS, measurements[rank]
            assert end.resident - half.resident < LATER_SLACK_BYTES, measurements[rank]
            (kept,) = job.hear(rank)
            # The mappings of one or two batches.
            assert kept < 32 << 20
        job.expect_end()
