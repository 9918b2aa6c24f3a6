"""Ctrl-C on one rank at every moment of a call that all make: the others hear of it, and the next calls meet again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.distributed.rank_processes import Job, Line, outcome

PATIENCE = 60.0
NEVER = 1 << 30
FINE = ("", "", None)


class Calling:
    """A rank that makes calls; each is interrupted at a moment, where it has so many."""

    def __init__(self, root: Path) -> None:
        import torch

        from tundish.checkpoint import Checkpointer
        from tundish.checkpoint import collective_calls as calls
        from tundish.checkpoint import submit as taking
        from tundish.checkpoint.dcp import load, saver

        self._tensors = {"w": torch.ones(10)}
        self._failures: list[BaseException] = []
        # Longer than the test: what is told in time is not told by a timeout.
        self._checkpointer = Checkpointer(root, on_failure=self._failures.append, timeout=PATIENCE * 2)
        ballot = taking._Ballot
        self._places: dict[str, tuple[Callable[..., Any], ...]] = {
            "save": (calls.CollectiveCalls._first_vote, taking.take, ballot.__init__, ballot.hold),
            "load": (saver.DcpSaver.load, load.load_newest, load._load),
        }
        self._make = calls.CollectiveCalls.make

    def save_hf(self, step: int, moment: int) -> Any:
        return self._interrupted(
            moment, "save", lambda: self._checkpointer.save_hf(step, self._tensors).result(PATIENCE)
        )

    def save_dcp(self, step: int, moment: int) -> Any:
        return self._interrupted(
            moment, "save", lambda: self._checkpointer.save_dcp(step, self._tensors).result(PATIENCE)
        )

    def load_dcp(self, _: int, moment: int) -> Any:
        return self._interrupted(moment, "load", lambda: self._checkpointer.load_dcp(dict(self._tensors)))

    def _interrupted(self, moment: int, where: str, call: Callable[[], object]) -> Any:
        from support.distributed.ctrl_c import CtrlC

        # Before its first step as before the call: the first moment, at which nothing has begun.
        ctrl_c = CtrlC(moment + 1, self._make, *self._places[where])
        begun = time.monotonic()
        with ctrl_c:
            came = outcome(call)
        return came, ctrl_c.came, time.monotonic() - begun


def calling(_: int, line: Line) -> None:
    this = Calling(*line.hear())
    while (order := line.hear()) is not None:
        name, *arguments = order
        line.say(*getattr(this, name)(*arguments))


def test_others_hear_of_a_rank_that_is_interrupted_anywhere_in_a_call(tmp_path: Path) -> None:
    steps = itertools.count()
    with Job(calling, 2, tmp_path) as job:

        def each(call: str, moment: int) -> tuple[Any, Any, bool, float]:
            step = next(steps)
            job.tell(0, (call, step, NEVER))
            job.tell(1, (call, step, moment))
            (first, _, seconds), (second, came, _) = job.hear_all()
            return first, second, came, seconds

        for rank in (0, 1):
            job.tell(rank, (tmp_path / "root",))
        for call in ("save_hf", "save_dcp", "load_dcp"):
            told = 0
            for moment in itertools.count():
                first, second, came, seconds = each(call, moment)
                assert seconds < 20, (call, moment)
                if not came:
                    break
                assert second[0] == "KeyboardInterrupt", (call, moment, second)
                # What it is told of after the last vote of a call, it need not hear.
                told += first != FINE
                assert first == FINE or (first[0], first[2]) == ("PeerFailedError", 1), (call, moment, first)
                assert each(call, NEVER)[:2] == (FINE, FINE), (call, moment)
            assert first == second == FINE
            assert told > 5, call
        for rank in (0, 1):
            job.tell(rank)
        job.expect_end()
