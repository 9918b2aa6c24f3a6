"""Batches from device to device between nodes, if the group has NCCL or HCCL.

Invariants:
- Only the caller's thread uses the channel, as NCCL and HCCL require.
- The header of a batch travels over gloo first. The source does all work that may fail before.
- A rank keeps one device for the channel's life: another would need a new communicator, which is collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from tundish.distributed import new_subgroup, torch_distributed, unique_name
from tundish.scatter.batch_bytes import OutgoingBatch
from tundish.scatter.transport.gloo import GlooSender
from tundish.scatter.transport.message import Content, Text, Wait

# Backends between devices. Only the caller's thread may use their collectives.
_BACKENDS = ("nccl", "hccl", "xccl")


def device_backend(group: Any) -> tuple[str, str] | None:
    """The kind of device and the backend that a process group has for it; None where it has none."""
    distributed = torch_distributed()
    if distributed is None or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, distributed.ProcessGroup):
        return None
    for device in group._device_types:
        name = group._get_backend(device).name() if device.type != "cpu" else ""
        if name in _BACKENDS:
            return device.type, name
    return None


class DeviceChannel:
    """A process group of the source, the first of `members`, and ranks of other nodes. Collective over `members`.

    Attributes:
        kind: the type of the devices, "cuda" for example.
    """

    def __init__(self, kind: str, backend: str, members: tuple[int, ...], timeout: timedelta) -> None:
        self.kind = kind
        name = unique_name("scatter-direct", members)
        self._group = new_subgroup(torch_distributed(), members, name, timeout, backend)
        self._source = members[0]
        self._has_communicator = False
        self._device: torch.device | None = None
        # The device may still read the buffers that were sent last.
        self._last_sent: list[Tensor] = []

    def device_for(self, wanted: torch.device | None) -> torch.device:
        """This rank's device of the channel: the first that was `wanted` of its kind, else the current one."""
        if self._device is None:
            any_of_kind = torch.device(self.kind)
            device = wanted if wanted is not None and wanted.type == self.kind else any_of_kind
            if device == any_of_kind and self.kind != "cpu":
                device = torch.device(self.kind, torch.get_device_module(device).current_device())
            self._device = device
        return self._device

    def load(self, batch: OutgoingBatch, wanted: torch.device) -> Tensor:
        """The bytes of a batch on this rank's device, shape (size,), uint8."""
        device, layout = self.device_for(wanted), batch.schema.layout
        if batch.is_contiguous and self.kind != "cpu":
            # One transfer for all tensors, which goes on while the caller does.
            pinned = torch.empty(batch.size, dtype=torch.uint8, device="cpu", pin_memory=True)
            for place, tensor in zip(layout.tensors_in(pinned), batch.tensors, strict=True):
                place.copy_(tensor)
            return pinned.to(device, non_blocking=True)
        buffer = torch.empty(batch.size, dtype=torch.uint8, device=device)
        for place, tensor in zip(layout.tensors_in(buffer), batch.tensors, strict=True):
            place.copy_(tensor, non_blocking=tensor.is_pinned())
        return buffer

    def send(self, buffers: Mapping[int, Tensor], wanted: torch.device) -> None:
        """Send the buffers that `load` made, by rank."""
        self.connect(wanted)
        distributed = torch_distributed()
        self._exchange([(distributed.isend, buffer, rank) for rank, buffer in buffers.items()])
        self._last_sent = list(buffers.values())

    def receive(self, size: int, wanted: torch.device | None) -> Tensor:
        """The bytes that the source sends this rank, shape (size,), uint8."""
        self.connect(wanted)
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device_for(wanted))
        self._exchange([(torch_distributed().irecv, buffer, self._source)])
        return buffer

    def connect(self, wanted: torch.device | None) -> None:
        """Collective over the members, once: the first operation of a communicator has to be one of all ranks."""
        if not self._has_communicator:
            torch_distributed().all_reduce(torch.zeros(1, device=self.device_for(wanted)), group=self._group)
            self._has_communicator = True

    def _exchange(self, operations: list[tuple[Any, Tensor, int]]) -> None:
        distributed = torch_distributed()
        wanted = [
            distributed.P2POp(call, tensor, rank, self._group)
            for call, tensor, rank in operations
            if tensor.numel()
        ]
        if wanted:
            for work in distributed.batch_isend_irecv(wanted):
                work.wait()


class DeviceSender:
    """Sends headers and schemas over gloo, then the tensors from device to device: the `Sender` of one step.

    Args:
        channel: the channel between the devices.
        gloo: sends to the same ranks.
        device: where the tensors are, or go first.
    """

    name: Final = "device"

    def __init__(self, channel: DeviceChannel, gloo: GlooSender, device: torch.device) -> None:
        self.sent_bytes = 0
        self._channel = channel
        self._gloo = gloo
        self._device = device
        self._loaded: dict[int, Tensor] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return self._gloo.ranks

    def send(self, step: int, contents: Mapping[int, Content], waiting: set[int], wait: Wait) -> None:
        # Before anything is sent, because it may fail.
        self._loaded = {
            rank: self._channel.load(content, self._device)
            for rank in self.ranks
            if isinstance(content := contents[rank], OutgoingBatch)
        }
        self._gloo.send(step, contents, waiting, wait, is_on_device=True)

    def finish(self, wait: Wait) -> None:
        self._gloo.finish(wait)
        self._channel.send(self._loaded, self._device)

    def tell(
        self, steps: Mapping[int, int], message: Text, wait: Wait, seconds: float
    ) -> dict[int, Exception]:
        return self._gloo.tell(steps, message, wait, seconds)
