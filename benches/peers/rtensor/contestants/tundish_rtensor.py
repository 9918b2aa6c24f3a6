"""`tundish.rtensor`: over sockets as between nodes, through shared memory, and from the fetch buffer."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import torch

from rtensor.tensors import make
from tundish import rtensor

_LIMIT = 4 << 30


class Owner:
    def __init__(self, cases: Iterable[str]) -> None:
        rtensor.serve(limit_bytes=_LIMIT, buffer_limit_bytes=_LIMIT)
        handles = {case: rtensor.remotize(make(case)) for case in cases}
        self.place = base64.b64encode(rtensor.dumps(handles)).decode()


class SocketConsumer:
    shared_memory = False

    def __init__(self, place: str) -> None:
        rtensor.serve(limit_bytes=_LIMIT, buffer_limit_bytes=_LIMIT)
        rtensor.set_backend(rtensor.HttpBackend(shared_memory=self.shared_memory))
        self._handles = rtensor.loads(base64.b64decode(place))
        self._put: Any = None

    def fetch(self, case: str) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = rtensor.localize(self._handles[case])
        return tensors

    def forget(self, case: str) -> None:
        rtensor.clear_fetch_buffer(rtensor.flatten_shard_ids(self._handles[case]))


class SharedMemoryConsumer(SocketConsumer):
    shared_memory = True


class BufferConsumer(SocketConsumer):
    """Fetches each case once, and then makes tensors of its fetch buffer."""

    def forget(self, case: str) -> None:
        """Keeps it in the buffer."""
