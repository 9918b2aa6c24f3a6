"""Measures within one process: drains of many entries.

    python benches/peers/rtensor/drains_child.py

Answers each line of JSON from its parent with one line, as `child.py` does.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rtensor.contestants.areal_modules import areal
from tundish import rtensor

_CHUNK = 50_000
_LIMIT = 4 << 30
# Elements of each tensor: the cost of a drain does not depend on its bytes.
_WIDTH = 2


def store(entries: int) -> str:
    """Stores so many tensors, and returns their handles."""
    rtensor.serve(limit_bytes=_LIMIT, buffer_limit_bytes=_LIMIT)
    return base64.b64encode(rtensor.dumps(_stored(entries))).decode()


def drain_by_step(stored: str) -> dict[str, float]:
    """Seconds for the end of a step that fetched all of these."""
    rtensor.serve(limit_bytes=_LIMIT, buffer_limit_bytes=_LIMIT)
    step = rtensor.step()
    step.__enter__()
    entries = _fetch(stored)
    gc.collect()
    begin = time.perf_counter()
    step.__exit__(None, None, None)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "entries": entries}


def drain_by_ids(contestant: str, entries: int, stored: str) -> dict[str, float]:
    """Seconds of the call that drops so many, and the longest stall of a thread that fetches one from the buffer."""
    return _drained(*(_ours(stored) if contestant == "ours" else _of_areal(entries)))


def _ours(stored: str) -> tuple[Callable[[], object], Callable[[], int]]:
    rtensor.serve(limit_bytes=_LIMIT, buffer_limit_bytes=_LIMIT)
    _fetch(stored)
    kept, *others = rtensor.loads(base64.b64decode(stored))
    ids = rtensor.flatten_shard_ids(others)
    return lambda: rtensor.localize(kept), lambda: rtensor.clear_fetch_buffer(ids)


def _stored(entries: int) -> list[Any]:
    tensors = list(torch.arange(_CHUNK * _WIDTH, dtype=torch.float32).view(_CHUNK, _WIDTH))
    made = []
    for start in range(0, entries, _CHUNK):
        made += rtensor.remotize(tensors[: entries - start])
    return made


def _fetch(stored: str) -> int:
    """Have all of these in the buffer: how many."""
    handles = rtensor.loads(base64.b64decode(stored))
    for start in range(0, len(handles), _CHUNK):
        rtensor.localize(handles[start : start + _CHUNK])
    entries: int = rtensor.fetch_buffer_stats()["num_entries"]
    assert entries == len(handles)
    return entries


def _of_areal(entries: int) -> tuple[Callable[[], object], Callable[[], int]]:
    module = areal("infra.rpc.rtensor")
    module._fetch_buffer.update(
        (str(number), tensor) for number, tensor in enumerate(torch.rand(entries, _WIDTH))
    )
    module._fetch_buffer["kept"] = torch.ones(_WIDTH)
    shard, data = module.TensorShardInfo("kept", ""), torch.empty(_WIDTH, device="meta")
    ids = [str(number) for number in range(entries)]
    return (
        lambda: module.RTensor.localize(module.RTensor(shard, data)),
        lambda: module.clear_fetch_buffer(ids),
    )


def _drained(fetch: Callable[[], object], drain: Callable[[], int]) -> dict[str, float]:
    """The time of a drain, and the longest fetch from the buffer during it."""
    longest = 0.0
    is_on, is_over = threading.Event(), threading.Event()

    def fetch_repeatedly() -> None:
        nonlocal longest
        while not is_over.is_set():
            begin = time.perf_counter()
            fetch()
            if is_on.is_set():
                longest = max(longest, time.perf_counter() - begin)

    fetch()
    # A garbage collection would stop all threads.
    gc.collect()
    gc.freeze()
    gc.disable()
    thread = threading.Thread(target=fetch_repeatedly)
    thread.start()
    time.sleep(0.1)
    is_on.set()
    begin = time.perf_counter()
    dropped = drain()
    seconds = time.perf_counter() - begin
    is_over.set()
    thread.join()
    gc.enable()
    assert dropped > 0
    return {"seconds": seconds, "stall": longest}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(globals()[what](*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
