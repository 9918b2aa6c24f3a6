"""`DispatchLoader`: a loader that is read on one rank, and feeds all.

Owns the passes through it, one at a time. What always holds:

1. All ranks go through the same rounds: what ends a pass for one ends it for all.
2. A state tells of the last round that was handed out, whatever was read ahead of it.
3. A pass begins when the one before is over on this rank.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from tundish.distributed import group_info, local_world_size
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NoDatasetError,
    NotPicklableError,
    StateMismatchError,
    TimedOutError,
)
from tundish.progress import ProgressLine
from tundish.scatter.loader.batch_reader import BatchReader, Tail, length_of, rounds_of, tell_epoch
from tundish.scatter.loader.epoch import Pass, ReceiverPass, SourcePass, Start
from tundish.scatter.loader.epoch_iterator import FORKED, EpochIterator
from tundish.scatter.loader.loader_state import Standing, as_count
from tundish.scatter.loader.prefetch import Ahead, Inline, Rounds
from tundish.scatter.loader.sharding_check import refuse_sharded
from tundish.scatter.received_batch import device_of
from tundish.scatter.rendezvous import limit_of
from tundish.scatter.session import ScatterStats
from tundish.scatter.session_setup import group_of, taking_part
from tundish.scatter.source import ScatterSession
from tundish.scatter.stops import Stops
from tundish.scatter.telling import wait_for_telling

__all__ = ["DispatchLoader", "LoaderStats"]

T_co = TypeVar("T_co", covariant=True)

_TAILS = ("drop", "pad", "short")
# What is sent in a pass has its number above these bits.
_ROUND_BITS = 32
# Rounds that a receiver has here beyond those that it asked for, so that what comes after them is heard of in time.
_MORE_ROUNDS = 2
_FAREWELL_SECONDS = 1.0


class LoaderStats(ScatterStats):
    """What a loader did on this rank; its `rounds` are those that were handed out."""

    reading_seconds: float
    """On the source: time spent in its loader."""
    next_seconds: float
    """Time that the loop waited for its batches."""
    ready_rounds: int
    """Rounds that are here and were not handed out."""
    ready_bytes: int
    """Bytes of their batches; on the source counted only where more than one may be ready."""


class DispatchLoader(Generic[T_co]):
    """Collective over `group`: reads a loader on one rank and hands every rank its own batches.

    Each round takes as many batches from the loader as the group has ranks, in order: rank r of it gets the r-th. All
    ranks make one in the same order, and iterate alike.

    Args:
        dataloader: on the source any iterable of batches, a `torch.utils.data.DataLoader` say, made for one process;
            None on all other ranks. A batch is any nest of containers, as `tundish.tree.flatten` takes.
        src: the source's rank within the group.
        group: a process group or a `DeviceMesh` of one dimension (None: all ranks).
        replicate: a process group or a mesh dimension whose ranks get the same batch; see `scatter_batch`.
        device: to which the tensors go (None: they are in host memory).
        skip_batches: how many rounds the first pass leaves out, each as many batches as the group has ranks.
        prefetch: how many rounds are read and sent ahead, in the background. With 0 the loader is read on the caller's
            thread, round by round, as what belongs to one thread wants it: a cursor of sqlite, say.
        prefetch_bytes: how many bytes the batches of such rounds may have on each rank (None: an eighth of its
            memory, for all ranks of a node together). One round may have more.
        tail: what becomes of the last batches where they are fewer than the ranks: nobody gets them (`"drop"`), the
            other ranks get one of the round before once more, and `is_padding` says so (`"pad"`), or they get None
            (`"short"`). Where there is no round before, or a loader with a state of its own goes on after it, it is
            one of the last batches themselves.
        progress: whether batches that are left out are counted on standard error (None: on a terminal).

    Without `torch.distributed` it does the same in one process.

    Raises on all ranks:
        InvalidInputError, InvalidTypeError: an argument that cannot be used, also a loader that reads only a part of
            the data, being one rank's.
        PeerFailedError: it is another rank's.
        VoteTimeoutError: a rank did not come.

    Iterating raises what `scatter_batch` raises, and also:
        PeerStoppedError: another rank left the loop before its end, and this one asked for more.
        InvalidInputError: the loader is closed, another process's or has too few batches; an iterator is not its last.
        StateMismatchError: this rank loaded a state, and the source did not.

    What the loader raises is raised in its own round, on the source as it is and on the others as a `PeerFailedError`
    with its traceback.

        >>> import torch
        >>> import tundish as td
        >>> loader = td.DispatchLoader(torch.arange(6).split(2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 5]]
        >>> loader.close()
    """

    _is_closed = True

    def __init__(
        self,
        dataloader: Iterable[T_co] | None,
        *,
        src: int = 0,
        group: Any = None,
        replicate: Any = None,
        device: Any = None,
        skip_batches: int = 0,
        prefetch: int = 1,
        prefetch_bytes: int | None = None,
        tail: Tail = "drop",
        progress: bool | None = None,
    ) -> None:
        self._process = os.getpid()
        self._rounds: Rounds | None = None
        self._pass: Pass | None = None
        self._passage: weakref.ref[EpochIterator[T_co]] | None = None
        self._passes = 0
        self._reading_seconds = self._next_seconds = 0.0
        self._handed_out = 0
        self._loader = dataloader
        self._tail = tail
        self._progress = progress
        self.is_padding = False
        """Whether the batch that was handed out last was there before (`tail="pad"`)."""
        what = "making a DispatchLoader"
        job = group_info(None)
        with taking_part(group_of(group), src, group_of(replicate, "replicate")) as joined:
            voter, place, timeout = joined
            self._is_source = place.rank == place.source
            error = None
            try:
                # Alone, a part of the data is all that there is to it.
                is_whole_job = len(place.ranks) == len(job.ranks) > 1
                self._check(dataloader, tail, is_whole_job=is_whole_job)
                with ProgressLine("dispatch", progress):
                    pass
                self._device = device_of(device)
                self._prefetch = as_count(prefetch, "prefetch")
                self._prefetch_bytes = (
                    limit_of(local_world_size())
                    if prefetch_bytes is None
                    else as_count(prefetch_bytes, "prefetch_bytes")
                )
                self._standing = Standing(as_count(skip_batches, "skip_batches") * place.batches)
                length = length_of(dataloader) if self._is_source else None
            except Exception as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            # A source that may have more ahead than its receivers would wait for these, and not without end.
            same = f"tail={tail!r}, prefetch={prefetch!r} and prefetch_bytes={prefetch_bytes!r}"
            voter.vote(error, what=what, same=same, timeout=timeout)
            told = json.dumps((length, secrets.token_hex(16))) if self._is_source else None
            heard = voter.broadcast(told, source=place.source, what=what, timeout=timeout)
            self._length, name = json.loads(heard)
            self._scatterer = ScatterSession(voter, place, timeout=timeout, in_loop=True)
        self._timeout = timeout.total_seconds()
        # While its loader is read every source watches; behind the end of the data all ranks may.
        watchers = len(job.ranks) // len(place.ranks) if self._is_source else len(job.ranks)
        self._stops = None if job.store is None else Stops(job.store, name, place.rank, watchers=watchers)
        self._is_closed = False
        _open.add(self)

    def __iter__(self) -> Iterator[T_co]:
        """Collective: a pass through what is left of the epoch, and from then on through whole ones."""
        if self._is_closed:
            raise InvalidInputError("this DispatchLoader is closed")
        if os.getpid() != self._process:
            raise InvalidInputError(FORKED)
        before, number = self._rounds, self._passes + 1
        made, rounds, begin = self._sending(number) if self._is_source else self._receiving(number)
        has_entered = False
        # From here on this rank is in the pass, and leaves it where it gets no further: the others may be in it.
        try:
            self._passes, self._rounds = number, rounds
            self._settle(before)
            self._pass = made
            self._scatterer.skip_to(number << _ROUND_BITS)
            has_entered = True
            begin()
            rounds.start()
            passage: EpochIterator[T_co] = EpochIterator(functools.partial(self._take, made, rounds), rounds)
            self._passage = weakref.ref(passage)
        except BaseException:
            leave = rounds.leave
            if not has_entered:
                leave = functools.partial(_enter_and_leave, self._scatterer, number, rounds)
            if before is None:
                leave()
            else:
                # What comes until then is of that one.
                before.then(leave)
            raise
        return passage

    def __len__(self) -> int:
        """Rounds of a whole epoch. Raises `InvalidTypeError` where the source's loader does not know its length."""
        batches = length_of(self._loader) if self._is_source else self._length
        if batches is None:
            raise InvalidTypeError("nobody knows how many batches the source's loader has: it has no len()")
        return self._rounds_in(batches)

    def _rounds_in(self, batches: int) -> int:
        return rounds_of(max(0, batches), self._scatterer.place.batches, self._tail)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next pass goes through.

        Counted on when one is through, or when a pass begins after all rounds that it is known to have were handed out.
        """
        return self._standing.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to `epoch`: call it on every rank before iterating, as with torch's `DistributedSampler`.

        On the source the loader, its dataset, its sampler and its batch sampler are told, as far as they have a
        `set_epoch`. Another epoch starts at its first batch; the one that the loader is at already goes on where it is,
        so that a loop may call this right after `load_state_dict`. A pass that is under way is left: its iterator
        raises `InvalidInputError` where it is asked for more.

        Raises `InvalidTypeError` and `InvalidInputError` for what is no number of an epoch, and on the source what a
        `set_epoch` raises.
        """
        epoch = as_count(epoch, "epoch")
        self._leave("set_epoch was called since")
        self._standing.set_epoch(epoch)
        if self._is_source:
            tell_epoch(self._loader, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: after the last round that was handed out, in batches of the source's loader.

        Where that has a `state_dict` of its own the source's has it too, as of that round. Any rank's will do for all,
        on any number of ranks; only the source's has the loader's own.
        """
        return self._standing.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, from the next pass on: call it on every rank, with the state of any.

        The source's loader goes on from its own state where the state has one; else it leaves out the batches that
        were handed out. Where a batch sampler makes them, those are not even read. A pass that is under way is left, as
        by `set_epoch`.

        Raises:
            StateMismatchError: it is no such state, or damaged; nothing changes.
        """
        self._standing.load_state_dict(state)
        self._leave("load_state_dict was called since")
        if self._is_source and self._standing.told_epoch is not None:
            tell_epoch(self._loader, self._standing.told_epoch)

    def stats(self) -> LoaderStats:
        """Bytes, batches, memory and times of this rank so far.

        What `tundish.scatter.stats` gives of each scatter, where `rounds` are those that were handed out; and
        `reading_seconds`, on the source, in its loader; `next_seconds` that the loop waited for its batches;
        `ready_rounds` that are here and were not handed out, and `ready_bytes` of their batches, on the source counted
        only where more than one may be ready.
        """
        rounds, bytes_ready = (0, 0) if self._rounds is None else self._rounds.stock
        reading = self._pass.reading_seconds if self._pass is not None else 0.0
        return LoaderStats(
            **{**self._scatterer.stats(), "rounds": self._handed_out},  # type: ignore[typeddict-item]
            reading_seconds=self._reading_seconds + reading,
            next_seconds=self._next_seconds,
            ready_rounds=rounds,
            ready_bytes=bytes_ready,
        )

    def close(self) -> None:
        """Leave a pass that is under way, and let go of threads and memory; not collective.

        Batches stay. Others that go on with their loop get a `PeerStoppedError`, or, where they begin another, a
        `PeerFailedError`.
        """
        self._release(_FAREWELL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._release(0.0)

    def __reduce__(self) -> NoReturn:
        # With a copy, as `copy.copy` makes one, would go what this one has.
        raise NotPicklableError("a DispatchLoader cannot be copied or pickled: every process makes its own")

    @property
    def dataset(self) -> NoReturn:
        """There is none: whoever asks for it makes a loader of his own over it, which gives each rank a part."""
        raise NoDatasetError(
            "a DispatchLoader has no dataset to make another loader over: it gives each rank its own batches already. "
            "Do not give it to accelerator.prepare_data_loader or skip_first_batches: iterate over it as it is, and "
            "leave batches out with skip_batches= or load_state_dict"
        )

    def _check(self, dataloader: Any, tail: Any, *, is_whole_job: bool) -> None:
        if tail not in _TAILS:
            raise InvalidInputError(f"tail is {tail!r}: give one of {', '.join(map(repr, _TAILS))}")
        if not self._is_source:
            if dataloader is not None:
                raise InvalidInputError("only the source has a loader: pass None on all other ranks")
            return
        if not isinstance(dataloader, Iterable):
            raise InvalidTypeError(
                f"the source's loader is {dataloader!r}: give an iterable of batches, a DataLoader say. Each group has "
                "a source of its own; ranks that are to get what those of another group get are named by replicate="
            )
        # One reader a node may well read one part of the data.
        if is_whole_job:
            refuse_sharded(dataloader)

    def _read(self, skip: int, state: Any, be_alive: Callable[[], None]) -> BatchReader:
        with ProgressLine("dispatch", self._progress) as line:

            def show(done: int, of: int) -> None:
                line.update("leaving out batches", done, of)
                be_alive()

            place = self._scatterer.place
            return BatchReader(
                () if self._loader is None else self._loader,
                width=place.batches,
                tail=self._tail,
                kept=place.batch(place.rank),
                skip=skip,
                state=state,
                show=show,
            )

    def _sending(self, number: int) -> tuple[Pass, Rounds, Callable[[], object]]:
        """A pass on the source, its rounds, and what begins it."""
        standing, scatterer = self._standing, self._scatterer
        counts_bytes = self._prefetch > 1 and scatterer.place.batches == 1
        sending = SourcePass(
            scatterer, self._stops, number, self._device, tail=self._tail, counts_bytes=counts_bytes
        )
        rounds: Rounds = Inline(sending)
        if self._prefetch > 0:
            rounds = Ahead(sending, most=self._prefetch, most_bytes=self._prefetch_bytes)

        def begin() -> None:
            skip, state = standing.begin()
            sending.begin(
                lambda: Start(standing.epoch, skip, length_of(self._loader)),
                functools.partial(self._read, skip, state),
            )

        return sending, rounds, begin

    def _receiving(self, number: int) -> tuple[Pass, Rounds, Callable[[], object]]:
        """As `_sending`, on a receiver."""
        if self._stops is None:
            raise InvalidInputError("torch.distributed was taken down since this loader was made")
        receiving = ReceiverPass(self._scatterer, self._stops, number, self._device)
        rounds = Ahead(
            receiving,
            most=self._prefetch + _MORE_ROUNDS,
            most_bytes=self._prefetch_bytes,
            patience=(self._timeout, f"the source, rank {self._scatterer.place.source},"),
        )
        return receiving, rounds, self._standing.begin

    def _settle(self, before: Rounds | None) -> None:
        """Have the pass before end, where one is under way."""
        self._leave("another one was begun since, and a DispatchLoader has one at a time")
        if before is not None and not before.join(self._timeout):
            raise TimedOutError(
                f"the loop before was left, and another rank is still in it after {self._timeout:.4g} s"
            )
        if self._pass is not None:
            self._reading_seconds += self._pass.reading_seconds
            self._pass = None

    def _leave(self, why: str) -> None:
        passage = None if self._passage is None else self._passage()
        if passage is not None:
            passage.close(why)

    def _take(self, source: Pass, rounds: Rounds, check: Callable[[], None]) -> tuple[Any] | None:
        """The batch of the next round, on the caller's thread; None at the end.

        `check` raises where the pass was left meanwhile: by a signal's handler, say.
        """
        begin = time.monotonic()
        try:
            found = rounds.take()
        finally:
            self._next_seconds += time.monotonic() - begin
        check()
        standing, start = self._standing, source.start
        if start is not None and not self._is_source:
            if standing.loaded not in (None, (start.epoch, start.done)):
                raise StateMismatchError(
                    f"this rank loaded a state of epoch {standing.epoch} after {standing.done} batches, and the source "
                    f"begins with epoch {start.epoch} after {start.done}: load the state on the source too"
                )
            standing.epoch, self._length = start.epoch, start.length
        if found is None:
            standing.end()
        else:
            # Before it counts as handed out: bringing it to a device may fail.
            batch = None if found.batch is None else found.batch()
            length = None if start is None else start.length
            standing.go_on(
                found.done,
                found.state,
                is_last=length is not None and not self._rounds_in(length - found.done),
            )
            self._handed_out += 1
            self.is_padding = found.is_padding
            return (batch,)
        return None

    def _release(self, seconds: float) -> None:
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._leave("the DispatchLoader was closed")
        rounds = self._rounds
        if rounds is None:
            self._scatterer.close()
            return
        # An interpreter that ends waits for these too.
        _leaving.add(rounds)
        try:
            if seconds:
                rounds.join(seconds)
        finally:
            rounds.then(functools.partial(_let_go, rounds, self._scatterer))


_open: weakref.WeakSet[DispatchLoader[Any]] = weakref.WeakSet()
# Of loaders that are closed, what is not over yet.
_leaving: set[Rounds] = set()


def _enter_and_leave(scatterer: ScatterSession, number: int, rounds: Rounds) -> None:
    """Leave a pass that the others may be in before anything of it was read or sent here."""
    scatterer.skip_to(number << _ROUND_BITS)
    rounds.leave()


def _let_go(rounds: Rounds, scatterer: ScatterSession) -> None:
    _leaving.discard(rounds)
    scatterer.close()


@atexit.register
def _close_all() -> None:
    # Threads that are in compiled code when the interpreter ends would come back to one that is gone.
    for loader in list(_open):
        loader.close()
    for rounds in list(_leaving):
        rounds.join(_FAREWELL_SECONDS)
    wait_for_telling(_FAREWELL_SECONDS)
