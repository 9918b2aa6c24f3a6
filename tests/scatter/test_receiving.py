"""What a receiver does with messages, wherever Ctrl-C comes: of those that it reads, and passes on, none is lost."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from support.distributed.ctrl_c import at_every_moment

from tundish.errors import PeerFailedError
from tundish.scatter.source import Note, ScatterSession
from tundish.scatter.transport.message_header import LOST, NOTE, Head

Message = tuple[Head, str]


class End:
    """Messages that are there, one after the other."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    def wait(self, seconds: float) -> bool:
        return bool(self._messages)

    def read(self) -> Message:
        return self._messages[0]

    def done(self) -> None:
        del self._messages[:1]


class Lane:
    """What a rank of the node was told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.told: list[Message] = []

    def say(self, number: int, kind: int, text: str, wait: Any) -> None:
        self.told.append((Head(number, kind), text))


def receiver(messages: list[Message], lanes: list[Lane]) -> Any:
    """A receiver that is told these, and passes them on."""
    made: Any = object.__new__(ScatterSession)
    watch = SimpleNamespace(vanished=frozenset, departed=dict, close=lambda **_: None)
    ways = SimpleNamespace(end=End(messages), feeder=0, near=lanes, far=[], direct=None, watch=watch)
    vars(made).update(
        _place=SimpleNamespace(rank=1, source=0),
        _timeout=timedelta(seconds=1),
        _in_loop=False,
        _process=os.getpid(),
        _number=0,
        _lost=None,
        _told=0,
        _batches=0,
        _waited=0.0,
        _ways=ways,
    )
    return made


@pytest.mark.parametrize("passes_on", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_that_a_rank_was_lost_is_not_forgotten(number: int, passes_on: bool) -> None:
    places = ScatterSession.take, ScatterSession._receive, ScatterSession._next, ScatterSession._pass_on
    for moment, ctrl_c in at_every_moment(*places):
        lanes = [Lane(7)] if passes_on else []
        rank = receiver([(Head(number, LOST), "5\nrank 5 was killed")], lanes)
        with ctrl_c, pytest.raises(PeerFailedError, match="rank 5 was killed"):
            rank.take()
        with pytest.raises(PeerFailedError, match="rank 5 was killed") as caught:
            rank.take()
        assert caught.value.rank == 5
        assert all(any(head.kind == LOST for head, _ in lane.told) for lane in lanes), moment


def test_what_is_passed_on_of_a_later_round_comes_to_all() -> None:
    places = (
        ScatterSession.take,
        ScatterSession._receive,
        ScatterSession._next,
        ScatterSession._pass_on,
        ScatterSession._done,
    )
    for moment, ctrl_c in at_every_moment(*places):
        lanes = [Lane(7), Lane(8)]
        # The source left the first round without a word.
        rank = receiver([(Head(number, NOTE), f"note {number}") for number in (2, 3)], lanes)
        with ctrl_c, pytest.raises(PeerFailedError, match="left this round"):
            rank.take()
        assert [rank.take(), rank.take()] == [Note("note 2"), Note("note 3")], moment
        for lane in lanes:
            # Some of it twice: of a round that they have been through they take nothing.
            told = [head.number for head, _ in lane.told]
            assert sorted(set(told)) == [2, 3] and told == sorted(told), (moment, told)
