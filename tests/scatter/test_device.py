"""Batches that go to a device."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.distributed.nccl_ranks import nccl_group
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.waiting import NOTICED

import tundish as td
from tundish.scatter.batch_bytes import IncomingBatch
from tundish.scatter.participants import participants_of
from tundish.scatter.steps import ScatterReceiver, ScatterSource
from tundish.scatter.transport import device as device_transport
from tundish.scatter.transport.device import DeviceChannel
from tundish.scatter.transport.gloo import OutgoingMessages


def make(number: int) -> Any:
    return {
        "pixels": torch.full((300, 400), float(number)),
        "ids": torch.full((3,), number),
        "half": torch.full((5,), number, dtype=torch.bfloat16),
        "array": np.full(4, number),
        "empty": torch.empty(0, 2),
        "n": number,
    }


def check(batch: Any, number: int, device: str) -> None:
    expected = make(number)
    for name in ("pixels", "ids", "half", "empty"):
        assert batch[name].device.type == device
        assert torch.equal(batch[name].cpu(), expected[name])
    assert isinstance(batch["array"], np.ndarray) and (batch["array"] == number).all()
    assert batch["n"] == number


def to_the_device(rank: int, line: Line) -> None:
    device = line.hear()
    for number in range(5):
        given = [make(number), make(number + 100)]
        if number == 3 and device != "meta":
            given = [{**one, "ids": one["ids"].to(device)} for one in given]
        mine = td.scatter_batch(given if rank == 0 else None, device=device)
        if device == "meta":
            assert mine["pixels"].device.type == "meta" and mine["pixels"].shape == (300, 400)
            assert (mine["array"] == number + 100 * rank).all()
        else:
            check(mine, number + 100 * rank, device)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_batch_goes_to_a_device_and_arrays_stay(device: str, tmp_path: Path) -> None:
    run_job(to_the_device, 2, tmp_path, device)


def nothing_but_empty_tensors(rank: int, line: Line) -> None:
    mine = td.scatter_batch([{"boxes": torch.empty(0, 4)}] * 2 if rank == 0 else None, device="meta")
    assert mine["boxes"].device.type == "meta" and mine["boxes"].shape == (0, 4)


def test_tensors_without_elements_go_to_a_device_too(tmp_path: Path) -> None:
    run_job(nothing_but_empty_tensors, 2, tmp_path)


def under_a_default_device(rank: int, line: Line) -> None:
    with torch.device("meta"):
        mine = td.scatter_batch(
            [{"empty": torch.empty(0, 2, device="cpu"), "x": torch.ones(3, device="cpu")}] * 2
            if rank == 0
            else None
        )
    assert {one.device.type for one in mine.values()} == {"cpu"}


def test_torch_s_default_device_is_ignored(tmp_path: Path) -> None:
    run_job(under_a_default_device, 2, tmp_path)


def own_batch_that_cannot_be_moved(rank: int, line: Line) -> None:
    given = [{"x": [lambda: 0]}, {"x": torch.ones(3)}]
    kind, text, _ = outcome(lambda: td.scatter_batch(given if rank == 0 else None, device="meta"))
    assert kind == ("NotPicklableError" if rank == 0 else "PeerFailedError"), (kind, text)
    assert 'rank 0\'s batch["x"][0] cannot be sent' in text
    assert td.scatter_batch([1, 2] if rank == 0 else None, device="meta") == 1 + rank


def test_a_batch_of_the_source_that_cannot_be_moved_is_refused_before_any_is_sent(tmp_path: Path) -> None:
    run_job(own_batch_that_cannot_be_moved, 2, tmp_path)


@pytest.mark.needs_gpu
def test_a_batch_goes_to_a_gpu(tmp_path: Path) -> None:
    run_job(to_the_device, 2, tmp_path, "cuda")


@pytest.mark.needs_gpu
def test_a_source_does_not_wait_for_the_device() -> None:
    # The first time sets up the device.
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            mine = td.scatter_batch([make(1)], device="cuda")
            with td.DispatchLoader([make(2)], device="cuda") as loader:
                (drawn,) = loader
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(mine, 1, "cuda")
        check(drawn, 2, "cuda")


@pytest.mark.needs_gpu(2)
def test_a_loader_is_read_on_the_device_of_its_caller() -> None:
    before = torch.cuda.current_device()
    torch.cuda.set_device(1)
    try:
        with td.DispatchLoader(torch.cuda.current_device() for _ in range(4)) as loader:
            assert list(loader) == [1] * 4
    finally:
        torch.cuda.set_device(before)


def open_between_devices(rank: int) -> Any:
    """A scatter from device to device between nodes of one rank. The CPU is the device, gloo the backend."""
    on_nodes(rank, 1)
    with td.distributed.Voter() as voter:
        kind = ScatterReceiver if rank else ScatterSource
        return kind(
            voter,
            participants_of(None, 0),
            timeout=timedelta(seconds=20),
            device_backend=("cpu", "gloo"),
        )


def one_call_fails(rank: int, line: Line) -> None:
    """One call fails in a step from device to device: at its beginning, or at its end if it is `post`."""
    failing = line.hear()
    scatter = open_between_devices(rank)

    post = OutgoingMessages.post

    def fail(*arguments: Any) -> None:
        if failing == "post":
            post(*arguments)
        raise RuntimeError("out of the device's memory")

    host = torch.device("cpu")

    def go_through(number: int, given: list[Any]) -> None:
        if rank == 0:
            scatter.send(given, host)
            return
        received = scatter.receive()
        assert isinstance(received, IncomingBatch)
        check(received.build(host), number, "cpu")

    with pytest.MonkeyPatch.context() as patch:
        for number in range(4):
            if number == 1 and rank == (failing == "receive"):
                patch.setattr(OutgoingMessages if failing == "post" else DeviceChannel, failing, fail)
            else:
                patch.undo()
            # All batches have one structure and size.
            given = [make(number), make(number)]
            kind, _, _ = outcome(lambda: go_through(number, given))  # noqa: B023
            line.say(kind)
            line.hear()


@pytest.mark.parametrize("failing", ["receive", "send", "post"])
def test_tensors_of_a_failed_step_are_not_taken_for_the_next_ones(failing: str, tmp_path: Path) -> None:
    with Job(one_call_fails, 2, tmp_path) as job:
        job.tell_all(failing)
        assert job.hear_all() == [("",), ("",)]
        fails = int(failing == "receive")
        job.tell_all()
        assert job.hear(fails) == ("RuntimeError",)
        job.tell(fails)
        begin = time.monotonic()
        for _ in range(2):
            assert job.hear(fails) == ("PeerFailedError",)
            job.tell(fails)
        assert time.monotonic() - begin < NOTICED


def from_device_to_device(rank: int, line: Line) -> None:
    """Batches from device to device, with the CPU as the device."""
    world = dist.get_world_size()
    scatter = open_between_devices(rank)
    host = torch.device("cpu")
    for number in range(6):
        # Steps in which a rank has no batch, one without bytes, and one with another structure.
        given: list[Any] = [make(number + 100 * other) for other in range(world)]
        if number in (0, 3):
            given[1] = None
        if number == 4:
            given = [{"n": other, "none": torch.empty(0, 3)} for other in range(world)]
        # In one step the tensors travel over gloo.
        device = None if number == 2 else host
        if rank == 0:
            scatter.send(given, device)
            continue
        received = scatter.receive()
        if given[rank] is None:
            assert received is None
            continue
        assert isinstance(received, IncomingBatch)
        assert (received.device_buffer is not None) == (number not in (2, 4)) or number == 4
        mine = received.build(host if number == 1 else None)
        if number == 4:
            assert mine["n"] == rank and mine["none"].shape == (0, 3)
        else:
            check(mine, number + 100 * rank, "cpu")
            mine["pixels"].zero_()
    # The receivers hear of an error on the source.
    kind, text, _ = outcome(
        lambda: scatter.send([1, threading.Lock(), 3], host) if rank == 0 else scatter.receive()
    )
    assert kind == ("NotPicklableError" if rank == 0 else "PeerFailedError") and "rank 1's batch" in text
    assert scatter.stats()["device_ranks"] == (2 if rank == 0 else 1)
    scatter.close()


def test_batches_go_from_device_to_device_between_nodes(tmp_path: Path) -> None:
    run_job(from_device_to_device, 3, tmp_path)


def to_another_device_than_the_current_one(rank: int, line: Line) -> None:
    """As above, with a receiver that names the second GPU in its call and nowhere else."""
    scatter = open_between_devices(rank)
    host, devices = torch.device("cpu"), []
    empty, zeros = torch.empty, torch.zeros

    def recorded(make: Any) -> Any:
        def on_host(*arguments: Any, device: Any = None, **options: Any) -> Any:
            if torch.device(device or "cpu").type == "cuda":
                devices.append(device)
            return make(*arguments, **options)

        return on_host

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            assert scatter._channels is not None and scatter._channels.device is not None
            patch.setattr(scatter._channels.device, "kind", "cuda")
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch, "empty", recorded(empty))
            patch.setattr(torch, "zeros", recorded(zeros))
        # The channel keeps its first device, because another would need a new communicator.
        for number, wanted in enumerate(["cuda:1", "cuda:1", None, "cuda:0"]):
            if rank == 0:
                scatter.send([None, make(number)], host)
                continue
            received = scatter.receive(None if wanted is None else torch.device(wanted))
            assert isinstance(received, IncomingBatch)
            check(received.build(None), number, "cpu")
    assert rank == 0 or (len(devices) > 4 and set(devices) == {torch.device("cuda", 1)}), devices
    scatter.close()


def test_a_batch_from_device_to_device_goes_to_the_device_of_the_call(tmp_path: Path) -> None:
    run_job(to_another_device_than_the_current_one, 2, tmp_path)


@pytest.mark.parametrize("wanted", [None, "cpu", "cuda"])
def test_a_call_without_a_device_uses_the_current_one(
    wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transport, "new_subgroup", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    channel = DeviceChannel("cuda", "nccl", (0, 1), timedelta(seconds=20))
    assert channel.device_for(None if wanted is None else torch.device(wanted)) == torch.device("cuda", 3)


def over_nccl(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    group = nccl_group(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    for number in range(5):
        given = [{**make(number + 100 * other), "more": torch.ones(3, device=device)} for other in range(2)]
        mine = td.scatter_batch(given if rank == 0 else None, group=group, device=device)
        check(mine, number + 100 * rank, "cuda")
    (stats,) = td.scatter.stats(group)
    assert stats["device_ranks"] == 1


@pytest.mark.needs_gpu
def test_batches_go_between_nodes_over_nccl(tmp_path: Path) -> None:
    run_job(over_nccl, 2, tmp_path)


def over_nccl_without_a_current_device(rank: int, line: Line) -> None:
    device = torch.device("cuda", rank)
    on_nodes(rank, 1)
    group = dist.new_group(backend="nccl")
    for number in range(3):
        given = [make(number + 100 * other) for other in range(2)] if rank == 0 else None
        mine = td.scatter_batch(given, group=group, device=device)
        check(mine, number + 100 * rank, "cuda")
        assert mine["pixels"].device == device
    assert torch.cuda.current_device() == 0
    assert rank == 0 or torch.cuda.memory_reserved(0) == 0
    # For another device the batch is copied there; the channel stays the same.
    mine = td.scatter_batch([make(7), make(8)] if rank == 0 else None, group=group, device="cuda:0")
    check(mine, 7 + rank, "cuda")
    assert mine["pixels"].device == torch.device("cuda", 0)


@pytest.mark.needs_gpu(2)
def test_a_batch_comes_over_nccl_to_the_device_that_the_call_names(tmp_path: Path) -> None:
    run_job(over_nccl_without_a_current_device, 2, tmp_path)
