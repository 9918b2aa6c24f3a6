"""The connections to the job's store: one a process, and a new one after an error."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest

from tundish.distributed import job_store, process_groups
from tundish.distributed.job_store import JobStore


@pytest.fixture
def base() -> Any:
    from torch import distributed

    server = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return distributed.PrefixStore("default_pg", server)


def sockets() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks for sockets in /proc")
def test_users_of_a_store_share_one_connection(base: Any) -> None:
    first = JobStore(base, "first")
    first.connect()
    before = sockets()
    others = [JobStore(base, f"other {number}") for number in range(4)]
    for number, other in enumerate(others):
        other.connect()
        other.write("key", str(number))
    assert sockets() <= before
    # Each has its own keys, also when the one that connected is closed.
    first.close()
    assert [other.read("key") for other in others] == ["0", "1", "2", "3"]
    for other in others:
        other.close()
    assert sockets() <= before


@pytest.mark.parametrize(("agents", "is_apart"), [("1", True), ("2", False)])
def test_keys_of_an_earlier_start_are_not_read(
    base: Any, agents: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
    found = []
    names = []
    for start in ("0", "1", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        # As in a process that has just begun.
        monkeypatch.setattr(process_groups, "_counters", {})
        names.append(process_groups.unique_name("group", (0, 1)))
        store = JobStore(base, "votes")
        store.connect()
        found.append(store.read("key"))
        store.write("key", start)
    # Several agents count their own restarts, so that ranks may differ in them and still have to meet.
    assert found == ([None, None, "1"] if is_apart else [None, "0", "1"])
    assert (names[0] != names[1]) is is_apart
    assert names[1] == names[2]


def test_a_broken_connection_is_replaced(base: Any) -> None:
    class Broken:
        def set(self, *_: str) -> None:
            raise ConnectionError("reset by peer")

    first = JobStore(base, "first")
    first.connect()
    first._connection = Broken()
    broken = first._client
    with pytest.raises(ConnectionError):
        first.write("key", "value")
    second = JobStore(base, "second")
    second.connect()
    assert second._client is not broken
    second.write("key", "value")
    assert second.read("key") == "value"


def test_a_host_that_does_not_answer_holds_up_no_other_store(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import distributed

    gone = distributed.PrefixStore("gone", base)
    is_over, is_asked = threading.Event(), threading.Event()
    second_client = job_store.second_client

    def connect(to: Any) -> Any:
        if to is gone:
            is_asked.set()
            is_over.wait(60)
        return second_client(to)

    monkeypatch.setattr(job_store, "second_client", connect)
    waiting = threading.Thread(target=JobStore(gone, "one").connect)
    waiting.start()
    assert is_asked.wait(60)
    other = threading.Thread(target=JobStore(base, "other").connect, daemon=True)
    other.start()
    other.join(10)
    has_connected = not other.is_alive()
    is_over.set()
    waiting.join(60)
    assert has_connected
