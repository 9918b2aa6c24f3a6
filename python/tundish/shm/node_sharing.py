"""`node_shared`: one copy of an array on each node.

Invariants:

- On every node only one rank uses its argument, builds, hashes or copies.
- Either all ranks get the array, or all raise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tundish.distributed import nodes_of, same_arguments, voter_of
from tundish.errors import InvalidTypeError, PeerFailedError, SegmentGoneError, format_type
from tundish.shm.array_files import ArrayFile, find_by_key, publish_array
from tundish.shm.array_input import as_numpy
from tundish.shm.handle import Handle
from tundish.shm.node_array import NodeArray
from tundish.shm.shared_array import SharedArray

if TYPE_CHECKING:
    import torch

__all__ = ["node_shared"]

# Ranks wait so long for each other in steps that take milliseconds.
_TIMEOUT_SECONDS = 3600.0


def node_shared(
    array_or_callable: ArrayLike | torch.Tensor | SharedArray | Callable[[], Any],
    *,
    key: str | None = None,
    group: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> NodeArray:
    """Share one read-only array among all ranks of a node, in the same physical pages. Collective over `group`.

    On each node the first rank in `group` (local rank 0) builds the array. The argument of the other ranks is ignored
    and may be None. `tundish.distributed.node_group` defines a node. Without torch.distributed the process shares the
    array with its workers.

    Args:
        array_or_callable: the array, or a function that returns it. A numpy array or a CPU tensor is copied as by
            `SharedArray.from_array`, and lists and numbers are converted by numpy first. A `SharedArray` is shared
            without a copy.
        key: name of the array, such as "tokens of corpus 3, vocabulary 2". Ranks that give different keys raise. With
            `path` the key stands for the content: an array that was published under this key is used again, and
            nothing is built or hashed.
        group: process group; by default all ranks.
        path: folder for the array, as a file that all ranks map: for arrays larger than memory, and to find them again.
            The folder is made if it is missing; its parent must exist. The file is named by `key`, or by a hash of the
            array, which takes about a second a GB. A file appears complete and durable, and is never changed.

    Returns:
        The array, read-only, with the shape, order and dtype of the given one. Its pickle has a few hundred bytes, and
        a worker that unpickles it has the same pages; slices are pickled by value. The memory is freed with the last
        process that holds the array or a view of it, whichever process is killed.

    Raises:
        PeerFailedError: another rank failed or was killed. A rank that fails raises its own error. A killed rank is
            noticed within 1 s if the group has voted before.
        InvalidTypeError: the array holds Python objects, or `key` or `path` has a wrong type.
        InvalidInputError: in `path` the key belongs to an array of another dtype or shape.
        OutOfMemoryError: the array does not fit in memory.
        NotFoundError: the parent of `path` does not exist.
        StorageError: the file cannot be written, or the present file is damaged.

    Example:
        >>> import numpy as np
        >>> import tundish as td
        >>> tokens = td.shm.node_shared(lambda: np.arange(5))
        >>> int(tokens.sum()), tokens.flags.writeable
        (10, False)
    """
    what = "sharing an array on every node" if key is None else f"sharing {key!r:.100} on every node"
    voter = voter_of(group)
    voter.vote(
        _argument_error(key, path),
        what=f"{what}: comparing the keys, which have to be equal on all ranks",
        same=same_arguments(key=repr(key)),
        timeout=_TIMEOUT_SECONDS,
    )
    nodes = nodes_of(voter, timeout=_TIMEOUT_SECONDS)
    (builder,) = (node[0] for node in nodes if voter.rank in node)
    backing, address, error = None, None, None
    try:
        if voter.rank == builder:
            backing = _build(array_or_callable, key, None if path is None else Path(path).absolute())
            address = json.dumps(asdict(backing if isinstance(backing, ArrayFile) else backing.handle))
    except BaseException as caught:  # noqa: BLE001 (raised again by the broadcast)
        error = caught
    address = voter.broadcast(address, error, source=builder, what=what, timeout=None)
    with voter.agreed(f"{what}: attaching to it", timeout=_TIMEOUT_SECONDS):
        if backing is not None:
            return NodeArray.backed_by(backing)
        try:
            return NodeArray.backed_by(_from_json(json.loads(address)))
        except SegmentGoneError as error:
            # The builder keeps the array until all ranks have it, so the builder has ended.
            raise PeerFailedError(
                f"{what}: rank {builder}, which built it, has ended: {error}", builder
            ) from error


def _argument_error(key: Any, path: Any) -> Exception | None:
    if key is not None and not (isinstance(key, str) and key):
        return InvalidTypeError(f"key is {key!r}: give a non-empty str that says what the array is, or None")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if path is not None and (not isinstance(text, str) or not text or "\0" in text):
        return InvalidTypeError(f"path is {path!r}: give the path of a folder, or None")
    return None


def _build(array_or_callable: Any, key: str | None, folder: Path | None) -> SharedArray | ArrayFile:
    """Build the array, in shared memory or in a file."""
    if folder is not None and key is not None and callable(array_or_callable):
        found = find_by_key(folder, key)
        if found is not None:
            return found
    given = array_or_callable() if callable(array_or_callable) else array_or_callable
    if given is None or isinstance(given, Mapping | Set | Iterator):
        # Numpy would convert it to an array of one object.
        raise InvalidTypeError(
            f"the array is {format_type(given)}: give a numpy array or a CPU tensor, or a function that returns "
            "one, on the first rank of each node; call `node_shared` once for each array"
        )
    if isinstance(given, SharedArray):
        if folder is None:
            # A second attachment, since the caller may close the given one.
            return SharedArray.attach(given.handle)
        given = given.array
    is_of_torch = type(given).__module__.partition(".")[0] == "torch"
    array, layout = as_numpy(given if is_of_torch else np.asanyarray(given))
    if layout.torch_dtype is not None:
        raise InvalidTypeError(
            f"numpy has no {layout.torch_dtype}: share tensor.view(torch.uint8), or a view of another integer dtype"
        )
    return SharedArray.from_array(array) if folder is None else publish_array(array, layout, folder, key)


def _from_json(address: dict[str, Any]) -> SharedArray | ArrayFile:
    """Open an array at the address that its builder sent."""
    if "path" in address:
        return ArrayFile(**address)
    return SharedArray.attach(Handle(**address))
