"""What a rank's state dict holds, as ranks tell each other of it.

Owns the description of a state dict that leaves out which part a rank has of each tensor, and what is refused about
layouts. What always holds: ranks that hold different parts of the same tensors have the same outline; nothing here is
collective.
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

from tundish.checkpoint.dcp.leaves import Leaves
from tundish.checkpoint.placements import check_placement, shares_for
from tundish.checkpoint.tensors import local_of
from tundish.errors import InvalidInputError

__all__ = [
    "Census",
    "Entry",
    "Mesh",
    "Outline",
    "digest_of",
    "outline_from_json",
    "outline_of",
    "outline_to_json",
    "total_bytes",
]

_REPLICATED = "R"
# What an item takes in a file beside the bytes of its tensor.
_ITEM_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Mesh:
    """The form of a device mesh and the global ranks in it."""

    size: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf of a state dict.

    `dtype`: empty for what is no tensor. `size`: of the whole tensor. `placements` and `mesh`: of a DTensor; entries of
    one outline on the same mesh have the same object.
    """

    dtype: str = ""
    size: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    mesh: Mesh | None = None

    def is_like(self, other: Entry) -> bool:
        """Whether both are parts of one thing: the same but, perhaps, the ranks."""
        meshes = [None if entry.mesh is None else entry.mesh.size for entry in (self, other)]
        return (
            (self.dtype, self.size, self.placements) == (other.dtype, other.size, other.placements)
        ) and meshes[0] == meshes[1]

    @property
    def replicated(self) -> tuple[bool, ...]:
        """For each dimension of the mesh, whether the ranks along it have the same part."""
        return tuple(placement == _REPLICATED for placement in self.placements)

    def __str__(self) -> str:
        if not self.dtype:
            return "no tensor"
        where = "" if self.mesh is None else f" placed {', '.join(self.placements)} on {self.mesh.size} ranks"
        return f"a {self.dtype.removeprefix('torch.')} tensor of shape {self.size}{where}"


Outline = dict[str, Entry]

# Each distinct outline among some ranks, and the global ranks that have it.
Census = tuple[tuple[Outline, frozenset[int]], ...]


def outline_of(leaves: Leaves, rank: int, members: Container[int]) -> Outline:
    """The outline of what `rank` holds.

    Raises `InvalidInputError` for a DTensor on ranks that are not among `members`, and for one whose local tensor
    is not what its placements say, or is no single block of the whole.
    """
    outline: Outline = {}
    meshes: dict[int, Mesh] = {}
    checked: set[tuple[int, Any, torch.Size, torch.Size]] = set()
    for name, value in leaves:
        if not isinstance(value, DTensor):
            is_tensor = isinstance(value, torch.Tensor)
            outline[name] = Entry(str(value.dtype), tuple(value.shape)) if is_tensor else Entry()
            continue
        mesh = value.device_mesh
        if id(mesh) not in meshes:
            meshes[id(mesh)] = Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
        part = id(mesh), value.placements, value.shape, local_of(value).shape
        if part not in checked:
            _check_part(name, value, meshes[id(mesh)], rank, members)
            checked.add(part)
        outline[name] = _entry_of(value, meshes[id(mesh)])
    return outline


def total_bytes(census: Census) -> int:
    """About what the files of all ranks take."""
    entries = {name: entry for outline, _ in census for name, entry in outline.items()}
    total = 0
    for entry in entries.values():
        extents = () if entry.mesh is None else entry.mesh.size
        items = math.prod(
            extent for extent, replicated in zip(extents, entry.replicated, strict=True) if not replicated
        )
        itemsize = _dtype(entry.dtype).itemsize if entry.dtype else 0
        total += math.prod(entry.size) * itemsize + items * _ITEM_BYTES
    return total


def outline_to_json(outline: Outline) -> str:
    """The JSON form: the meshes, then the leaves with the numbers of theirs."""
    meshes = {id(entry.mesh): entry.mesh for entry in outline.values() if entry.mesh is not None}
    numbers = {mesh: number for number, mesh in enumerate(meshes)}
    leaves = {
        name: [entry.dtype, entry.size, entry.placements, numbers.get(id(entry.mesh))]
        for name, entry in outline.items()
    }
    return json.dumps([[(mesh.size, mesh.ranks) for mesh in meshes.values()], leaves])


def outline_from_json(text: str) -> Outline:
    """From the JSON form."""
    told, leaves = json.loads(text)
    meshes = [Mesh(tuple(size), tuple(ranks)) for size, ranks in told]
    return {
        name: Entry(dtype, tuple(size), tuple(placements), None if number is None else meshes[number])
        for name, (dtype, size, placements, number) in leaves.items()
    }


def digest_of(outline: Outline) -> int:
    """63 bits by which ranks see whether they have the same outline."""
    digest = hashlib.blake2b(outline_to_json(outline).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _entry_of(tensor: Any, mesh: Mesh) -> Entry:
    placements = tuple(
        _REPLICATED if placement.is_replicate() else str(placement) for placement in tensor.placements
    )
    return Entry(str(tensor.dtype), tuple(tensor.shape), placements, mesh)


def _check_part(name: str, tensor: Any, mesh: Mesh, rank: int, members: Container[int]) -> None:
    strangers = [other for other in mesh.ranks if other not in members]
    if strangers:
        raise InvalidInputError(
            f"{name!r} is a DTensor with a part on rank {strangers[0]}, which is not in the group that saves: save it "
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
