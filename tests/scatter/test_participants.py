"""`Participants`, also with thousands of ranks."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest

import tundish as td
from tundish.scatter.participants import Participants, replicated_participants


class Mates:
    """A voter that broadcasts a given text."""

    def __init__(self, heard: list[Any]) -> None:
        self.ranks = tuple(range(0, 8000, 2))
        self._heard = json.dumps(heard)

    def gather(self, *_: Any, **__: Any) -> list[str]:
        return []

    def broadcast(self, *_: Any, **__: Any) -> str:
        return self._heard


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        ([([number, number + 1], 0) for number in range(4000)], "[0, 1], [1, 2]"),
        ([([number], number) for number in range(4000)], "[0], [1]"),
    ],
    ids=["no grid", "another order"],
)
def test_a_message_names_some_of_thousands_of_ranks(heard: list[Any], said: str) -> None:
    mates: Any = Mates(heard)
    with pytest.raises(td.errors.InvalidInputError, match=r"ranks 0, 2, 4.* and 3984 more") as raised:
        replicated_participants(mates, None, 0, what="a test", timeout=timedelta(seconds=1))
    assert said in str(raised.value) and "and 3992 more" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_the_batch_of_a_rank_is_found_without_a_search() -> None:
    # The source looks up every rank in every step.
    ranks = tuple(range(0, 60_000, 3))
    participants = Participants(ranks=ranks, batch_numbers=tuple(range(len(ranks))), rank=3, source=0)
    started = time.monotonic()
    assert [participants.batch_number(rank) for rank in ranks] == list(participants.batch_numbers)
    assert time.monotonic() - started < 0.5
