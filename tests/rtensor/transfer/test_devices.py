"""Remote tensors of what is on CUDA devices, and into it."""

from __future__ import annotations

import pytest
import torch
from support.rtensor.peers import Peer

import tundish as td
from tundish import rtensor

# Cycles: some hundred milliseconds, in which what is not waited for would be missed.
_SLOW = 500_000_000


def store_on_a_device() -> list[rtensor.RTensor]:
    made = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(_SLOW)
    made.fill_(3)
    values = torch.full((1000, 6), 1 + 2j, device="cuda")
    given = [made, values.conj(), values.conj().imag, made.view(1024, 1024).T[3:]]
    handles: list[rtensor.RTensor] = td.rtensor.remotize(given)
    made.fill_(-1)
    return handles


@pytest.mark.needs_gpu
@pytest.mark.parametrize("shared_memory", [True, False])
def test_values_come_from_a_device_and_go_to_one(shared_memory: bool) -> None:
    expected = [
        torch.full((1 << 20,), 3.0),
        torch.full((1000, 6), 1 - 2j),
        torch.full((1000, 6), -2.0),
        torch.full((1021, 1024), 3.0),
    ]
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=shared_memory))
    try:
        with Peer() as owner:
            handles = owner.call(store_on_a_device)
            for got, wanted in zip(rtensor.localize(handles), expected, strict=True):
                assert got.is_cpu and torch.equal(got, wanted)
            buffers = [torch.empty_like(wanted, device="cuda") for wanted in expected]
            torch.cuda._sleep(_SLOW)
            for buffer in buffers:
                buffer.fill_(7)
            rtensor.localize(handles, out=buffers)
            for buffer, wanted in zip(buffers, expected, strict=True):
                assert torch.equal(buffer.cpu(), wanted)
    finally:
        rtensor.set_backend(None)


@pytest.mark.needs_gpu
@pytest.mark.usefixtures("local")
def test_overlapping_buffers_on_a_device_are_refused() -> None:
    handles = rtensor.remotize([torch.ones(4), torch.ones(4)])
    buffer = torch.zeros(6, device="cuda")
    with pytest.raises(td.errors.InvalidInputError, match="share memory"):
        rtensor.localize(handles, out=[buffer[:4], buffer[2:]])
    rtensor.localize(handles, out=[buffer.new_empty(4), buffer[2:]])
    assert buffer.tolist() == [0, 0, 1, 1, 1, 1]
