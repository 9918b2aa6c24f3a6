"""`num_items_in_batch`: the denominator of a step on several ranks, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


@pytest.mark.parametrize(
    ("batches", "kind", "says"),
    [
        ({"loss_weights": torch.ones(1, 2)}, InvalidTypeError, "batches is a dict: give a list of batches"),
        (5, InvalidTypeError, "batches is an int"),
        ([torch.ones(2)], InvalidTypeError, "batch 0 is a Tensor"),
        (
            [{"loss_weights": torch.ones(1, 2)}, {"labels": torch.ones(1, 2)}],
            InvalidInputError,
            "batch 1 has no loss_w",
        ),
    ],
)
def test_batches_without_weights_are_refused(batches: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.packing.num_items_in_batch(batches)


def sum_up(rank: int, line: Line) -> None:
    while (weights := line.hear()) is not None:
        found: list[float] = []
        batches = [{"loss_weights": torch.tensor([part])} if part else {} for part in weights]

        def ask(batches: Any = batches, found: list[float] = found) -> None:
            found.append(td.packing.num_items_in_batch(batches).item())

        failed = outcome(ask)
        line.say(found[0] if found else failed)


def test_ranks_get_one_denominator_and_every_error(tmp_path: Path) -> None:
    with Job(sum_up, 2, tmp_path) as job:

        def ask(*weights: list[Any]) -> list[Any]:
            for rank, given in enumerate(weights):
                job.tell(rank, given)
            return [said for (said,) in job.hear_all()]

        assert ask([[0.5, 0.5], [1.0]], [[0.25]]) == [2.25, 2.25]
        assert ask([], [[3.0]]) == [3.0, 3.0]
        mine, other = ask([[1.0]], [[1.0], None])
        assert (mine[0], mine[2], other[0]) == ("PeerFailedError", 1, "InvalidInputError")
        for rank in range(2):
            job.tell(rank)
        job.expect_end()
