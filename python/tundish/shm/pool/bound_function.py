"""Binds the function of a pool to its shared arguments.

A forked worker inherits the arguments. For other workers, arrays are copied to shared memory once, and everything else
is pickled once. Both happen when the pool is made, so an argument that cannot be sent is refused then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from tundish.errors import InvalidTypeError, NotPicklableError
from tundish.shm.pool.messages import PICKLE_PROTOCOL, dumps, loads
from tundish.shm.shared_array import SharedArray

__all__ = ["SendableFunction", "bind_inherited"]


def bind_inherited(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Bind the arguments that a forked worker inherits. Arrays are read-only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # The threads of torch do not exist after a fork: an operation that uses them would wait for ever.
        torch.set_num_threads(1)
    return _bind(function, {name: _read_only(value) for name, value in shared.items()})


def _bind(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and code.co_varnames[1 : min(1 + len(shared), code.co_argcount)] == tuple(shared):
        values = tuple(shared.values())
        # An empty task takes half the time that it takes with keyword arguments.
        return lambda item: function(item, *values)
    return partial(function, **shared)


def _read_only(value: Any) -> Any:
    if isinstance(value, SharedArray):
        return SharedArray.attach(value.handle)
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


class SendableFunction:
    """A function and its shared arguments, ready to be sent to any number of workers.

    Raises:
        NotPicklableError: the function or an argument cannot be pickled.
        OutOfMemoryError: there is no room for the arrays.
    """

    def __init__(self, function: Callable[..., Any], shared: Mapping[str, Any]) -> None:
        self._function = _sent(function, "the function")
        self._shared = {name: _sendable(name, value) for name, value in shared.items()}
        self._tensors = {name for name, value in shared.items() if not isinstance(value, np.ndarray)}

    def load(self) -> Callable[[Any], Any]:
        """Return the function as a worker calls it."""
        shared: dict[str, Any] = {}
        for name, sent in self._shared.items():
            if isinstance(sent, bytes):
                shared[name] = _received(sent, f"shared[{name!r}]")
            else:
                shared[name] = sent.tensor() if name in self._tensors else sent.array
        return _bind(_received(self._function, "the function"), shared)


def _sendable(name: str, value: Any) -> SharedArray | bytes:
    torch = sys.modules.get("torch")
    # A subclass may have more than the values of the array.
    if type(value) in (np.ndarray, np.memmap) or (torch is not None and isinstance(value, torch.Tensor)):
        with contextlib.suppress(InvalidTypeError):
            return SharedArray.from_array(value)
    return _sent(value, f"shared[{name!r}]")


def _sent(value: Any, what: str) -> bytes:
    try:
        return dumps(value, PICKLE_PROTOCOL)
    except Exception as error:
        raise NotPicklableError(
            f"{what} cannot be sent to workers that are not forked: {error}; define it at the top level of a module, "
            'or use mp_context="fork"'
        ) from error


def _received(stream: bytes, what: str) -> Any:
    try:
        return loads(stream)
    except (AttributeError, ImportError) as error:
        raise NotPicklableError(
            f"{what} is not found by workers that are not forked: {error}; define it in a module that they can import, "
            'which a notebook, a console and `python -c` are not, or use mp_context="fork"'
        ) from error
