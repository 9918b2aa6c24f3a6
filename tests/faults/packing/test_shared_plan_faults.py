"""`td.pack(share=True)` on real ranks: built once, mapped by all, and no rank hangs when another fails."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome
from support.waiting import NOTICED

import tundish as td
from tundish import _native
from tundish.distributed import voter as voter_module
from tundish.packing import planning

LENGTHS = np.random.default_rng(0).integers(0, 300, 20_000)


def share(folder: Path, **options: object) -> td.PackPlan:
    options = {"lengths": LENGTHS, "max_length": 256, "seed": 4, "cache_dir": folder / "cache", **options}
    return td.pack(**{"share": True, "progress": False, **options})  # type: ignore[arg-type]


def good_and_bad_calls(rank: int, line: Line) -> None:
    folder = Path(line.hear())
    plan = share(folder)
    line.say("shared", plan.fingerprint, str(plan.path), plan.stats()["packs"])
    line.say(*outcome(lambda: share(folder, lengths=LENGTHS if rank else -LENGTHS)))
    line.say(*outcome(lambda: share(folder, order=[0.5] if rank == 1 else None)))
    line.say(*outcome(lambda: share(folder, progress="yes" if rank == 1 else None)))
    line.say(*outcome(lambda: share(folder, share=np.array([1, 2]) if rank == 1 else True)))
    line.say(*outcome(lambda: share(folder, seed=5 + rank)))
    for seed in (7, 8):
        share(folder, seed=seed)
    # Both plans are in the cache now.
    line.say(*outcome(lambda: share(folder, seed=7 + (rank == 1))))
    line.say(*outcome(lambda: share(folder, cache_dir=None, out=folder / f"plan-of-{rank}")))
    line.say(*outcome(lambda: share(folder, cache_dir=None, out=folder / "absent" / "plan")))
    line.say(*outcome(lambda: share(folder, out=folder / "plan" if rank == 2 else None)))
    # Local, so that one rank alone may call it.
    if rank == 0:
        td.pack(LENGTHS, 256, cache_dir=folder / "local", progress=False)
    again = share(folder, cache_dir=None, out=folder / "plan")
    line.say("again", again.fingerprint)


def test_all_ranks_map_one_plan_or_raise_one_error(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    with Job(good_and_bad_calls, 3, tmp_path) as job:
        job.tell_all(str(tmp_path / "shared"))
        shared = job.hear_all()
        assert len({message[1:3] for message in shared}) == 1
        alone = td.pack(LENGTHS, 256, seed=4)
        assert shared[0][1] == alone.fingerprint
        assert shared[0][3] == len(alone)

        def refused(kinds: list[str], says: str) -> None:
            told = job.hear_all()
            assert [message[0] for message in told] == kinds
            assert all(says in message[1] for message in told)

        peer, mismatch = "PeerFailedError", "PlanMismatchError"
        refused(["InvalidInputError", peer, peer], "negative length")
        refused([peer, "InvalidTypeError", peer], "order")
        refused([peer, "InvalidTypeError", peer], "progress")
        refused([peer, "InvalidTypeError", peer], "share must be True or False")
        for _ in ("none of the plans is there", "all of them are"):
            refused([peer, peer, peer], "same arguments")
        refused([peer, mismatch, mismatch], "same arguments")
        refused(["NotFoundError", peer, peer], "absent")
        refused([peer, peer, "InvalidInputError"], "not both")

        assert {message[1] for message in job.hear_all()} == {alone.fingerprint}
        job.expect_end()


class KilledWhileRead:
    """Lengths that take the process with them, as the system does that runs out of memory."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def __array__(self, *_arguments: object, **_options: object) -> np.ndarray:
        self.line.say("reading")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def killed_at_once(rank: int, line: Line) -> None:
    folder = Path(line.hear())
    lengths = KilledWhileRead(line) if rank == 1 else LENGTHS
    line.say(*outcome(lambda: share(folder, lengths=lengths)), time.monotonic())


def test_a_rank_killed_over_its_lengths_is_noticed_in_the_first_call(tmp_path: Path) -> None:
    with Job(killed_at_once, 3, tmp_path) as job:
        job.tell_all(str(tmp_path))
        assert job.hear(1) == ("reading",)
        killed = time.monotonic()
        for message in job.hear_all(0, 2):
            assert message[0] == "PeerFailedError"
            assert "rank 1" in message[1]
            assert message[-1] - killed < NOTICED
        job.expect_end(0, 2)


def slow_build(rank: int, line: Line) -> None:
    folder = Path(line.hear())
    if rank == 0:
        # A builder that takes longer than the default group's timeout, and can be killed on the way.
        publish = planning.publish_plan

        def slowly(*arguments: object) -> str:
            line.say("building")
            time.sleep(3)
            return publish(*arguments)  # type: ignore[arg-type]

        planning.publish_plan = slowly
    kind, text, *rest = outcome(lambda: share(folder).fingerprint)
    line.say(kind, text, *rest, time.monotonic())


def test_a_slow_builder_is_waited_for(tmp_path: Path) -> None:
    with Job(slow_build, 2, tmp_path, seconds=2.0) as job:
        job.tell_all(str(tmp_path))
        assert job.hear(0) == ("building",)
        assert [message[:2] for message in job.hear_all()] == [("", ""), ("", "")]
        job.expect_end()
    assert td.pack(LENGTHS, 256, seed=4).fingerprint in os.listdir(tmp_path / "cache")[0]


@pytest.mark.parametrize("again", [False, True])
def test_a_killed_builder_is_noticed_at_once(tmp_path: Path, again: bool) -> None:
    with Job(slow_build, 3, tmp_path) as job:
        job.tell_all(str(tmp_path))
        assert job.hear(0) == ("building",)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        for message in job.hear_all(1, 2):
            assert message[0] == "PeerFailedError"
            assert "rank 0" in message[1]
            assert message[-1] - killed < NOTICED
        job.expect_end(1, 2)
    if again:
        td.pack(LENGTHS, 256, seed=4, cache_dir=tmp_path / "cache").verify()
    visible = os.listdir(tmp_path / "cache") if (tmp_path / "cache").exists() else []
    assert len(visible) == again


def on_node(rank: int, size: int) -> None:
    on_nodes(rank, size)
    voter_module.node_identity = lambda: f"node {rank // size}"


def share_in(line: Line, destination: dict[str, Any]) -> None:
    lengths = np.tile(LENGTHS, 100)
    line.say(
        *outcome(lambda: share(Path(), lengths=lengths, cache_dir=None, **destination)), time.monotonic()
    )


def long_build(rank: int, line: Line) -> None:
    size, destination = line.hear()
    on_node(rank, size)
    pack, write, until = _native.pack, _native.pack_to_folder, time.monotonic() + 20

    def build(job: Any, *arguments: Any) -> Any:
        # As it is for a hundred times as many samples: the work of minutes.
        line.say("building")
        *_, tick, expected = arguments
        while time.monotonic() < until:
            built = pack(job, tick, expected)
            # One that takes less time than passes between two looks does not look at all.
            tick("pack", 0, 1)
        return write(job, *arguments) if destination else built

    if rank == 0:
        # In this process alone.
        _native.pack, _native.pack_to_folder = (pack, build) if destination else (build, write)
    share_in(line, destination)


@pytest.mark.parametrize("where", ["in files", "in memory"])
@pytest.mark.parametrize(
    ("nodes", "size", "end", "told"),
    [
        (1, 2, signal.SIGKILL, r"rank 1 \(process .*\) was killed or vanished"),
        (1, 3, signal.SIGKILL, r"rank 1 \(process .*\) was killed or vanished"),
        (1, 3, signal.SIGINT, "rank 1 failed with KeyboardInterrupt"),
        # The other node hears of it by the builder alone.
        (2, 2, signal.SIGKILL, r"rank 1 \(process .*\) was killed or vanished"),
    ],
)
def test_a_builder_ends_soon_after_another_rank_of_its_node(
    tmp_path: Path, nodes: int, size: int, end: signal.Signals, told: str, where: str
) -> None:
    (tmp_path / "plans").mkdir()
    with Job(long_build, nodes * size, tmp_path) as job:
        for rank in range(nodes * size):
            destination = {"out": tmp_path / "plans" / f"plan-{rank // size}"} if where == "in files" else {}
            job.tell(rank, (size, destination))
        assert job.hear(0) == ("building",)
        # The others wait for it.
        time.sleep(0.5)
        ended = time.monotonic()
        job.signal(1, end)
        others = [rank for rank in range(nodes * size) if rank != 1]
        for kind, text, named, at in job.hear_all(*others):
            assert (kind, named) == ("PeerFailedError", 1)
            assert re.search(rf": {told}$", text)
            assert at - ended < NOTICED
        if end == signal.SIGINT:
            assert job.hear(1)[0] == "KeyboardInterrupt"
            others.append(1)
        job.expect_end(*others)
    assert set(os.listdir(tmp_path / "plans")) <= {"plan-1"}


def two_plans(rank: int, line: Line) -> None:
    folder, is_group, places = line.hear()
    group = dist.new_group([0, 1, 2]) if is_group else None
    for seed, destination in enumerate(places):
        if destination == "files":
            options: dict[str, Any] = {"cache_dir": Path(folder) / "cache"}
        else:
            options = {"cache_dir": None}
        line.say(
            *outcome(lambda options=options, seed=seed: share(Path(), seed=seed, group=group, **options)),
            time.monotonic(),
        )
        line.hear()


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("places", [("files", "files"), ("files", "memory"), ("memory", "files")])
def test_a_rank_that_is_killed_between_two_plans_is_noticed_at_once(
    tmp_path: Path, places: tuple[str, str], is_group: bool
) -> None:
    with Job(two_plans, 3, tmp_path) as job:
        job.tell_all((str(tmp_path), is_group, places))
        assert not any(message[0] for message in job.hear_all())
        # The rank that builds the plan of the next call.
        job.signal(0, signal.SIGKILL)
        assert job.exit_code(0) == -signal.SIGKILL
        called = time.monotonic()
        job.tell_all(None, (1, 2))
        for kind, text, named, at in job.hear_all(1, 2):
            assert (kind, named) == ("PeerFailedError", 0), text
            assert at - called < NOTICED
        job.tell_all(None, (1, 2))
        job.expect_end(1, 2)


def interrupted_between_votes(rank: int, line: Line) -> None:
    if rank == 1:

        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        planning._build_in_memory = interrupted  # type: ignore[assignment]
    line.say(*outcome(lambda: td.pack(LENGTHS, 256, share=True, progress=False)), time.monotonic())


def test_a_rank_that_is_interrupted_between_two_votes_of_a_plan_in_memory_is_not_waited_for(
    tmp_path: Path,
) -> None:
    with Job(interrupted_between_votes, 3, tmp_path) as job:
        kind, *_, ended = job.hear(1)
        assert kind == "KeyboardInterrupt"
        for kind, text, named, at in job.hear_all(0, 2):
            assert (kind, named) == ("PeerFailedError", 1), text
            assert at - ended < NOTICED


def slow_build_in_memory(rank: int, line: Line) -> None:
    def build(*arguments: object) -> Any:
        line.say("building")
        time.sleep(30)

    if rank == 0:
        # In this process alone.
        _native.pack = build
    line.say(*outcome(lambda: td.pack(LENGTHS, 256, share=True, progress=False)), time.monotonic())


def test_a_builder_in_memory_that_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    with Job(slow_build_in_memory, 3, tmp_path) as job:
        assert job.hear(0) == ("building",)
        killed = time.monotonic()
        job.signal(0, signal.SIGKILL)
        for message in job.hear_all(1, 2):
            assert message[0] == "PeerFailedError"
            assert "rank 0" in message[1]
            assert message[-1] - killed < NOTICED
        job.expect_end(1, 2)
