"""A pool starts beside a thread that logs; a start that is interrupted, or lacks descriptors, leaves nothing."""

from __future__ import annotations

import logging
import logging.handlers
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shm.pool_programs import Program

import tundish as td

# A thread sends a signal some time after each start. The handler raises in the main thread, like that of Ctrl-C.
INTERRUPTED = """
import random, threading
class Interrupt(BaseException):
    pass
def interrupt(*_):
    raise Interrupt
signal.signal(signal.SIGUSR1, interrupt)
draw, main = random.Random(7), threading.main_thread().ident
go, sent = threading.Semaphore(0), threading.Semaphore(0)
def send():
    while True:
        go.acquire()
        time.sleep(draw.uniform(0, 1.5 * took))
        signal.pthread_kill(main, signal.SIGUSR1)
        sent.release()
threading.Thread(target=send, daemon=True).start()
took = 0.0
for _ in range(3):
    begin = time.monotonic()
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        # The time of the last start, when all caches are warm.
        took = time.monotonic() - begin
        pool.submit(1).result()
begun = 0
for _ in range(60):
    kept = []
    try:
        begin = time.monotonic()
        go.release()
        kept.append(td.shm.SharedPool(tasks.echo, max_workers=2))
        # On a busy machine some starts take several times as long as others.
        took = time.monotonic() - begin
        sent.acquire()
        time.sleep(1)
    except Interrupt:
        begun += len(kept)
    for pool in kept:
        assert pool.submit(5).result(20) == 5
        pool.shutdown()
    deadline = time.monotonic() + 5
    while threading.active_count() > 2:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.001)
say(begun)
"""


def test_a_beginning_that_is_interrupted_anywhere_leaves_nothing(tmp_path: Path) -> None:
    with Program(INTERRUPTED, tmp_path) as program:
        # Some signals came too late, but not all.
        assert int(program.read_line()) < 55
        program.process.wait(timeout=10)
        program.expect_nobody(1)


# In a process of its own, since the number of free descriptors that matters depends on those that are open already.
EXHAUSTED = """
import resource
from support.shm.leftovers import watched
from tundish.errors import TundishError

def all_descriptors():
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return taken

def what_comes_of_a_pool():
    try:
        pool = td.shm.SharedPool(tasks.echo, max_workers=2)
    except TundishError:
        return "refused"
    with pool:
        try:
            return "works" if pool.submit(1).result(20) == 1 else "wrong"
        except TundishError:
            return "broken"

def outcomes():
    with td.shm.SharedPool(tasks.echo, max_workers=2) as pool:
        assert pool.submit(1).result(20) == 1
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = set()
    for free in range(24):
        filled = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
        try:
            filled = all_descriptors()
            for number in filled[len(filled) - free :]:
                os.close(number)
            del filled[len(filled) - free :]
            seen.add(what_comes_of_a_pool())
        finally:
            for number in filled:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return seen

with watched():
    seen = outcomes()
say(*sorted(seen))
"""


def test_a_pool_that_finds_no_descriptors_says_so_and_leaves_none(tmp_path: Path) -> None:
    with Program(EXHAUSTED, tmp_path) as program:
        assert program.read_line() == "broken refused works"
        assert program.process.wait(timeout=10) == 0


def log_and_return(item: int) -> int:
    logging.getLogger("test_pool").warning("item %d", item)
    return item


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger for `log_and_return`, without handlers."""
    made = logging.getLogger("test_pool")
    made.propagate = False
    yield made
    for handler in list(made.handlers):
        made.removeHandler(handler)
        handler.close()


@pytest.mark.parametrize("is_buffered", [False, True])
def test_another_thread_may_log_to_a_file_while_a_pool_starts(
    is_buffered: bool, tmp_path: Path, logger: logging.Logger
) -> None:
    file = logging.FileHandler(tmp_path / "log")
    logger.addHandler(file)
    if is_buffered:
        # A record of it holds its lock, and then wants that of `file`.
        logger.addHandler(logging.handlers.MemoryHandler(1, target=file))
    record, stop = "x" * 500_000, threading.Event()

    def log() -> None:
        while not stop.is_set():
            logger.warning(record)
            with file.lock:
                file.stream.truncate(0)
            time.sleep(0.001)

    thread = threading.Thread(target=log)
    thread.start()
    try:
        for _ in range(5):
            pool = td.shm.SharedPool(log_and_return, max_workers=1)
            try:
                assert [pool.submit(item).result(60) for item in range(3)] == [0, 1, 2]
            finally:
                pool.shutdown(timeout=1)
    finally:
        stop.set()
        thread.join()
