"""Builds `.metadata`, torch's description of a DCP checkpoint, from what every rank saves."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tundish.checkpoint.dcp.file_layout import FileLayout, shard_name
from tundish.checkpoint.dcp.saving.local_values import LocalValue, shape_of
from tundish.checkpoint.dcp.saving.save_planner import FilesByRank, RankShare

__all__ = ["make_metadata"]


def make_metadata(files: FilesByRank, object_lengths: Sequence[Sequence[int]]) -> bytes:
    """The contents of `.metadata`.

    Args:
        files: of all ranks.
        object_lengths: of every rank the lengths in bytes of the objects that it saves, in order.
    """
    about: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for index, ((values, numbers), lengths) in enumerate(zip(files, object_lengths, strict=True)):
        paths.update((value.name, tuple(json.loads(value.path))) for value in values if value is not None)
        part = RankShare(values, numbers)
        layout = FileLayout((value.block for value in part.values(part.tensors)), lengths)
        saved = part.values(part.tensors + part.objects)
        for value, (start, length) in zip(saved, layout.items(), strict=True):
            places[_describe(value, about)] = _StorageInfo(shard_name(index), start, length)
    return pickle.dumps(Metadata(about, paths, places, StorageMeta()))


def _describe(value: LocalValue, about: dict[str, Any]) -> MetadataIndex:
    """Add a value to `about`; returns the key of its place."""
    name = value.name
    if not value.dtype:
        about[name] = BytesStorageMetadata()
        return MetadataIndex(name)
    dtype, lengths = value.block
    tensor = about.setdefault(name, TensorStorageMetadata(TensorProperties(dtype), shape_of(value.size), []))
    tensor.chunks.append(ChunkStorageMetadata(shape_of(value.offsets), lengths))
    return MetadataIndex(name, shape_of(value.offsets), len(tensor.chunks) - 1)
