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
from scatter.contestants import apart, together

# The tensors, and the bytes of the schema.
Parts = tuple[list[torch.Tensor], bytes]


def ours(batch: Any) -> Parts:
    tensors, schema = td.tree.flatten(batch)
    return tensors, pickle.dumps(schema, 5)


def ours_together(parts: Parts) -> Any:
    tensors, said = parts
    return td.tree.unflatten(pickle.loads(said), tensors)


def seed(batch: Any) -> Parts:
    tensors: list[torch.Tensor] = []
    return tensors, pickle.dumps(apart(batch, tensors), 5)


def seed_together(parts: Parts) -> Any:
    places: list[torch.Tensor] = []
    batch = together(pickle.loads(parts[1]), places)
    for place, tensor in zip(places, parts[0], strict=True):
        place.copy_(tensor)
    return batch


CONTESTANTS: dict[str, tuple[Callable[[Any], Parts], Callable[[Parts], Any]]] = {
    "ours": (ours, ours_together),
    "seed": (seed, seed_together),
}


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    reply: dict[str, dict[str, dict[str, float]]] = {}
    forms = 0
    for kind, rounds in request["rounds"].items():
        seconds: dict[str, dict[str, list[float]]] = {
            state: {name: [] for name in CONTESTANTS} for state in ("known", "new")
        }
        batch = KINDS[kind](0)
        for _ in range(rounds):
            for name in CONTESTANTS:
                gc.collect()
                # The first one only warms up.
                for number in range(request["repeats"] + 1):
                    forms += 1
                    new = {f"form {forms}": batch, "more": torch.ones(forms)}
                    for state, given in (("known", batch), ("new", new)):
                        spent = timed(name, given)
                        if number:
                            seconds[state][name].append(spent)
        reply[kind] = {
            state: {name: min(times) for name, times in contestants.items()}
            for state, contestants in seconds.items()
        }
    print(json.dumps(reply), flush=True)


def timed(name: str, batch: Any) -> float:
    """The seconds that flattening a batch takes."""
    take_apart, put_together = CONTESTANTS[name]
    begin = time.perf_counter()
    parts = take_apart(batch)
    spent = time.perf_counter() - begin
    again = put_together(parts)
    if apart(again, []) != apart(batch, []) or total(again) != total(batch):
        raise OutputsDiffer(f"{name}: a batch is not what was taken apart")
    return spent


if __name__ == "__main__":
    main()
