"""Saves in far less host memory than they have bytes: as they were given, and at a sensible speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish.checkpoint import Checkpointer

LIMIT = 3 << 20
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float64,
)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of a dtype, some far smaller than a window and one larger than the limit."""

    def base(*shape: int) -> torch.Tensor:
        values = torch.randint(0, 60, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        return values.view(dtype).view(shape)

    small = {f"small.{number}": base(37, 129) for number in range(20)}
    return small | {
        "scalar": base(1)[0],
        "empty": base(0, 5),
        "transposed": base(700, 300).t(),
        "columns": base(300, 701)[:, :-1],
        "steps": base(900, 70)[::3],
        "expanded": base(1, 50).expand(300, 50),
        "unaligned": base(40001)[1:],
        "channels_last": base(2, 3, 80, 80).contiguous(memory_format=torch.channels_last),
        "large": base(1400, 2 * LIMIT // 1400 // dtype.itemsize)[:, :-1],
    }


def assert_saved(kind: str, path: Path, checkpointer: Checkpointer, state: dict[str, torch.Tensor]) -> None:
    if kind == "hf":
        from safetensors.torch import load_file

        got: dict[str, Any] = {}
        for file in path.glob("*.safetensors"):
            got |= load_file(file)
    else:
        got = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
        checkpointer.load_dcp(got)
    assert got.keys() == state.keys()
    for name, tensor in state.items():
        whole = tensor.detach().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(got[name].contiguous().view(-1).view(torch.uint8), whole), name


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_small_limit_costs_no_more_than_a_few_times_the_time(
    kind: str, staging: str, tmp_path: Path
) -> None:
    state: dict[str, torch.Tensor] = {
        f"{str(dtype)[6:]}.{name}": torch.nn.Parameter(tensor, requires_grad=False)
        for dtype in DTYPES
        for name, tensor in layouts(dtype).items()
    }
    optimizer = torch.optim.SGD(state.values(), lr=0.1)
    arguments: dict[str, Any] = {"shard_bytes": 30 << 20} if kind == "hf" else {}
    took: dict[int | None, float] = {}
    # Alternately and twice: what the machine does beside is nobody's slowness.
    for step, limit in enumerate([None, LIMIT, None, LIMIT]):
        root = tmp_path / str(step)
        with Checkpointer(root, on_failure="raise", staging_limit_bytes=limit) as checkpointer:
            started = time.monotonic()
            save = getattr(checkpointer, f"save_{kind}")(
                step, state, staging=staging, optimizer=optimizer, **arguments
            )
            path = save.result(100)
            seconds = time.monotonic() - started
            took[limit] = min(seconds, took.get(limit, seconds))
            assert_saved(kind, path, checkpointer, state)
            largest = max(tensor.nbytes for tensor in state.values())
            peak = checkpointer.stats()["staging"]["peak"]
            # Larger than the limit is what holds one tensor alone.
            assert limit is None or peak < 2 * largest
    assert took[LIMIT] < 5 * took[None] + 0.25, took
