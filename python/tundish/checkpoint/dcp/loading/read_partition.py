"""Divides the files of a checkpoint among the ranks that verify it.

Invariants: ranks with the same manifest compute the same partition without communication, and every file belongs to
exactly one rank. A rank verifies the files of the saver in its place, because it mostly loads them next, from the page
cache of its node.
"""

from __future__ import annotations

from collections.abc import Iterable

from tundish.checkpoint.dcp.file_names import rank_extra_name, shard_name

__all__ = ["files_of_reader"]


def files_of_reader(index: int, count: int, files: Iterable[str], savers: int) -> set[str]:
    """The files that reader `index` of `count` verifies, of a checkpoint that `savers` ranks saved.

    If few ranks saved, their files go to readers far apart, which are on different nodes. The first reader also
    verifies the files that belong to no saver.
    """
    reader_of = {}
    for saver in range(savers):
        reader = saver * count // savers
        reader_of[shard_name(saver)] = reader_of[rank_extra_name(saver)] = reader
    return {name for name in files if reader_of.get(name, 0) == index}
