"""Packs in a process of its own, so that its memory can be watched from outside.

Takes a JSON request of `size_curve_case` as its argument. It packs a small plan first, so that everything is loaded,
and prints "ready". After a line on stdin it packs `rounds` times and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import counted_memory

import tundish as td


def main() -> None:
    request = json.loads(sys.argv[1])
    folder = Path(request["out"]) if request["out"] else None
    # To files, the inputs are mapped as a job at that scale maps them; in memory they stand in memory.
    mmap_mode = "r" if folder else None
    lengths = np.load(request["lengths"], mmap_mode=mmap_mode)
    order = np.load(request["order"], mmap_mode=mmap_mode) if request["order"] else None
    td.pack(np.full(1000, 10, dtype=np.int32), 64, order=np.arange(1000), threads=request["threads"])

    whole = {} if request["mode"] == "hard" else {"mode": request["mode"], "overlong": "truncate"}
    before = counted_memory(os.getpid())
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = float("inf")
    output_bytes = 0
    for _ in range(request["rounds"]):
        begin = time.perf_counter()
        plan = td.pack(
            lengths,
            request["max_length"],
            order=order,
            seed=request["seed"],
            threads=request["threads"],
            out=folder,
            progress=False,
            **whole,
        )
        seconds = min(seconds, time.perf_counter() - begin)
        fields = (
            plan.indices,
            plan.indices_cu_len,
            plan.start_offset,
            plan.end_offset,
            plan.longest,
            plan.dataset_id,
        )
        output_bytes = sum(field.nbytes for field in fields)
        # Pages of an array that were never written take no memory, so the plan may hold less than its bytes.
        held = min(output_bytes, counted_memory(os.getpid()) - before)
        packs = len(plan)
        del plan, fields
        if folder:
            shutil.rmtree(folder)
    print(
        json.dumps({"seconds": seconds, "output_bytes": output_bytes, "held": held, "packs": packs}),
        flush=True,
    )


if __name__ == "__main__":
    main()
