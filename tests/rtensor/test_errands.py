"""What a controller has its workers do: who is asked, and who no longer."""

from __future__ import annotations

from typing import Any

from tundish.errors import TransferError
from tundish.rtensor.errands import Errands
from tundish.rtensor.hooks import Hooks
from tundish.rtensor.lines import Request, SilentError, StepTakenError, Worker

ANSWERS: dict[str, Any] = {
    "well:1": {},
    "taken:1": StepTakenError("it is another controller's"),
    "refusing:1": TransferError("it refuses"),
    "silent:1": SilentError("it does not answer"),
}


class FalseLines:
    """Answers what `ANSWERS` has, and notes who was asked."""

    def __init__(self) -> None:
        self.timeout = 30.0
        self.asked: list[list[str]] = []

    def ask_all(self, requests: Any) -> list[Any]:
        self.asked.append([worker.addr for worker, _ in requests])
        return [ANSWERS[addr] for addr in self.asked[-1]]


def test_in_a_hurry_those_that_said_no_are_asked_again_and_silent_ones_are_not() -> None:
    lines: Any = FalseLines()
    errands = Errands(lines, Hooks(30.0))
    request = Request("POST", "/epoch/1/begin")

    def ask() -> None:
        errands.ask((Worker(addr), request) for addr in ANSWERS)

    def ask_often() -> None:
        ask()
        errands.hurried(ask)
        ask()

    errands.hurried(ask_often)
    ask()
    everybody = list(ANSWERS)
    assert lines.asked == [everybody, *[everybody[:-1]] * 2, everybody]
