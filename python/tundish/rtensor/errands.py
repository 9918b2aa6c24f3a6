"""What a controller has its workers do, noted before it begins and until it is done.

What always holds: what fails or is interrupted stays noted, and is tried again when the controller catches up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tundish.errors import TransferError
from tundish.rtensor.answers import failures_of, refuse
from tundish.rtensor.hooks import Hooks
from tundish.rtensor.lines import Lines, Request, SilentError, Worker

__all__ = ["Errand", "Errands"]

_log = logging.getLogger("tundish.rtensor")
# Seconds for each message.
_HURRIED = 1.0


@dataclass(frozen=True, eq=False, slots=True)
class Errand:
    """Something that a worker is to be told, until it was. Those of one `note` have the same number."""

    worker: Worker
    request: Request
    ids: list[str]
    note: int


class Errands:
    """Those of one controller, which go through its `lines`, or by `hooks` to workers that do not serve."""

    def __init__(self, lines: Lines, hooks: Hooks) -> None:
        self._lines = lines
        self._hooks = hooks
        # What began and did not succeed: it failed, or was interrupted.
        self._undone: list[Errand] = []
        self._notes = itertools.count()
        # Those that did not answer, where nobody is to be asked again who did not.
        self._silent: set[Worker] | None = None

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Within it nobody is asked again who did not answer: each would be waited for as often as it is asked."""
        silent = self._silent
        self._silent = set() if silent is None else silent
        try:
            yield
        finally:
            self._silent = silent

    def hurried(self, work: Callable[[], object]) -> None:
        """Do `work` in which nobody is waited for longer than a second, or once more."""
        lines, hooks = self._lines.timeout, self._hooks.timeout
        try:
            self._lines.timeout, self._hooks.timeout = min(_HURRIED, lines), min(_HURRIED, hooks)
            with self.once():
                work()
        finally:
            self._lines.timeout, self._hooks.timeout = lines, hooks

    def note(self, requests: Iterable[tuple[Worker, Request, list[str]]]) -> list[Errand]:
        """Errands that are tried again at the next step, unless they are carried out before."""
        number = next(self._notes)
        errands = [Errand(*one, number) for one in requests]
        self._undone += errands
        return errands

    def forget(self, errands: Iterable[Errand]) -> None:
        done = set(errands)
        self._undone = [one for one in self._undone if one not in done]

    def carry_out(self, errands: Sequence[Errand]) -> dict[Worker, Any]:
        """The answers; what fails is warned of, and stays noted."""
        answers = self.ask((one.worker, one.request) for one in errands if one.worker.drain is None)
        answers |= self._hooks.call(
            [(one.worker, one.ids) for one in errands if one.worker.drain is not None]
        )
        for answer in answers.values():
            if isinstance(answer, Exception):
                _log.warning("a worker could not be drained, which is tried again: %s", answer)
        self.forget(one for one in errands if not isinstance(answers[one.worker], Exception))
        return answers

    def carry_out_in_turn(self, errands: Iterable[Errand]) -> dict[Worker, Exception]:
        """As `carry_out`, of what is the same for several workers at once, one after the other; what failed."""
        failures: dict[Worker, Exception] = {}
        for some in _side_by_side(errands):
            failures |= failures_of(self.carry_out(some))
        return failures

    def ask(self, requests: Iterable[tuple[Worker, Request]]) -> dict[Worker, Any]:
        silent = frozenset(self._silent or ())
        wanted = list(requests)
        asked = [(worker, request) for worker, request in wanted if worker not in silent]
        answers: dict[Worker, Any] = {
            worker: TransferError(f"{worker} was not asked: it did not answer what it was asked before")
            for worker, _ in wanted
            if worker in silent
        }
        answers |= zip([worker for worker, _ in asked], self._lines.ask_all(asked), strict=True)
        if self._silent is not None:
            self._silent |= {one for one, answer in answers.items() if isinstance(answer, SilentError)}
        return answers

    def catch_up(self) -> None:
        """Drain what could not be drained before. Raises `DrainError`."""
        failures = self.carry_out_in_turn(self._undone)
        refuse("could not be drained, now and before (leave out with update() what is gone)", failures)

    def let_go_of_all_but(self, addresses: Set[str]) -> None:
        """What is to be done elsewhere is not any more."""
        self._undone = [one for one in self._undone if one.worker.addr in addresses]


def _side_by_side(errands: Iterable[Errand]) -> list[list[Errand]]:
    """What may be done at once, one part after the other: the same of several workers, where it was noted together.

    So consumers are still told before owners, which the end of a step notes apart though it asks the same of them, and
    of many that are silent each is not waited for in turn.
    """
    parts: list[list[Errand]] = []
    workers: set[Worker] = set()
    for errand in errands:
        is_alike = bool(parts) and _is_alike(parts[-1][0], errand)
        if not is_alike or errand.worker in workers:
            parts.append([])
            workers.clear()
        parts[-1].append(errand)
        workers.add(errand.worker)
    return parts


def _is_alike(one: Errand, other: Errand) -> bool:
    asked, also_asked = one.request, other.request
    return (one.note, asked.method, asked.path) == (other.note, also_asked.method, also_asked.path)
