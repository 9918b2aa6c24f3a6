"""`DispatchLoader` while ranks are killed, leave, fail, are interrupted or come late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.programs import run_ranks
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.waiting import NOTICED, PATIENCE

import tundish as td

# Seconds in which all ranks hear of it.
HEARD = 1.0


def batches(steps: int, breaks_in: int | None = None, slow: float = 0.0) -> Iterator[dict[str, Any]]:
    world = dist.get_world_size()
    for number in range(steps * world):
        if breaks_in is not None and number == breaks_in * world:
            raise OSError("the shard is damaged")
        time.sleep(slow)
        yield {"x": torch.full((1000,), number), "n": number}


class Endless:
    """Epochs of many steps."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return batches(10_000)


def check(rank: int, number: int, mine: dict[str, Any]) -> None:
    assert mine["n"] == number * dist.get_world_size() + rank
    assert mine["x"].tolist() == [mine["n"]] * 1000


def steps_until_it_fails(rank: int, loader: td.DispatchLoader[Any]) -> tuple[int, str, str, Any, float]:
    """How many steps came, the error after them, and its time."""
    came = 0

    def loop() -> None:
        nonlocal came
        for mine in loader:
            check(rank, came, mine)
            came += 1

    kind, text, lost = outcome(loop)
    return came, kind, text, lost, time.monotonic()


def loader_breaks(rank: int, line: Line) -> None:
    node, prefetch = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(batches(9, breaks_in=5) if rank == 0 else None, prefetch=prefetch) as loader:
        # So that no rank is late at the end of the loop.
        dist.barrier()
        line.say(*steps_until_it_fails(rank, loader))
        line.hear()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 2), (1, 2)])
def test_an_error_of_the_loader_is_raised_by_all_in_its_step(
    node: int, prefetch: int, tmp_path: Path
) -> None:
    with Job(loader_breaks, 3, tmp_path) as job:
        job.tell_all((node, prefetch))
        told = job.hear_all()
        times = [at for *_, at in told]
        for rank, (came, kind, text, lost, _) in enumerate(told):
            assert came == 5 and "the shard is damaged" in text
            assert kind == ("OSError" if rank == 0 else "PeerFailedError")
            if rank:
                assert lost == 0 and "Traceback" in text and "in batches" in text
        assert max(times) - min(times) < NOTICED
        job.tell_all()
        job.expect_end()


def another_loop_stopped(rank: int, line: Line) -> None:
    def given() -> Iterator[dict[str, Any]]:
        yield from batches(3)
        # An inner DispatchLoader may raise this.
        raise td.errors.PeerLeftLoopError("a rank of another loop left it", 7)

    with td.DispatchLoader(given() if rank == 0 else None, prefetch=3) as loader:
        line.say(*steps_until_it_fails(rank, loader))
        line.hear()


def test_a_loader_may_raise_the_errors_of_another_loader(tmp_path: Path) -> None:
    with Job(another_loop_stopped, 2, tmp_path) as job:
        for rank, (came, kind, text, lost, _) in enumerate(job.hear_all()):
            assert came == 3 and "another loop" in text
            assert (kind, lost) == (("PeerFailedError", 0) if rank else ("PeerLeftLoopError", 7))
        job.tell_all()
        job.expect_end()


def one_cannot_be_sent(rank: int, line: Line) -> None:
    line.hear()

    def given() -> Iterator[Any]:
        yield from ({"n": 0}, {"n": 1}, {"n": 2})
        yield from ({"n": 3}, {"inner": [threading.Lock()]}, {"n": 5})

    with td.DispatchLoader(given() if rank == 0 else None) as loader:
        found = []
        kind, text, _ = outcome(lambda: found.extend(mine["n"] for mine in loader))
        line.say(found, kind, text)
        line.hear()


def test_a_batch_that_cannot_be_sent_is_named_on_all_ranks(tmp_path: Path) -> None:
    with Job(one_cannot_be_sent, 3, tmp_path) as job:
        job.tell_all()
        for rank, (found, kind, text) in enumerate(job.hear_all()):
            assert found == [rank]
            assert kind == ("NotPicklableError" if rank == 0 else "PeerFailedError")
            assert "rank 1's batch" in text and '["inner"][0]' in text, text
        job.tell_all()
        job.expect_end()


def killed(rank: int, line: Line) -> None:
    node, prefetch, victim = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Endless() if rank == 0 else None, prefetch=prefetch) as loader:
        iterator = iter(loader)
        for number in range(3):
            check(rank, number, next(iterator))
        line.say("ready")
        if rank != victim:
            line.hear()
        # Each step takes some time.
        came = 3
        while True:
            kind, text, lost = outcome(lambda number=came: check(rank, number, next(iterator)))
            if kind:
                break
            came += 1
            time.sleep(0.01)
        line.say(kind, text, lost, time.monotonic())


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all(node: int, prefetch: int, victim: int, tmp_path: Path) -> None:
    with Job(killed, 3, tmp_path) as job:
        job.tell_all((node, prefetch, victim))
        assert job.hear_all() == [("ready",)] * 3
        job.signal(victim, signal.SIGKILL)
        assert job.exit_code(victim) == -signal.SIGKILL
        begin = time.monotonic()
        others = [rank for rank in range(3) if rank != victim]
        job.tell_all(None, others)
        for kind, text, lost, at in job.hear_all(*others):
            assert (kind, lost) == ("PeerFailedError", victim), text
            assert at - begin < NOTICED
        job.expect_end(*others)


def one_leaves(rank: int, line: Line) -> None:
    node, prefetch, leaver = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Endless() if rank == 0 else None, prefetch=prefetch) as loader:
        for _ in range(2):
            came = 0

            def loop() -> None:
                nonlocal came
                for mine in loader:
                    check(rank, came, mine)
                    came += 1
                    if came == 4:
                        # All ranks have the step.
                        dist.barrier()
                        if rank == leaver:
                            return
                        # Time in which the others hear of it.
                        time.sleep(HEARD)

            kind, text, lost = outcome(loop)
            if rank == leaver:
                assert not kind
            else:
                assert (kind, lost) == ("PeerLeftLoopError", leaver), text
                assert f"rank {leaver} left the loop" in text
            line.say(came)
            line.hear()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_rank_that_leaves_early_stops_the_others(
    node: int, prefetch: int, leaver: int, tmp_path: Path
) -> None:
    with Job(one_leaves, 3, tmp_path) as job:
        job.tell_all((node, prefetch, leaver))
        # The same again with the same loader.
        for _ in range(2):
            for rank, (came,) in enumerate(job.hear_all()):
                # The source finds out that a receiver left in its next step.
                most = 4 if 0 in (leaver, prefetch) or rank == leaver else 4 + prefetch + 2
                assert 4 <= came <= most, (rank, came)
            job.tell_all()
        job.expect_end()


def one_leaves_near_the_end(rank: int, line: Line) -> None:
    leaver, steps = line.hear()
    came = 0
    all_were_read = threading.Event()

    def given() -> Iterator[dict[str, Any]]:
        yield from batches(10)
        all_were_read.set()

    with td.DispatchLoader(given() if rank == 0 else None, prefetch=5) as loader:

        def loop() -> None:
            nonlocal came
            for mine in loader:
                check(rank, came, mine)
                came += 1
                if came == steps:
                    # Where the source has not read the end, it does not know which step is the last.
                    assert rank != 0 or all_were_read.wait(PATIENCE)
                    dist.barrier()
                    if rank == leaver:
                        return
                    time.sleep(HEARD)

        kind, _, lost = outcome(loop)
        line.say(came, kind, lost)
        line.hear()


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("steps", [8, 10])
def test_a_rank_that_leaves_when_all_was_read_is_named_unless_it_took_the_last_step(
    leaver: int, steps: int, tmp_path: Path
) -> None:
    with Job(one_leaves_near_the_end, 2, tmp_path) as job:
        job.tell_all((leaver, steps))
        told = job.hear_all()
        assert told[leaver] == (steps, "", None)
        came, *how = told[1 - leaver]
        assert how == (["PeerLeftLoopError", leaver] if steps == 8 else ["", None])
        # The source finds out at the end of the data that a receiver left.
        assert came == steps or (leaver == 1 and steps <= came <= 10)
        job.tell_all()
        job.expect_end()


def all_leave(rank: int, line: Line) -> None:
    node, prefetch = line.hear()
    on_nodes(rank, node)
    with td.DispatchLoader(Endless() if rank == 0 else None, prefetch=prefetch) as loader:
        for epoch in range(8):
            for came, mine in enumerate(loader):
                check(rank, came, mine)
                if came == epoch:
                    break
                # The ranks are not in lockstep.
                time.sleep(0.002 * ((rank + epoch) % 3))
            assert loader.state_dict()["batches"] == (epoch + 1) * dist.get_world_size()
        dist.barrier()


@pytest.mark.parametrize(("node", "prefetch"), [(3, 0), (3, 3), (1, 2), (2, 1)])
def test_all_may_leave_alike_and_begin_again(node: int, prefetch: int, tmp_path: Path) -> None:
    run_job(all_leave, 3, tmp_path, (node, prefetch))


# Timeout of the group, in tests that wait for it.
TIMEOUT = 4.0


def impatient_group() -> Any:
    # The job's group has a longer timeout, because ranks may start slowly.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    return group


def one_is_elsewhere(rank: int, line: Line) -> None:
    with td.DispatchLoader(Endless() if rank == 0 else None, group=impatient_group()) as loader:
        iterator = iter(loader)
        next(iterator)
        line.say("begun")
        if rank == 0:
            line.hear()
        else:
            kind, text, _ = outcome(lambda: [next(iterator) for _ in range(10)])
            line.say(kind, text)
            line.hear()


def test_a_source_that_does_not_come_is_named_after_the_timeout_of_the_group(tmp_path: Path) -> None:
    with Job(one_is_elsewhere, 2, tmp_path) as job:
        assert job.hear_all() == [("begun",)] * 2
        kind, text = job.hear(1)
        assert kind == "TimedOutError" and "rank 0" in text, text
        job.tell_all()
        job.expect_end()


def all_are_elsewhere(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    with td.DispatchLoader(Endless() if rank == 0 else None, group=impatient_group(), prefetch=2) as loader:
        iterator = iter(loader)
        check(rank, 0, next(iterator))
        # Longer than the group's timeout, as an evaluation may take.
        time.sleep(TIMEOUT + 1.5)
        for number in range(1, 20):
            check(rank, number, next(iterator))
        line.say("done")
        line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_prefetched_steps_may_wait_longer_than_the_timeout_of_the_group(node: int, tmp_path: Path) -> None:
    """All ranks may be elsewhere, in an evaluation for example."""
    with Job(all_are_elsewhere, 2, tmp_path) as job:
        job.tell_all(node)
        assert job.hear_all() == [("done",)] * 2
        job.tell_all()
        job.expect_end()


def interrupted(rank: int, line: Line) -> None:
    prefetch = line.hear()
    slow = batches(100, slow=0.2) if rank == 0 else None
    with td.DispatchLoader(slow, prefetch=prefetch) as loader:
        iterator = iter(loader)
        next(iterator)
        line.say("in the loop")
        try:
            for _ in iterator:
                pass
        except KeyboardInterrupt:
            line.say("interrupted", time.monotonic())
        except (td.errors.PeerLeftLoopError, td.errors.PeerFailedError) as error:
            line.say(type(error).__name__, error.rank)
        line.hear()


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(prefetch: int, victim: int, tmp_path: Path) -> None:
    with Job(interrupted, 2, tmp_path) as job:
        job.tell_all(prefetch)
        assert job.hear_all() == [("in the loop",)] * 2
        job.interrupt(victim)
        begin = time.monotonic()
        said, at = job.hear(victim)
        assert said == "interrupted" and at - begin < NOTICED
        _, lost = job.hear(1 - victim)
        assert lost == victim
        job.tell_all()
        job.expect_end()


def forked(rank: int, line: Line) -> None:
    with td.DispatchLoader(Endless() if rank == 0 else None) as loader:
        iterator = iter(loader)
        next(iterator)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _, text, _ = outcome(lambda: iter(loader))
                if "made before a fork" in text:
                    _, text, _ = outcome(lambda: next(iterator))
                iterator.close()  # type: ignore[attr-defined]
                loader.close()
                code = 0 if "made before a fork" in text else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for number in range(1, 5):
            check(rank, number, next(iterator))
        dist.barrier()


def test_a_child_made_by_fork_leaves_its_parents_loader_alone(tmp_path: Path) -> None:
    run_job(forked, 2, tmp_path)


ENDS_IN_THE_LOOP = """
import sys, torch, torch.distributed as dist, tundish as td
dist.init_process_group("gloo")
rank = dist.get_rank()
given = ({"x": torch.zeros(1000)} for _ in range(100_000)) if rank == 0 else None
loader = td.DispatchLoader(given, prefetch=2)
for came, _ in enumerate(loader):
    if came == 3:
        dist.barrier()
        # With a loop under way and threads at work.
        sys.exit(0)
"""


def test_a_process_may_end_in_the_loop() -> None:
    for ended in run_ranks(["-c", ENDS_IN_THE_LOOP]):
        assert ended.returncode == 0, ended
        assert "Traceback" not in ended.stderr and "terminate" not in ended.stderr, ended
