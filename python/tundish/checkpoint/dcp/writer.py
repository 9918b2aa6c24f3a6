"""Planning and writing with `torch.distributed.checkpoint`'s own planner, in the background.

Owns what becomes of a staged state dict: the plan of this rank, the `.metadata` of all, the files. What always
holds: the planner sees what is staged with the placements of the originals, and no bytes of it; `.metadata` names only
what some rank lays out in its file; whatever fails on a thread of the writer fails the save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tundish._native import FileMetadata, ShardWriter, write_small_file
from tundish.checkpoint.dcp.layout import Layout
from tundish.checkpoint.dcp.ranks import Exchange
from tundish.checkpoint.publish.shard_writing import finishing
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer

__all__ = ["METADATA", "ImageWriter", "Spread", "StagedPlanner", "file_name", "open_file", "save_together"]

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Spread:
    """How a DTensor lies on the ranks; `shape` and `stride` of the whole."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


class StagedPlanner(DefaultSavePlanner):
    """torch's planner for what this rank saves of a state dict that is flat already.

    `staged`: by name a tensor like the local one, on the meta device; None for what is no tensor. `spread`: of those
    that are parts of DTensors. `paths`: of the whole state dict.
    """

    def __init__(
        self,
        staged: Mapping[str, torch.Tensor | None],
        spread: Mapping[str, Spread],
        paths: Mapping[str, tuple[str | int, ...]],
    ) -> None:
        super().__init__()
        self._staged = staged
        self._spread = spread
        self._paths = dict(paths)

    def set_up_planner(
        self,
        state_dict: Any = None,  # noqa: ARG002 (the planner's interface)
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        """Plan for what was given to the constructor."""
        self.state_dict = {name: self._placed(name, tensor) for name, tensor in self._staged.items()}
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    def _placed(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`tensor` with the placement of its original."""
        spread = self._spread.get(name)
        if spread is None or tensor is None:
            return tensor
        return DTensor.from_local(
            tensor,
            spread.mesh,
            spread.placements,
            run_check=False,
            shape=spread.shape,
            stride=spread.stride,
        )


def file_name(index: int) -> str:
    """The file of a rank, by its number in the group, as DCP's own writer names it."""
    return f"__{index}_0.distcp"


def open_file(folder: Path, name: str, size: int, options: WriteOptions) -> ShardWriter:
    """A writer of one file, which is there at its full size when this returns."""
    return ShardWriter(
        folder, [(name, size)], checksum=options.checksum, writers_per_node=options.writers_per_node
    )


class ImageWriter(StorageWriter):
    """Writes the image of this rank's file, in which everything is staged already.

    Args:
        folder: where to.
        index: of this rank in the group.
        layout, buffer, objects: of the file; no buffer where nothing is left to write.
        options: how.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        *,
        layout: Layout,
        buffer: Buffer | None,
        objects: Mapping[str, bytes],
        options: WriteOptions,
    ) -> None:
        self.folder = folder
        self.facts: list[FileMetadata] = []
        # What the first rank writes beside its file, once it has it.
        self.metadata: bytes | None = None
        self._name = file_name(index)
        self._layout = layout
        self._buffer = buffer
        self._objects = objects
        self._options = options

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another folder."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add where the items lie."""
        places = {
            name: _StorageInfo(self._name, start, length) for name, start, length in self._layout.places()
        }
        return dataclasses.replace(
            plan, storage_data={item.index: places[item.index.fqn] for item in plan.items}
        )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to change: the ranks have agreed before who saves what."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:  # noqa: ARG002
        """Write the file, and `.metadata` where this rank has it; returns when they are durable."""
        done: Future[list[WriteResult]] = Future()
        if self._buffer is None:
            self._write_metadata()
            done.set_result(_results_of(plan))
            return done
        self._layout.fill(self._buffer, self._layout.whole, self._objects)
        writer = open_file(self.folder, self._name, self._layout.size, self._options)
        with finishing(writer, self._options):
            writer.write(self._name, 0, self._buffer.image, 0, self._layout.size)
            # Meanwhile.
            self._write_metadata()
            done.set_result(_results_of(plan))
            self.facts += writer.finish()
        return done

    def _write_metadata(self) -> None:
        if self.metadata is not None:
            self.facts.append(write_small_file(self.folder, METADATA, self.metadata))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the contents of `.metadata`."""
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = StorageMeta()
        self.metadata = pickle.dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can write there."""
        return Path(checkpoint_id).is_dir()


def save_together(planner: StagedPlanner, writer: ImageWriter, layout: Layout, exchange: Exchange) -> None:
    """Collective: plan with all ranks, write this rank's file and, on the first rank, `.metadata`.

    `layout`: of the file; keeps the plan, for the next save that has the same one.
    """
    try:
        plan = _plan_alone(planner, writer, layout, is_coordinator=exchange.is_coordinator)
    except BaseException as error:
        with contextlib.suppress(Exception):
            exchange.gather(error)
        raise
    plans = exchange.gather(plan)
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        writer.finish(metadata, [_results_of(each) for each in plans])
        exchange.metadata = writer.metadata
    writer.metadata = exchange.metadata
    writer.write_data(planner.finish_plan(plan), planner).wait()


def _plan_alone(
    planner: StagedPlanner, writer: ImageWriter, layout: Layout, *, is_coordinator: bool
) -> SavePlan:
    writer.set_up_storage_writer(is_coordinator)
    if layout.plan is None:
        planner.set_up_planner(is_coordinator=is_coordinator)
        layout.plan = writer.prepare_local_plan(planner.create_local_plan())
    return layout.plan


def _results_of(plan: SavePlan) -> list[WriteResult]:
    places = plan.storage_data
    return [
        WriteResult(
            index=item.index, size_in_bytes=places[item.index].length, storage_data=places[item.index]
        )
        for item in plan.items
    ]
