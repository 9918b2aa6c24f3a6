"""The steps of a scatter: `ScatterSource` sends each rank its batch, `ScatterReceiver` receives it.

Invariants:
- Every call is the next step on its rank, also after a failed one. All messages carry their step.
- All batches of a step are flattened before any is sent, so that a bad one is refused in time.
- A lost rank ends the scatter on all ranks, with an error that names it. A source that fails tells all ranks that have
  no batch of the step yet, before it raises. One that is interrupted tells all ranks, and closes the scatter.
- One thread at a time calls a scatter. It may be a background thread, as no step is a collective of the job's groups.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from tundish.distributed import Voter
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    OutOfMemoryError,
    PeerFailedError,
    StorageError,
    TimedOutError,
    format_count,
    format_type,
)
from tundish.scatter.batch_bytes import IncomingBatch, OutgoingBatch, copy_threads, unflatten_to_device
from tundish.scatter.participants import Participants
from tundish.scatter.rendezvous import Channels, connect
from tundish.scatter.transport.device import DeviceSender
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender
from tundish.scatter.transport.message import (
    DEVICE,
    GONE,
    ChannelBrokenError,
    Content,
    IncomingMessage,
    MessageKind,
    Sender,
    Text,
)
from tundish.scatter.transport.shared_memory import NodeSender
from tundish.tree import flatten_with_addresses

# The advice of errors once a scatter is closed.
MAKE_NEW: Final = "make a new group, or a new DispatchLoader, on all ranks"

# How often a rank that waits looks for ranks that are gone.
_POLL_SECONDS = 0.1
# How much longer receivers wait than the source, so that they hear which rank it waited for.
_GRACE_SECONDS = 1.0
# How long messages may be on their way after a rank of another node was killed, or after it left.
_AFTER_DEATH_SECONDS = 0.5
_AFTER_LEAVING_SECONDS = 5.0

# How long a source that was interrupted or timed out waits until ranks of other nodes have the reason.
_REPORT_SECONDS = 0.5
_LONGEST_TEXT = 16_000


class ScatterStats(TypedDict):
    """Counts of one scatter on this rank."""

    source: int
    """The global rank of the source."""
    ranks: int
    """Ranks that take part."""
    shared_memory_ranks: int
    """Ranks that this rank exchanges batches with through shared memory."""
    gloo_ranks: int
    """The same over gloo."""
    device_ranks: int
    """The same from device to device."""
    steps: int
    """Calls so far."""
    batches: int
    """Batches sent or received."""
    sent_bytes: int
    """Bytes of the batches sent."""
    waiting_seconds: float
    """Seconds spent waiting for other ranks."""
    in_use_bytes: int
    """The source's shared memory with batches on their way."""
    cached_bytes: int
    """The source's shared memory that is kept for the next batches."""
    escaped_bytes: int
    """The source's shared memory with batches that receivers hold."""


class ScatterRank:
    """One rank's part in a scatter. Collective over the members of `voter`.

    Args:
        voter: of all participants.
        participants: the ranks, and which batch each of them gets.
        timeout: how long this rank waits for another one in a step.
        in_loop: whether the steps are those of a `DispatchLoader`. An error of the source then goes to all ranks, also
            to those that have their batch of the step. A receiver waits without a timeout, because its thread runs
            ahead of the caller.
        device_backend: the kind of device and the backend for batches that go from device to device; then only the
            caller's thread may call.
    """

    def __init__(
        self,
        voter: Voter,
        participants: Participants,
        *,
        timeout: timedelta,
        in_loop: bool = False,
        device_backend: tuple[str, str] | None = None,
    ) -> None:
        self.participants = participants
        self._timeout = timeout.total_seconds()
        self._in_loop = in_loop
        self._process = os.getpid()
        self._step = 0
        self._end_error: PeerFailedError | None = None
        self._is_closed = False
        self._batches = 0
        self._waited = 0.0
        self._channels: Channels | None = None
        if len(participants.ranks) > 1:
            self._channels = connect(
                voter,
                participants,
                timeout=timeout,
                device_backend=device_backend,
            )

    @property
    def is_source(self) -> bool:
        """Whether this rank has the data."""
        return self.participants.rank == self.participants.source

    @property
    def end_error(self) -> PeerFailedError | None:
        """The error that ended the scatter; None as long as steps may follow."""
        return self._end_error

    def skip_to(self, step: int) -> None:
        """Make `step` the next one, unless it is over. Messages of earlier steps are skipped."""
        self._step = max(self._step, step - 1)

    def end(self, why: str) -> None:
        """End the scatter because of this rank. The others notice that it leaves."""
        if self._end_error is None:
            self._end_because_of(self.participants.rank, why)
            if self._channels is not None:
                self._channels.watch.close()

    def close(self) -> None:
        """Close all channels; not collective. The others notice that this rank leaves."""
        self._is_closed = True
        if self._channels is not None:
            self._channels.close()

    def stats(self) -> ScatterStats:
        """See `tundish.scatter.stats`."""
        ends: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        channels = self._channels
        if channels is not None:
            for sender in channels.senders:
                ends[sender.name] += len(sender.ranks)
            if channels.receiver is not None:
                ends[channels.receiver.name] += 1
            memory = channels.to_node.memory()
        over_devices = channels is not None and channels.device is not None
        between_nodes = ends[GlooSender.name]
        return ScatterStats(
            source=self.participants.source,
            ranks=len(self.participants.ranks),
            shared_memory_ranks=ends[NodeSender.name],
            gloo_ranks=0 if over_devices else between_nodes,
            device_ranks=between_nodes if over_devices else 0,
            steps=self._step,
            batches=self._batches,
            sent_bytes=0 if channels is None else sum(sender.sent_bytes for sender in channels.senders),
            waiting_seconds=self._waited,
            in_use_bytes=memory["in_use_bytes"],
            cached_bytes=memory["cached_bytes"],
            escaped_bytes=memory["escaped_bytes"],
        )

    def _begin_step(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this scatter was made before a fork: make one in the process that uses it"
            )
        self._raise_if_closed()
        self._step += 1

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"this scatter is closed: {MAKE_NEW}")

    def _raise_if_ended(self) -> None:
        """Raise where a rank on the other end of a channel is gone."""
        if self._end_error is not None:
            raise self._end_error.with_traceback(None)
        if self._channels is not None:
            # A sender may be through with all that it has for this rank.
            for rank in self._channels.watch.vanished() - {self._channels.sender_rank}:
                raise self._end_because_gone(rank)

    def _end_because_of(self, rank: int, how: str) -> PeerFailedError:
        self._end_error = PeerFailedError(f"scatter: rank {rank} {how}", rank)
        return self._end_error

    def _end_because_gone(self, rank: int) -> PeerFailedError:
        """Lose a rank that is gone, or the rank that made it leave."""
        because_of = None if self._channels is None else self._channels.watch.close_causes().get(rank)
        return self._end_because_of(rank if because_of is None else because_of, GONE)

    @contextlib.contextmanager
    def _ended_by_broken_channels(self) -> Iterator[None]:
        """A block that sends: where a channel breaks, the scatter ends."""
        try:
            yield
        except ChannelBrokenError as error:
            raise self._end_because_of(error.rank, error.how) from error.__cause__

    def _wait(
        self,
        is_ready: Callable[[float], bool],
        rank: int | Callable[[], int | None],
        *,
        seconds: float | None = None,
    ) -> None:
        """Wait for another rank.

        Args:
            is_ready: waits for so many seconds, and returns whether the event came.
            rank: the rank, or a function that returns it once it is known.
            seconds: for how long, in place of the scatter's timeout.
        """
        if is_ready(0.0):
            return
        begin = time.monotonic()
        seconds = self._timeout if seconds is None else seconds
        is_endless = self._in_loop and not self.is_source
        deadline = begin + seconds + (0.0 if self.is_source else _GRACE_SECONDS)
        try:
            while not is_ready(_POLL_SECONDS):
                self._raise_if_closed()
                name = rank() if callable(rank) else rank
                if self._channels is not None and name in self._channels.watch.vanished():
                    if is_ready(self._seconds_after(name)):
                        return
                    raise self._end_because_gone(name)
                if time.monotonic() > deadline and not is_endless:
                    raise TimedOutError(
                        f"scatter: {'another rank' if name is None else f'rank {name}'} did not come within "
                        f"{seconds:.4g} s. It hangs, was stopped, or is elsewhere in the program: look at its stack, "
                        "or give the process group a longer timeout"
                    )
        finally:
            self._waited += time.monotonic() - begin

    def _seconds_after(self, rank: int) -> float:
        """For how many seconds a message may still come of a rank that is gone."""
        channels = self._channels
        if (
            channels is None
            or rank != channels.sender_rank
            or not isinstance(channels.receiver, GlooReceiver)
        ):
            return 0.0
        return _AFTER_LEAVING_SECONDS if rank in channels.watch.close_causes() else _AFTER_DEATH_SECONDS


class ScatterSource(ScatterRank):
    """A scatter on the source. `send` as often as the receivers receive.

    Attributes:
        largest_batch: bytes of the largest batch of the last step.
    """

    largest_batch = 0

    def send(self, batches: Iterable[Any] | None, device: torch.device | None = None) -> Callable[[], Any]:
        """The next step: send every rank its batch. Returns a function that brings this rank's batch to `device`.

        It takes `batches` and raises errors as `scatter_batch` does. Without `device` the function returns the very
        object.
        """
        with self._reported_step() as waiting:
            batch_list = self._batch_list(batches)
            own = batch_list[self.participants.batch_number(self.participants.rank)]
            make = lambda: own  # noqa: E731 (the same name with a device)
            if device is not None:
                # Refused before any rank has been sent anything.
                tensors, schema, _ = flatten_with_addresses(own, f"rank {self.participants.rank}'s batch")
                make = partial(unflatten_to_device, schema, tensors, device)
            contents = self._flatten_all(batch_list)
            self.largest_batch = max(
                (content.size for content in contents.values() if isinstance(content, OutgoingBatch)),
                default=0,
            )
            self._send(contents, waiting, device)
        return make

    def send_control(self, text: str) -> None:
        """The next step: send all receivers a text."""
        with self._reported_step() as waiting:
            self._send(dict.fromkeys(waiting, Text(MessageKind.CONTROL, text)), waiting)

    def check_peers(self) -> None:
        """Between steps: if a rank was lost, tell the others and raise `PeerFailedError`."""
        if self._end_error is not None or (self._channels is not None and self._channels.watch.vanished()):
            self.send_control("")

    def fail(self, error: BaseException) -> NoReturn:
        """The next step: tell all receivers of an error, and raise it."""
        try:
            with self._reported_step():
                raise error
        finally:
            # A local variable would keep the error, and the error its frames, in a cycle.
            del error

    @contextlib.contextmanager
    def _reported_step(self) -> Iterator[set[int]]:
        """A step whose error is reported to the ranks that still wait for their batch; yields those."""
        self._begin_step()
        channels = self._channels
        waiting = set() if channels is None else set(channels.receivers)
        try:
            self._raise_if_ended()
            yield waiting
        except BaseException as error:
            self._report_error(error, waiting)
            raise

    def _batch_list(self, batches: Iterable[Any] | None) -> list[Any]:
        count = self.participants.batch_count
        if batches is None:
            return [None] * count
        if type(batches) is not list and (
            isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable)
        ):
            raise InvalidTypeError(
                f"batches is {format_type(batches)}: give a list with one batch for each rank, {count} in all"
            )
        # One more at most: an iterable may be endless.
        batch_list = list(islice(batches, count + 1))
        if len(batch_list) != count:
            given = (
                len(batches)
                if isinstance(batches, Sized)
                else f"more than {count}"
                if len(batch_list) > count
                else len(batch_list)
            )
            raise InvalidInputError(
                f"batches has {given} entries for {format_count(count, 'rank')}: give one batch for each rank, and "
                "None for a rank that gets nothing"
            )
        return batch_list

    def _flatten_all(self, batch_list: list[Any]) -> dict[int, Content]:
        """The contents by receiver. A batch for several ranks is flattened once."""
        channels = self._channels
        if channels is None:
            return {}
        threads = copy_threads(len(channels.to_node.ranks))
        made: dict[int, Content] = {id(None): Text(MessageKind.NOTHING)}
        contents = {}
        for rank in channels.receivers:
            batch = batch_list[self.participants.batch_number(rank)]
            if id(batch) not in made:
                made[id(batch)] = OutgoingBatch(batch, rank, threads)
            contents[rank] = made[id(batch)]
        return contents

    def _send(
        self, contents: Mapping[int, Content], waiting: set[int], device: torch.device | None = None
    ) -> None:
        channels = self._channels
        if channels is None:
            return
        senders: list[Sender] = [channels.to_node]
        if channels.to_other_nodes is not None:
            # First, because it takes longer.
            senders.insert(0, channels.to_other_nodes)
            if channels.device is not None and device is not None and device.type == channels.device.kind:
                senders[0] = DeviceSender(channels.device, channels.to_other_nodes, device)
        try:
            with self._ended_by_broken_channels():
                for sender in senders:
                    sender.send(self._step, contents, waiting, self._wait)
                for sender in senders:
                    sender.finish(self._wait)
        except BaseException:
            if isinstance(senders[0], DeviceSender) and not waiting.issuperset(senders[0].ranks):
                # They would take the tensors of the next step for those of this one.
                self.end("could not send an earlier batch")
            raise
        self._batches += sum(isinstance(content, OutgoingBatch) for content in contents.values())

    def _report_error(self, error: BaseException, waiting: set[int]) -> None:
        """Tell the ranks that wait for this step why it fails, and all ranks where no step follows."""
        channels = self._channels
        is_interrupt = not isinstance(error, Exception)
        if is_interrupt and self._end_error is None:
            self._end_because_of(
                self.participants.rank,
                f"was interrupted ({type(error).__name__}) in a step, which closed the scatter: {MAKE_NEW}",
            )
        if channels is None:
            return
        is_lost = is_interrupt or error is self._end_error
        if is_lost and self._end_error is not None:
            kind, text = MessageKind.CLOSED, f"{self._end_error.rank}\n{self._end_error}"
        else:
            kind, text = MessageKind.FAILED, f"{self.participants.source}\n{_format_error(error)}"
        message = Text(kind, text)
        wait = partial(self._wait, seconds=_REPORT_SECONDS if is_interrupt else None)
        # A rank that has not made the step yet will not read this sooner.
        is_short = is_lost or isinstance(error, TimedOutError)
        gone = channels.watch.vanished()
        for sender in channels.senders:
            # A rank that has its batch of this step hears of it in the next.
            steps = {
                rank: self._step + (rank not in waiting)
                for rank in sender.ranks
                if (is_lost or self._in_loop or rank in waiting) and rank not in gone
            }
            if steps:
                untold = sender.tell(steps, message, wait, _REPORT_SECONDS if is_short else self._timeout)
                _note_untold(error, untold)
        if is_interrupt:
            channels.watch.close()


class ControlMessage(NamedTuple):
    """A text for all receivers in place of batches."""

    text: str


class ScatterReceiver(ScatterRank):
    """A scatter on a receiver. `receive` as often as the source sends."""

    def receive(self, device: torch.device | None = None) -> IncomingBatch | ControlMessage | None:
        """The next step: returns the batch or the control message that the source sent; None if this rank gets nothing.

        Args:
            device: where a batch goes that comes from device to device.

        Returns:
            The batch, the control message, or None.

        Raises:
            The errors of `scatter_batch`.
        """
        self._begin_step()
        try:
            while True:
                message = self._next_message(device)
                # A message of an earlier step belongs to one that this rank left.
                if message.header.step >= self._step:
                    break
        except PeerFailedError as error:
            if error is self._end_error:
                self._report_to_own_receivers(error)
            raise
        except Exception:
            raise
        except BaseException as error:
            self.end(
                f"was interrupted ({type(error).__name__}) in a step, which closed the scatter: {MAKE_NEW}"
            )
            raise
        header, content = message.header, message.content
        if header.step > self._step:
            why = f"skipped step {self._step} without a message"
            self.end(f"missed step {self._step}")
            raise PeerFailedError(
                f"scatter: rank {self.participants.source}, the source, {why}", self.participants.source
            )
        if isinstance(content, IncomingBatch):
            self._batches += 1
            return content
        if header.kind == MessageKind.FAILED:
            rank, _, text = content.partition("\n")
            raise PeerFailedError(f"scatter: rank {rank}, the source, {text}", int(rank))
        return ControlMessage(content) if header.kind == MessageKind.CONTROL else None

    def fail(self, error: BaseException) -> NoReturn:
        """The next step, in which this rank receives nothing: raise `error`."""
        self._begin_step()
        try:
            raise error
        finally:
            # A local variable would keep the error, and the error its frames, in a cycle.
            del error

    def _next_message(self, device: torch.device | None) -> IncomingMessage:
        """The next message, once the ranks that get it from this one have it. Raises where it ends the scatter."""
        self._raise_if_closed()
        if self._end_error is not None:
            raise self._end_error.with_traceback(None)
        channels = self._channels
        if channels is None or channels.receiver is None:
            raise RuntimeError("a receiver has no channel")
        receiver = channels.receiver
        self._wait(receiver.wait, channels.sender_rank)
        try:
            message = receiver.read()
        except (OutOfMemoryError, StorageError) as error:
            if isinstance(receiver, GlooReceiver):
                # The rest of the batch is still on its way.
                self.end(f"could not read an earlier batch: {error}")
            raise
        except RuntimeError as error:
            raise self._end_because_of(channels.sender_rank, f"is gone ({error})") from error
        if message.header.flags & DEVICE:
            message = self._from_device(channels, message, device)
        if channels.to_node.ranks:
            self._raise_if_ended()
            with self._ended_by_broken_channels():
                channels.to_node.pass_on(message, self._wait)
        if message.header.kind == MessageKind.CLOSED:
            rank, _, text = str(message.content).partition("\n")
            self._end_error = PeerFailedError(text, int(rank))
            raise self._end_error
        return message

    def _from_device(
        self, channels: Channels, message: IncomingMessage, device: torch.device | None
    ) -> IncomingMessage:
        """The message with the tensors that come from device to device."""
        if channels.device is None:
            raise RuntimeError("a batch comes from device to device, and there is no channel for it")
        try:
            if not isinstance(message.content, IncomingBatch):
                channels.device.connect(device)
                return message
            buffer = channels.device.receive(message.header.size, device)
            return message._replace(content=message.content._replace(device_buffer=buffer))
        except BaseException:
            # Its tensors would be taken for those of the next step.
            self.end("could not take an earlier batch")
            raise

    def _report_to_own_receivers(self, error: PeerFailedError) -> None:
        """Tell the ranks that get their batches from this one which rank was lost, and leave."""
        channels = self._channels
        if channels is None or not channels.to_node.ranks:
            return
        gone = channels.watch.vanished()
        steps = {rank: self._step for rank in channels.to_node.ranks if rank not in gone}
        message = Text(MessageKind.CLOSED, f"{error.rank}\n{error}")
        _note_untold(error, channels.to_node.tell(steps, message, self._wait, self._timeout))
        # The source has no connection to these ranks. It sees this one leave, with the number of the lost rank.
        channels.watch.close(because_of=error.rank)


def _note_untold(error: BaseException, untold: Mapping[int, Exception]) -> None:
    for rank, another in untold.items():
        error.add_note(f"rank {rank} could not be told of it: {another}")


def _format_error(error: BaseException) -> str:
    """An error with its traceback, without the middle of a long one."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # noqa: BLE001 (an error that cannot even be printed is still one)
        text = "(its message cannot be printed)"
    if len(text) > _LONGEST_TEXT:
        text = text[:1000] + "\n…\n" + text[-_LONGEST_TEXT:]
    return f"failed with {type(error).__name__}:\n{text}"
