"""Ranks that fail, die or stand still while the exchange group is connected, and what follows."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import LAUNCHER, RANK0, Job, Line, outcome

from tundish.checkpoint import open_readonly
from tundish.checkpoint.hf import exchange_group
from tundish.distributed import voter_of
from tundish.errors import PeerFailedError

PATIENCE = 60.0
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

    def fail_while_connecting(self, step: int, **arguments: Any) -> Any:
        """A save in which this rank cannot make the group."""

        def fail() -> None:
            raise OSError(errno.EMFILE, "too many open files")

        return self._while_connecting(fail, step, **arguments)

    def die_while_connecting(self, step: int, **arguments: Any) -> Any:
        """A save in which this rank is killed just before it meets the others for a group."""
        return self._while_connecting(lambda: os.kill(os.getpid(), signal.SIGKILL), step, **arguments)

    def stop_while_connecting(self, step: int, **arguments: Any) -> Any:
        """A save in which this rank is stopped just before it meets the others for a group."""
        return self._while_connecting(lambda: os.kill(os.getpid(), signal.SIGSTOP), step, **arguments)

    def fail_first_while_connecting(self, step: int) -> Any:
        """A save in which this rank cannot make a group, while the others wait for it to connect."""

        def fail() -> None:
            time.sleep(1)
            raise OSError(errno.EMFILE, "too many open files")

        return self._while_connecting(fail, step)

    def bind(self) -> None:
        """Bind the default group to a device, as `init_process_group` does with device_id=."""
        import torch

        torch.distributed.group.WORLD.bound_device_id = torch.device("cuda", 0)

    def is_bound(self) -> bool:
        import torch

        was_bound = torch.distributed.group.WORLD.bound_device_id is not None
        torch.distributed.group.WORLD.bound_device_id = None
        return was_bound

    def meet_in_a_group_of_the_scripts_own(self) -> None:
        import torch.distributed as distributed

        distributed.barrier(distributed.new_group(backend="gloo"))

    def _while_connecting(self, do: Callable[[], None], step: int, **arguments: Any) -> Any:
        from tundish.distributed import process_groups

        make = process_groups.new_subgroup

        def do_and_make(*given: Any) -> Any:
            do()
            return make(*given)

        process_groups.new_subgroup = do_and_make
        try:
            return self.save(step, **arguments)
        finally:
            process_groups.new_subgroup = make

    def lose_sight(self, step: int, **arguments: Any) -> Any:
        """A lazy save whose staging vote succeeds, of which this rank does not hear."""
        from tundish.errors import VoteTimeoutError

        voter = self._checkpointer._resources.queues[self._kind]._finalizer.voter
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
        return self._checkpointer.stats()["staging"]["in_use"], staging_stats()["in_use"]

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
    assert time.monotonic() - begun < 20
    return said


FINE = ("", "", None)


@pytest.mark.parametrize(
    ("kind", "trouble", "kinds"),
    [
        ("hf", "fail_while_connecting", ["PeerFailedError", "OSError"]),
        ("hf", "lose_sight", ["PeerFailedError", "VoteTimeoutError"]),
        ("dcp", "lose_sight", ["PeerFailedError", "VoteTimeoutError"]),
    ],
)
def test_no_rank_waits_and_the_next_save_succeeds(
    kind: str, trouble: str, kinds: list[str], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    staging = "eager" if trouble.endswith("while_connecting") else "lazy"
    with Job(saving, 2, tmp_path) as job:
        for rank in (0, 1):
            job.tell(rank, (root, kind))
        assert each(job, "save", 0) == [FINE, FINE]
        broken = each(job, "save", 1, last="break_group")
        assert [one[0] for one in broken] == ["PeerFailedError", "MemoryError"], broken
        if staging == "lazy":
            assert each(job, "save", 2, staging=staging) == [FINE, FINE]
        failed = each(job, "save", 3, last=trouble, staging=staging)
        assert [one[0] for one in failed] == kinds, failed
        assert each(job, "left") == [(0, 0), (0, 0)]
        # As often as it takes to see that the ranks are in step again.
        for step in (4, 5):
            assert each(job, "save", step, staging=staging) == [FINE, FINE]
        each(job, "close")
        for rank in (0, 1):
            job.tell(rank)
        job.expect_end()
    readonly = open_readonly(root)
    saved = [0, 4, 5] if staging == "eager" else [0, 2, 4, 5]
    assert [one.step for one in readonly.list()] == saved
    for one in readonly.list():
        readonly.verify(one.path)


def test_nobody_waits_for_a_rank_that_is_killed_before_it_connects(tmp_path: Path) -> None:
    with Job(saving, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (tmp_path / "root", "hf"))
        begun = time.monotonic()
        for rank in range(3):
            job.tell(rank, ("die_while_connecting" if rank == 2 else "save", (1,), {}))
        for rank in (0, 1):
            ((name, text, who),) = job.hear(rank)
            assert (name, who) == ("PeerFailedError", 2), text
        assert time.monotonic() - begun < 20


def test_ctrl_c_ends_the_wait_for_a_rank_that_does_not_connect(tmp_path: Path) -> None:
    with Job(saving, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (tmp_path / "root", "hf"))
        for rank in range(3):
            job.tell(rank, ("stop_while_connecting" if rank == 2 else "save", (1,), {}))
        # Its wait ends only when it is woken.
        time.sleep(2)
        begun = time.monotonic()
        job.signal(0, signal.SIGINT)
        assert job.hear(0)[0][0] == "KeyboardInterrupt"
        assert job.hear(1)[0][::2] == ("PeerFailedError", 0)
        assert time.monotonic() - begun < 20
        job.signal(2, signal.SIGCONT)
        assert job.hear(2)[0][0] == "PeerFailedError"
        for rank, came in enumerate(each(job, "save", 2)):
            assert came[0] == ("PeerFailedError" if rank else "InvalidInputError"), came
        each(job, "close")
        for rank in range(3):
            job.tell(rank)
        job.expect_end()


@pytest.mark.parametrize("host", [LAUNCHER, RANK0])
def test_a_rank_that_stands_still_before_it_connects_is_named_in_time(host: str, tmp_path: Path) -> None:
    timeout = 3.0
    with Job(saving, 3, tmp_path, host=host) as job:
        for rank in range(3):
            job.tell(rank, (tmp_path / "root", "hf", timeout))
        begun = time.monotonic()
        for rank in range(3):
            job.tell(rank, ("stop_while_connecting" if rank == 0 else "save", (1,), {}))
        for rank in (1, 2):
            ((name, text, who),) = job.hear(rank)
            assert (name, who) == ("VoteTimeoutError", (0,)), text
        assert time.monotonic() - begun < 20
        job.signal(0, signal.SIGCONT)
        assert job.hear(0)[0][::2] == ("VoteTimeoutError", (0,))
        for step in (2, 3):
            assert each(job, "save", step) == [FINE] * 3
        each(job, "close")
        for rank in range(3):
            job.tell(rank)
        job.expect_end()


def test_ctrl_c_is_heard_while_the_host_of_the_store_stands_still(tmp_path: Path) -> None:
    with Job(saving, 2, tmp_path, host=RANK0) as job:
        for rank in (0, 1):
            job.tell(rank, (tmp_path / "root", "hf"))
        for rank in (0, 1):
            job.tell(rank, ("save" if rank else "stop_while_connecting", (1,), {}))
        # It has to be at the making, which it comes to in tenths of a second.
        time.sleep(2)
        begun = time.monotonic()
        job.signal(1, signal.SIGINT)
        assert job.hear(1)[0][0] == "KeyboardInterrupt"
        assert time.monotonic() - begun < 20
        job.signal(0, signal.SIGCONT)
        assert job.hear(0)[0][0] in ("PeerFailedError", "VoteTimeoutError")
        each(job, "close")
        for rank in (0, 1):
            job.tell(rank)
        job.expect_end()


def test_a_group_that_comes_to_nothing_holds_up_nothing_of_the_scripts_own(tmp_path: Path) -> None:
    with Job(saving, 2, tmp_path, seconds=PATIENCE * 2) as job:
        for rank in (0, 1):
            job.tell(rank, (tmp_path / "root", "hf"))
        each(job, "bind")
        for rank in (0, 1):
            job.tell(rank, ("fail_first_while_connecting" if rank else "save", (1,), {}))
        assert [one[0] for (one,) in job.hear_all()] == ["PeerFailedError", "OSError"]
        assert each(job, "is_bound") == [True, True]
        each(job, "meet_in_a_group_of_the_scripts_own")
        assert each(job, "save", 2) == [FINE] * 2
        each(job, "close")
        for rank in (0, 1):
            job.tell(rank)
        job.expect_end()


def making_on_two_threads(rank: int, line: Line) -> None:
    """Two checkpointers save at once; of their groups, each rank begins to make another one first."""
    from concurrent.futures import ThreadPoolExecutor

    savings = [Saving(rank, root, "hf") for root in line.hear()]
    later = savings[1 - rank]._checkpointer._resources.voter.last_vote.name.rpartition("-")[0]
    make = exchange_group.temporary_group

    def make_in_turn(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith(later):
            # As long as the other one needs until it waits for the other rank.
            time.sleep(0.5)
        return make(name, *given, **named)

    exchange_group.temporary_group = make_in_turn
    with ThreadPoolExecutor() as threads:
        line.say(list(threads.map(lambda saving: saving.save(1), savings)))
    for saving in savings:
        saving.close()


def test_two_checkpointers_of_a_process_connect_at_once_in_any_order(tmp_path: Path) -> None:
    with Job(making_on_two_threads, 2, tmp_path) as job:
        begun = time.monotonic()
        for rank in (0, 1):
            job.tell(rank, (tmp_path / "a", tmp_path / "b"))
        assert job.hear_all() == [([FINE, FINE],)] * 2
        assert time.monotonic() - begun < 20
        job.expect_end()


def test_connecting_fails_with_a_peer_error_if_a_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    group = exchange_group.ExchangeGroup((0, 1), 30, voter_of(None))
    monkeypatch.setattr(exchange_group, "temporary_group", make)
    with pytest.raises(PeerFailedError, match="closed by peer"):
        group.connect("never made")
    assert group.is_absent and group.generation == 0
