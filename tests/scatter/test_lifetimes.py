"""A `DispatchLoader`, its batches and its errors are freed when nobody uses them; it cannot be copied."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import tundish as td
from tundish.errors import NotPicklableError


def test_batches_are_freed_after_the_loop() -> None:
    class Batch:
        pass

    made: list[weakref.ref[Batch]] = []

    def batches() -> Iterator[Batch]:
        for _ in range(4):
            batch = Batch()
            made.append(weakref.ref(batch))
            yield batch
            del batch

    with td.DispatchLoader(batches(), prefetch=1) as loader:
        for _ in loader:
            pass
        del _
        deadline = time.monotonic() + 5
        while any(one() is not None for one in made) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one() for one in made] == [None] * 4


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_caught_error_keeps_nothing_alive(prefetch: int) -> None:
    class Large:
        pass

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the shard is damaged")

    kept: list[weakref.ref[Large]] = []

    def loop() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        for _ in td.DispatchLoader(broken(), prefetch=prefetch):
            pass

    gc.disable()
    try:
        with pytest.raises(OSError, match="damaged"):
            loop()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_loader_that_is_not_closed_frees_its_thread() -> None:
    before = threading.active_count()
    loader = td.DispatchLoader([{"n": number} for number in range(1000)])
    gone = weakref.ref(loader)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_iterator_keeps_its_loader_alive() -> None:
    batches = iter(td.DispatchLoader([{"n": number} for number in range(4)]))
    gc.collect()
    assert [batch["n"] for batch in batches] == [0, 1, 2, 3]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_has_no_copies(copied: Any) -> None:
    """A copy would close the loader when it is freed."""
    with td.DispatchLoader(range(4)) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(NotPicklableError, match="every process makes its own"):
            copied(loader)
        assert list(iterator) == [1, 2, 3]
