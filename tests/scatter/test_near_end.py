"""The receiver's end of a line: descriptors of several messages that are on it at once."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch

from tundish.errors import OutOfMemoryError
from tundish.scatter.arrival import Arrival
from tundish.scatter.departure import Departure
from tundish.scatter.near import NearEnd, NearLane


class Failing:
    """What `parcels` does, but that the first descriptor cannot be adopted."""

    def __init__(self, parcels: Any) -> None:
        self._parcels = parcels
        self._has_failed = False

    def adopt(self, descriptor: int, sender: int) -> None:
        if not self._has_failed:
            self._has_failed = True
            os.close(descriptor)
            raise OutOfMemoryError("there is no room for it")
        self._parcels.adopt(descriptor, sender)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parcels, name)


def test_memory_that_cannot_be_had_takes_none_of_the_next_messages_along() -> None:
    near, far = socket.socketpair()
    lane = NearLane(1, near, 1 << 30)
    lane.introduce()
    end = NearEnd(far, os.getpid(), awake=False)
    end._parcels = Failing(end._parcels)  # type: ignore[assignment]
    for number in range(3):
        batch = torch.full((1 << 18,), float(number))
        lane.give(number, Departure(batch, 1, 1), lambda wait: pytest.fail("it waits for room"))
    assert end.wait(60)
    with pytest.raises(OutOfMemoryError):
        end.read()
    for number in (1, 2):
        assert end.wait(60)
        message = end.read()
        assert message is not None and isinstance(message[1], Arrival)
        assert (message[1].build(None) == number).all()
        del message
    end.close()
    lane.close()
