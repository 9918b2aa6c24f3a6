"""`node_shared`: one copy of an array a node, which one of its ranks brings or builds.

Invariants:

- On every node one rank alone looks at its argument, builds, hashes or copies.
- Either all ranks get the array, or all raise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tundish.distributed import nodes_of, voter_of
from tundish.errors import InvalidInputError, InvalidTypeError, PeerFailedError, SegmentGoneError
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
    """Collective: an array of which all ranks of a node have the same physical pages, read-only.

    One rank a node brings it, local rank 0 (the first of the node in `group`; `tundish.distributed.node_group` says
    what a node is). The others may pass None: their argument is not looked at. Without torch.distributed the process
    shares the array with its workers.

        tokens = td.shm.node_shared(lambda: tokenise(documents))

    Args:
        array_or_callable: the array, or what makes it and is called on one rank a node: a numpy array, a torch tensor
            on the CPU, or a `SharedArray`, which is shared as it is, without a copy. It is copied in its order and
            dtype, as `SharedArray.from_array` does.
        key: what the array is, in the caller's words: "tokens of corpus 3, vocabulary 2". Ranks that give different
            ones raise. With `path` it stands for the content: an array that was kept under this key is taken as it
            is, and nothing is built or hashed.
        group: the process group that shares; by default all ranks.
        path: keep the array in this folder, as a file that all ranks map: for arrays larger than memory, and to find
            them again. The file is named by `key`, or by a hash of the array; one that is there already is not
            written again. It is published whole and durable, and never changed.

    Returns:
        The array. Pickled as a whole it is a few hundred bytes, and a worker that unpickles it has the same pages;
        slices are pickled by value. In memory it lives as long as any process of the node holds it or a view of it,
        and leaves nothing behind, whichever process is killed.

    Raises:
        What the builder raised, on that rank, and `PeerFailedError` with it on all others; also within 1 s when it is
            killed, from the first vote in `group` or of all ranks on, in whatever call that was.
        InvalidTypeError: an array of objects, or a key or path that is none.
        InvalidInputError: a key that is empty or cannot be encoded; a key in `path` that stands for an array of
            another dtype or shape.
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
    if key is not None and not isinstance(key, str):
        return InvalidTypeError(f"key must be a text, not {key!r}")
    if key == "":
        return InvalidInputError("an empty text was given as key; say what the array is")
    if isinstance(key, str) and not _is_encodable(key):
        return InvalidInputError(f"key is {key!a}, which holds half of a character: it cannot be encoded")
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        return InvalidTypeError(f"path must be the path of a folder, not {path!r}")
    if "\0" in text or not _is_path(text):
        return InvalidInputError(
            f"path is {text!a}; no path holds a null character, or one that cannot be encoded"
        )
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_path(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Segment:
    """An array that lies in shared memory."""

    shared: SharedArray

    def mapped(self) -> NDArray[Any]:
        """The array, read-only also where this process is the owner and may write to it."""
        return SharedArray.attach(self.shared.handle).array


def _brought(array_or_callable: Any, key: str | None, folder: Path | None) -> Segment | FileBackedArray:
    """The array of the rank that brings it, in shared memory or in a file."""
    if folder is not None and key is not None and callable(array_or_callable):
        found = find_by_key(folder, key)
        if found is not None:
            return found
    brought = array_or_callable() if callable(array_or_callable) else array_or_callable
    if brought is None or isinstance(brought, Mapping | Set | Iterator):
        # Numpy makes one object of each.
        what = "None" if brought is None else f"a {type(brought).__name__}"
        raise InvalidTypeError(
            f"{what} came in place of an array: the first rank of a node brings it, or a function that returns it; "
            "several arrays take a call each"
        )
    if folder is not None:
        return keep(brought.array if isinstance(brought, SharedArray) else _as_array(brought), folder, key)
    return Segment(
        brought if isinstance(brought, SharedArray) else SharedArray.from_array(_as_array(brought))
    )


def _as_array(brought: Any) -> NDArray[Any]:
    if type(brought).__module__.partition(".")[0] != "torch":
        # A masked array, say, has more than its values.
        return input_of(brought if isinstance(brought, np.ndarray) else np.asarray(brought)).array
    try:
        array: NDArray[Any] = brought.detach().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise InvalidTypeError(
            f"a torch object was brought that numpy cannot read ({error}): bring a tensor on the CPU, and one of a "
            "dtype that numpy lacks as tensor.view(torch.uint8) or torch.uint16"
        ) from error
    return array


def _place_of(origin: Segment | FileBackedArray) -> dict[str, Any]:
    """The place of an array, for JSON."""
    if isinstance(origin, FileBackedArray):
        return {"path": origin.path, "inode": origin.inode}
    return {"handle": origin.shared.handle.to_json()}


def _origin_at(place: dict[str, Any]) -> Segment | FileBackedArray:
    if "path" in place:
        return FileBackedArray(place["path"], place["inode"])
    return Segment(SharedArray.attach(Handle.from_json(place["handle"])))
