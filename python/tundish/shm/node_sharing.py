"""`node_shared`: one copy of an array a node, which one of its ranks brings or builds.

Invariants:

- On every node one rank alone looks at its argument, builds, hashes or copies.
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

from tundish.distributed import nodes_of, voter_of
from tundish.errors import InvalidTypeError, PeerFailedError, SegmentGoneError
from tundish.shm.array_input import input_of
from tundish.shm.file_backed_array import FileBackedArray, find_by_key, keep
from tundish.shm.handle import Handle
from tundish.shm.node_array import NodeArray
from tundish.shm.shared_array import SharedArray

if TYPE_CHECKING:
    import torch

__all__ = ["node_shared"]

# Ranks wait so long for one another, for steps of milliseconds.
_TIMEOUT_SECONDS = 3600.0


def node_shared(
    array_or_callable: ArrayLike | torch.Tensor | SharedArray | Callable[[], Any],
    *,
    key: str | None = None,
    group: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> NodeArray:
    """Collective: share one array, read-only, among all ranks of a node, in the same physical pages.

    One rank a node brings or builds the array: local rank 0, the first of the node in `group`. The others may pass
    None: their argument is not looked at. `tundish.distributed.node_group` defines a node. Without torch.distributed
    the process shares the array with its workers.

        tokens = td.shm.node_shared(lambda: tokenise(documents))

    Args:
        array_or_callable: the array, or a function that returns it and is called on one rank a node. A numpy array, or
            a torch tensor on the CPU, is copied in its order and dtype, as by `SharedArray.from_array`. A `SharedArray`
            is shared without a copy.
        key: name of the array, such as "tokens of corpus 3, vocabulary 2". Ranks that give different keys raise. With
            `path` it stands for the content: an array that was kept under this key is used, and nothing is built or
            hashed.
        group: process group that shares; by default all ranks.
        path: folder in which the array is kept, as a file that all ranks map: for arrays larger than memory, and to
            find them again. The file is named by `key`, or by a hash of the array, which takes about a second a GB. An
            existing file is not written again. A file is published whole and durable, and never changed.

    Returns:
        The array. Its pickle has a few hundred bytes, and a worker that unpickles it has the same pages; slices are
        pickled by value. In memory it lives as long as any process of the node holds it or a view of it, and leaves
        nothing behind, whichever process is killed.

    Raises:
        PeerFailedError: the builder failed, on all other ranks (the builder raises its own error), or was killed:
            within 1 s, if the group has voted before.
        InvalidTypeError: the array holds objects, or `key` or `path` cannot be used.
        InvalidInputError: `key` stands in `path` for an array of another dtype or shape.
        OutOfMemoryError: there is no room for the array.
        StorageError: the file system refused, or the file that is there is damaged.

    >>> import numpy as np
    >>> tokens = node_shared(lambda: np.arange(5))
    >>> int(tokens.sum()), tokens.flags.writeable
    (10, False)
    """
    what = "sharing an array on every node" if key is None else f"sharing {key!r:.100} on every node"
    voter = voter_of(group)
    voter.vote(
        _wrong(key, path),
        what=f"{what}: comparing the keys, which have to be equal on all ranks",
        same=json.dumps(key) if isinstance(key, str) else "no key",
        timeout=_TIMEOUT_SECONDS,
    )
    nodes = nodes_of(voter, timeout=_TIMEOUT_SECONDS)
    (builder,) = (node[0] for node in nodes if voter.rank in node)
    origin, place, error = None, None, None
    try:
        if voter.rank == builder:
            origin = _brought(array_or_callable, key, None if path is None else Path(path).absolute())
            place = json.dumps(_place_of(origin))
    except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    place = voter.broadcast(place, error, source=builder, what=what, timeout=None)
    with voter.agreed(f"{what}: attaching to it", timeout=_TIMEOUT_SECONDS):
        if origin is not None:
            return NodeArray.of(origin)
        try:
            return NodeArray.of(_origin_at(json.loads(place)))
        except SegmentGoneError as error:
            # The owner keeps it until all have it: it ended with that rank.
            raise PeerFailedError(
                f"{what}: rank {builder}, which shared it, is gone: {error}", builder
            ) from error


def _wrong(key: Any, path: Any) -> Exception | None:
    if key is not None and not (isinstance(key, str) and key):
        return InvalidTypeError(f"key is {key!r}: give a text that says what the array is, or None")
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if path is not None and (not isinstance(text, str) or not text or "\0" in text):
        return InvalidTypeError(f"path is {path!r}: give the path of a folder, or None")
    return None


def _brought(array_or_callable: Any, key: str | None, folder: Path | None) -> SharedArray | FileBackedArray:
    """The array of the rank that brings it, in shared memory or in a file."""
    if folder is not None and key is not None and callable(array_or_callable):
        found = find_by_key(folder, key)
        if found is not None:
            return found
    brought = array_or_callable() if callable(array_or_callable) else array_or_callable
    if brought is None or isinstance(brought, Mapping | Set | Iterator):
        # Numpy makes one object of each.
        raise InvalidTypeError(
            f"a {type(brought).__name__} came in place of an array: the first rank of a node brings it, or a function "
            "that returns it; several arrays take a call each"
        )
    if isinstance(brought, SharedArray):
        if folder is None:
            # Of its own: the caller may close the one that was brought.
            return SharedArray.attach(brought.handle)
        brought = brought.array
    is_of_torch = type(brought).__module__.partition(".")[0] == "torch"
    array, layout = input_of(brought if is_of_torch else np.asanyarray(brought))
    if layout.torch_dtype is not None:
        raise InvalidTypeError(
            f"a tensor of {layout.torch_dtype}, which numpy lacks, was brought: bring tensor.view(torch.uint8), or of "
            "another integer dtype"
        )
    return SharedArray.from_array(array) if folder is None else keep(array, layout, folder, key)


def _place_of(origin: SharedArray | FileBackedArray) -> dict[str, Any]:
    """The place of an array, for JSON."""
    return asdict(origin if isinstance(origin, FileBackedArray) else origin.handle)


def _origin_at(place: dict[str, Any]) -> SharedArray | FileBackedArray:
    if "path" in place:
        return FileBackedArray(**place)
    return SharedArray.attach(Handle(**place))
