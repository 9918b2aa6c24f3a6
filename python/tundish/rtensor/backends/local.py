"""`LocalBackend`: tensors within one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tundish._native import RTensor, ShardStore
from tundish.errors import InvalidInputError
from tundish.rtensor.backends.backend import Backend

__all__ = ["LocalBackend"]

_ADDRESS = "local"


class LocalBackend(Backend):
    """Tensors stay in this process, and no other process can fetch them. For jobs of one process, and for tests.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
        >>> td.rtensor.remotize(torch.ones(2)).node_addr
        'local'
        >>> td.rtensor.set_backend(None)
    """

    def __init__(self) -> None:
        ShardStore.add_own_address(_ADDRESS)

    def address(self) -> str:
        return _ADDRESS

    def fetch(self, handles: Sequence[RTensor], timeout: float) -> list[Tensor]:
        for handle in handles:
            if handle.node_addr != _ADDRESS:
                raise InvalidInputError(
                    f"{handle} is served over the network, and LocalBackend reads this process only: use HttpBackend"
                )
        return super().fetch(handles, timeout)
