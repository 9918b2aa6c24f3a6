"""Flattens batches in a process of its own.

    python benches/peers/scatter/tree_child.py REQUEST

It takes a JSON request, which `tree_case` makes, and prints one line of JSON. The result of each call is rebuilt and
compared with the batch.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from measure import OutputsDiffer

import tundish as td
from scatter.batches import KINDS, total
from scatter.contestants import rebuild, take_apart

# The tensors, and the bytes of the schema.
Parts = tuple[list[torch.Tensor], bytes]


def ours(batch: Any) -> Parts:
    tensors, schema = td.tree.flatten(batch)
    return tensors, pickle.dumps(schema, 5)


def rebuild_ours(parts: Parts) -> Any:
    tensors, schema = parts
    return td.tree.unflatten(pickle.loads(schema), tensors)


def walk(batch: Any) -> Parts:
    tensors: list[torch.Tensor] = []
    return tensors, pickle.dumps(take_apart(batch, tensors), 5)


def rebuild_walk(parts: Parts) -> Any:
    tensors, schema = parts
    copies: list[torch.Tensor] = []
    batch = rebuild(pickle.loads(schema), copies)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return batch


# By name, a function that flattens a batch and one that rebuilds it.
CONTESTANTS: dict[str, tuple[Callable[[Any], Parts], Callable[[Parts], Any]]] = {
    "ours": (ours, rebuild_ours),
    "walk": (walk, rebuild_walk),
}


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    reply: dict[str, dict[str, float]] = {}
    for kind, rounds in request["rounds"].items():
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        batch = KINDS[kind](0)
        for _ in range(rounds):
            for name in CONTESTANTS:
                gc.collect()
                # The first one only warms up.
                timed(name, batch)
                seconds[name] += [timed(name, batch) for _ in range(request["repeats"])]
        reply[kind] = {name: min(times) for name, times in seconds.items()}
    print(json.dumps(reply), flush=True)


def timed(name: str, batch: Any) -> float:
    """The seconds that flattening a batch takes."""
    flatten, unflatten = CONTESTANTS[name]
    begin = time.perf_counter()
    parts = flatten(batch)
    spent = time.perf_counter() - begin
    rebuilt = unflatten(parts)
    if take_apart(rebuilt, []) != take_apart(batch, []) or total(rebuilt) != total(batch):
        raise OutputsDiffer(f"{name}: the rebuilt batch is not the one that was flattened")
    return spent


if __name__ == "__main__":
    main()
