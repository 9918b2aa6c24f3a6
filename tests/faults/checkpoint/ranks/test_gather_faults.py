"""A rank dies while tensors are gathered: the others raise, and nothing is left behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED


def gathering(rank: int, line: Line) -> None:
    """Gathers tensors of all ranks; the last rank stops in the middle and waits to be killed."""
    import torch
    import torch.distributed as distributed
    from support.checkpoint.exports import connected_exchange_group, staged, write
    from support.checkpoint.sharded_models import spread

    from tundish import _native
    from tundish.checkpoint.hf import gather as schedule
    from tundish.checkpoint.hf.export import HfExport

    # A round for each tensor, so that there are rounds to come.
    schedule.ROUND_BYTES = 1
    kind, folder = line.hear()
    size = distributed.get_world_size()
    exchange_group = connected_exchange_group()
    model = spread("fsdp")

    def stop(name: str, tensor: Any) -> Any:
        if rank == size - 1 and not tensor.is_meta:
            line.say("in the middle")
            line.hear()
        return [(name, tensor + 0)]

    arguments: dict[str, Any] = {}
    if kind == "lazy":
        arguments = {"staging": "lazy", "optimizer": torch.optim.SGD(model.parameters())}
    plan = HfExport(model, to_hf=stop, shard_bytes=300, exchange_group=exchange_group, **arguments)

    def save() -> None:
        with staged(plan) as staging:
            write(staging, folder, is_first=rank == 0)

    line.say(*outcome(save))
    assert _native.staging_stats()["in_use"] == 0
    # The teardown of the process groups would wait for the dead rank.
    line.say("done")
    line.hear()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["eager", "lazy"])
def test_a_rank_that_dies_is_noticed(kind: str, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    with Job(gathering, size, tmp_path) as job:
        job.tell_all((kind, folder))
        assert job.hear(size - 1) == ("in the middle",)
        job.signal(size - 1, signal.SIGKILL)
        started = time.monotonic()
        for rank in range(size - 1):
            error, text, _ = job.hear(rank)
            assert error, "a save without all parts of its tensors"
            assert text
            assert job.hear(rank) == ("done",)
        assert time.monotonic() - started < NOTICED
