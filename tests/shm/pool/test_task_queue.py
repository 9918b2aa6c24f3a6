"""The task queue's binding, between real processes."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.interrupts import until_it_waits

from tundish._native import TaskQueue, is_plain
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError

# Answers each task with its payload reversed; a task of kind 9 never ends.
WORKER = """
import sys, time
from tundish._native import TaskQueue
queue = TaskQueue.open(int(sys.argv[1]))
number = int(sys.argv[2])
while (task := queue.take(number, None)) is not None:
    task_id, kind, payload = task
    if kind == 9:
        time.sleep(1000)
    queue.finish(task_id, kind + 1, payload[::-1])
"""


@contextmanager
def process(source: str, *arguments: object, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    with subprocess.Popen(command, pass_fds=fds) as child:
        try:
            yield child
        finally:
            child.kill()


def worker(queue: TaskQueue, number: int = 0) -> "contextmanager[subprocess.Popen[bytes]]":
    return process(WORKER, queue.fd, number, fds=(queue.fd,))


def collect(queue: TaskQueue, count: int) -> dict[int, tuple[int, bytes]]:
    results: dict[int, tuple[int, bytes]] = {}
    while len(results) < count:
        assert queue.wait(30.0, True)
        results.update((task_id, (kind, payload)) for task_id, kind, payload in queue.collect())
    return results


def test_results_come_back_with_their_tickets():
    queue = TaskQueue(64, 4096)
    payloads = [bytes([number]) * number * 10 for number in range(200)]
    with worker(queue, 0) as first, worker(queue, 511) as second:
        one = queue.put(3, b"alone")
        assert collect(queue, 1) == {one: (4, b"enola")}
        task_ids: list[int] = []
        results: dict[int, tuple[int, bytes]] = {}
        while len(task_ids) < len(payloads):
            task_ids += queue.put_many(5, payloads[len(task_ids) :])
            results.update(collect(queue, 1))
        results.update(collect(queue, len(payloads) - len(results)))
        assert [results[task_id] for task_id in task_ids] == [(6, payload[::-1]) for payload in payloads]
        assert len({one, *task_ids}) == 201
        assert min(task_ids) > 0
        queue.stop()
        assert first.wait() == second.wait() == 0


def test_a_full_queue_takes_no_more_until_results_are_collected():
    queue = TaskQueue(4, 4096)
    assert len(queue.put_many(0, [b""] * 10)) == 4
    assert queue.put(0, b"") is None
    assert queue.put_many(0, [b""]) == []
    with worker(queue):
        assert len(collect(queue, 4)) == 4
        assert len(queue.put_many(0, [b"a"] * 3)) == 3
        assert len(queue.put_many(0, [])) == 0


def test_a_queued_task_can_be_revoked_and_a_running_one_cannot():
    queue = TaskQueue(4, 4096)
    queued = [queue.put(0, b"a"), queue.put(0, b"b")]
    assert not queue.running(queued[0])
    assert queue.revoke(queued[0])
    assert not queue.revoke(queued[0])
    with worker(queue) as child:
        assert list(collect(queue, 1)) == queued[1:]
        assert not queue.running(queued[1])
        endless = queue.put(9, b"")
        while not queue.running(endless):
            time.sleep(0.01)
        assert not queue.revoke(endless)
        child.kill()
        child.wait()
        assert queue.reap(0) == [endless]
        assert not queue.running(endless)
        assert queue.reap(0) == []
    assert not queue.revoke(2**64 - 1)


def test_a_payload_as_large_as_a_slot_is_taken_and_a_larger_one_refused():
    queue = TaskQueue(2, 4096)
    assert queue.capacity >= 4096 - 64
    with worker(queue):
        task_id = queue.put(0, b"x" * queue.capacity)
        assert collect(queue, 1)[task_id] == (1, b"x" * queue.capacity)
    with pytest.raises(InvalidInputError, match="does not fit into a slot"):
        queue.put(0, b"x" * (queue.capacity + 1))
    with pytest.raises(InvalidInputError, match="does not fit into a slot"):
        queue.put_many(0, [b"", b"x" * (queue.capacity + 1)])
    with pytest.raises(InvalidInputError, match="does not fit into a slot"):
        queue.put_many(0, [b"", "x" * (queue.capacity + 1)])
    with pytest.raises(InvalidTypeError, match="pickle anything else"):
        queue.put_many(0, [b"", ["a list"]])
    # Neither call has put anything.
    assert len(queue.put_many(0, [b""] * 3)) == 2


PLAIN = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63)),
    *(1.5, -0.0, float("inf"), float("-inf"), float("nan"), 1 - 2j, complex("nan+1j")),
    *("", "text", "zwölf\0\U0001f600", "x" * 4000),
]


class Whole(int):
    pass


class Text(str):
    pass


# Integers that are too large, text without UTF-8, subclasses, containers, and bytes.
NOT_PLAIN = [
    *(2**63, -(2**63) - 1, "x" * 5000, "\ud800", Whole(1), Text("a"), np.float64(1.5), np.int64(1)),
    *((), [], {}, b"", bytearray(), object()),
]


def test_plain_values_arrive_equal_and_of_their_types_both_ways():
    queue = TaskQueue(64, 4096)
    mine = TaskQueue.open(queue.fd)
    assert all(is_plain(value, queue.capacity) for value in PLAIN)
    task_ids = queue.put_many(7, PLAIN)
    there, back = [], []
    while len(there) < len(PLAIN):
        task_id, kind, content = mine.take(0, 0.0)
        assert kind == 7 and task_id == task_ids[len(there)]
        there.append(content)
        assert mine.finish_plain(task_id, 2**24 - 1, content)
        [(result, kind, content)] = queue.collect()
        assert (result, kind) == (task_id, 2**24 - 1)
        back.append(content)
    for arrived in (there, back):
        assert [(type(value), repr(value)) for value in arrived] == [
            (type(value), repr(value)) for value in PLAIN
        ]
    assert queue.put(0, "alone") and mine.take(0, 0.0)[1:] == (0, "alone")


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: f"{type(value).__name__} {str(value)[:3]!a}")
def test_other_values_are_not_taken_for_plain_ones(value):
    queue = TaskQueue(2, 4096)
    mine = TaskQueue.open(queue.fd)
    assert not is_plain(value, queue.capacity)
    queue.put(0, 5)
    task_id, _, _ = mine.take(0, 0.0)
    assert not mine.finish_plain(task_id, 0, value)
    # The task is as it was.
    assert queue.collect() == [] and queue.running(task_id)
    mine.finish(task_id, 1, b"")
    assert queue.collect() == [(task_id, 1, b"")]


def test_a_kind_that_no_message_can_have_is_refused():
    queue = TaskQueue(2, 4096)
    for put in (lambda: queue.put(2**24, b""), lambda: queue.put_many(2**24, [1])):
        with pytest.raises(InvalidInputError, match="below 2²⁴"):
            put()
    task_id = queue.put(0, 1)
    mine = TaskQueue.open(queue.fd)
    mine.take(0, 0.0)
    for finish in (mine.finish, mine.finish_plain):
        with pytest.raises(InvalidInputError, match="below 2²⁴"):
            finish(task_id, 2**24, 1)


def test_a_take_ends_when_its_time_is_over():
    queue = TaskQueue(2, 4096)
    mine = TaskQueue.open(queue.fd)
    begin = time.monotonic()
    with pytest.raises(TimedOutError, match="a task"):
        mine.take(0, 0.05)
    assert time.monotonic() - begin >= 0.05
    task_id = queue.put(1, b"a")
    assert mine.take(0, 0.0) == (task_id, 1, b"a")
    with pytest.raises(InvalidInputError, match="not taken"):
        mine.finish(task_id + 1, 1, b"")
    mine.finish(task_id, 2, b"b")
    with pytest.raises(InvalidInputError, match="finished already"):
        mine.finish(task_id, 2, b"b")
    assert queue.collect() == [(task_id, 2, b"b")]
    queue.stop()
    assert mine.take(0, None) is None


@pytest.mark.parametrize("caller", [True, False])
def test_a_poke_ends_a_wait_that_is_under_way_or_the_next_one(caller):
    queue = TaskQueue(2, 4096)
    begin = time.monotonic()
    timer = threading.Timer(0.05, queue.end_waits)
    timer.start()
    assert not queue.wait(30.0, caller)
    timer.join()
    queue.end_waits()
    assert not queue.wait(30.0, caller)
    # time: neither wait of 30 s lasts
    assert time.monotonic() - begin < 25
    assert not queue.wait(0.01, caller)


def test_a_result_after_a_callers_wait_wakes_the_background_thread():
    queue = TaskQueue(2, 4096)
    heard: list[bool] = []
    listener = threading.Thread(target=lambda: heard.append(queue.wait(30.0, False)))
    listener.start()
    assert not queue.wait(0.05, True)
    mine = TaskQueue.open(queue.fd)
    queue.put(0, b"")
    task_id, _, _ = mine.take(0, None)
    mine.finish(task_id, 0, b"")
    listener.join(10)
    assert heard == [True]


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (2**16 + 1, 4096), (1, 63), (1, 2**40)])
def test_impossible_sizes_are_refused(slots, slot_bytes):
    with pytest.raises(InvalidInputError, match="task queue"):
        TaskQueue(slots, slot_bytes)


def test_only_queues_are_opened():
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        with pytest.raises(InvalidInputError, match="sealed"):
            TaskQueue.open(file.fileno())
    with pytest.raises(InvalidInputError, match="descriptor"):
        TaskQueue.open(-1)


def test_each_side_has_its_own_calls():
    queue = TaskQueue(2, 4096)
    mine = TaskQueue.open(queue.fd)
    for call in (
        lambda: mine.put(0, b""),
        mine.collect,
        mine.stop,
        lambda: mine.wait(0, True),
        lambda: mine.fd,
    ):
        with pytest.raises(InvalidInputError, match="parent"):
            call()
    with pytest.raises(InvalidInputError, match=r"TaskQueue\.open"):
        queue.take(0, 0)
    for number in (-1, 512, 2**40):
        with pytest.raises(InvalidInputError, match="workers 0 to 511"):
            mine.take(number, 0)
        with pytest.raises(InvalidInputError, match="workers 0 to 511"):
            queue.reap(number)
    with pytest.raises(InvalidInputError, match="nan"):
        queue.wait(float("nan"), True)


WAITER = """
import sys
from tundish._native import TaskQueue
queue = TaskQueue(2, 4096)
print("ready", flush=True)
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "wait",
    [
        "queue.wait(1000.0, True)",
        "queue.wait(1000.0, False)",
        "TaskQueue.open(queue.fd).take(0, None)",
        "TaskQueue.open(queue.fd).take(0, 1000.0)",
    ],
)
def test_ctrl_c_ends_every_wait(wait):
    command = [sys.executable, "-c", WAITER.format(wait=wait)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        until_it_waits(child.pid)
        begin = time.monotonic()
        os.kill(child.pid, signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        # time: 20 times the promise of half a second, and far from the 1000 s of the wait
        assert time.monotonic() - begin < 10
        assert child.wait() == 0


def test_a_worker_that_looks_in_does_not_wait():
    queue = TaskQueue(8, 1024)
    mine = TaskQueue.open(queue.fd)
    begin = time.monotonic()
    with pytest.raises(TimedOutError):
        mine.take(0, 0.0)
    # time: long for a look, and a wait would not end
    assert time.monotonic() - begin < 10
