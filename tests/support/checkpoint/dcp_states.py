"""Training states of several ranks for tests of DCP checkpoints, and the way of one save without a checkpointer.

Every rank of a job builds the same model from the same seed, so what a sharded state holds as a whole can be asked of
any of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.checkpoint.checkpoint_roots import add_manifest_checksum
from support.distributed.rank_processes import Job
from tundish._native import FileMetadata
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave
from tundish.checkpoint.root import DiskDraft, WriteOptions
from tundish.checkpoint.staging import Staged
from tundish.distributed import VoteId, voter_of

OPTIONS = WriteOptions(checksum=True, set_progress=lambda ask: None)


class Net(torch.nn.Module):
    """Small, with what real models have: a matrix that ranks do not divide, biases, a norm, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(12, 24)
        self.down = torch.nn.Linear(24, 12)
        self.head = torch.nn.Linear(12, 7)
        self.norm = torch.nn.LayerNorm(12)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.norm(self.down(torch.relu(self.up(x)))))


class World:
    """A model in training, spread over the ranks as `layout` says: ddp, fsdp, hsdp, tp, or both (fsdp and tp).

    `mesh`: what fsdp spreads it over, on devices of that kind; all ranks in host memory by default.
    """

    def __init__(self, layout: str, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(seed)
        size = distributed.get_world_size() if distributed.is_initialized() else 1
        self.device = "cpu" if mesh is None else mesh.device_type
        self.model: torch.nn.Module = Net().to(self.device)
        if mesh is not None:
            assert layout == "fsdp"
        elif layout in ("hsdp", "both"):
            mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
        elif layout != "ddp":
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("inner",))
        if layout in ("tp", "both"):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.model, mesh["inner"], plan)
        if layout in ("fsdp", "hsdp", "both"):
            fully_shard(self.model, mesh=mesh["outer"] if layout == "both" else mesh)
        # Fused it is one operation, and torch plans each for DTensors in every new process. Under tp not all are such.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=layout != "tp")

    def train(self, steps: int = 1) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(4, 12).to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def whole(state: Any) -> Any:
    """A copy of a state with whole tensors in the place of spread ones. Collective where there are such."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return copy.deepcopy(state)


def assert_same(got: Any, expected: Any, where: str = "state") -> None:
    """`got` is `expected`, bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        assert got.shape == expected.shape, where
        assert bits(got) == bits(expected), where
    elif isinstance(expected, Mapping):
        assert set(map(str, got)) == set(map(str, expected)), where
        for key, value in expected.items():
            assert_same(got[key] if key in got else got[str(key)], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(got[number], value, f"{where}[{number}]")
    else:
        assert type(got) is type(expected), where
        assert got == expected, where


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def write(staged: Any, folder: Path, extra: Mapping[str, Any] | None = None) -> list[FileMetadata]:
    """Do with what is staged as a checkpointer does: write it, and record it once all ranks have. Collective."""
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    try:
        if is_first:
            folder.mkdir(exist_ok=True)
        barrier()
        staged.wait_staged(60)
        facts: list[FileMetadata] = staged.write(DiskDraft(folder), OPTIONS)
        notes = gathered(staged.note)
        others = staged.write_late_files(DiskDraft(folder), notes) if is_first else []
    finally:
        staged.release()
    everyone = gathered([(fact.name, fact.size, fact.checksum) for fact in facts + others])
    if is_first:
        files = [
            {"name": name, "size": size, "checksum": checksum}
            for of_rank in everyone
            for name, size, checksum in of_rank
        ]
        files.sort(key=lambda file: file["name"])
        manifest = {"format_version": 1, "kind": "dcp", "step": 1, "tag": None, "world_size": len(everyone)}
        text = json.dumps({**manifest, "extra": extra, "files": files})
        (folder / "tundish.json").write_text(add_manifest_checksum(text))
    barrier()
    return facts + others


def new_planner(group: Any = None) -> SavePlanner:
    """Collective: a planner of saves without a checkpointer."""
    return SavePlanner(voter_of(group))


def reserve(plan: DcpSave) -> Staged:
    """Find what is saved, and take the memory for it. Collective."""
    vote = VoteId("unused", 0)
    any_needs = any(gathered(plan.needs_ranks))
    plan.agree(vote, any_needs=any_needs, do_replicas_differ=False)
    return Staged(plan.write_plan())


def save(
    planner: SavePlanner, state: Mapping[str, Any], folder: Path, **arguments: Any
) -> list[FileMetadata]:
    """Save and wait. Collective."""
    staged = reserve(DcpSave(planner, state, **arguments))
    staged.copy()
    return write(staged, folder, arguments.get("extra"))


def gathered(value: Any) -> list[Any]:
    """`value` of every rank."""
    if not distributed.is_initialized():
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def barrier() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def read(folder: Path) -> Any:
    """A checkpoint as torch loads it, whole and in one process."""
    target = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=False)


def run(scenario: Any, size: int, folder: Path, *told: Any) -> list[Any]:
    """Run a scenario whose ranks meet in a folder and are told the rest; what each of them said last."""
    folder.mkdir(exist_ok=True)
    with Job(scenario, size, folder) as job:
        job.tell_all(told)
        said = job.hear_all()
        job.expect_end()
    return said
