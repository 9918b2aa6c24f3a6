"""Summaries of state dicts, which ranks compare before they save.

Invariants: a summary omits which part of a tensor a rank holds, so ranks with different parts of the same tensors have
equal summaries. Nothing here is collective.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.flattened_state import FlattenedState
from tundish.checkpoint.placements import check_placement, shares_for
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = [
    "Mesh",
    "StateSummary",
    "SummariesByRank",
    "ValueSummary",
    "digest_of",
    "summarize",
    "summary_from_json",
    "summary_to_json",
    "total_bytes",
]

_REPLICATED = "R"
# About what an item takes in a file beside the bytes of its tensor.
_ITEM_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Mesh:
    """The shape of a device mesh, and its global ranks in C order."""

    size: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """Summary of one value.

    Attributes:
        dtype: empty for a value that is no tensor.
        size: shape of the whole tensor.
        placements: of a DTensor.
        mesh: of a DTensor; values of one summary on the same mesh share one object.
    """

    dtype: str = ""
    size: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    mesh: Mesh | None = None

    def matches(self, other: ValueSummary) -> bool:
        """Whether both can be parts of one value: equal except, perhaps, for the ranks."""
        meshes = [None if one.mesh is None else one.mesh.size for one in (self, other)]
        return (
            (self.dtype, self.size, self.placements) == (other.dtype, other.size, other.placements)
        ) and meshes[0] == meshes[1]

    @property
    def replicated(self) -> tuple[bool, ...]:
        """For each mesh dimension, whether the ranks along it hold the same part."""
        return tuple(placement == _REPLICATED for placement in self.placements)

    def __str__(self) -> str:
        if not self.dtype:
            return "no tensor"
        where = "" if self.mesh is None else f" placed {', '.join(self.placements)} on {self.mesh.size} ranks"
        return f"a {self.dtype.removeprefix('torch.')} tensor of shape {self.size}{where}"


# By name.
StateSummary = dict[str, ValueSummary]

# Each distinct summary, and the global ranks that have it.
SummariesByRank = tuple[tuple[StateSummary, frozenset[int]], ...]


def summarize(state: FlattenedState, rank: int, members: Container[int]) -> StateSummary:
    """Summarize what `rank` holds.

    Raises:
        InvalidInputError: a DTensor has ranks that are not among `members`, its local tensor does not match its
            placements, or it is no single block of the whole.
    """
    summary: StateSummary = {}
    meshes: dict[int, Mesh] = {}
    checked: set[tuple[int, Any, torch.Size, torch.Size]] = set()
    for name, value in state:
        if not isinstance(value, DTensor):
            is_tensor = isinstance(value, torch.Tensor)
            summary[name] = (
                ValueSummary(str(value.dtype), tuple(value.shape)) if is_tensor else ValueSummary()
            )
            continue
        mesh = value.device_mesh
        if id(mesh) not in meshes:
            meshes[id(mesh)] = Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
        part = id(mesh), value.placements, value.shape, local_of(value).shape
        if part not in checked:
            _check_part(name, value, meshes[id(mesh)], rank, members)
            checked.add(part)
        summary[name] = _dtensor_summary(value, meshes[id(mesh)])
    return summary


def total_bytes(summaries: SummariesByRank) -> int:
    """About the bytes of all ranks' files together."""
    values = {name: value for summary, _ in summaries for name, value in summary.items()}
    total = 0
    for value in values.values():
        extents = () if value.mesh is None else value.mesh.size
        items = math.prod(
            extent for extent, replicated in zip(extents, value.replicated, strict=True) if not replicated
        )
        itemsize = _dtype(value.dtype).itemsize if value.dtype else 0
        total += math.prod(value.size) * itemsize + items * _ITEM_BYTES
    return total


def summary_to_json(summary: StateSummary) -> str:
    """The JSON form: the meshes, then the values with the indices of theirs."""
    meshes = {id(value.mesh): value.mesh for value in summary.values() if value.mesh is not None}
    numbers = {mesh: number for number, mesh in enumerate(meshes)}
    values = {
        name: [value.dtype, value.size, value.placements, numbers.get(id(value.mesh))]
        for name, value in summary.items()
    }
    return json.dumps([[(mesh.size, mesh.ranks) for mesh in meshes.values()], values])


def summary_from_json(text: str) -> StateSummary:
    """The summary of a JSON form."""
    mesh_fields, values = json.loads(text)
    meshes = [Mesh(tuple(size), tuple(ranks)) for size, ranks in mesh_fields]
    return {
        name: ValueSummary(dtype, tuple(size), tuple(placements), None if number is None else meshes[number])
        for name, (dtype, size, placements, number) in values.items()
    }


def digest_of(summary: StateSummary) -> int:
    """63 bits by which ranks compare their summaries."""
    digest = hashlib.blake2b(summary_to_json(summary).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _dtensor_summary(tensor: Any, mesh: Mesh) -> ValueSummary:
    placements = tuple(
        _REPLICATED if placement.is_replicate() else str(placement) for placement in tensor.placements
    )
    return ValueSummary(str(tensor.dtype), tuple(tensor.shape), placements, mesh)


def _check_part(name: str, tensor: Any, mesh: Mesh, rank: int, members: Container[int]) -> None:
    outsiders = [other for other in mesh.ranks if other not in members]
    if outsiders:
        raise InvalidInputError(
            f"{name!r} is a DTensor with a part on rank {outsiders[0]}, which is not in the group that saves: save it "
            "with a group of all ranks of its mesh"
        )
    check_placement(name, tensor, rank)
    for share in shares_for(tensor, rank):
        if any(len(runs) > 1 for runs in share.runs):
            raise InvalidInputError(
                f"{name!r} is a DTensor placed {tensor.placements}, of which rank {share.rank} holds no single block: "
                "DCP cannot describe that; give dimensions that the ranks divide, or redistribute it"
            )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
