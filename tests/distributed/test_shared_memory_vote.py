"""Votes of ranks that share a node: those that go well leave the job's store alone, all others are as ever."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import LAUNCHER, RANK0, Job, Line, on_nodes, outcome, voter_on_node

from tundish._native import SharedVotes
from tundish.distributed import Voter
from tundish.distributed.job_store import JobStore

_RANKS = 3


def count_requests() -> list[str]:
    """Grows with each request of this process to the store from here on."""
    made: list[str] = []
    ask = JobStore._ask

    def counted(self: JobStore, what: str, *arguments: Any) -> Any:
        made.append(what)
        return ask(self, what, *arguments)

    JobStore._ask = counted  # type: ignore[method-assign]
    return made


def settle(voter: Voter) -> None:
    """The first votes are those in which the members get to know each other."""
    for _ in range(2):
        voter.vote(what="settling")


def votes_of_all_kinds(rank: int, line: Line) -> None:
    seed = line.hear()
    made = count_requests()
    with Voter() as voter:
        settle(voter)
        made.clear()
        for number in range(100):
            voter.vote(what="a step", same=f"step {number}")
        line.say(len(made))
        # Drawn alike on all ranks, so that each knows the result.
        drawn = random.Random(seed)
        for number in range(150):
            kind = drawn.choice(["well"] * 6 + ["fails", "differs", "notes", "gathers"])
            who = drawn.randrange(_RANKS)
            time.sleep(drawn.choice([0, 0, 0, 0.002, 0.15 if number % 10 == 0 else 0]) * (rank == who))
            what = f"step {number}"
            if kind == "fails":
                error = ValueError("mine") if rank == who else None
                text = outcome(lambda error=error, what=what: voter.vote(error, what=what))
                expected = (
                    ("ValueError", "mine", None)
                    if rank == who
                    else ("PeerFailedError", f"{what}: rank {who} failed with ValueError: mine", who)
                )
                assert text == expected
            elif kind == "differs":
                same = f"{what} of one" if rank == who else what
                assert outcome(lambda same=same, what=what: voter.vote(what=what, same=same))[0]
            elif kind == "notes":
                assert voter.vote(what=what, flag=rank == who)
            elif kind == "gathers":
                found = voter.gather(f"{rank} in {number}", what=what)
                assert found == ([f"{one} in {number}" for one in range(_RANKS)] if rank == 0 else [])
            else:
                assert not voter.vote(what=what, same=what)
        # Nobody leaves before all have voted.
        voter.vote(what="the end", flag=True)
    line.say("through")


@pytest.mark.parametrize("host", [LAUNCHER, RANK0])
@pytest.mark.parametrize("seed", [1, 2])
def test_successful_votes_leave_the_store_alone(seed: int, host: str, tmp_path: Path) -> None:
    with Job(votes_of_all_kinds, _RANKS, tmp_path, host=host) as job:
        for rank in range(_RANKS):
            job.tell(rank, seed)
        assert job.hear_all() == [(0,)] * _RANKS
        assert job.hear_all() == [("through",)] * _RANKS
        job.expect_end()


def votes_without_end(rank: int, line: Line) -> None:
    with Voter() as voter:
        settle(voter)
        line.say("settled")
        number = 0
        while True:
            kind, _, who = outcome(lambda number=number: voter.vote(what=f"step {number}", timeout=20))
            if kind:
                line.say(number, kind, who)
                break
            number += 1
        line.hear()


@pytest.mark.parametrize("wait", [0.0, 0.01, 0.05, 0.2])
def test_a_killed_rank_fails_the_same_vote_on_all_others(wait: float, tmp_path: Path) -> None:
    with Job(votes_without_end, _RANKS, tmp_path) as job:
        assert job.hear_all() == [("settled",)] * _RANKS
        time.sleep(wait)
        job.signal(1, signal.SIGKILL)
        begin = time.monotonic()
        first, last = job.hear(0), job.hear(2)
        assert time.monotonic() - begin < 1.0
        assert first == last
        assert first[1:] == ("PeerFailedError", 1)


def votes_with_one_that_stops(rank: int, line: Line) -> None:
    with Voter() as voter:
        settle(voter)
        line.say("settled")
        number, failed = 0, []
        while len(failed) < 1 or number < failed[0] + 50:
            # The second one to stop is stopped in it, or before it.
            kind, _, who = outcome(lambda number=number: voter.vote(what=f"step {number}", timeout=1.5))
            if kind:
                assert (kind, who) == ("VoteTimeoutError", (1,)) or rank == 1, (kind, who)
                failed.append(number)
                line.say("failed", number)
                # Until the stopped one runs again.
                line.hear()
            number += 1
        voter.vote(what="the end")
    line.say(failed)


def test_one_that_was_stopped_is_in_step_again(tmp_path: Path) -> None:
    with Job(votes_with_one_that_stops, _RANKS, tmp_path) as job:
        assert job.hear_all() == [("settled",)] * _RANKS
        time.sleep(0.05)
        job.signal(1, signal.SIGSTOP)
        told = job.hear(0)
        assert job.hear(2) == told
        job.signal(1, signal.SIGCONT)
        assert job.hear(1) == told
        for rank in range(_RANKS):
            job.tell(rank)
        assert job.hear_all() == [([told[1]],)] * _RANKS
        job.expect_end()


def votes_where_memory_is_out_of_reach(rank: int, line: Line) -> None:
    why = line.hear()
    made = count_requests()
    if why == "nodes":
        on_nodes(rank, 2)
    elif why == "rank 1" and rank == 1:

        def refuse(*_: Any) -> Any:
            raise PermissionError(1, "not yours")

        import tundish.distributed.shared_memory_vote as shared_memory_vote

        shared_memory_vote.SharedVotes = type("NoMemory", (), {"open": refuse, "__new__": refuse})  # type: ignore[misc,assignment]
    voter = voter_on_node(f"node {rank // 2}") if why == "nodes" else Voter()
    with voter:
        settle(voter)
        made.clear()
        begin = time.monotonic()
        for number in range(20):
            voter.vote(what="a step", same=f"{number}")
        # No patience is lost on it.
        assert time.monotonic() - begin < 1.5
        assert made
        kind, _, who = outcome(lambda: voter.vote(ValueError("x") if rank == 2 else None, what="a step"))
        assert who == (None if rank == 2 else 2) and kind
        voter.vote(what="the end")
    line.say("through")


@pytest.mark.parametrize("why", ["nodes", "rank 1"])
def test_memory_that_one_rank_cannot_reach_is_used_by_none(why: str, tmp_path: Path) -> None:
    with Job(votes_where_memory_is_out_of_reach, _RANKS, tmp_path) as job:
        for rank in range(_RANKS):
            job.tell(rank, why)
        assert job.hear_all() == [("through",)] * _RANKS
        job.expect_end()


def closes_while_another_thread_votes(rank: int, line: Line) -> None:
    voter = Voter()
    settle(voter)
    wait = line.hear()
    if rank == 0:
        said: list[Any] = []
        thread = threading.Thread(target=lambda: said.append(outcome(lambda: voter.vote(what="a step"))))
        thread.start()
        time.sleep(wait)
        voter.close()
        thread.join(20)
        assert not thread.is_alive()
        line.say(*said[0][:2])
    else:
        line.say(*outcome(lambda: voter.vote(what="a step", timeout=60))[:2])
        voter.close()


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_closing_ends_the_vote_of_another_thread_that_has_not_come_to_the_store(
    wait: float, tmp_path: Path
) -> None:
    with Job(closes_while_another_thread_votes, 2, tmp_path) as job:
        job.tell(0, wait)
        kind, text = job.hear(0)
        assert kind == "InvalidInputError" and "closed" in text
        job.tell(1, wait)
        assert job.hear(1)[0] == "PeerFailedError"
        job.expect_end()


def loses_the_host_of_the_store(rank: int, line: Line) -> None:
    with Voter() as voter:
        settle(voter)
        if rank > 0:
            # Votes of this pair need nothing of the host.
            pair = Voter(ranks=[1, 2])
            settle(pair)
        voter.vote(what="all are well")
        line.say("settled")
        line.hear()
        if rank > 0:
            found = [outcome(lambda: pair.vote(what="a step")) for _ in range(20)]
            line.say(sorted({kind for kind, _, _ in found}))
            line.say(*outcome(lambda: pair.vote(what="a step", flag=True))[:1])


def test_ranks_of_one_node_vote_on_when_the_host_of_the_store_is_gone(tmp_path: Path) -> None:
    with Job(loses_the_host_of_the_store, 3, tmp_path, host=RANK0) as job:
        assert job.hear_all() == [("settled",)] * 3
        job.signal(0, signal.SIGKILL)
        job.exit_code(0)
        for rank in (1, 2):
            job.tell(rank)
        assert job.hear_all(1, 2) == [([""],)] * 2
        # A vote that needs the store fails.
        assert job.hear_all(1, 2) == [("PeerFailedError",)] * 2


def holds_descriptors(rank: int, line: Line) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with Voter() as first:
        settle(first)
        first.vote(what="a step")
        before = count()
        voters = [Voter() for _ in range(5)]
        for voter in voters:
            settle(voter)
            voter.vote(what="a step")
        # Sockets to watch the other rank, and none for the shared memory.
        grown = count() - before
        for voter in voters:
            voter.close()
        first.vote(what="a step", flag=True)
        line.say(grown, count() - before)


def test_the_memory_takes_no_descriptors_once_all_have_joined(tmp_path: Path) -> None:
    with Job(holds_descriptors, 2, tmp_path) as job:
        (first, left), (second, also_left) = job.hear_all()
        assert first == second
        assert left <= 0 and also_left <= 0
        job.expect_end()


def test_shared_votes_are_found_by_their_address() -> None:
    made = SharedVotes(2)
    assert made.address is not None
    other = SharedVotes.open(made.address, 2)
    assert other.address is None
    made.join(0)
    assert not other.have_all_joined
    other.join(1)
    assert made.have_all_joined and made.address is None
    assert made.cast(0, 0, bytes(32)) is None
    assert made.wait(0, 0.01) is None
    assert other.cast(1, 0, bytes(32)) is True
    assert made.give_up(0) is True
    assert other.give_up(1) is False
    assert made.cast(0, 1, bytes(32)) is False
    with pytest.raises(IndexError):
        made.join(2)
    with pytest.raises(ValueError, match="32 bytes"):
        made.cast(0, 2, b"short")
    with pytest.raises(ValueError, match="negative"):
        made.wait(2, -1)
