"""A progress line for long work, drawn by tqdm on standard error.

Invariant: a line that cannot be drawn is given up silently and never disturbs the work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Self

from tundish.errors import InvalidTypeError


class ProgressLine:
    """A progress line, as a context manager that wipes the line at its end.

    Args:
        title: stands at the beginning of the line.
        progress: `None` shows the line when standard error is a terminal, `True` always, `False` never.
        unit: the unit of what is counted, in the plural. The line then shows numbers and a rate, also without a total.
        delay: seconds after which a line appears.

    Attributes:
        shown: whether anything is drawn.

    Raises:
        InvalidTypeError: `progress` is none of these.

    Example:
        >>> with ProgressLine("pack", progress=False) as line:
        ...     line.update("cutting", 5, 10)
    """

    def __init__(
        self, title: str, progress: bool | None = None, *, unit: str | None = None, delay: float = 0.0
    ) -> None:
        if progress is not None and not isinstance(progress, bool):
            raise InvalidTypeError(f"progress must be True, False or None, not {progress!r}")
        self.shown = _stderr_is_terminal() if progress is None else progress
        self._title = title
        self._unit = unit
        self._delay = delay
        self._phase: str | None = None
        self._bar: Any = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `phase` are done; a new phase starts the line afresh.

        A `total` of 0 means that it is unknown: without a unit the line does not change.
        """
        if not self.shown or not (total or self._unit):
            return
        try:
            if phase != self._phase:
                self._start(phase, total)
            self._bar.total = total or None
            self._bar.update(done - self._bar.n)
        except Exception:  # noqa: BLE001 (whatever it is, the work goes on)
            self._give_up()

    @property
    def callback(self) -> Callable[[str, int, int], None] | None:
        """`update`, which the compiled module calls now and then; None if nothing is drawn."""
        return self.update if self.shown else None

    def close(self) -> None:
        """Wipe the line; a later `update` is ignored."""
        self.shown = False
        if self._bar is not None:
            try:
                self._bar.close()
            except Exception:  # noqa: BLE001 (whatever it is, the work goes on)
                self._give_up()
        self._bar = None

    def _start(self, phase: str, total: int) -> None:
        from tqdm import tqdm

        class Line(tqdm):  # type: ignore[type-arg]
            # With another value, tqdm starts a thread that lives as long as the process.
            monitor_interval = 0

        if self._bar is not None:
            self._bar.close()
        self._bar = Line(
            total=total or None,
            desc=f"{self._title}: {phase}",
            # Without a unit the units differ from phase to phase (samples, packs, bytes), so no numbers are shown.
            bar_format=None if self._unit else "{desc} {percentage:3.0f}% |{bar}| {elapsed} < {remaining}",
            unit=f" {self._unit or 'it'}",
            leave=False,
            delay=self._delay,
            ncols=_columns(),
            # tqdm would ask the terminal, and draw nothing on one of 0 rows (see `_columns`).
            nrows=20,
            file=sys.stderr,
        )
        self._phase = phase

    def _give_up(self) -> None:
        self.shown = False
        if self._bar is not None:
            # Otherwise the bar draws itself once more when it is garbage collected.
            self._bar.disable = True
        self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stderr_is_terminal() -> bool:
    # Standard error may be missing (a Python without a console) or closed (a daemon).
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False


def _columns() -> int:
    # Terminals of containers and build services may report 0 columns.
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
