"""`StreamSource`: the batches of a stream for a loader, and how far each worker is that makes them.

Each worker of a `DataLoader` makes whole batches of its part of the stream. The `DataLoader` gives them in turn. A mark
comes with each batch, and now and then it has the state of the worker's stream.

Invariants: a progress belongs to the batches that were given out. A state is loaded with the same number of workers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from tundish.errors import StateMismatchError
from tundish.packing.batches.sampler import running_ranks
from tundish.packing.stream import PackedStream, StreamState, own_packs
from tundish.packing.stream_source import Worker, epoch_of

# A state has the tokens of all open packs. A worker sends one when it gave so many packs for each of them, which costs
# a few percent of what making the packs costs; with every batch it would take longer than all else. A resume reads the
# packs since then again.
_PACKS_A_STATE = 8
# Without workers a state is not sent, and is taken with every so many batches.
_BATCHES_A_STATE = 4


class StreamSource:
    """The batches of this rank's stream.

    Args:
        stream: The packs.
        collate: Makes a batch of items.
        batch_size: Packs of a batch.
        drop_last: Whether the last packs of a worker are left out if they fill no batch.
        workers: Workers of the `DataLoader`.

    Attributes:
        batches: Makes the batches of a worker, each with its mark.
        length: Steps of an epoch, if `num_packs` says it.
        epoch: The epoch that the source is told.
    """

    name = "a stream"
    resumes_on_any_ranks = False
    state_keys = ("epoch", "step", "num_workers", "next_worker", "streams", "packs_since")
    rank: int | None = None
    world_size: int | None = None
    seed = 0
    # An iterable dataset is not asked for steps.
    steps = None

    def __init__(
        self,
        stream: PackedStream,
        collate: Callable[[list[Any]], Any],
        *,
        batch_size: int,
        drop_last: bool,
        workers: int,
    ) -> None:
        self.batches = _StreamBatches(stream, collate, batch_size, drop_last)
        self.batch_size = batch_size
        self.epoch = epoch_of(stream.samples) or 0
        self._stream = stream
        self._workers = workers
        self._start = self._beginning()
        if not workers:
            # A state that the stream has loaded itself.
            self._start.parts[0] = _Part(stream._loaded)
        self.length = self._length(drop_last)

    @property
    def distributed(self) -> Any:
        return self._stream._distributed

    def logs(self) -> bool:
        return running_ranks()[0] == 0

    def described(self) -> str:
        return self.name

    def set_epoch(self, epoch: int) -> None:
        self._stream.set_epoch(epoch)
        self.epoch, self._start = epoch, self._beginning()

    def progress(self) -> StreamProgress:
        """The progress of an iteration that has not begun."""
        return self._start

    def begin(self) -> StreamProgress:
        """The progress of an iteration that begins now; the one after it begins at the beginning."""
        progress, self._start = self._start, self._beginning()
        self.batches.start = [(part.state, part.packs) for part in progress.parts], progress.next_worker
        return progress

    def state_dict(self, progress: Any) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": progress.step,
            "num_workers": self._workers,
            "next_worker": progress.next_worker,
            "streams": [part.as_dict(self._stream) for part in progress.parts],
            "packs_since": [part.packs for part in progress.parts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = ("epoch", "step", "num_workers", "next_worker")
        try:
            epoch, step, workers, following = (operator.index(state[name]) for name in names)
            packs = [operator.index(count) for count in state["packs_since"]]
            found = list(state["streams"])
        except TypeError as error:
            raise StateMismatchError(f"the state of the loader was cut or edited: {error}") from error
        if workers != self._workers:
            raise StateMismatchError(
                f"the state was saved with num_workers={workers}, and this loader has num_workers={self._workers}: "
                f"each worker packs a part of the stream, so make the loader with num_workers={workers}"
            )
        size = max(workers, 1)
        if not len(found) == len(packs) == size or not 0 <= following < size or min(epoch, step, *packs) < 0:
            raise StateMismatchError(
                f"the state of the loader was cut or edited: it has {len(found)} streams, packs_since={packs!r:.100}, "
                f"next_worker={following}, epoch={epoch} and step={step}"
            )
        states = [None if one is None else self._stream._from_dict(one) for one in found]
        for number, one in enumerate(states):
            own = Worker(number, workers) if workers else None
            if one is not None and one.worker != own:
                raise StateMismatchError(
                    f"the state of the loader was edited: stream {number} is that of {one.worker}"
                )
        if epoch != self.epoch:
            self._stream.set_epoch(epoch)
        self.epoch = epoch
        parts = [_Part(one, count) for one, count in zip(states, packs, strict=True)]
        self._start = StreamProgress(parts, following, step)

    def _beginning(self) -> StreamProgress:
        return StreamProgress([_Part() for _ in range(max(self._workers, 1))], 0, 0)

    def _length(self, drop_last: bool) -> int | None:
        packs = self._stream._num_packs
        if packs is None:
            return None
        counts = [packs]
        if self._workers:
            counts = [own_packs(packs, Worker(number, self._workers)) for number in range(self._workers)]
        return sum(
            count // self.batch_size if drop_last else -(-count // self.batch_size) for count in counts
        )


class _Part:
    """How far the stream of one worker is: a state, and the packs that were given out after it.

    Attributes:
        state: The state; None at the beginning of an epoch.
        packs: Packs that were given out since.
    """

    def __init__(self, state: StreamState | None = None, packs: int = 0) -> None:
        self.state = state
        self.packs = packs
        self._dict: dict[str, Any] | None = None

    def as_dict(self, stream: PackedStream) -> dict[str, Any] | None:
        """The state as a dict, which is made once."""
        if self._dict is None and self.state is not None:
            self._dict = stream._as_dict(self.state)
        return None if self._dict is None else dict(self._dict)


@dataclass(slots=True)
class _Mark:
    """What a worker says with a batch.

    Attributes:
        worker: Its number.
        packs: The packs that it gave since its last state, this batch's among them.
        state: The state after this batch, if the worker took one.
    """

    worker: int
    packs: int
    state: StreamState | None


class StreamProgress:
    """How far an iteration over a stream is.

    Attributes:
        parts: How far each worker's part is; one without workers.
        next_worker: The worker whose batch comes next.
        step: Batches of the epoch that were given out.
    """

    def __init__(self, parts: list[_Part], next_worker: int, step: int) -> None:
        self.parts = parts
        self.next_worker = next_worker
        self.step = step

    def marked(self, made: Iterator[Any]) -> Iterator[tuple[Any, _Mark]]:
        return ((batch, mark) for batch, mark in made if mark is not None)

    def advance(self, mark: _Mark) -> bool:
        """Count a batch that is given out; returns whether it is padding."""
        if mark.state is not None:
            self.parts[mark.worker] = _Part(mark.state)
        self.parts[mark.worker].packs = mark.packs
        self.next_worker = (mark.worker + 1) % len(self.parts)
        self.step += 1
        return False


class _StreamBatches(IterableDataset[Any]):
    """The batches of this process's part of a stream, each with its mark.

    Attributes:
        start: Where the next iteration begins: state and packs of each worker, and the worker whose batch comes first.
    """

    def __init__(
        self, stream: PackedStream, collate: Callable[[list[Any]], Any], batch_size: int, drop_last: bool
    ) -> None:
        self.start: tuple[list[tuple[StreamState | None, int]], int] = [], 0
        self._stream = stream
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[tuple[Any, _Mark | None]]:
        info = get_worker_info()
        parts, next_worker = self.start
        number = 0 if info is None else info.id
        return self._marked(number, *parts[number], waits=number < next_worker, sends=info is not None)

    def _marked(
        self, number: int, state: StreamState | None, packs: int, *, waits: bool, sends: bool
    ) -> Iterator[tuple[Any, _Mark | None]]:
        stream = self._stream
        if state is not None:
            stream._go_to(state)
        items = iter(stream)
        for _ in itertools.islice(items, packs):
            pass
        if waits:
            # The `DataLoader` begins with worker 0. Without a mark, the entry is no batch.
            yield None, None
        least = self._batch_size if self._drop_last else 1
        made = 0
        while len(batch := list(itertools.islice(items, self._batch_size))) >= least:
            collated = self._collate(batch)
            made += 1
            packs += len(batch)
            taken = None
            if packs >= _PACKS_A_STATE * stream._open_packs if sends else made % _BATCHES_A_STATE == 0:
                taken, packs = stream._state(), 0
            yield collated, _Mark(number, packs, taken)
