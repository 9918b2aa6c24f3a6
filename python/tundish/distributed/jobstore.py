"""The job's c10d key-value store, reached so that no other user of it is ever held up.

Every operation here returns as soon as the store answers; none waits for a key. A TCPStore gets a
connection of its own, because one client serves one request at a time and others (the
rendezvous of a new group) block on theirs for minutes. All who come here share it, since none holds up the
next one: the rank that serves the store has a descriptor for each connection of every rank, of which a
system gives a process 1024 unless it is told otherwise. Other stores hold no connection and are polled.
An operation can still block while the host of the store is stopped: call from a thread that nobody
needs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

__all__ = [
    "JobStore",
    "Leaving",
    "SharedClients",
    "StoreClientPool",
    "second_client",
    "start_of_job",
    "store_address",
    "store_host_rank",
    "torch_distributed",
]

# What compare_set hands back for a key that does not exist; no value that is stored here equals it.
_ABSENT = "\x00"
# Values that are asked for in one request.
_AT_ONCE = 256


class SharedClients:
    """Second clients of stores: one of each for all who come, as long as somebody has it."""

    def __init__(self) -> None:
        # By the store that they were made of: the process that made one, and that one as long as it is used.
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        # Another thread of the parent may hold it.
        os.register_at_fork(after_in_child=self._renew_lock)

    def of(self, base: Any) -> Any:
        """This process's own client of the store that `base` is one of; whoever uses it keeps it."""
        with self._lock:
            client = self._standing(base)
        if client is not None:
            return client
        # Without the lock: to connect to a host that is gone takes minutes, and others may have another store by then.
        made = second_client(base)
        with self._lock:
            client = self._standing(base)
            if client is None:
                client = made
                self._known[base] = os.getpid(), weakref.ref(client)
        return client

    def is_replaced(self, base: Any, client: Any) -> bool:
        """Whether whoever comes next gets another one than `client`."""
        with self._lock:
            return self._standing(base) is not client

    def forget(self, base: Any, client: Any) -> None:
        """Let nobody else have this one."""
        with self._lock:
            if client is not None and self._standing(base) is client:
                del self._known[base]

    def _standing(self, base: Any) -> Any:
        """The client that this process has by now, or None; under the lock."""
        process, known = self._known.get(base, (0, None))
        return None if known is None or process != os.getpid() else known()

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()


class StoreClientPool:
    """Second clients of stores, each lent to one at a time, as what that one waits for holds up everything else on it.

    One that was given back is lent again, as long as somebody still has it.
    """

    def __init__(self) -> None:
        # By the store that they were made of: the process that made each, and it as long as it is used.
        self._idle: weakref.WeakKeyDictionary[Any, list[tuple[int, weakref.ref[Any]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        # Another thread of the parent may hold it.
        os.register_at_fork(after_in_child=self._renew_lock)

    def lend(self, base: Any) -> Any:
        """A client of the store that `base` is one of, which nobody else gets before it is given back."""
        with self._lock:
            idle = self._idle.get(base, [])
            while idle:
                process, known = idle.pop()
                client = known()
                if client is not None and process == os.getpid():
                    return client
        return second_client(base)

    def give_back(self, base: Any, client: Any) -> None:
        """Nothing waits on it any more."""
        with self._lock:
            self._idle.setdefault(base, []).append((os.getpid(), weakref.ref(client)))

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()


# For operations of which none holds up the next one.
_connections = SharedClients()


def torch_distributed() -> Any:
    """`torch.distributed`, imported on first use; None where this torch was built without it."""
    import torch.distributed

    return torch.distributed if torch.distributed.is_available() else None


def start_of_job() -> str:
    """Which start of the job this is, the same on all ranks: torchrun starts it again and keeps the store.

    What the start before left in there must not be read by this one, and newer torch puts no prefix of its own before
    the keys. Always that of the first where several agents start ranks: each counts its own restarts, and ranks that
    count differently would never meet.
    """
    is_one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_agent else "0"


def _tcp_store(store: Any) -> Any:
    """The TCPStore under all layers of prefixes; None where another kind of store lies there."""
    distributed = torch_distributed()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, distributed.TCPStore) else None


def store_host_rank(store: Any) -> int | None:
    """The global rank whose death takes `store` along: 0 where it serves a TCPStore itself.

    None where the launcher serves the store (torchrun) or it is no server (a file).
    """
    if _tcp_store(store) is None:
        return None
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0


def store_address(store: Any) -> tuple[str, int] | None:
    """Host and port at which `store` is served; None where it is not a TCPStore."""
    server = _tcp_store(store)
    return None if server is None else (server.host, server.port)


def second_client(base: Any) -> Any:
    """A connection of its own to the store that `base` is a client of; of a store without connections, a copy."""
    if hasattr(base, "clone"):
        return base.clone()
    # Before torch 2.8 no store could be cloned.
    server = _tcp_store(base)
    if server is None:
        return base
    return torch_distributed().TCPStore(
        server.host, server.port, None, False, server.timeout, wait_for_workers=False
    )


class Leaving:
    """Keys under `prefix` of the store that `base` is a client of, which the last of `size` ranks that leave deletes.

    Connected from the start on: where the host of the store has left before, that shows at once. Before torch 2.8 the
    keys stay, as a second client does not see the prefixes of the first; so do those of ranks of which one is gone.
    """

    def __init__(self, base: Any, prefix: str, size: int, keys: Sequence[str]) -> None:
        self._store: Any = None
        self._size = size
        self._keys = keys
        if hasattr(base, "clone"):
            # Kept here, as the other holds it in C++ alone.
            self._shared = _connections.of(base)
            self._store = torch_distributed().PrefixStore(prefix, self._shared)

    def leave(self) -> None:
        """Once on each rank, when it reads none of them any more. Raises what the store fails with."""
        if self._store is not None and self._store.add("left", 1) == self._size:
            for key in (*self._keys, "left"):
                self._store.delete_key(key)


class JobStore:
    """Operations on the keys under `namespace` of the default group's store `base`.

    To be used by one thread at a time. Keeps `base` alive, and with it the server on the rank that
    hosts one.
    """

    def __init__(self, base: Any, namespace: str) -> None:
        self._base = base
        self._namespace = namespace
        self._connection: Any = None
        self._shared: Any = None

    def connect(self) -> None:
        """Open the connection, or another one where this one broke since, in whoever's hands."""
        if self._connection is not None and not self._is_broken():
            return
        distributed = torch_distributed()
        namespace = f"{self._namespace}/start-{start_of_job()}"
        if _tcp_store(self._base) is None:
            self._connection = distributed.PrefixStore(namespace, self._base)
            return
        if not hasattr(self._base, "clone"):
            # A second client does not see the prefixes of the first, one of which tells the restarts of an elastic job
            # apart.
            namespace = f"{namespace}/restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        # Kept here, as the other holds it in C++ alone.
        self._shared = _connections.of(self._base)
        self._connection = distributed.PrefixStore(namespace, self._shared)

    def read(self, key: str) -> str | None:
        """The value of `key`; None where it does not exist. Never waits for it."""
        value = bytes(self._ask("compare_set", key, _ABSENT, _ABSENT)).decode()
        return None if value == _ABSENT else value

    def read_all(self, keys: list[str]) -> list[str | None]:
        """The values of `keys`, in order and in few requests; of keys that nobody deletes meanwhile."""
        missing = set(self.missing(keys))
        there = [key for key in keys if key not in missing]
        values: dict[str, str] = {}
        for start in range(0, len(there), _AT_ONCE):
            some = there[start : start + _AT_ONCE]
            found = self._ask("multi_get", some)
            values |= {key: bytes(value).decode() for key, value in zip(some, found, strict=True)}
        return [values.get(key) for key in keys]

    def write_once(self, key: str, value: str) -> str:
        """Set `key` unless it exists; returns the value that it then has, which all callers agree on."""
        return bytes(self._ask("compare_set", key, "", value)).decode()

    def replace(self, key: str, before: str, value: str) -> None:
        """Set `key`, which was read as `before`, unless it has another value by now or is gone."""
        self._ask("compare_set", key, before, value)

    def write(self, key: str, value: str) -> None:
        """Set `key`. The store may not have taken it in before the next operation that answers."""
        self._ask("set", key, value)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` (0 where it does not exist); returns the sum."""
        return int(self._ask("add", key, amount))

    def all_exist(self, keys: list[str]) -> bool:
        """Whether all of `keys` exist; true for none."""
        return not keys or bool(self._ask("check", keys))

    def missing(self, keys: list[str]) -> list[str]:
        """Those of `keys` that do not exist, in order, by halving: few requests where few are missing."""
        if self.all_exist(keys):
            return []
        if len(keys) == 1:
            return keys
        middle = len(keys) // 2
        return self.missing(keys[:middle]) + self.missing(keys[middle:])

    def delete(self, *keys: str) -> None:
        """Remove `keys`; one that does not exist is passed over."""
        for key in keys:
            self._ask("delete_key", key)

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            return getattr(self._connection, what)(*arguments)
        except Exception:
            # Whoever comes next is not to get one that may be broken.
            _connections.forget(self._base, self._shared)
            raise

    def _is_broken(self) -> bool:
        """Whether somebody found that the connection is; what holds none never is."""
        return self._shared is not None and _connections.is_replaced(self._base, self._shared)

    def close(self) -> None:
        """Let go of the connection and of the store."""
        self._connection = self._shared = None
        self._base = None
