"""Compares what several ranks hold under one name: only one rank's is saved, and another's would be lost in silence.

Values that are no tensors are compared by their contents, and tensors of at most `MOST_BYTES` by a checksum of their
bytes. Larger tensors are not compared: a rank that does not save a tensor does not read it. Neither are tensors on a
device, except when ranks plan together: the caller would wait for the device.

Invariants:
    - Equal contents have equal hashes, on any rank: nothing depends on the order of sets and mappings, or on identity.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import logging
import marshal
import struct
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tundish.checkpoint.tensors import INSPECTOR, locals_of
from tundish.distributed import Voter
from tundish.errors import InvalidInputError
from tundish.tensor_bytes import raw_bytes

_logger = logging.getLogger("tundish.checkpoint")

# Larger tensors are not compared.
MOST_BYTES = 64 << 10
# Before the hash of a buffer of a module, which may differ by right: a BatchNorm's follow the data of the rank.
BUFFER = "buffer "

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_Known = dict[int, tuple[Any, bytes]]
_SIMPLE = (int, float, complex, str, bytes, bool, type(None))


def hashes_of(values: Sequence[Any], *, with_devices: bool = False) -> list[str]:
    """A hash of each value: equal for equal contents, and empty for tensors that are not compared.

    Args:
        values: tensors, of DTensors the local parts, and other values.
        with_devices: compare tensors on devices too, which waits for them.
    """
    hashes = [""] * len(values)
    tensors = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
    locals_ = locals_of([values[number] for number in tensors])
    found: Sequence[str | None] = [None] * len(tensors)
    if INSPECTOR is not None:
        found = INSPECTOR.checksums(locals_, MOST_BYTES)
    for number, local, checksum in zip(tensors, locals_, found, strict=True):
        hashes[number] = checksum or _tensor_hash(local, with_devices=with_devices)
    is_tensor = set(tensors)
    for number, value in enumerate(values):
        if number not in is_tensor:
            hashes[number] = _digest(_encoded(value, {}))
    return hashes


def digest_of(values: Sequence[Any]) -> str:
    """One hash of all values, as `hashes_of` compares them without devices."""
    simple = [value for value in values if type(value) in _SIMPLE]
    others = [value for value in values if type(value) not in _SIMPLE]
    digest = hashlib.blake2b(marshal.dumps(simple, 2), digest_size=16)
    digest.update("".join(hashes_of(others)).encode())
    return digest.hexdigest()


def buffers_among(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which tensors are buffers of modules of this process, such as the statistics of a BatchNorm.

    A state dict does not say what its tensors are, so all modules of the process are asked.
    """
    if not tensors:
        return []
    # Not `isinstance`, which runs code of proxies.
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    buffers = [one for module in modules for one in module.__dict__.get("_buffers", {}).values()]
    addresses = {_address(one) for one in buffers if isinstance(one, torch.Tensor)} - {0}
    return [_address(tensor) in addresses for tensor in tensors]


def contents_of(values: Sequence[Any]) -> list[str]:
    """`hashes_of` values, with those on devices; a hash of a buffer of a module begins with `BUFFER`."""
    hashes = hashes_of(values, with_devices=True)
    compared = [
        number for number, value in enumerate(values) if hashes[number] and isinstance(value, torch.Tensor)
    ]
    for number, is_buffer in zip(
        compared, buffers_among([values[number] for number in compared]), strict=True
    ):
        if is_buffer:
            hashes[number] = BUFFER + hashes[number]
    return hashes


@functools.cache
def say_once(buffers: tuple[str, ...]) -> None:
    """Log which buffers differ between ranks."""
    if buffers:
        _logger.warning(
            "buffers of modules differ between ranks, such as %r (%d in all): those of the first rank that has them "
            "are saved",
            buffers[0],
            len(buffers),
        )


def compare(voter: Voter, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Sequence[str]:
    """Collective: compare tensors that all ranks hold under the same names.

    Returns:
        The names of buffers of modules that differ, the same on all ranks.

    Raises:
        InvalidInputError: other tensors differ; on all ranks.
    """
    what = "comparing what several ranks hold"
    text, error = "", None
    try:
        text = json.dumps(contents_of(tensors))
    except Exception as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    gathered = voter.gather(text, error, what=what)
    found: str | None = None
    try:
        if gathered:
            found = json.dumps(_differing(names, list(map(json.loads, gathered)), voter.ranks))
    except InvalidInputError as caught:
        error = caught
    differing: list[str] = json.loads(voter.broadcast(found, error, what=what))
    if voter.is_first:
        say_once(tuple(differing))
    return differing


def _differing(names: Sequence[str], contents: Sequence[Sequence[str]], ranks: Sequence[int]) -> list[str]:
    """The names of the buffers that differ; raises for other tensors."""
    differing = []
    for name, *of_ranks in zip(names, *contents, strict=True):
        holders = [(rank, content) for rank, content in zip(ranks, of_ranks, strict=True) if content]
        if differs(name, holders):
            differing.append(name)
    return differing


def differs(name: str, holders: Sequence[tuple[int, str]]) -> bool:
    """Whether a buffer that some ranks hold differs between them.

    Args:
        name: of the value.
        holders: ranks and what `contents_of` says of their values.

    Raises:
        InvalidInputError: the value differs, and is no buffer.
    """
    other = next((rank for rank, content in holders if content != holders[0][1]), None)
    if other is None:
        return False
    if all(content.startswith(BUFFER) for _, content in holders):
        return True
    raise InvalidInputError(
        f"{name!r} differs between rank {holders[0][0]} and rank {other}, and only one of them would be "
        "saved: make it the same on all ranks, or shard it (a DTensor), or move it into save_dcp's rank_extra"
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Some subclasses have no memory of their own.
        return 0


def _tensor_hash(local: torch.Tensor, *, with_devices: bool) -> str:
    """The hash of a tensor that the inspector leaves: of another device, not contiguous, or of a subclass."""
    if local.nbytes > MOST_BYTES or not (local.is_cpu or with_devices):
        return ""
    host = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # The inspector's, so that ranks with other strides have the same.
    again = None if INSPECTOR is None else INSPECTOR.checksums([host], MOST_BYTES)[0]
    return again or _digest(raw_bytes(host).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _encoded(value: Any, known: _Known) -> bytes:
    """Bytes that determine the contents of a value, whatever it is made of.

    `known` has what was encoded before, by identity: containers may share their parts.
    """
    kind = type(value)
    if id(value) in known:
        return known[id(value)][1]
    if kind in _SIMPLE:
        # This version writes equal values as equal bytes.
        return marshal.dumps(value, 2)
    if isinstance(value, torch.Tensor):
        parts = [str(value.dtype).encode(), repr(tuple(value.shape)).encode()]
        host = locals_of([value])[0].detach().cpu().resolve_conj().resolve_neg().contiguous()
        parts.append(raw_bytes(host).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        parts = [value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes()]
    elif isinstance(value, Mapping):
        parts = sorted(_joined([_encoded(key, known), _encoded(item, known)]) for key, item in value.items())
    elif isinstance(value, set | frozenset):
        parts = sorted(_encoded(item, known) for item in value)
    elif isinstance(value, list | tuple):
        parts = [_encoded(item, known) for item in value]
    elif isinstance(value, _NAMED):
        # As a pickle holds them.
        parts = [value.__qualname__.encode()]
    else:
        parts = _reduced(value, known)
    joined = _joined([f"{kind.__module__}.{kind.__qualname__}".encode(), *parts])
    encoded = hashlib.blake2b(joined, digest_size=32).digest()
    # Kept alive, so that no other object gets its identity.
    known[id(value)] = value, encoded
    return encoded


def _reduced(value: Any, known: _Known) -> list[bytes]:
    """The parts of a pickle of `value`."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 (an object that cannot be pickled is refused with a message of its own)
        return []
    if isinstance(reduced, str):
        return [reduced.encode()]
    call, arguments, *rest = reduced
    state, items, pairs = (*rest, None, None, None)[:3]
    return [
        getattr(call, "__qualname__", "").encode(),
        _encoded(arguments, known),
        _encoded(state, known),
        _encoded(None if items is None else list(items), known),
        _encoded(None if pairs is None else dict(pairs), known),
    ]


def _joined(parts: Sequence[bytes]) -> bytes:
    """The parts with their lengths, so that no two lists of parts give the same bytes."""
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)
