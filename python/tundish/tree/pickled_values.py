"""Pickles objects of unknown types without the tensors and arrays in them.

Invariant: a tensor inside a pickled object, however deep, is a leaf like any other and not in the pickle; nor are an
array's values.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tundish.errors import NotPicklableError, TundishError
from tundish.tree.object_parts import ObjectParts, Token

__all__ = ["Builder", "ValuePickler", "load_pickles"]

Builder = Callable[[Token, list[Any]], Any]


def _leaf(_: int) -> Tensor:
    """Stands in a pickle for `leaves.__getitem__` of the unpickler."""
    raise NotImplementedError


def _build(_: Token, __: list[Any]) -> Any:
    """Stands in a pickle for the unpickler's builder of arrays and of tensors that are more than a leaf."""
    raise NotImplementedError


class ValuePickler(pickle.Pickler):
    """Pickles one object after the other; those that several of them share are pickled once.

    Args:
        leaf_or_parts: returns the leaf number of a plain tensor, the parts of an array or of any other tensor, or None
            for an array that is to be pickled.
    """

    def __init__(self, leaf_or_parts: Callable[[Any], int | ObjectParts | None]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, 5)
        self._leaf_or_parts = leaf_or_parts

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (np.ndarray, Tensor)):
            return NotImplemented
        found = self._leaf_or_parts(value)
        if found is None:
            return NotImplemented
        if isinstance(found, int):
            return _leaf, (found,)
        return _build, (found.token, list(found.children))

    def getvalue(self) -> bytes:
        """The pickles of all objects."""
        return self._file.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, leaves: Sequence[Tensor], build: Builder) -> None:
        super().__init__(file)
        self._stand_ins = {_leaf.__name__: leaves.__getitem__, _build.__name__: build}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._stand_ins:
            return self._stand_ins[name]
        return super().find_class(module, name)


def load_pickles(pickles: bytes, count: int, leaves: Sequence[Tensor], build: Builder) -> list[Any]:
    """The `count` objects that a `ValuePickler` wrote; `build` makes a tensor or array of its token and parts.

    Raises `NotPicklableError` if one of them cannot be unpickled in this process.
    """
    unpickler = _Unpickler(io.BytesIO(pickles), leaves, build)
    try:
        return [unpickler.load() for _ in range(count)]
    except TundishError:
        raise
    except Exception as error:
        raise NotPicklableError(
            f"an object of the batch cannot be unpickled in this process: {type(error).__name__}: {error}"
        ) from error
