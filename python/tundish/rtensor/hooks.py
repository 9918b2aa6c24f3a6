"""Functions that drain workers which do not serve.

What always holds: nobody waits for one of them beyond the timeout, and of one worker no two run at once: what goes on
after its time does so by a thread that the end of the process does not wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from typing import Any

from tundish.errors import TransferError
from tundish.rtensor.lines import Worker
from tundish.waiting import Moment, Thread, to_its_end, wait_for

__all__ = ["Hooks"]


class _Call:
    """A call of one, under way or done."""

    def __init__(self, worker: Worker, ids: list[str]) -> None:
        self._worker = worker
        self._ids = ids
        self.answer: dict[str, Any] | Exception | None = None
        # What is no failure of the worker: it ends the caller's step, as if the function had been called there.
        self.escaped: BaseException | None = None
        self._over = Moment()
        Thread(self._run, "tundish-rtensor-drain").start()

    def _run(self) -> None:
        try:
            if self._worker.drain is not None:
                self._worker.drain(self._ids)
            self.answer = {}
        except Exception as error:  # noqa: BLE001 (the controller's to judge, as what a worker answers)
            self.answer = TransferError(f"{self._worker} fails: {type(error).__name__}: {error}")
            self.answer.__cause__ = error
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            self.escaped = error
        finally:
            self._over.come()

    def wait(self, deadline: float) -> bool:
        return wait_for(self._over.wait, deadline - time.monotonic())


class Hooks:
    """Calls them.

    Attributes:
        timeout: seconds that each may take.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        # Those that nobody saw end: they took too long, or who waited for them was interrupted.
        self._under_way: dict[Worker, _Call] = {}

    def call(self, wanted: Iterable[tuple[Worker, list[str]]]) -> dict[Worker, Any]:
        """What the calls came to, all at once: as of workers that serve."""
        deadline = time.monotonic() + self.timeout
        ids_of: dict[Worker, list[str]] = {}
        for worker, ids in wanted:
            ids_of.setdefault(worker, []).extend(ids)
        before = self._under_way.keys() & ids_of.keys()
        self._begin(ids_of, ids_of.keys() - before)
        self._begin(ids_of, {worker for worker in before if self._under_way[worker].wait(deadline)})
        answers: dict[Worker, Any] = {}
        for worker in ids_of:
            call = self._under_way[worker]
            if call.wait(deadline):
                del self._under_way[worker]
                if call.escaped is not None:
                    raise call.escaped
                answers[worker] = call.answer
            else:
                answers[worker] = TransferError(
                    f"{worker} fails: the function that drains it has not ended within {self.timeout:g} s"
                )
        return answers

    def _begin(self, ids_of: dict[Worker, list[str]], workers: Set[Worker]) -> None:
        def begin() -> None:
            for worker in workers:
                self._under_way[worker] = _Call(worker, ids_of[worker])

        if workers:
            # None begins that is not noted, though Ctrl-C comes.
            to_its_end(begin)
