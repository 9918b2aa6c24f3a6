"""The memory of workers that read one array.

Measures the proportional set size (PSS, `/proc/<pid>/smaps_rollup`), in which a shared page counts once. Every worker
has read all of the array and is alive when its memory is measured, and so are all other processes of the pool.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
from measure import OutputsDiffer, family

from shm import tasks
from shm.contestants import CONTESTANTS

_ROUNDS = 50


def family_pss() -> int:
    """PSS in bytes of this process and all below it."""
    return sum(map(_pss, family(os.getpid())))


def _pss(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def readers(request: dict[str, Any], array: np.ndarray) -> dict[str, list[int]]:
    """Bytes that a pool holds, beyond those of its parent before, once all its workers have read the array."""
    open_pool = CONTESTANTS[request["contestant"]].load()
    total = int(array.sum())
    before = family_pss()
    pool = open_pool(tasks.reading, array, request["workers"], request["method"])
    workers: set[int] = set()
    for _ in range(_ROUNDS):
        for stamp, found in pool.each(range(request["workers"])):
            if found != total:
                raise OutputsDiffer(f"a worker's array sums to {found}, and that of its parent to {total}")
            workers.add(tasks.worker_of(stamp))
        if len(workers) == request["workers"]:
            break
    if len(workers) != request["workers"] or not workers <= set(family(os.getpid())[1:]):
        raise RuntimeError(f"{request['workers']} workers were asked for, and {sorted(workers)} answer")
    held = family_pss() - before
    pool.close()
    return {"held": [held]}


def bare_workers(request: dict[str, Any], array: np.ndarray) -> dict[str, list[int]]:
    """Bytes of as many processes that are spawned and import numpy."""
    context = multiprocessing.get_context("spawn")
    before = family_pss()
    started = []
    for _ in range(request["workers"]):
        connection, theirs = context.Pipe()
        process = context.Process(target=tasks.hold, args=(theirs,))
        process.start()
        theirs.close()
        started.append((process, connection))
    for _, connection in started:
        connection.recv()
    held = family_pss() - before
    for process, connection in started:
        connection.close()
        process.join()
    return {"held": [held]}
