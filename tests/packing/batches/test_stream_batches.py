"""`td.loader` over streams: whole batches from workers, and a state that leads to the batch after the last one."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from support.packing.loaders import assert_same_batches
from support.packing.streams import PlainSource, StatefulSource, carried, draw_samples
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, StateMismatchError

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

OPTIONS: dict[str, Any] = {"mode": "ordered", "window": 2, "max_length": 16}
LENGTHS = [1 + number * 7 % 13 for number in range(80)]
ROWS = draw_samples(LENGTHS, "rows")
IDS = draw_samples(LENGTHS, "lists")


def hf_source() -> hf.IterableDataset:
    # Of unequal size, so that one worker ends before the other.
    return hf.Dataset.from_dict({"input_ids": IDS}).to_iterable_dataset(num_shards=3)


def uneven() -> Any:
    """Its long samples are all in one worker's part."""
    return [[number] * (15 if number % 2 else 1) for number in range(60)]


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "list": (lambda: IDS, {}),
    "rows": (lambda: PlainSource(ROWS), carried("rows")),
    "stateful": (lambda: StatefulSource(ROWS), carried("rows")),
    "HF": (hf_source, {}),
    "HF shuffled": (lambda: hf_source().shuffle(seed=1, buffer_size=8), {}),
    "uneven": (uneven, {}),
}


def make(source: str = "list", workers: int = 0, **options: Any) -> td.packing.PackLoader:
    open_source, named = SOURCES[source]
    return td.loader(
        td.PackedStream(open_source(), **OPTIONS, **named), batch_size=2, num_workers=workers, **options
    )


def epochs_of(loader: td.packing.PackLoader) -> Iterator[Any]:
    """The batches of all epochs, without end."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def stored(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(state, folder / "state")
    loaded: dict[str, Any] = torch.load(folder / "state", weights_only=True)
    return loaded


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_those_of_a_data_loader(source: str, workers: int) -> None:
    open_source, named = SOURCES[source]
    stream = td.PackedStream(open_source(), **OPTIONS, **named)
    expected = list(DataLoader(stream, batch_size=2, num_workers=workers, collate_fn=td.PackedCollator()))
    assert_same_batches(list(make(source, workers)), expected)


@pytest.mark.parametrize(
    ("source", "workers", "every"),
    [
        *zip(SOURCES, itertools.repeat(2), itertools.cycle([0, 1, 8])),
        ("rows", 2, 0),
        ("rows", 2, 8),
        ("HF", 2, 1),
        ("rows", 0, 8),
        ("HF", 0, 8),
    ],
)
def test_a_state_leads_to_the_batch_after_the_last_one_given(
    source: str, workers: int, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tundish.packing.batches.stream_batches._PACKS_A_STATE", every)
    loader = make(source, workers)
    expected = [*loader, *loader]
    epoch = len(list(make(source, workers)))
    for taken in (0, 1, 4, 7, epoch - 1, epoch, epoch + 2):
        loader = make(source, workers)
        # All workers have made more batches than were given.
        given = list(itertools.islice(epochs_of(loader), taken))
        assert_same_batches(given, expected[:taken])
        state = stored(loader.state_dict(), tmp_path)
        resumed = make(source, workers)
        resumed.load_state_dict(state)
        assert resumed.step + resumed.epoch * epoch == taken
        rest = []
        for _ in range(resumed.epoch, 2):
            rest += list(resumed)
        assert_same_batches(rest, expected[taken:])


# On a machine with fewer processors.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_three_workers_go_on_in_turn(tmp_path: Path) -> None:
    expected = list(make("uneven", 3))
    for taken in range(0, len(expected), 2):
        loader = make("uneven", 3)
        given = list(itertools.islice(loader, taken))
        resumed = make("uneven", 3)
        resumed.load_state_dict(stored(loader.state_dict(), tmp_path))
        assert_same_batches(given + list(resumed), expected)


def test_each_epoch_has_the_order_that_its_source_gives_it() -> None:
    loader = make("HF shuffled", 2)
    epochs = [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1] and loader.epoch == 2
    again = make("HF shuffled", 2)
    again.set_epoch(1)
    assert [batch["input_ids"].tolist() for batch in again] == epochs[1]


class Broken:
    """Raises instead of a sample, until it is mended."""

    is_mended = False

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(IDS):
            if number == 30 and not Broken.is_mended:
                raise ConnectionError("the bucket does not answer")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_within_a_batch_loses_no_pack(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(source: Any) -> td.packing.PackLoader:
        return td.loader(td.PackedStream(source, **OPTIONS), batch_size=3, num_workers=workers)

    expected = list(over(IDS))
    loader = over(Broken())
    given: list[Any] = []
    with pytest.raises(ConnectionError, match="does not answer"):
        given.extend(loader)
    assert 0 < len(given) == loader.step
    monkeypatch.setattr(Broken, "is_mended", True)
    # In the same process, and with the same stream.
    loader.load_state_dict(loader.state_dict())
    assert_same_batches(given + list(loader), expected)


@pytest.mark.parametrize(("workers", "drop_last"), [(0, False), (0, True), (2, False), (2, True)])
def test_num_packs_give_it_a_length(workers: int, drop_last: bool) -> None:
    loader = td.loader(
        td.PackedStream(itertools.cycle(IDS), **OPTIONS, num_packs=13),
        batch_size=2,
        num_workers=workers,
        drop_last=drop_last,
    )
    assert (
        len(list(loader))
        == len(loader)
        == {(0, False): 7, (0, True): 6, (2, False): 7, (2, True): 6}[workers, drop_last]
    )
    with pytest.raises(InvalidTypeError, match="no length without num_packs"):
        len(make())


def test_a_generator_is_read_once() -> None:
    loader = td.loader(td.PackedStream((sample for sample in IDS), **OPTIONS), batch_size=2)
    assert_same_batches(list(loader), list(make()))
    with pytest.raises(InvalidInputError, match="passes once"):
        list(loader)


def test_a_state_that_the_stream_loaded_is_its_beginning(tmp_path: Path) -> None:
    expected = list(make())
    stream = td.PackedStream(IDS, **OPTIONS)
    packs = iter(stream)
    for _ in range(4):
        next(packs)
    other = td.PackedStream(IDS, **OPTIONS)
    other.load_state_dict(stream.state_dict())
    loader = td.loader(other, batch_size=2)
    resumed = make()
    resumed.load_state_dict(stored(loader.state_dict(), tmp_path))
    for own in (loader, resumed):
        assert_same_batches(list(own), expected[2:])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"plan": td.pack([3], 4)}, "samples is a PackedStream, for which plan has no meaning"),
        ({"seed": 1, "rank": 0}, "seed, rank has no meaning"),
        ({"world_size": 1}, "world_size has no meaning"),
        ({"columns": {"w": 0.0}}, "columns has no meaning"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        td.loader(td.PackedStream(IDS, **OPTIONS), **{"batch_size": 2, **arguments})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_workers": 2}, r"saved with num_workers=2, and this loader has num_workers=1: .*num_workers=2"),
        ({"of": "packs of a plan"}, "over 'packs of a plan', and this one is over 'a stream'"),
        ({"streams": []}, "cut or edited: it has 0 streams"),
        ({"next_worker": 1}, "next_worker=1"),
        ({"packs_since": [-1]}, "packs_since=\\[-1\\]"),
        ({"step": "3"}, "cut or edited"),
        ({"streams": [{}]}, "not the state of a PackedStream"),
        ({"streams": [td.PackedStream(IDS, **OPTIONS).state_dict()]}, "stream 0 is that of None"),
    ],
)
def test_other_states_are_refused(change: dict[str, Any], says: str) -> None:
    loader = make(workers=1)
    next(iter(loader))
    before = loader.state_dict()
    assert not loader.resumes_on_any_ranks
    with pytest.raises(StateMismatchError, match=says):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before
    other = td.loader(td.PackedStream(IDS, 99), batch_size=2, num_workers=1)
    state = before | {"streams": [td.PackedStream(IDS, **OPTIONS).state_dict() | {"worker": [0, 1]}]}
    with pytest.raises(StateMismatchError, match="max_length"):
        other.load_state_dict(state)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["DataLoader", "loader"])
def test_the_state_of_a_stream_that_workers_read_is_refused(context: str, kind: str) -> None:
    stream = td.PackedStream(IDS, **OPTIONS)
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context}
    loader: Any = (
        td.loader(stream, batch_size=2, **options)
        if kind == "loader"
        else DataLoader(stream, batch_size=2, collate_fn=td.PackedCollator(), **options)
    )
    batches = iter(loader)
    next(batches)
    with pytest.raises(InvalidInputError, match=r"workers of a DataLoader.*td.loader\(stream"):
        stream.state_dict()
    list(batches)
    with pytest.raises(InvalidInputError, match="workers of a DataLoader"):
        stream.state_dict()
    # Read in this process, it has one again.
    next(iter(stream))
    assert stream.state_dict()["packs"] == 1


def test_other_processes_and_loaders_leave_the_state_of_a_stream(tmp_path: Path) -> None:
    stream = td.PackedStream(IDS, **OPTIONS)
    packs = iter(stream)
    next(packs)
    loader = StatefulDataLoader(
        td.PackedStream(IDS, **OPTIONS), batch_size=2, num_workers=1, collate_fn=td.PackedCollator()
    )
    next(iter(loader))
    loader.state_dict()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_packs_given, (stream,)) == 0
    assert stream.state_dict()["packs"] == 1


def _packs_given(stream: td.PackedStream) -> int:
    given: int = stream.state_dict()["packs"]
    return given


def test_batches_wait_for_a_step_of_accumulation() -> None:
    loader = make("rows", 2, num_items_in_batch=2)
    plain = list(make("rows", 2))
    iterator = iter(loader)
    first = next(iterator)
    assert first["num_items_in_batch"] == td.packing.num_items_in_batch(plain[:2]).item()
    # One batch of the step is ready, and not given.
    resumed = make("rows", 2)
    resumed.load_state_dict(loader.state_dict())
    assert_same_batches(list(resumed), plain[1:])


def test_a_batch_of_numpy_values_stays_as_its_collator_made_it() -> None:
    def collate(items: list[Any]) -> Any:
        return np.array([len(item["input_ids"]) for item in items])

    (first, *_) = td.loader(td.PackedStream(IDS, **OPTIONS), batch_size=2, collator=collate)
    assert isinstance(first, np.ndarray)
