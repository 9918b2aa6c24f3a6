"""`refuse_sharded`: loaders that read one rank's part of the data, and others that only look like it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import tundish as td
from tundish.errors import InvalidInputError
from tundish.scatter.batch_reader import refuse_sharded

ROWS: Any = torch.arange(8.0).view(8, 1)


class Rows(list[int]):
    """Data that four processes prepare."""

    num_processes = 4


class Stream(IterableDataset[int]):
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


BATCHES = BatchSampler(SequentialSampler(ROWS), 2, drop_last=False)
PARTS = {
    "a sampler": lambda: DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0)),
    "batches": lambda: DataLoader(ROWS, batch_sampler=BatchSamplerShard(BATCHES, 2, 1)),
    "a stream": lambda: DataLoader(IterableDatasetShard(Stream(1), 2, num_processes=2, process_index=0)),
    "packs": lambda: DataLoader(
        ROWS, batch_sampler=td.PackedBatchSampler(td.pack([5] * 40, 10, seed=1), 1, 0, 2)
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_loaders_that_read_one_part_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="one of 2 parts of the data"):
        refuse_sharded(PARTS[name]())


def test_a_number_of_processes_alone_is_no_shard() -> None:
    for loader in (DataLoader(Rows(range(4))), DataLoader(Stream(3)), Rows(range(4)), Stream(3)):
        refuse_sharded(loader)
