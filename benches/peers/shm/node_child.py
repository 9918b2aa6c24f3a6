"""One rank of a node that shares an array, in a process of its own, with the environment that torchrun gives it.

    python benches/peers/shm/node_child.py REQUEST

Takes a JSON request from `node_case` and prints one line of JSON. Only the first rank has the array before it is
shared. Every rank reads all of the shared array. Memory is measured while all ranks have the array.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.distributed as dist
from measure import OutputsDiffer

import tundish as td
from shm.floors import copy_to_fresh_pages
from shm.memory import family_pss

_COPIES = 2


def through_tundish(source: np.ndarray | None, place: Path) -> np.ndarray:
    """`node_shared`; only one rank's callable is called."""
    return td.shm.node_shared(lambda: source)


def through_a_file(source: np.ndarray | None, place: Path) -> np.ndarray:
    """The usual way: one rank writes a file to memory, and all ranks map it."""
    if source is not None:
        np.save(place, source)
    dist.barrier()
    return np.load(place, mmap_mode="r")


FORMS: dict[str, Callable[[np.ndarray | None, Path], np.ndarray]] = {
    "ours": through_tundish,
    "file": through_a_file,
}


def main() -> None:
    request = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    length = request["array_bytes"] // 8
    source = np.arange(length, dtype=np.int64) if os.environ["LOCAL_RANK"] == "0" else None
    reply: dict[str, Any] = {}
    if source is not None:
        # The first call makes the machine find free memory for the next ones.
        reply["copy"] = min(copy_to_fresh_pages(source) for _ in range(_COPIES))
    for form in request["forms"]:
        place = Path(request["folder"]) / f"{form}.npy"
        reply[form] = share(FORMS[form], source, place, length * (length - 1) // 2)
        if source is not None:
            place.unlink(missing_ok=True)
        dist.barrier()
    dist.destroy_process_group()
    # A thread of torch's gloo frees the gathered data once it gets the GIL; if the interpreter ends before,
    # it takes the process along ("terminate called without an active exception").
    time.sleep(0.1)
    print(json.dumps(reply), flush=True)


def share(
    form: Callable[[np.ndarray | None, Path], np.ndarray], source: np.ndarray | None, place: Path, total: int
) -> dict[str, float]:
    """Return the seconds until this rank has the array, and the bytes that its memory grew by."""
    before = family_pss()
    dist.barrier()
    begin = time.perf_counter()
    array = form(source, place)
    seconds = time.perf_counter() - begin
    if array.flags.writeable:
        raise OutputsDiffer("a rank could write to what all of them share")
    found = int(array.sum())
    if found != total:
        raise OutputsDiffer(f"a rank's array sums to {found} and not to {total}")
    dist.barrier()
    held = family_pss() - before
    dist.barrier()
    return {"seconds": seconds, "held": held}


if __name__ == "__main__":
    main()
