"""Converts state of loaders and samplers to JSON and back: builtin containers and scalars, bytes, tensors, arrays.

Invariants: a value comes back equal and with the same type; a subclass of a builtin comes back as the builtin. Reading
runs no code from the file, unlike a pickle.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tensor_bytes import raw_bytes

__all__ = ["from_json", "to_json"]

# A value that JSON lacks is an object with this one key. Its value is a list: the kind and its parts.
_TAG = "~"


def to_json(value: Any, what: str) -> bytes:
    """The JSON form of `value`.

    Args:
        value: to convert.
        what: its name, for messages.

    Raises:
        InvalidTypeError: names the first part that cannot be converted.
        InvalidInputError: the value contains itself.
    """
    try:
        return json.dumps(_encoded(value, what), allow_nan=False).encode()
    except RecursionError:
        raise InvalidInputError(f"{what} is nested too deep, or contains itself") from None


def from_json(text: bytes) -> Any:
    """The value of a text that `to_json` wrote; raises kinds of `ValueError` for others."""
    return _decoded(json.loads(text))


def _encoded(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, where)
    if isinstance(value, np.ndarray | np.generic):
        return _encoded_array(value, where)
    if isinstance(value, int):
        # As text, because Python refuses to parse numbers with too many digits.
        return int(value) if abs(value) < 1 << 64 else {_TAG: ["int", hex(value)]}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: ["float", str(float(value))]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: ["bytes", _text(bytes(value))]}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: ["tuple", items]}
    if isinstance(value, Mapping):
        items = [(_encoded(key, where), _encoded(item, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return dict(items)
        return {_TAG: ["dict", items]}
    raise InvalidTypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: give numbers, strings, bytes, tensors and "
        "arrays, in lists, tuples and dicts"
    )


def _encoded_tensor(tensor: torch.Tensor, where: str) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise InvalidTypeError(
            f"{where} is no dense tensor with values: put it into the state dict, or make it one"
        )
    data = raw_bytes(tensor.detach().cpu().contiguous()).numpy().tobytes()
    return {_TAG: ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _text(data)]}


def _encoded_array(array: Any, where: str) -> Any:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise InvalidTypeError(f"{where} is an array of {array.dtype}: give one of numbers")
    kind = "array" if isinstance(array, np.ndarray) else "scalar"
    return {_TAG: [kind, array.dtype.str, list(array.shape), _text(array.tobytes())]}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decoded(item) for key, item in value.items()}
    kind, *parts = value[_TAG]
    if kind not in _DECODERS:
        raise ValueError(f"{kind!r} is no kind of value")
    return _DECODERS[kind](*parts)


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    data = bytearray(_data(text))
    if not data:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


def _array(dtype: str, shape: list[int], text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(_data(text)), dtype=np.dtype(dtype)).reshape(shape)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": _data,
    "tuple": lambda items: tuple(_decoded(item) for item in items),
    "dict": lambda items: {_decoded(key): _decoded(item) for key, item in items},
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda dtype, shape, text: _array(dtype, shape, text)[()],
}
