"""Access to the job's c10d key-value store that never blocks other users of it.

No operation waits for a key to appear: each returns as soon as the store answers. A client of a TCPStore handles one
request at a time, and the rendezvous of a new group may block it for minutes. So operations use a second connection.
The whole process shares it, because the rank that serves the store needs a file descriptor for each connection.

An operation blocks while the host of the store is stopped. Call it on a thread that others wait for with a timeout.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

# compare_set returns this for a key that does not exist. No stored value equals it.
_ABSENT = "\x00"
# Values fetched in one request.
_BATCH = 256
# Up to this many ranks the store answers all of them without noticeable delay.
_SMALL_JOB = 256

# The process's second client of each store, and the process that made it. It is closed with the store.
_shared_clients: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def torch_distributed() -> Any:
    """The module `torch.distributed`, imported on first use; None where torch was built without it."""
    import torch.distributed

    return torch.distributed if torch.distributed.is_available() else None


def store_load_factor(ranks: int) -> float:
    """How many times longer a wait for the store takes with so many `ranks` than with a few."""
    return max(1.0, ranks / _SMALL_JOB)


def job_start() -> str:
    """The number of this start of the job, the same on all ranks.

    torchrun restarts a job with the same store, and newer versions of torch add no prefix to the keys. With this number
    in its keys, no start reads the keys of an earlier one. With several torchrun agents it is always 0: each agent
    counts its own restarts, and ranks with different numbers would never meet.
    """
    is_one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_agent else "0"


def _tcp_store(store: Any) -> Any:
    """The TCPStore below all prefixes of `store`; None for another kind of store."""
    distributed = torch_distributed()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, distributed.TCPStore) else None


def store_host_rank(store: Any) -> int | None:
    """The global rank that serves `store`; None where torchrun serves it or it is no server (a file)."""
    if _tcp_store(store) is None:
        return None
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0


def store_address(store: Any) -> tuple[str, int] | None:
    """Host and port of a TCPStore; None for another kind of store."""
    server = _tcp_store(store)
    return None if server is None else (server.host, server.port)


def second_client(base: Any) -> Any:
    """A new connection to the store of client `base`; a copy of a store that has no connections."""
    if hasattr(base, "clone"):
        return base.clone()
    # Before torch 2.8 no store could be cloned.
    server = _tcp_store(base)
    if server is None:
        return base
    return torch_distributed().TCPStore(
        server.host, server.port, None, False, server.timeout, wait_for_workers=False
    )


def _shared_client(base: Any) -> Any:
    """This process's shared second client of the store of `base`."""
    process, client = _shared_clients.get(base, (0, None))
    if process != os.getpid():
        # Without a lock, since a connection to a host that is gone takes minutes: two threads may make one each.
        client = second_client(base)
        _shared_clients[base] = os.getpid(), client
    return client


class JobStore:
    """Operations on the keys under `namespace` of the default group's store `base`.

    One thread at a time may use it. It keeps `base` alive, and with it the server on the rank that hosts the store.
    """

    def __init__(self, base: Any, namespace: str) -> None:
        self._base = base
        self._namespace = namespace
        self._connection: Any = None
        # A PrefixStore refers to its store in C++ only, where Python does not see it.
        self._client: Any = None

    def connect(self) -> None:
        """Open the connection unless it is open."""
        if self._connection is not None:
            return
        distributed = torch_distributed()
        namespace = f"{self._namespace}/start-{job_start()}"
        if _tcp_store(self._base) is None:
            self._connection = distributed.PrefixStore(namespace, self._base)
            return
        if not hasattr(self._base, "clone"):
            # A second client lacks the prefixes of the first one, among them the number of an elastic restart.
            namespace = f"{namespace}/restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._client = _shared_client(self._base)
        self._connection = distributed.PrefixStore(namespace, self._client)

    def read(self, key: str) -> str | None:
        """The value of `key`; None where it does not exist."""
        value = bytes(self._ask("compare_set", key, _ABSENT, _ABSENT)).decode()
        return None if value == _ABSENT else value

    def read_all(self, keys: list[str]) -> list[str | None]:
        """The values of `keys`, in order, in few requests. No rank may delete one of the keys meanwhile."""
        missing = set(self.missing(keys))
        there = [key for key in keys if key not in missing]
        values: dict[str, str] = {}
        for start in range(0, len(there), _BATCH):
            some = there[start : start + _BATCH]
            found = self._ask("multi_get", some)
            values |= {key: bytes(value).decode() for key, value in zip(some, found, strict=True)}
        return [values.get(key) for key in keys]

    def write(self, key: str, value: str) -> None:
        """Set `key`. Other ranks may see the value only after this rank's next operation that returns something."""
        self._ask("set", key, value)

    def write_once(self, key: str, value: str) -> str:
        """Set `key` unless it exists; returns the value that it then has."""
        return bytes(self._ask("compare_set", key, "", value)).decode()

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key` (0 where it does not exist); returns the sum."""
        return int(self._ask("add", key, amount))

    def missing(self, keys: list[str]) -> list[str]:
        """Return the `keys` that do not exist, in order, by bisection: few requests where few are missing."""
        if not keys or self._ask("check", keys):
            return []
        if len(keys) == 1:
            return keys
        middle = len(keys) // 2
        return self.missing(keys[:middle]) + self.missing(keys[middle:])

    def delete(self, *keys: str) -> None:
        """Delete `keys`; a key that does not exist is ignored."""
        for key in keys:
            self._ask("delete_key", key)

    def close(self) -> None:
        """Release the connection and the store."""
        self._connection = self._client = None
        self._base = None

    def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._connection, operation)(*arguments)
        except Exception:
            # The connection may be broken: the next user makes a new one.
            if self._client is not None and _shared_clients.get(self._base, (0, None))[1] is self._client:
                _shared_clients.pop(self._base, None)
            self._connection = None
            raise
