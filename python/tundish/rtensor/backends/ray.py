"""Tensors in Ray's object store: the bytes go as Ray has them go, everything else is as over HTTP.

Owns the references of what this process put there. What always holds: each of them stands for a shard without bytes
in this process's own store, so that claims, removals and drains of that shard drop the reference; what is fetched
is in the fetch buffer, as a copy, and ends with its step. Ray frees an object when the last reference to it is
gone: that of its owner, and those in handles. Ray is never asked for anything when this process has left the cluster
that it was in: it would start another one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tundish._native import RTensor, ShardStore, ShardView
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    ShardGoneError,
    ShardMismatchError,
    StoreFullError,
    TimedOutError,
    TransferError,
    missing_extra,
)
from tundish.rawbytes import raw_bytes
from tundish.rtensor.backends.backend import Removed
from tundish.rtensor.backends.store import StoreBackend
from tundish.rtensor.handles import TensorShardInfo
from tundish.rtensor.server import server_address

__all__ = ["RayBackend"]

# How soon a reference is let go of after its shard.
_REAPING_SECONDS: Final = 0.2
# Ray counts the milliseconds of a wait, in a number that has an end.
_LONGEST_SECONDS: Final = 1e9
# Between two looks for room.
_TURN_SECONDS: Final = 0.02


class RayBackend(StoreBackend):
    """Tensors lie in the object store of the Ray cluster that this process is connected to (`ray.init`).

    Handles carry a reference, so they travel as arguments and results of Ray's functions and actors, not through
    `dumps`. `serve(limit_bytes=…)` bounds what this process puts there.

    Raises `MissingExtraError` without ray, `InvalidInputError` where this process is not connected, also when it was
    disconnected since and tensors are stored or fetched.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            missing_extra("ray", "ray", "RayBackend")
        if not ray.is_initialized():
            raise InvalidInputError("this process is not connected to Ray: call ray.init() first")
        self._ray: Any = ray
        self._connection = self._connected_as()
        self._lock = threading.Lock()
        self._stored: dict[str, RTensor] = {}
        self._bytes: dict[str, int] = {}
        # Of all of them, and of what is being put.
        self._used = 0
        self._reaper: threading.Thread | None = None

    def address(self) -> str:
        return server_address()

    def _connected_as(self) -> tuple[str, str] | None:
        """What tells this connection to a cluster from an earlier or a later one."""
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_node_id(), context.get_worker_id()

    def _check_connected(self) -> None:
        connection = self._connected_as()
        if connection != self._connection:
            since = "" if connection is None else ", and ray.init() after that"
            raise InvalidInputError(
                f"this process is no longer connected to the Ray cluster that RayBackend() was made in: ray.shutdown() "
                f"was called{since}; what was stored there is gone. Call set_backend(RayBackend()) after ray.init()"
            )

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        self._check_connected()
        address = self.address()
        with self._room(sum(tensor.nbytes for tensor in tensors), timeout):
            references = [self._put(tensor) for tensor in tensors]
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            places = ShardStore.put([nothing] * len(tensors), address, timeout)
            return [self._handle(*one) for one in zip(places, tensors, references, strict=True)]

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        self._check_connected()
        address = self.address()
        with self._room(tensor.nbytes, timeout):
            reference = self._put(tensor)
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            place = ShardStore.put_as(shard_id, nothing, address, timeout)
            return self._handle(place, tensor, reference)

    def own(self, shard_id: str) -> RTensor:
        self.let_go([shard_id])
        with self._lock:
            handle = self._stored.get(shard_id)
        if handle is None:
            raise ShardGoneError(
                f"this process has no shard {shard_id}: it was removed or drained, or never stored"
            )
        return handle

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> Sequence[ShardView]:
        return ShardStore.fetch_through(list(handles), self._getter(handles, timeout), timeout)

    def fetch_into(self, handles: Sequence[RTensor], targets: Sequence[Tensor], timeout: float) -> None:
        get = self._getter(handles, timeout)
        for target, values in zip(targets, get(range(len(handles))), strict=True):
            raw_bytes(target).numpy()[:] = values

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        names = list(shard_ids)
        removed = super().remove(names)
        removed["total_bytes"] = self.let_go(names)
        return removed

    def clear(self) -> Removed:
        removed = super().clear()
        removed["total_bytes"] = self.let_go()
        return removed

    def stats(self) -> dict[str, Any]:
        self.let_go()
        found = super().stats()
        with self._lock:
            found["storage"]["total_bytes"] += sum(self._bytes.values())
            found["storage"]["memory"]["used_bytes"] += self._used
        return found

    def let_go(self, shard_ids: Iterable[str] | None = None) -> int:
        """Drop the references of shards that are gone, of these or of all; bytes that they took in Ray's store."""
        with self._lock:
            known = self._stored if shard_ids is None else self._stored.keys() & set(shard_ids)
            gone = ShardStore.absent(list(known))
            dropped, before = [], self._used
            for shard_id in gone:
                dropped.append(self._stored[shard_id])
                # As above.
                self._used -= self._bytes[shard_id]
                del self._stored[shard_id], self._bytes[shard_id]
            size = before - self._used
        for handle in dropped:
            handle.forget()
        return size

    def _put(self, tensor: Tensor) -> Any:
        values = raw_bytes(tensor).numpy()
        try:
            return self._ray.put((str(tensor.dtype), tuple(tensor.shape), values))
        except self._ray.exceptions.ObjectStoreFullError as error:
            raise StoreFullError(
                f"{tensor.nbytes} bytes do not fit in Ray's object store: drain what was consumed"
            ) from error

    @contextlib.contextmanager
    def _room(self, size: int, timeout: float) -> Iterator[None]:
        """Room for so many bytes within this process's limit. Raises `StoreFullError`."""
        deadline = time.monotonic() + timeout
        limit: int = json.loads(ShardStore.stats())["storage"]["memory"]["limit_bytes"]
        taken = 0
        try:
            while True:
                with self._lock:
                    used = self._used
                    if used + size <= limit:
                        # Both before Ctrl-C can come.
                        self._used += size
                        taken = size
                        break
                # A look through all that is stored, which is worth it only where there is no room.
                if self.let_go():
                    continue
                if size > limit or time.monotonic() >= deadline:
                    raise StoreFullError(
                        f"{size} bytes do not fit in the storage: {used} of its {limit} bytes are in use; drain what "
                        "was consumed, or raise the limit"
                    )
                time.sleep(_TURN_SECONDS)
            yield
        finally:
            # What was put is counted by its handle.
            with self._lock:
                self._used -= taken

    def _handle(self, place: RTensor, tensor: Tensor, reference: Any) -> RTensor:
        shard = TensorShardInfo(place.shard_id, place.node_addr, reference)
        handle = RTensor(shard, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        # The caller may forget what its handle refers to; this process does not.
        name, size, own = place.shard_id, tensor.nbytes, handle.with_ref(reference)
        with self._lock:
            # One of this name may have been drained just now, and not been let go of yet.
            before = self._bytes.get(name, 0)
            # All three before Ctrl-C can come: nothing is called.
            self._stored[name] = own
            self._bytes[name] = size
            self._used += size - before
            if self._reaper is None:
                reaper = threading.Thread(
                    target=_reap, name="tundish-rtensor-ray", args=(weakref.ref(self),), daemon=True
                )
                reaper.start()
                # Not before it is there; of two, each lets go of what is gone.
                self._reaper = reaper
        return handle

    def _getter(self, handles: Sequence[RTensor], timeout: float) -> Any:
        def get(places: Sequence[int]) -> list[Any]:
            wanted = [handles[place] for place in places]
            references = []
            for handle in wanted:
                reference = handle.ref
                if reference is None:
                    raise ShardGoneError(
                        f"shard {handle.shard_id} was drained or removed: its handle refers to nothing any more"
                    )
                if not isinstance(reference, self._ray.ObjectRef):
                    raise InvalidTypeError(
                        f"the ref of shard {handle.shard_id} is a {type(reference).__qualname__}, not an ObjectRef of "
                        "Ray"
                    )
                references.append(reference)
            first = wanted[0]
            self._check_connected()
            try:
                found = self._ray.get(references, timeout=min(timeout, _LONGEST_SECONDS))
            except self._ray.exceptions.GetTimeoutError as error:
                raise TimedOutError(
                    f"waited in vain for shard {first.shard_id} of {first.node_addr}: the time that was given is over"
                ) from error
            except self._ray.exceptions.RayError as error:
                raise TransferError(
                    f"cannot fetch shard {first.shard_id} from {first.node_addr}, of {len(references)}: {error}"
                ) from error
            return [_bytes_of(handle, value) for handle, value in zip(wanted, found, strict=True)]

        return get


def _bytes_of(handle: RTensor, value: Any) -> Any:
    """The bytes of the rows that a handle means, of what its reference leads to: dtype, shape and bytes."""
    match value:
        case (str(dtype), tuple(shape), np.ndarray() as values):
            pass
        case _:
            raise ShardMismatchError(
                f"the ref of shard {handle.shard_id} of {handle.node_addr} leads to a {type(value).__qualname__} that "
                "is no shard"
            )
    rows, declared = handle.rows, tuple(handle.shape)
    if dtype != str(handle.dtype) or (shape if rows is None else (rows[1] - rows[0], *shape[1:])) != declared:
        raise ShardMismatchError(
            f"shard {handle.shard_id} of {handle.node_addr} is {dtype} of shape {shape}, and its handle declares "
            f"{handle.dtype} of shape {declared}"
        )
    if rows is None:
        return np.ascontiguousarray(values)
    width = len(values) // shape[0] if shape[0] else 0
    return np.ascontiguousarray(values[rows[0] * width : rows[1] * width])


def _reap(backend: weakref.ref[RayBackend]) -> None:
    """Let go of references as long as the backend is used."""
    pause = threading.Event()
    while (one := backend()) is not None:
        one.let_go()
        del one
        pause.wait(_REAPING_SECONDS)
