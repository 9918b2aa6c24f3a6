"""Votes while ranks are killed, stopped, interrupted, or late.

Times are taken on the machine's monotonic clock, which all processes share: from just before the signal is
sent to the moment the surviving rank has its error in hand.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome, voter_on_node
from support.waiting import NOTICED

from tundish.distributed import Voter, build_once_per_node, vote, vote_protocol
from tundish.distributed import voter as voter_module
from tundish.distributed.peer_watch import PeerWatch, node_identity


def timed(call: Callable[[], Any]) -> tuple[str, str, Any, float]:
    return (*outcome(call), time.monotonic())


def killed_voter(rank: int, line: Line) -> None:
    # Ranks 0 and 2 are one node, 1 and 3 another.
    voter = voter_on_node(f"node {rank % 2}")
    voter.vote(what="all are well")
    child = 0
    if rank == 3:
        # Like a worker of a DataLoader, the child lives on and must not keep its parent looking alive.
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    line.say("ready", child)
    if rank == 3:
        line.hear()
    line.say(*timed(lambda: voter.vote(what="saving")))
    line.say(*timed(lambda: voter.vote(what="saving again")))
    voter.close()


@pytest.mark.parametrize("host", [LAUNCHER, FILE])
def test_a_killed_rank_is_named_on_all_nodes_within_a_second(host: str, tmp_path: Path) -> None:
    with Job(killed_voter, 4, tmp_path, host=host) as job:
        child = job.hear_all()[3][1]
        time.sleep(0.5)
        killed = time.monotonic()
        job.signal(3, signal.SIGKILL)
        try:
            for kind, text, named, at in job.hear_all(0, 1, 2):
                assert (kind, named) == ("PeerFailedError", 3)
                assert text.startswith("saving: rank 3 (process ")
                assert "was killed or vanished" in text
                assert at - killed < NOTICED
            for kind, _, named, _ in job.hear_all(0, 1, 2):
                assert (kind, named) == ("PeerFailedError", 3)
            job.expect_end(0, 1, 2)
        finally:
            os.kill(child, signal.SIGKILL)


def killed_at_work(rank: int, line: Line) -> None:
    """Works until it is told; rank 2 is done at once, and rank 1 never."""
    voter = voter_on_node(f"node {rank % 2}")
    voter.vote(what="all are well")
    undone: list[int] = []

    def work() -> int:
        line.say("works")
        if rank != 2:
            line.hear()
        return rank

    line.say(*timed(lambda: voter.run(work, what="connecting", undo=undone.append)))
    line.say(*outcome(lambda: voter.vote(what="saving")))
    line.say(undone)


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_a_rank_that_is_killed_while_the_others_work_with_it_is_named_by_all(
    host: str, tmp_path: Path
) -> None:
    with Job(killed_at_work, 4, tmp_path, host=host) as job:
        assert job.hear_all() == [("works",)] * 4
        killed = time.monotonic()
        job.signal(3, signal.SIGKILL)
        for kind, text, named, at in job.hear_all(0, 1, 2):
            assert (kind, named) == ("PeerFailedError", 3), text
            assert text.startswith("connecting: rank 3 (process ")
            assert at - killed < NOTICED
        assert [named for _, _, named in job.hear_all(0, 1, 2)] == [3] * 3
        # The others are still at work.
        assert job.hear_all(0, 1, 2) == [([],), ([],), ([2],)]


def killed_in_its_first_vote(rank: int, line: Line) -> None:
    connect = PeerWatch.connect

    def connect_and_tell(watch: PeerWatch, peers: Mapping[int, str]) -> None:
        connect(watch, peers)
        if rank == 1 and 3 in peers:
            line.say("watches")

    PeerWatch.connect = connect_and_tell  # type: ignore[method-assign]  # in this process alone
    voter = voter_on_node(f"node {rank % 2}")
    line.say("ready")
    if rank == 0:
        # The one that all the others wait for.
        line.hear()
    line.say(*timed(lambda: voter.vote(what="all are well")))
    voter.close()


@pytest.mark.parametrize("host", [LAUNCHER, FILE])
def test_a_rank_that_is_killed_in_the_first_vote_is_named_within_a_second(host: str, tmp_path: Path) -> None:
    with Job(killed_in_its_first_vote, 4, tmp_path, host=host) as job:
        assert job.hear_all() == [("ready",)] * 4
        assert job.hear(1) == ("watches",)
        killed = time.monotonic()
        job.signal(3, signal.SIGKILL)
        for kind, text, named, at in job.hear_all(1, 2):
            assert (kind, named) == ("PeerFailedError", 3), text
            assert "was killed or vanished" in text
            assert at - killed < NOTICED
        job.tell(0)
        kind, text, named, _ = job.hear(0)
        assert (kind, named) == ("PeerFailedError", 3), text
        job.expect_end(0, 1, 2)


def killed_before_they_meet(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    # Two on each node.
    voter_module.node_identity = lambda: f"node {rank % 2}"
    some = distributed.new_group([0, 1, 3], backend="gloo")
    vote(what="all are well")
    with Voter() as voter:
        voter.vote(what="all meet")
    line.say("ready")
    line.hear()
    calls = [lambda: Voter(timeout=20)]
    if rank < 2:
        calls.append(lambda: vote(what="the first one of a group", group=some, timeout=20))
    for call in calls:
        begun = time.monotonic()
        line.say(*outcome(call), time.monotonic() - begun)


@pytest.mark.parametrize("host", [LAUNCHER, FILE])
def test_a_rank_that_was_killed_before_a_new_voter_meets_is_not_waited_for(host: str, tmp_path: Path) -> None:
    with Job(killed_before_they_meet, 4, tmp_path, host=host) as job:
        job.hear_all()
        job.signal(3, signal.SIGKILL)
        assert job.exit_code(3) == -signal.SIGKILL
        job.tell_all(None, (0, 1, 2))
        told = [("connecting a new voter", message) for message in job.hear_all(0, 1, 2)]
        told += [("the first one of a group", message) for message in job.hear_all(0, 1)]
        for what, (kind, text, named, seconds) in told:
            assert (kind, named) == ("PeerFailedError", 3), text
            assert text.startswith(f"{what}: rank 3 (process ")
            assert "was killed or vanished" in text
            assert seconds < NOTICED
        job.expect_end(0, 1, 2)


def two_votes(rank: int, line: Line) -> None:
    vote(what="all are well")
    line.say("ready")
    if rank == 0:
        line.hear()
    line.say(*timed(lambda: vote(what="saving", timeout=2)))
    line.say(*timed(lambda: vote(what="saving again", timeout=20)))


def test_the_host_of_the_store_is_killed(tmp_path: Path) -> None:
    with Job(two_votes, 3, tmp_path, host=RANK0) as job:
        job.hear_all()
        time.sleep(0.5)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        for kind, text, named, at in job.hear_all(1, 2):
            assert (kind, named) == ("PeerFailedError", 0)
            assert "rank 0" in text
            assert at - killed < NOTICED
        for kind, _, named, _ in job.hear_all(1, 2):
            assert (kind, named) == ("PeerFailedError", 0)


@pytest.mark.parametrize(("host", "pause"), [(LAUNCHER, 0.0), (RANK0, 0.0), (RANK0, 0.3)])
def test_a_silent_rank_is_named_and_the_next_vote_works(host: str, pause: float, tmp_path: Path) -> None:
    # With the store on rank 0, the others cannot even read it while that rank is stopped. With a pause they
    # have voted before that, and rank 0 comes back before they can tell it that they gave up.
    with Job(two_votes, 3, tmp_path, host=host) as job:
        job.hear_all()
        time.sleep(pause)
        stopped = time.monotonic()
        job.signal(0, signal.SIGSTOP)
        for kind, _, named, at in job.hear_all(1, 2):
            assert (kind, named) == ("VoteTimeoutError", (0,))
            assert at - stopped < NOTICED
        if pause:
            job.signal(1, signal.SIGSTOP)
            job.signal(2, signal.SIGSTOP)
        job.tell(0)
        job.signal(0, signal.SIGCONT)
        time.sleep(pause)
        job.signal(1, signal.SIGCONT)
        job.signal(2, signal.SIGCONT)
        resumed = time.monotonic()
        kind, text, named, at = job.hear(0)
        assert (kind, named) == ("VoteTimeoutError", (0,))
        assert "given up" in text or "came to this vote after" in text
        assert at - resumed < NOTICED
        for kind, text, _, _ in job.hear_all():
            assert kind == "", text
        job.expect_end()


ROUNDS = 3


def host_that_is_stopped(rank: int, line: Line) -> None:
    vote(what="all are well")
    for _ in range(ROUNDS):
        line.say("ready")
        line.hear()
        line.say(*timed(lambda: vote(what="saving", timeout=0.5)))
    # A rank that ended after the last of them would rightly count as gone.
    vote(what="ending")


def test_ranks_that_give_up_before_they_can_vote_do_not_hold_up_the_host_of_the_store(tmp_path: Path) -> None:
    # Whether it votes before they can tell it that they gave up is a matter of luck, so more than once.
    with Job(host_that_is_stopped, 3, tmp_path, host=RANK0) as job:
        for _ in range(ROUNDS):
            assert job.hear_all() == [("ready",)] * 3
            job.signal(0, signal.SIGSTOP)
            job.tell_all(None, (1, 2))
            for kind, _, _, _ in job.hear_all(1, 2):
                assert kind == "VoteTimeoutError"
            job.tell(0)
            job.signal(0, signal.SIGCONT)
            resumed = time.monotonic()
            kind, text, named, at = job.hear(0)
            assert (kind, named) == ("VoteTimeoutError", (0,)), text
            assert at - resumed < NOTICED
        job.expect_end()


def stopped_voter(rank: int, line: Line) -> None:
    # The host of the store goes on before the stopped rank does.
    vote_protocol.LINGER_SECONDS = 1.0
    vote(what="all are well")
    for _ in range(2):
        line.say("ready")
        line.hear()
        line.say(*timed(lambda: vote(what="saving", timeout=1)))
    # The host of the store stays until all are here.
    vote(what="ending")


@pytest.mark.parametrize("host", [LAUNCHER, RANK0])
def test_a_rank_that_is_stopped_after_it_voted_hears_what_all_others_do(host: str, tmp_path: Path) -> None:
    # The order of events after the stop is random, so it is tried twice.
    with Job(stopped_voter, 3, tmp_path, host=host) as job:
        for _ in range(2):
            assert job.hear_all() == [("ready",)] * 3
            job.tell(2)
            time.sleep(0.3)
            job.signal(2, signal.SIGSTOP)
            stopped = time.monotonic()
            job.tell_all(None, (0, 1))
            for kind, text, _, _ in job.hear_all(0, 1):
                assert kind == "", text
            # It gives up 1 s after its timeout.
            time.sleep(max(0.0, stopped + 2 - time.monotonic()))
            job.signal(2, signal.SIGCONT)
            kind, text, _, _ = job.hear(2)
            assert kind == "", text
        job.expect_end()


def much_too_late(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    voter = Voter()
    store = distributed.distributed_c10d._get_default_store()
    if rank == 0:
        line.hear()
    began = time.monotonic()
    timeout = 30 if rank == 0 else 0.05
    kinds = [outcome(lambda: voter.vote(what="many", timeout=timeout))[0] for _ in range(40)]
    line.say(kinds)
    line.say(time.monotonic() - began)
    line.say(int(store.num_keys()))
    line.say(*outcome(lambda: voter.vote(what="at last")))
    # A complete vote deletes the keys of earlier ones.
    voter.vote(what="another")
    time.sleep(0.3)
    line.say(int(store.num_keys()))
    line.hear()
    voter.close()


def test_a_rank_forty_votes_late_gets_in_step(tmp_path: Path) -> None:
    with Job(much_too_late, 3, tmp_path) as job:
        for rank in (1, 2):
            assert job.hear(rank) == (["VoteTimeoutError"] * 40,)
            job.hear(rank)
            job.hear(rank)
        job.tell(0)
        assert job.hear(0) == (["VoteTimeoutError"] * 40,)
        assert job.hear(0)[0] < 30  # every one of them at once, whatever its own timeout
        job.hear(0)
        for rank in range(3):
            assert job.hear(rank) == ("", "", None)
        for rank in range(3):
            assert job.hear(rank)[0] < 40
        job.tell_all()
        job.expect_end()


def killed_builder(rank: int, line: Line) -> None:
    voter = voter_on_node(f"node {rank % 2}")

    def build() -> None:
        line.say("building")
        time.sleep(1 if rank == 0 else 60)

    line.say(*timed(lambda: voter.build_once_per_node(build, what="building the plan")))
    voter.close()


def test_a_killed_builder(tmp_path: Path) -> None:
    with Job(killed_builder, 4, tmp_path) as job:
        job.hear_all(0, 1)
        # Rank 0 is still in its own build when rank 1 dies, ranks 2 (another node) and 3 (the same) wait.
        killed = time.monotonic()
        job.signal(1, signal.SIGKILL)
        for kind, text, named, at in job.hear_all(2, 3):
            assert (kind, named) == ("PeerFailedError", 1)
            assert text.startswith("building the plan: rank 1 ")
            assert text.endswith("was killed or vanished")
            assert at - killed < NOTICED
        kind, _, named, _ = job.hear(0)
        assert (kind, named) == ("PeerFailedError", 1)
        job.expect_end(0, 2, 3)


def votes_without_end(rank: int, line: Line) -> None:
    with Voter() as voter:
        line.say("ready")
        number = 0
        while True:
            kind, _, who = outcome(lambda number=number: voter.vote(what=f"step {number}", timeout=60))
            if kind:
                line.say(number, kind, who)
                break
            number += 1
        line.hear()


@pytest.mark.parametrize("wait", [0.0, 0.01, 0.05, 0.2])
def test_a_killed_rank_fails_the_same_vote_on_all_others(wait: float, tmp_path: Path) -> None:
    with Job(votes_without_end, 3, tmp_path) as job:
        assert job.hear_all() == [("ready",)] * 3
        time.sleep(wait)
        job.signal(1, signal.SIGKILL)
        killed = time.monotonic()
        first, last = job.hear(0), job.hear(2)
        assert time.monotonic() - killed < NOTICED
        assert first == last
        assert first[1:] == ("PeerFailedError", 1)


def interrupted(rank: int, line: Line) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def build() -> None:
        line.say("building")
        time.sleep(60)

    line.say(*timed(lambda: build_once_per_node(build, what="building the plan")))
    vote(what="meeting again")
    line.say("waiting")
    if rank == 0:
        line.hear()
    line.say(*timed(lambda: vote(what="waiting for rank 0")))
    line.say(*outcome(lambda: vote(what="all is well again")))


def test_ctrl_c_is_told_to_the_others(tmp_path: Path) -> None:
    with Job(interrupted, 3, tmp_path) as job:
        assert job.hear(0) == ("building",)
        job.interrupt(0)
        sent = time.monotonic()
        answers = job.hear_all()
        assert answers[0][0] == "KeyboardInterrupt"
        for kind, text, named, at in answers[1:]:
            assert (kind, named) == ("PeerFailedError", 0)
            assert text == "building the plan: rank 0 failed with KeyboardInterrupt"
            assert at - sent < NOTICED
        job.hear_all()
        # In the vote itself, where the caller waits for others.
        job.interrupt(1)
        sent = time.monotonic()
        kind, _, _, at = job.hear(1)
        assert kind == "KeyboardInterrupt"
        assert at - sent < NOTICED
        kind, text, named, at = job.hear(2)
        assert (kind, named) == ("PeerFailedError", 1)
        assert "KeyboardInterrupt" in text
        assert at - sent < NOTICED
        job.tell(0)
        kind, text, named, _ = job.hear(0)
        assert (kind, named) == ("PeerFailedError", 1)
        # The rank that was interrupted in a vote says so at its next one, and the others name it.
        refused, *named = job.hear(1), job.hear(0), job.hear(2)
        assert refused[0] == "InvalidInputError" and "was interrupted in a vote and is closed" in refused[1]
        assert [(kind, rank) for kind, _, rank in named] == [("PeerFailedError", 1)] * 2
        job.expect_end()


def leaves_at_once(rank: int, line: Line) -> None:
    vote(what="all are well")
    line.say(*outcome(lambda: vote(what="the last step")))
    if rank == 0:
        os._exit(0)


@pytest.mark.parametrize("host", [RANK0, LAUNCHER])
def test_a_rank_that_exits_after_the_last_vote_fails_nobody(host: str, tmp_path: Path) -> None:
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with Job(leaves_at_once, 4, folder, host=host) as job:
            assert job.hear_all() == [("", "", None)] * 4


def voter_over_a_fork(rank: int, line: Line) -> None:
    voter = Voter()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kind, text, _ = outcome(lambda: voter.vote(what="in a child"))
        os.write(write, f"{kind} {text}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    line.say(os.read(read, 1000).decode())
    voter.vote(what="in the parent")
    voter.close()


def test_a_voter_stays_with_its_process(tmp_path: Path) -> None:
    with Job(voter_over_a_fork, 2, tmp_path) as job:
        for (said,) in job.hear_all():
            assert said.startswith("InvalidInputError in a child")
            assert "before a fork" in said
        job.expect_end()


def vote_first_in_a_child(rank: int, line: Line) -> None:
    child = os.fork()
    if child == 0:
        line.say(*outcome(lambda: vote(what="in a child", timeout=30)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    line.say(*outcome(lambda: vote(what="in the parent", timeout=30)))
    # The host of the store stays until all have read the outcome.
    line.hear()


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_the_first_vote_after_a_fork_is_one_of_its_process(host: str, tmp_path: Path) -> None:
    with Job(vote_first_in_a_child, 2, tmp_path, host=host) as job:
        assert job.hear_all() == [("", "", None)] * 2
        assert job.hear_all() == [("", "", None)] * 2
        job.tell_all()
        job.expect_end()


def fork_before_the_first_vote(rank: int, line: Line) -> None:
    read, write = os.pipe()
    # As a worker of a DataLoader, which lives on and votes never.
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    line.say(*outcome(lambda: vote(what="beside a child", timeout=30)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    line.say(*outcome(lambda: vote(what="without rank 1", timeout=60)))
    os.close(write)
    os.waitpid(child, 0)


def test_a_child_that_was_forked_before_the_first_vote_keeps_no_rank_alive(tmp_path: Path) -> None:
    with Job(fork_before_the_first_vote, 2, tmp_path) as job:
        assert job.hear_all() == [("", "", None)] * 2
        begun = time.monotonic()
        kind, text, named = job.hear(0)
        assert (kind, named) == ("PeerFailedError", 1), text
        assert time.monotonic() - begun < NOTICED
        job.expect_end(0)


def vote_and_end(rank: int, line: Line) -> None:
    with Voter(timeout=30) as voter:
        if rank == 2:
            # Its thread has voted, and does not come to read the outcome.
            _await = voter._protocol._wait  # type: ignore[union-attr]

            def late(current: Any) -> Any:
                line.say("voted")
                line.hear()
                return _await(current)

            voter._protocol._wait = late  # type: ignore[union-attr,method-assign]
        elif rank == 0:
            line.hear()
        line.say(outcome(lambda: voter.vote(what="the last step", timeout=30)))


def test_the_host_of_the_store_counts_nobody_twice(tmp_path: Path) -> None:
    with Job(vote_and_end, 3, tmp_path, host=RANK0) as job:
        assert job.hear(2) == ("voted",)
        job.tell(0)
        # One has read the outcome and ended, which the host sees; another has yet to read it.
        assert job.hear(1) == (("", "", None),)
        job.expect_end(1)
        time.sleep(0.5)
        job.tell(2)
        assert job.hear_all(0, 2) == [(("", "", None),)] * 2
        job.expect_end(0, 2)


def die(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once_voted(rank: int, line: Line) -> None:
    # The host of the store would wait so long for a rank that it does not know to be gone.
    vote_protocol.LINGER_SECONDS = voter_module.LINGER_SECONDS = 40.0
    voter = voter_on_node(node_identity())
    if rank == 1:
        voter._protocol._wait = die  # type: ignore[union-attr,method-assign]
    else:
        line.hear()
    started = time.monotonic()
    line.say(outcome(lambda: voter.vote(what="the first step", timeout=30)), time.monotonic() - started)
    line.hear()


def test_the_host_of_the_store_waits_for_nobody_whom_it_finds_gone(tmp_path: Path) -> None:
    with Job(die_once_voted, 3, tmp_path, host=RANK0) as job:
        assert job.exit_code(1) == -signal.SIGKILL
        job.tell(0)
        job.tell(2)
        for told, seconds in job.hear_all(0, 2):
            # All had voted.
            assert told[0] == ""
            assert seconds < NOTICED
        job.tell(2)
        job.tell(0)
