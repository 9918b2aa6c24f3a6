"""Local tensors of a DTensor: those that still arrive are waited for, and unknown types are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.distributed.rank_processes import Job, Line, outcome
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tundish.checkpoint import Checkpointer


class Packed(torch.Tensor):
    """Has a shape and a dtype, and no dense values of its own."""

    @staticmethod
    def __new__(cls, shape: Any) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        raise NotImplementedError(f"{function} of what is packed")


def saving(rank: int, line: Line) -> None:
    root, kind = line.hear()
    mesh = init_device_mesh("cpu", (2,))
    part = torch.full((3, 4), rank + 0.5)
    cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        save = getattr(checkpointer, f"save_{kind}")
        for step in (1, 2):
            # On its way from the other rank; nobody has waited for it yet.
            whole = cut.redistribute(mesh, [Replicate()], async_op=True)
            assert type(whole._local_tensor) is not torch.Tensor
            save(step, {"whole": whole, "cut": cut}).result(60)
        # Of the same shape, dtype and placement as what was saved before.
        cut._local_tensor = Packed((3, 4))
        line.say(*outcome(lambda: save(3, {"whole": torch.zeros(6, 4), "cut": cut})))
        cut._local_tensor = part
        distributed.barrier()
        if kind == "dcp":
            loaded = {"whole": torch.zeros(6, 4)}
            checkpointer.load_dcp(loaded)
        else:
            loaded = load_file(checkpointer.path / "hf-2" / "model.safetensors")
        assert loaded["whole"].tolist() == [[0.5] * 4] * 3 + [[1.5] * 4] * 3


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_async_parts_are_waited_for_and_other_subclasses_refused(kind: str, tmp_path: Path) -> None:
    with Job(saving, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root", kind))
        for came, text, _ in job.hear_all():
            assert came == "InvalidTypeError", text
            assert "has no dense values of its own" in text
        job.expect_end()
