"""Binds the function of a pool to its shared arguments, for workers that are forked and for those that are not.

A forked worker finds the arguments in its memory. For other workers, arrays are copied to shared memory once, and
everything else is pickled once, when the pool is made: an argument that cannot be sent is refused then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from tundish.errors import NotPicklableError
from tundish.shm.pool.messages import PROTOCOL, dumps, loads
from tundish.shm.shared_array import SharedArray

__all__ = ["PlacedFunction", "bind_inherited"]


def _bind(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A function of the item alone."""
    if not shared:
        return function
    values = _in_order(function, shared)
    if values is None:
        return partial(function, **shared)
    # Keyword arguments take longer than an empty task.
    if len(values) == 1:
        [only] = values
        return lambda item: function(item, only)
    return lambda item: function(item, *values)


def _in_order(function: Callable[..., Any], shared: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The shared values in the order in which a plain function takes them; None where it does not."""
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    names = code.co_varnames[1 : min(code.co_argcount, 1 + len(shared))]
    return tuple(shared[name] for name in names) if shared.keys() == set(names) else None


def bind_inherited(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Bind the arguments that a forked worker finds in its memory; arrays are read-only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # A fork copies no other thread: an operation that gives them work would wait for ever.
        torch.set_num_threads(1)
    return _bind(function, {name: _read_only(value) for name, value in shared.items()})


class PlacedFunction:
    """A function with its shared arguments, ready to be sent to any number of workers.

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

    def load(self) -> Callable[[Any], Any]:
        """Return the function as a worker calls it."""
        shared: dict[str, Any] = {
            name: _received(stream, f"shared[{name!r}]") for name, stream in self._rest.items()
        }
        shared.update((name, placed.array) for name, placed in self._arrays.items())
        shared.update((name, placed.tensor()) for name, placed in self._tensors.items())
        return _bind(_received(self._function, "the function"), shared)

    def close(self) -> None:
        """Close the segments; they live on as long as a worker has them."""
        for placed in (*self._arrays.values(), *self._tensors.values()):
            placed.close()


def _is_array(value: object) -> bool:
    return type(value) in (np.ndarray, np.memmap) and not value.dtype.hasobject  # type: ignore[attr-defined]


def _is_tensor(value: object) -> bool:
    # There is no tensor where torch is not imported.
    torch = sys.modules.get("torch")
    # A subclass or a quantized tensor has more than its values.
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
