"""Backends: where tensors are stored, and how they are fetched.

An empty shard in this process's `ShardStore` represents each tensor in Ray's store: claims, removals and drains of that
shard release the reference. Ray frees an object when its last reference is gone: the owner's and those in handles.

Invariants:
    The `ShardStore` knows every shard, so that claims and drains reach it.
    Ray is not called after this process has left its cluster: it would start another one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor

from tundish._native import RTensor, ShardStore
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    ShardGoneError,
    ShardMismatchError,
    TensorStoreFullError,
    TimedOutError,
    TransferError,
    format_type,
    missing_extra,
)
from tundish.rtensor.dense_tensors import tensors_over
from tundish.rtensor.handles import TensorShardInfo
from tundish.tensor_bytes import raw_bytes


class Removed(TypedDict):
    """The counts of a removal: shards that were removed, their tensors (one each) and bytes."""

    cleared_count: int
    num_tensors: int
    total_bytes: int


class BackedStore(Protocol):
    """The store that a backend works for: a `TensorStore`."""

    shards: ShardStore

    def address(self) -> str:
        """The address of its server, which starts if there is none."""


class Backend:
    """The base class of backends: stores the tensors of its store and fetches those of others.

    A subclass may override any method. Several threads may call each method at once.

    Attributes:
        shared_memory: whether shards of owners on this node are read from the owner's shared memory.
        tensor_store: the store that it works for; `set_backend` sets it.

    Example:
        >>> import tundish as td
        >>> class ForwardedBackend(td.rtensor.HttpBackend):
        ...     def address(self):
        ...         return "gateway:7000"  # forwards to the server of this process
        >>> td.rtensor.set_backend(ForwardedBackend())
        >>> td.rtensor.set_backend(None)
    """

    shared_memory = True
    tensor_store: BackedStore

    def attach(self, tensor_store: BackedStore) -> None:
        """Bind this backend to a store.

        Args:
            tensor_store: the store.

        Raises:
            InvalidInputError: this backend works for another store.
        """
        if getattr(self, "tensor_store", tensor_store) is not tensor_store:
            raise InvalidInputError("this backend works for another store: make one for each store")
        self.tensor_store = tensor_store

    @property
    def shards(self) -> ShardStore:
        """The shards of its store."""
        return self.tensor_store.shards

    def address(self) -> str:
        """Return the owner's address in handles of its store's shards.

        Returns:
            The address, `"host:port"`.
        """
        return self.tensor_store.address()

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        """Store copies of tensors, all of them or none.

        Args:
            tensors: dense CPU tensors.
            timeout: seconds to wait for memory.

        Returns:
            The handle of each tensor.
        """
        return self.shards.put(list(tensors), self.address(), timeout)

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        """Store a copy of one tensor under a name.

        Args:
            shard_id: the name.
            tensor: a dense CPU tensor.
            timeout: seconds to wait for memory.

        Returns:
            The handle.
        """
        return self.shards.put_as(shard_id, tensor, self.address(), timeout)

    def handle_of(self, shard_id: str) -> RTensor:
        """Return the handle of a shard of its store.

        Args:
            shard_id: the name of the shard.

        Returns:
            The handle.
        """
        return self.shards.handle_of(shard_id, self.address())

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        """Fetch the tensors of handles.

        Args:
            handles: the handles; no two are equal.
            timeout: seconds until everything has arrived.

        Returns:
            CPU tensors in the order of the handles, which the caller may write to.
        """
        return tensors_over(self.shards.fetch(list(handles), timeout, self.shared_memory), handles)

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        """Remove shards of its store, and their fetched copies.

        Args:
            shard_ids: the names of the shards.

        Returns:
            The counts of what was removed.
        """
        return _removed(self.shards.remove(shard_ids))

    def clear(self) -> Removed:
        """Remove all stored and fetched shards of its store.

        Returns:
            The counts of what was removed.
        """
        return _removed(self.shards.clear())

    def stats(self) -> dict[str, Any]:
        """Count what its store holds and has fetched.

        Returns:
            `storage`, `buffer` and `steps`.
        """
        found: dict[str, Any] = json.loads(self.shards.stats())
        return found

    def numbers(self) -> dict[str, int | float]:
        """Count the same in one flat dict.

        Returns:
            Numbers by name; see `stats`.
        """
        return self.shards.numbers()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _removed(counts: tuple[int, int, int]) -> Removed:
    cleared, tensors, total = counts
    return {"cleared_count": cleared, "num_tensors": tensors, "total_bytes": total}


class HttpBackend(Backend):
    """Tensors stay in the process that made them, which serves them over HTTP; on its node, through shared memory.

    Args:
        shared_memory: whether tensors of owners on the same node are read from their memory, not over a socket.

    Example:
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.HttpBackend(shared_memory=False))
        >>> td.rtensor.set_backend(None)
    """

    def __init__(self, *, shared_memory: bool = True) -> None:
        self.shared_memory = shared_memory

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shared_memory={self.shared_memory})"


# The address of a `LocalBackend`'s shards.
LOCAL_ADDRESS: Final = "local"


class LocalBackend(Backend):
    """Tensors stay in this process, and no other process can fetch them. For jobs of one process, and for tests.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
        >>> td.rtensor.remotize(torch.ones(2)).node_addr
        'local'
        >>> td.rtensor.set_backend(None)
    """

    def attach(self, tensor_store: BackedStore) -> None:
        super().attach(tensor_store)
        self.shards.add_own_address(LOCAL_ADDRESS)

    def address(self) -> str:
        return LOCAL_ADDRESS

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        for handle in handles:
            if handle.node_addr != LOCAL_ADDRESS:
                raise InvalidInputError(
                    f"{handle} is served over the network, and LocalBackend reads this process only: use HttpBackend"
                )
        return super().fetch(handles, timeout)


# How soon a reference is released after its shard.
_RELEASE_SECONDS: Final = 0.2
# Ray's timeout is a bounded number of milliseconds.
_LONGEST_SECONDS: Final = 1e9
_RETRY_SECONDS: Final = 0.02


class RayBackend(Backend):
    """Tensors are stored in the object store of the Ray cluster that this process is connected to (`ray.init`).

    Handles carry an `ObjectRef`: they travel as arguments and results of Ray's functions and actors, not through
    `dumps`. `serve(limit_bytes=…)` limits what this process stores there.

    Raises:
        MissingExtraError: ray is not installed.
        InvalidInputError: this process is not connected to a cluster, or not to the same one when it stores or
            fetches.

    Example:
        In every process of the job:

            ray.init()
            td.rtensor.set_backend(td.rtensor.RayBackend())
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            missing_extra("ray", "ray", "RayBackend")
        if not ray.is_initialized():
            raise InvalidInputError("this process is not connected to Ray: call ray.init() first")
        self._ray: Any = ray
        self._connection = self._current_connection()
        self._lock = threading.Lock()
        self._stored: dict[str, RTensor] = {}
        # The bytes of all these, and of tensors that are being stored.
        self._used = 0
        self._releaser: threading.Thread | None = None

    def store(self, tensors: Sequence[Tensor], timeout: float) -> list[RTensor]:
        def put(empty: Tensor) -> list[RTensor]:
            return self.shards.put([empty] * len(tensors), self.address(), timeout)

        return self._store(tensors, put, timeout)

    def store_as(self, shard_id: str, tensor: Tensor, timeout: float) -> RTensor:
        def put(empty: Tensor) -> list[RTensor]:
            return [self.shards.put_as(shard_id, empty, self.address(), timeout)]

        return self._store([tensor], put, timeout)[0]

    def handle_of(self, shard_id: str) -> RTensor:
        self._release([shard_id])
        with self._lock:
            handle = self._stored.get(shard_id)
        if handle is None:
            raise ShardGoneError(
                f"this process has no shard {shard_id}: it was removed or drained, or never stored"
            )
        return handle

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        # They can be trained with even if they are made in inference mode.
        with torch.inference_mode(False):
            tensors = [torch.empty(handle.shape, dtype=handle.dtype, device="cpu") for handle in handles]
            for tensor, values in zip(tensors, self._get(handles, timeout), strict=True):
                raw_bytes(tensor).numpy()[:] = values
        return tensors

    def remove(self, shard_ids: Iterable[str]) -> Removed:
        names = list(shard_ids)
        removed = super().remove(names)
        removed["total_bytes"] = self._release(names)
        return removed

    def clear(self) -> Removed:
        removed = super().clear()
        removed["total_bytes"] = self._release()
        return removed

    def stats(self) -> dict[str, Any]:
        self._release()
        found = super().stats()
        with self._lock:
            found["storage"]["total_bytes"] += sum(handle.nbytes for handle in self._stored.values())
            found["storage"]["memory"]["used_bytes"] += self._used
        return found

    def numbers(self) -> dict[str, int | float]:
        self._release()
        found = super().numbers()
        with self._lock:
            found["stored_bytes"] += sum(handle.nbytes for handle in self._stored.values())
            found["storage_used_bytes"] += self._used
        return found

    def _release(self, shard_ids: Iterable[str] | None = None) -> int:
        """Release the references of shards, or of all, that were removed or drained; return their bytes."""
        with self._lock:
            known = self._stored if shard_ids is None else self._stored.keys() & set(shard_ids)
            gone = [self._stored.pop(name) for name in self.shards.absent(list(known))]
            size = sum(handle.nbytes for handle in gone)
            self._used -= size
        for handle in gone:
            handle.drop_ref()
        return size

    def _store(
        self, tensors: Sequence[Tensor], put: Callable[[Tensor], list[RTensor]], timeout: float
    ) -> list[RTensor]:
        """Store tensors in Ray, and empty shards in their place by `put`."""
        self._check_connected()
        with self._reserve(sum(tensor.nbytes for tensor in tensors), timeout):
            references = [self._put_in_ray(tensor) for tensor in tensors]
            shards = put(torch.empty(0, dtype=torch.uint8, device="cpu"))
            return [self._handle(*one) for one in zip(shards, tensors, references, strict=True)]

    def _put_in_ray(self, tensor: Tensor) -> Any:
        values = raw_bytes(tensor).numpy()
        try:
            return self._ray.put((str(tensor.dtype), tuple(tensor.shape), values))
        except self._ray.exceptions.ObjectStoreFullError as error:
            raise TensorStoreFullError(
                f"{tensor.nbytes} bytes do not fit in Ray's object store: drain what was consumed"
            ) from error

    def _handle(self, shard: RTensor, tensor: Tensor, reference: Any) -> RTensor:
        info = TensorShardInfo(shard.shard_id, shard.node_addr, reference)
        handle = RTensor(info, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        with self._lock:
            # A shard of this name may have been drained just now.
            before = self._stored.get(shard.shard_id)
            self._used += tensor.nbytes - (0 if before is None else before.nbytes)
            # A handle of its own: the caller's may forget its reference.
            self._stored[shard.shard_id] = handle.with_ref(reference)
            if self._releaser is None:
                self._releaser = threading.Thread(
                    target=_release_regularly,
                    name="tundish-rtensor-ray",
                    args=(weakref.ref(self),),
                    daemon=True,
                )
                self._releaser.start()
        return handle

    @contextlib.contextmanager
    def _reserve(self, size: int, timeout: float) -> Iterator[None]:
        """Reserve bytes within this process's limit, for the block. Raise `TensorStoreFullError`."""
        deadline = time.monotonic() + timeout
        limit: int = json.loads(self.shards.stats())["storage"]["memory"]["limit_bytes"]
        while True:
            with self._lock:
                used = self._used
                if used + size <= limit:
                    self._used += size
                    break
            # Slow: it looks at all shards.
            if self._release():
                continue
            if size > limit or time.monotonic() >= deadline:
                raise TensorStoreFullError(
                    f"{size} bytes do not fit in the storage: {used} of its {limit} bytes are in use; drain what was "
                    "consumed, or raise the limit"
                )
            time.sleep(_RETRY_SECONDS)
        try:
            yield
        finally:
            # Its handle counts the stored bytes.
            with self._lock:
                self._used -= size

    def _get(self, handles: Sequence[RTensor], timeout: float) -> list[Any]:
        """The bytes of handles, from Ray."""
        references = [handle.ref for handle in handles]
        for handle, reference in zip(handles, references, strict=True):
            if reference is None:
                raise ShardGoneError(
                    f"shard {handle.shard_id} was drained or removed: its handle has no reference any more"
                )
            if not isinstance(reference, self._ray.ObjectRef):
                raise InvalidTypeError(
                    f"the ref of shard {handle.shard_id} is {format_type(reference)}: give Ray's ObjectRef"
                )
        self._check_connected()
        first = handles[0]
        try:
            found = self._ray.get(references, timeout=min(timeout, _LONGEST_SECONDS))
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimedOutError(
                f"shard {first.shard_id} of {first.node_addr} did not arrive within {timeout:g} s"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise TransferError(
                f"cannot fetch shard {first.shard_id} from {first.node_addr}, of {len(references)}: {error}"
            ) from error
        return [_bytes_of(handle, value) for handle, value in zip(handles, found, strict=True)]

    def _current_connection(self) -> tuple[str, str] | None:
        """Identify the connection to a cluster."""
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_node_id(), context.get_worker_id()

    def _check_connected(self) -> None:
        connection = self._current_connection()
        if connection != self._connection:
            since = "" if connection is None else ", and ray.init() after that"
            raise InvalidInputError(
                "this process is no longer connected to the Ray cluster that RayBackend() was made in: ray.shutdown() "
                f"was called{since}; what was stored there is gone. Call set_backend(RayBackend()) after ray.init()"
            )


def _bytes_of(handle: RTensor, value: Any) -> Any:
    """The bytes of the rows of a handle, out of a value in Ray's store: dtype, shape and bytes."""
    match value:
        case (str(dtype), tuple(shape), np.ndarray() as values):
            pass
        case _:
            raise ShardMismatchError(
                f"the ref of shard {handle.shard_id} of {handle.node_addr} leads to {format_type(value)}, "
                "not to a shard: pass handles that remotize returned"
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


def _release_regularly(backend: weakref.ref[RayBackend]) -> None:
    while (one := backend()) is not None:
        one._release()
        del one
        time.sleep(_RELEASE_SECONDS)
