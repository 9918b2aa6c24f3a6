"""`Participants`, also with thousands of ranks."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import tundish as td
from tundish.scatter.participants import replicated_participants


class FakeVoter:
    """A voter that combines given groups and positions."""

    def __init__(self, groups: list[Any]) -> None:
        self.ranks = tuple(range(0, 8000, 2))
        self._text = json.dumps(groups)

    def combine(self, *_: Any, **__: Any) -> str:
        return self._text


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ([([number, number + 1], 0) for number in range(4000)], "[0, 1], [1, 2]"),
        ([([number], number) for number in range(4000)], "[0], [1]"),
    ],
    ids=["no grid", "another order"],
)
def test_a_message_names_some_of_thousands_of_ranks(groups: list[Any], shown: str) -> None:
    voter: Any = FakeVoter(groups)
    with pytest.raises(td.errors.InvalidInputError, match=r"ranks 0, 2, 4.* and 3984 more") as raised:
        replicated_participants(voter, None, 0, what="a test", timeout=timedelta(seconds=1))
    assert shown in str(raised.value) and "and 3992 more" in str(raised.value)
    assert len(str(raised.value)) < 500
