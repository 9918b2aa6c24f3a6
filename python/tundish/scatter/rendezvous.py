"""How the ranks of a scatter connect to each other, once, before the first step: `connect` returns their `Channels`.

Ranks of the source's node get their batches through shared memory. On another node, of the ranks that get the same
batch, the first receives it over gloo and passes it on.

gloo does not always say that a peer is gone: a rank in the middle of a message may wait for a dead one without end. So
the source and ranks of other nodes keep TCP connections, on which nothing travels after the handshake. Where none can
be made, because of a firewall for example, only timeouts tell of a lost rank.

Invariants:
- Ranks wait for each other in votes only, so all name a rank that fails or dies.
- After a failure all sockets are closed.
- Every user of the machine can find a socket in the abstract namespace. Both ends check that the other process belongs
  to the same user. A listener takes connections from the moment it has a name, so that strangers cannot fill its queue.
- A connection between nodes is kept only where both ends showed the secrets that the source sent through the job's
  store.
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
from tundish.daemon_thread import DaemonThread
from tundish.distributed import (
    PeerWatch,
    Voter,
    env_integer,
    group_info,
    new_subgroup,
    nodes_of,
    second_client,
    store_address,
    torch_distributed,
    unique_name,
)
from tundish.errors import PeerFailedError
from tundish.own_address import OUTSIDE, address_towards
from tundish.scatter.participants import Participants
from tundish.scatter.transport.device import DeviceChannel
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender
from tundish.scatter.transport.message import Receiver, Sender
from tundish.scatter.transport.shared_memory import NodeSender, SharedMemoryReceiver, SharedMemorySender

_WHAT = "connecting the ranks of a scatter"
_BACKLOG = 4096

# On a node: between two looks of the accepting thread whether it is to end.
_ACCEPT_SECONDS = 0.005
# The rank, before the address of its watch.
_HELLO = struct.Struct("<q")
_ADDRESS_BYTES = 108
# Process, user and group on the other end of a unix socket.
_CREDENTIALS = struct.Struct("iII")

# Between nodes: how long a connection may take, and the secret and rank that a receiver shows.
_CONNECT_SECONDS = 2.0
_SECRET_BYTES = 16
_SECRET_HELLO = struct.Struct(f"<{_SECRET_BYTES}sq")
# A machine that vanished is asked after 10 s of silence, three times, every 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

# Name of the listener, address of the watch, process.
_Address = tuple[str, str, int]
# Hosts, port, the secret that a receiver shows, the secret that the source shows.
_Invitation = tuple[list[str], int, str, str]


class Channels:
    """The channels of one rank in a scatter; `close` them.

    Attributes:
        watch: notices when a rank on the other end of a channel is gone.
        sender_rank: the rank that sends this one its batches: the source, or a rank of this node.
        receiver: on all ranks but the source, for the batches that come.
        to_node: on the source, to ranks of its node; else to ranks of this node that get the same batch as this one.
        to_other_nodes: on the source, to ranks of other nodes, if there are any.
        device: between devices of different nodes, where the group has a backend for that.
        thread: waits in gloo.
    """

    def __init__(self, watch: PeerWatch, sender_rank: int) -> None:
        self.watch = watch
        self.sender_rank = sender_rank
        self.receiver: Receiver | None = None
        self.to_node = NodeSender()
        self.to_other_nodes: GlooSender | None = None
        self.device: DeviceChannel | None = None
        self.thread = DaemonThread("tundish-scatter")
        self.gloo_group: _NodesGroup | None = None

    @property
    def senders(self) -> list[Sender]:
        """To all ranks that get their batches from this one."""
        return [self.to_node] if self.to_other_nodes is None else [self.to_node, self.to_other_nodes]

    @property
    def receivers(self) -> list[int]:
        """All ranks that get their batches from this one."""
        return [rank for sender in self.senders for rank in sender.ranks]

    def close(self) -> None:
        """Close sockets and free memory; not collective. The other ranks see this one leave."""
        self.watch.close()
        self.to_node.close()
        if self.receiver is not None:
            self.receiver.close()
        self.thread.close()
        self.to_other_nodes, self.receiver = None, None
        group, self.gloo_group = self.gloo_group, None
        _close_group(group)


class _NodesGroup:
    """The gloo group of the source and the ranks of other nodes. Making it is collective over these `members`.

    Attributes:
        group: the `ProcessGroup`.
    """

    def __init__(self, members: tuple[int, ...], timeout: timedelta) -> None:
        distributed = torch_distributed()
        # gloo blocks its client of the job's store while it waits for a rank.
        self._client = second_client(distributed.distributed_c10d._get_default_store())
        name = unique_name("scatter", members)
        self.group = new_subgroup(distributed, members, name, timeout, "gloo", self._client)


def _close_group(group: _NodesGroup | None) -> None:
    """Destroy a group, if there is one. Never raises."""
    if group is None:
        return
    # The default group takes all others along when it is destroyed.
    with contextlib.suppress(Exception):
        distributed = torch_distributed()
        if distributed.is_initialized() and group.group in distributed.distributed_c10d._world.pg_map:
            distributed.destroy_process_group(group.group)


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
            rendezvous.memory_limit = memory_limit(
                len(own_node) if own_node else env_integer("LOCAL_WORLD_SIZE", 1) or 1
            )
            rendezvous.connect_to_sender(channels)
        with voter.agreed(_WHAT, timeout=timeout):
            rendezvous.accept_receivers(channels)
        if rendezvous.connects_nodes:
            # gloo holds the thread that connects, even against Ctrl-C.
            channels.gloo_group = voter.run(
                rendezvous.connect_nodes,
                what=_WHAT,
                undo=_close_group,
                timeout=timeout,
            )
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
        self.memory_limit = 0
        # Of this rank, for ranks of its node and of other nodes.
        self._listener: _SameUserListener | None = None
        self._liveness_listener: _LivenessListener | None = None
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
                    contextlib.closing(_LivenessListener(group_info(None).store))
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
            self._to_source = _connect_to_source(self._invitation, rank)

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
                sender = SharedMemorySender(rank, connections[rank], self.memory_limit)
                del connections[rank]
                channels.to_node.add(sender)
                sender.send_queue()
        finally:
            for connection in connections.values():
                connection.close()
        for rank, connection in (
            {} if self._liveness_listener is None else self._liveness_listener.accept()
        ).items():
            channels.watch.add_connection(rank, connection)

    @property
    def connects_nodes(self) -> bool:
        """Whether some ranks receive over gloo; the same on all."""
        return bool(self._gloo_receivers)

    def connect_nodes(self) -> _NodesGroup | None:
        """Collective: the group of the source and of the ranks that receive over gloo; None on the others."""
        if self._is_source or self._participants.rank in self._gloo_receivers:
            return _NodesGroup((self._participants.source, *self._gloo_receivers), self._timeout)
        return None

    def open_channels(self, channels: Channels, device_backend: tuple[str, str] | None) -> None:
        """Receive the sender's queue, and open the channels between nodes."""
        participants, gloo_receivers = self._participants, self._gloo_receivers
        if isinstance(channels.receiver, SharedMemoryReceiver):
            channels.receiver.receive_queue()
        if self._to_source is not None and _is_source(self._to_source, self._invitation):
            channels.watch.add_connection(participants.source, self._to_source)
        if channels.gloo_group is None:
            return
        # A rank that passes batches on needs them in host memory.
        if device_backend is not None and not any(rank in self._senders.values() for rank in gloo_receivers):
            members = participants.source, *gloo_receivers
            channels.device = DeviceChannel(*device_backend, members, self._timeout)
        # torch's dispatcher would show these messages to the caller's dispatch modes.
        gloo = channels.gloo_group.group._get_backend(torch.device("cpu"))
        arena, thread = _native.SegmentArena(self.memory_limit), channels.thread
        if self._is_source:
            channels.to_other_nodes = GlooSender(gloo, gloo_receivers, thread, arena, self.memory_limit)
        else:
            channels.receiver = GlooReceiver(gloo, thread, arena, passes_on=bool(channels.to_node.ranks))


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


class _LivenessListener:
    """The source's end of the connections between nodes. `store`: the job's store."""

    def __init__(self, store: Any) -> None:
        self._secrets = secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
        )
        port: int = self._listener.getsockname()[1]
        receivers_secret, own_secret = (one.hex() for one in self._secrets)
        self.invitation: _Invitation = _own_addresses(store), port, receivers_secret, own_secret

    def accept(self) -> dict[int, socket.socket]:
        """The connections that ranks have made by now."""
        found: dict[int, socket.socket] = {}
        self._listener.settimeout(0)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                rank = self._rank_of(connection)
                if rank is None:
                    connection.close()
                else:
                    found[rank] = connection
        return found

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _rank_of(self, connection: socket.socket) -> int | None:
        receivers_secret, own_secret = self._secrets
        # A receiver of this job has sent its hello before the vote that led here.
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            hello = connection.recv(_SECRET_HELLO.size)
            if len(hello) == _SECRET_HELLO.size:
                secret, rank = _SECRET_HELLO.unpack(hello)
                if secrets.compare_digest(secret, receivers_secret):
                    connection.sendall(own_secret)
                    _keep_alive(connection)
                    return int(rank)
        return None


def _connect_to_source(invitation: _Invitation, rank: int) -> socket.socket | None:
    """A connection to the source, on which this rank has sent its number; None if the source cannot be reached."""
    hosts, port, receivers_secret, _ = invitation
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            try:
                connection.sendall(_SECRET_HELLO.pack(bytes.fromhex(receivers_secret), rank))
            except OSError:
                connection.close()
                raise
            return connection
    return None


def _is_source(connection: socket.socket, invitation: _Invitation) -> bool:
    """Whether the other end shows the source's secret; else the connection is closed."""
    with contextlib.suppress(OSError):
        connection.settimeout(_CONNECT_SECONDS)
        secret = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL)
        if secrets.compare_digest(secret, bytes.fromhex(invitation[3])):
            _keep_alive(connection)
            return True
    connection.close()
    return False


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _own_addresses(store: Any) -> list[str]:
    """Addresses at which other nodes may reach this machine, the most likely first."""
    store_host = store_address(store)
    to_store = None if store_host is None else address_towards(store_host)
    to_others = address_towards(OUTSIDE)
    if to_store is not None and to_store.startswith("127."):
        # This machine serves the store, and may know its own name for a loopback address.
        to_store, to_others = to_others, to_store
    return list(dict.fromkeys(address for address in (to_store, to_others) if address is not None))
