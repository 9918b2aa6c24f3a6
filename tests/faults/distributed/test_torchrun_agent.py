"""Votes while torchrun's agent, which serves the job's store, is killed or stopped."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from support.distributed.programs import DEVNULL, Program
from support.distributed.rank_processes import send_signal
from support.waiting import PATIENCE

_RANK = """
    import os, sys
    from multiprocessing.connection import Client
    import torch.distributed as distributed
    from support.distributed.rank_processes import outcome
    from tundish.distributed import Voter, vote

    distributed.init_process_group("gloo")
    vote(what="all are well")
    test = Client(sys.argv[1])
    test.send("ready")
    try:
        while True:
            what = test.recv()
            new = lambda: Voter(timeout=1).close()
            test.send(outcome(new if what == "a new voter" else lambda: vote(what=what, timeout=1)))
    except EOFError:
        # The test is over. Without the store there is no orderly end.
        os._exit(0)
"""


@contextmanager
def two_ranks(folder: Path) -> Iterator[tuple[Program, list[Connection]]]:
    """torchrun's agent, and a connection to each of its two ranks, which end when it is closed."""
    (folder / "rank.py").write_text(textwrap.dedent(_RANK))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", folder / "rank.py"]
    ranks: list[Connection] = []
    with Listener(str(folder / "test")) as listener:
        agent = Program([*words, listener.address], stdin=DEVNULL, env=environment, cwd=folder)
        try:
            ranks += [listener.accept() for _ in range(2)]
            assert [rank.recv() for rank in ranks] == ["ready"] * 2
            yield agent, ranks
        finally:
            for rank in ranks:
                rank.close()
            agent.kill()
            agent.wait()


def ask(ranks: list[Connection], what: str) -> list[Any]:
    """What each rank raised: the kind, the text, and the ranks that it names."""
    for rank in ranks:
        rank.send(what)
    assert all(rank.poll(PATIENCE) for rank in ranks), what
    return [rank.recv() for rank in ranks]


def test_ranks_whose_agent_was_killed_say_that_the_store_is_gone(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (agent, ranks):
        assert ask(ranks, "a good step") == [("", "", None)] * 2
        agent.kill()
        agent.wait()
        for what in ("saving", "saving again"):
            for kind, text, _ in ask(ranks, what):
                assert kind == "JobStoreLostError", text
                assert "the job's store is gone or refuses" in text and "restart the job" in text
        # torch tries for long to connect.
        for kind, text, _ in ask(ranks, "a new voter"):
            assert kind in ("JobStoreLostError", "VoteTimeoutError") and "store" in text


def test_ranks_whose_agent_is_stopped_give_up_and_go_on_when_it_continues(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (agent, ranks):
        send_signal(agent.pid, signal.SIGSTOP)
        for kind, text, _ in ask(ranks, "saving"):
            assert kind == "VoteTimeoutError"
            assert text.startswith("saving: the job's store did not answer within 1 s: look at the launcher")
        send_signal(agent.pid, signal.SIGCONT)
        assert ask(ranks, "saving again") == [("", "", None)] * 2
        assert ask(ranks, "a new voter") == [("", "", None)] * 2
