"""Functions that tests call in peers."""

from __future__ import annotations

import gc
import json
import threading
from typing import Any

import torch

import tundish as td
from tundish import rtensor
from tundish.rtensor.tensor_store import default_store

held: list[Any] = []


def make(count: int, size: int, start: int = 0) -> list[rtensor.RTensor]:
    """Stores `count` tensors of `size` elements, filled with start, start + 1, …; returns their handles."""
    made: list[rtensor.RTensor] = rtensor.remotize(
        [torch.full((size,), start + number, dtype=torch.int64) for number in range(count)]
    )
    return made


def remotize(obj: Any) -> Any:
    return rtensor.remotize(obj)


def store(name: str, size: int, value: int = 7) -> rtensor.RTensor:
    return rtensor.store(name, torch.full((size,), value, dtype=torch.int64))


def sums(handles: Any) -> list[int]:
    """Fetches tensors and returns their sums."""
    return [int(tensor.sum()) for tensor in td.tree.find_all(torch.Tensor, rtensor.localize(handles))]


def sums_in_forgotten_step(handles: Any, number: int) -> list[int]:
    """As `sums`, in a step that nobody ends; later fetches belong to another one."""
    default_store.shards.begin_step(number, 1)
    found = sums(handles)
    default_store.shards.begin_step(number + 1, 1)
    return found


def end_forgotten_step(number: int) -> None:
    default_store.shards.end_step(number)
    default_store.shards.end_step(number + 1)


def sums_and_fail(handles: Any) -> None:
    sums(handles)
    raise ZeroDivisionError("after it was fetched")


def sums_over_sockets(handles: Any) -> list[int]:
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=False))
    try:
        return sums(handles)
    finally:
        rtensor.set_backend(None)


def sums_in_threads(handles: Any, threads: int) -> list[list[int]]:
    """As `sums`, on several threads at once."""
    found: list[list[int]] = []
    barrier = threading.Barrier(threads)

    def run() -> None:
        barrier.wait()
        found.append(sums(handles))

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return found


def hold(handles: Any) -> None:
    """Fetches tensors and keeps them in use."""
    held.append(rtensor.localize(handles))


def let_go() -> None:
    held.clear()
    gc.collect()


def stats() -> tuple[dict[str, Any], dict[str, Any]]:
    return rtensor.storage_stats(), rtensor.fetch_buffer_stats()


def remove(shard_ids: list[str]) -> int:
    return rtensor.remove(shard_ids)


def clear() -> None:
    let_go()
    rtensor.clear_fetch_buffer()
    rtensor.clear_node()


def keep(handles: Any) -> int:
    return rtensor.keep(handles)


def trust(addr: str, token: str) -> None:
    rtensor.trust(addr, token=token)


def current_step() -> int | None:
    """The step that fetches belong to."""
    found: int | None = json.loads(default_store.shards.stats())["current_step"]
    return found
