"""Rounds of a scatter, from one source to all who take part.

A `Scatterer` owns the ways to the others and counts rounds. What always holds:

1. Every call is the next round on its rank, whatever came of the one before. A receiver gets what was sent in its own
   round: a batch, nothing, or the error that the source failed with.
2. A source that fails in a round tells everybody whom it has not given a batch yet, before it raises.
3. A rank that is lost ends it for all, at the round in which it is found to be, with an error that names it. Whoever
   was given a batch in that round hears of it in the next.
4. A receiver that hears nothing of a round, since the source left it at once, is in step again with the next one.
5. One thread at a time calls. In the background it may be any, as nothing here is a collective of the job's.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from tundish.distributed import Voter
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    PeerFailedError,
    TimedOutError,
)
from tundish.scatter.arrival import Arrival
from tundish.scatter.departure import Departure, threads_of
from tundish.scatter.direct import Direct
from tundish.scatter.far import FarLane, send
from tundish.scatter.meeting import Ways
from tundish.scatter.messages import DIRECT, FAILED, LOST, NOTE, NOTHING, Head
from tundish.scatter.near import NearEnd, NearLane, Shipment, own_pages
from tundish.scatter.place import Place
from tundish.tree.describing import describe
from tundish.waiting import wait_for

__all__ = ["Note", "ScatterStats", "Scatterer"]

# How often whoever waits for a rank of its node looks whether it is there.
_LOOK_SECONDS = 0.1
# How much longer receivers wait than the source, which then tells them for whom it waited.
_GRACE_SECONDS = 1.0
# How long a source that ends waits for ranks of other nodes to hear why.
_FAREWELL_SECONDS = 0.5
_LONGEST_TEXT = 16_000


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


class ScatterStats(TypedDict):
    """What one scatter did on this rank."""

    source: int
    """The global rank of the source."""
    ranks: list[int]
    """The global ranks of all who take part."""
    transports: dict[str, list[int]]
    """By name, the ranks on the other end: from which batches come, and to which they go."""
    rounds: int
    """Calls so far."""
    batches: int
    """Batches that were sent, or came."""
    sent_bytes: int
    """Bytes of batches that were sent."""
    waiting_seconds: float
    """Time spent waiting for the others."""
    memory: dict[str, int]
    """Bytes of shared memory of the source: on their way, kept for the next batches, held by receivers."""


class Scatterer:
    """Collective over the members of `voter`: whoever takes part makes it, in the same order.

    `shared_memory`: whether ranks of one node use it; else all use the network. `timeout`: how long a rank waits for
    the others in a round. `in_loop`: whether the rounds are those of a loop, which an error of the source ends for all,
    also for those who have their batch of that round; a receiver, which is ahead of its caller, waits without end.
    `direct`: the kind of devices and the backend by which batches may go from device to device; all calls are then the
    caller's.
    """

    def __init__(
        self,
        voter: Voter | None,
        place: Place,
        *,
        timeout: timedelta,
        shared_memory: bool = True,
        in_loop: bool = False,
        direct: tuple[str, str] | None = None,
    ) -> None:
        self._place = place
        self._timeout = timeout
        self._in_loop = in_loop
        self._process = os.getpid()
        self._number = 0
        self._lost: PeerFailedError | None = None
        self._told: BaseException | None = None
        self._batches = self._sent_bytes = 0
        self._waited = 0.0
        self._ways: Ways | None = None
        # A message of a round that is still to come.
        self._early: tuple[Head, Arrival | str] | None = None
        self._threads = 1
        if voter is not None and len(place.ranks) > 1:
            self._ways = Ways(voter, place, shared_memory=shared_memory, timeout=timeout, direct=direct)
            self._threads = threads_of(len(self._ways.near))

    @property
    def is_source(self) -> bool:
        """Whether this rank has the data."""
        return self._place.rank == self._place.source

    @property
    def place(self) -> Place:
        """Who takes part."""
        return self._place

    @property
    def lost(self) -> PeerFailedError | None:
        """Why there will be no other round."""
        return self._lost

    @property
    def told(self) -> BaseException | None:
        """What the others were told last, or on their way to being told when it went wrong."""
        return self._told

    def skip_to(self, number: int) -> None:
        """Let the next round be this one, where it is yet to come. What is sent of earlier ones is not read."""
        self._number = max(self._number, number - 1)

    def close(self) -> None:
        """Let go of the ways to the others; not collective."""
        if self._ways is not None:
            self._ways.close()

    def stats(self) -> ScatterStats:
        transports: dict[str, list[int]] = {}
        memory = {"in_use": 0, "cached": 0, "escaped": 0}
        ways = self._ways
        if ways is not None:
            if ways.near:
                transports["shared memory"] = [lane.rank for lane in ways.near]
            far = "gloo" if ways.direct is None else f"{ways.direct.backend}, from device to device"
            if ways.far:
                transports[far] = [lane.rank for lane in ways.far]
            if ways.end is not None:
                name = "shared memory" if isinstance(ways.end, NearEnd) else far
                transports[name] = [ways.feeder, *transports.get(name, [])]
            for lane in ways.near:
                counts = lane.stats()
                memory["in_use"] += counts["in_use"]
                memory["cached"] += counts["cached"]
                memory["escaped"] += counts["escaped"]
        return ScatterStats(
            source=self._place.source,
            ranks=list(self._place.ranks),
            transports=transports,
            rounds=self._number,
            batches=self._batches,
            sent_bytes=self._sent_bytes,
            waiting_seconds=self._waited,
            memory=memory,
        )

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
                describe(own, f"rank {self._place.rank}'s batch")
            departures = self._departures(listed, untold)
            loaded = self._loaded(departures, device)
            self._send(departures, untold, loaded)
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
        raise error

    def _listed(self, batches: Iterable[Any] | None) -> list[Any]:
        count = self._place.batches
        if batches is None:
            return [None] * count
        wanted = f"one batch for each rank, {count} in all"
        if isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable):
            raise InvalidTypeError(f"scatter takes {wanted}, not a {type(batches).__qualname__}")
        listed = list(batches)
        if len(listed) != count:
            raise InvalidInputError(
                f"scatter takes {wanted}, and {len(listed)} came: None stands for a rank that gets nothing"
            )
        return listed

    def _departures(self, listed: list[Any], receivers: Iterable[int]) -> dict[int, Departure | _Word]:
        """What is to be sent to each receiver; a batch that several get is taken apart once."""
        made: dict[int, Departure | _Word] = {id(None): (NOTHING, "")}
        departures = {}
        for rank in receivers:
            batch = listed[self._place.batch(rank)]
            if id(batch) not in made:
                made[id(batch)] = Departure(batch, rank, self._threads)
            departures[rank] = made[id(batch)]
        return departures

    def _loaded(
        self, departures: dict[int, Departure | _Word], device: torch.device | None
    ) -> _Loaded | None:
        """The batches for ranks that get them from device to device."""
        direct = None if self._ways is None else self._ways.direct
        if direct is None or device is None or device.type != direct.kind:
            return None
        far = [lane.rank for lane in self._lanes() if isinstance(lane, FarLane)]
        batches = {rank: departures[rank] for rank in far}
        loaded = {
            rank: direct.load(batch, device)
            for rank, batch in batches.items()
            if isinstance(batch, Departure)
        }
        return _Loaded(direct, device, loaded)

    def _send(
        self,
        departures: dict[int, Departure | _Word],
        untold: dict[int, NearLane | FarLane],
        loaded: _Loaded | None = None,
    ) -> None:
        ways, number = self._ways, self._number
        if ways is None:
            return
        messages = [(far, far.messages(number, departures[far.rank], loaded is not None)) for far in ways.far]
        reached: list[int] = []
        job = None
        if messages and ways.courier is not None:
            job = ways.courier.do(lambda: send(messages, reached))
            for far in ways.far:
                del untold[far.rank]
        readers = Counter(id(departures[lane.rank]) for lane in ways.near)
        shipments: dict[int, Shipment] = {}
        for lane in ways.near:
            departure, wait = departures[lane.rank], self._waiter(lane.rank)
            if isinstance(departure, tuple):
                lane.say(number, *departure, wait)
            elif readers[id(departure)] == 1 or not departure.size:
                self._sent_bytes += lane.give(number, departure, wait)
            else:
                shipment = shipments.get(id(departure))
                if shipment is None:
                    shipment = shipments[id(departure)] = lane.load(departure)
                    self._sent_bytes += departure.size
                lane.share(number, departure.schema, departure.size, shipment, wait)
            del untold[lane.rank]
        self._batches += sum(isinstance(departure, Departure) for departure in departures.values())
        if job is not None:
            self._wait(job.wait, lambda: reached[-1] if reached else None)
            for sent in (departures[far.rank] for far in ways.far):
                self._sent_bytes += sent.size if isinstance(sent, Departure) else 0
            errors = job.result()
            if loaded is not None:
                # Those who heard of it wait for it, whoever did not.
                told = {rank: buffer for rank, buffer in loaded.buffers.items() if rank not in errors}
                loaded.direct.send(told, loaded.device)
            for rank, error in errors.items():
                raise self._lose(rank, f"could not be sent its batch ({error})") from error

    def _tell(self, error: BaseException, untold: dict[int, NearLane | FarLane]) -> None:
        """Tell those who wait for this round why it fails, and all others if there will be no other round."""
        self._told = error
        ways = self._ways
        if ways is None:
            return
        is_lost = error is self._lost
        if not is_lost:
            text = _described(error)
            told = FAILED, f"{self._place.source}\n{text}"
        else:
            assert self._lost is not None  # noqa: S101 (for the type checker)
            told = LOST, f"{self._lost.rank}\n{self._lost}"
        gone = ways.watch.vanished()
        lanes = self._lanes() if is_lost or self._in_loop else list(untold.values())
        # Whoever has this round hears of it in the next.
        far: list[tuple[FarLane, list[Tensor]]] = []
        for lane in lanes:
            number = self._number + (lane.rank not in untold)
            if isinstance(lane, FarLane):
                # What was made for this round is not sent.
                lane.forget()
                far.append((lane, lane.messages(number, told)))
                continue
            if lane.rank in gone:
                continue
            try:
                lane.say(number, *told, self._waiter(lane.rank))
            except Exception as another:  # noqa: BLE001 (the first one is raised)
                error.add_note(f"rank {lane.rank} could not be told of it: {another}")
        if far and ways.courier is not None:
            job = ways.courier.do(lambda: send(far, []))
            wait_for(job.wait, _FAREWELL_SECONDS if is_lost else self._timeout.total_seconds())

    # On a receiver.

    def take(self) -> Arrival | Note | None:
        """The next round, on a receiver: what the source gave this rank, None if nothing.

        Raises:
            PeerFailedError: the source failed in this round, with its traceback in the message, or a rank was lost.
            TimedOutError: the source gave nothing in time.
        """
        self._begin()
        while True:
            message, self._early = self._early, None
            try:
                message = message or self._receive()
            except PeerFailedError as error:
                if error is self._lost:
                    self._tell(error, {})
                raise
            if message is None:
                continue
            head, content = message
            if head.number == self._number:
                break
            # One of an earlier round is of one that this rank left.
            if head.number > self._number:
                self._early = message
                source = self._place.source
                raise PeerFailedError(
                    f"scatter: rank {source}, the source, or a rank on the way from it, left this round without a word",
                    source,
                )
        if head.kind == FAILED:
            rank, _, text = str(content).partition("\n")
            raise PeerFailedError(f"scatter: rank {rank}, the source, {text}", int(rank))
        if isinstance(content, Arrival):
            self._batches += 1
            return content
        return Note(content) if head.kind == NOTE else None

    def _receive(self) -> tuple[Head, Arrival | str] | None:
        """The next message, once those who get it from this rank have it; None where another one belongs to it."""
        ways = self._ways
        if ways is None or ways.end is None:
            raise InvalidInputError("this scatter is closed")
        if self._lost is not None:
            raise self._lost
        end, feeder = ways.end, ways.feeder
        self._wait(end.wait, feeder, patient=self._in_loop)
        try:
            message = end.read()
        except Exception as error:
            if isinstance(end, NearEnd):
                raise
            if isinstance(error, RuntimeError):
                raise self._lose(feeder, f"is gone ({error})") from error
            # What else was sent in this round is still on its way, and nobody knows how much it is.
            rank = self._place.rank
            self._lost = PeerFailedError(
                f"scatter: rank {rank} could not read an earlier batch: {error}", rank
            )
            raise
        if message is None:
            return None
        head, content = message
        if head.flags & DIRECT and ways.direct is not None:
            content = self._fetched(ways.direct, head, content)
        if ways.near:
            content = self._pass_on(ways.near, head, content)
        if head.kind == LOST:
            rank_text, _, text = str(content).partition("\n")
            self._lost = PeerFailedError(text, int(rank_text))
            raise self._lost
        return head, content

    def _fetched(self, direct: Direct, head: Head, content: Arrival | str) -> Arrival | str:
        """What came, with the tensors that come from device to device."""
        device = torch.device(direct.kind)
        if direct.kind != "cpu":
            device = torch.device(direct.kind, torch.get_device_module(device).current_device())
        if not isinstance(content, Arrival):
            direct.meet(device)
            return content
        return content._replace(on_device=direct.receive(head.size, device))

    def _pass_on(self, lanes: list[NearLane], head: Head, content: Arrival | str) -> Arrival | str:
        """Give those who get it from this rank what came; what this rank then has of it."""
        self._look_for_lost()
        if not isinstance(content, Arrival):
            for lane in lanes:
                lane.say(head.number, head.kind, content, self._waiter(lane.rank))
            return content
        shipment = None if content.parcel is None else Shipment(content.parcel)
        for lane in lanes:
            lane.share(head.number, content.schema, head.size, shipment, self._waiter(lane.rank))
        if shipment is None:
            return content
        # As all who share it.
        return Arrival(content.schema, own_pages(shipment.reference))

    # On all.

    def _lanes(self) -> list[NearLane | FarLane]:
        return [] if self._ways is None else [*self._ways.near, *self._ways.far]

    def _begin(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this scatter was made before a fork: make one in the process that uses it"
            )
        self._number += 1

    def _look_for_lost(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._ways is not None:
            for rank in self._ways.watch.vanished():
                raise self._lose(rank, "was killed or has ended")

    def _lose(self, rank: int, how: str) -> PeerFailedError:
        self._lost = PeerFailedError(f"scatter: rank {rank} {how}", rank)
        return self._lost

    def _waiter(self, rank: int) -> Callable[[Callable[[float], bool]], None]:
        return lambda wait: self._wait(wait, rank)

    def _wait(
        self, wait: Callable[[float], bool], rank: int | Callable[[], int | None], *, patient: bool = False
    ) -> None:
        """Wait for something that comes from `rank`, of this node, or from elsewhere: then it may be known later."""
        if wait(0.0):
            return
        begin = time.monotonic()
        deadline = begin + self._timeout.total_seconds() + (0.0 if self.is_source else _GRACE_SECONDS)
        try:
            while not wait(_LOOK_SECONDS):
                if self._ways is not None and rank in self._ways.watch.vanished():
                    # What it gave before stays.
                    if wait(0.0):
                        return
                    raise self._lose(rank, "was killed or has ended")
                if time.monotonic() > deadline and not patient:
                    seconds = self._timeout.total_seconds()
                    name = rank() if callable(rank) else rank
                    raise TimedOutError(
                        f"scatter: {'another rank' if name is None else f'rank {name}'} did not come within "
                        f"{seconds:.4g} s: hung, stopped or elsewhere in the program"
                    )
        finally:
            self._waited += time.monotonic() - begin


def _described(error: BaseException) -> str:
    """An error with its traceback, cut to a bounded length in the middle of the latter."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception:  # noqa: BLE001 (an error that cannot even be printed is still one)
        text = "(its message cannot be printed)"
    if len(text) > _LONGEST_TEXT:
        text = text[:1000] + "\n…\n" + text[-_LONGEST_TEXT:]
    return f"failed with {type(error).__name__}:\n{text}"
