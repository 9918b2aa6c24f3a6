"""`ArrayLayout`: shape, order and dtype of an array, as JSON in the header of its segment.

Invariants:

- A layout that is read from a segment never makes numpy take bytes of shared memory for pointers.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["ArrayLayout"]

Order = Literal["C", "F"]

# Kinds of numpy's dtypes whose bytes are their values.
_PLAIN_KINDS = frozenset("biufcmMSUV")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """An array of `shape`, in C or Fortran order.

    `torch_dtype` names the dtype of a tensor that numpy has none for; `dtype` then is an integer of its width.
    """

    shape: tuple[int, ...]
    order: Order
    dtype: np.dtype[Any]
    torch_dtype: str | None = None

    def __post_init__(self) -> None:
        path = _path_to_objects(self.dtype)
        if path is not None:
            where = f"field {path!r} of the dtype" if path else "the dtype"
            raise InvalidTypeError(
                f"{where} holds Python objects, which live in one process only: share their values as numbers or bytes"
            )
        if _from_json(_as_json(self.dtype)) != self.dtype:
            raise InvalidTypeError(
                f"the dtype {self.dtype!r} cannot be shared: convert the array to one of numpy's own"
            )
        if self.torch_dtype is not None and not isinstance(self.torch_dtype, str):
            raise InvalidTypeError(f"torch has no dtype {self.torch_dtype!r}")
        if self.nbytes >= sys.maxsize:
            raise InvalidInputError(f"an array of shape {self.shape!r:.200} is larger than any memory")
        try:
            if self.shape:
                # Where one length is 0 numpy minds the others, too, and everywhere how many there are.
                np.ndarray(self.shape if self.nbytes == 0 else (0,) * len(self.shape), self.dtype, buffer=b"")
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"numpy has no array of shape {self.shape!r:.200}: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, memory: Any) -> NDArray[Any]:
        """The array in `memory`, a buffer which it keeps."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, order=self.order)

    def to_bytes(self) -> bytes:
        """The layout as a header holds it."""
        facts: dict[str, Any] = {"shape": self.shape, "order": self.order, "dtype": _as_json(self.dtype)}
        if self.torch_dtype is not None:
            facts["torch"] = self.torch_dtype
        return json.dumps(facts, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes, nbytes: int) -> ArrayLayout:
        """The layout that a header of `nbytes` of data holds."""
        try:
            facts = json.loads(text)
            layout = cls(
                shape=tuple(int(length) for length in facts["shape"]),
                order="F" if facts["order"] == "F" else "C",
                dtype=_from_json(facts["dtype"]),
                torch_dtype=facts.get("torch"),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidInputError(
                f"the segment holds no array: its layout {text!r} cannot be read"
            ) from error
        if min(layout.shape, default=0) < 0 or layout.nbytes != nbytes:
            raise InvalidInputError(f"the segment holds {nbytes} bytes, and its layout says {text!r}")
        return layout


def _path_to_objects(dtype: np.dtype[Any]) -> str | None:
    """Where there are objects or pointers in `dtype`, as a path of fields; None where there are none."""
    if dtype.subdtype is not None:
        return _path_to_objects(dtype.subdtype[0])
    for name in dtype.names or ():
        path = _path_to_objects(dtype[name])
        if path is not None:
            return f"{name}.{path}" if path else name
    return "" if dtype.hasobject or dtype.kind not in _PLAIN_KINDS else None


def _as_json(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _as_json(base), "shape": shape}
    if dtype.names is None:
        return dtype.str
    fields = [_field(dtype, name) for name in dtype.names]
    return {"fields": fields, "size": dtype.itemsize, "aligned": dtype.isalignedstruct}


def _field(dtype: np.dtype[Any], name: str) -> list[Any]:
    fields: Any = dtype.fields
    field, offset, *title = fields[name]
    if title and not isinstance(title[0], str):
        raise InvalidTypeError(f"the title of field {name!r} is no text: {title[0]!r}")
    return [name, _as_json(field), offset, *title]


def _from_json(facts: Any) -> np.dtype[Any]:
    # Numpy's stubs know the forms of a dtype one by one, and not one that is read.
    make: Any = np.dtype
    dtype: np.dtype[Any] = make(*_parts(facts))
    return dtype


def _parts(facts: Any) -> tuple[Any, ...]:
    """What `numpy.dtype` takes for what `_as_json` gave."""
    if isinstance(facts, str):
        return (facts,)
    if "base" in facts:
        return ((_from_json(facts["base"]), tuple(facts["shape"])),)
    fields = facts["fields"]
    parts: dict[str, Any] = {
        "names": [field[0] for field in fields],
        "formats": [_from_json(field[1]) for field in fields],
        "offsets": [field[2] for field in fields],
        "itemsize": facts["size"],
    }
    if any(len(field) > 3 for field in fields):
        parts["titles"] = [field[3] if len(field) > 3 else None for field in fields]
    return parts, bool(facts["aligned"])
