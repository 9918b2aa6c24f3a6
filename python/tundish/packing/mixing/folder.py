"""A mix on disk: a folder with `mix.json` and `packs.npy`.

Invariants: the folder appears under its name complete and durable, or not at all. What a file says is checked before it
is used.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from tundish.errors import AlreadyExistsError, NotFoundError, PlanFormatError, StorageError, TundishError
from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.mixing.parameters import MixParameters
from tundish.packing.new_folder import NewFolder

__all__ = ["open_mix", "save_mix"]

METADATA, PACKS = "mix.json", "packs.npy"
FORMAT_VERSION = 1
# The largest mix.json that is read: a million plans fit.
LARGEST_METADATA = 256 << 20


def save_mix(folder: Path, parameters: MixParameters, order: IntegerArray) -> None:
    """Publish a mix as `PackMix.save` documents."""
    text = {
        "format_version": FORMAT_VERSION,
        "packs": len(order),
        "fingerprint": parameters.fingerprint,
        **parameters.as_json(),
    }
    try:
        with NewFolder(folder) as files:
            files.write_array(PACKS, np.asarray(order, dtype=order.dtype.newbyteorder("<")))
            files.write_json(METADATA, text)
    except AlreadyExistsError:
        if not _lies_at(folder, parameters):
            raise


def _lies_at(folder: Path, parameters: MixParameters) -> bool:
    try:
        found, _ = open_mix(folder)
    except (TundishError, OSError):
        return False
    return found == parameters


def open_mix(folder: Path) -> tuple[MixParameters, IntegerArray]:
    """Check a mix in a folder and map it.

    Raises:
        NotFoundError: The folder or a file is missing.
        PlanFormatError: A file is damaged; the message names it.
        StorageError: The file system refused.
    """
    parameters, packs = _read_metadata(folder / METADATA)
    order = _map_packs(folder / PACKS)
    total = sum(plan.packs for plan in parameters.plans)
    expected = np.dtype("<i4" if total <= 2**31 else "<i8")
    if order.dtype != expected or order.shape != (packs,):
        raise PlanFormatError(
            f"{folder / PACKS} has the dtype {order.dtype} and the shape {order.shape}, but {METADATA} says "
            f"{expected} and ({packs},); make the mix again"
        )
    return parameters, order


def _read_metadata(path: Path) -> tuple[MixParameters, int]:
    """The parameters of a mix, and the number of its packs."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_METADATA + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > LARGEST_METADATA:
        raise PlanFormatError(f"{path} is larger than {LARGEST_METADATA} bytes; it is no mix's")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"{path} is not valid JSON: {error}; make the mix again") from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise PlanFormatError(
            f"{path} has the format version {version!r:.100}, and this version of tundish reads {FORMAT_VERSION}; "
            "make the mix again"
        )
    try:
        parameters, packs = MixParameters.of_json(value), int(value["packs"])
        is_intact = parameters.fingerprint == value["fingerprint"] and packs >= 0
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlanFormatError(f"{path} does not describe a mix: {error!r}; make the mix again") from error
    if not is_intact:
        raise PlanFormatError(f"{path} was edited: its fingerprint is another one; make the mix again")
    return parameters, packs


def _map_packs(path: Path) -> IntegerArray:
    try:
        order: Any = npy.open_memmap(path, mode="r")
    except OSError as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        # numpy raises several kinds for a damaged or truncated file.
        raise PlanFormatError(f"{path} is damaged: {error}; make the mix again") from error
    if order.dtype.kind != "i" or path.stat().st_size != order.offset + order.nbytes:
        raise PlanFormatError(f"{path} is no array of integers, or is too long; make the mix again")
    return order  # type: ignore[no-any-return]


def _unreadable(path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(error.errno, "does not exist; a mix folder has this file", str(path))
    return StorageError(error.errno, f"cannot be read: {error.strerror}", str(path))
