"""Votes without a lost rank: errors of each rank, kinds of groups and stores, and leftovers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import (
    FILE,
    LAUNCHER,
    RANK0,
    Job,
    Line,
    outcome,
    run_job,
    voter_on_node,
)

from tundish.distributed import Voter, agreed, build_once_per_node, vote
from tundish.distributed import voter as voter_module
from tundish.errors import InvalidInputError


def statuses(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    vote(what="a good step")
    own = {1: KeyError("lost key"), 2: ValueError("x" * 100_000)}.get(rank)
    line.say(*outcome(lambda: vote(own, what="a bad step")))

    def block() -> None:
        with agreed("a block"):
            if rank == 3:
                raise OSError(5, "no disk")

    line.say(*outcome(block))
    pair = distributed.new_group([1, 3], use_local_synchronization=True)
    if rank in (1, 3):
        line.say(*outcome(lambda: vote(what="a pair's good step", group=pair)))
        own = RuntimeError("three") if rank == 3 else None
        line.say(*outcome(lambda: vote(own, what="a pair's bad step", group=pair)))
    else:
        line.say(*outcome(lambda: vote(what="not ours", group=distributed.GroupMember.NON_GROUP_MEMBER)))
    # The last vote of a job: the host of the store may be gone right after it.
    vote(what="the end")


def batches_in_a_block(rank: int, line: Line) -> None:
    def batches() -> Iterator[int]:
        with agreed("reading", timeout=60):
            yield 0
            yield 1

    def read() -> None:
        some = batches()
        assert next(some) == 0
        if rank == 1:
            some.close()
        else:
            list(some)

    line.say(*outcome(read))
    vote(what="the end")


def test_an_abandoned_generator_fails_its_block_on_all_ranks(tmp_path: Path) -> None:
    with Job(batches_in_a_block, 2, tmp_path) as job:
        (kind, text, named), (closed, *_) = job.hear_all()
        assert (kind, named, closed) == ("PeerFailedError", 1, "")
        assert "reading: rank 1 failed with GeneratorExit" in text


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_all_ranks_raise_one_error(host: str, tmp_path: Path) -> None:
    with Job(statuses, 4, tmp_path, host=host) as job:
        for rank, (kind, text, named) in enumerate(job.hear_all()):
            if rank == 1:
                assert (kind, text) == ("KeyError", "'lost key'")
            elif rank == 2:
                assert (kind, len(text)) == ("ValueError", 100_000)
            else:
                assert (kind, named) == ("PeerFailedError", 1)
                assert text.startswith("a bad step: rank 1 failed with KeyError: 'lost key'; rank 2 failed")
                assert "ValueError: xxx" in text
                assert len(text) < 5000
        for rank, (kind, text, named) in enumerate(job.hear_all()):
            if rank == 3:
                assert kind == "OSError"
            else:
                assert (kind, named) == ("PeerFailedError", 3)
                assert text == "a block: rank 3 failed with OSError: [Errno 5] no disk"
        assert job.hear(1) == ("", "", None)
        assert job.hear(3) == ("", "", None)
        assert job.hear(1) == (
            "PeerFailedError",
            "a pair's bad step: rank 3 failed with RuntimeError: three",
            3,
        )
        assert job.hear(3) == ("RuntimeError", "three", None)
        for rank in (0, 2):
            kind, text, _ = job.hear(rank)
            assert kind == "InvalidInputError"
            assert "not a member" in text
        job.expect_end()


def _open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _threads(expected: int) -> list[str]:
    """Names of this library's threads, once those that end have ended."""
    until = time.monotonic() + 5
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("tundish")]
        if len(names) <= expected or time.monotonic() > until:
            return names
        time.sleep(0.01)


def resources(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    store = distributed.distributed_c10d._get_default_store()

    def keys() -> int:
        # Nobody is in a vote while rank 0 counts.
        distributed.barrier()
        number = int(store.num_keys())
        distributed.barrier()
        return number

    vote(what="first")
    introduced = keys()
    vote(what="second")
    before = keys()
    line.say(before - introduced)
    for _ in range(100):
        vote(what="many")
    line.say(keys() - before)
    before = keys()
    for number in range(40):
        outcome(lambda number=number: vote(ValueError() if rank == number % 2 else None, what="bad ones"))
    vote(what="a good one")
    line.say(keys() - before)

    results: dict[str, list[Any]] = {}
    voters = {name: Voter() for name in ("a", "b")}

    def background(name: str) -> None:
        # The two threads' votes interleave differently on each rank, and fail on different ranks.
        own = {"a": 0, "b": 1}[name] == rank
        results[name] = []
        for step in range(20):
            time.sleep(0.001 * ((step * 7 + rank) % 5))
            error = ValueError(f"{name} {step}") if own and step % 4 == 0 else None
            results[name].append(outcome(lambda error=error: voters[name].vote(error, what=name))[0])

    threads = [threading.Thread(target=background, args=(name,)) for name in voters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.say(results)

    vote(what="before the count")
    descriptors = _open_descriptors()
    for _ in range(5):
        group = distributed.new_group(backend="gloo")
        vote(what="a group's", group=group)
        with Voter(group) as extra:
            extra.vote(what="a voter's")
        distributed.destroy_process_group(group)
        del group
    for voter in voters.values():
        voter.close()
    grown = _open_descriptors() - descriptors
    line.say(grown <= 0, _threads(1), len(voter_module.group_voters))
    distributed.barrier()
    distributed.destroy_process_group()
    gc.collect()
    line.say(len(voter_module.group_voters), _threads(0))
    line.say(*outcome(lambda: voters["a"].vote(what="after closing")))
    line.hear()


def test_nothing_grows_and_nothing_is_left(tmp_path: Path) -> None:
    with Job(resources, 2, tmp_path) as job:
        # The introductions of both ranks are deleted once both have read them.
        assert job.hear_all() == [(-2,), (-2,)]
        assert job.hear_all() == [(0,), (0,)]
        assert job.hear_all() == [(0,), (0,)]
        expected = {
            rank: {
                name: [
                    "" if step % 4 else ("ValueError" if failing == rank else "PeerFailedError")
                    for step in range(20)
                ]
                for failing, name in enumerate("ab")
            }
            for rank in range(2)
        }
        assert job.hear_all() == [(expected[0],), (expected[1],)]
        # Of the group's voter, until it goes with the group.
        assert job.hear_all() == [(True, ["tundish-vote"], 1)] * 2
        assert job.hear_all() == [(0, [])] * 2
        for kind, text, _ in job.hear_all():
            assert kind == "InvalidInputError"
            assert "closed" in text
        job.tell_all()
        job.expect_end()


def close_finishes(rank: int, line: Line) -> None:
    voter = Voter()
    kinds = []
    for step in range(60):
        # Rank 1 comes at about the moment when the others give up, sometimes before, sometimes after.
        voter.vote(what="in step")
        if rank == 1:
            time.sleep(0.03 + 0.0002 * step)
        timeout = 0.03 + 0.0001 * step
        kinds.append(outcome(lambda timeout=timeout: voter.vote(what="close", timeout=timeout))[0])
    line.say(kinds)
    voter.close()


def test_a_late_vote_counts_for_all_or_for_none(tmp_path: Path) -> None:
    with Job(close_finishes, 3, tmp_path) as job:
        first, *others = job.hear_all()
        assert others == [first, first]
        assert set(first[0]) <= {"", "VoteTimeoutError"}
        job.expect_end()


def closes_while_another_thread_votes(rank: int, line: Line) -> None:
    voter = Voter()
    if rank == 0:
        said: list[Any] = []
        thread = threading.Thread(target=lambda: said.append(outcome(lambda: voter.vote(what="a step"))))
        thread.start()
        time.sleep(line.hear())
        voter.close()
        thread.join(60)
        assert not thread.is_alive()
        line.say(*said[0][:2])
    else:
        line.hear()
        line.say(*outcome(lambda: voter.vote(what="a step", timeout=60))[:2])
        voter.close()


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_closing_ends_the_vote_of_another_thread(wait: float, tmp_path: Path) -> None:
    with Job(closes_while_another_thread_votes, 2, tmp_path) as job:
        job.tell(0, wait)
        kind, text = job.hear(0)
        assert kind == "InvalidInputError" and "closed" in text
        job.tell(1)
        assert job.hear(1)[0] == "PeerFailedError"
        job.expect_end()


def occupied(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    vote(what="all are well")
    store = distributed.distributed_c10d._get_default_store()
    spare = store.clone()
    # As gloo does while it waits for the members of a new group: the job's own client is taken.
    waiting = threading.Thread(target=store.wait, args=(["released"], timedelta(seconds=60)))
    waiting.start()
    time.sleep(0.2)
    vote(what="while the client is taken", timeout=20)
    line.say(waiting.is_alive())
    line.hear()
    spare.set("released", "now")
    waiting.join()


def test_a_client_of_the_store_that_others_block_does_not_block_votes(tmp_path: Path) -> None:
    with Job(occupied, 2, tmp_path) as job:
        assert job.hear_all() == [(True,)] * 2
        job.tell_all()
        job.expect_end()


def builds(rank: int, line: Line) -> None:
    began = time.monotonic()

    def slow() -> int:
        time.sleep(2)
        return rank

    # Two seconds, where the default group's timeout is one.
    line.say(build_once_per_node(slow, what="building"), time.monotonic() - began >= 2)
    # Ranks of a node need not be neighbours.
    two_nodes = voter_on_node(f"node {rank % 2}")
    line.say(two_nodes.build_once_per_node(lambda: rank, what="building on two nodes"))

    def fail() -> None:
        if rank == 1:
            raise MemoryError("too small a node")

    line.say(*outcome(lambda: two_nodes.build_once_per_node(fail, what="building in vain")))
    line.say(
        *outcome(lambda: two_nodes.build_once_per_node(lambda: time.sleep(2), what="too long", timeout=0.5))
    )
    two_nodes.vote(what="a vote after all that")
    two_nodes.close()


def test_one_builder_on_every_node(tmp_path: Path) -> None:
    with Job(builds, 4, tmp_path, seconds=1) as job:
        assert job.hear_all() == [(0, True), (None, True), (None, True), (None, True)]
        assert job.hear_all() == [(0,), (1,), (None,), (None,)]
        for rank, (kind, text, named) in enumerate(job.hear_all()):
            if rank == 1:
                assert (kind, text) == ("MemoryError", "too small a node")
            else:
                assert (kind, named) == ("PeerFailedError", 1)
                assert "building in vain: rank 1 failed with MemoryError: too small a node" in text
        answers = job.hear_all()
        assert [kind for kind, _, _ in answers] == ["VoteTimeoutError"] * 4
        assert [named for _, _, named in answers] == [(0,), (1,), (0, 1), (0, 1)]
        assert "given up" in answers[0][1]
        assert "did not vote within 0.5" in answers[3][1]
        job.expect_end()


def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    vote(what="alone")
    with pytest.raises(KeyError, match="mine"), agreed("alone"):
        raise KeyError("mine")
    assert build_once_per_node(lambda: 7, what="alone") == 7
    with Voter() as voter, pytest.raises(OSError, match="mine"):
        voter.vote(OSError("mine"), what="alone")


def test_several_processes_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInputError, match="init_process_group"):
        vote(what="too early")
    ran = []
    with pytest.raises(InvalidInputError, match="init_process_group"), agreed("too early"):
        ran.append(1)
    assert not ran


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent("""
        import time
        import torch.distributed as distributed
        from tundish.distributed import build_once_per_node, vote
        from tundish.distributed import is_local_rank0, local_rank, local_world_size
        from tundish.errors import PeerFailedError

        distributed.init_process_group("gloo")
        rank = distributed.get_rank()
        assert (local_rank(), local_world_size(), is_local_rank0()) == (rank, 2, rank == 0)
        assert build_once_per_node(lambda: "built", what="building") == ("built" if rank == 0 else None)
        try:
            vote(ValueError("text") if rank == 1 else None, what="a step")
        except (ValueError, PeerFailedError) as error:
            print(f"<{rank} {type(error).__name__} {error}>", flush=True)
        distributed.destroy_process_group()
        """)
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "<0 PeerFailedError a step: rank 1 failed with ValueError: text>" in done.stdout
    assert "<1 ValueError text>" in done.stdout


def some_ranks_vote(rank: int, line: Line) -> None:
    if rank == 1:
        return
    with Voter(ranks=[2, 0], timeout=20) as voter:
        assert voter.ranks == (2, 0)
        assert voter.gather(f"of {rank}", what="gathering") == (["of 2", "of 0"] if rank == 2 else [])
        kind, _, named = outcome(lambda: voter.vote(ValueError("no") if rank == 0 else None, what="voting"))
        assert (kind, named) == (("ValueError", None) if rank == 0 else ("PeerFailedError", 0))


def test_some_ranks_of_a_group_vote_among_themselves(tmp_path: Path) -> None:
    run_job(some_ranks_vote, 3, tmp_path)
