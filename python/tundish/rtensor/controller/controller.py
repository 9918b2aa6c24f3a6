"""`Controller`: begins and ends steps on all workers, and drains them.

Invariants:
    A drain goes to every worker of every role and rank, consumers before owners.
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
from typing import Any, Self

from tundish._native import ShardStore, shard_ids
from tundish.distributed import voter_of
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.rtensor.arguments import check_owners
from tundish.rtensor.controller.drained import Drained
from tundish.rtensor.controller.open_step import OpenStep
from tundish.rtensor.controller.request_retries import PendingRequests, WorkerRequest
from tundish.rtensor.controller.responses import (
    check_claim_answers,
    failures_of,
    names_in,
    raise_failures,
    total,
)
from tundish.rtensor.controller.serverless_drains import ServerlessDrains
from tundish.rtensor.handles import RTensor, by_owner, handles_of, required_handles
from tundish.rtensor.process_state import next_step_number, state
from tundish.rtensor.server import server_address, trust_workers
from tundish.rtensor.steps.leak_warnings import entries_left, warn_of_escaped
from tundish.rtensor.steps.step import Step
from tundish.rtensor.workers.connections import HttpRequest, WorkerConnections
from tundish.rtensor.workers.worker import Worker, as_worker
from tundish.timeouts import check_seconds

__all__ = ["Controller"]

# Owners notice the end of a connection, and with it of the claims made on it, within this time.
_NOTICE_SECONDS = 1.0
_RETRY_SECONDS = 0.02


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

    def __init__(self, workers: Iterable[Worker], *, timeout: float = 30.0) -> None:
        timeout = check_seconds(timeout, may_be_zero=False)
        # Why it is closed, once it is.
        self._closed: str | None = None
        self._process = os.getpid()
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
            own = json.dumps([server_address(), role])
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        what = "collect the addresses of the ranks"
        gathered = voter.gather(own, error, what=what)
        together = json.dumps([json.loads(answer) for answer in gathered]) if gathered else None
        collected = json.loads(voter.broadcast(together, what=what))
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
        trust_workers(worker.addr for worker in given if worker.drain is None)
        with self._closed_if_interrupted():
            known, self._workers = self._workers.keys(), by_address
            self._connections.keep_only(by_address.keys())
            self._requests.keep_only(by_address.keys())
            if self._step is not None:
                begin = HttpRequest("POST", f"/step/{self._step.number}/begin")
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
            ShardStore.clear_buffer(ids)
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
    def step(self, claim: Any = None) -> Iterator[Step]:
        """A step: when the block ends, what any worker fetched in it is dropped, and the shards of `claim` removed.

        Shards that no step claims stay. Fetches between two steps belong to the later one.

        Args:
            claim: nested containers of the handles that this step consumes.

        Raises:
            InvalidInputError: `claim` has tensors and no handles, or this controller is in a step already.
            ShardGoneError: a claimed shard does not exist, or another step claims it. All shards stay.
            DrainError: a worker does not begin the step, or could not be drained now and in the step before.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.rtensor.serve(), td.rtensor.Controller([]) as controller:
            ...     batch = td.rtensor.remotize({"rewards": torch.ones(8)})
            ...     with controller.step(claim=batch):
            ...         td.rtensor.localize(batch)["rewards"].sum()
            tensor(8.)
        """
        self._check_open()
        handles = required_handles(claim, "claim")
        owners = self._owners_of(handles)
        if self._step is not None:
            raise InvalidInputError(f"this controller is in step {self._step.number}: end that one first")
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
            kept = ShardStore.keep(ids)
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

    def _close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._step = None
        # In a child made by fork the connections are the parent's; at the interpreter's end they end with the process.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._release_claims()

    def _release_claims(self) -> None:
        """Give up the current step and its claims: a worker notices the end of its connection."""
        self._connections.close()
        ShardStore.release_claimant(self._claimant)

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

    def _begin(self, handles: list[RTensor], owners: dict[str, list[str]]) -> OpenStep:
        """Begin a step on every worker and claim its shards, or give everything up."""
        number = next_step_number()
        try:
            server = state().server
            if server is None or server.addr not in self._workers:
                ShardStore.begin_step(number, self._claimant)
            begin = HttpRequest("POST", f"/step/{number}/begin")
            answers = self._requests.send((worker, begin) for worker in self._serving_workers())
            raise_failures(f"did not begin step {number}", answers)
            claim_answers = self._claim(number, owners)
        except Exception:
            self._release_claims()
            raise
        kept_earlier = {
            shard_id for answer in claim_answers.values() for shard_id in names_in(answer, "kept_shard_ids")
        }
        self._step = OpenStep(number, handles, owners, set(), kept_earlier, self._connections.numbers())
        return self._step

    def _claim(self, number: int, owners: dict[str, list[str]]) -> dict[Worker, Any]:
        """Claim shards; wait a moment for owners that have not noticed the end of an earlier controller."""
        requests = [
            (self._worker_at(owner), HttpRequest("POST", f"/step/{number}/claim", ids))
            for owner, ids in owners.items()
        ]
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:
            answers = self._requests.send(requests)
            raise_failures(f"did not claim shards for step {number}", answers)
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
        end = HttpRequest("POST", f"/step/{step.number}/end")
        send = self._requests.send_until_done
        ShardStore.clear_buffer([*ids, *by_name])
        ShardStore.end_step(step.number)
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
                warn_of_escaped(str(worker), step.number, step_counts)
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
        check_owners(owners.keys() - self._workers.keys())
        return owners

    def _removals(self, owners: dict[str, list[str]]) -> Iterator[WorkerRequest]:
        for owner, ids in owners.items():
            worker = self._worker_at(owner)
            if ids and worker.drain is None:
                yield WorkerRequest(worker, HttpRequest("DELETE", "/data/clear", ids), ids)
