"""The kinds of batches that are scattered.

A kind has the same sizes on every rank and in every round. The batches of two ranks differ in their total.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Crop = namedtuple("Crop", "pixels box score")


def text(rank: int) -> Any:
    """Four tensors of 8 × 4096 int64."""
    names = "input_ids", "labels", "attention_mask", "position_ids"
    return {name: torch.full((8, 4096), rank + 1, dtype=torch.int64) for name in names}


def vlm(rank: int) -> Any:
    """8 samples: 106 MB of float pixels and 40 small tensors.

    The first dimension of each tensor counts the samples, as Accelerate requires.
    """
    small = {f"small {number}": torch.full((8,), rank + number) for number in range(40)}
    return {"pixel_values": torch.full((8, 3_312_500), 1.0 / (rank + 1)), **small}


def many(rank: int) -> Any:
    """500 tensors of 1 KB."""
    return [torch.full((256,), float(rank + number)) for number in range(500)]


def nested(rank: int) -> Any:
    """194 tensors in dicts, lists and namedtuples."""
    crops = [
        Crop(torch.full((16, 16), float(rank + number)), torch.full((4,), number), torch.tensor(0.5))
        for number in range(64)
    ]
    return {
        "images": [crops[:20], crops[20:]],
        "text": {"ids": torch.full((2, 512), rank), "mask": torch.ones(2, 512)},
    }


KINDS: dict[str, Callable[[int], Any]] = {
    "text": text,
    "VLM": vlm,
    "many": many,
    "nested": nested,
}


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    else:
        for value in batch:
            yield from tensors_of(value)


def total(batch: Any) -> float:
    """The sum of all values: every byte is read."""
    return float(sum(tensor.sum().item() for tensor in tensors_of(batch)))


def size(batch: Any) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(batch))
