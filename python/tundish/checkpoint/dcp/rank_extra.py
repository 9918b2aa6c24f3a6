"""The state that each rank saves for itself (`rank_extra`): its JSON form, and reading that of all ranks on demand.

JSON holds builtin containers, scalars, counters, bytes, tensors and arrays. If each of ten thousand ranks read all of
them, they would open a hundred million files.

Invariants:
    - A value comes back equal and with the same type; a subclass of a builtin comes back as the builtin, except for
      `Counter`, in which schedulers keep their milestones.
    - Reading runs no code from the file, unlike a pickle.
    - An access returns the saved value, checked by its checksum, or raises. It does not protect the checkpoint from
      removal or replacement.
"""

from __future__ import annotations

import base64
import errno
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tundish.checkpoint.dcp.format import rank_extra_name
from tundish.checkpoint.dcp.verify import OpenCheckpoint
from tundish.checkpoint.root import Published
from tundish.errors import CorruptCheckpointError, InvalidInputError, InvalidTypeError, NotFoundError
from tundish.tensor_bytes import raw_bytes

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
        if isinstance(value, Counter):
            return {_TAG: ["counter", items]}
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
            f"{where} is not a dense tensor with values: rank_extra takes no others, put it into the state dict"
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
    "counter": lambda items: Counter({_decoded(key): _decoded(item) for key, item in items}),
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda dtype, shape, text: _array(dtype, shape, text)[()],
}


_ADVICE = "Take dict(rank_extras) right after load_dcp to keep those of all ranks"


class RankExtras(Mapping[int, Any]):
    """The `rank_extra` of every rank that saved, by rank; a `dict` of them for `copy` and `pickle`.

    It reads that of the first rank and the one in this rank's place at once, and the others on first access.

    Raises:
        NotFoundError: on access, after the checkpoint was removed or replaced.
        CorruptCheckpointError: on access, if the file changed since it was saved.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._path: Path = checkpoint.path
        self._lock = checkpoint.lock
        self._checksum = checkpoint.checksum
        recorded = {name: (size, checksum) for name, size, checksum in checkpoint.files}
        # None for ranks without a `rank_extra`.
        self._files = {rank: recorded.get(rank_extra_name(rank)) for rank in range(checkpoint.savers)}
        at_once = {0, checkpoint.voter.index} & self._files.keys()
        self._known = {rank: self._read(checkpoint.published, rank) for rank in at_once}

    def __getitem__(self, rank: int) -> Any:
        if self._files[rank] is None:
            return None
        if rank not in self._known:
            self._known[rank] = self._read_again(rank)
        return self._known[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._files

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __reduce__(self) -> tuple[type, tuple[dict[int, Any]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return f"<rank_extra of {len(self)} ranks in {self._path}>"

    def _read(self, published: Published, rank: int) -> Any:
        size_and_checksum = self._files[rank]
        if size_and_checksum is None:
            return None
        name = rank_extra_name(rank)
        text = published.read_file(name, *size_and_checksum)
        try:
            return from_json(text)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{self._path / name} is damaged: {error!r}", (name,)) from None

    def _read_again(self, rank: int) -> Any:
        try:
            with self._lock() as published:
                try:
                    return self._read(published, rank)
                except CorruptCheckpointError:
                    if published.describe()[2] == self._checksum:
                        raise
        except NotFoundError:
            raise self._is_gone(rank, "removed") from None
        raise self._is_gone(rank, "replaced")

    def _is_gone(self, rank: int, what: str) -> NotFoundError:
        return NotFoundError(
            errno.ENOENT,
            f"rank_extra of rank {rank} was not read before the checkpoint was {what}. {_ADVICE}",
            str(self._path),
        )
