"""Streams in the workers of loaders, and under a `DispatchLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets as hf
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from support.packing.streams import PlainSource, assert_same_items, carried, draw_samples, planned_items
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import tundish as td
from tundish.errors import InvalidInputError, StateMismatchError

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

OPTIONS = {"mode": "ordered", "window": 2, "max_length": 16}
LENGTHS = [1 + number * 7 % 13 for number in range(60)]


def first(batch: list[Any]) -> Any:
    (item,) = batch
    return item


class Split(IterableDataset[Any]):
    """Gives each worker samples that follow each other."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        share = len(self.samples) // count
        yield from self.samples[number * share : (number + 1) * share]


def split_hf(samples: list[Any]) -> hf.IterableDataset:
    return hf.Dataset.from_dict({"input_ids": samples}).to_iterable_dataset(num_shards=2)


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """The items of workers as a `DataLoader` gives them."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


@pytest.mark.parametrize("make", [list, PlainSource, Split, split_hf])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_each_worker_packs_its_part(make: Any, loader: Any) -> None:
    samples = draw_samples(LENGTHS, "lists")
    stream = td.PackedStream(make(samples), **OPTIONS)
    splits_itself = make in (Split, split_hf)
    parts = [samples[:30], samples[30:]] if splits_itself else [samples[0::2], samples[1::2]]
    expected = in_turn([planned_items(part, OPTIONS) for part in parts])
    items = list(loader(stream, batch_size=1, num_workers=2, collate_fn=first))
    assert_same_items(items, expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 5, 12])
def test_a_stateful_data_loader_goes_on_with_the_next_batch(workers: int, taken: int) -> None:
    def make() -> Any:
        stream = td.PackedStream(PlainSource(draw_samples(LENGTHS, "rows")), **OPTIONS, **carried("rows"))
        collate = td.PackedCollator()
        return StatefulDataLoader(stream, batch_size=2, num_workers=workers, collate_fn=collate)

    expected = list(make())
    loader = make()
    iterator = iter(loader)
    assert_same_items([next(iterator) for _ in range(taken)], expected[:taken])
    state = loader.state_dict()
    del iterator
    again = make()
    again.load_state_dict(state)
    assert_same_items(list(again), expected[taken:])
    assert_same_items(list(again), expected)


def test_the_state_of_a_worker_is_refused_elsewhere() -> None:
    samples = draw_samples(LENGTHS, "lists")
    stream = td.PackedStream(samples, **OPTIONS)
    next(iter(stream))
    stream.load_state_dict(stream.state_dict())
    with pytest.raises(StateMismatchError, match=r"taken without workers, and it is loaded in worker 0 of 1"):
        next(iter(DataLoader(stream, batch_size=None, num_workers=1)))
    state = stream.state_dict() | {"worker": [1, 2]}
    stream.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="taken in worker 1 of 2, and it is loaded without workers"):
        iter(stream)


class BrokenInWorkers:
    """Raises instead of its fourth sample."""

    def __iter__(self) -> Iterator[Any]:
        yield from [[1], [2], [3]]
        raise ConnectionError("the bucket does not answer")


def test_an_error_of_the_source_names_the_worker() -> None:
    loader = DataLoader(td.PackedStream(BrokenInWorkers(), 8), batch_size=None, num_workers=2)
    with pytest.raises(ConnectionError, match="was asked for sample 3 in worker 0"):
        list(loader)


@pytest.mark.parametrize("wrapped", ["stream", "DataLoader", "StatefulDataLoader"])
@pytest.mark.parametrize("taken", [0, 3, 8])
def test_a_dispatch_loader_goes_on_with_the_next_pack(wrapped: str, taken: int) -> None:
    samples = draw_samples(LENGTHS, "rows")

    def make() -> td.DispatchLoader[Any]:
        stream = td.PackedStream(PlainSource(samples), **OPTIONS, **carried("rows"))
        kind = {"stream": None, "DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}[wrapped]
        return td.DispatchLoader(stream if kind is None else kind(stream, batch_size=1, collate_fn=first))

    expected = planned_items(samples, OPTIONS, **carried("rows"))
    with make() as loader:
        iterator = iter(loader)
        assert_same_items([next(iterator) for _ in range(taken)], expected[:taken])
        state = loader.state_dict()
    assert taken == 0 or (state["loader"] is None) == (wrapped == "DataLoader")
    with make() as again:
        again.load_state_dict(state)
        assert_same_items(list(again), expected[taken:])
        again.set_epoch(7)
        assert_same_items(list(again), expected)


def test_a_dispatch_loader_refuses_a_stream_of_one_ranks_part() -> None:
    part = split_dataset_by_node(split_hf(draw_samples(LENGTHS, "lists")), rank=0, world_size=2)
    stream = td.PackedStream(part, **OPTIONS)
    for loader in (stream, DataLoader(stream, batch_size=None)):
        with pytest.raises(InvalidInputError, match="one of 2 parts of the data"):
            td.DispatchLoader(loader)


def test_a_batch_of_a_stream_trains() -> None:
    stream = td.PackedStream(draw_samples(LENGTHS, "lists"), **OPTIONS)
    loader = DataLoader(stream, batch_size=3, collate_fn=td.PackedCollator(return_seq_idx=True))
    tokens = torch.cat([batch["input_ids"][0] for batch in loader])
    assert sorted(tokens.tolist()) == list(range(sum(LENGTHS)))
