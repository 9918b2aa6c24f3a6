"""The tensors that are saved, made again bit for bit by every process, and their comparison.

No two tensors are alike, and none compresses. `Changes` alters every tensor after a save, so that reading back finds a
save that did not copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`tensors` of `elements` each, of bfloat16."""

    name: str
    tensors: int
    elements: int

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.tensors * self.elements * torch.bfloat16.itemsize


WORKLOADS = {
    "large": Workload(name="2.2 GB in 110 tensors", tensors=110, elements=10_000_000),
    "small": Workload(name="2000 × 64 KB", tensors=2000, elements=32_768),
    # For the tests of the bench alone.
    "tiny": Workload(name="3 tensors", tensors=3, elements=4096),
}


def make_state(workload: Workload) -> dict[str, torch.Tensor]:
    """Names to tensors, as a state dict has them; contiguous, each with memory of its own."""
    pool = torch.empty(workload.elements + workload.tensors, dtype=torch.int16)
    pool.random_(generator=torch.Generator().manual_seed(7))
    return {
        f"layers.{number}.weight": pool[number : number + workload.elements].clone().view(torch.bfloat16)
        for number in range(workload.tensors)
    }


def sharded(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same as DTensors, each rank with its part of the first dimension, as FSDP2 has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    part = mesh.get_local_rank()
    return {
        name: DTensor.from_local(tensor.chunk(world)[part].clone(), mesh, [Shard(0)], run_check=False)
        for name, tensor in state.items()
    }


def own_parts(read: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of whole tensors what this rank holds of them in `state`."""
    return {
        name: tensor.chunk(state[name].device_mesh.size())[state[name].device_mesh.get_local_rank()]
        if hasattr(state[name], "device_mesh")
        else tensor
        for name, tensor in read.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as integers, so that every bit is compared."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().view(torch.int16)


class Changes:
    """Changes tensors as training does after a save: the first and last element of each, and back."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._ends = [
            local(tensor).view(-1)[:: max(1, local(tensor).numel() - 1)] for tensor in state.values()
        ]

    def toggle(self) -> None:
        """Change the tensors; the second time, back."""
        for ends in self._ends:
            ends.bitwise_not_()


def whole_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Empty tensors of the same form."""
    return {name: torch.empty_like(tensor) for name, tensor in state.items()}


def differing(read: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or whose bits differ."""
    return [
        name
        for name in sorted(read.keys() | expected.keys())
        if name not in read
        or name not in expected
        or not torch.equal(local(read[name]), local(expected[name]))
    ]
