"""Calls the `drain` functions of workers without a server, with a deadline."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from tundish.daemon_thread import DaemonThread
from tundish.errors import TransferError
from tundish.rtensor.workers.worker import Worker

__all__ = ["ServerlessDrains"]


class ServerlessDrains:
    """Calls drain functions, each on a daemon thread of its own.

    A function that exceeds the timeout has failed, though its thread goes on; it is not called again before it ends.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: dict[Worker, Future[object]] = {}

    def call(self, calls: Iterable[tuple[Worker, list[str]]]) -> dict[Worker, dict[str, Any] | Exception]:
        """Call all functions at once; return `{}` or the failure of each."""
        answers: dict[Worker, dict[str, Any] | Exception] = {}
        begun: dict[Worker, Future[object]] = {}
        ids_of = dict(calls)
        wait([self._running[worker] for worker in ids_of if worker in self._running], self._timeout)
        for worker, ids in ids_of.items():
            if worker in self._running and not self._running[worker].done():
                answers[worker] = TransferError(f"{worker} fails: an earlier call of its drain still runs")
            elif worker.drain is not None:
                thread = DaemonThread("tundish-rtensor-drain")
                begun[worker] = self._running[worker] = thread.submit(functools.partial(worker.drain, ids))
        wait(begun.values(), self._timeout)
        for worker, future in begun.items():
            answers[worker] = self._answer(worker, future)
        return answers

    def _answer(self, worker: Worker, future: Future[object]) -> dict[str, Any] | Exception:
        if not future.done():
            return TransferError(
                f"{worker} fails: its drain function has not ended within {self._timeout:g} s"
            )
        error = future.exception()
        if error is None:
            return {}
        failure = TransferError(f"{worker} fails: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
