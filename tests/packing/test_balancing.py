"""`balance` and `micro_batches`: what they take, give and refuse; the core's own tests hold the method itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed.rank_processes import Job, Line, outcome

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

Lists = list[list[int]]


def as_lists(groups: list[np.ndarray]) -> Lists:
    assert all(group.dtype == np.int64 and group.flags.c_contiguous for group in groups)
    return [group.tolist() for group in groups]


def test_lengths_of_every_kind_give_the_same_parts() -> None:
    torch = pytest.importorskip("torch")
    lengths = [7, 5, 4, 4, 2]
    for given in (
        lengths,
        np.array(lengths, dtype=np.uint8),
        np.repeat(lengths, 2)[::2],
        torch.tensor(lengths),
    ):
        assert as_lists(td.packing.balance(given, 2)) == [[0, 3], [1, 2, 4]]
        assert as_lists(td.packing.micro_batches(given, 12)) == [[0, 3], [1, 2, 4]]


def test_ten_thousand_rollouts_are_balanced_to_a_few_tokens() -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 0.8, 10_000).astype(np.int64).clip(1, 8192)
    for equal_counts, spread in ((False, 1), (True, 8)):
        parts = td.packing.balance(lengths, 16, equal_counts=equal_counts)
        sums = [int(lengths[part].sum()) for part in parts]
        assert max(sums) - min(sums) <= spread
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(10_000))
    batches = td.packing.micro_batches(lengths, 32_768)
    sums = [int(lengths[batch].sum()) for batch in batches]
    assert len(batches) == -(-int(lengths.sum()) // 32_768)
    assert max(sums) <= 32_768


@pytest.mark.parametrize(
    ("ask", "kind", "says"),
    [
        (lambda b, m: b([3, 4], 0), InvalidInputError, "parts is 0; it must be in 1 …"),
        (lambda b, m: b([3, 4], 3), InvalidInputError, "parts is 3, and there are 2 samples"),
        (lambda b, m: b([], 1), InvalidInputError, "there are 0 samples"),
        (lambda b, m: b([3, 4], True), InvalidTypeError, "parts must be an integer"),
        (lambda b, m: b([3, 4], 1.0), InvalidTypeError, "parts must be an integer"),
        (lambda b, m: b([3.0, 4.0], 1), InvalidTypeError, r"lengths\[0\] is a float"),
        (lambda b, m: b([3, -4], 1), InvalidInputError, r"lengths\[1\] is -4; it must be at least 0"),
        (lambda b, m: b([3, -4], 1, cost=[1, 1]), InvalidInputError, r"lengths\[1\] is -4"),
        (lambda b, m: b([3, 4], 1, cost=[1, -1]), InvalidInputError, r"cost\[1\] is -1; it must be at least"),
        (lambda b, m: b([3, 4], 1, cost=[1.5, 2.5]), InvalidTypeError, r"cost\[0\] is a float"),
        (lambda b, m: b([3, 4], 1, cost=[1]), InvalidInputError, "cost has 1 entries, and lengths has 2"),
        (
            lambda b, m: b([3, 4], 1, cost="flops"),
            InvalidInputError,
            "cost is 'flops'; it must be \"tokens\"",
        ),
        (lambda b, m: b([3, 4], 1, cost=None), InvalidTypeError, "cost is None"),
        (
            lambda b, m: b([3, 4, 5], 2, equal_counts=True),
            InvalidInputError,
            "leave out 1 of them, add 1, or",
        ),
        (lambda b, m: b([3, 4], 2, equal_counts=1), InvalidTypeError, "equal_counts must be True or False"),
        (
            lambda b, m: b([2**63 - 1] * 5, 1, cost="attention"),
            InvalidInputError,
            r"samples 0 … 3 add up to 2\^128 or more",
        ),
        (lambda b, m: m([], 8), InvalidInputError, "there are 0 samples"),
        (lambda b, m: m([3, -4], 8), InvalidInputError, r"lengths\[1\] is -4"),
        (lambda b, m: m([3, 4], 0), InvalidInputError, "max_tokens is 0; it must be in 1 …"),
        (lambda b, m: m([3, 4], 8.0), InvalidTypeError, "max_tokens must be an integer"),
        (
            lambda b, m: m([3, 9, 8, 12], 8),
            InvalidInputError,
            r"lengths\[1\] is 9, above max_tokens=8 \(2 of 4 samples are, the longest has 12 tokens\)",
        ),
        (
            lambda b, m: m([3, 4], 8, same_count_on="all"),
            InvalidInputError,
            "or give None in place of the group",
        ),
    ],
)
def test_bad_input_is_refused(ask: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        ask(td.packing.balance, td.packing.micro_batches)
    assert isinstance(caught.value, td.TundishError)


def test_the_names_are_functions_whichever_is_used_first() -> None:
    # A module of the name of a function would take its place.
    program = (
        "from tundish import packing; packing.micro_batches; assert packing.balance([1], 1)[0].size == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def agree(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    group = distributed.group.WORLD
    while (asked := line.hear()) is not None:
        found: list[Lists] = []

        def split(asked: Any = asked, found: list[Lists] = found) -> None:
            found.append(as_lists(td.packing.micro_batches(*asked, same_count_on=group)))

        failed = outcome(split)
        line.say(found[0] if found else failed)


def test_ranks_agree_on_the_largest_count_and_on_every_error(tmp_path: Path) -> None:
    with Job(agree, 2, tmp_path) as job:

        def ask(*lengths: list[Any]) -> list[Any]:
            for rank, given in enumerate(lengths):
                job.tell(rank, (given, 8))
            return [said for (said,) in job.hear_all()]

        # Alone, the second rank needs one batch.
        assert ask([8, 7, 6], [1, 2, 2, 3]) == [[[0], [1], [2]], [[0, 1], [3], [2]]]
        assert ask([1, 2], [4, 4]) == [[[0, 1]], [[0, 1]]]

        mine, other = ask([1, 2, 3], [5, 9])
        assert mine[0] == "PeerFailedError" and mine[2] == 1
        assert other[0] == "InvalidInputError" and "lengths[1] is 9, above max_tokens=8" in other[1]
        assert other[1] in mine[1]

        mine, other = ask([1.5], [5, 3])
        assert mine[0] == "InvalidTypeError" and other[0] == "PeerFailedError" and other[2] == 0

        # The second rank has too few samples for the batches that the first one needs.
        mine, other = ask([8, 8, 8], [5, 3])
        assert mine[0] == "PeerFailedError" and mine[2] == 1
        assert other[0] == "InvalidInputError" and other[1].startswith("3 batches are needed on every rank")

        assert ask([8], [7]) == [[[0]], [[0]]]
        job.tell_all(None)
        job.expect_end()
