"""Streams of Hugging Face's datasets as loaders: batches, states and shards."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError
from tundish.scatter.batch_reader import refuse_sharded

BATCHES = 6


def stream() -> datasets.IterableDataset:
    numbers = datasets.Dataset.from_dict({"x": list(range(2 * BATCHES))})
    return numbers.to_iterable_dataset(num_shards=2)


def loader_of(data: Any) -> td.DispatchLoader[Any]:
    return td.DispatchLoader(data.with_format("torch").batch(2))


def numbers_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["x"].tolist()]


@pytest.mark.parametrize("handed_out", [1, 4, BATCHES])
def test_epochs_after_a_resumed_one_have_every_batch(handed_out: int) -> None:
    loader = loader_of(stream())
    iterator = iter(loader)
    first = numbers_of(next(iterator) for _ in range(handed_out))
    state = loader.state_dict()
    loader.close()
    assert state["loader"] is not None
    loader = loader_of(stream())
    loader.load_state_dict(state)
    assert first + numbers_of(loader) == list(range(2 * BATCHES))
    for _ in range(2):
        assert numbers_of(loader) == list(range(2 * BATCHES))
    loader.close()


def test_a_resumed_epoch_that_is_left_begins_anew() -> None:
    loader = loader_of(stream())
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert numbers_of([next(iter(loader))]) == [2, 3]
    assert numbers_of(loader) == list(range(2 * BATCHES))
    loader.close()


def test_a_dataset_split_by_node_is_refused() -> None:
    part = split_dataset_by_node(stream(), rank=0, world_size=2)
    for loader in (part, part.batch(2).with_format("torch"), DataLoader(part, batch_size=2)):  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=r"one of 2 parts of the data .*DistributedConfig"):
            refuse_sharded(loader)
    refuse_sharded(stream())
