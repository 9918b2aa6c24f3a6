"""Rounds that the caller makes: who leaves twice, as an error does that goes through the iterator, has left once."""

import threading

import pytest

from tundish.scatter.loader.prefetch import Inline


class _Slow:
    """A pass that fails, and whose others are slow to take what they are told."""

    def __init__(self) -> None:
        self.left = 0
        self.may_go = threading.Event()

    def step(self) -> None:
        raise RuntimeError("no more")

    def depart(self, rounds: int) -> None:
        pass

    def leave(self, rounds: int) -> None:
        self.left += 1
        self.may_go.wait(60)


def test_a_pass_is_left_once() -> None:
    slow, calls = _Slow(), []
    rounds = Inline(slow)
    rounds.then(lambda: calls.append(1))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError):
        rounds.take()
    rounds.leave()
    leaving = set(threading.enumerate()) - before
    slow.may_go.set()
    for thread in leaving:
        thread.join(60)
    assert rounds.join(60)
    assert (slow.left, len(calls)) == (1, 1)
