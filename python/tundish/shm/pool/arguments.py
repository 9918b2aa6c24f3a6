"""Checks the arguments of a pool before any process is started."""

from __future__ import annotations

import inspect
import multiprocessing
import operator
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Final

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, PoolError, format_integer, format_type

__all__ = [
    "MAIN_GUARD",
    "checked_context",
    "checked_count",
    "checked_shared",
    "checked_workers",
]

MAIN_GUARD: Final = (
    'Under spawn and forkserver workers import the main module: make pools under `if __name__ == "__main__":`, and '
    "read what the workers wrote to stderr"
)
# The task queue has room for so many.
_MAX_WORKERS: Final = 512


def checked_shared(fn: Callable[..., Any], shared: Mapping[str, Any] | None) -> dict[str, Any]:
    if not callable(fn):
        raise InvalidTypeError(f"fn is {format_type(fn)}: give a function")
    if shared is not None and not isinstance(shared, Mapping):
        raise InvalidTypeError(f"shared is {format_type(shared)}: give a dict of argument names and values")
    checked = dict(shared or {})
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return checked
    try:
        signature.bind(None, **checked)
    except TypeError as error:
        raise InvalidTypeError(
            f"{getattr(fn, '__qualname__', fn)!s}{signature} cannot be called as fn(item, **shared): {error}"
        ) from None
    return checked


def checked_count(value: Any, name: str, *, minimum: int) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise InvalidTypeError(f"{name} is {value!r}: give an integer of at least {minimum}") from error
    if count < minimum:
        raise InvalidInputError(f"{name} is {format_integer(count)}: give at least {minimum}")
    return count


def checked_workers(value: int | None) -> int:
    if value is None:
        return _native.available_processors()
    count = checked_count(value, "max_workers", minimum=1)
    if count > _MAX_WORKERS:
        raise InvalidInputError(f"max_workers is {format_integer(count)}: give at most {_MAX_WORKERS}")
    return count


def checked_context(value: str | BaseContext | None) -> BaseContext:
    try:
        context = value if isinstance(value, BaseContext) else multiprocessing.get_context(value or "fork")
    except ValueError as error:
        raise InvalidInputError(
            f"mp_context is {value!r}: give fork, forkserver, spawn, or such a context of multiprocessing"
        ) from error
    process = multiprocessing.current_process()
    if process.daemon:
        raise PoolError(
            f"process {process.name!r} is a daemon of multiprocessing, which may have no children: make the pool in "
            "another process"
        )
    if context.get_start_method() != "fork" and getattr(process, "_inheriting", False):
        raise PoolError(f"a pool is made while this process, a worker itself, is being started. {MAIN_GUARD}")
    return context
