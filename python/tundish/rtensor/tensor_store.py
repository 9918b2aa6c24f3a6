"""`TensorStore`: stores tensors of this process and fetches those of others.

The functions of `td.rtensor` that store, fetch, serve or drain are the methods of one instance, the default store.

Invariants:
    A child made by `fork` starts with empty stores: they serve nothing, are in no step, and use the default backend.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

from torch import Tensor

from tundish import tree
from tundish._native import RTensor, ShardStore
from tundish.distributed import voter_of
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    format_count,
    format_type,
)
from tundish.rtensor.backends import LOCAL_ADDRESS, Backend, HttpBackend, Removed
from tundish.rtensor.dense_tensors import dense, distinct_tensors, output_buffers
from tundish.rtensor.handles import (
    check_shard_id,
    check_shard_ids,
    replace_handles,
)
from tundish.rtensor.monitoring import warn_of_fetches_without_step
from tundish.rtensor.server import (
    LOOPBACK,
    Server,
    ServerOptions,
    Tls,
    already_serving,
    check_options,
    start_server,
    trust,
)
from tundish.rtensor.steps import Step, StoreSteps
from tundish.timeouts import check_seconds
from tundish.tree import Refusal, find_all

# Seconds, of calls that store or fetch.
DEFAULT_TIMEOUT: Final = 60.0
# A job may fetch for long before its first step.
_SECONDS_WITHOUT_STEP = 60.0


class TensorStore:
    """Stores tensors of this process and fetches those of others. A context manager.

    Each store has its own shards, fetch buffer, limits, server, backend and steps. The functions of `td.rtensor`, such
    as `remotize` and `localize`, are the methods of the default store of the process. Most jobs need no other one.

    Attributes:
        shards: the shards that it stores and those that it fetched.
        backend: where it stores tensors, and how it fetches them.
        steps: its steps.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.rtensor.TensorStore() as rollouts, td.rtensor.TensorStore() as scores:
        ...     handle = rollouts.remotize(torch.ones(3))
        ...     scores.localize(handle)
        ...     rollouts.stats()["stored_tensors"], scores.stats()["stored_tensors"]
        tensor([1., 1., 1.])
        (1, 0)
    """

    def __init__(self) -> None:
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        self.shards = ShardStore()
        self._lock = threading.RLock()
        self._server: Server | None = None
        # Whether a call that stores or fetches started the server, and nobody called `serve`.
        self._serves_implicitly = False
        self.set_backend(None)
        self.steps = StoreSteps(self.shards, self.own_addresses)
        # When to check whether any step ever began (`time.monotonic`); None before the first fetch.
        self._step_check_due: float | None = None

    def begin_anew_in_child(self) -> None:
        """Forget what a child made by `fork` inherited, and start empty."""
        self.shards.forget_inherited()
        self._begin()

    def close(self) -> None:
        """Stop serving, and remove all shards. Tensors that were handed out stay valid. Idempotent."""
        if self.server is not None:
            self.server.close()
        self.clear_node()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "not serving" if self.server is None else f"at {self.server.addr}"
        tensors = format_count(json.loads(self.shards.stats())["storage"]["num_entries"], "stored tensor")
        return f"<TensorStore {where}, {tensors}, {self.backend!r}>"

    @property
    def server(self) -> Server | None:
        """The server of this store, while it serves."""
        server = self._server
        return None if server is None or server.is_closed else server

    def own_addresses(self) -> set[str]:
        """The addresses by which handles name this store."""
        server = self.server
        return {LOCAL_ADDRESS} if server is None else {LOCAL_ADDRESS, server.addr}

    def serve(
        self,
        host: str = LOOPBACK,
        port: int = 0,
        token: str | None = None,
        limit_bytes: int | None = None,
        *,
        buffer_limit_bytes: int | None = None,
        peers: Iterable[str] = (),
        tls: Tls | None = None,
        open_metrics: bool = False,
    ) -> Server:
        """Serve what this store stores. Call it once in every process that stores or fetches.

        Called again with the same arguments, it returns the same server.

        Args:
            host: the address to listen on. Any but a loopback address needs a token. `0.0.0.0` listens on all addresses
                of the machine; handles then name the one that leads outside.
            port: the port to listen on; 0 takes a free one.
            token: the token that every request has to carry. Without one, only processes of the same user on this
                machine are answered. Without `tls` it travels in the clear.
            limit_bytes: memory limit of stored shards, in bytes; by default a quarter of what the process can have.
            buffer_limit_bytes: memory limit of the fetch buffer, in bytes; the same default.
            peers: addresses of other processes to which this one sends the token, over TLS if it serves over TLS.
                `trust` adds more. A `Controller` adds its workers.
            tls: paths of two PEM files, the certificate and its private key. The server then speaks TLS. The first file
                may hold more certificates, such as that of the authority. This process trusts peers with one of these
                certificates, and peers whose certificate one of these signed.
            open_metrics: answer `/metrics` and `/health` to everybody who reaches the port.

        Returns:
            The server, which is closed by its `close()` or as a context manager.

        Raises:
            InvalidInputError: a token is missing, an argument is invalid, or this store serves with other arguments.
            InvalidTypeError: an argument has the wrong type.
            StorageError: the port is taken, or a file cannot be read (an `OSError` with its `errno`).

        Example:
            >>> import tundish as td
            >>> server = td.rtensor.serve()  # between nodes: serve("0.0.0.0", token=..., tls=(certificate, key))
            >>> server.close()
        """
        options = ServerOptions(host, port, token, limit_bytes, buffer_limit_bytes, tls, open_metrics)
        others = peers if isinstance(peers, str) or not isinstance(peers, Iterable) else list(peers)
        check_options(options, others)
        with self._lock:
            server = self.server
            if server is None:
                server = self._server = start_server(self.shards, options)
            elif server.options != options:
                raise InvalidInputError(already_serving(server, is_implicit=self._serves_implicitly))
            self._serves_implicitly = False
            trust(*others, token=token, tls=server.certificate)
            return server

    def address(self) -> str:
        """Return the address of the server, which starts on loopback if there is none.

        Returns:
            The address, `"host:port"`.

        Raises:
            StorageError: no server can be started.

        Example:
            >>> import tundish as td
            >>> with td.rtensor.TensorStore() as store:
            ...     store.address().partition(":")[0]
            '127.0.0.1'
        """
        with self._lock:
            server = self.server
            if server is None:
                server = self.serve()
                self._serves_implicitly = True
            return server.addr

    def remotize(
        self, obj: Any, *, trim: bool | Sequence[str] = True, timeout: float = DEFAULT_TIMEOUT
    ) -> Any:
        """Store the tensors in `obj` and return nested containers with handles in their place.

        Copies are stored: detached, in host memory, of the values that a tensor shows and not of the base that it is a
        view of. The same tensor twice is stored once. No step owns the shards until one claims them; they stay until
        they are removed or that step ends.

        Args:
            obj: nested containers of tensors, of the types that `td.tree` knows. Everything but tensors stays as it is.
            trim: whether to cut trailing columns that no row uses, in dicts with an `attention_mask`: shape (rows, …,
                columns), bool or integer, nonzero where a column is used. They are cut from the mask and from all
                tensors of the dict with exactly its shape. Names, as in `("logits",)`, cut the dict's tensors of these
                names too: their shape begins with that of the mask, as (rows, columns, vocabulary) does.
            timeout: seconds to wait for memory while the storage is at its limit.

        Returns:
            Containers like `obj`, with an `RTensor` of the same shape (after trimming) and dtype for each tensor.

        Raises:
            TensorStoreFullError: the storage stayed at its limit.
            InvalidTypeError: a tensor is sparse, quantized or otherwise more than values in memory, or its dtype cannot
                be sent. The message has the path. Or `trim` is neither a bool nor names.
            InvalidInputError: `trim` names no tensor, or one that does not begin with the shape of the mask.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> batch = td.rtensor.remotize({"rewards": torch.ones(2, 3), "task": "sums"})
            >>> batch["rewards"].shape, batch["rewards"].dtype, batch["task"]
            (torch.Size([2, 3]), torch.float32, 'sums')
            >>> td.rtensor.localize(batch)["rewards"].sum()
            tensor(6.)
            >>> td.rtensor.remove(td.rtensor.flatten_shard_ids(batch))
            1
        """
        timeout = check_seconds(timeout)
        found, places = distinct_tensors(obj, trim)
        if not found:
            return obj
        handles = self.backend.store(found, timeout)
        following = iter(places)
        return tree.map(lambda _: handles[next(following)], obj)

    def localize(
        self, obj: Any, *, out: Tensor | Sequence[Tensor] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> Any:
        """Fetch the tensors of the handles in `obj` and return nested containers with them in their place.

        What was fetched in this step comes from the fetch buffer, and stays there until the step ends. Everything else
        is fetched in one request an owner, all owners at once; fetches that another thread has begun are waited for.
        The tensors are in host memory. You may write to them: no other reader sees the change. Equal handles become one
        tensor.

        Args:
            obj: a handle, or nested containers of handles. Everything else stays as it is.
            out: output buffers: a tensor for a handle, else as many tensors as `obj` has handles, in their order, with
                their shapes and dtypes. The fetched tensors are copied into them, and they replace the handles.
            timeout: seconds until everything has arrived.

        Returns:
            Containers like `obj`, with a CPU tensor of the handle's shape and dtype, or the output buffer, for each
            handle.

        Raises:
            ShardGoneError: a shard was removed, or drained with its step, or the step ended meanwhile.
            TransferError: an owner does not answer, or sent damaged bytes; the message has its address.
            NotAuthorizedError: an owner wants a token; see `serve`.
            ShardMismatchError: a tensor has another dtype or shape than its handle.
            TensorStoreFullError: the fetch buffer stayed at its limit.
            TimedOutError: it took too long.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> handle = td.rtensor.remotize(torch.arange(6).view(3, 2))
            >>> with td.rtensor.step(claim=handle):
            ...     td.rtensor.localize(handle[1:])  # only these rows are fetched
            tensor([[2, 3],
                    [4, 5]])
        """
        timeout = check_seconds(timeout)
        handles: list[RTensor] = find_all(RTensor, obj)
        buffers = None if out is None else output_buffers(out, handles)
        if not handles:
            return obj
        unique = list(dict.fromkeys(handles))
        tensors = dict(zip(unique, self.backend.fetch(unique, timeout), strict=True))
        self._warn_if_no_step_began()
        if buffers is None:
            return replace_handles(tensors.__getitem__, obj)
        for handle, buffer in zip(handles, buffers, strict=True):
            buffer.copy_(tensors[handle])
        outputs = iter(buffers)
        return replace_handles(lambda _: next(outputs), obj)

    def store(self, shard_id: str, tensor: Tensor, *, timeout: float = DEFAULT_TIMEOUT) -> RTensor:
        """Store a copy of `tensor` under a name, and return its handle.

        Do not reuse a name within a step: see `remove`.

        Args:
            shard_id: the name: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
            tensor: a dense tensor on any device.
            timeout: seconds to wait for memory while the storage is at its limit.

        Returns:
            The handle of the stored copy.

        Raises:
            InvalidInputError: a shard of that name exists.
            TensorStoreFullError, InvalidTypeError: as `remotize`.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> handle = td.rtensor.store("rewards", torch.ones(2))
            >>> td.rtensor.localize(handle)
            tensor([1., 1.])
        """
        timeout = check_seconds(timeout)
        check_shard_id(shard_id)
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(
                f"tensor is {format_type(tensor)}: give a tensor; remotize takes containers of tensors"
            )
        try:
            values = dense(tensor)
        except Refusal as refusal:
            raise refusal.kind(f"the tensor to be stored as {shard_id} {refusal.reason}") from refusal
        return self.backend.store_as(shard_id, values, timeout)

    def fetch(self, shard_id: str) -> Tensor:
        """Return the tensor that this store stores under a name, in host memory. You may write to it.

        Args:
            shard_id: the name.

        Returns:
            A CPU tensor.

        Raises:
            ShardGoneError: this store stores no tensor under this name.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> handle = td.rtensor.store("rewards", torch.ones(2))
            >>> td.rtensor.fetch("rewards")
            tensor([1., 1.])
        """
        check_shard_id(shard_id)
        found: Tensor = self.localize(self.backend.handle_of(shard_id))
        return found

    def remove(self, shard_ids: str | Iterable[str]) -> int:
        """Remove shards that this store stores, and what it fetched of them.

        Other processes keep what they fetched until their step ends or `clear_batches` drains it. Until then they read
        the old tensor, even through a handle of a new tensor with the same name.

        Args:
            shard_ids: one name, or names. Unknown and repeated names are ignored.

        Returns:
            The number of shards that were removed.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> handle = td.rtensor.store("rewards", torch.ones(2))
            >>> td.rtensor.remove(["rewards", "unknown"])
            1
        """
        names: Sequence[str] | Iterable[str] = [shard_ids] if isinstance(shard_ids, str) else shard_ids
        check_shard_ids(names, "remove")
        return self.backend.remove(names)["cleared_count"]

    def clear_node(self) -> Removed:
        """Remove everything that this store stores or fetched, claimed or not.

        Returns:
            The counts of the storage: `cleared_count` shards, `num_tensors` and `total_bytes`.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> handle = td.rtensor.store("rewards", torch.ones(2))
            >>> td.rtensor.clear_node()["cleared_count"]
            1
        """
        return self.backend.clear()

    def clear_fetch_buffer(self, shard_ids: str | Iterable[str] | None = None) -> int:
        """Drop what this store fetched. Tensors that were handed out stay valid.

        Args:
            shard_ids: one shard to drop, or several; None drops everything.

        Returns:
            The number of entries that were dropped.

        Example:
            >>> import tundish as td
            >>> td.rtensor.clear_fetch_buffer()
            0
        """
        ids = [shard_ids] if isinstance(shard_ids, str) else shard_ids
        if ids is not None:
            check_shard_ids(ids, "clear_fetch_buffer")
        return self.shards.clear_buffer(ids)

    def step(
        self, claim: Any = None, *, number: int | None = None
    ) -> contextlib.AbstractContextManager[Step]:
        """A step of this store: when the block ends, all that was fetched in it is dropped, and `claim` is removed.

        Fetches between two steps belong to the later one.

        Args:
            claim: nested containers of handles of shards that this store stores. Other shards stay.
            number: your own number of the step, for messages and `/stats`: 0 to 2**53 - 1. Numbers may repeat. None
                shows the time of its begin in microseconds.

        Raises:
            ShardGoneError: a claimed shard does not exist here, or another step claims it. Nothing is drained then. A
                `Controller` claims shards of other processes.
            InvalidInputError: this store is in a step already, `claim` has tensors or ids and no handles, or
                `number` is out of range.
            InvalidTypeError: `number` is no integer.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            >>> with td.rtensor.step(claim=batch, number=120):
            ...     td.rtensor.localize(batch)["rewards"].sum()
            tensor(8.)
            >>> td.rtensor.storage_stats()["num_tensors"]
            0
        """
        return self.steps.step(claim, number)

    def keep(self, obj: Any) -> int:
        """Carry over the shards of handles in `obj`: they, and what this store fetched of them, outlive the step.

        They stay until they are removed or drained by their ids, or a later `step` of this store or `drain` claims
        them.

        Args:
            obj: nested containers of handles.

        Returns:
            The number of shards and fetched entries that are kept.

        Raises:
            InvalidInputError: `obj` has tensors or ids and no handles.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            >>> with td.rtensor.step(claim=batch):
            ...     td.rtensor.keep(batch)
            1
            >>> td.rtensor.localize(batch)["rewards"].sum()
            tensor(8.)
        """
        return self.steps.keep(obj)

    def drain(self, group: Any = None, *, claim: Any = None, number: int | None = None) -> None:
        """Collective: all ranks end their step, drop what they fetched in it, and begin the next one.

        For jobs without a controller: call it once a step on every rank. Fetches before the first call belong to the
        first step. Shards that nobody claims stay.

        Args:
            group: the process group; None is all ranks.
            claim: nested containers of handles, of any owner. The owners remove these shards when every rank has
                dropped what it fetched or kept of them.
            number: your own number of the step that ends, for messages; see `step`.

        Raises:
            PeerFailedError: another rank failed; raised on all ranks.
            InvalidInputError: this rank is in a `step` of its own, or `claim` has tensors or ids and no handles.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.rtensor.serve():
            ...     batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            ...     rewards = td.rtensor.localize(batch)["rewards"]
            ...     td.rtensor.drain(claim=batch)
            ...     td.rtensor.storage_stats()["num_tensors"], rewards.sum()
            (0, tensor(8.))
        """
        self.steps.drain(voter_of(group), claim, number)

    def stats(self) -> dict[str, int | float]:
        """Count what this store stores and has fetched.

        Returns:
            Numbers by name, which `/metrics` of its server shows too. Names end with their unit (`_bytes`, `_seconds`,
            `_tensors`, `_steps`); `buffer_hits`, `buffer_misses` and `late_tensors_refused` only rise.

        Example:
            >>> import tundish as td
            >>> numbers = td.rtensor.stats()
            >>> numbers["stored_tensors"], numbers["fetched_bytes"]
            (0, 0)
        """
        return self.backend.numbers()

    def storage_stats(self) -> dict[str, Any]:
        """Counts of the shards that this store stores.

        - `num_tensors`, `total_bytes`: all stored tensors.
        - `unclaimed_entries`, `unclaimed_bytes`: those that no step claims.
        - `oldest_unclaimed_seconds`: the age of the oldest of them.
        - `high_water_bytes`: the largest `total_bytes` so far.
        - `memory`: bytes of allocated memory: `limit_bytes`; `used_bytes`; `idle_bytes`, kept for the next tensors;
          `escaped_bytes`, of removed tensors that are still in use.

        Returns:
            A dict with these counts.

        Example:
            >>> import tundish as td
            >>> td.rtensor.storage_stats()["num_tensors"]
            0
        """
        storage = self.backend.stats()["storage"]
        return {"num_tensors": storage.pop("num_entries"), **storage}

    def fetch_buffer_stats(self) -> dict[str, Any]:
        """Counts of what this store fetched and holds until the end of the step.

        Returns:
            A dict with these counts:

            - `num_entries`, `total_bytes`: all fetched tensors.
            - `kept_entries`, `kept_bytes`: those that outlive the step, because `keep` was called for them.
            - `high_water_bytes`: the largest `total_bytes` so far.
            - `hits`, `misses`: tensors that were in the buffer, and tensors that had to be fetched.
            - `in_flight`: tensors that are being fetched.
            - `late_inserts_refused`: tensors that arrived after their step had ended.
            - `oldest_step`: the oldest step that still has bytes, or None.
            - `memory`: bytes of allocated memory, as in `storage_stats`.

        Example:
            >>> import tundish as td
            >>> td.rtensor.fetch_buffer_stats()["num_entries"]
            0
        """
        found: dict[str, Any] = self.backend.stats()["buffer"]
        return found

    def set_backend(self, backend: Backend | None) -> None:
        """Set the backend of this store. Shards that are stored stay where they are.

        Args:
            backend: `HttpBackend()`, `LocalBackend()` or `RayBackend()`. None is the default, `HttpBackend()`.

        Raises:
            InvalidTypeError: it is no backend, or a class instead of an instance.

        Example:
            >>> import tundish as td
            >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
            >>> td.rtensor.set_backend(None)
        """
        given: Any = backend
        if given is not None and not isinstance(given, Backend):
            shown = f"the class {given.__qualname__}" if isinstance(given, type) else format_type(given)
            raise InvalidTypeError(f"backend is {shown}: give an instance, such as HttpBackend()")
        self.backend = HttpBackend() if given is None else given
        self.backend.attach(self)

    def _warn_if_no_step_began(self) -> None:
        """Warn once, if this store has fetched for a minute and no step ever began in it. Cheap."""
        now = time.monotonic()
        if self._step_check_due is None:
            self._step_check_due = now + _SECONDS_WITHOUT_STEP
        if now >= self._step_check_due:
            self._step_check_due = math.inf
            warn_of_fetches_without_step(json.loads(self.shards.stats()))


def _begin_anew_in_child() -> None:
    for store in tuple(_stores):
        store.begin_anew_in_child()


_stores: Final = weakref.WeakSet[TensorStore]()
os.register_at_fork(after_in_child=_begin_anew_in_child)

default_store: Final = TensorStore()
clear_fetch_buffer = default_store.clear_fetch_buffer
clear_node = default_store.clear_node
drain = default_store.drain
fetch = default_store.fetch
fetch_buffer_stats = default_store.fetch_buffer_stats
keep = default_store.keep
localize = default_store.localize
remotize = default_store.remotize
remove = default_store.remove
serve = default_store.serve
set_backend = default_store.set_backend
stats = default_store.stats
step = default_store.step
storage_stats = default_store.storage_stats
store = default_store.store
