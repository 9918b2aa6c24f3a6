"""`ScatterSource`: the steps of a scatter on the rank that has the data.

Invariants:
- All batches of a step are flattened before any is sent, so that a bad one is refused in time.
- A source that fails tells all ranks that have no batch of the step yet, before it raises.
- A source that is interrupted tells all ranks, and closes the scatter.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from tundish._native import SentBuffer
from tundish.daemon_thread import is_done
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError, format_count, format_type
from tundish.scatter.outgoing_batch import OutgoingBatch, copy_threads
from tundish.scatter.scatter_rank import GONE, MAKE_NEW, ScatterRank
from tundish.scatter.target_device import unflatten_to_device
from tundish.scatter.transport.channels import Channels
from tundish.scatter.transport.gloo import GlooSender, OutgoingMessages, copy_to_arena
from tundish.scatter.transport.message_header import DEVICE, MessageHeader, MessageKind
from tundish.scatter.transport.shared_memory import SharedMemorySender
from tundish.tree import flatten_with_addresses

__all__ = ["ScatterSource"]

# How long a source that was interrupted or timed out waits until ranks of other nodes have the reason.
_REPORT_SECONDS = 0.5
_LONGEST_TEXT = 16_000

# Content of a message: a batch, or the kind and the text of a message without one.
_Content = OutgoingBatch | tuple[MessageKind, str]
_Senders = dict[int, "SharedMemorySender | GlooSender"]


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


def _format_error(error: BaseException) -> str:
    """An error with its traceback, without the middle of a long one."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # noqa: BLE001 (an error that cannot even be printed is still one)
        text = "(its message cannot be printed)"
    if len(text) > _LONGEST_TEXT:
        text = text[:1000] + "\n…\n" + text[-_LONGEST_TEXT:]
    return f"failed with {type(error).__name__}:\n{text}"
