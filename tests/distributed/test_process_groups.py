"""Groups with their own timeout."""

from __future__ import annotations

import contextlib
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome

from tundish.distributed import process_groups, temporary_group, unique_name, vote
from tundish.errors import InvalidInputError, InvalidTypeError


def groups(rank: int, line: Line) -> None:
    import torch
    import torch.distributed as distributed

    world = distributed.distributed_c10d._world
    groups_before = len(world.pg_map)
    with temporary_group(
        unique_name("group", tuple(range(4))), timedelta(seconds=60), tuple(range(4))
    ) as group:
        if rank == 0:
            time.sleep(2)
        distributed.barrier(group)
        line.say("the slow rank was waited for")

    def scope(value: str) -> None:
        with temporary_group(unique_name("group", (1, 3)), 30, (1, 3)) as group:
            total = torch.tensor(rank)
            distributed.all_reduce(total, group=group)
            assert total.item() == 4
            raise KeyError(value)

    if rank in (1, 3):
        if rank == 3:
            # Members that hold different numbers of groups still meet.
            distributed.new_group([3], use_local_synchronization=True)
            groups_before += 1
        for turn in range(3):
            # The same ranks again, one earlier than the other: nothing of the former group may be found.
            time.sleep(0.3 * (rank == 3))
            line.say(*outcome(lambda turn=turn: scope(f"turn {turn}")))
    line.say(len(world.pg_map) - groups_before, len(world.pg_group_ranks) - groups_before)

    # Destroyed with everything else, inside the block.
    with temporary_group(unique_name("group", tuple(range(4))), 30, tuple(range(4))) as group:
        distributed.barrier(group)
        line.say("met")
        line.hear()
        distributed.destroy_process_group()


def test_temporary_groups(tmp_path: Path) -> None:
    # The default group would give up after a second.
    with Job(groups, 4, tmp_path, seconds=1) as job:
        assert job.hear_all() == [("the slow rank was waited for",)] * 4
        for turn in range(3):
            for rank in (1, 3):
                assert job.hear(rank) == ("KeyError", f"'turn {turn}'", None)
        assert job.hear_all() == [(0, 0)] * 4
        job.hear_all()
        job.tell_all()
        job.expect_end()


@pytest.mark.parametrize("timeout", ["soon", "7", b"7", [5], 1j])
def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"timeout is .*: give a number of seconds"):
        vote(what="alone", timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1, timedelta(0), float("nan"), float("inf")])
def test_bad_timeouts(timeout: float | timedelta) -> None:
    # Also in a world of one: a program that works on one rank works on several.
    with pytest.raises(InvalidInputError, match="positive"):
        vote(what="alone", timeout=timeout)


@pytest.mark.parametrize(("backend", "bound_during"), [("gloo", "cuda:1"), ("nccl", None)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_group_is_not_split_from_one_that_is_bound_to_a_device(
    backend: str, bound_during: str | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import distributed

    # As `init_process_group` does with device_id=. NCCL would wait for all ranks of that group.
    default = types.SimpleNamespace(bound_device_id="cuda:1")
    c10d = distributed.distributed_c10d
    seen = []

    def make(*_: Any, **__: Any) -> Any:
        seen.append(default.bound_device_id)
        if fails:
            raise RuntimeError("no group")
        return object(), None

    monkeypatch.setattr(c10d, "_get_default_group", lambda: default)
    monkeypatch.setattr(c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    with contextlib.suppress(RuntimeError):
        made = process_groups.new_subgroup(distributed, (0, 1), "a group", timedelta(seconds=5), backend)
        del c10d._world.pg_group_ranks[made]
    assert seen == [bound_during]
    assert default.bound_device_id == "cuda:1"
