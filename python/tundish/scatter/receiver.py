"""`ScatterReceiver`: the steps of a scatter on a rank that gets its batches from the source."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from tundish._native import SentBuffer
from tundish.errors import OutOfMemoryError, PeerFailedError, StorageError
from tundish.scatter.incoming_batch import IncomingBatch
from tundish.scatter.scatter_rank import GONE, MAKE_NEW, ScatterRank
from tundish.scatter.transport.channels import Channels
from tundish.scatter.transport.gloo import GlooReceiver
from tundish.scatter.transport.message_header import DEVICE, MessageKind
from tundish.scatter.transport.shared_memory import IncomingMessage

__all__ = ["ControlMessage", "ScatterReceiver"]


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
