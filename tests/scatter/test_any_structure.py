"""Random nested structures reach every rank with the same types, through shared memory and over gloo."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from support.distributed.rank_processes import Job, Line, on_nodes
from support.scatter.batches import Opaque, Pair, Rows, Sample, Span, same
from support.tree.containers import KEYS, containers

import tundish as td


def tensor(dtype: torch.dtype, shape: tuple[int, ...], first: int, kind: str) -> Any:
    count = int(np.prod(shape))
    made = ((torch.arange(count) + first) % 7).to(dtype).view(shape)
    if kind == "transposed" and made.dim() > 1:
        return made.transpose(0, -1)
    # torch loads no others with a gradient.
    if kind == "gradient" and dtype in (torch.float32, torch.bfloat16):
        return made.requires_grad_()
    if kind == "array" and dtype in (torch.float32, torch.int64):
        return made.numpy()
    return made


SHAPES = some.lists(some.integers(0, 3), max_size=3).map(tuple)
TENSORS = some.builds(
    tensor,
    some.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]),
    # Small tensors, and some that are larger than a message.
    SHAPES | SHAPES | some.sampled_from([(50_000,), (3, 400_000)]),
    some.integers(0, 6),
    some.sampled_from(["plain", "transposed", "gradient", "array"]),
)
VALUES = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats(allow_nan=False)
    | some.text(max_size=4)
    | some.binary(max_size=4)
)
STRUCTURES: some.SearchStrategy[Any] = some.recursive(
    TENSORS | VALUES,
    lambda inner: (
        containers(inner, rows=Rows, keys=KEYS, most=5)
        | some.builds(Pair, inner, inner)
        | some.builds(Sample, inner, some.text(max_size=4))
        | some.builds(Span, inner, some.text(max_size=4))
        | some.builds(Opaque, inner)
    ),
    max_leaves=12,
)


def scatter_received_batches(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    while (pickled := line.hear()) is not None:
        one, other = torch.load(io.BytesIO(pickled), weights_only=False)
        failures = []
        # One batch for each rank, then one batch for two receivers.
        for batches in ([one, other, one], [other, one, one]):
            try:
                mine = td.scatter_batch(batches if rank == 0 else None)
            except Exception as error:
                failures.append(repr(error))
            else:
                if not same(mine, batches[rank]):
                    failures.append(f"{batches[rank]!r} came as {mine!r}")
        line.say(failures)


@pytest.mark.parametrize("node", [3, 1])
def test_any_structure_arrives_unchanged(node: int, tmp_path: Path) -> None:
    with Job(scatter_received_batches, 3, tmp_path) as job:

        @settings(max_examples=25, deadline=None)
        @given(STRUCTURES, STRUCTURES)
        def check(one: Any, other: Any) -> None:
            # As bytes, because the ranks must not share the memory of the test.
            pickled = io.BytesIO()
            torch.save((one, other), pickled)
            for rank in range(3):
                job.tell(rank, pickled.getvalue())
            assert job.hear_all() == [([],)] * 3

        for rank in range(3):
            job.tell(rank, node)
        check()
        for rank in range(3):
            job.tell(rank)
        job.expect_end()
