"""`Controller`: begins and ends steps on all workers, and drains them.

Invariants:
    A drain goes to every worker of every role and rank, consumers before owners. Failed requests are repeated in the
    order in which their batches were sent, one batch after the other.
    A controller whose drain or step was interrupted is closed: the answers on its connections fit no request.
    Nothing that a worker says about leftovers stops training.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from tundish._native import RTensor, shard_ids
from tundish.distributed import voter_of
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    ShardGoneError,
    format_count,
    format_list,
    format_type,
)
from tundish.rtensor.backends import LOCAL_ADDRESS
from tundish.rtensor.handles import by_owner, handles_of, required_handles
from tundish.rtensor.monitoring import entries_left, integer_in, warn_of_escaped
from tundish.rtensor.server import split_address, trust_workers
from tundish.rtensor.steps import Step, StepKey, checked_number
from tundish.rtensor.tensor_store import TensorStore, default_store
from tundish.rtensor.workers import (
    HttpRequest,
    PendingRequests,
    ServerlessDrains,
    Worker,
    WorkerConnections,
    WorkerRequest,
    as_worker,
    failures_of,
    raise_failures,
)
from tundish.timeouts import check_seconds

# Owners notice the end of a connection, and with it of the claims made on it, within this time.
_NOTICE_SECONDS = 1.0
_RETRY_SECONDS = 0.02


class Drained(NamedTuple):
    """The result of a drain by ids.

    Attributes:
        entries: entries that consumers had fetched and have dropped.
        shards: shards that owners have removed.
        bytes: bytes of these shards.
        failures: the failure of each worker that could not be drained; it is tried again.
        left: entries still in the fetch buffer of each worker that has any. Kept entries do not count.
    """

    entries: int
    shards: int
    bytes: int
    failures: dict[Worker, Exception]
    left: dict[Worker, int]


class OpenStep(NamedTuple):
    """A step that has begun.

    Attributes:
        key: identifies it.
        handles: the handles that it claims.
        owners: the ids of their shards, by owner.
        kept: shards that `keep` carries over, by owner and id.
        kept_by_some: ids whose `keep` failed on some worker.
        connections: the number of the connection to each worker.
    """

    key: StepKey
    handles: list[RTensor]
    owners: dict[str, list[str]]
    kept: set[tuple[str, str]]
    kept_by_some: set[str]
    connections: dict[str, int | None]


class Controller:
    """Drains `workers`: all processes that store or fetch. A context manager.

    Call it from one thread at a time; `stats` from any. When it is closed or its process ends, the workers drop what
    they fetched in its step, and what it claimed is unclaimed again. Ctrl-C in the middle of a step, of a drain or of
    any other call closes it.

    The workers are sent the token of this process's own server, over TLS if that serves over TLS. For other tokens and
    certificates, or without a server in this process, call `trust` before.

    Args:
        workers: a `Worker(addr, role, rank)` for each process. Without workers, a step drains this process and the
            owners of the claimed shards only; `update` adds workers later.
        timeout: seconds within which a worker has to answer, and its `drain` function to end.
        store: the store of this process that is drained too, and whose token is sent; None is the default one.

    Raises:
        InvalidInputError: an argument is invalid; or, from any method, the controller is closed or was made in the
            parent process of this one.
        InvalidTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> server = td.rtensor.serve()
        >>> with td.rtensor.Controller([td.rtensor.Worker(server.addr)]) as controller:
        ...     batch = td.rtensor.remotize({"rewards": torch.rand(8)})
        ...     with controller.step(claim=batch):
        ...         td.rtensor.localize(batch)["rewards"].shape
        torch.Size([8])
        >>> td.rtensor.storage_stats()["num_tensors"]
        0
        >>> server.close()
    """

    def __init__(
        self, workers: Iterable[Worker], *, timeout: float = 30.0, store: TensorStore | None = None
    ) -> None:
        timeout = check_seconds(timeout, may_be_zero=False)
        # Why it is closed, once it is.
        self._closed: str | None = None
        self._process = os.getpid()
        self._store = default_store if store is None else store
        self._workers: dict[str, Worker] = {}
        self._connections = WorkerConnections(timeout)
        self._requests = PendingRequests(self._connections, ServerlessDrains(timeout))
        # Its own process knows its steps by this number, other workers by the connection.
        self._claimant = secrets.randbits(63)
        self._step: OpenStep | None = None
        self.update(workers)

    @classmethod
    def from_group(cls, group: Any = None, *, role: str = "worker", timeout: float = 30.0) -> Controller:
        """Collective: makes a controller of all ranks of a process group, to be used on one of them.

        A rank that does not serve begins to, at its default address. All ranks trust each other as their own server:
        they serve with the same token and certificates.

        Args:
            group: the process group; None is all ranks.
            role: the role of the calling rank.
            timeout: seconds within which a worker has to answer.

        Returns:
            A controller whose workers are the ranks of the group, in the order of their ranks.

        Raises:
            PeerFailedError: another rank failed.

        Example:
            >>> import tundish as td
            >>> with td.rtensor.serve(), td.rtensor.Controller.from_group(role="actor") as controller:
            ...     [(worker.role, worker.rank) for worker in controller.workers]
            [('actor', 0)]
        """
        voter = voter_of(group)
        own = ""
        error: BaseException | None = None
        try:
            own = json.dumps([default_store.address(), role])
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        collected = json.loads(voter.combine(own, _joined, error, what="collect the addresses of the ranks"))
        workers = [
            Worker(addr, role, rank) for rank, (addr, role) in zip(voter.ranks, collected, strict=True)
        ]
        return cls(workers, timeout=timeout)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers, in the order in which they were given."""
        return tuple(self._workers.values())

    def update(self, workers: Iterable[Worker]) -> None:
        """Replace the workers, when processes were started or have ended.

        Failed drains of workers that are left out are not repeated. New workers join the step under way.

        Args:
            workers: a `Worker(addr, role, rank)` for each process.

        Example:
            >>> import tundish as td
            >>> with td.rtensor.serve() as server, td.rtensor.Controller([]) as controller:
            ...     controller.update([td.rtensor.Worker(server.addr, "actor", 0)])
            ...     len(controller.workers)
            1
        """
        self._check_open()
        if not isinstance(workers, Iterable):
            raise InvalidTypeError(
                f"workers is {format_type(workers)}: give a list of Worker(addr, role, rank)"
            )
        given = [as_worker(worker) for worker in workers]
        by_address = {worker.addr: worker for worker in given}
        if len(by_address) < len(given):
            raise InvalidInputError(
                "two workers serve at one address: give each process's own address, as its server.addr has it"
            )
        addresses = [worker.addr for worker in given if worker.drain is None]
        trust_workers(self._store.server, addresses)
        with self._closed_if_interrupted():
            known, self._workers = self._workers.keys(), by_address
            self._connections.keep_only(by_address.keys())
            self._requests.keep_only(by_address.keys())
            if self._step is not None:
                begin = HttpRequest("POST", f"{self._step.key.path}/begin")
                self._requests.send(
                    (worker, begin) for worker in self._serving_workers() if worker.addr not in known
                )

    def clear_batches(self, *targets: Any) -> Drained:
        """Drain all shards of the handles in `targets`: from every fetch buffer, then from their owners.

        A worker that fails is warned of, and tried again at the next step or drain.

        Args:
            targets: nested containers of handles.

        Returns:
            The counts of dropped and removed tensors, and the failures.

        Raises:
            DrainError: a worker has failed now and in the step or drain before.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.rtensor.serve(), td.rtensor.Controller([]) as controller:
            ...     batch = td.rtensor.remotize({"rewards": torch.rand(8)})
            ...     controller.clear_batches(batch).shards
            1
        """
        self._check_open()
        handles = [handle for target in targets for handle in handles_of(target)]
        owners = self._owners_of(handles)
        with self._closed_if_interrupted():
            self._requests.repeat_failed()
            ids = shard_ids(handles)
            if not ids:
                return Drained(0, 0, 0, {}, {})
            self._store.shards.clear_buffer(ids)
            drop = HttpRequest("DELETE", "/buffer/clear", ids)
            dropped = self._requests.send_until_done(
                WorkerRequest(worker, drop, ids) for worker in self._workers.values()
            )
            removed = self._requests.send_until_done(self._removals(owners), after=dropped)
            for handle in handles:
                handle.drop_ref()
            failures = {**failures_of(dropped), **failures_of(removed)}
            return Drained(
                total(dropped, "cleared_count"),
                total(removed, "cleared_count"),
                total(removed, "freed_bytes"),
                failures,
                self._entries_left(failures, is_step_over=False),
            )

    @contextlib.contextmanager
    def step(self, claim: Any = None, *, number: int | None = None) -> Iterator[Step]:
        """A step: when the block ends, what any worker fetched in it is dropped, and the shards of `claim` removed.

        Shards that no step claims stay. Fetches between two steps belong to the later one.

        Args:
            claim: nested containers of the handles that this step consumes.
            number: your own number of the step, for messages and `/stats` of all workers: 0 to 2**53 - 1. Numbers may
                repeat. None shows the time of its begin in microseconds.

        Raises:
            InvalidInputError: `claim` has tensors and no handles, this controller is in a step already, or `number` is
                out of range.
            InvalidTypeError: `number` is no integer.
            ShardGoneError: a claimed shard does not exist, or another step claims it. All shards stay.
            DrainError: a worker does not begin the step, or could not be drained now and in the step before.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.rtensor.serve(), td.rtensor.Controller([]) as controller:
            ...     batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            ...     with controller.step(claim=batch, number=120):
            ...         td.rtensor.localize(batch)["rewards"].sum()
            tensor(8.)
        """
        self._check_open()
        own_number = checked_number(number)
        handles = required_handles(claim, "claim")
        owners = self._owners_of(handles)
        if self._step is not None:
            raise InvalidInputError(f"this controller is in step {self._step.key.number}: end that one first")
        with self._closed_if_interrupted():
            self._requests.repeat_failed()
            step = self._begin(handles, owners, own_number)
            try:
                yield Step(step.key.number)
            except (Exception, SystemExit, GeneratorExit):
                self._end(step)
                raise
            self._end(step)

    def keep(self, obj: Any) -> int:
        """Carry over the shards of handles in `obj`: they do not end with the current step.

        They are unclaimed again, and stay with everybody who fetched them until a later step claims or drains them.

        Args:
            obj: nested containers of handles.

        Returns:
            The number of shards and fetched entries that are kept.

        Raises:
            InvalidInputError: `obj` has tensors and no handles.
            DrainError: a worker does not answer. The shards end with the current step after all.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.rtensor.serve(), td.rtensor.Controller([]) as controller:
            ...     batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            ...     with controller.step(claim=batch):
            ...         kept = controller.keep(batch)
            ...     td.rtensor.localize(batch)["rewards"].sum()
            tensor(8.)
        """
        self._check_open()
        handles = required_handles(obj, "obj")
        owners = self._owners_of(handles)
        ids = shard_ids(handles)
        keep = HttpRequest("POST", "/keep", ids)
        requests = [(worker, keep) for worker in self._serving_workers()]
        requests += [
            (self._worker_at(owner), HttpRequest("POST", "/keep", own))
            for owner, own in owners.items()
            if owner not in self._workers
        ]
        with self._closed_if_interrupted():
            if self._step is not None:
                self._step.kept_by_some.update(ids)
            answers = self._requests.send(requests)
            kept = self._store.shards.keep(ids)
            raise_failures("could not be told what to keep", answers)
            if self._step is not None:
                self._step.kept.update(
                    (owner, shard_id) for owner, some in owners.items() for shard_id in some
                )
        return kept + total(answers, "kept_count") + total(answers, "kept_shards")

    def stats(self) -> dict[Worker, dict[str, Any] | Exception]:
        """Ask every worker with a server for its `/stats`.

        Returns:
            For each worker the decoded answer, or its failure.

        Example:
            >>> import tundish as td
            >>> with td.rtensor.serve() as server:
            ...     controller = td.rtensor.Controller([td.rtensor.Worker(server.addr)])
            ...     [stats["storage"]["num_entries"] for stats in controller.stats().values()]
            [0]
        """
        self._check_open()
        with self._closed_if_interrupted():
            return self._requests.send(
                (worker, HttpRequest("GET", "/stats")) for worker in self._serving_workers()
            )

    def close(self) -> None:
        """Disconnect from the workers, which drop the step and the claims of this controller. Idempotent."""
        self._close("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        step = "" if self._step is None else f", in step {self._step.key.number}"
        state = step if self._closed is None else f", closed ({self._closed})"
        return f"<Controller of {format_count(len(self._workers), 'worker')}{state}>"

    def _close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._step = None
        # In a child made by fork the connections are the parent's; at the interpreter's end they end with the process.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._release_claims()

    def _release_claims(self) -> None:
        """Give up the current step and its claims: a worker notices the end of its connection."""
        self._connections.close()
        self._store.shards.release_claimant(self._claimant)

    @contextlib.contextmanager
    def _closed_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit, GeneratorExit):
            raise
        except BaseException:
            self._close("it was interrupted")
            raise

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                f"this controller belongs to process {self._process}, which made it: make one in this process"
            )
        if self._closed is not None:
            raise InvalidInputError(f"this controller is closed ({self._closed}): make another one")

    def _begin(
        self, handles: list[RTensor], owners: dict[str, list[str]], own_number: int | None
    ) -> OpenStep:
        """Begin a step on every worker and claim its shards, or give everything up."""
        key = self._store.steps.new_key(own_number)
        try:
            server = self._store.server
            if server is None or server.addr not in self._workers:
                self._store.shards.begin_step(key.id, self._claimant, own_number)
            begin = HttpRequest("POST", f"{key.path}/begin")
            answers = self._requests.send((worker, begin) for worker in self._serving_workers())
            raise_failures(f"did not begin step {key.number}", answers)
            claim_answers = self._claim(key, owners)
        except Exception:
            self._release_claims()
            raise
        kept_earlier = {
            shard_id for answer in claim_answers.values() for shard_id in names_in(answer, "kept_shard_ids")
        }
        self._step = OpenStep(key, handles, owners, set(), kept_earlier, self._connections.numbers())
        return self._step

    def _claim(self, key: StepKey, owners: dict[str, list[str]]) -> dict[Worker, Any]:
        """Claim shards; wait a moment for owners that have not noticed the end of an earlier controller."""
        requests = [
            (self._worker_at(owner), HttpRequest("POST", f"{key.path}/claim", ids))
            for owner, ids in owners.items()
        ]
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:
            answers = self._requests.send(requests)
            raise_failures(f"did not claim shards for step {key.number}", answers)
            is_taken = any(names_in(answer, "taken_shard_ids") for answer in answers.values())
            if not is_taken or time.monotonic() > deadline:
                break
            time.sleep(_RETRY_SECONDS)
        check_claim_answers(answers)
        return answers

    def _end(self, step: OpenStep) -> None:
        """Drain a step everywhere, consumers before owners."""
        if self._closed is not None or os.getpid() != self._process or sys.is_finalizing():
            # The step was released, or it belongs to the parent process, or the interpreter has no threads any more.
            return
        self._step = None
        ending = {
            owner: [shard_id for shard_id in ids if (owner, shard_id) not in step.kept]
            for owner, ids in step.owners.items()
        }
        ids = [shard_id for some in ending.values() for shard_id in some]
        by_name = sorted(step.kept_by_some - {shard_id for _, shard_id in step.kept})
        consumers = [worker for worker in self._workers.values() if worker.addr not in ending]
        end = HttpRequest("POST", f"{step.key.path}/end")
        send = self._requests.send_until_done
        self._store.shards.clear_buffer([*ids, *by_name])
        self._store.shards.end_step(step.key.id, step.key.own_number)
        counts = send(WorkerRequest(worker, end, ids) for worker in consumers)
        counts |= send(WorkerRequest(self._worker_at(owner), end, ids) for owner in ending)
        answers = dict(counts)
        if by_name:
            drop = HttpRequest("DELETE", "/buffer/clear", by_name)
            answers |= send(
                (WorkerRequest(worker, drop, by_name) for worker in self._serving_workers()), after=answers
            )
        # Owners that did not hold all for the step: they unclaimed when the connection was lost, or to keep.
        unclaimed = [
            removal
            for removal in self._removals(ending)
            if isinstance(counts[removal.worker], Exception)
            or self._was_lost(step, removal.worker)
            or not step.kept_by_some.isdisjoint(removal.shard_ids)
        ]
        answers |= send(unclaimed, after=answers)
        for worker, step_counts in counts.items():
            if isinstance(step_counts, dict):
                warn_of_escaped(str(worker), step.key.number, step_counts)
        self._entries_left(failures_of(answers), is_step_over=True)
        ended = set(ids)
        for handle in step.handles:
            if handle.shard_id in ended:
                handle.drop_ref()

    def _was_lost(self, step: OpenStep, worker: Worker) -> bool:
        """Whether the connection to a worker was lost since the step began."""
        number = self._connections.numbers().get(worker.addr)
        return number != step.connections.get(worker.addr, number)

    def _entries_left(self, failed: Mapping[Worker, Any], *, is_step_over: bool) -> dict[Worker, int]:
        """Entries left in the fetch buffers, which are warned of, by worker."""
        request = HttpRequest("GET", "/buffer/stats")
        answers = self._requests.send(
            (worker, request) for worker in self._serving_workers() if worker not in failed
        )
        left = {
            worker: entries_left(str(worker), answer, is_step_over=is_step_over)
            for worker, answer in answers.items()
        }
        return {worker: entries for worker, entries in left.items() if entries}

    def _serving_workers(self) -> list[Worker]:
        """The workers that are drained by requests, not by a function."""
        return [worker for worker in self._workers.values() if worker.drain is None]

    def _worker_at(self, addr: str) -> Worker:
        """The worker at an address; an owner that is no worker gets the role "owner"."""
        return self._workers.get(addr) or Worker(addr, "owner")

    def _owners_of(self, handles: Iterable[RTensor]) -> dict[str, list[str]]:
        """Shard ids by owner. Raises `InvalidInputError` for owners that no request reaches."""
        owners = by_owner(handles)
        _check_owners(owners.keys() - self._workers.keys())
        return owners

    def _removals(self, owners: dict[str, list[str]]) -> Iterator[WorkerRequest]:
        for owner, ids in owners.items():
            worker = self._worker_at(owner)
            if ids and worker.drain is None:
                yield WorkerRequest(worker, HttpRequest("DELETE", "/data/clear", ids), ids)


def _joined(values: list[str]) -> str:
    return f"[{','.join(values)}]"


def check_claim_answers(answers: Mapping[Worker, Any]) -> None:
    """Raise `ShardGoneError` if a worker could not claim all shards."""
    for worker, answer in answers.items():
        for key, what in (
            ("missing_shard_ids", "does not store, or has drained or removed,"),
            ("taken_shard_ids", "has claims of another step on"),
        ):
            names = names_in(answer, key)
            if names:
                raise ShardGoneError(f"{worker} {what} these shards: {format_list(names)}")


def names_in(answer: dict[str, Any], key: str) -> list[str]:
    found = answer.get(key)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def total(answers: Mapping[Worker, Any], key: str) -> int:
    return sum(integer_in(answer, key) for answer in answers.values() if isinstance(answer, dict))


def _check_owners(addresses: Iterable[str]) -> None:
    """Raise `InvalidInputError` for owners that no controller reaches."""
    for addr in addresses:
        if addr == LOCAL_ADDRESS:
            raise InvalidInputError(
                "LocalBackend made one of these handles: only its own process can drain the shard, with "
                "rtensor.step() or rtensor.drain()"
            )
        split_address(addr)
