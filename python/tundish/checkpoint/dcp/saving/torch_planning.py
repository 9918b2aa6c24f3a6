"""Plans a save with `torch.distributed.checkpoint`'s own planner, in the background.

Invariants: the planner sees tensors without bytes, with the placements of the originals. `.metadata` names only items
that some rank writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.file_names import shard_name
from tundish.checkpoint.dcp.saving.file_layout import FileLayout
from tundish.checkpoint.dcp.saving.plan_exchange import PlanExchange

__all__ = ["DTensorLayout", "StagedPlanner", "plan_together"]


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How a DTensor is distributed; `shape` and `stride` of the whole tensor."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]


class StagedPlanner(DefaultSavePlanner):
    """torch's planner for the values that this rank saves.

    Args:
        staged: by name a tensor like the local one, on the meta device; None for other values.
        dtensors: the layouts of those that are parts of DTensors.
        paths: of the whole state dict.
    """

    def __init__(
        self,
        staged: Mapping[str, torch.Tensor | None],
        dtensors: Mapping[str, DTensorLayout],
        paths: Mapping[str, tuple[str | int, ...]],
    ) -> None:
        super().__init__()
        self._staged = staged
        self._dtensors = dtensors
        self._paths = dict(paths)

    def set_up_planner(
        self,
        state_dict: Any = None,  # noqa: ARG002 (the planner's interface)
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        """Plan for the values given to the constructor."""
        self.state_dict = {name: self._placed(name, tensor) for name, tensor in self._staged.items()}
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    def _placed(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`tensor` with the placement of its original."""
        layout = self._dtensors.get(name)
        if layout is None or tensor is None:
            return tensor
        return DTensor.from_local(
            tensor,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride,
        )


def plan_together(
    planner: StagedPlanner, layout: FileLayout, index: int, exchange: PlanExchange
) -> bytes | None:
    """Collective: plan the save with all ranks.

    Args:
        planner: of this rank's values.
        layout: of this rank's file; keeps the plan for the next save of the same layout.
        index: of this rank in the group.
        exchange: of the plans.

    Returns:
        The contents of `.metadata` on the first rank, None on the others.
    """
    try:
        if layout.plan is None:
            planner.set_up_planner(is_coordinator=exchange.is_coordinator)
            layout.plan = _with_places(planner.create_local_plan(), layout, shard_name(index))
    except BaseException as error:
        with contextlib.suppress(Exception):
            exchange.gather(error)
        raise
    plans = exchange.gather(layout.plan)
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        metadata.storage_data = {
            item.index: plan.storage_data[item.index] for plan in plans for item in plan.items
        }
        metadata.storage_meta = StorageMeta()
        exchange.metadata = pickle.dumps(metadata)
    return exchange.metadata


def _with_places(plan: SavePlan, layout: FileLayout, name: str) -> SavePlan:
    """`plan` with the place of each item in the file `name`."""
    places = {item: _StorageInfo(name, start, length) for item, start, length in layout.places()}
    return dataclasses.replace(plan, storage_data={item.index: places[item.index.fqn] for item in plan.items})
