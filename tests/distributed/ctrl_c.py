"""Ctrl-C at every moment of a call, one after the other."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Self

__all__ = ["CtrlC", "at_every_moment"]


class CtrlC:
    """Raises `KeyboardInterrupt` once on this thread, at the `number`th moment in `places` at which it can come.

    The interpreter looks for signals when a function begins, after each call, and where a loop begins again. This
    raises before the step that comes next; where that is not in the same `try` or `with`, the moment is passed over.

    `places`: functions, and modules, which stand for all functions in them. `is_suppressed`: the block ends without an
    error.
    """

    def __init__(
        self, number: int, *places: Callable[..., Any] | ModuleType, is_suppressed: bool = False
    ) -> None:
        self._is_suppressed = is_suppressed
        self._left = number
        self._files = {place.__file__ for place in places if isinstance(place, ModuleType)}
        self._codes: set[CodeType] = {place.__code__ for place in places if not isinstance(place, ModuleType)}
        # Of each frame whose last step looks for signals: what handles an error there.
        self._looks: dict[FrameType, int | None] = {}
        self.came = False

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in self._codes and frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            handler = _handler_at(frame.f_code, frame.f_lasti)
            if frame in self._looks:
                self._left -= self._looks.pop(frame) == handler
                if self._left < 0:
                    self.came = True
                    raise KeyboardInterrupt
            step = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if step.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
                self._looks[frame] = handler
        elif event != "line":
            # After a call that failed it does not look.
            self._looks.pop(frame, None)
        return self._step

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        self._looks.clear()
        return self._is_suppressed and isinstance(error, KeyboardInterrupt)


def _handler_at(code: CodeType, offset: int) -> int | None:
    for start, end, target in _handlers_of(code):
        if start <= offset < end:
            return target
    return None


@functools.cache
def _handlers_of(code: CodeType) -> list[tuple[int, int, int]]:
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # nothing else reads it
    return [(entry.start, entry.end, entry.target) for entry in table]


def at_every_moment(*places: Callable[..., Any] | ModuleType) -> Iterator[tuple[int, CtrlC]]:
    """Numbers, and blocks in which Ctrl-C comes, each at the next moment, and ends them without an error.

    Until a block was left before it came.
    """
    for number in itertools.count():
        ctrl_c = CtrlC(number, *places, is_suppressed=True)
        yield number, ctrl_c
        if not ctrl_c.came:
            assert number > 0
            return
