"""Ctrl-C at every moment of a call, one after the other."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import operator
import sys
import threading
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
        self._steps = _Steps(self)
        self.came = False

    def is_among(self, code: CodeType) -> bool:
        """Whether the places have this code."""
        return code in self._codes or code.co_filename in self._files

    def step(self, frame: FrameType, offset: int) -> None:
        """A step begins."""
        handler = _handler_at(frame.f_code, offset)
        if frame in self._looks:
            self._left -= self._looks.pop(frame) == handler
            if self._left < 0 and not self.came:
                self.came = True
                raise KeyboardInterrupt
        name = dis.opname[frame.f_code.co_code[offset]]
        if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and not name.startswith("CALL_INTRINSIC"):
            self._looks[frame] = handler

    def leave(self, frame: FrameType) -> None:
        """The last step failed, or left its function: after such a one the interpreter does not look."""
        self._looks.pop(frame, None)

    def __enter__(self) -> Self:
        self._steps.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._steps.end()
        self._looks.clear()
        return self._is_suppressed and isinstance(error, KeyboardInterrupt)


class _TracedSteps:
    """Tells `ctrl_c` of the steps of this thread, by a trace function."""

    def __init__(self, ctrl_c: CtrlC) -> None:
        self._ctrl_c = ctrl_c

    def begin(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def end(self) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._ctrl_c.is_among(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._ctrl_c.step(frame, frame.f_lasti)
        elif event != "line":
            self._ctrl_c.leave(frame)
        return self._step


class _MonitoredSteps:
    """The same for Python 3.12 and later, whose trace functions hear of no step in a function's first call."""

    _TOOL = 3

    def __init__(self, ctrl_c: CtrlC) -> None:
        self._ctrl_c = ctrl_c

    def begin(self) -> None:
        monitoring: Any = sys.monitoring
        events = monitoring.events
        self._thread = threading.get_ident()
        monitoring.use_tool_id(self._TOOL, "Ctrl-C")
        monitoring.register_callback(self._TOOL, events.INSTRUCTION, self._step)
        leaving = (events.RAISE, events.PY_UNWIND, events.PY_RETURN, events.PY_YIELD)
        for event in leaving:
            monitoring.register_callback(self._TOOL, event, self._leave)
        # What was of no use to the one before.
        monitoring.restart_events()
        monitoring.set_events(self._TOOL, functools.reduce(operator.or_, leaving, events.INSTRUCTION))

    def end(self) -> None:
        monitoring: Any = sys.monitoring
        monitoring.set_events(self._TOOL, 0)
        monitoring.free_tool_id(self._TOOL)

    def _step(self, code: CodeType, offset: int) -> Any:
        if not self._ctrl_c.is_among(code):
            return sys.monitoring.DISABLE
        if threading.get_ident() == self._thread:
            self._ctrl_c.step(sys._getframe(1), offset)
        return None

    def _leave(self, code: CodeType, *_: object) -> None:
        if self._ctrl_c.is_among(code) and threading.get_ident() == self._thread:
            self._ctrl_c.leave(sys._getframe(1))


_Steps = _MonitoredSteps if sys.version_info >= (3, 12) else _TracedSteps


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
    # What earlier tests left is finalised before, and not at one of the moments.
    gc.collect()
    for number in itertools.count():
        ctrl_c = CtrlC(number, *places, is_suppressed=True)
        yield number, ctrl_c
        if not ctrl_c.came:
            assert number > 0
            return
