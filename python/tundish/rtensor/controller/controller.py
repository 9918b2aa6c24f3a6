"""`Controller`: begins and ends steps on all workers, and drains them.

Invariants:
    A drain goes to every worker of every role and rank, consumers before owners.
    A controller whose drain or step was interrupted is closed: the answers on its connections fit no request.
    Nothing that a worker says about leftovers stops training.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

from tundish._native import ShardStore, shard_ids
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor.arguments import check_owners, check_seconds, check_token
from tundish.rtensor.controller.drain_functions import DrainFunctions
from tundish.rtensor.controller.drained import Drained
from tundish.rtensor.controller.group_workers import group_workers
from tundish.rtensor.controller.kept_shards import KeptShards
from tundish.rtensor.controller.pending_requests import PendingRequests, WorkerRequest
from tundish.rtensor.controller.responses import (
    check_claim,
    entries_left,
    failures_of,
    names_in,
    raise_failures,
    total,
    warn_of_ledger,
)
from tundish.rtensor.handles import RTensor, by_owner, claimed
from tundish.rtensor.process import next_step_number, state
from tundish.rtensor.steps.step import Step
from tundish.rtensor.workers.connections import Request, WorkerConnections
from tundish.rtensor.workers.registry import WorkerRegistry
from tundish.rtensor.workers.worker import Worker

__all__ = ["Controller"]

# Owners notice the end of a connection, and with it of the claims made on it, within this time.
_NOTICE_SECONDS = 1.0
_RETRY_SECONDS = 0.02


class _OpenStep(NamedTuple):
    """A step that has begun.

    Attributes:
        number: its number.
        handles: the handles that it claims.
        owners: the ids of their shards, by owner.
        kept_earlier: names of these that an earlier step kept: consumers hold them beyond the end of any step.
        connections: the number of the connection to each worker.
    """

    number: int
    handles: list[RTensor]
    owners: dict[str, list[str]]
    kept_earlier: set[str]
    connections: dict[str, int | None]


class Controller:
    """Drains `workers`: all processes that store or fetch. A context manager.

    Call it from one thread at a time; `stats` from any. When it is closed or its process ends, the workers drop what
    they fetched in its step, and what it claimed is unclaimed again. Ctrl-C in the middle of a step, of a drain or of
    any other call closes it.

    Args:
        workers: a `Worker(addr, role, rank)` for each process.
        token: the token that they serve with. It is sent to them only.
        timeout: seconds within which a worker has to answer, and its `drain` function to end.

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

    def __init__(self, workers: Iterable[Worker], *, token: str | None = None, timeout: float = 30.0) -> None:
        check_token(token)
        timeout = check_seconds(timeout, may_be_zero=False)
        # Why it is closed, once it is.
        self._closed: str | None = None
        self._process = os.getpid()
        self._registry = WorkerRegistry()
        self._connections = WorkerConnections(lambda addr: token if addr in self._registry else None, timeout)
        self._requests = PendingRequests(self._connections, DrainFunctions(timeout))
        self._kept = KeptShards()
        # Its own process knows its steps by this number, other workers by the connection.
        self._claimant = secrets.randbits(63)
        self._step: int | None = None
        self.update(workers)

    @classmethod
    def from_group(
        cls, group: Any = None, *, role: str = "worker", token: str | None = None, timeout: float = 30.0
    ) -> Controller:
        """Collective: makes a controller of all ranks of a process group, to be used on one of them.

        Args:
            group: the process group; None is all ranks.
            role: the role of the calling rank.
            token: the token that the ranks serve with; by default that of this rank's server.
            timeout: as of the constructor.

        A rank that serves already goes on; one that does not begins to serve at its default address.
        """
        workers = group_workers(group, role)
        return cls(workers, token=token or state().server.token, timeout=timeout)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers."""
        return self._registry.workers

    def update(self, workers: Iterable[Worker]) -> None:
        """Replaces the workers, when processes were started or have ended.

        What could not be drained on workers that are left out is given up. New workers join the step under way.
        """
        self._check_open()
        if not isinstance(workers, Iterable):
            raise InvalidTypeError(
                f"workers is a {type(workers).__qualname__}: give a list of Worker(addr, role, rank)"
            )
        with self._closed_if_interrupted():
            new = self._registry.replace(workers)
            self._connections.keep_only(self._registry.addresses())
            self._requests.keep_only(self._registry.addresses())
            if self._step is not None:
                begin = Request("POST", f"/epoch/{self._step}/begin")
                self._requests.send((worker, begin) for worker in new)

    def clear_batches(self, *targets: Any) -> Drained:
        """Drains all shards of the handles in `targets`: from every fetch buffer, then from their owners.

        A worker that fails is warned of, and tried again at the next step or drain.

        Args:
            targets: nested containers of handles.

        Raises:
            DrainError: a worker has failed now and in the step or drain before.
        """
        self._check_open()
        handles = [handle for target in targets for handle in claimed(target, "clear_batches")]
        owners = self._owners_of(handles)
        with self._closed_if_interrupted(), self._requests.skip_silent_workers():
            self._requests.repeat_failed()
            ids = shard_ids(handles)
            if not ids:
                return Drained(0, 0, 0, {}, {})
            ShardStore.clear_buffer(ids)
            drop = Request("DELETE", "/buffer/clear", ids)
            dropped = self._requests.send_until_done(
                WorkerRequest(worker, drop, ids) for worker in self._registry.workers
            )
            removed = self._requests.send_until_done(self._removals(owners))
            self._kept.discard(owners)
            for handle in handles:
                handle.forget()
            return Drained(
                total(dropped, "cleared_count"),
                total(removed, "cleared_count"),
                total(removed, "freed_bytes"),
                {**failures_of(dropped), **failures_of(removed)},
                self._entries_left(is_step_over=False),
            )

    @contextlib.contextmanager
    def step(self, claim: Any = None) -> Iterator[Step]:
        """A step: when the block ends, what any worker fetched in it is dropped, and the shards of `claim` removed.

        Shards that no step claims stay. Fetches between two steps belong to the later one.

        Args:
            claim: nested containers of the handles that this step consumes.

        Raises:
            ShardGoneError: a claimed shard does not exist, or another step claims it. All shards stay.
            DrainError: a worker does not begin the step, or could not be drained now and in the step before.
        """
        self._check_open()
        handles = claimed(claim, "step")
        owners = self._owners_of(handles)
        if self._step is not None:
            raise InvalidInputError(f"this controller is in step {self._step}: end that one first")
        with self._closed_if_interrupted():
            self._requests.repeat_failed()
            step = self._begin(handles, owners)
            try:
                yield Step(step.number)
            except (Exception, SystemExit, GeneratorExit):
                self._end(step)
                raise
            self._end(step)

    def keep(self, obj: Any) -> int:
        """Carries over the shards of handles in `obj`: they do not end with the current step.

        They are unclaimed again, and stay with everybody who fetched them until a later step claims or drains them.
        Shards that another controller's step claimed, or workers fetched in it, stay while this controller is open
        and end with both.

        Args:
            obj: nested containers of handles.

        Returns:
            The number of shards and fetched entries that are kept.

        Raises:
            DrainError: a worker does not answer. The shards end with the current step after all.
        """
        self._check_open()
        handles = claimed(obj, "keep")
        owners = self._owners_of(handles)
        ids = shard_ids(handles)
        keep = Request("POST", "/keep", ids)
        requests = [(worker, keep) for worker in self._registry.with_server()]
        requests += [
            (self._registry.at(owner), Request("POST", "/keep", own))
            for owner, own in owners.items()
            if owner not in self._registry
        ]
        with self._closed_if_interrupted():
            self._kept.begin_keep(ids)
            answers = self._requests.send(requests)
            kept = ShardStore.keep(self._claimant, ids)
            raise_failures("could not be told what to keep", answers)
            self._kept.finish_keep(owners)
        return kept + total(answers, "kept_count") + total(answers, "kept_shards")

    def stats(self) -> dict[Worker, dict[str, Any] | Exception]:
        """The `/stats` of every worker with a server, or its failure."""
        self._check_open()
        with self._closed_if_interrupted():
            return self._requests.send(
                (worker, Request("GET", "/stats")) for worker in self._registry.with_server()
            )

    def close(self) -> None:
        """Disconnects from the workers, which drop the step and the claims of this controller. Idempotent."""
        self._close("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._step = None
        # In a child made by fork the connections are the parent's; at the interpreter's end they end with the process.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._give_up()

    def _give_up(self) -> None:
        """Gives up the current step and its claims: a worker notices the end of its connection."""
        self._connections.close()
        ShardStore.give_up(self._claimant)

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
            raise InvalidInputError(f"this controller is that of process {self._process}: make another one")
        if self._closed is not None:
            raise InvalidInputError(f"this controller is closed ({self._closed}): make another one")

    def _begin(self, handles: list[RTensor], owners: dict[str, list[str]]) -> _OpenStep:
        """Begins a step on every worker and claims its shards; or gives everything up."""
        number = next_step_number()
        try:
            server = state().server
            if server is None or server.addr not in self._registry:
                ShardStore.begin_epoch(number, self._claimant)
            begin = Request("POST", f"/epoch/{number}/begin")
            answers = self._requests.send((worker, begin) for worker in self._registry.with_server())
            raise_failures(f"did not begin step {number}", answers)
            claims = self._claim(number, owners)
        except Exception:
            self._give_up()
            raise
        self._step = number
        # A later step than those that kept these.
        self._kept.discard(owners)
        kept_earlier = {one for answer in claims.values() for one in names_in(answer, "kept_shard_ids")}
        return _OpenStep(number, handles, owners, kept_earlier, self._connections.numbers())

    def _claim(self, number: int, owners: dict[str, list[str]]) -> dict[Worker, Any]:
        """Claims shards; waits a moment for owners that have not noticed the end of an earlier controller."""
        requests = [
            (self._registry.at(owner), Request("POST", f"/epoch/{number}/claim", ids))
            for owner, ids in owners.items()
        ]
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:
            claims = self._requests.send(requests)
            raise_failures(f"did not claim shards for step {number}", claims)
            is_taken = any(names_in(answer, "taken_shard_ids") for answer in claims.values())
            if not is_taken or time.monotonic() > deadline:
                break
            time.sleep(_RETRY_SECONDS)
        for worker, answer in claims.items():
            check_claim(worker, answer)
        return claims

    def _end(self, step: _OpenStep) -> None:
        """Drains a step everywhere, consumers before owners."""
        if self._closed is not None or os.getpid() != self._process or sys.is_finalizing():
            # It was given up; or it is the parent's; or no thread is left that could send anything.
            return
        self._step = None
        ending, kept_wrongly = self._kept.end_step(step.owners)
        ids = [one for some in ending.values() for one in some]
        by_name = sorted(kept_wrongly | step.kept_earlier.intersection(ids))
        owners = [self._registry.at(owner) for owner in ending]
        consumers = [worker for worker in self._registry.workers if worker.addr not in ending]
        end = Request("POST", f"/epoch/{step.number}/end")
        send = self._requests.send_until_done
        with self._requests.skip_silent_workers():
            # Owners refuse fetches of these from here on: a late one would belong to the next step.
            close = Request("POST", f"/epoch/{step.number}/close")
            closed = self._requests.send(
                (one, close) for one in owners if one.drain is None and ending[one.addr]
            )
            ShardStore.clear_buffer([*ids, *by_name])
            ShardStore.end_epoch(step.number)
            answers = send(WorkerRequest(worker, end, ids) for worker in consumers)
            # Before the end frees their names.
            unclaimed = self._reconnected(step) | failures_of(closed).keys()
            send(
                one
                for one in self._removals(ending)
                if one.worker in unclaimed or kept_wrongly.intersection(one.shard_ids)
            )
            answers |= send(WorkerRequest(owner, end, ids) for owner in owners)
            if by_name:
                drop = Request("DELETE", "/buffer/clear", by_name)
                holders = dict.fromkeys([*self._registry.with_server(), *owners])
                send(WorkerRequest(worker, drop, by_name) for worker in holders if worker.drain is None)
            self._drain_reconnected(step)
            for worker, answer in answers.items():
                if isinstance(answer, dict):
                    warn_of_ledger(worker, step.number, answer)
            self._entries_left(is_step_over=True)
        ended = set(ids)
        for handle in step.handles:
            if handle.shard_id in ended:
                handle.forget()

    def _reconnected(self, step: _OpenStep) -> set[Worker]:
        """Workers whose connection was lost since the step began: they have ended it, and unclaimed its shards."""
        return {
            self._registry.at(addr)
            for addr, number in self._connections.numbers().items()
            if number != step.connections.get(addr, number)
        }

    def _drain_reconnected(self, step: _OpenStep) -> None:
        """Drains what workers fetched after they lost the connection, which belongs to the next step there."""
        workers = [one for one in self._reconnected(step) if one.addr in self._registry]
        number = next_step_number()
        for action in ("begin", "end"):
            request = Request("POST", f"/epoch/{number}/{action}")
            self._requests.send((worker, request) for worker in workers)

    def _entries_left(self, *, is_step_over: bool) -> dict[Worker, int]:
        """Entries left in the fetch buffers, which are warned of, by worker."""
        request = Request("GET", "/buffer/stats")
        answers = self._requests.send((worker, request) for worker in self._registry.with_server())
        left = {
            worker: entries_left(worker, answer, is_step_over=is_step_over)
            for worker, answer in answers.items()
        }
        return {worker: entries for worker, entries in left.items() if entries}

    def _owners_of(self, handles: Iterable[RTensor]) -> dict[str, list[str]]:
        """Shard ids by owner. Raises `InvalidInputError` for owners that no request reaches."""
        owners = by_owner(handles)
        check_owners(owners.keys() - self._registry.addresses())
        return owners

    def _removals(self, owners: dict[str, list[str]]) -> Iterator[WorkerRequest]:
        for owner, ids in owners.items():
            worker = self._registry.at(owner)
            if ids and worker.drain is None:
                yield WorkerRequest(worker, Request("DELETE", "/data/clear", ids), ids)
