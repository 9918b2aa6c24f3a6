"""How the ranks of a scatter connect to each other, once, before the first step.

Ranks of the source's node get their batches through shared memory. On another node, of the ranks that get the same
batch, the first receives it over gloo and passes it on.

Invariants:
- Ranks wait for each other in votes only, so all name a rank that fails or dies.
- After a failure all sockets are closed.
- Every user of the machine can find a socket in the abstract namespace. Both ends check that the other process belongs
  to the same user. A listener takes connections from the moment it has a name, so that strangers cannot fill its queue.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import struct
import threading
from datetime import timedelta
from typing import Any

import torch

from tundish import _native
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
from tundish.scatter.participants import Participants
from tundish.scatter.transport.channels import Channels
from tundish.scatter.transport.device import DeviceChannel
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender
from tundish.scatter.transport.liveness_sockets import LivenessListener, connect_to_source, is_source
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

__all__ = ["connect", "memory_limit"]

_BACKLOG = 4096
# Between two looks of the accepting thread whether it is to end.
_ACCEPT_SECONDS = 0.005
# The rank, before the address of its watch.
_HELLO = struct.Struct("<q")
_ADDRESS_BYTES = 108
# Process, user and group on the other end of a unix socket.
_CREDENTIALS = struct.Struct("iII")
_WHAT = "connecting the ranks of a scatter"

_Address = tuple[str, str, int]


def memory_limit(ranks: int) -> int:
    """Bytes of batches on their way for each of so many ranks of a node, and as many kept for the next batches.

    All ranks together have an eighth of the memory that this process can have, which may be less than the machine's.
    """
    return 2 * _native.default_arena_limit() // max(1, ranks)


def senders_of(nodes: list[tuple[int, ...]], participants: Participants) -> dict[int, int]:
    """By receiver, the rank of its own node that sends it its batches; none for ranks that receive over gloo."""
    senders = {}
    for node in nodes:
        first_of_batch: dict[int, int] = {}
        for rank in node:
            if rank != participants.source:
                first = first_of_batch.setdefault(participants.batch_number(rank), rank)
                if participants.source in node:
                    senders[rank] = participants.source
                elif first != rank:
                    senders[rank] = first
    return senders


def connect(
    voter: Voter,
    participants: Participants,
    *,
    timeout: timedelta,
    device_backend: tuple[str, str] | None,
) -> Channels:
    """Collective over the members of `voter`: the channels of this rank. The arguments are those of `ScatterRank`.

    Raises the errors of `Voter.vote`.
    """
    with contextlib.ExitStack() as temporary, contextlib.ExitStack() as on_failure:
        # A digest, as there may be thousands of ranks.
        ranks = hashlib.sha256(repr((participants.ranks, participants.batch_numbers)).encode()).hexdigest()[
            :16
        ]
        same = f"source {participants.source}, {len(participants.ranks)} ranks with the digest {ranks}"
        rendezvous = _Rendezvous(voter, participants, timeout, temporary)
        with voter.agreed(_WHAT, same=same, timeout=timeout):
            watch = PeerWatch()
            on_failure.callback(watch.close)
            rendezvous.listen(watch)
        nodes = nodes_of(voter, timeout=timeout) if watch.address else []
        senders = senders_of(nodes, participants)
        channels = Channels(watch, senders.get(participants.rank, participants.source))
        on_failure.callback(channels.close)
        rendezvous.exchange_addresses(senders, channels.sender_rank)
        # A connection and its first message wait in the backlog of the listener.
        with voter.agreed(_WHAT, timeout=timeout):
            own_node = next((node for node in nodes if participants.rank in node), None)
            channels.arena_limit = memory_limit(
                len(own_node) if own_node else env_integer("LOCAL_WORLD_SIZE", 1) or 1
            )
            rendezvous.connect_to_sender(channels)
        with voter.agreed(_WHAT, timeout=timeout):
            rendezvous.accept_receivers(channels)
        with voter.agreed(_WHAT, timeout=timeout):
            rendezvous.open_channels(channels, device_backend)
        on_failure.pop_all()
        return channels


class _Rendezvous:
    """The steps of `connect`, each between two votes. `temporary` holds what is closed afterwards."""

    def __init__(
        self, voter: Voter, participants: Participants, timeout: timedelta, temporary: contextlib.ExitStack
    ) -> None:
        self._voter = voter
        self._participants = participants
        self._timeout = timeout
        self._temporary = temporary
        self._is_source = participants.rank == participants.source
        # Of this rank, for ranks of its node and of other nodes.
        self._listener: _SameUserListener | None = None
        self._liveness_listener: LivenessListener | None = None
        # Addresses of the listener and the watch, and the process id, of this rank and of its sender.
        self._own_address: _Address | None = None
        self._sender_address: _Address | None = None
        self._invitation: Any = None
        self._to_source: socket.socket | None = None
        # By receiver of a node its sender, and the ranks that receive over gloo.
        self._senders: dict[int, int] = {}
        self._gloo_receivers: list[int] = []

    def listen(self, watch: PeerWatch) -> None:
        """Open the listener for ranks of this node, where the system has abstract sockets."""
        if not watch.address:
            return
        self._listener = self._temporary.enter_context(contextlib.closing(_SameUserListener()))
        self._own_address = self._listener.address, watch.address, os.getpid()

    def exchange_addresses(self, senders: dict[int, int], sender_rank: int) -> None:
        """Learn where this rank's sender listens."""
        participants = self._participants
        self._senders = senders
        self._gloo_receivers = [
            rank for rank in participants.ranks if rank not in senders and rank != participants.source
        ]
        if self._gloo_receivers and self._is_source:
            # Without it, because there are no descriptors left for example, timeouts have to do.
            with contextlib.suppress(OSError):
                self._liveness_listener = self._temporary.enter_context(
                    contextlib.closing(LivenessListener(group_info(None).store))
                )
        invitation = None if self._liveness_listener is None else self._liveness_listener.invitation
        text = self._voter.broadcast(
            json.dumps((self._own_address, invitation)), source=sender_rank, what=_WHAT, timeout=self._timeout
        )
        self._sender_address, self._invitation = json.loads(text)

    def connect_to_sender(self, channels: Channels) -> None:
        """Connect to this rank's sender."""
        rank = self._participants.rank
        if rank in self._senders and self._sender_address is not None:
            address, watch_address, process = self._sender_address
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channels.receiver = SharedMemoryReceiver(connection, process)
            connection.connect(f"\0{address}")
            if not _is_same_user(connection):
                raise PeerFailedError(
                    f"scatter: another user's process answers in place of rank {channels.sender_rank}: run all "
                    "ranks of a node as one user",
                    channels.sender_rank,
                )
            connection.sendall(_HELLO.pack(rank) + channels.watch.address.encode())
            channels.watch.connect({channels.sender_rank: watch_address})
        elif rank in self._gloo_receivers and self._invitation is not None:
            self._to_source = connect_to_source(self._invitation, rank)

    def accept_receivers(self, channels: Channels) -> None:
        """Accept the ranks that get their batches from this one."""
        receivers = [rank for rank, sender in self._senders.items() if sender == self._participants.rank]
        connections: dict[int, socket.socket] = {}
        try:
            for connection in [] if self._listener is None else self._listener.accepted():
                connection.settimeout(self._timeout.total_seconds())
                hello = connection.recv(_HELLO.size + _ADDRESS_BYTES)
                (rank,) = _HELLO.unpack_from(hello)
                connections[rank] = connection
                channels.watch.connect({rank: hello[_HELLO.size :].decode()})
            if self._listener is not None and (missing := set(receivers) - connections.keys()):
                raise PeerFailedError(
                    f"scatter: rank {min(missing)}, of this node, is another user's process: run all ranks of a "
                    "node as one user",
                    min(missing),
                )
            for rank in receivers:
                sender = SharedMemorySender(rank, connections[rank], channels.arena_limit)
                del connections[rank]
                channels.to_node.append(sender)
                sender.send_queue()
        finally:
            for connection in connections.values():
                connection.close()
        for rank, connection in (
            {} if self._liveness_listener is None else self._liveness_listener.accept()
        ).items():
            channels.watch.add_connection(rank, connection)

    def open_channels(self, channels: Channels, device_backend: tuple[str, str] | None) -> None:
        """Receive the sender's queue, and make the groups of the ranks of different nodes."""
        participants, gloo_receivers = self._participants, self._gloo_receivers
        if isinstance(channels.receiver, SharedMemoryReceiver):
            channels.receiver.receive_queue()
        if self._to_source is not None and is_source(self._to_source, self._invitation):
            channels.watch.add_connection(participants.source, self._to_source)
        if not gloo_receivers or not (self._is_source or participants.rank in gloo_receivers):
            return
        members = participants.source, *gloo_receivers
        # A rank that passes batches on needs them in host memory.
        if device_backend is not None and not any(rank in self._senders.values() for rank in gloo_receivers):
            channels.device = DeviceChannel(*device_backend, members, self._timeout)
        name = unique_name("scatter", members)
        channels.gloo_group = new_subgroup(torch_distributed(), members, name, self._timeout, "gloo")
        # torch's dispatcher would show these messages to the caller's dispatch modes.
        gloo = channels.gloo_group._get_backend(torch.device("cpu"))
        channels.arena = _native.SegmentArena(channels.arena_limit)
        if self._is_source:
            channels.to_other_nodes = [
                GlooSender(rank, gloo, position) for position, rank in enumerate(members) if position
            ]
        else:
            channels.receiver = GlooReceiver(
                gloo, channels.thread, channels.arena, passes_on=bool(channels.to_node)
            )


class _SameUserListener:
    """Listens in the abstract namespace, and keeps the connections of this user's processes. A thread takes them.

    Attributes:
        address: the name to connect to.
    """

    def __init__(self) -> None:
        self.address = f"tundish-scatter-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(_ACCEPT_SECONDS)
        self._kept: list[socket.socket] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="tundish-scatter-accept", daemon=True)
        self._thread.start()

    def accepted(self) -> list[socket.socket]:
        """End the thread, and return all connections that were made before this call."""
        self._end()
        # Strangers may go on, so no more than the queue can have held.
        self._listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BACKLOG + 1):
                self._accept()
        kept, self._kept = self._kept, []
        return kept

    def close(self) -> None:
        """Close the listener, and the connections that `accepted` did not return."""
        self._end()
        self._listener.close()
        for connection in self._kept:
            connection.close()

    def _end(self) -> None:
        self._is_ending.set()
        self._thread.join()

    def _accept_all(self) -> None:
        while not self._is_ending.is_set():
            try:
                self._accept()
            except TimeoutError:
                continue
            except OSError:
                # Out of descriptors, which may pass.
                self._is_ending.wait(_ACCEPT_SECONDS)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if _is_same_user(connection):
            self._kept.append(connection)
        else:
            connection.close()


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process on the other end of a unix socket belongs to this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
