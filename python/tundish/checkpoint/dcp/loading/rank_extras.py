"""`RankExtras`, the `rank_extra` of every rank that saved, read on demand.

If each of ten thousand ranks read the `rank_extra` of all, they would open a hundred million files.

Invariant: an access returns the saved value, checked by its checksum, or raises. It does not protect the checkpoint
from removal or replacement.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tundish._native import CheckpointReadLock
from tundish.checkpoint.dcp.file_layout import rank_extra_name
from tundish.checkpoint.dcp.loading.open_checkpoint import OpenCheckpoint, read_lock
from tundish.checkpoint.dcp.rank_extra_json import from_json
from tundish.checkpoint.publish.readonly_root import releasing
from tundish.errors import CorruptCheckpointError, NotFoundError

__all__ = ["RankExtras"]

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
        self._checksum = checkpoint.checksum
        recorded = {name: (size, checksum) for name, size, checksum in checkpoint.files}
        # None for ranks without a `rank_extra`.
        self._files = {rank: recorded.get(rank_extra_name(rank)) for rank in range(checkpoint.savers)}
        at_once = {0, checkpoint.voter.index} & self._files.keys()
        self._known = {rank: self._read(checkpoint.lock, rank) for rank in at_once}

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

    def _read(self, lock: CheckpointReadLock, rank: int) -> Any:
        size_and_checksum = self._files[rank]
        if size_and_checksum is None:
            return None
        name = rank_extra_name(rank)
        text = lock.read_file(name, *size_and_checksum)
        try:
            return from_json(text)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{self._path / name} is damaged: {error!r}", (name,)) from None

    def _read_again(self, rank: int) -> Any:
        try:
            with releasing(read_lock(self._path)) as lock:
                try:
                    return self._read(lock, rank)
                except CorruptCheckpointError:
                    if lock.describe()[2] == self._checksum:
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
