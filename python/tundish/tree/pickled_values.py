"""Pickles values of unknown types without the tensors and arrays in them.

Invariant: a tensor inside a pickled object, however deep, is a leaf like any other and not in the pickle; nor are an
array's values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from tundish.errors import NotPicklableError, TundishError
from tundish.tree.containers import key_text
from tundish.tree.node_spec import NodeSpec, Token
from tundish.tree.tensors_and_arrays import (
    array_spec,
    array_subclass_spec,
    pickles_as_array,
    tensor_spec,
    tensor_subclass_spec,
)

__all__ = ["dumps_values", "loads_values", "why_not"]

Builder = Callable[[Token, list[Any]], Any]


def _leaf(_: int) -> Tensor:
    """Stands in a pickle for the leaf of that number; `_Unpickler` puts in what finds it."""
    raise NotImplementedError


def _made(_: Token, __: list[Any]) -> Any:
    """Stands in a pickle for the builder of an array, or of a tensor that is more than a leaf."""
    raise NotImplementedError


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        leaf_of: Callable[[Tensor], int],
        careful: bool,
        parts_of: Mapping[int, NodeSpec],
    ) -> None:
        super().__init__(file, 5)
        self._leaf_of = leaf_of
        self._careful = careful
        self._specs = parts_of
        # What parts are made of outlives the pickling, or its identity would be another object's.
        self._alive: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray)
        if not is_array and not isinstance(value, Tensor):
            return NotImplemented
        parts = self._specs.get(id(value))
        if parts is not None:
            pass
        elif is_array:
            if type(value) is np.ndarray:
                parts = array_spec(value)
            elif pickles_as_array(type(value)):
                parts = array_subclass_spec(value)
            if parts is None:
                return NotImplemented
        elif type(value) is not Tensor:
            parts = tensor_subclass_spec(value)
        else:
            parts = tensor_spec(value) if self._careful else None
            if parts is None:
                return _leaf, (self._leaf_of(value),)
        self._alive.append(parts)
        return _made, (parts.token, list(parts.children))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Tensor], build: Builder) -> None:
        super().__init__(file)
        self._stand_ins = {_leaf.__name__: leaves.__getitem__, _made.__name__: build}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._stand_ins:
            return self._stand_ins[name]
        return super().find_class(module, name)


def dumps_values(
    values: list[Any],
    leaf_of: Callable[[Tensor], int],
    careful: bool,
    parts_of: Mapping[int, NodeSpec] = MappingProxyType({}),
) -> bytes:
    """The pickle of `values`; `leaf_of` gives a tensor in them its number.

    Unless `careful`, every exact `torch.Tensor` in them is taken for a plain one. `parts_of`: those of tensors and
    arrays that are named outside of `values` too, by identity, and are to be one again.
    """
    file = io.BytesIO()
    _Pickler(file, leaf_of, careful, parts_of).dump(values)
    return file.getvalue()


def loads_values(encoded: bytes, leaves: Sequence[Tensor], build: Builder) -> list[Any]:
    """The values that `dumps_values` wrote; `build` makes a tensor of its token and parts.

    Raises `NotPicklableError` where one of them cannot be made here.
    """
    try:
        values: list[Any] = _Unpickler(io.BytesIO(encoded), leaves, build).load()
    except TundishError:
        raise
    except Exception as error:
        raise NotPicklableError(
            f"a batch came with an object that cannot be made here: {type(error).__name__}: {error}"
        ) from error
    return values


def why_not(value: Any, careful: bool) -> tuple[str, Exception] | None:
    """Where in `value` something cannot be pickled, as the rest of a path, and why; None: it can."""
    path = ""
    seen = set()
    found: tuple[str, Exception] | None = None
    while id(value) not in seen:
        seen.add(id(value))
        try:
            dumps_values([value], id, careful)
        except RecursionError:
            return path, RecursionError("it is too deep to be pickled")
        except Exception as error:  # noqa: BLE001 (code of users)
            found = path, error
        else:
            return found
        for label, part in _inside(value):
            if _fails(part, careful):
                path, value = path + label, part
                break
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with the rest of its path."""
    for name, part in getattr(value, "__dict__", {}).items():
        yield f".{name}", part
    if isinstance(value, dict):
        yield from ((f"[{key_text(key)}]", part) for key, part in dict.items(value))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))


def _fails(value: Any, careful: bool) -> bool:
    try:
        dumps_values([value], id, careful)
    except Exception:  # noqa: BLE001 (code of users)
        return True
    return False
