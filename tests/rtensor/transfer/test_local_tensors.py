"""Tensors that handles keep: until their shard is drained, by whatever way, and no longer."""

from __future__ import annotations

import gc
import http.client
import json
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

import tundish as td
from tundish._native import ShardStore
from tundish.errors import ShardGoneError
from tundish.rtensor import Controller, RTensor, Worker


def in_step(handle: RTensor) -> None:
    with td.rtensor.step(claim=handle):
        pass


def in_step_of_controller(handle: RTensor) -> None:
    with (
        Controller([Worker(handle.node_addr)]) as controller,
        controller.step(claim=td.rtensor.loads(td.rtensor.dumps(handle))),
    ):
        pass


def request(method: str, path: str, content: Any) -> None:
    """What a controller elsewhere says to this process."""
    connection = http.client.HTTPConnection(td.rtensor.serve().addr, timeout=60)
    connection.request(method, path, json.dumps(content))
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    "drain",
    [
        in_step,
        in_step_of_controller,
        lambda handle: td.rtensor.remove(handle.shard_id),
        lambda _: td.rtensor.clear_node(),
        lambda handle: request("DELETE", "/data/clear", {"shard_ids": [handle.shard_id]}),
    ],
    ids=["step", "controller", "remove", "clear_node", "request"],
)
def test_a_handle_forgets_its_tensor_with_the_stored_shard(drain: Callable[[RTensor], Any]) -> None:
    td.rtensor.serve()
    handle = td.rtensor.remotize(torch.arange(3.0))
    other = td.rtensor.loads(td.rtensor.dumps(handle))
    seen = [weakref.ref(one.to_local()) for one in (handle, other)]
    assert handle.to_local() is seen[0]() and handle.data.tolist() == [0, 1, 2]
    drain(handle)
    for one in (handle, other):
        assert one.data.is_meta
        with pytest.raises(ShardGoneError):
            one.to_local()
    wait_for(seen)


def wait_for(tensors: list[weakref.ref[Any]]) -> None:
    """Until they are gone: a thread lets go of what a request drains."""
    deadline = time.monotonic() + 60
    while any(one() is not None for one in tensors):
        assert time.monotonic() < deadline, "a drained handle keeps its tensor"
        gc.collect()
        time.sleep(0.001)


def test_a_handle_forgets_a_fetched_tensor_with_its_step() -> None:
    td.rtensor.serve()
    with Peer() as owner:
        forgotten_with_its_step(owner)


def forgotten_with_its_step(owner: Peer) -> None:
    handle = owner.call(peer_functions.make, 1, 3)[0]
    ways: list[Callable[[], Any]] = [
        lambda: in_step([]),  # type: ignore[arg-type]
        td.rtensor.clear_fetch_buffer,
        lambda: request("DELETE", "/buffer/clear", {"shard_ids": [handle.shard_id]}),
        lambda: ShardStore.end_epoch(1 << 20),
        lambda: ShardStore.give_up(5),
    ]
    for number, drain in enumerate(ways):
        if number > 2:
            td.rtensor.clear_fetch_buffer()
            ShardStore.begin_epoch((1 << 20) + number - 3, 5)
        seen = [weakref.ref(handle.to_local()), weakref.ref(handle[1:].to_local())]
        drain()
        # What nobody looks at is let go of, too.
        wait_for(seen)
        assert handle.data.is_meta
        # The shard is there still, so it is fetched again.
        assert handle.to_local().tolist() == [0, 0, 0]
    owner.call(peer_functions.remove, [handle.shard_id])
    td.rtensor.clear_fetch_buffer()
    with pytest.raises(ShardGoneError):
        handle.to_local()


@pytest.mark.parametrize("count", [1, 1500])
def test_tensors_held_by_handles_only_do_not_escape(count: int, caplog: pytest.LogCaptureFixture) -> None:
    td.rtensor.serve()
    handles = td.rtensor.remotize([torch.ones(3) for _ in range(count)])
    with td.rtensor.step(claim=handles):
        for handle in handles:
            handle.to_local()
    assert "escaped" not in caplog.text


def test_a_handle_keeps_the_tensor_that_it_was_made_with() -> None:
    info = td.rtensor.TensorShardInfo("given", "127.0.0.1:1")
    handle = td.rtensor.RTensor(info, torch.ones(3))
    td.rtensor.clear_node()
    assert handle.to_local().tolist() == [1, 1, 1]


@pytest.mark.parametrize("count", [10, 1 << 20])
def test_a_handle_goes_with_the_tensor_that_it_alone_keeps(count: int) -> None:
    """torch gives up the GIL while it frees the tensor, and what it calls then is in the middle of a call from here."""
    handle = td.rtensor.remotize(torch.ones(count))
    tensor = weakref.ref(handle.to_local())
    del handle
    gc.collect()
    assert tensor() is None


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (100_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_fetched_in_inference_mode_can_be_trained_with(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A handle keeps its tensor for all who ask: for who only looks at it, and then for who learns from it."""
    handle = td.rtensor.remotize(torch.ones(shape, dtype=dtype))
    with torch.inference_mode():
        assert handle.to_local().sum().is_inference()
    weight = torch.ones(shape, dtype=dtype, requires_grad=True)
    (handle.to_local() * weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, handle.to_local())
