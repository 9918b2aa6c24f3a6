"""The backend of this process: `set_backend`, `current_backend`."""

from __future__ import annotations

from typing import Any

from tundish.errors import InvalidTypeError, format_type
from tundish.rtensor.backends.backend import Backend
from tundish.rtensor.backends.http import HttpBackend
from tundish.rtensor.process_state import state

__all__ = ["current_backend", "set_backend"]


def set_backend(backend: Backend | None) -> None:
    """Set the backend of this process. Shards that are stored stay where they are.

    Args:
        backend: `HttpBackend()`, `LocalBackend()` or `RayBackend()`. None is the default, `HttpBackend()`.

    Raises:
        InvalidTypeError: it is no backend, or a class instead of an instance.

    Example:
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
        >>> td.rtensor.set_backend(None)
    """
    given: Any = backend
    if given is not None and not isinstance(given, Backend):
        shown = f"the class {given.__qualname__}" if isinstance(given, type) else format_type(given)
        raise InvalidTypeError(f"backend is {shown}: give an instance, such as HttpBackend()")
    state().backend = backend


def current_backend() -> Backend:
    """The backend that was set, or an `HttpBackend`."""
    mine = state()
    if mine.backend is None:
        mine.backend = HttpBackend()
    backend: Backend = mine.backend
    return backend
