"""`DispatchLoader`: a data loader that reads on one rank and hands every rank its own batches.

Invariants:
- All ranks go through the same steps: an error or early exit of one rank ends the iteration for all.
- A state is that of the last step that was handed out. Prefetched steps do not count.
- A state is loaded whole or refused whole.
- An iteration begins when the one before is over on this rank.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import operator
import os
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, NoReturn, Self, TypeVar

from tundish.distributed import group_info, local_world_size, same_arguments
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    LoaderHasNoDatasetError,
    NotPicklableError,
    StateMismatchError,
    TimedOutError,
    format_count,
)
from tundish.progress import ProgressLine
from tundish.saved_states import check_state
from tundish.scatter.batch_bytes import resolve_device
from tundish.scatter.batch_reader import (
    Tail,
    length_of,
    refuse_begun,
    refuse_sharded,
    set_epoch,
    step_count,
)
from tundish.scatter.iteration import EarlyExits, Epoch, EpochReceiver, EpochSource, LoaderStep
from tundish.scatter.participants import agree_on_participants, process_group
from tundish.scatter.prefetch import FORKED, EpochIterator, InlineSteps, PrefetchedSteps
from tundish.scatter.rendezvous import memory_limit
from tundish.scatter.steps import ScatterReceiver, ScatterSource, ScatterStats

_log = logging.getLogger("tundish.scatter")

T_co = TypeVar("T_co", covariant=True)

_TAILS = ("drop", "pad", "short")
# The number of a step has so many bits; the bits above hold the number of its iteration.
_STEP_BITS = 32
# Steps that a receiver prefetches beyond `prefetch`, so that it hears early of the end of the iteration.
_EXTRA_STEPS = 2
_JOIN_SECONDS = 1.0
# The kind and the version of a state, and its counts.
_KIND, _VERSION = "DispatchLoader", 1
_COUNTED = ("epoch", "batches")


class LoaderState:
    """The progress of a `DispatchLoader` on one rank, and the state to resume from.

    Batches are counted as the source's loader gives them, so a state holds for any number of ranks.

    Args:
        skip: how many batches the first iteration skips.

    Attributes:
        epoch: the epoch of the iteration under way, or of the next one.
        batches: how many batches of that epoch were handed out or skipped, over all ranks.
        loader_state: the state of the source's loader after them; None on other ranks and where it has none.
        requested_epoch: the last argument of `set_epoch`; None before its first call.
        loaded: epoch and batches of a state that was loaded, until a step after it is handed out.
    """

    def __init__(self, skip: int) -> None:
        self.epoch = 0
        self.batches = skip
        self.loader_state: Any = None
        self.requested_epoch: int | None = None
        self.loaded: tuple[int, int] | None = None
        self._skip = skip
        # Whether the last step of the epoch was handed out, though the end was not asked for.
        self._is_complete = False

    def begin(self) -> tuple[int, Any]:
        """Begin an iteration. Returns how many batches it skips, and the loader's state after them."""
        if self._is_complete:
            self.end()
        skip, state = self._skip, None
        if self.loaded is not None:
            skip, state = self.batches, self.loader_state
        self.batches, self.loader_state = skip, state
        return skip, state

    def advance(self, batches: int, state: Any, *, is_last: bool) -> None:
        """Count a step that was handed out. `is_last`: whether it is known to be the last of its epoch."""
        self.batches, self.loader_state, self._is_complete = batches, state, is_last
        self._skip, self.loaded = 0, None

    def end(self) -> None:
        """The epoch is complete."""
        self._skip = 0
        self._move_to(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`, unless that is the epoch under way."""
        self.requested_epoch, self._is_complete = epoch, False
        if epoch != self.epoch:
            self._move_to(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state, of plain values."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "requested_epoch": self.requested_epoch,
            "loader": self.loader_state,
        }

    def load_state_dict(self, state: Any) -> None:
        """Take over a state. Raises `StateMismatchError`, and changes nothing, where it is damaged."""
        check_state(state, _KIND, _VERSION, (*_COUNTED, "requested_epoch", "loader"))
        requested = state["requested_epoch"]
        try:
            epoch, batches = (as_count(state[name], name) for name in _COUNTED)
            if requested is not None:
                requested = as_count(requested, "requested_epoch")
        except (InvalidInputError, InvalidTypeError) as error:
            raise StateMismatchError(f"the loader's state was edited: {error}") from None
        self.epoch, self.batches, self.requested_epoch = epoch, batches, requested
        self.loader_state = state["loader"]
        self.loaded = epoch, batches
        self._skip, self._is_complete = 0, False

    def _move_to(self, epoch: int) -> None:
        self.epoch, self.batches, self.loader_state, self.loaded = epoch, self._skip, None, None
        self._is_complete = False


def as_count(value: Any, name: str) -> int:
    """A whole number of at least 0. Raises `InvalidTypeError` and `InvalidInputError` for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(f"{name} is {value!r}: give a whole number") from None
    if not 0 <= number < 2**63:
        raise InvalidInputError(f"{name} is {number}: give a whole number from 0 on")
    return number


class LoaderStats(ScatterStats):
    """Counts of a loader on this rank; its `steps` are those that were handed out."""

    reading_seconds: float
    """On the source: seconds spent in its loader."""
    next_seconds: float
    """Seconds that the loop waited for its batches."""
    ready_steps: int
    """Steps that are prefetched."""
    ready_bytes: int
    """Bytes of their batches; the source counts the largest batch of each step."""


class DispatchLoader(Generic[T_co]):
    """Reads a loader on one rank and hands every rank its own batches. Collective over `group`.

    Each step takes as many batches from the loader as the group has ranks, in order: rank r gets the r-th. All ranks
    make the loaders in the same order and iterate alike. Without `torch.distributed` it does the same in one process.

    Args:
        dataloader: on the source any iterable of batches made for one process, a `torch.utils.data.DataLoader` or
            `td.loader(..., world_size=1)` for example; None on all other ranks. A batch is any nest of containers that
            `tundish.tree.flatten` takes.
        src: the source's rank within the group.
        group: a process group or a `DeviceMesh` of one dimension (None: all ranks).
        replicate: a process group or a mesh dimension whose ranks get the same batch; see `scatter_batch`.
        device: where the tensors go (None: host memory).
        skip_batches: how many steps the first iteration skips, each of as many batches as the group has ranks.
        prefetch: how many steps are read and sent ahead, by a background thread. With 0 the loader is read on the
            caller's thread, as a cursor of sqlite requires.
        prefetch_bytes: how many bytes the prefetched batches may have on each rank (None: an eighth of the memory, for
            all ranks of a node together). One step may have more.
        tail: how the last step is completed if the batches are fewer than the ranks. `"drop"`: no rank gets them.
            `"pad"`: the other ranks get one of the last batches too, and `is_padding` is true there. `"short"`: the
            other ranks get None.
        progress: whether standard error shows how many batches are skipped (None: on a terminal).

    Attributes:
        is_padding: whether this rank's last batch only fills up the last step.
        resumes_on_any_ranks: True: one state serves every number of ranks.

    Raises:
        InvalidInputError, InvalidTypeError: an argument cannot be used, also a loader that reads only one rank's part
            of the data.
        PeerFailedError: an argument of another rank cannot be used.
        VoteTimeoutError: a rank did not make the call in time.

    Iterating raises the errors of `scatter_batch`, and also:
        PeerLeftLoopError: another rank left the loop before its end, and this rank asked for more.
        InvalidInputError: the loader is closed, belongs to another process or has too few batches; or another iterator
            was begun since.
        StateMismatchError: this rank loaded a state, and the source did not.

    An error of the source's loader is raised in its own step: on the source as it is, on the others as a
    `PeerFailedError` with its traceback.

    At the end of an epoch the source logs its steps and seconds, and for how long training waited, to the logger
    "tundish.scatter" at level INFO.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> loader = td.DispatchLoader(torch.arange(6).split(2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 5]]
        >>> loader.close()
    """

    # A state of any rank is right for every number of ranks.
    resumes_on_any_ranks = True
    # Until the constructor has succeeded.
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
        self._steps: InlineSteps | None = None
        self._iterator: weakref.ref[EpochIterator[T_co]] | None = None
        self._iterations = 0
        self._handed_out = 0
        self._reading_seconds = self._next_seconds = 0.0
        # When the iteration began, and the two counts of that moment.
        self._began = (0.0, 0, 0.0)
        self.is_padding = False
        group, replicate = process_group(group), process_group(replicate, "replicate")
        with agree_on_participants(group, src, replicate) as (voter, participants, timeout):
            is_source = participants.rank == participants.source
            job = group_info(None)
            # 1. Check this rank's arguments. The vote raises the error on all ranks.
            error, length = None, None
            try:
                self._loader = self._check_loader(
                    dataloader,
                    tail,
                    is_source=is_source,
                    is_whole_job=len(participants.ranks) == len(job.ranks),
                )
                if hasattr(self._loader, "logs_epochs"):
                    # Its lines would have the waits of the thread that reads it, and not those of training.
                    self._loader.logs_epochs = False
                self._tail: Tail = tail
                # Refused here, and not when the first batches are skipped.
                ProgressLine("dispatch", progress).close()
                self._progress = progress
                self._device = resolve_device(device)
                self._prefetch = as_count(prefetch, "prefetch")
                self._prefetch_bytes = (
                    memory_limit(local_world_size())
                    if prefetch_bytes is None
                    else as_count(prefetch_bytes, "prefetch_bytes")
                )
                skip = as_count(skip_batches, "skip_batches")
                self._state = LoaderState(skip * participants.batch_count)
                length = length_of(dataloader) if is_source else None
            except Exception as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            # 2. Compare them with those of other ranks, and learn the source's length and the loader's name.
            # Receivers would wait without end for a source that may prefetch more than they do.
            same = same_arguments(
                tail=repr(tail), prefetch=prefetch, prefetch_bytes=prefetch_bytes, skip_batches=skip_batches
            )
            text = json.dumps((length, secrets.token_hex(16))) if is_source else None
            text = voter.broadcast(
                text,
                error,
                source=participants.source,
                what="making a DispatchLoader",
                same=same,
                timeout=timeout,
            )
            self._length, name = json.loads(text)
            # 3. Connect the ranks.
            kind = ScatterSource if is_source else ScatterReceiver
            self._scatter = kind(voter, participants, timeout=timeout, in_loop=True)
        self._timeout = timeout.total_seconds()
        self._early_exits = None if job.store is None else EarlyExits(job.store, name, participants.rank)
        self._is_closed = False
        _open_loaders.add(self)

    def __iter__(self) -> Iterator[T_co]:
        """Iterate over the rest of the epoch, or over a whole one after the first iteration. Collective."""
        self._raise_if_closed()
        if os.getpid() != self._process:
            raise InvalidInputError(FORKED)
        try:
            self._end_iteration()
            self._iterations += 1
            self._began = (time.monotonic(), self._handed_out, self._next_seconds)
            self._scatter.skip_to(self._iterations << _STEP_BITS)
            steps = self._steps = self._begin_epoch(self._iterations)
            iterator = EpochIterator[T_co](steps, functools.partial(self._hand_out, steps.epoch))
            self._iterator = weakref.ref(iterator)
            return iterator
        except Exception:
            raise
        except BaseException:
            # Other ranks may be in the iteration.
            self.close()
            raise

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch.

        Raises:
            InvalidTypeError: the source's loader has no length.
        """
        batches = length_of(self._loader) if self._scatter.is_source else self._length
        if batches is None:
            raise InvalidTypeError("the number of batches is not known: the source's loader has no len()")
        return self._step_count(batches)

    @property
    def epoch(self) -> int:
        """The epoch under way, or that of the next iteration.

        It advances at the end of an iteration, or when an iteration begins after all steps of the one before were
        handed out.
        """
        return self._state.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: call it on every rank before iterating, as with torch's `DistributedSampler`.

        On the source it calls `set_epoch` of the loader, its dataset, its sampler and its batch sampler, if they have
        one. Another epoch starts at its first batch. The epoch under way keeps its position, so a loop may call this
        right after `load_state_dict`. It ends an iteration that is under way: its iterator raises `InvalidInputError`.

        Args:
            epoch: the number of the epoch, from 0 on.

        Raises:
            InvalidInputError, InvalidTypeError: `epoch` is not a number from 0 on.
            Exception: an error of the loader's `set_epoch`, on the source.

        Example:
            >>> import tundish as td
            >>> with td.DispatchLoader([1, 2]) as loader:
            ...     loader.set_epoch(3)
            ...     loader.epoch
            3
        """
        epoch = as_count(epoch, "epoch")
        self._leave_loop("set_epoch was called since")
        self._state.set_epoch(epoch)
        if self._scatter.is_source:
            set_epoch(self._loader, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step that was handed out.

        Returns:
            A dict of plain values, which count batches of the source's loader. The state of any rank resumes all ranks,
            on any number of ranks. If the source's loader has a `state_dict`, the source's state holds that too.

        Example:
            >>> import tundish as td
            >>> with td.DispatchLoader([1, 2, 3]) as loader:
            ...     batch = next(iter(loader))
            ...     loader.state_dict()["batches"]
            1
        """
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state with the next iteration: call it on every rank, with the state of any.

        If `state` holds a state of the source's loader, the loader resumes from it. Else the batches that were handed
        out are skipped; if a batch sampler makes them, they are not even read. It ends an iteration that is under way,
        as `set_epoch` does.

        Args:
            state: as `state_dict` returned it on any rank.

        Raises:
            StateMismatchError: it is not the state of a loader, or damaged; nothing changes.

        Example:
            >>> import tundish as td
            >>> with td.DispatchLoader([1, 2, 3]) as loader:
            ...     batch = next(iter(loader))
            ...     loader.load_state_dict(loader.state_dict())
            ...     list(loader)
            [2, 3]
        """
        self._state.load_state_dict(state)
        self._leave_loop("load_state_dict was called since")
        if self._scatter.is_source and self._state.requested_epoch is not None:
            set_epoch(self._loader, self._state.requested_epoch)

    def stats(self) -> LoaderStats:
        """Return counts of this rank so far; not collective.

        Returns:
            Steps, batches, bytes and seconds; see `LoaderStats`.

        Example:
            >>> import tundish as td
            >>> with td.DispatchLoader([1, 2, 3]) as loader:
            ...     batches = list(loader)
            ...     loader.stats()["steps"]
            3
        """
        steps, ready_bytes = (0, 0) if self._steps is None else self._steps.ready
        reading = 0.0 if self._steps is None else self._steps.epoch.reading_seconds
        return LoaderStats(
            **{**self._scatter.stats(), "steps": self._handed_out},  # type: ignore[typeddict-item]
            reading_seconds=self._reading_seconds + reading,
            next_seconds=self._next_seconds,
            ready_steps=steps,
            ready_bytes=ready_bytes,
        )

    def close(self) -> None:
        """End an iteration that is under way, and free threads and memory; not collective.

        Batches stay valid. Ranks that go on with their loop get a `PeerLeftLoopError`, or a `PeerFailedError` if they
        begin another.

        Example:
            >>> import tundish as td
            >>> loader = td.DispatchLoader([1, 2])
            >>> loader.close()
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        try:
            self._leave_loop("the DispatchLoader was closed")
            if self._steps is not None:
                self._steps.join(_JOIN_SECONDS)
        finally:
            self._scatter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        if self._steps is None:
            self._scatter.close()
        else:
            # Not through the iterator, which may be garbage as well. The thread tells the other ranks before it closes.
            self._steps.leave()
            scatter = self._scatter
            self._steps.over.add_done_callback(lambda _: scatter.close())

    def __repr__(self) -> str:
        if self._is_closed:
            return "DispatchLoader(closed)"
        participants = self._scatter.participants
        data = type(self._loader).__name__ if self._scatter.is_source else f"from rank {participants.source}"
        ranks = format_count(len(participants.ranks), "rank")
        return f"DispatchLoader({data}, {ranks}, epoch={self._state.epoch}, tail={self._tail!r})"

    def __reduce__(self) -> NoReturn:
        # `copy.copy` would close the original's channels with the copy.
        raise NotPicklableError("a DispatchLoader cannot be copied or pickled: every process makes its own")

    @property
    def dataset(self) -> NoReturn:
        """Raise `AttributeError`: another loader over the dataset would give each rank only a part of it."""
        raise LoaderHasNoDatasetError(
            "a DispatchLoader has no dataset to make another loader over: it gives each rank its own batches already. "
            "Do not give it to accelerator.prepare_data_loader or skip_first_batches: iterate over it as it is, and "
            "leave batches out with skip_batches= or load_state_dict"
        )

    @staticmethod
    def _check_loader(dataloader: Any, tail: Any, *, is_source: bool, is_whole_job: bool) -> Any:
        if tail not in _TAILS:
            raise InvalidInputError(f"tail is {tail!r}: give one of {', '.join(map(repr, _TAILS))}")
        if not is_source:
            if dataloader is not None:
                raise InvalidInputError("only the source has a loader: pass None on all other ranks")
            return None
        # Iterating over these gives keys, letters and numbers.
        if not isinstance(dataloader, Iterable) or isinstance(dataloader, Mapping | str | bytes):
            raise InvalidTypeError(
                f"the source's loader is {dataloader!r:.100}: give an iterable of batches, for example a DataLoader. "
                "Each group has its own source; name ranks that get the same batches as those of another group by "
                "replicate="
            )
        # A source of each node may read a part of the data.
        if is_whole_job:
            refuse_sharded(dataloader)
        refuse_begun(dataloader)
        return dataloader

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidInputError("this DispatchLoader is closed: make a new one on all ranks")

    def _step_count(self, batches: int) -> int:
        return step_count(max(0, batches), self._scatter.participants.batch_count, self._tail)

    def _begin_epoch(self, iteration: int) -> InlineSteps:
        """The steps of a new iteration."""
        scatter, early_exits, state = self._scatter, self._early_exits, self._state
        if isinstance(scatter, ScatterReceiver):
            if early_exits is None:
                raise InvalidInputError(
                    "torch.distributed was shut down after this loader was made: make a new one after "
                    "init_process_group"
                )
            epoch: Epoch = EpochReceiver(scatter, early_exits, iteration, self._device)
            state.begin()
            max_steps, timeout = self._prefetch + _EXTRA_STEPS, self._timeout
        else:
            source = EpochSource(
                scatter,
                early_exits,
                iteration,
                self._device,
                loader=self._loader,
                tail=self._tail,
                progress=self._progress,
                # At least one step may be ready, whatever its size.
                counts_bytes=self._prefetch > 1,
            )
            skip, loader_state = state.begin()
            source.begin(state.epoch, skip, loader_state)
            if not self._prefetch:
                return InlineSteps(source)
            epoch, max_steps, timeout = source, self._prefetch, None
        return PrefetchedSteps(epoch, max_steps=max_steps, max_bytes=self._prefetch_bytes, timeout=timeout)

    def _end_iteration(self) -> None:
        """Leave the iteration before, where one is under way, and wait until it is over on this rank."""
        self._leave_loop("another one was begun since, and a DispatchLoader has one at a time")
        if self._steps is None:
            return
        if not self._steps.join(self._timeout):
            raise TimedOutError(
                f"the loop before was left, but another rank is still in it after {self._timeout:.4g} s: leave a loop "
                "on all ranks in the same step"
            )
        self._reading_seconds += self._steps.epoch.reading_seconds
        self._steps = None

    def _leave_loop(self, why: str) -> None:
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.close(why)

    def _hand_out(self, epoch: Epoch, step: LoaderStep | None, waited: float) -> T_co:
        """The batch of a step; called with None at the end."""
        self._next_seconds += waited
        state, start = self._state, epoch.start
        if start is not None and not self._scatter.is_source:
            if state.loaded not in (None, (start.epoch, start.skipped)):
                raise StateMismatchError(
                    f"this rank loaded a state of epoch {state.epoch} after {state.batches} batches, and the source "
                    f"begins with epoch {start.epoch} after {start.skipped}: load the state on the source too"
                )
            state.epoch, self._length = start.epoch, start.length
        if step is None:
            if self._scatter.is_source:
                self._log_epoch()
            state.end()
            return None  # type: ignore[return-value]
        # First, because the copy to a device may fail: then the step was not handed out.
        batch: T_co = step.make()
        length = None if start is None else start.length
        is_last = length is not None and not self._step_count(length - step.drawn)
        state.advance(step.drawn, step.state, is_last=is_last)
        self._handed_out += 1
        self.is_padding = step.is_padding
        return batch

    def _log_epoch(self) -> None:
        """Log the iteration that ends."""
        time_began, steps, waited = self._began
        _log.info(
            "epoch %d is over: %s in %.1f s, of which training waited %.1f s for its batches",
            self._state.epoch,
            format_count(self._handed_out - steps, "step"),
            time.monotonic() - time_began,
            self._next_seconds - waited,
        )


_open_loaders: weakref.WeakSet[DispatchLoader[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Otherwise a thread in compiled code would return into an interpreter that has ended.
    for loader in list(_open_loaders):
        loader.close()
