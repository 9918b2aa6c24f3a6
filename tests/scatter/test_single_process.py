"""`DispatchLoader` in one process, without torch.distributed."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PeerFailedError, StateMismatchError


class Counting:
    """A loader that notes how many batches were read, and on which threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.count):
            self.read += 1
            self.threads.add(threading.current_thread().name)
            yield {"x": torch.full((2,), number), "n": number}

    def __len__(self) -> int:
        return self.count


def numbers(loader: td.DispatchLoader[Any]) -> list[int]:
    return [batch["n"] for batch in loader]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_epoch_has_every_batch(prefetch: int) -> None:
    with td.DispatchLoader(Counting(7), prefetch=prefetch) as loader:
        assert len(loader) == 7
        for epoch in range(3):
            assert loader.epoch == epoch
            assert numbers(loader) == list(range(7))
        stats = loader.stats()
        assert stats["steps"] == 21
        assert stats["shared_memory_ranks"] == stats["gloo_ranks"] == stats["ready_steps"] == 0
        assert stats["next_seconds"] > 0 and stats["reading_seconds"] > 0
    with pytest.raises(InvalidInputError, match="closed"):
        iter(loader)
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_it_prefetches_as_many_steps_as_asked(prefetch: int) -> None:
    counting = Counting(20)
    with td.DispatchLoader(counting, prefetch=prefetch) as loader:
        batches = iter(loader)
        for number in range(1, 4):
            next(batches)
            deadline = time.monotonic() + 10
            while counting.read < number + prefetch and time.monotonic() < deadline:
                time.sleep(0.001)
            # Time in which more would be prefetched.
            time.sleep(0.02)
            assert counting.read == number + prefetch
        assert loader.stats()["ready_steps"] == prefetch


def test_prefetched_bytes_are_bounded() -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(20):
            yield torch.zeros(1 << 20, dtype=torch.uint8)

    with td.DispatchLoader(batches(), prefetch=10, prefetch_bytes=3 << 20) as loader:
        steps = iter(loader)
        next(steps)
        deadline = time.monotonic() + 10
        while loader.stats()["ready_steps"] < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        stats = loader.stats()
        assert (stats["ready_steps"], stats["ready_bytes"]) == (3, 3 << 20)


def test_without_prefetch_the_loader_is_read_on_the_caller_s_thread() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table samples (tokens integer)")
    connection.executemany("insert into samples values (?)", [(number,) for number in range(5)])
    cursor = connection.execute("select tokens from samples order by tokens")
    with td.DispatchLoader(cursor, prefetch=0) as loader:
        assert [tokens for (tokens,) in loader] == list(range(5))
    connection.close()
    ahead = Counting(3)
    with td.DispatchLoader(ahead) as loader:
        numbers(loader)
    assert ahead.threads == {"tundish-dispatch"}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_state_is_that_of_the_last_step_handed_out(prefetch: int) -> None:
    with td.DispatchLoader(Counting(9), prefetch=prefetch) as loader:
        assert loader.state_dict()["batches"] == 0
        states = []
        for batch in loader:
            states.append(loader.state_dict())
            assert states[-1]["batches"] == batch["n"] + 1
        # The epoch is complete.
        assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0)
    for done, state in enumerate(states, 1):
        with td.DispatchLoader(Counting(9), prefetch=prefetch) as again:
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert numbers(again) == list(range(done, 9))
            assert numbers(again) == list(range(9))
            assert again.epoch == 2


class Stateful:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 9:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_loader_s_own_state_is_that_of_the_same_step(prefetch: int) -> None:
    with td.DispatchLoader(Stateful(), prefetch=prefetch) as loader:
        for number in loader:
            assert loader.state_dict()["loader"] == {"at": number + 1}
            if number == 4:
                state = loader.state_dict()
                break
    with td.DispatchLoader(Stateful(), prefetch=prefetch) as loader:
        loader.load_state_dict(state)
        assert list(loader) == [5, 6, 7, 8]
        # The next epoch starts without a state.
        assert loader.state_dict()["loader"] is None
        again = iter(loader)
        assert (loader.state_dict()["batches"], loader.state_dict()["loader"]) == (0, None)
        assert next(again) == 0


def test_after_a_break_the_epoch_begins_anew() -> None:
    with td.DispatchLoader(Counting(9), prefetch=2) as loader:
        for batch in loader:
            if batch["n"] == 3:
                break
        assert loader.state_dict()["batches"] == 4
        assert numbers(loader) == list(range(9))
        assert loader.epoch == 1


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_epoch_advances_without_a_request_for_its_end(prefetch: int) -> None:
    """The Trainer of transformers counts batches and does not ask for the end."""
    with td.DispatchLoader(Counting(3), prefetch=prefetch) as loader:
        for epoch in range(3):
            iterator = iter(loader)
            assert [next(iterator)["n"] for _ in range(len(loader))] == [0, 1, 2]
            assert (loader.epoch, loader.state_dict()["batches"]) == (epoch, 3)
        # set_epoch goes back to an earlier epoch.
        loader.set_epoch(2)
        assert next(iter(loader))["n"] == 0 and loader.epoch == 2
        state = loader.state_dict()
        iterator = iter(loader)
        assert [next(iterator)["n"] for _ in range(3)] == [0, 1, 2]
        loader.load_state_dict(state)
        assert numbers(loader) == [1, 2]
        assert loader.epoch == 3


def test_skip_batches_applies_to_the_first_iteration_only() -> None:
    with td.DispatchLoader(Counting(6), skip_batches=4, progress=True) as loader:
        assert loader.state_dict()["batches"] == 4
        assert numbers(loader) == [4, 5]
        assert numbers(loader) == list(range(6))
    with td.DispatchLoader(Counting(6), skip_batches=4) as loader:
        # The epoch in which the run resumes.
        loader.set_epoch(3)
        assert numbers(loader) == [4, 5]
    loader = td.DispatchLoader(Counting(6), skip_batches=7)
    with pytest.raises(InvalidInputError, match=r"first 7 .* has only 6"):
        iter(loader)


def test_progress_shows_batches_that_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with td.DispatchLoader(Counting(6), skip_batches=4, progress=True) as loader:
        numbers(loader)
    assert "skipping batches" in capsys.readouterr().err
    with td.DispatchLoader(Counting(6), skip_batches=4) as loader:
        numbers(loader)
    assert capsys.readouterr().err == ""


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldData(Told):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class ToldSampler(Told):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class ToldBatches(Told):
    def __init__(self, sampler: ToldSampler) -> None:
        super().__init__()
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5]])

    def __len__(self) -> int:
        return 3


def test_set_epoch_reaches_all_parts_of_the_loader_once() -> None:
    data, sampler = ToldData(), ToldSampler()
    batches = ToldBatches(sampler)
    inner = DataLoader(data, batch_sampler=batches)  # type: ignore[arg-type]
    with td.DispatchLoader(inner) as loader:
        loader.set_epoch(4)
        assert loader.epoch == 4
        assert data.epochs == batches.epochs == sampler.epochs == [4]
        state = loader.state_dict()
        list(loader)
        assert loader.epoch == 5
    with td.DispatchLoader(DataLoader(data, sampler=sampler)) as loader:  # type: ignore[arg-type]
        loader.load_state_dict(state)
        assert sampler.epochs == [4, 4] and data.epochs == [4, 4]
        assert loader.epoch == 4
        # A resumed loop begins with the epoch of the state.
        loader.set_epoch(4)
        assert len(list(loader)) == 6


def test_the_epoch_of_a_state_resumes_and_another_begins_anew() -> None:
    with td.DispatchLoader(Counting(5)) as loader:
        loader.set_epoch(2)
        for batch in loader:
            if batch["n"] == 1:
                break
        state = loader.state_dict()
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert numbers(loader) == [2, 3, 4]
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert numbers(loader) == list(range(5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "PackedBatchSampler"}, "not the state of a DispatchLoader"),
        ({"version": 7}, "version 7"),
        ({"version": True}, "version True"),
        ({"batches": -1}, "batches is -1"),
        ({"batches": "3"}, "batches is '3'"),
        ({"epoch": True}, "epoch is True"),
        ({"epoch": None}, "epoch is None"),
    ],
)
def test_a_damaged_state_is_refused_whole(change: dict[str, Any], said: str) -> None:
    with td.DispatchLoader(Counting(5)) as loader:
        good = loader.state_dict()
        with pytest.raises(StateMismatchError, match=said):
            loader.load_state_dict({**good, "batches": 2, **change})
        with pytest.raises(StateMismatchError, match="lacks batches"):
            loader.load_state_dict({name: value for name, value in good.items() if name != "batches"})
        with pytest.raises(StateMismatchError, match=r"not the state .* it is a list"):
            loader.load_state_dict([1])  # type: ignore[arg-type]
        with pytest.raises(StateMismatchError, match=r"it has no 'kind' \(keys: epoch\); pass what"):
            loader.load_state_dict({"epoch": 1})
        assert loader.state_dict() == good
        assert numbers(loader) == list(range(5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tail": "keep"}, "tail is 'keep': give one of 'drop', 'pad', 'short'"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"prefetch": 0.5}, "prefetch is 0.5"),
        ({"prefetch": True}, "prefetch is True"),
        ({"skip_batches": "2"}, "skip_batches is '2'"),
        ({"prefetch_bytes": -5}, "prefetch_bytes is -5"),
        ({"progress": "yes"}, "progress must be"),
        ({"src": 1}, "src is 1"),
        ({"src": 0.0}, "src is 0.0"),
        ({"device": "nowhere"}, "device is 'nowhere': give a device of torch"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, "device is 'cuda:.', which cannot be used here"),
        ({"device": 1.5}, "device is 1.5: give a torch.device"),
        ({"device": True}, "device is True: give a torch.device"),
        ({"dataloader": None}, "loader is None"),
        ({"dataloader": 5}, "loader is 5"),
        ({"dataloader": {"a": [1, 2]}}, r"loader is \{'a': \[1, 2\]\}: give an iterable of batches"),
        ({"dataloader": "batches"}, "loader is 'batches': give an iterable of batches"),
        ({"dataloader": b"batches"}, "loader is b'batches'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidInputError, InvalidTypeError), match=said):
        td.DispatchLoader(**{"dataloader": [1, 2], **options})


def test_a_wrong_keyword_leaves_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(TypeError, match="batches"):
        td.DispatchLoader(batches=[1])  # type: ignore[call-arg]
    gc.collect()
    assert not recwarn.list


def test_set_epoch_and_load_state_dict_end_the_iteration() -> None:
    with td.DispatchLoader(Counting(9), prefetch=3) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        next(batches)
        loader.load_state_dict(state)
        with pytest.raises(InvalidInputError, match="no more steps: load_state_dict was called"):
            next(batches)
        assert numbers(loader) == list(range(1, 9))
        batches = iter(loader)
        next(batches)
        loader.set_epoch(7)
        with pytest.raises(InvalidInputError, match="no more steps: set_epoch was called"):
            next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (7, 0)
        assert numbers(loader) == list(range(9)) and loader.epoch == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_second_iterator_ends_the_first_with_an_error(prefetch: int) -> None:
    with td.DispatchLoader(Counting(3), prefetch=prefetch) as loader:
        pairs = ((outer["n"], inner["n"]) for outer in loader for inner in loader)
        assert [next(pairs) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
        with pytest.raises(InvalidInputError, match="no more steps: another one was begun"):
            next(pairs)
        with pytest.raises(InvalidInputError, match="another one was begun"):
            list(zip(loader, loader, strict=True))
        first = iter(loader)
        assert len(list(first)) == 3
        # A complete iterator stays at its end.
        assert numbers(loader) == [0, 1, 2] and list(first) == []
        first = iter(loader)
        next(first)
        state = loader.state_dict()
        with pytest.raises(StateMismatchError):
            loader.load_state_dict({**state, "batches": -1})
        assert next(first)["n"] == 1
        loader.close()
        with pytest.raises(InvalidInputError, match="the DispatchLoader was closed"):
            next(first)


def test_a_loader_without_a_length_has_none() -> None:
    with td.DispatchLoader(number for number in range(3)) as loader:
        with pytest.raises(TypeError, match="no len"):
            len(loader)
        assert list(loader) == [0, 1, 2]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_iterator_that_is_used_up_is_refused_in_the_next_epoch(prefetch: int) -> None:
    said = r"iterator \(generator\) and has no batches left.* give an iterable that starts again"
    with td.DispatchLoader((number for number in range(3)), prefetch=prefetch) as loader:
        assert list(loader) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(InvalidInputError, match=said):
                list(loader)
        assert loader.epoch == 1
    with td.DispatchLoader(iter(range(3)), prefetch=prefetch, skip_batches=3) as loader:
        # A run that resumes at the end of the epoch.
        assert list(loader) == []
    with td.DispatchLoader([], prefetch=prefetch) as loader:
        assert list(loader) == list(loader) == []


def test_an_iterator_that_starts_again_has_every_epoch() -> None:
    class Restarting:
        def __iter__(self) -> Restarting:
            self.left = 3
            return self

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    with td.DispatchLoader(Restarting()) as loader:
        assert list(loader) == list(loader) == [2, 1, 0]


def test_it_has_no_dataset_attribute() -> None:
    from accelerate import Accelerator, skip_first_batches

    with td.DispatchLoader(DataLoader(list(range(4)))) as loader:
        assert getattr(loader, "dataset", None) is None
        accelerator = Accelerator(cpu=True)
        # Accelerate leaves objects alone that it does not know.
        assert accelerator.prepare(loader) is loader
        with pytest.raises(AttributeError, match="gives each rank its own batches already"):
            accelerator.prepare_data_loader(loader)
        with pytest.raises(AttributeError, match="skip_batches="):
            skip_first_batches(loader, 2)


def test_in_one_process_the_only_shard_is_accepted() -> None:
    data = list(range(4))
    with td.DispatchLoader(DataLoader(data, sampler=DistributedSampler(data, 1, 0, shuffle=False))) as loader:  # type: ignore[arg-type]
        assert len(list(loader)) == 4


@pytest.mark.parametrize("prefetch", [0, 1])
def test_after_an_error_of_the_loader_the_next_iteration_works(prefetch: int) -> None:
    class Breaks(Counting):
        broken = True

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for batch in super().__iter__():
                if batch["n"] == 3 and self.broken:
                    raise OSError("damaged")
                yield batch

    inner = Breaks(5)
    with td.DispatchLoader(inner, prefetch=prefetch) as loader:
        found: list[int] = []
        with pytest.raises(OSError, match="damaged"):
            found.extend(batch["n"] for batch in loader)
        assert found == [0, 1, 2]
        assert loader.state_dict()["batches"] == 3
        inner.broken = False
        assert numbers(loader) == list(range(5))


def test_tensors_go_to_the_device() -> None:
    with td.DispatchLoader(Counting(3), device="meta") as loader:
        assert [batch["x"].device.type for batch in loader] == ["meta"] * 3


def test_ctrl_c_while_the_loader_reads_on_the_caller_s_thread_closes_it() -> None:
    class Interrupted(Counting):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from super().__iter__()
            raise KeyboardInterrupt

    with td.DispatchLoader(Interrupted(2), prefetch=0) as loader:
        with pytest.raises(KeyboardInterrupt):
            numbers(loader)
        with pytest.raises(
            PeerFailedError, match=r"rank 0 was interrupted .*: make a new group, or a new Disp"
        ):
            numbers(loader)
    with pytest.raises(InvalidInputError, match="this DispatchLoader is closed: make a new one on all ranks"):
        iter(loader)


def test_an_epoch_of_a_loader_of_packs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"input_ids": [1, 2, 3]}] * 8
    packs = td.loader(samples, td.pack([3] * 8, 6), batch_size=2, world_size=1)
    with caplog.at_level("INFO", "tundish"), td.DispatchLoader(packs) as loader:
        assert len(list(loader)) == 2
    assert [record.name for record in caplog.records if "epoch" in record.message] == ["tundish.scatter"]
