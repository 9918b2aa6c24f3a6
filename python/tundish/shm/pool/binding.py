"""The function of a pool and its shared arguments, as workers get them.

Owns, for workers that are not forked, the segments that the arrays lie in. What always holds: an array is placed once,
whatever the number of workers, and nobody can write to it there; everything else is pickled once, when the pool is
made, so that what cannot be sent is refused then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from tundish.errors import NotPicklableError
from tundish.shm.array import SharedArray
from tundish.shm.pool.messages import PROTOCOL, dumps, loads

__all__ = ["Placed", "bound", "inherited"]


def bound(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """`function` with its shared arguments."""
    if not shared:
        return function
    values = _in_order(function, shared)
    if values is None:
        return partial(function, **shared)
    # An empty task takes less than names that are given with a call.
    if len(values) == 1:
        [only] = values
        return lambda item: function(item, only)
    return lambda item: function(item, *values)


def _in_order(function: Callable[..., Any], shared: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The shared values as a plain function takes them behind the item; None where it does not take them so."""
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    names = code.co_varnames[1 : min(code.co_argcount, 1 + len(shared))]
    return tuple(shared[name] for name in names) if shared.keys() == set(names) else None


def inherited(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """`function` with the shared arguments that a forked worker finds in its memory, arrays read-only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # Its other threads did not come along: an operation that gave them work would wait for ever.
        torch.set_num_threads(1)
    return bound(function, {name: _read_only(value) for name, value in shared.items()})


class Placed:
    """`function` with its shared arguments, ready to be sent to any number of workers.

    Raises:
        NotPicklableError: one of them, or the function, cannot be pickled.
        OutOfMemoryError: there is no room for the arrays.
    """

    def __init__(self, function: Callable[..., Any], shared: Mapping[str, Any]) -> None:
        self._arrays: dict[str, SharedArray] = {}
        self._tensors: dict[str, SharedArray] = {}
        self._function = _sent(function, "the function")
        self._rest = {
            name: _sent(value, f"shared[{name!r}]")
            for name, value in shared.items()
            if not (_is_array(value) or _is_tensor(value))
        }
        try:
            for name, value in shared.items():
                if _is_array(value):
                    self._arrays[name] = SharedArray.from_array(value)
                elif _is_tensor(value):
                    self._tensors[name] = SharedArray.from_array(value)
        except BaseException:
            self.close()
            raise

    def call(self) -> Callable[[Any], Any]:
        """The function as a worker calls it."""
        shared: dict[str, Any] = {
            name: _received(stream, f"shared[{name!r}]") for name, stream in self._rest.items()
        }
        shared.update((name, placed.array) for name, placed in self._arrays.items())
        shared.update((name, placed.tensor()) for name, placed in self._tensors.items())
        return bound(_received(self._function, "the function"), shared)

    def close(self) -> None:
        """Let go of the segments; they live on as long as a worker has them."""
        for placed in (*self._arrays.values(), *self._tensors.values()):
            placed.close()


def _is_array(value: object) -> bool:
    return type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject  # type: ignore[attr-defined]


def _is_tensor(value: object) -> bool:
    # Nobody has a tensor without having imported torch.
    torch = sys.modules.get("torch")
    # What a subclass or a quantized one has beside its values would stay here.
    return (
        torch is not None
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"  # type: ignore[attr-defined]
        and value.layout == torch.strided  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
    )


def _read_only(value: Any) -> Any:
    if isinstance(value, SharedArray):
        return SharedArray.attach(value.handle)
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _sent(value: Any, what: str) -> bytes:
    try:
        return dumps(value, PROTOCOL)
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
