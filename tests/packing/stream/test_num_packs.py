"""`num_packs`: an iteration gives so many packs and stops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets as hf
import pytest
from support.packing.streams import PlainSource, assert_same_items, draw_samples, planned_items
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tundish as td
from tundish.errors import InvalidInputError

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

OPTIONS = {"mode": "ordered", "window": 2, "max_length": 16}
SAMPLES = draw_samples([1 + number * 7 % 13 for number in range(60)], "lists")
PACKS = planned_items(SAMPLES, OPTIONS)


class Repeated:
    """The samples again and again."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(SAMPLES)


def first(batch: list[Any]) -> Any:
    (item,) = batch
    return item


@pytest.mark.parametrize("num_packs", [1, 9, len(PACKS)])
def test_an_iteration_gives_the_first_packs(num_packs: int) -> None:
    stream = td.PackedStream(SAMPLES, num_packs=num_packs, **OPTIONS)
    for _ in range(2):
        assert_same_items(list(stream), PACKS[:num_packs])


def test_nothing_is_read_after_the_last_pack() -> None:
    source = PlainSource(SAMPLES)
    whole = td.PackedStream(source, **OPTIONS)
    for _ in zip(range(9), whole, strict=False):
        pass
    given, source.given = source.given, 0
    assert len(list(td.PackedStream(source, num_packs=9, **OPTIONS))) == 9
    assert source.given == given


@pytest.mark.parametrize("taken", [0, 4, 9])
def test_a_resumed_iteration_gives_the_rest(taken: int) -> None:
    stream = td.PackedStream(Repeated(), num_packs=9, **OPTIONS)
    assert_same_items(list(itertools.islice(stream, taken)), PACKS[:taken])
    again = td.PackedStream(Repeated(), num_packs=9, **OPTIONS)
    again.load_state_dict(stream.state_dict())
    assert_same_items(list(again), PACKS[taken:9])
    assert_same_items(list(again), PACKS[:9])
    # A run may be made longer.
    longer = td.PackedStream(Repeated(), num_packs=12, **OPTIONS)
    longer.load_state_dict(stream.state_dict())
    assert_same_items(list(longer), PACKS[taken:12])


def test_a_hugging_face_stream_that_repeats_goes_on() -> None:
    def make() -> td.PackedStream:
        rows = hf.Dataset.from_dict({"input_ids": SAMPLES}).to_iterable_dataset(num_shards=3)
        return td.PackedStream(rows.repeat(None), num_packs=2 * len(PACKS), **OPTIONS)

    expected = planned_items(SAMPLES * 3, OPTIONS)[: 2 * len(PACKS)]
    stream = make()
    assert_same_items(list(stream), expected)
    for taken in (5, len(PACKS) + 5):
        list(itertools.islice(stream, taken))
        again = make()
        again.load_state_dict(stream.state_dict())
        assert_same_items(list(again), expected[taken:])


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("num_packs", [9, 10, 1])
def test_workers_give_it_together(loader: Any, num_packs: int) -> None:
    stream = td.PackedStream(SAMPLES, num_packs=num_packs, **OPTIONS)
    parts = [planned_items(SAMPLES[worker::2], OPTIONS) for worker in range(2)]
    expected = [parts[number % 2][number // 2] for number in range(num_packs)]
    assert_same_items(list(loader(stream, batch_size=1, num_workers=2, collate_fn=first)), expected)


def test_a_stateful_data_loader_gives_the_rest() -> None:
    def make() -> Any:
        stream = td.PackedStream(SAMPLES, num_packs=9, **OPTIONS)
        return StatefulDataLoader(stream, batch_size=1, num_workers=2, collate_fn=first)

    loader, expected = make(), list(make())
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    del iterator
    again = make()
    again.load_state_dict(state)
    assert_same_items(list(again), expected[4:])


@pytest.mark.parametrize("options", [OPTIONS, {"mode": "hard", "max_length": 16}], ids=["ordered", "hard"])
def test_a_source_that_ends_before_is_an_error(options: dict[str, Any]) -> None:
    packs = planned_items(SAMPLES, options)
    stream = td.PackedStream(SAMPLES, num_packs=100, **options)
    found = []
    says = rf"the source ended after {len(packs)} packs, and num_packs is 100: lower .* repeat\(None\)"
    with pytest.raises(InvalidInputError, match=says):
        found.extend(stream)
    assert_same_items(found, packs)


def test_a_source_that_ends_before_in_a_worker_is_an_error() -> None:
    stream = td.PackedStream(SAMPLES, num_packs=99, **OPTIONS)
    ended = len(planned_items(SAMPLES[0::2], OPTIONS))
    says = f"the source ended after {ended} packs in worker 0 of 2, which is to give 50, and num_packs is 99"
    with pytest.raises(InvalidInputError, match=says):
        list(DataLoader(stream, batch_size=None, num_workers=2))
