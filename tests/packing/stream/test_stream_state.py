"""A stream goes on from its state with the next pack."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.streams import (
    PlainSource,
    StatefulSource,
    assert_same_items,
    carried,
    draw_samples,
    planned_items,
    stream_options,
)
from support.soak import covering
from torchdata.nodes import IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import tundish as td
from tundish.errors import InvalidInputError, StateMismatchError

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

ORDERED = {"mode": "ordered", "window": 3, "max_length": 16, "overlong": "split"}
HARD = {"mode": "hard", "max_length": 16, "drop_last": False}
LENGTHS = np.random.default_rng(0).integers(0, 40, 40).tolist()


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_resumes(make: Callable[[], td.PackedStream], expected: list[dict[str, Any]], taken: int) -> None:
    """After `taken` packs, another process would give the others; then every pack again."""
    first = make()
    iterator = iter(first)
    assert_same_items([next(iterator) for _ in range(taken)], expected[:taken])
    state = saved(first.state_dict())
    # The state is no part of the iteration, which goes on.
    assert_same_items(list(iterator), expected[taken:])
    second = make()
    second.load_state_dict(state)
    assert saved(second.state_dict())["packs"] == taken
    assert_same_items(list(second), expected[taken:])
    assert_same_items(list(second), expected)


@given(
    stream_options(),
    st.sampled_from([PlainSource, StatefulSource]),
    st.sampled_from(["arrays", "lists", "rows"]),
    st.data(),
)
def test_goes_on_after_any_pack(
    case: tuple[dict[str, Any], list[int]], source: type[Any], form: str, data: Any
) -> None:
    options, lengths = case
    samples = draw_samples(lengths, form)
    expected = planned_items(samples, options, **carried(form))
    taken = data.draw(st.integers(0, len(expected)))
    assert_resumes(lambda: td.PackedStream(source(samples), **options, **carried(form)), expected, taken)


def hf_stream(shuffled: bool = False) -> hf.IterableDataset:
    rows = {"input_ids": [sample.tolist() for sample in draw_samples(LENGTHS, "arrays")]}
    stream = hf.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3)
    return stream.shuffle(seed=1, buffer_size=8) if shuffled else stream


def nodes() -> Loader[Any]:
    return Loader(IterableWrapper(draw_samples(LENGTHS, "lists")), restart_on_stop_iteration=False)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: draw_samples(LENGTHS, "lists"),
    "HF": hf_stream,
    "HF mapped": lambda: hf_stream().map(lambda row: row),
    "HF in numpy format": lambda: hf_stream().with_format("numpy"),
    "HF with a shuffle buffer": lambda: hf_stream(shuffled=True),
    "HF in memory": lambda: hf.Dataset.from_list(list(hf_stream())),
    "StatefulDataLoader": lambda: StatefulDataLoader(hf_stream(), batch_size=None),
    "torchdata.nodes": nodes,
}


@pytest.mark.parametrize(("source", "mode"), covering(SOURCES, ["ordered", "hard"]))
def test_sources_of_other_libraries_go_on(source: str, mode: str) -> None:
    make, options = SOURCES[source], {"ordered": ORDERED, "hard": HARD}[mode]
    samples = [sample["input_ids"] if isinstance(sample, dict) else sample for sample in make()]
    assert len(samples) == len(LENGTHS)
    expected = planned_items(samples, options)
    for taken in range(0, len(expected) + 1, 5):
        assert_resumes(lambda: td.PackedStream(make(), **options), expected, taken)


def test_a_checkpoint_keeps_it_for_each_rank_and_for_all(tmp_path: Path) -> None:
    samples = draw_samples(LENGTHS, "rows")

    def make() -> td.PackedStream:
        return td.PackedStream(StatefulSource(samples), **ORDERED, **carried("rows"))

    stream = make()
    iterator = iter(stream)
    for _ in range(7):
        next(iterator)
    state = stream.state_dict()
    with td.Checkpointer(tmp_path) as checkpointer:
        # A DispatchLoader over a stream has its state for all ranks.
        checkpointer.save_dcp(
            7, {"weight": torch.zeros(1)}, extra={"stream": state}, rank_extra={"stream": state}
        )
        checkpointer.wait()
        extra, rank_extras = checkpointer.load_dcp({})
    expected = list(iterator)
    for found in (extra, rank_extras[0]):
        resumed = make()
        resumed.load_state_dict(found["stream"])
        assert_same_items(list(resumed), expected)


@pytest.mark.parametrize("source", [PlainSource, StatefulSource])
def test_a_source_with_a_state_is_not_read_again(source: type[Any]) -> None:
    samples = draw_samples(LENGTHS, "lists")
    first = td.PackedStream(source(samples), **ORDERED)
    iterator = iter(first)
    for _ in range(10):
        next(iterator)
    given_before = first.samples.given
    again = source(samples)
    second = td.PackedStream(again, **ORDERED)
    second.load_state_dict(first.state_dict())
    assert again.given == 0
    assert_same_items(list(second), list(iterator))
    assert again.given == len(samples) - (0 if source is PlainSource else given_before)


def test_at_the_end_of_the_samples_the_source_is_not_read_again() -> None:
    samples = draw_samples(LENGTHS, "lists")
    stream = td.PackedStream(samples, **ORDERED)
    states = [stream.state_dict() for _ in stream]
    source = PlainSource(samples)
    again = td.PackedStream(source, **ORDERED)
    for left in (2, 1, 0):
        again.load_state_dict(states[-1 - left])
        assert_same_items(list(again), planned_items(samples, ORDERED)[len(states) - left :])
    assert source.given == 0


def test_the_first_state_is_that_of_the_beginning() -> None:
    samples = draw_samples(LENGTHS, "lists")
    expected = planned_items(samples, ORDERED)
    for begun in (False, True):
        stream = td.PackedStream(StatefulSource(samples), **ORDERED)
        if begun:
            iter(stream)
        other = td.PackedStream(StatefulSource(samples), **ORDERED)
        other.load_state_dict(stream.state_dict())
        assert_same_items(list(other), expected)


def test_a_state_that_was_loaded_and_not_used_is_given_back() -> None:
    samples = draw_samples(LENGTHS, "rows")
    first = td.PackedStream(StatefulSource(samples), **ORDERED, **carried("rows"))
    expected = list(first)
    iterator = iter(first)
    for _ in range(7):
        next(iterator)
    state = first.state_dict()
    second = td.PackedStream(StatefulSource(samples), **ORDERED, **carried("rows"))
    second.load_state_dict(state)
    iter(second)
    # Nothing of the source was read.
    third = td.PackedStream(StatefulSource(samples), **ORDERED, **carried("rows"))
    third.load_state_dict(second.state_dict())
    assert_same_items(list(third), expected[7:])
    assert_same_items(list(second), expected)


@pytest.mark.parametrize("options", [ORDERED, HARD], ids=["ordered", "hard"])
def test_a_pickled_stream_goes_on_from_what_was_loaded(options: dict[str, Any]) -> None:
    samples = draw_samples(LENGTHS, "lists")
    expected = planned_items(samples, options)
    stream = td.PackedStream(samples, **options)
    iterator = iter(stream)
    next(iterator)
    state = stream.state_dict()
    assert_same_items(list(pickle.loads(pickle.dumps(stream))), expected)
    stream.load_state_dict(state)
    assert_same_items(list(pickle.loads(pickle.dumps(stream))), expected[1:])


def test_an_epoch_of_a_hugging_face_stream_goes_on_in_another_process() -> None:
    def make() -> td.PackedStream:
        return td.PackedStream(hf_stream(shuffled=True), **HARD)

    whole = make()
    orders = []
    for epoch in range(3):
        whole.set_epoch(epoch)
        orders.append(list(whole))
    first = make()
    first.set_epoch(1)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    state = saved(first.state_dict())
    assert state["epoch"] == 1
    for calls in ([], [1]):
        second = make()
        second.load_state_dict(state)
        for epoch in calls:
            second.set_epoch(epoch)
        assert_same_items(list(second), orders[1][5:])
        second.set_epoch(2)
        assert_same_items(list(second), orders[2])
    # Another epoch begins at its beginning.
    third = make()
    third.load_state_dict(state)
    third.set_epoch(2)
    assert_same_items(list(third), orders[2])


def test_an_unloaded_state_of_a_source_does_not_change() -> None:
    """A source may give the dict that it goes on changing."""

    class Live(StatefulSource):
        def __init__(self, samples: list[Any]) -> None:
            super().__init__(samples)
            self.live = {"position": 0}

        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                self.live["position"] = self._position
                yield sample

        def state_dict(self) -> dict[str, int]:
            return self.live

    samples = draw_samples(LENGTHS, "lists")
    expected = planned_items(samples, ORDERED)
    stream = td.PackedStream(Live(samples), **ORDERED)
    iterator = iter(stream)
    next(iterator)
    state = stream.state_dict()
    assert_same_items(list(iterator), expected[1:])
    before = copy.deepcopy(state["source"])
    stream.load_state_dict(state)
    assert_same_items(list(stream), expected[1:])
    assert state["source"] == before


def some_state() -> dict[str, Any]:
    stream = td.PackedStream(draw_samples(LENGTHS, "rows"), **ORDERED, **carried("rows"))
    next(iter(stream))
    return saved(stream.state_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: None, "not the state of a PackedStream: it is None"),
        (lambda state: {"kind": "DispatchLoader"}, "not the state of a PackedStream: its 'kind' is 'DispatchLoader'"),
        (lambda state: state | {"version": 9}, "the state has version 9, this release of tundish reads 1"),
        (lambda state: {key: state[key] for key in ("kind", "version")}, "cut or edited: KeyError: 'options'"),
        (lambda state: state | {"samples": "7"}, "cut or edited: TypeError"),
        (lambda state: state | {"samples": -7}, "cut or edited: ValueError: -7 samples"),
        (lambda state: state | {"is_exhausted": None}, "cut or edited: ValueError: .* is_exhausted=None"),
        (lambda state: state | {"epoch": -5}, "cut or edited: ValueError: .* epoch -5"),
        (lambda state: state | {"packs": None}, "cut or edited: TypeError"),
        (lambda state: state | {"worker": [1]}, "cut or edited: TypeError"),
        (lambda state: state | {"pieces_of_open_packs": [1]}, "1 open packs of 1 pieces"),
        (lambda state: state | {"pieces_of_open_packs": [0, *state["pieces_of_open_packs"]]}, r"pieces of \[\] tokens"),
        (lambda state: state | {"source_samples": state["samples"] + 1}, "ValueError: .* in the source's state"),
        (lambda state: state | {"pieces": state["pieces"] | {"labels": "AAAAAAAAAAA="}}, "1 entries for"),
        (lambda state: state | {"pieces": state["pieces"] | {"lengths": [1.0]}}, "cut or edited"),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(change: Callable[[Any], Any], says: str) -> None:
    samples = draw_samples(LENGTHS, "rows")
    stream = td.PackedStream(samples, **ORDERED, **carried("rows"))
    with pytest.raises(StateMismatchError, match=says):
        stream.load_state_dict(change(some_state()))
    assert_same_items(list(stream), planned_items(samples, ORDERED, **carried("rows")))


@pytest.mark.parametrize(
    ("option", "value"),
    [("mode", "sequential"), ("max_length", 17), ("window", 4), ("overlong", "drop"), ("columns", None),
     ("align", 2), ("max_samples", 9), ("sample_columns", None),
     ("columns", {"weight": 0, "kind": -1}), ("columns", {"weight": 0.0, "kind": -1.0}),
     ("columns", {"weight": False, "kind": -1}), ("columns", {"weight": -0.0, "kind": -1})],
)  # fmt: skip
def test_the_state_of_a_stream_with_other_options_is_refused(option: str, value: Any) -> None:
    options = ORDERED | carried("rows") | {option: value}
    if value == "sequential":
        del options["window"]
    dropped = (
        {"columns": ["weight", "kind"], "sample_columns": ["name"]}.get(option) if value is None else None
    )
    stream = td.PackedStream(draw_samples(LENGTHS, "rows"), drop_columns=dropped, **options)
    with pytest.raises(
        StateMismatchError, match=f"the state is of a stream with {option}=.* this one has {option}="
    ):
        stream.load_state_dict(some_state())


def test_a_state_with_a_padding_value_that_is_no_number_goes_on() -> None:
    rows = [{"input_ids": [1, 2], "weight": [0.5, number]} for number in range(4)]

    def make() -> td.PackedStream:
        return td.PackedStream(rows, 4, columns={"weight": float("nan")})

    first, second = make(), make()
    iterator = iter(first)
    next(iterator)
    second.load_state_dict(saved(first.state_dict()))
    assert [item["weight"].tolist() for item in second] == [item["weight"].tolist() for item in iterator]


def test_a_source_with_fewer_samples_than_the_state_says_is_refused() -> None:
    samples = draw_samples(LENGTHS, "lists")
    stream = td.PackedStream(samples, **ORDERED)
    for _ in zip(stream, range(30), strict=False):
        state = stream.state_dict()
    shorter = td.PackedStream(samples[:5], **ORDERED)
    shorter.load_state_dict(state)
    with pytest.raises(
        StateMismatchError, match=rf"taken after {state['samples']} samples, and the source has 5"
    ):
        list(shorter)


def test_a_state_is_refused_for_a_generator_that_was_begun() -> None:
    stream = td.PackedStream(iter(draw_samples(LENGTHS, "lists")), **ORDERED)
    next(iter(stream))
    stream.load_state_dict(stream.state_dict())
    with pytest.raises(InvalidInputError, match="passes once"):
        iter(stream)


class Curable(StatefulSource):
    """Its sample `number` is `sick` until `is_cured`; a sick sample that is an error is raised."""

    def __init__(self, samples: list[Any], number: int, sick: Any, is_cured: bool) -> None:
        super().__init__(samples)
        if not is_cured:
            self._samples = [*samples[:number], sick, *samples[number + 1 :]]

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if isinstance(sample, Exception):
                raise sample
            yield sample


class PlainCurable(Curable):
    """The same without a state."""

    load_state_dict = None  # type: ignore[assignment]


SICK: dict[str, Any] = {
    "an error of the source": ConnectionError("the bucket does not answer"),
    "no sample": "text",
    "an unknown key": {"input_ids": [1], "reward": 1.0},
    "a wrong mask": {"input_ids": [1, 2], "loss_mask": [1, 2]},
    "a wrong constant": {"input_ids": [1, 2], "attention_mask": [1, 0]},
    "an id that is too large": np.array([1, 2**63], np.uint64),
    "a sample that is too long": [1] * 99,
    "labels of another length": {"input_ids": [1, 2], "labels": [1]},
    "a wrong mask at the end of a long sample": {"input_ids": [1] * 16, "loss_mask": [1] * 15 + [2]},
}


def packs_until_an_error(
    stream: td.PackedStream, states_at: set[int]
) -> tuple[list[dict[str, Any]], Exception | None]:
    """The packs before an error. The state is asked for after the packs of these numbers, as a checkpoint does."""
    found: list[dict[str, Any]] = []
    try:
        for number, item in enumerate(stream):
            found.append(item)
            if number in states_at:
                stream.state_dict()
    except Exception as error:
        return found, error
    return found, None


class IteratorCurable(Curable):
    """The same as an iterator, which goes on where it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._samples):
            raise StopIteration
        sample = self._samples[self._next]
        self._next += 1
        if isinstance(sample, Exception):
            raise sample
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def test_an_iterator_with_a_state_begins_anew() -> None:
    samples = draw_samples(LENGTHS, "lists")
    expected = planned_items(samples, ORDERED)
    stream = td.PackedStream(IteratorCurable(samples, 0, None, True), **ORDERED)
    first = stream.state_dict()
    for _ in range(2):
        assert_same_items(list(stream), expected)
    for taken in (0, 4):
        stream.load_state_dict(first)
        iterator = iter(stream)
        assert_same_items([next(iterator) for _ in range(taken)], expected[:taken])
    stream.load_state_dict(first)
    assert_same_items(list(stream), expected)


@pytest.mark.parametrize("sick", SICK)
@pytest.mark.parametrize("mode", ["ordered", "sequential", "hard"])
@pytest.mark.parametrize("source", [Curable, PlainCurable, IteratorCurable])
def test_the_state_after_an_error_lacks_nothing(source: type[Curable], mode: str, sick: str) -> None:
    if mode == "hard" and sick == "a sample that is too long":
        return
    lengths = [length % 17 for length in LENGTHS]
    samples = draw_samples(lengths, "lists")
    options: dict[str, Any] = {"mode": mode, "max_length": 16}
    expected = planned_items(samples, options)
    for number in (0, 1, 9, len(samples) - 1):
        for states_at in (set(), {1, 2}):
            stream = td.PackedStream(source(samples, number, SICK[sick], False), **options)
            found, error = packs_until_an_error(stream, states_at)
            assert error is not None
            assert_same_items(found, expected[: len(found)])
            state = saved(stream.state_dict())
            assert (state["packs"], state["samples"]) == (len(found), number)
            # The sickness that lasts is met again.
            again = td.PackedStream(source(samples, number, SICK[sick], False), **options)
            again.load_state_dict(state)
            for _ in range(2):
                assert packs_until_an_error(again, set())[0] == []
                assert saved(again.state_dict())["samples"] == number
                again.load_state_dict(again.state_dict())
            for taken in (state, saved(again.state_dict())):
                cured = td.PackedStream(source(samples, number, None, True), **options)
                cured.load_state_dict(taken)
                assert_same_items(list(cured), expected[len(found) :])


def test_an_error_after_a_checkpoint_does_not_read_all_samples_again() -> None:
    samples = draw_samples([5] * 100, "lists")
    stream = td.PackedStream(Curable(samples, 90, "text", False), 8, mode="sequential")
    packs_until_an_error(stream, {79})
    cured = Curable(samples, 90, None, True)
    again = td.PackedStream(cured, 8, mode="sequential")
    again.load_state_dict(stream.state_dict())
    list(again)
    # The state was asked for when pack 80 was opened by sample 80.
    assert cured.given == 100 - 81


@pytest.mark.parametrize("mode", ["ordered", "sequential", "hard"])
@pytest.mark.parametrize("source", [PlainSource, StatefulSource])
def test_a_pack_whose_positions_failed_is_not_given_out(source: type[Any], mode: str) -> None:
    samples = draw_samples([length % 17 for length in LENGTHS], "lists")
    options: dict[str, Any] = {"mode": mode, "max_length": 16}
    if mode == "hard":
        options["drop_last"] = False
    sick: set[int] = set()

    def positions(piece: dict[str, Any]) -> Any:
        if not sick.isdisjoint(piece["input_ids"].tolist()):
            raise KeyError("image_grid_thw")
        return np.arange(len(piece["input_ids"]))

    expected = planned_items(samples, options, positions=positions)
    for number in (0, 3, len(expected) - 1):
        sick = {int(expected[number]["input_ids"][-1])}
        stream = td.PackedStream(source(samples), positions=positions, **options)
        found, error = packs_until_an_error(stream, set())
        assert isinstance(error, KeyError) and len(found) == number
        state = saved(stream.state_dict())
        assert state["packs"] == number
        again = td.PackedStream(source(samples), positions=positions, **options)
        again.load_state_dict(state)
        assert packs_until_an_error(again, set())[0] == []
        sick = set()
        for taken in (state, saved(again.state_dict())):
            cured = td.PackedStream(source(samples), positions=positions, **options)
            cured.load_state_dict(taken)
            assert_same_items(list(cured), expected[number:])


def test_a_state_of_a_source_is_refused_where_the_source_takes_none() -> None:
    samples = draw_samples(LENGTHS, "lists")
    stream = td.PackedStream(StatefulSource(samples), **ORDERED)
    next(iter(stream))
    for other in (PlainSource(samples), samples, iter(samples)):
        plain = td.PackedStream(other, **ORDERED)
        with pytest.raises(StateMismatchError, match=r"holds that of a source, .* without load_state_dict"):
            plain.load_state_dict(stream.state_dict())
        assert_same_items(list(plain), planned_items(samples, ORDERED))
