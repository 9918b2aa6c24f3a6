"""How parts of tensors travel between ranks: between devices over the caller's group, or through host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.hf.gather.exchange_group import ExchangeGroup
from tundish.distributed import torch_distributed

__all__ = ["TAGS", "TensorTransport", "device_transport", "host_transport", "joins_devices"]

# Message tags of one save; tags have 31 bits.
TAGS = 1 << 20
_SAVES = 1 << 11
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TensorTransport:
    """How parts travel.

    Attributes:
        exchange_group: for parts that travel through host memory. None: they travel over `callers_group`, on the
            caller's thread.
        generation: of the exchange group.
        callers_group: the process group of the user.
        device: parts are sent from here and received here.
        tag: the first message tag; no two saves at a time have the same.
    """

    exchange_group: ExchangeGroup | None = None
    generation: int = 0
    callers_group: Any = None
    device: torch.device = _HOST
    tag: int = 0

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` if it was closed."""
        if self.exchange_group is None:
            return self.callers_group
        return self.exchange_group.of_generation(self.generation)

    def close(self) -> None:
        """Close the exchange group in the middle of an exchange, so that the other ranks fail at once."""
        if self.exchange_group is not None:
            self.exchange_group.close(self.generation)


def device_transport(group: Any, device: torch.device) -> TensorTransport:
    """Collective over `group`, which joins devices, on the caller's thread: between devices."""
    # NCCL connects at the first call, which all ranks of the group have to make.
    torch_distributed().all_reduce(torch.zeros(1, device=device), group=group)
    return TensorTransport(callers_group=group, device=device)


def host_transport(exchange_group: ExchangeGroup, number: int) -> TensorTransport:
    """Through host memory. `number`: of the save, different from one that still travels."""
    return TensorTransport(
        exchange_group=exchange_group, generation=exchange_group.generation, tag=number % _SAVES * TAGS
    )


def joins_devices(group: Any, device: torch.device) -> bool:
    """Whether `group` sends between CUDA devices; not collective."""
    if device.type != "cuda":
        return False
    distributed = torch_distributed()
    try:
        name = (group or distributed.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        return False  # the group knows no such device
    return bool(name == "nccl")
