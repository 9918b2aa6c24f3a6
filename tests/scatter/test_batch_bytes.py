"""Tensors over received memory: each has a storage of its own, which keeps the memory alive."""

from __future__ import annotations

import gc
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed.programs import run

import tundish as td
from tundish import _native
from tundish.errors import InvalidInputError
from tundish.scatter import batch_bytes
from tundish.scatter.batch_bytes import IncomingBatch, bytes_of
from tundish.tree import DLPACK_EXCHANGE

DTYPES = sorted(
    {
        one
        for one in vars(torch).values()
        if isinstance(one, torch.dtype) and not str(one).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


class SharedMemory:
    """Memory of a sender and a receiver in one process."""

    def __init__(self) -> None:
        self.arena = _native.SegmentArena(1 << 24)
        self.receiver = _native.BufferReceiver()

    def send(self, batch: Any) -> IncomingBatch:
        tensors, schema = td.tree.flatten(batch)
        taken = self.arena.take(schema.layout.total)
        buffer = torch.frombuffer(taken, dtype=torch.uint8)
        for place, tensor in zip(schema.layout.tensors_in(buffer), tensors, strict=True):
            place.view(torch.uint8).copy_(tensor.view(torch.uint8)) if tensor.dim() else place.copy_(tensor)
        del buffer, place
        received = self.receiver.open(taken.reference())
        taken.release()
        return IncomingBatch(schema, bytes_of(received))


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory()


def many(count: int = 40) -> list[torch.Tensor]:
    return [torch.full((3, number % 5 + 1), float(number)) for number in range(count)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("has_exchange", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(
    dtype: torch.dtype, has_exchange: bool, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DLPACK_EXCHANGE is not None
    if not has_exchange:
        # As in torch before 2.10.
        monkeypatch.setattr(batch_bytes, "DLPACK_EXCHANGE", None)
    batch_bytes._places_and_builder.cache_clear()
    raw = torch.arange(1, 49, dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    batch = [raw[:48].clone().view(dtype).view(3, -1), raw[16:32].clone().view(dtype).view(-1, 1)]
    back = memory.send(batch).build(None)
    for one, other in zip(batch, back, strict=True):
        assert type(other) is torch.Tensor and other.dtype is dtype and other.device.type == "cpu"
        assert other.shape == one.shape and other.stride() == one.stride()
        assert torch.equal(other.view(torch.uint8), one.view(torch.uint8))
        assert not other._is_view() and not other.requires_grad and other._version == 0
        assert other.untyped_storage().nbytes() == one.nbytes and other.storage_offset() == 0


def test_tensors_without_values_or_dimensions(memory: SharedMemory) -> None:
    batch = [torch.ones(0, 3), torch.tensor(2.5), torch.ones(2), torch.ones(1, 0)]
    back = memory.send(batch).build(None)
    assert [(one.shape, one.tolist()) for one in back] == [(one.shape, one.tolist()) for one in batch]
    assert memory.send([torch.tensor(7)]).build(None)[0].item() == 7


def test_memory_is_kept_as_long_as_any_tensor_over_it(memory: SharedMemory) -> None:
    back = memory.send(many()).build(None)
    assert memory.receiver.views == 1
    last = back[17].view(-1)[2:]
    del back
    gc.collect()
    assert memory.receiver.views == 1 and last[0] == 17
    others = memory.send(many()).build(None)
    assert memory.receiver.views == 2
    del last
    assert memory.receiver.views == 1
    thread = threading.Thread(target=others.clear)
    thread.start()
    thread.join()
    assert memory.receiver.views == 0


def test_torch_may_free_the_last_tensor(memory: SharedMemory) -> None:
    """It does so without the GIL."""
    weight = torch.ones(3, 3, requires_grad=True)
    back = memory.send([torch.full((3, 3), float(number)) for number in range(5)]).build(None)
    loss = sum(((one @ weight) * one).sum() for one in back)
    del back
    gc.collect()
    assert memory.receiver.views == 1
    loss.backward()
    del loss
    assert weight.grad is not None and weight.grad[0, 0] == 90
    gc.collect()
    assert memory.receiver.views == 0


def test_each_tensor_has_a_storage_of_its_own(memory: SharedMemory) -> None:
    back = memory.send(many()).build(None)
    saved = io.BytesIO()
    torch.save(back[3], saved)
    assert len(saved.getvalue()) < 3000
    weight = torch.ones(3, 1, requires_grad=True)
    loss = (weight * back[0]).sum()
    # For autograd this is no change of the first tensor.
    back[1].add_(1)
    loss.backward()
    with pytest.raises(RuntimeError, match="resiz"):
        back[2].untyped_storage().resize_(1 << 20)
    back[5].set_(torch.ones(4).untyped_storage())
    assert memory.receiver.views == 1 and torch.equal(back[6], many()[6])


def test_memory_that_does_not_fit_is_refused() -> None:
    assert DLPACK_EXCHANGE is not None
    builder = DLPACK_EXCHANGE.builder([(2, 32, [4], 0), (0, 64, [2, 3], 64)])
    assert [one.shape for one in builder.build(np.zeros(112, np.uint8))] == [(4,), (2, 3)]
    fixed = np.zeros(112, np.uint8)
    fixed.flags.writeable = False
    for buffer in (np.zeros(111, np.uint8), np.zeros(0, np.uint8), fixed, np.zeros(224, np.uint8)[::2]):
        with pytest.raises(InvalidInputError, match="need a writable, contiguous buffer of 112 bytes"):
            builder.build(buffer)
    for place in ((2, 32, [1 << 40, 1 << 40], 0), (2, 32, [-1], 0), (2, 32, [4], 2**64 - 1), (2, 32, [0], 0)):
        with pytest.raises(InvalidInputError, match="tensor 1, of shape"):
            DLPACK_EXCHANGE.builder([(2, 32, [1], 0), place])
    # A capsule that is not torch's.
    with pytest.raises(RuntimeError, match="Unsupported"):
        DLPACK_EXCHANGE.builder([(2, 24, [1], 0)]).build(np.zeros(64, np.uint8))


def test_tensors_may_live_until_the_interpreter_ends() -> None:
    """In a module, and in a thread that still runs."""
    program = """
import threading, time, numpy, torch, tundish
from tundish.tree import DLPACK_EXCHANGE
builder = DLPACK_EXCHANGE.builder([(2, 32, [4], 64 * number) for number in range(8)])
kept = builder.build(numpy.zeros(512, numpy.uint8))
torch.kept = builder.build(numpy.zeros(512, numpy.uint8))
def hold(tensors):
    # Outside torch: a thread that is in torch when the interpreter ends aborts the process.
    while tensors:
        time.sleep(0.001)
threading.Thread(target=hold, args=(builder.build(numpy.zeros(512, numpy.uint8)),), daemon=True).start()
time.sleep(0.05)
"""
    ended = run(["-c", program])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
