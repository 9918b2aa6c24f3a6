"""`BatchReader`: every batch once and in order, in steps, and the last batches by `tail`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tundish as td
from tundish.errors import InvalidInputError
from tundish.scatter.batch_reader import BatchReader, StepBatches, Tail


class Squares(Dataset[int]):
    """Squares of the indices. Notes which were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index * index


class Numbers(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Stateful:
    """A loader with a state of its own, which changes in place."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.at["next"] < self.count:
            self.at["next"] += 1
            yield self.at["next"] - 1
        self.at["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.at

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state


def drawn(reading: BatchReader) -> list[StepBatches]:
    steps = list(iter(reading.draw, None))
    # It stays at the end.
    assert reading.draw() is None
    return steps


@given(
    count=st.integers(0, 30),
    width=st.integers(1, 7),
    skip=st.integers(0, 30),
    tail=st.sampled_from(["drop", "pad", "short"]),
    has_length=st.booleans(),
)
def test_steps_are_the_loaders_batches_in_order(
    count: int, width: int, skip: int, tail: Tail, has_length: bool
) -> None:
    if skip > count:
        with pytest.raises(InvalidInputError, match=rf"first {skip} .* has only {count}"):
            BatchReader(list(range(count)), width=width, tail=tail, skip=skip)
        return
    data = range(count) if has_length else iter(range(count))
    if not has_length and not count:
        with pytest.raises(InvalidInputError, match="no batches left"):
            BatchReader(data, width=width, tail=tail).draw()
        return
    steps = drawn(BatchReader(data, width=width, tail=tail, skip=skip))
    left = list(range(skip, count))
    whole = len(left) // width
    for number, one in enumerate(steps[:whole]):
        assert one == (left[number * width : (number + 1) * width], width, None)
    rest = left[whole * width :]
    if tail == "drop" or not rest:
        assert len(steps) == whole
        return
    (last,) = steps[whole:]
    assert last.new == len(rest)
    assert last.batches[: last.new] == rest
    for position in range(last.new, width):
        if tail == "short":
            assert last.batches[position] is None
        else:
            assert last.batches[position] == rest[(position - last.new) % len(rest)]


def test_batches_that_a_sampler_leaves_out_are_not_read() -> None:
    data = Squares(20)
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    every = [batch.tolist() for batch in loader]
    loader.generator.manual_seed(3)
    data.asked.clear()
    reading = BatchReader(loader, width=3, tail="short", skip=4)
    found = [batch.tolist() for one in drawn(reading) for batch in one.batches[: one.new]]
    assert found == every[4:]
    assert sorted(index**2 for index in data.asked) == sorted(
        square for batch in every[4:] for square in batch
    )
    with pytest.raises(InvalidInputError, match=r"first 11 .* has only 10"):
        BatchReader(loader, width=3, tail="short", skip=11)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Squares(9), Numbers(9)])
def test_workers_read_the_same_after_batches_are_left_out(data: Any, workers: int) -> None:
    loader = DataLoader(data, batch_size=None if isinstance(data, Numbers) else 1, num_workers=workers)
    if workers and isinstance(data, Numbers):
        # Each worker reads the whole stream.
        expected = [int(batch) for batch in loader]
    else:
        expected = [int(batch) for batch in DataLoader(data, batch_size=loader.batch_size)]
    reading = BatchReader(loader, width=2, tail="short", skip=3)
    assert [int(batch) for one in drawn(reading) for batch in one.batches[: one.new]] == expected[3:]


def test_a_loader_resumes_from_its_own_state_after_each_step() -> None:
    whole = drawn(BatchReader(Stateful(11), width=2, tail="short"))
    # At its end the state would be that of a new epoch.
    assert [one.state for one in whole] == [*({"next": n} for n in (2, 4, 6, 8, 10)), None]
    for number in range(6):
        again = BatchReader(
            Stateful(11),
            width=2,
            tail="short",
            skip=2 * number + 2 - (number == 5),
            state=whole[number].state,
        )
        assert [one.batches for one in drawn(again)] == [one.batches for one in whole[number + 1 :]]


def test_the_order_of_a_shuffling_sampler_is_drawn_at_the_beginning() -> None:
    """Else its seed would depend on other draws from torch's generator."""
    loader = DataLoader(Squares(50), batch_size=1, shuffle=True)
    torch.manual_seed(7)
    expected = [int(batch) for batch in loader]
    torch.manual_seed(7)
    reading = BatchReader(loader, width=2, tail="drop")
    torch.rand(10)
    assert [int(batch) for one in drawn(reading) for batch in one.batches] == expected


def test_a_sampler_of_packs_is_resumed_by_counting() -> None:
    plan = td.pack([5] * 40, 10, seed=1)
    sampler = td.PackedBatchSampler(plan, 3, 0, 1, seed=5)
    loader = DataLoader([str(number) for number in range(len(plan))], batch_sampler=sampler)
    every = list(loader)
    reading = BatchReader(loader, width=2, tail="short", skip=3)
    assert [batch for one in drawn(reading) for batch in one.batches[: one.new]] == every[3:]
    # The sampler leaves out the same batches when it is resumed itself.
    sampler.load_state_dict(sampler.state_dict() | {"step": 3})
    with pytest.raises(InvalidInputError, match="was resumed by itself, at step 3"):
        BatchReader(loader, width=2, tail="short", skip=3)
    reading = BatchReader(loader, width=2, tail="short")
    assert [batch for one in drawn(reading) for batch in one.batches[: one.new]] == every[3:]


def test_an_error_of_the_loader_is_raised_in_its_step() -> None:
    def breaking() -> Iterator[int]:
        yield from range(5)
        raise OSError("damaged")

    reading = BatchReader(breaking(), width=2, tail="pad")
    assert [reading.draw().batches for _ in range(2)] == [[0, 1], [2, 3]]  # type: ignore[union-attr]
    with pytest.raises(OSError, match="damaged"):
        reading.draw()
