"""Scatters between nodes, interrupted anywhere on the way, and with batches of all sizes in a row."""

from __future__ import annotations

import mmap
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line, on_nodes, outcome

import tundish as td
from batches import same
from tundish.scatter import session as member
from tundish.scatter.session import Member
from tundish.scatter.source import ScatterSession
from tundish.scatter.transport.gloo import GlooSender, Sending

MIB = 1 << 20


def batch_of(number: int, rank: int) -> Any:
    """Of a form that came before or not, of a size that has room behind a head or not."""
    random.seed(1000 * number + rank)
    sizes = random.choice(
        [[8] * random.randint(1, 70), [MIB // 8 - 1, 8], [MIB // 8], [random.randrange(100)], [], [0, 3]]
    )
    tensors = [torch.full((size,), number + rank, dtype=torch.int64) for size in sizes]
    return {"number": number, "tensors": tensors, "said": "x" * random.choice([0, 10, 5000])}


def a_round(rank: int, number: int) -> None:
    given = [batch_of(number, other) for other in range(3)] if rank == 0 else None
    mine = td.scatter_batch(given)
    assert same(mine, batch_of(number, rank)), number


def batches_of_all_sizes(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    for number in range(200):
        a_round(rank, number)


def test_batches_of_all_sizes_come_whole_in_any_order(tmp_path: Path) -> None:
    with Job(batches_of_all_sizes, 3, tmp_path) as job:
        job.expect_end()


# What a source goes through once its batches are taken apart.
STEPS = {
    function.__code__
    for function in (
        ScatterSession._send,
        ScatterSession._post,
        ScatterSession._sent_far,
        Sending.__init__,
        Sending.post,
        GlooSender.messages,
        GlooSender.post,
        GlooSender._written,
        Member._begin_sending,
        Member._have_finished,
    )
}


def interrupted_at_each_step(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    step = number = 0
    a_round(rank, number)
    while True:
        number += 1
        step += 1
        left = step

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code not in STEPS:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        if rank == 0:
            sys.settrace(trace)
        kind, text, _ = outcome(lambda number=number: a_round(rank, number))  # type: ignore[misc]
        sys.settrace(None)
        assert kind in (("KeyboardInterrupt", "") if rank == 0 else ("PeerFailedError", "")), (step, text)
        # Whatever became of it, all are in step, also with what was told of schemas and of the room for the next.
        for _ in range(2):
            number += 1
            a_round(rank, number)
        number += 1
        is_over = td.scatter_batch([left > 0] * 3 if rank == 0 else None)
        if is_over:
            break
    if rank == 0:
        line.say(step)


def test_ctrl_c_at_any_step_of_sending_leaves_the_rounds_in_step(tmp_path: Path) -> None:
    with Job(interrupted_at_each_step, 3, tmp_path, seconds=10.0) as job:
        (steps,) = job.hear(0)
        assert steps > 50
        job.expect_end()


def small_ones_kept(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    kept = []
    for number in range(60):
        # What comes before it leaves a lot of room for each.
        large = {"x": [torch.full((MIB // 16,), number + part) for part in range(16)]}
        for batch in (large, {"x": torch.full((3,), number)}):
            mine = td.scatter_batch([batch] * 2 if rank == 0 else None)
            assert same(mine, batch)
        kept.append(mine)
    assert all(mine["x"].tolist() == [number] * 3 for number, mine in enumerate(kept))
    line.say(size_in_mib())


def size_in_mib() -> float:
    """The addresses that this process has taken for memory of files and the like."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE / MIB


def test_whoever_keeps_small_batches_keeps_no_room_of_large_ones(tmp_path: Path) -> None:
    with Job(small_ones_kept, 2, tmp_path) as job:
        source, receiver = (size for (size,) in job.hear_all())
        job.expect_end()
    # 60 of them would be 480 MiB.
    assert receiver < source + 200, (source, receiver)


def messages_counted(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    counts: list[int] = []
    post = GlooSender.post

    def counted(lane: GlooSender, messages: list[torch.Tensor], works: list[Any]) -> None:
        counts.append(len(messages))
        post(lane, messages, works)

    GlooSender.post = counted  # type: ignore[method-assign]
    small, large = torch.arange(1000), torch.arange(MIB // 8)
    # Of small tensors a head and the bytes, then both in one; of less, too; of more, apart; then in one again.
    for batch in [small, small, small[:10], small, small, [small, large], small, small, "nothing", small]:
        mine = td.scatter_batch([batch] * 2 if rank == 0 else None)
        assert same(mine, batch)
    if rank == 0:
        line.say(counts)


def test_small_batches_come_in_one_message(tmp_path: Path) -> None:
    with Job(messages_counted, 2, tmp_path) as job:
        (counts,) = job.hear(0)
        job.expect_end()
    assert counts == [2, 1, 1, 2, 1, 4, 2, 1, 1, 2]


def changed_on_its_way(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    described = member._described

    def interrupted(_: BaseException) -> str:
        member._described = described
        raise KeyboardInterrupt

    if line.hear():
        member._described = interrupted
    given = {"x": torch.zeros(MIB), "small": torch.zeros(3)}
    assert same(td.scatter_batch([given] * 3 if rank == 0 else None), given)
    line.say("ready")
    if rank != 0:
        # Longer than the source waits.
        line.hear()
    kind, text, lost = outcome(
        lambda: line.say("came", td.scatter_batch([given] * 3 if rank == 0 else None)["x"].sum().item())
    )
    for tensor in given.values():
        tensor.fill_(1.0)
    line.say(kind, text, lost)
    assert same(td.scatter_batch([given] * 3 if rank == 0 else None), given)


@pytest.mark.parametrize(
    ("end", "again", "said"),
    [
        ("TimedOutError", False, "rank 1 did not come within 2 s"),
        ("KeyboardInterrupt", False, "failed with KeyboardInterrupt"),
        # Twice, the second time as the others are about to be told.
        ("KeyboardInterrupt", True, "left this round"),
    ],
)
def test_what_changes_after_the_source_left_a_round_is_not_taken_for_what_was_given(
    end: str, again: bool, said: str, tmp_path: Path
) -> None:
    with Job(changed_on_its_way, 3, tmp_path, seconds=2.0 if end == "TimedOutError" else 30.0) as job:
        for rank in range(3):
            job.tell(rank, again)
        assert job.hear_all() == [("ready",)] * 3
        if end == "KeyboardInterrupt":
            # As it waits for rank 1.
            time.sleep(0.3)
            job.signal(0, signal.SIGINT)
        kind, text, _ = job.hear(0)
        assert kind == end, text
        for rank in (1, 2):
            job.tell(rank)
            kind, text, lost = job.hear(rank)
            assert (kind, lost) == ("PeerFailedError", 0) and said in text, (kind, text)
        job.expect_end()
