"""`DispatchLoader` while a receiver is stopped: all ranks get an error in time that names it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome

import tundish as td

TIMEOUT = 3.0
STOPPED = 1


def batches() -> Iterator[torch.Tensor]:
    # Larger than the socket buffers, which take messages that nobody reads.
    for number in range(30_000):
        yield torch.full((500_000,), number)


def loop_to_the_end(rank: int, line: Line) -> None:
    node, prefetch = line.hear()
    on_nodes(rank, node)
    # The job's group has a longer timeout, because ranks may start slowly.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    with td.DispatchLoader(batches() if rank == 0 else None, group=group, prefetch=prefetch) as loader:

        def loop() -> None:
            for number, _ in enumerate(loader):
                if number == 2:
                    line.say("begun")

        kind, text, _ = outcome(loop)
        line.say(kind, text)
        line.hear()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 1), (1, 0), (1, 1)])
def test_a_stopped_receiver_is_named_by_all_after_the_timeout(
    node: int, prefetch: int, tmp_path: Path
) -> None:
    with Job(loop_to_the_end, 3, tmp_path) as job:
        job.tell_all((node, prefetch))
        assert job.hear_all() == [("begun",)] * 3
        job.signal(STOPPED, signal.SIGSTOP)
        for rank in (0, 2):
            kind, text = job.hear(rank)
            assert kind == ("TimedOutError" if rank == 0 else "PeerFailedError"), text
            assert f"rank {STOPPED} did not come within {TIMEOUT:g} s" in text, text
            job.tell(rank)
        job.expect_end(0, 2)
