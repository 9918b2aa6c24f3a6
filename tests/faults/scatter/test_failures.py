"""Scatters while ranks are killed, fail, are interrupted, or come late.

Times are taken on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.interrupts import signal_once_waiting
from support.waiting import NOTICED

import tundish as td


def timed(call: Callable[[], Any]) -> tuple[str, str, Any, float]:
    return (*outcome(call), time.monotonic())


def batches(number: int) -> list[Any]:
    return [{"x": torch.full((1000,), number + other)} for other in range(dist.get_world_size())]


def a_step(rank: int, number: int) -> None:
    mine = td.scatter_batch(batches(number) if rank == 0 else None)
    assert mine["x"].tolist() == [number + rank] * 1000


def killed_receiver(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    for number in range(3):
        a_step(rank, number)
    line.say("ready")
    if rank in (0, 2):
        line.hear()
    line.say(*timed(lambda: a_step(rank, 3)))
    line.say(*timed(lambda: a_step(rank, 4)))


@pytest.mark.parametrize("node", [4, 2, 1])
def test_a_killed_receiver_is_named_by_all(node: int, tmp_path: Path) -> None:
    with Job(killed_receiver, 4, tmp_path) as job:
        job.tell_all(node)
        assert job.hear_all() == [("ready",)] * 4
        job.signal(2, signal.SIGKILL)
        assert job.exit_code(2) == -signal.SIGKILL
        begin = time.monotonic()
        job.tell(0)
        # Ranks that had their batch already hear of it in the next step.
        for rank in (0, 1, 3):
            heard = [job.hear(rank), job.hear(rank)]
            named = [one for one in heard if one[0] == "PeerFailedError"]
            assert named and named[-1] is heard[-1], heard
            for _, text, lost, at in named:
                assert lost == 2 and "rank 2" in text, text
                assert at - begin < NOTICED
        job.expect_end(0, 1, 3)


def killed_source(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    for number in range(3):
        a_step(rank, number)
    line.say("ready")
    if rank == 0:
        line.hear()
    line.say(*timed(lambda: a_step(rank, 3)))


@pytest.mark.parametrize("node", [3, 1])
def test_a_killed_source_is_named_by_all(node: int, tmp_path: Path) -> None:
    with Job(killed_source, 3, tmp_path) as job:
        job.tell_all(node)
        assert job.hear_all() == [("ready",)] * 3
        time.sleep(0.2)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        for kind, text, lost, at in job.hear_all(1, 2):
            assert (kind, lost) == ("PeerFailedError", 0), text
            assert at - killed < NOTICED
        job.expect_end(1, 2)


def source_ends_early(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    a_step(rank, 0)
    if rank == 0:
        for number in (1, 2):
            a_step(0, number)
        line.say("gave all")
        # The process ends without cleaning up.
        os._exit(0)
    line.hear()
    for number in (1, 2):
        a_step(rank, number)
    kind, _, lost = outcome(lambda: a_step(rank, 3))
    assert (kind, lost) == ("PeerFailedError", 0)


def test_batches_arrive_although_the_source_has_ended(tmp_path: Path) -> None:
    with Job(source_ends_early, 3, tmp_path) as job:
        job.tell_all(3)
        assert job.hear(0) == ("gave all",)
        assert job.exit_code(0) == 0
        job.tell(1)
        job.tell(2)
        job.expect_end(1, 2)


class LoaderBroke(Exception):
    pass


def failing_loader() -> Any:
    yield {"x": torch.zeros(1000)}
    raise LoaderBroke("the shard is damaged")


def failing_source(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    begin = time.monotonic()
    for number in range(2):
        a_step(rank, number)
    for given, kind, text in (
        (failing_loader, "LoaderBroke", "the shard is damaged"),
        (lambda: batches(0)[:2], "InvalidInputError", "batches has 2 entries for 3 ranks: give one batch"),
        (lambda: [None, {"y": [1, {"z": lambda: 0}]}, None], "NotPicklableError", 'batch["y"][1]'),
    ):
        found, said, lost = outcome(lambda given=given: td.scatter_batch(given() if rank == 0 else None))
        if rank == 0:
            assert found == kind and text in said, said
        else:
            assert (found, lost) == ("PeerFailedError", 0), said
            assert text in said and "Traceback (most recent call last)" in said, said
            assert f"{kind}" in said
    assert (
        "in failing_loader" in outcome(lambda: td.scatter_batch(failing_loader() if rank == 0 else None))[1]
        or rank == 0
    )
    # In its own step.
    a_step(rank, 7)
    assert time.monotonic() - begin < NOTICED


@pytest.mark.parametrize("node", [3, 1])
def test_all_ranks_raise_an_error_of_the_source_in_its_step(node: int, tmp_path: Path) -> None:
    run_job(failing_source, 3, tmp_path, node)


def failure_while_behind(rank: int, line: Line) -> None:
    a_step(rank, 0)
    if rank == 0:
        for number in (1, 2):
            a_step(0, number)
        assert outcome(lambda: td.scatter_batch([]))[0] == "InvalidInputError"
        line.say("failed")
    else:
        line.hear()
        for number in (1, 2):
            a_step(1, number)
        kind, _, lost = outcome(lambda: td.scatter_batch(None))
        assert (kind, lost) == ("PeerFailedError", 0)
    a_step(rank, 3)


def test_a_late_receiver_gets_the_steps_before_the_failure(tmp_path: Path) -> None:
    with Job(failure_while_behind, 2, tmp_path) as job:
        assert job.hear(0) == ("failed",)
        job.tell(1)
        job.expect_end()


def bad_arguments(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    a_step(rank, 0)
    kind, text, _ = outcome(lambda: td.scatter_batch(batches(1)))
    assert kind == ("" if rank == 0 else "InvalidInputError"), text
    a_step(rank, 2)
    device = "no such device" if rank == 0 else None
    kind, text, _ = outcome(lambda: td.scatter_batch(batches(3) if rank == 0 else None, device=device))
    assert kind == ("InvalidInputError" if rank == 0 else "PeerFailedError"), text
    a_step(rank, 4)


@pytest.mark.parametrize("node", [2, 1])
def test_a_refused_call_counts_as_a_step(node: int, tmp_path: Path) -> None:
    run_job(bad_arguments, 2, tmp_path, node)


def is_closed(rank: int, number: int, by: int) -> None:
    """Check that the scatter says which interrupted rank closed it."""
    kind, text, lost = outcome(lambda: a_step(rank, number))
    assert (kind, lost) == ("PeerFailedError", by), text


def interrupted_receiver(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    a_step(rank, 0)
    if rank == 1:
        signal_once_waiting()
        begin = time.monotonic()
        assert outcome(lambda: td.scatter_batch(None))[0] == "KeyboardInterrupt"
        assert time.monotonic() - begin < NOTICED
        kind, text, lost = outcome(lambda: td.scatter_batch(None))
        assert (kind, lost) == ("PeerFailedError", 1) and "was interrupted" in text, text
        line.say("interrupted")
    else:
        line.hear()
        is_closed(0, 1, by=1)
    line.say("closed")
    line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_ctrl_c_ends_the_wait_of_a_receiver_and_closes_the_scatter(node: int, tmp_path: Path) -> None:
    with Job(interrupted_receiver, 2, tmp_path) as job:
        job.tell_all(node)
        assert job.hear(1) == ("interrupted",)
        job.tell(0)
        assert job.hear_all() == [("closed",)] * 2
        job.tell_all()
        job.expect_end()


def interrupted_source(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    a_step(rank, 0)
    if rank == 0:
        signal_once_waiting()
        # Rank 1 reads nothing, so the source waits for room or for gloo.
        while (kind := outcome(lambda: a_step(0, 1))[0]) == "":
            pass
        assert kind == "KeyboardInterrupt"
        kind, text, lost = outcome(lambda: a_step(0, 2))
        assert (kind, lost) == ("PeerFailedError", 0) and "was interrupted" in text, text
    elif rank == 1:
        line.hear()
    if rank != 0:
        while (found := outcome(lambda: a_step(rank, 1)))[0] == "":
            pass
        assert (found[0], found[2]) == ("PeerFailedError", 0), found
        is_closed(rank, 2, by=0)
    line.say("closed")
    line.hear()


@pytest.mark.parametrize("node", [3, 1])
def test_ctrl_c_ends_the_wait_of_a_source_and_all_ranks_hear_who_closed_the_scatter(
    node: int, tmp_path: Path
) -> None:
    with Job(interrupted_source, 3, tmp_path) as job:
        job.tell_all(node)
        begin = time.monotonic()
        assert job.hear_all(0, 2) == [("closed",)] * 2
        assert time.monotonic() - begin < NOTICED
        job.tell(1)
        assert job.hear(1) == ("closed",)
        job.tell_all()
        job.expect_end()


def slow_receiver(rank: int, line: Line) -> None:
    a_step(rank, 0)
    if rank == 0:
        # No rank reads, so the source waits before it fills the memory.
        ahead = 0
        kind = ""
        while not kind and ahead < 100:
            kind, text, _ = outcome(lambda: a_step(0, 1))
            ahead += 1
        assert kind == "TimedOutError" and "rank 1" in text, text
        assert 2 <= ahead <= 10
        line.say("held up")
    else:
        line.hear()


def test_a_source_is_not_far_ahead_of_a_slow_receiver(tmp_path: Path) -> None:
    with Job(slow_receiver, 2, tmp_path, seconds=2.0) as job:
        assert job.hear(0) == ("held up",)
        job.tell(1)
        job.expect_end()


def forked(rank: int, line: Line) -> None:
    a_step(rank, 0)
    child = os.fork()
    if child == 0:
        kind, text, _ = outcome(lambda: td.scatter_batch(None))
        os._exit(0 if kind == "InvalidInputError" and "before a fork" in text else 1)
    assert os.waitpid(child, 0)[1] == 0
    a_step(rank, 1)


def test_a_forked_child_cannot_use_the_scatter(tmp_path: Path) -> None:
    run_job(forked, 2, tmp_path)


def killed_replica(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    on_nodes(rank, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def a_grid_step() -> None:
        given = [{"x": torch.ones(1000)}] * 2 if rank == 0 else None
        td.scatter_batch(given, group=mesh["data"], replicate=mesh["tensor"])

    a_grid_step()
    line.say("ready")
    if rank in (0, 3):
        line.hear()
    line.say(*timed(a_grid_step))
    if rank == 2:
        line.hear()
        return
    # Ranks that had their batch already hear of it in a later step.
    while (told := timed(a_grid_step))[0] != "PeerFailedError":
        pass
    line.say(*told)


def test_a_killed_rank_that_gets_its_batches_from_another_is_named_by_all(tmp_path: Path) -> None:
    # Rank 2 receives the batch of rank 3 over gloo and passes it on. It lives on after its error.
    with Job(killed_replica, 4, tmp_path) as job:
        assert job.hear_all() == [("ready",)] * 4
        job.signal(3, signal.SIGKILL)
        assert job.exit_code(3) == -signal.SIGKILL
        job.tell(0)
        kind, text, lost, at = job.hear(2)
        assert (kind, lost) == ("PeerFailedError", 3), text
        for rank in (0, 1):
            heard = [job.hear(rank), job.hear(rank)]
            assert (heard[-1][0], heard[-1][2]) == ("PeerFailedError", 3), heard
            assert heard[-1][3] - at < NOTICED
        job.tell(2)
        job.expect_end(0, 1, 2)


def test_a_killed_rank_that_passes_batches_on_is_named_by_all(tmp_path: Path) -> None:
    with Job(killed_replica, 4, tmp_path) as job:
        assert job.hear_all() == [("ready",)] * 4
        job.signal(2, signal.SIGKILL)
        assert job.exit_code(2) == -signal.SIGKILL
        told = time.monotonic()
        job.tell(3)
        kind, text, lost, at = job.hear(3)
        assert (kind, lost) == ("PeerFailedError", 2), text
        assert at - told < NOTICED
        told = time.monotonic()
        job.tell(0)
        for rank in (0, 1):
            heard = [job.hear(rank), job.hear(rank)]
            assert (heard[-1][0], heard[-1][2]) == ("PeerFailedError", 2), heard
            assert heard[-1][3] - told < NOTICED
