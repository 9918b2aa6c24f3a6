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
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn, TypedDict, cast

import torch
from torch import Tensor

from tundish._native import SentBuffer
from tundish.daemon_thread import is_done
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
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender, OutgoingMessages, copy_to_arena
from tundish.scatter.transport.message import DEVICE, IncomingMessage, MessageHeader, MessageKind, Waiter
from tundish.scatter.transport.shared_memory import SharedMemorySender
from tundish.tree import flatten_with_addresses

# Of a rank whose connection was closed, in messages.
GONE: Final = "was killed, has ended, or has left the scatter"
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

# Content of a message: a batch, or the kind and the text of a message without one.
_Content = OutgoingBatch | tuple[MessageKind, str]
_Senders = dict[int, SharedMemorySender | GlooSender]


class ScatterStats(TypedDict):
    """Counts of one scatter on this rank."""

    source: int
    """The global rank of the source."""
    ranks: list[int]
    """The global ranks of all participants."""
    transports: dict[str, list[int]]
    """By name of a transport, the ranks on the other end."""
    steps: int
    """Calls so far."""
    batches: int
    """Batches sent or received."""
    sent_bytes: int
    """Bytes of the batches sent."""
    waiting_seconds: float
    """Seconds spent waiting for other ranks."""
    memory: dict[str, int]
    """Bytes of the source's shared memory: `in_use` on their way, `cached` for the next batches, `escaped` that
    receivers hold."""


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
        self._batches = self._sent_bytes = 0
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
        transports: dict[str, list[int]] = {}
        memory: Counter[str] = Counter()
        channels = self._channels
        if channels is not None:
            device = channels.device
            network = "gloo" if device is None else f"{device.backend}, from device to device"
            ends = [(sender.rank, isinstance(sender, GlooSender)) for sender in channels.senders]
            if channels.receiver is not None:
                ends.insert(0, (channels.sender_rank, isinstance(channels.receiver, GlooReceiver)))
            for rank, is_remote in ends:
                transports.setdefault(network if is_remote else "shared memory", []).append(rank)
            for sender in channels.to_node:
                memory.update(cast(Mapping[str, int], sender.stats()))
        return ScatterStats(
            source=self.participants.source,
            ranks=list(self.participants.ranks),
            transports=transports,
            steps=self._step,
            batches=self._batches,
            sent_bytes=self._sent_bytes,
            waiting_seconds=self._waited,
            memory={name: memory[name] for name in ("in_use", "cached", "escaped")},
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

    def _waiter(self, rank: int, seconds: float | None = None) -> Waiter:
        return lambda is_ready: self._wait(is_ready, rank, seconds=seconds)

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
    # The messages to other nodes that were posted last, and the wait for them.
    _outgoing: tuple[OutgoingMessages, Future[None]] | None = None

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
            contents = self._flatten_all(batch_list, waiting)
            self.largest_batch = max(
                (content.size for content in contents.values() if isinstance(content, OutgoingBatch)),
                default=0,
            )
            self._send(contents, waiting, device)
        return make

    def send_control(self, text: str) -> None:
        """The next step: send all receivers a text."""
        with self._reported_step() as waiting:
            self._send(dict.fromkeys(waiting, (MessageKind.CONTROL, text)), waiting)

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
    def _reported_step(self) -> Iterator[_Senders]:
        """A step whose error is reported to the ranks that still wait for their batch; yields those."""
        self._begin_step()
        channels = self._channels
        waiting: _Senders = {} if channels is None else {sender.rank: sender for sender in channels.senders}
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

    def _flatten_all(self, batch_list: list[Any], receivers: Iterable[int]) -> dict[int, _Content]:
        """The contents by rank. A batch for several ranks is flattened once."""
        channels = self._channels
        threads = copy_threads(0 if channels is None else len(channels.to_node))
        made: dict[int, _Content] = {id(None): (MessageKind.NOTHING, "")}
        contents = {}
        for rank in receivers:
            batch = batch_list[self.participants.batch_number(rank)]
            if id(batch) not in made:
                made[id(batch)] = OutgoingBatch(batch, rank, threads)
            contents[rank] = made[id(batch)]
        return contents

    def _send(
        self, contents: dict[int, _Content], waiting: _Senders, device: torch.device | None = None
    ) -> None:
        channels = self._channels
        if channels is None:
            return
        direct = channels.device
        if direct is None or device is None or device.type != direct.kind:
            direct = None
        # Before anything is sent, because it may fail.
        on_device = {
            sender.rank: direct.load(content, device)
            for sender in channels.to_other_nodes
            if direct is not None
            and device is not None
            and isinstance(content := contents[sender.rank], OutgoingBatch)
        }
        try:
            if channels.to_other_nodes:
                self._post(channels, contents, waiting, is_on_device=direct is not None)
            self._send_on_node(channels.to_node, contents, waiting)
            if channels.to_other_nodes:
                self._wait_until_sent()
            if direct is not None and device is not None:
                direct.send(on_device, device)
        except BaseException:
            if direct is not None and any(sender.rank not in waiting for sender in channels.to_other_nodes):
                # They would take the tensors of the next step for those of this one.
                self.end("could not send an earlier batch")
            raise
        self._batches += sum(isinstance(content, OutgoingBatch) for content in contents.values())

    def _send_on_node(
        self, senders: list[SharedMemorySender], contents: dict[int, _Content], waiting: _Senders
    ) -> None:
        readers = Counter(id(contents[sender.rank]) for sender in senders)
        leases: dict[int, SentBuffer] = {}
        for sender in senders:
            content, wait = contents[sender.rank], self._waiter(sender.rank)
            if isinstance(content, tuple):
                sender.send_text(self._step, *content, wait)
            else:
                is_shared = readers[id(content)] > 1
                lease = leases.get(id(content))
                if lease is None:
                    lease = sender.write(content, wait)
                    self._sent_bytes += content.size
                if is_shared:
                    leases[id(content)] = lease
                schema_bytes = len(content.encoded_schema)
                try:
                    sender.send(self._step, content.size, schema_bytes, lease, wait, is_shared=is_shared)
                except ConnectionError as error:
                    raise self._end_because_of(sender.rank, GONE) from error
            del waiting[sender.rank]

    def _post(
        self, channels: Channels, contents: dict[int, _Content], waiting: _Senders, *, is_on_device: bool
    ) -> None:
        """Begin to send messages to ranks of other nodes, at once at most as many bytes as the memory limit."""
        payloads: dict[int, Tensor | None] = {}
        copied_bytes = 0
        outgoing, flags = OutgoingMessages(), DEVICE * is_on_device
        try:
            for sender in channels.to_other_nodes:
                content = contents[sender.rank]
                if isinstance(content, tuple):
                    kind, text = content
                    header, encoded = MessageHeader(self._step, kind, flags), text.encode(errors="replace")
                else:
                    if id(content) not in payloads and not is_on_device:
                        if copied_bytes and copied_bytes + content.size > channels.arena_limit:
                            self._finish_in_thread(channels, outgoing)
                            outgoing, payloads, copied_bytes = OutgoingMessages(), {}, 0
                            self._wait_until_sent()
                        copied_bytes += content.size
                        payloads[id(content)] = copy_to_arena(content, channels.arena)
                    header = MessageHeader(self._step, MessageKind.BATCH, flags, size=content.size)
                    encoded = content.encoded_schema
                # Before they are posted: a rank that may have them hears of an error in the next step.
                del waiting[sender.rank]
                outgoing.post(sender, header, encoded, payloads.get(id(content)))
        finally:
            self._finish_in_thread(channels, outgoing)

    def _finish_in_thread(self, channels: Channels, outgoing: OutgoingMessages) -> Future[None]:
        """Have a thread wait until messages to other nodes are sent."""
        # A thread that waits for a late rank, perhaps for ever, is left behind.
        self._outgoing = outgoing, channels.thread.submit(outgoing.wait, waits=False)
        return self._outgoing[1]

    def _wait_until_sent(self) -> None:
        """Wait until the messages that were posted last are sent. Raises if one could not be sent."""
        if self._outgoing is None:
            return
        outgoing, future = self._outgoing
        self._wait(lambda seconds: is_done(future, seconds), lambda: outgoing.waiting_for)
        self._sent_bytes += outgoing.sent_bytes
        for rank, error in outgoing.errors.items():
            raise self._end_because_of(rank, f"could not be sent its batch ({error})") from error

    def _report_error(self, error: BaseException, waiting: _Senders) -> None:
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
        seconds = _REPORT_SECONDS if is_interrupt else None
        to_all = is_lost or self._in_loop
        outgoing, tells_other_nodes = OutgoingMessages(), False
        gone = channels.watch.vanished()
        for sender in channels.senders:
            if not (to_all or sender.rank in waiting) or sender.rank in gone:
                continue
            # A rank that has its batch of this step hears of it in the next.
            step = self._step + (sender.rank not in waiting)
            if isinstance(sender, GlooSender):
                outgoing.post(sender, MessageHeader(step, kind), text.encode(errors="replace"))
                tells_other_nodes = True
                continue
            try:
                sender.send_text(step, kind, text, self._waiter(sender.rank, seconds))
            except Exception as another:  # noqa: BLE001 (the first one is raised)
                error.add_note(f"rank {sender.rank} could not be told of it: {another}")
        if tells_other_nodes:
            told = self._finish_in_thread(channels, outgoing)
            # A rank that has not made the step yet will not read this sooner.
            is_short = is_lost or isinstance(error, TimedOutError)
            is_done(told, _REPORT_SECONDS if is_short else self._timeout)
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
        if channels.to_node:
            self._pass_on(channels, message)
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

    def _pass_on(self, channels: Channels, message: IncomingMessage) -> None:
        """Send the message to the ranks of this node that get the same batch."""
        self._raise_if_ended()
        header, lease = message.header, None if message.buffer is None else SentBuffer(message.buffer)
        for sender in channels.to_node:
            wait = self._waiter(sender.rank)
            try:
                if lease is None:
                    sender.send_text(header.step, header.kind, str(message.content), wait)
                else:
                    sender.send(header.step, header.size, header.text_bytes, lease, wait, is_shared=True)
            except ConnectionError as error:
                raise self._end_because_of(sender.rank, GONE) from error

    def _report_to_own_receivers(self, error: PeerFailedError) -> None:
        """Tell the ranks that get their batches from this one which rank was lost, and leave."""
        channels = self._channels
        if channels is None or not channels.to_node:
            return
        gone = channels.watch.vanished()
        for sender in channels.to_node:
            if sender.rank not in gone:
                try:
                    text = f"{error.rank}\n{error}"
                    sender.send_text(self._step, MessageKind.CLOSED, text, self._waiter(sender.rank))
                except Exception as another:  # noqa: BLE001 (the first one is raised)
                    error.add_note(f"rank {sender.rank} could not be told of it: {another}")
        # The source has no connection to these ranks. It sees this one leave, with the number of the lost rank.
        channels.watch.close(because_of=error.rank)


def _format_error(error: BaseException) -> str:
    """An error with its traceback, without the middle of a long one."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # noqa: BLE001 (an error that cannot even be printed is still one)
        text = "(its message cannot be printed)"
    if len(text) > _LONGEST_TEXT:
        text = text[:1000] + "\n…\n" + text[-_LONGEST_TEXT:]
    return f"failed with {type(error).__name__}:\n{text}"
