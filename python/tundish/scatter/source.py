"""Rounds of a scatter, from one source to all who take part.

A `ScatterSession` owns the ways to the others and counts rounds. What always holds:

1. Every call is the next round on its rank, whatever came of the one before. A receiver gets what was sent in its own
   round: a batch, nothing, or the error that the source failed with.
2. A source that fails in a round tells everybody whom it has not given a batch yet, before it raises. Who has not got
   all of his by then is told too, and gets no bytes that may be others than those that were given.
3. A receiver that hears nothing of a round, since the source left it at once, is in step again with the next one.
4. One thread at a time calls. In the background it may be any, as nothing here is a collective of the job's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tundish._native import BufferLease
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    OutOfMemoryError,
    PeerFailedError,
    SegmentGoneError,
)
from tundish.scatter.outgoing_batch import OutgoingBatch, threads_beside
from tundish.scatter.received_batch import ReceivedBatch
from tundish.scatter.rendezvous import Ways
from tundish.scatter.session import GONE, Member
from tundish.scatter.transport.device import Direct
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender, Job, Sending
from tundish.scatter.transport.message_header import (
    DIRECT,
    FAILED,
    FILLED,
    FILLING,
    LOST,
    NOTE,
    NOTHING,
    Head,
)
from tundish.scatter.transport.shared_memory import (
    Announcement,
    HungUpError,
    SharedMemoryReceiver,
    SharedMemorySender,
    own_pages,
)
from tundish.tree import flatten_with_addresses

__all__ = ["Note", "ScatterSession"]

# A batch of less bytes and fewer tensors is there sooner than its receiver could make use of hearing that it comes.
_LARGE = 128 << 10
_MANY = 64
# To write so many bytes takes milliseconds, and is worth waking another processor for.
_LONG = 32 << 20
# Memory for so many bytes is set aside for a batch that is only likely to come; that of a larger one is hardly there
# sooner for it.
_EARLY = 8 << 20

# Of a round without a batch: what it is, and what is said of it.
_Word = tuple[int, str]


class Note(NamedTuple):
    """What the source tells all receivers in place of batches."""

    text: str


class _Loaded(NamedTuple):
    """Batches on their way from device to device, by rank."""

    direct: Direct
    device: torch.device
    buffers: dict[int, Tensor]


class ScatterSession(Member):
    """Collective, as `Member`: on the source `give`, on a receiver `take`, each as often as the other."""

    # What came last, until this rank is done with it, which of a round that is still to come it is not before that.
    _came: tuple[Head, ReceivedBatch | str] | None = None
    # The device to which the round is to go, on a receiver.
    _wanted_on: torch.device | None = None
    # What receivers were told at the end of a round of the next one, which has this number, by rank.
    _foretold_next: tuple[int, dict[int, Announcement]] = (0, {})

    # On the source.

    def give(self, batches: Iterable[Any] | None, device: torch.device | None = None) -> Any:
        """The next round, on the source: give every rank its batch; this rank's own, as it was given.

        `batches`: one for each, None for those that get nothing; None: nobody gets anything. `device`: on which they
        may be gathered, to be sent from there, and to which this rank's own is to go.

        Raises what the iteration over `batches` or taking a batch apart raised, once the others were told, and as
        `take`.
        """
        self._begin()
        untold = {lane.rank: lane for lane in self._lanes()}
        try:
            self._look_for_lost()
            listed = self._listed(batches)
            own = listed[self._place.batch(self._place.rank)]
            if device is not None:
                # What cannot be brought there is refused before any rank has been sent anything.
                flatten_with_addresses(own, f"rank {self._place.rank}'s batch")
            foretold = self._foretold(listed)
            departures = self._departures(listed, untold)
            loaded = self._loaded(departures, device)
            sizes = (one.size for one in departures.values() if isinstance(one, OutgoingBatch))
            self._largest = max(sizes, default=0)
            self._send(departures, untold, loaded, foretold)
            self._foretell_next()
        except BaseException as error:
            self._tell(error, untold)
            raise
        return own

    def note(self, text: str) -> None:
        """The next round, on the source: tell all receivers `text`."""
        self._begin()
        untold = {lane.rank: lane for lane in self._lanes()}
        try:
            self._look_for_lost()
            self._send(dict.fromkeys(untold, (NOTE, text)), untold)
        except BaseException as error:
            self._tell(error, untold)
            raise

    def look(self) -> None:
        """Between rounds, on the source: raise `PeerFailedError` where a rank was lost, once the others were told."""
        if self._lost is not None or (self._ways is not None and self._ways.watch.vanished()):
            self.note("")

    def fail(self, error: BaseException) -> NoReturn:
        """The next round, with an error of this rank; on the source the others are told.

        Raises `error`.
        """
        self._begin()
        if self.is_source:
            self._tell(error, {lane.rank: lane for lane in self._lanes()})
            # A loader may raise the same one again, in another pass.
            self._told = 0
        try:
            raise error
        finally:
            # Else the error holds on to what it is raised from.
            del error

    def _listed(self, batches: Iterable[Any] | None) -> list[Any]:
        count = self._place.batches
        if batches is None:
            return [None] * count
        if type(batches) is not list and (
            isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable)
        ):
            raise InvalidTypeError(
                f"scatter takes one batch for each rank, {count} in all, not a {type(batches).__qualname__}"
            )
        # No more, as an iterable may be endless.
        listed = list(islice(batches, count + 1))
        if len(listed) != count:
            came = (
                len(batches) if isinstance(batches, Sized) else "more" if len(listed) > count else len(listed)
            )
            raise InvalidInputError(
                f"scatter takes one batch for each rank, {count} in all, and {came} came: "
                "None stands for a rank that gets nothing"
            )
        return listed

    def _foretell_next(self) -> None:
        """Tell those who wait for nothing but their batch of this round of the next one.

        They get ready for it as soon as they come to it, whatever the source has to do before.
        """
        if not self._announces or self._ways is None:
            return
        number, early = self._number + 1, dict[int, Announcement]()
        self._foretold_next = number, early
        for lane in self._ways.near:
            # This round is given whatever becomes of that; who is gone is found to be in the next one.
            with contextlib.suppress(HungUpError, OutOfMemoryError, OSError):
                announcement = lane.foretell(number, _EARLY)
                if announcement is not None:
                    early[lane.rank] = announcement

    def _foretold(self, listed: list[Any]) -> dict[int, Announcement]:
        """Batches that those who are likely to get them were told of, by rank: they get ready already."""
        number, early = self._foretold_next
        self._foretold_next = 0, {}
        foretold = early if number == self._number else {}
        if self._announces and self._ways is not None:
            try:
                for lane in self._ways.near:
                    if lane.rank not in foretold and listed[self._place.batch(lane.rank)] is not None:
                        announcement = lane.foretell(self._number)
                        if announcement is not None:
                            foretold[lane.rank] = announcement
            except HungUpError as error:
                raise self._lose(error.rank, GONE) from error
        return foretold

    def _departures(self, listed: list[Any], receivers: Iterable[int]) -> dict[int, OutgoingBatch | _Word]:
        """What is to be sent to each receiver; a batch that several get is taken apart once."""
        made: dict[int, OutgoingBatch | _Word] = {id(None): (NOTHING, "")}
        departures = {}
        for rank in receivers:
            batch = listed[self._place.batch(rank)]
            if id(batch) not in made:
                made[id(batch)] = OutgoingBatch(batch, rank, self._threads)
            departures[rank] = made[id(batch)]
        return departures

    def _loaded(
        self, departures: dict[int, OutgoingBatch | _Word], device: torch.device | None
    ) -> _Loaded | None:
        """The batches for ranks that get them from device to device."""
        direct = None if self._ways is None else self._ways.direct
        if direct is None or device is None or device.type != direct.kind:
            return None
        far = [lane.rank for lane in self._lanes() if isinstance(lane, GlooSender)]
        batches = {rank: departures[rank] for rank in far}
        loaded = {
            rank: direct.load(batch, device)
            for rank, batch in batches.items()
            if isinstance(batch, OutgoingBatch)
        }
        return _Loaded(direct, device, loaded)

    def _send(
        self,
        departures: dict[int, OutgoingBatch | _Word],
        untold: dict[int, SharedMemorySender | GlooSender],
        loaded: _Loaded | None = None,
        foretold: Mapping[int, Announcement] = MappingProxyType({}),
    ) -> None:
        ways, number = self._ways, self._number
        if ways is None:
            return
        sending, job = None, None
        errors: dict[int, Exception] = {}
        try:
            if ways.far:
                sending = self._begin_sending(ways)
                self._post(number, sending, ways.far, departures, untold, is_direct=loaded is not None)
                job = self._have_finished(ways, sending)
            self._send_near(ways.near, departures, untold, foretold)
            if job is not None and sending is not None:
                errors = self._sent_far(job, sending.reached, departures)
            if job is not None and loaded is not None:
                # Those who heard of it wait for it, whoever did not.
                told = {rank: buffer for rank, buffer in loaded.buffers.items() if rank not in errors}
                loaded.direct.send(told, loaded.device)
        except BaseException:
            if loaded is not None and any(far.rank not in untold for far in ways.far):
                # They would take the tensors of the next one for those of this one.
                self.end("could not send an earlier batch")
            if sending is not None and job is None:
                self._have_finished(ways, sending)
            raise
        self._batches += sum(isinstance(departure, OutgoingBatch) for departure in departures.values())
        for rank, error in errors.items():
            raise self._lose(rank, f"could not be sent its batch ({error})") from error

    def _post(
        self,
        number: int,
        sending: Sending,
        lanes: list[GlooSender],
        departures: dict[int, OutgoingBatch | _Word],
        untold: dict[int, SharedMemorySender | GlooSender],
        *,
        is_direct: bool,
    ) -> None:
        """Have ranks of other nodes sent theirs, one after the other: who has it first is first to go on."""
        try:
            made = ((lane, lane.messages(number, departures[lane.rank], is_direct)) for lane in lanes)
            # What may fail is done by the time that the first one waits for tensors.
            for lane, messages in list(made) if is_direct else made:
                # Before it has them, as Ctrl-C may come in between: who is told of the next round in this one hears of
                # it.
                del untold[lane.rank]
                sending.post(lane, messages)
        except BaseException:
            # Nobody knows what became of the last ones that were made.
            for lane in lanes:
                lane.forget()
            raise

    def _sent_far(
        self,
        job: Job[dict[int, Exception]],
        reached: list[int],
        departures: Mapping[int, OutgoingBatch | _Word],
    ) -> dict[int, Exception]:
        """Wait until ranks of other nodes have theirs; by rank, what went wrong."""
        self._wait(job.wait, lambda: reached[-1] if reached else None)
        errors = job.result()
        for rank in reached:
            sent = departures[rank]
            self._sent_bytes += sent.size if isinstance(sent, OutgoingBatch) and rank not in errors else 0
        return errors

    def _send_near(
        self,
        lanes: list[SharedMemorySender],
        departures: dict[int, OutgoingBatch | _Word],
        untold: dict[int, SharedMemorySender | GlooSender],
        foretold: Mapping[int, Announcement],
    ) -> None:
        number = self._number
        readers = Counter(id(departures[lane.rank]) for lane in lanes)
        shipments: dict[int, BufferLease] = {}
        announced: list[tuple[SharedMemorySender, OutgoingBatch, Announcement]] = []
        try:
            for lane in lanes:
                departure, wait = departures[lane.rank], self._waiter(lane.rank)
                if isinstance(departure, tuple):
                    lane.say(number, *departure, wait)
                elif not departure.size:
                    lane.give(number, departure, wait)
                elif readers[id(departure)] > 1:
                    shipment = shipments.get(id(departure))
                    if shipment is None:
                        shipment = shipments[id(departure)] = lane.load(departure)
                        self._sent_bytes += departure.size
                    lane.share(number, departure.schema, departure.size, shipment, wait)
                elif (self._announces_large and departure.size >= _LARGE) or (
                    self._announces and len(departure.tensors) >= _MANY
                ):
                    announcement = foretold.get(lane.rank)
                    if announcement is None or not lane.fits(announcement, departure):
                        announcement = lane.announce(number, departure, wait)
                    announced.append((lane, departure, announcement))
                    continue
                else:
                    self._take_processors(departure, lanes, untold)
                    self._sent_bytes += lane.give(number, departure, wait)
                del untold[lane.rank]
            while announced:
                lane, departure, announcement = announced[0]
                self._take_processors(departure, lanes, untold)
                self._sent_bytes += lane.fill(number, departure, announcement)
                del untold[lane.rank], announced[0]
        except HungUpError as error:
            raise self._lose(error.rank, GONE) from error

    def _take_processors(
        self,
        departure: OutgoingBatch,
        lanes: list[SharedMemorySender],
        untold: Mapping[int, SharedMemorySender | GlooSender],
    ) -> None:
        """Have a large batch written by as many threads as there are processors that nobody of this node wants yet."""
        if departure.size >= _LONG and not self._in_loop:
            busy = sum(lane.rank not in untold for lane in lanes)
            departure.threads = max(self._threads, threads_beside(busy))

    # On a receiver.

    def take(self, device: torch.device | None = None) -> ReceivedBatch | Note | None:
        """The next round, on a receiver: what the source gave this rank, None if nothing.

        `device`: to which it is to go.

        Raises:
            PeerFailedError: the source failed in this round, with its traceback in the message, or a rank was lost.
            TimedOutError: the source gave nothing in time.
            SegmentGoneError: the memory of this round could not be reached.
        """
        self._begin()
        self._wanted_on = device
        ready: ReceivedBatch | str = ""
        while True:
            try:
                message = self._receive()
            except PeerFailedError as error:
                if error is self._lost:
                    self._tell(error, {})
                    if self._ways is not None and self._ways.near:
                        # The source does not see who gets batches from this rank: it sees this one leave, and why.
                        self._ways.watch.close(because_of=error.rank)
                raise
            if message is None:
                continue
            head, content = message
            if head.number > self._number:
                source = self._place.source
                raise PeerFailedError(
                    f"scatter: rank {source}, the source, or a rank on the way from it, left this round without a word",
                    source,
                )
            self._done()
            # One of an earlier round is of one that this rank left.
            if head.number == self._number:
                if not head.flags & FILLING:
                    break
                if isinstance(content, ReceivedBatch):
                    ready = content.prepared(device)
        if head.kind == FAILED:
            rank, _, text = str(content).partition("\n")
            raise PeerFailedError(f"scatter: rank {rank}, the source, {text}", int(rank))
        if head.kind == FILLED:
            if not isinstance(ready, ReceivedBatch):
                raise SegmentGoneError(
                    f"scatter: the memory in which rank {self._place.source}, the source, announced this rank's batch "
                    "could not be opened"
                )
            content = ready.filled(content.schema if isinstance(content, ReceivedBatch) else ready.schema)
        if isinstance(content, ReceivedBatch):
            self._batches += 1
            return content
        return Note(content) if head.kind == NOTE else None

    def _receive(self) -> tuple[Head, ReceivedBatch | str] | None:
        """The next message, once those who get it from this rank have it; None where another one belongs to it.

        The same again until this rank is `_done` with it, also where Ctrl-C came in between.
        """
        ways = self._ways
        if ways is None or ways.end is None:
            raise InvalidInputError("this scatter is closed")
        if self._lost is not None:
            raise self._lost.with_traceback(None)
        if self._came is None:
            self._came = self._next(ways, ways.end)
        if self._came is None:
            return None
        head, content = self._came
        if head.kind == LOST:
            rank_text, _, text = str(content).partition("\n")
            self._lost = PeerFailedError(text, int(rank_text))
            raise self._lost
        return self._came

    def _next(
        self, ways: Ways, end: SharedMemoryReceiver | GlooReceiver
    ) -> tuple[Head, ReceivedBatch | str] | None:
        """As `_receive`, of a message that is yet to come."""
        feeder = ways.feeder
        self._wait(end.wait, feeder, patient=self._in_loop)
        try:
            message = end.read()
        except Exception as error:
            if isinstance(end, SharedMemoryReceiver):
                raise
            if isinstance(error, RuntimeError):
                raise self._lose(feeder, f"is gone ({error})") from error
            # What else was sent in this round is still on its way, and nobody knows how much it is. The source, which
            # would wait for this rank to take it, is not to.
            self.end(f"could not read an earlier batch: {error}")
            raise
        if message is None:
            return None
        head, content = message
        if head.flags & DIRECT and ways.direct is not None:
            try:
                content = self._fetched(ways.direct, head, content)
                self._came = head, content
            except BaseException:
                # Its tensors are on their way, and would be taken for those of the next one.
                self.end("could not take an earlier batch")
                raise
        if ways.near:
            self._look_for_lost()
            try:
                content = self._pass_on(ways.near, head, content)
                self._came = head, content
            except BaseException:
                # Nobody knows who has it; of a text no harm is done where somebody gets it twice.
                if isinstance(content, ReceivedBatch):
                    self._done()
                raise
        return head, content

    def _done(self) -> None:
        """Be done with what came last: the next message is the one after it."""
        if self._ways is not None and self._ways.end is not None:
            self._ways.end.done()
        self._came = None

    def _fetched(self, direct: Direct, head: Head, content: ReceivedBatch | str) -> ReceivedBatch | str:
        """What came, with the tensors that come from device to device."""
        if not isinstance(content, ReceivedBatch):
            direct.meet(self._wanted_on)
            return content
        return content._replace(on_device=direct.receive(head.size, self._wanted_on))

    def _pass_on(
        self, lanes: list[SharedMemorySender], head: Head, content: ReceivedBatch | str
    ) -> ReceivedBatch | str:
        """Give those who get it from this rank what came; what this rank then has of it."""
        if not isinstance(content, ReceivedBatch):
            for lane in lanes:
                lane.say(head.number, head.kind, content, self._waiter(lane.rank))
            return content
        shipment = None if content.parcel is None else BufferLease(content.parcel)
        try:
            for lane in lanes:
                lane.share(head.number, content.schema, head.size, shipment, self._waiter(lane.rank))
        except HungUpError as error:
            raise self._lose(error.rank, GONE) from error
        if shipment is None:
            return content
        # As all who share it.
        return ReceivedBatch(content.schema, own_pages(shipment.reference))
