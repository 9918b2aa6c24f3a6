"""`node_shared`: one copy of an array on each node, in shared memory or in a file.

A file is for arrays that are larger than memory. Each has a folder `array-<32 hexadecimal digits>` with one file
`array.npy`, which `numpy.load(…, mmap_mode="r")` reads too. The digits are a hash of the key, or of the array: its
dtype, shape, order and bytes.

Invariants:

- On every node only one rank uses its argument, builds, hashes or copies.
- Either all ranks get the array, or all raise.
- The folder of an array appears whole and durable. Its file is never changed or replaced.
- An array is hashed and written in chunks of `CHUNK_BYTES` bytes, so it may be larger than memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray

from tundish import _native
from tundish.distributed import nodes_of, same_arguments, voter_of
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    PeerFailedError,
    SegmentGoneError,
    StorageError,
    format_count,
    format_type,
)
from tundish.shm.array_layout import ArrayLayout
from tundish.shm.shared_array import Handle, SharedArray, as_numpy

if TYPE_CHECKING:
    import torch


_log = logging.getLogger("tundish.shm")

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
            array, which takes about a second a GB. A file appears complete and durable, and is never changed. Only the
            path of a node's first rank is used, so each node may have a folder on its own disk. What nodes find there
            under a key is not compared.

    The first rank of the group logs the size and the seconds to "tundish.shm" at level INFO.

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
    began = time.monotonic()
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
        try:
            array = NodeArray.backed_by(_from_json(json.loads(address)) if backing is None else backing)
        except SegmentGoneError as error:
            # The builder keeps the array until all ranks have it, so the builder has ended.
            raise PeerFailedError(
                f"{what}: rank {builder}, which built it, has ended: {error}", builder
            ) from error
    if voter.rank == voter.ranks[0]:
        _log.info(
            "%s: %s %s, %.1f MB on each of %s, in %.1f s",
            what,
            array.dtype,
            array.shape,
            array.nbytes / 1e6,
            format_count(len(nodes), "node"),
            time.monotonic() - began,
        )
    return array


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


class NodeArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only numpy array whose pages all processes of a node share; see `node_shared`.

    Its pickle is its address, a few hundred bytes, so a worker that unpickles it has the same pages. Slices and results
    are pickled by value, like every numpy array.
    """

    # None in every array that numpy derives from this one.
    _backing: SharedArray | ArrayFile | None = None
    # Shape, strides and dtype in that memory. Numpy lets users change those of an array.
    _layout: tuple[Any, ...] = ()

    @classmethod
    def backed_by(cls, backing: SharedArray | ArrayFile) -> Self:
        """Return the array in `backing`, which the array keeps alive."""
        array = backing.read_only().view(cls)
        array._backing, array._layout = backing, array._current_layout()
        return array

    def _current_layout(self) -> tuple[Any, ...]:
        return self.shape, self.strides, self.dtype

    def __array_wrap__(self, array: NDArray[Any], context: Any = None, return_scalar: bool = False) -> Any:
        # The result of a computation is a plain array.
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._backing is None or self._layout != self._current_layout():
            return np.asarray(self).__reduce_ex__(protocol)
        return type(self).backed_by, (self._backing,)


FILE = "array.npy"
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """The path of an array's file; small when pickled."""

    path: str
    inode: int

    def read_only(self) -> NDArray[Any]:
        """Map the array read-only.

        Raises:
            NotFoundError: the file does not exist any more.
            StorageError: the file cannot be read, is damaged, or was replaced.
        """
        try:
            array, inode = _mapped(self.path)
        except FileNotFoundError as error:
            raise NotFoundError(
                error.errno,
                f"{self.path} does not exist, but an array was shared from it: keep clean-up jobs away, and give a "
                "path that is the same in all processes of a node",
                self.path,
            ) from error
        if inode != self.inode:
            raise StorageError(
                errno.ESTALE,
                f"{self.path} was replaced after an array was shared from it: share the array again",
                self.path,
            )
        return array


def find_by_key(folder: Path, key: str) -> ArrayFile | None:
    """Return the array that was published in `folder` under `key`; None if there is none.

    Raises:
        StorageError: the file is damaged or unreadable.
    """
    return _find(_folder_of_key(folder, key))


def publish_array(array: NDArray[Any], layout: ArrayLayout, folder: Path, key: str | None) -> ArrayFile:
    """Publish `array` in `folder`, unless it is there already.

    Args:
        array: numpy array; it may be a memory map of a file that is larger than memory.
        layout: layout of `array`.
        folder: folder of arrays, made if it is missing; its parent must exist.
        key: key by which the array is found; None for a hash of the array.

    Raises:
        InvalidInputError: the key belongs to an array of another dtype or shape.
        NotFoundError: the parent of `folder` does not exist.
        StorageError: the file cannot be written, or another file has its name.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise NotFoundError(
            error.errno,
            f"{folder} cannot be made, since {folder.parent} does not exist: make that first",
            str(folder),
        ) from error
    except OSError as error:
        raise StorageError(
            error.errno, f"{folder} cannot be made as a folder of arrays: {error.strerror}", str(folder)
        ) from error
    target = folder / f"array-{_content_hash(array, layout)}" if key is None else _folder_of_key(folder, key)
    found = _find(target)
    if found is None:
        try:
            _publish(array, layout, target)
        except AlreadyExistsError:
            # Another process was faster, or another file has the name.
            if _find(target) is None:
                raise
        found = _find(target)
    if found is None:
        raise StorageError(
            errno.ENOENT,
            f"{target} was removed right after it was written: keep clean-up jobs away from {folder}",
            str(target),
        )
    present = found.read_only()
    if (present.dtype, present.shape) != (array.dtype, array.shape):
        raise InvalidInputError(
            f"key {key!r} belongs to an array of dtype {present.dtype} and shape {present.shape} in {folder}, and this "
            f"array has dtype {array.dtype} and shape {array.shape}: give other content another key"
        )
    return found


def _folder_of_key(folder: Path, key: str) -> Path:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16, person=b"tundish key")
    return folder / f"array-{digest.hexdigest()}"


def _content_hash(array: NDArray[Any], layout: ArrayLayout) -> str:
    """Return a hash of dtype, shape, order and bytes."""
    content = hashlib.blake2b(_header(layout), digest_size=16, person=b"tundish array")
    for chunk in _chunks(array, layout):
        content.update(chunk)
    return content.hexdigest()


def _header(layout: ArrayLayout) -> bytes:
    header = io.BytesIO()
    is_fortran = layout.order == "F"
    descr = npy.dtype_to_descr(layout.dtype)
    try:
        npy.write_array_header_2_0(
            header, {"descr": descr, "fortran_order": is_fortran, "shape": layout.shape}
        )
    except ValueError as error:
        raise InvalidInputError(f"dtype {layout.dtype} cannot be written to a file: {error}") from error
    return header.getvalue()


def _chunks(array: NDArray[Any], layout: ArrayLayout) -> Iterator[bytes]:
    """Yield the bytes of `array` in the order of its file."""
    chunks: Any = np.nditer(
        array,
        flags=["external_loop", "buffered", "zerosize_ok"],
        buffersize=max(1, CHUNK_BYTES // max(1, array.itemsize)),
        order=layout.order,
    )
    for chunk in chunks:
        yield chunk.tobytes()


def _publish(array: NDArray[Any], layout: ArrayLayout, target: Path) -> None:
    writing = _native.AtomicFolder(target)
    try:
        writing.append(FILE, _header(layout))
        for chunk in _chunks(array, layout):
            writing.append(FILE, chunk)
        writing.publish()
    finally:
        writing.abandon()


def _find(target: Path) -> ArrayFile | None:
    path = str(target / FILE)
    try:
        _, inode = _mapped(path)
    except FileNotFoundError:
        return None
    return ArrayFile(path, inode)


def _mapped(path: str) -> tuple[NDArray[Any], int]:
    """Return the array in a file, and the file's inode number."""
    try:
        inode = Path(path).stat().st_ino
        return npy.open_memmap(path, "r"), inode
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"{path} cannot be mapped: {error.strerror}", path) from error
    except Exception as error:
        raise StorageError(
            errno.EIO, f"{path} is damaged ({error}): remove its folder, and the array is built again", path
        ) from error
