"""Exchanges that a rank gives up, and votes of which it does not hear: the next save succeeds."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED, PATIENCE

from tundish.checkpoint import open_readonly
from tundish.checkpoint.hf import gather

ROWS = 64


class Saving:
    """A rank that saves tensors of which each rank has a part; the orders are its methods."""

    def __init__(self, rank: int, root: Path, kind: str, timeout: float = PATIENCE * 2) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from tundish.checkpoint import Checkpointer

        self._kind = kind
        self._rank = rank
        self._mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self._failures: list[BaseException] = []
        # Mostly longer than the test: what is told in time is not told by a timeout.
        self._checkpointer = Checkpointer(root, on_failure=self._failures.append, timeout=timeout)

    def save(self, step: int, **arguments: Any) -> Any:
        saves: list[Any] = []
        came = outcome(lambda: saves.append(self._begin(step, **arguments)))
        return outcome(lambda: saves[0].result(PATIENCE)) if saves else came

    def _begin(self, step: int, **arguments: Any) -> Any:
        import torch
        from torch.distributed.tensor import DTensor, Shard

        part = torch.full((ROWS, 4), step + self._rank / 2)
        state = {"spread": DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)}
        # Another form each time, so that DCP compares.
        state[f"of {step}"] = torch.ones(step + 1)
        if arguments.get("staging") == "lazy":
            arguments["optimizer"] = torch.optim.SGD([torch.nn.Parameter(part)])
        return getattr(self._checkpointer, f"save_{self._kind}")(step, state, **arguments)

    def break_group(self, step: int, **arguments: Any) -> Any:
        """A save that this rank gives up in the middle of an exchange with the others."""
        from tundish.checkpoint.dcp import plan as dcp_plan
        from tundish.checkpoint.hf.gather import Gather

        kind: Any
        kind, name = (Gather, "_exchange") if self._kind == "hf" else (dcp_plan, "_pack_values")
        whole = getattr(kind, name)

        def give_up(*given: Any, **named: Any) -> Any:
            setattr(kind, name, whole)
            raise MemoryError("no memory")

        setattr(kind, name, give_up)
        return self.save(step, **arguments)

    def lose_sight(self, step: int, **arguments: Any) -> Any:
        """A lazy save whose staging vote succeeds, of which this rank does not hear."""
        from tundish.errors import VoteTimeoutError

        voter = self._checkpointer._session.queues[self._kind]._finalizer.voter
        vote = voter.vote

        def lose(*given: Any, **named: Any) -> Any:
            came = vote(*given, **named)
            if "staging" in named["what"]:
                del voter.vote
                raise VoteTimeoutError("the store did not answer", ())
            return came

        voter.vote = lose
        return self.save(step, **arguments)

    def left(self) -> tuple[int, int]:
        from tundish._native import staging_stats

        self._checkpointer.wait(PATIENCE)
        return self._checkpointer.stats()["staging_in_use_bytes"], staging_stats()["in_use"]

    def close(self) -> None:
        self._checkpointer.close()


def saving(rank: int, line: Line) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    this = Saving(rank, *line.hear())
    while (order := line.hear()) is not None:
        name, arguments, named = order
        line.say(getattr(this, name)(*arguments, **named))


def each(job: Job, name: str, *arguments: Any, last: str = "", **named: Any) -> list[Any]:
    """Tell all ranks, and the last one something else where that is given; what they say, in time."""
    begun = time.monotonic()
    for rank in range(job.size):
        job.tell(rank, (last if last and rank == job.size - 1 else name, arguments, named))
    said = [one for (one,) in job.hear_all()]
    assert time.monotonic() - begun < NOTICED
    return said


FINE = ("", "", None)


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_no_rank_waits_and_the_next_save_succeeds(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(saving, 2, tmp_path) as job:
        job.tell_all((root, kind))
        assert each(job, "save", 0) == [FINE, FINE]
        broken = each(job, "save", 1, last="break_group")
        assert [one[0] for one in broken] == ["PeerFailedError", "MemoryError"], broken
        assert each(job, "save", 2, staging="lazy") == [FINE, FINE]
        failed = each(job, "save", 3, last="lose_sight", staging="lazy")
        assert [one[0] for one in failed] == ["PeerFailedError", "VoteTimeoutError"], failed
        assert each(job, "left") == [(0, 0), (0, 0)]
        # As often as it takes to see that the ranks are in step again.
        for step in (4, 5):
            assert each(job, "save", step, staging="lazy") == [FINE, FINE]
        each(job, "close")
        job.tell_all()
        job.expect_end()
    readonly = open_readonly(root)
    assert [one.step for one in readonly.list()] == [0, 2, 4, 5]
    for one in readonly.list():
        readonly.verify(one.path)


def making_on_two_threads(rank: int, line: Line) -> None:
    """Two checkpointers save at once; of their groups, each rank begins to make another one first."""
    from concurrent.futures import ThreadPoolExecutor

    savings = [Saving(rank, root, "hf") for root in line.hear()]
    later = savings[1 - rank]._checkpointer._session.voter.last_vote.name.rpartition("-")[0]
    make = gather.temporary_group

    def make_in_turn(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith(later):
            # As long as the other one needs until it waits for the other rank.
            time.sleep(0.5)
        return make(name, *given, **named)

    gather.temporary_group = make_in_turn
    with ThreadPoolExecutor() as threads:
        line.say(list(threads.map(lambda saving: saving.save(1), savings)))
    for saving in savings:
        saving.close()


def test_two_checkpointers_of_a_process_connect_at_once_in_any_order(tmp_path: Path) -> None:
    with Job(making_on_two_threads, 2, tmp_path) as job:
        begun = time.monotonic()
        job.tell_all((tmp_path / "a", tmp_path / "b"))
        assert job.hear_all() == [([FINE, FINE],)] * 2
        assert time.monotonic() - begun < NOTICED
        job.expect_end()
