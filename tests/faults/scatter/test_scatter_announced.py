"""Batches that are announced while they are still being written, and what comes between.

The ranks believe that there is a processor for each of them, as whoever has none is not told beforehand.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome

import tundish as td
from batches import Summed, same

# The promise: a failure, or a rank that was killed, is known within so many seconds.
KNOWN = 1.0
# 400 KB, which is announced.
LARGE = 100_000


def with_processors() -> None:
    import tundish.scatter.session as member

    assert callable(member.available_processors)
    member.available_processors = lambda: 64


def on_write(act: Callable[[int], None]) -> None:
    """Call `act` with the number of each batch that is about to be written, from 1 on."""
    from tundish.scatter.outgoing_batch import OutgoingBatch

    write, count = OutgoingBatch.write, 0

    def writing(departure: Any, parcel: Any) -> None:
        nonlocal count
        count += 1
        act(count)
        write(departure, parcel)

    OutgoingBatch.write = writing  # type: ignore[method-assign]


def on_wait(act: Callable[[], None]) -> None:
    """Call `act` once, when a receiver is about to wait for what comes."""
    from tundish.scatter.source import ScatterSession

    receive = ScatterSession._receive

    def receiving(scatterer: Any) -> Any:
        ScatterSession._receive = receive  # type: ignore[method-assign]
        act()
        return receive(scatterer)

    ScatterSession._receive = receiving  # type: ignore[method-assign]


def batch(number: int, rank: int, size: int = LARGE) -> dict[str, Any]:
    return {"x": torch.full((size,), 10 * number + rank, dtype=torch.int32), "rest": [torch.ones(number + 1)]}


def a_round(rank: int, number: int, size: int = LARGE) -> dict[str, Any]:
    mine: dict[str, Any] = td.scatter_batch(
        [batch(number, other, size) for other in range(3)] if rank == 0 else None
    )
    check(mine, rank, number, size)
    return mine


def check(mine: dict[str, Any], rank: int, number: int, size: int = LARGE) -> None:
    assert mine["x"].shape == (size,) and bool((mine["x"] == 10 * number + rank).all())
    assert mine["rest"][0].tolist() == [1.0] * (number + 1)


def many_rounds(rank: int, line: Line) -> None:
    with_processors()
    sizes = [LARGE, 10, 33_000, 32_000, 250_000, 0, LARGE]
    kept = [a_round(rank, number, sizes[number % len(sizes)]) for number in range(40)]
    for number, mine in enumerate(kept):
        check(mine, rank, number, sizes[number % len(sizes)])


def test_batches_of_all_sizes_come_whole_and_stay(tmp_path: Path) -> None:
    with Job(many_rounds, 3, tmp_path) as job:
        job.expect_end()


def alike_and_others(rank: int, line: Line) -> None:
    with_processors()
    kept = []
    for number in range(60):
        # Rows in which only what the tensors hold changes, or values beside them as well, up to texts that no message
        # holds; and in between what is of another form, too small to be announced, nothing, or many small tensors.
        row, place = divmod(number, 10)
        size = LARGE + row * (place > 7)
        mine: Any = {"x": [torch.full((size,), 10 * number + rank, dtype=torch.int32)], "of": (row, None)}
        if row in (1, 3):
            mine = {**mine, "number": number, "text": "x" * (number * 1000)}
        elif row in (4, 5):
            mine = [torch.full((row,), 10.0 * number + rank) for _ in range(100)]
        if place == 5 and row % 2:
            mine = None if row == 3 else {"x": torch.tensor(number + rank)}
        others = [None if mine is None else shifted(mine, other - rank) for other in range(3)]
        got = td.scatter_batch(others if rank == 0 else None)
        assert same(got, mine), (number, got)
        kept.append((got, mine))
        for tensor in td.tree.find_all(torch.Tensor, got):
            tensor += rank
        dist.barrier()
    for got, mine in kept:
        assert same(got, mine if mine is None else shifted(mine, rank))


def shifted(batch: Any, by: int) -> Any:
    return td.tree.map_only(torch.Tensor, lambda tensor: tensor + by, batch)


def test_batches_of_a_form_that_was_foretold_and_of_others_come_as_they_are(tmp_path: Path) -> None:
    with Job(alike_and_others, 3, tmp_path) as job:
        job.expect_end()


def objects_that_look(rank: int, line: Line) -> None:
    with_processors()
    if line.hear():
        on_nodes(rank, 1)
    for number in range(1, 9):
        value = -1 if number == 6 else number

        def take(value: int = value) -> Any:
            def one(other: int) -> Any:
                return {"x": torch.full((LARGE,), other), "o": [Summed(torch.full((LARGE,), value))]}

            return td.scatter_batch([one(0), one(1)] if rank == 0 else None)

        if rank and number == 6:
            kind, text, *_ = outcome(take)
            assert kind and "cannot be made here" in text, (kind, text)
            continue
        got = take()
        assert bool((got["x"] == rank).all())
        for values in (got["o"][0].values, got["o"][0].copy):
            assert bool((values == value).all()), number


@pytest.mark.parametrize("are_apart", [False, True], ids=["one node", "two nodes"])
def test_objects_that_look_at_their_tensors_are_made_when_these_are_there(
    tmp_path: Path, are_apart: bool
) -> None:
    with Job(objects_that_look, 2, tmp_path) as job:
        for rank in range(2):
            job.tell(rank, are_apart)
        job.expect_end()


def fails_when_foretold(rank: int, line: Line) -> None:
    with_processors()
    foretold = foretelling()
    for _ in range(6):
        a_round(rank, 1)
        # Whoever has other messages to look at is not told.
        dist.barrier()
    assert rank or foretold.count(6) == 2, foretold
    given = [batch(1, other) for other in range(3)]
    given[2]["rest"].append(threading.Lock())
    begin = time.monotonic()
    kind, text, lost = outcome(lambda: td.scatter_batch(given if rank == 0 else None))
    assert time.monotonic() - begin < KNOWN
    if rank == 0:
        assert kind == "NotPicklableError" and 'rank 2\'s batch["rest"][1]' in text, text
    else:
        assert (kind, lost) == ("PeerFailedError", 0) and "NotPicklableError" in text, text
    assert rank or foretold.count(7) == 2, foretold
    for number in range(8):
        a_round(rank, number)


def foretelling() -> list[int]:
    """The rounds of which receivers are told before anybody has looked at their batches, as it goes on."""
    from tundish.scatter.transport.shared_memory import SharedMemorySender

    foretell, found = SharedMemorySender.foretell, []

    def telling(lane: SharedMemorySender, *asked: int) -> Any:
        announcement = foretell(lane, *asked)
        if announcement is not None:
            found.append(asked[0])
        return announcement

    SharedMemorySender.foretell = telling  # type: ignore[method-assign]
    return found


def test_a_batch_that_was_foretold_and_cannot_be_sent_is_refused_on_all(tmp_path: Path) -> None:
    with Job(fails_when_foretold, 3, tmp_path) as job:
        job.expect_end()


def looked_at_before_it_is_written() -> None:
    """Write a batch that was announced once its receiver has looked at all that there is to see."""
    from tundish.scatter.transport.shared_memory import SharedMemorySender

    fill = SharedMemorySender.fill

    def filling(lane: SharedMemorySender, *given: Any) -> int:
        deadline = time.monotonic() + 30
        lane._collect()
        while lane._ahead and time.monotonic() < deadline:
            time.sleep(0.001)
            lane._collect()
        return fill(lane, *given)

    SharedMemorySender.fill = filling  # type: ignore[method-assign]


def told_early(rank: int, line: Line) -> None:
    with_processors()
    foretold = foretelling()
    looked_at_before_it_is_written()
    for _ in range(5):
        a_round(rank, 1)
    assert rank or foretold.count(6) == 2, foretold
    # Of another form, and nothing; and then once more what was told.
    mixed = td.scatter_batch([batch(1, 0), batch(1, 1, LARGE + 1), None] if rank == 0 else None)
    if rank == 2:
        assert mixed is None
    else:
        check(mixed, rank, 1, LARGE + rank)
    kept = [a_round(rank, 1) for _ in range(6)]
    given = [batch(1, other) for other in range(3)]
    given[2]["rest"].append(threading.Lock())
    kind, text, _ = outcome(lambda: td.scatter_batch(given if rank == 0 else None))
    assert kind == ("PeerFailedError" if rank else "NotPicklableError"), text
    kept += [a_round(rank, 1) for _ in range(4)]
    # Of which the source says no more than that it fails.
    kind, text, _ = outcome(lambda: td.scatter_batch([None] if rank == 0 else None))
    assert kind == ("PeerFailedError" if rank else "InvalidInputError"), text
    kept += [a_round(rank, 1) for _ in range(4)]
    for mine in kept:
        check(mine, rank, 1)
    # For so large a batch no memory is set aside.
    for _ in range(4):
        a_round(rank, 1, 1 << 22)
    dist.barrier()
    assert 27 not in foretold
    a_round(rank, 1, 1 << 22)
    assert rank or foretold.count(27) == 2, foretold


def test_receivers_are_told_of_the_next_batch_at_the_end_of_a_round(tmp_path: Path) -> None:
    with Job(told_early, 3, tmp_path) as job:
        job.expect_end()


def not_told_early(rank: int, line: Line) -> None:
    from tundish.scatter.transport.shared_memory import HungUpError, SharedMemorySender

    with_processors()
    foretell, failed = SharedMemorySender.foretell, []

    def failing(lane: Any, number: int, *most: int) -> Any:
        if most:
            failed.append(number)
            raise (HungUpError(lane.rank) if number % 2 else OSError("no memory"))
        return foretell(lane, number)

    SharedMemorySender.foretell = failing  # type: ignore[method-assign]
    for _ in range(8):
        a_round(rank, 1)
    assert failed == ([] if rank else sorted([*range(2, 10)] * 2))


def test_a_round_is_given_though_nobody_can_be_told_of_the_next_one(tmp_path: Path) -> None:
    with Job(not_told_early, 3, tmp_path) as job:
        job.expect_end()


def fails_in_writing(rank: int, line: Line) -> None:
    with_processors()
    a_round(rank, 0)

    def fail(count: int) -> None:
        if count == 2:
            raise RuntimeError("the disk behind this batch is gone")

    if rank == 0:
        on_write(fail)
    begin = time.monotonic()
    kind, text, lost = outcome(lambda: a_round(rank, 1))
    assert time.monotonic() - begin < KNOWN
    if rank == 0:
        assert kind == "RuntimeError"
    elif rank == 1:
        assert not kind
    else:
        assert (kind, lost) == ("PeerFailedError", 0) and "the disk behind this batch is gone" in text
    for number in range(2, 8):
        a_round(rank, number)


def test_what_fails_while_a_batch_is_written_is_told_to_who_waits_for_it(tmp_path: Path) -> None:
    with Job(fails_in_writing, 3, tmp_path) as job:
        job.expect_end()


def dies_in_writing(rank: int, line: Line) -> None:
    with_processors()
    a_round(rank, 0)

    def die(count: int) -> None:
        line.say(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        on_write(die)
    line.say(*outcome(lambda: a_round(rank, 1)), time.monotonic())


def test_a_source_that_dies_while_it_writes_is_named(tmp_path: Path) -> None:
    with Job(dies_in_writing, 3, tmp_path) as job:
        (died,) = job.hear(0)
        for kind, text, lost, at in job.hear_all(1, 2):
            assert (kind, lost) == ("PeerFailedError", 0), text
            assert at - died < KNOWN
        job.expect_end(1, 2)


def interrupted(rank: int, line: Line) -> None:
    with_processors()
    a_round(rank, 0)
    written = threading.Event()

    def hold(_: int) -> None:
        if not written.is_set():
            line.say("writing")
            line.hear()

    if rank == 0:
        on_write(hold)
    elif rank == 2:
        # In the call: who is interrupted before it has not made it.
        on_wait(lambda: line.say("waiting"))
    kind, _, _ = outcome(lambda: a_round(rank, 1))
    assert kind == ("KeyboardInterrupt" if rank == 2 else "")
    written.set()
    line.say("on")
    for number in range(2, 8):
        a_round(rank, number)


@pytest.mark.parametrize("repeat", range(3))
def test_ctrl_c_while_a_batch_is_awaited_leaves_the_rounds_in_step(repeat: int, tmp_path: Path) -> None:
    with Job(interrupted, 3, tmp_path) as job:
        assert job.hear(2) == ("waiting",)
        assert job.hear(0) == ("writing",)
        # Now it is announced to both.
        time.sleep(0.1 * repeat)
        job.signal(2, signal.SIGINT)
        assert job.hear(2) == ("on",)
        job.tell(0)
        assert job.hear(0) == ("writing",)
        job.tell(0)
        assert job.hear_all(0, 1) == [("on",)] * 2
        job.expect_end()


def interrupted_with_the_next_round(rank: int, line: Line) -> None:
    from tundish.scatter.source import ScatterSession

    with_processors()
    size, are_apart = line.hear()
    if are_apart:
        on_nodes(rank, 1)
    for _ in range(3):
        a_round(rank, 1, size)
    dist.barrier()
    if rank == 0:
        # Before anybody was told anything.
        lanes = ScatterSession._lanes

        def interrupt(scatterer: Any) -> Any:
            raise KeyboardInterrupt

        ScatterSession._lanes = interrupt  # type: ignore[method-assign]
        kind, *_ = outcome(lambda: a_round(rank, 1, size))
        ScatterSession._lanes = lanes  # type: ignore[method-assign]
    else:
        receive = ScatterSession._receive

        def interrupted(scatterer: Any) -> Any:
            message = receive(scatterer)
            if message is None or message[0].number == scatterer._number:
                return message
            ScatterSession._receive = receive  # type: ignore[method-assign]
            raise KeyboardInterrupt

        ScatterSession._receive = interrupted  # type: ignore[method-assign]
        kind, *_ = outcome(lambda: a_round(rank, 1, size))
        assert ScatterSession._receive is receive
    assert kind == "KeyboardInterrupt"
    for number in range(4, 8):
        a_round(rank, number, size)


@pytest.mark.parametrize("are_apart", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("size", [10, LARGE])
def test_ctrl_c_with_a_message_of_the_next_round_in_hand_leaves_it_there(
    size: int, are_apart: bool, tmp_path: Path
) -> None:
    with Job(interrupted_with_the_next_round, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (size, are_apart))
        job.expect_end()


def without_what_was_announced(rank: int, line: Line) -> None:
    from tundish.scatter.transport.shared_memory import SharedMemoryReceiver

    with_processors()
    is_foretold = line.hear()

    def numbered(number: int) -> None:
        # Of forms of which none comes twice nobody is told before they are looked at.
        size = LARGE if is_foretold else LARGE + number
        given = [{"x": torch.full((size,), number + other), "n": number} for other in range(3)]
        mine = td.scatter_batch(given if rank == 0 else None)
        assert mine["n"] == number and bool((mine["x"] == number + rank).all())

    for number in range(6):
        numbered(number)
        # Whoever has other messages to look at is not told.
        dist.barrier()
    opening = SharedMemoryReceiver._open

    def gone(end: Any, head: Any) -> Any:
        SharedMemoryReceiver._open = opening  # type: ignore[method-assign]
        raise td.errors.SegmentGoneError("it was given back")

    if rank == 1:
        SharedMemoryReceiver._open = gone  # type: ignore[method-assign]
    kind, text, _ = outcome(lambda: numbered(6))
    if rank == 1:
        assert kind == "SegmentGoneError" and "rank 0, the source, announced" in text, (kind, text)
    else:
        assert not kind, text
    for number in range(7, 15):
        numbered(number)


@pytest.mark.parametrize("is_foretold", [False, True])
def test_a_batch_whose_announcement_did_not_come_is_no_other(is_foretold: bool, tmp_path: Path) -> None:
    with Job(without_what_was_announced, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, is_foretold)
        job.expect_end()
