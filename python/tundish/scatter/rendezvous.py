"""How those who take part in a scatter find each other, once.

Owns the ways between a source and its receivers until a `ScatterSession` takes them over. What always holds:

1. Nobody waits here but in votes, so that whoever fails or dies is named on all ranks; when a meeting fails, nothing of
   it is left.
2. Sockets in the abstract namespace have names that every user of the machine finds: of this node, batches go to
   processes of the same user, and come from such, only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from datetime import timedelta
from typing import Any

import torch

from tundish import _native
from tundish._native import available_processors
from tundish.distributed import (
    PeerWatch,
    Voter,
    env_integer,
    group_info,
    new_subgroup,
    nodes_of,
    torch_distributed,
    unique_name,
)
from tundish.errors import PeerFailedError
from tundish.scatter.participants import Place
from tundish.scatter.refusals import refused_calls
from tundish.scatter.transport.device import Direct
from tundish.scatter.transport.gloo import Courier, GlooReceiver, GlooSender
from tundish.scatter.transport.peer_connections import Calls, call, greeted
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

__all__ = ["Ways", "limit_of"]

_BACKLOG = 4096
_HELLO = struct.Struct("<q")
# Process, user and group on the other end of a unix socket.
_CREDENTIALS = struct.Struct("iII")


def limit_of(shares: int) -> int:
    """Bytes for each of so many of one node, for what is on its way, and as many that are kept for the next batches.

    Together an eighth of the memory that this process can have, which may be less than the machine's.
    """
    return 2 * _native.default_arena_limit() // max(1, shares)


def feeders_of(nodes: list[tuple[int, ...]], place: Place) -> dict[int, int]:
    """Who gives receivers their batches, where that is a rank of their own node.

    On the source's node it is the source; on another one, of the ranks that get the same batch, the first.
    """
    feeders = {}
    for node in nodes:
        firsts: dict[int, int] = {}
        for rank in node:
            if rank != place.source:
                first = firsts.setdefault(place.batch(rank), rank)
                if place.source in node:
                    feeders[rank] = place.source
                elif first != rank:
                    feeders[rank] = first
    return feeders


def shares_of(nodes: list[tuple[int, ...]], place: Place, fed: list[int], far: list[int]) -> int:
    """Among how many the memory of this rank's node is shared out.

    On the source these are its lanes, of which those to `far` have one arena. What other ranks pass on lies where it
    came from far away.
    """
    if place.rank == place.source:
        return len(fed) + bool(far)
    if not nodes:
        # Nobody knows who of them is on this one.
        return env_integer("LOCAL_WORLD_SIZE", 1) or 1
    return sum(rank in far for node in nodes if place.rank in node for rank in node)


class Ways:
    """The ways by which batches come to this rank, and go from it. Collective over the members of `voter`.

    `awake`: whether a receiver of the source's node may keep a processor busy for short waits, where it has one.

    Attributes:
        near: the lanes to ranks of this node that this rank feeds.
        far: on the source, those to ranks of other nodes.
        end: on a receiver, where its batches come.
        feeder: of the receiver whose they come from.
        watch: of the ranks on the other end of these.
        courier: who waits for what is far away.
        direct: the way between devices of this rank and those far away, where there is one.
    """

    def __init__(
        self,
        voter: Voter,
        place: Place,
        *,
        shared_memory: bool,
        timeout: timedelta,
        direct: tuple[str, str] | None,
        awake: bool,
    ) -> None:
        self.near: list[SharedMemorySender] = []
        self.far: list[GlooSender] = []
        self.end: SharedMemoryReceiver | GlooReceiver | None = None
        self.courier: Courier | None = None
        self.direct: Direct | None = None
        self._direct = direct
        self._awake = awake
        self.feeder = place.source
        self._place = place
        self._timeout = timeout
        self._group: Any = None
        self._lines: dict[int, socket.socket] = {}
        # Of this rank's lanes, and of what comes from far away: those of all ranks of a node share its memory.
        self._limit = 0
        self._watching = contextlib.ExitStack()
        try:
            self._meet(voter, shared_memory)
        except BaseException:
            self.close()
            raise
        finally:
            # Those of receivers that came to nothing.
            for line in self._lines.values():
                line.close()

    def close(self) -> None:
        """Let go of sockets and memory; those who watch this rank see it leave."""
        # Nothing where it could not even be made.
        self._watching.close()
        for lane in self.near:
            lane.close()
        if isinstance(self.end, SharedMemoryReceiver):
            self.end.close()
        if self.courier is not None:
            self.courier.close()
        self.near, self.far, self.end = [], [], None
        group, self._group = self._group, None
        if group is not None:
            # The others see its connections end. The default group takes it along when it is destroyed before.
            with contextlib.suppress(Exception):
                distributed = torch_distributed()
                if distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map:
                    distributed.destroy_process_group(group)

    def renew_courier(self) -> Courier:
        """Leave the courier to what it waits for, and have another one."""
        # In this order: what Ctrl-C interrupts leaves one that works.
        left, self.courier = self.courier, Courier()
        if left is not None:
            left.close()
        return self.courier

    def _meet(self, voter: Voter, shared_memory: bool) -> None:
        place, timeout = self._place, self._timeout
        is_source = place.rank == place.source
        what = "meeting of a scatter"
        # Of many ranks messages show the beginning.
        after = f" after {refused_calls()} calls that were refused for their group" if refused_calls() else ""
        same = f"source {place.source}{after}, of {place.ranks} for {place.batch_of}"
        with contextlib.ExitStack() as stack:
            near, listener, calls = None, None, None
            # Nobody knows yet who is called, but whoever has no descriptors for it has to say so.
            with voter.agreed(what, same=same, timeout=timeout):
                self.watch = PeerWatch()
                self._watching.callback(self.watch.close)
                if self.watch.address:
                    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    address = f"tundish-scatter-{secrets.token_hex(16)}"
                    listener.bind(f"\0{address}")
                    listener.listen(_BACKLOG)
                    near = address, self.watch.address, os.getpid()
            # All members work out the same.
            nodes = nodes_of(voter, timeout=timeout) if shared_memory and self.watch.address else []
            feeders = feeders_of(nodes, place)
            self.feeder = feeders.get(place.rank, place.source)
            fed = [rank for rank, feeder in feeders.items() if feeder == place.rank]
            far = [rank for rank in place.ranks if rank not in feeders and rank != place.source]
            if far and is_source:
                # Without one, out of descriptors say, deadlines have to do.
                with contextlib.suppress(OSError):
                    calls = stack.enter_context(contextlib.closing(Calls(group_info(None).store)))
            told = json.dumps((near, None if calls is None else calls.invitation))
            near, invitation = json.loads(
                voter.broadcast(told, source=self.feeder, what=what, timeout=timeout)
            )
            line = None
            # A connection waits in the feeder's queue, and what is said on it, until the feeder looks there.
            with voter.agreed(what, timeout=timeout):
                self._limit = limit_of(shares_of(nodes, place, fed, far))
                if place.rank in feeders:
                    self._call(*near)
                elif place.rank in far and invitation is not None:
                    line = call(invitation, place.rank)
            with voter.agreed(what, timeout=timeout):
                if listener is not None and fed:
                    self._answer(listener, fed)
                for rank, caller in ({} if calls is None else calls.answer()).items():
                    self.watch.adopt(rank, caller)
            with voter.agreed(what, timeout=timeout):
                if place.rank in feeders:
                    beside = sum(feeder == self.feeder for feeder in feeders.values())
                    # Ranks of the node that are no part of this scatter want their processors, too.
                    beside = max(beside, (env_integer("LOCAL_WORLD_SIZE", 1) or 1) - 1)
                    self._listen(near[2], awake=self._awake and available_processors() > beside)
                if line is not None and greeted(line, invitation):
                    self.watch.adopt(place.source, line)
                if far and (is_source or place.rank in far):
                    # Whoever passes batches on has to have them in host memory.
                    passed_on = any(rank in feeders.values() for rank in far)
                    self._join((place.source, *far), None if passed_on else self._direct)

    def _call(self, address: str, watch: str, _: int) -> None:
        line = self._lines[self.feeder] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(f"\0{address}")
        if not _is_same_user(line):
            raise PeerFailedError(
                f"scatter: another user's process answers in place of rank {self.feeder}: run all ranks of a node as "
                "one user",
                self.feeder,
            )
        line.sendall(_HELLO.pack(self._place.rank) + self.watch.address.encode())
        self.watch.connect({self.feeder: watch})

    def _answer(self, listener: socket.socket, fed: list[int]) -> None:
        listener.settimeout(0)
        while len(self._lines) < len(fed):
            try:
                line, _ = listener.accept()
            except BlockingIOError:
                silent = min(set(fed) - self._lines.keys())
                raise PeerFailedError(
                    f"scatter: rank {silent}, of this node, is another user's process: run all ranks of a node as one "
                    "user",
                    silent,
                ) from None
            if not _is_same_user(line):
                line.close()
                continue
            line.settimeout(self._timeout.total_seconds())
            hello = line.recv(_HELLO.size + 108)
            (rank,) = _HELLO.unpack_from(hello)
            self._lines[rank] = line
            self.watch.connect({rank: hello[_HELLO.size :].decode()})
        for rank in fed:
            lane = SharedMemorySender(rank, self._lines[rank], self._limit)
            del self._lines[rank]
            self.near.append(lane)
            lane.introduce()

    def _listen(self, process: int, *, awake: bool) -> None:
        line = self._lines.pop(self.feeder)
        try:
            self.end = SharedMemoryReceiver(line, process, awake=awake)
        except BaseException:
            line.close()
            raise

    def _join(self, members: tuple[int, ...], direct: tuple[str, str] | None) -> None:
        if direct is not None:
            self.direct = Direct(*direct, members, self._timeout)
        name = unique_name("scatter", members)
        group = self._group = new_subgroup(torch_distributed(), members, name, self._timeout, "gloo")
        # Not through the dispatcher, where modes of the caller's would see it.
        gloo = group._get_backend(torch.device("cpu"))
        arena = _native.SegmentArena(self._limit)
        self.courier = Courier()
        if self._place.rank != self._place.source:
            self.end = GlooReceiver(gloo, self.courier, arena, passes_on=bool(self.near))
            return
        self.far = [
            GlooSender(rank, gloo, position, arena) for position, rank in enumerate(members) if position > 0
        ]


def _is_same_user(line: socket.socket) -> bool:
    """Whether this process and the one on the other end of a unix socket act for the same user."""
    told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
