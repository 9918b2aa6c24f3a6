"""Tests of `RayBackend`, which run in a process of their own: Ray leaves threads and descriptors behind."""

from __future__ import annotations

import functools
import math
import os
import time
from typing import Any

import pytest
import torch

# Read when ray is first imported: nothing of the cluster is to be written to the user's home, or told to anybody.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

from tundish import rtensor
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    ShardGoneError,
    ShardMismatchError,
    TensorStoreFullError,
    TimedOutError,
    TransferError,
)
from tundish.rtensor import Controller, Worker, backends
from tundish.rtensor.tensor_store import default_store


def begin(folder: str) -> None:
    """Starts a cluster, in this process and its children."""
    import ray

    with pytest.raises(InvalidInputError, match=r"call ray\.init"):
        rtensor.RayBackend()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        # A tensor without room is an error, and is not written to disk.
        _system_config={"automatic_object_spilling_enabled": False},
        _temp_dir=folder,
    )


def begin_test() -> None:
    rtensor.set_backend(rtensor.RayBackend())


def end_test() -> None:
    rtensor.clear_node()
    rtensor.set_backend(None)


def end() -> None:
    import ray

    ray.shutdown()


@functools.cache
def consumers() -> list[Any]:
    """Two actors, for all tests: each is a process that imports torch."""
    import ray

    @ray.remote(num_cpus=0)
    class Consumer:
        def __init__(self) -> None:
            self.addr = rtensor.serve().addr
            rtensor.set_backend(rtensor.RayBackend())

        def address(self) -> str:
            return self.addr

        def sums(self, batch: Any) -> list[float]:
            tensors = rtensor.localize(batch)
            found = [float(tensor.sum()) for tensor in tensors]
            for tensor in tensors:
                tensor.fill_(0)
            return found

        def store(self, name: str, value: int) -> Any:
            return rtensor.store(name, torch.full((3,), float(value)))

    return [Consumer.remote(), Consumer.remote()]


def a_batch_goes_through_rays_store() -> None:
    import ray

    batch = {"ids": torch.arange(6).view(2, 3), "scores": torch.rand(40, 5).bfloat16(), "n": 1}
    handles = rtensor.remotize(batch)
    assert isinstance(handles["ids"].ref, ray.ObjectRef) and handles["n"] == 1
    back = rtensor.localize(handles)
    assert torch.equal(back["ids"], batch["ids"]) and torch.equal(back["scores"], batch["scores"])
    back["ids"].fill_(-1)
    assert torch.equal(rtensor.localize(handles)["ids"], batch["ids"])
    assert torch.equal(rtensor.localize(handles["scores"][3:7]), batch["scores"][3:7])
    room = torch.empty(1, 3, dtype=torch.int64)
    assert torch.equal(rtensor.localize(handles["ids"][1:], out=room), batch["ids"][1:])
    parts = [handles["scores"], handles["scores"][3:7], handles["scores"][:2], handles["scores"][5:]]
    expected = [batch["scores"], batch["scores"][3:7], batch["scores"][:2], batch["scores"][5:]]
    buffers = [torch.empty(part.shape, dtype=part.dtype) for part in parts]
    for found in (rtensor.localize(parts, out=buffers), rtensor.localize(parts)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    stats = rtensor.storage_stats()
    assert stats["num_tensors"] == 2 and stats["total_bytes"] >= 48 + 400
    named = rtensor.store("name", torch.ones(3))
    assert named.shard_id == "name" and rtensor.fetch("name").tolist() == [1, 1, 1]
    with pytest.raises(InvalidTypeError, match="only Ray itself can carry"):
        rtensor.dumps(handles)
    for declared in (torch.empty(6, dtype=torch.int64), torch.empty(2, 3, dtype=torch.float64)):
        wrong = rtensor.RTensor(handles["ids"].shard, declared.to("meta"))
        with pytest.raises(ShardMismatchError, match=str(declared.dtype)):
            rtensor.localize(wrong)


def names_of_several_owners_are_kept_apart() -> None:
    import ray

    actors = consumers()
    handles = [ray.get(actor.store.remote("weights", place)) for place, actor in enumerate(actors)]
    buffers = [torch.zeros(3), torch.zeros(3)]
    for found in (rtensor.localize(handles, out=buffers), rtensor.localize(handles)):
        assert [tensor.tolist() for tensor in found] == [[0, 0, 0], [1, 1, 1]]
    assert [handle.to_local().tolist() for handle in handles] == [[0, 0, 0], [1, 1, 1]]


def actors_consume_and_are_drained() -> None:
    import ray

    actors = consumers()
    workers = [
        Worker(ray.get(actor.address.remote()), role)
        for actor, role in zip(actors, ("actor", "ref"), strict=True)
    ]
    handles = rtensor.remotize([torch.ones(100_000), torch.ones(10)])
    kept = handles[1].with_ref(handles[1].ref)
    workers.append(Worker(rtensor.serve().addr, "rollout"))
    with Controller(workers) as controller, controller.step(claim=handles):
        for _ in range(2):
            sums = ray.get([actor.sums.remote(handles) for actor in actors])
            assert sums == [[100_000.0, 10.0]] * 2
    assert rtensor.storage_stats()["num_tensors"] == 0
    assert handles[0].ref is None
    with pytest.raises(ShardGoneError, match="drained or removed"):
        rtensor.localize(handles)
    # A handle that somebody keeps is a reference that Ray counts.
    assert rtensor.localize(kept).sum() == 10


def drained_objects_leave_rays_store() -> None:
    # Twice what the store has room for, in all: with what was drained still in it, this fails.
    with Controller([Worker(rtensor.serve().addr, "all")]) as controller:
        for number in range(10):
            handle = rtensor.remotize(torch.full((3 << 20,), number, dtype=torch.int64))
            with controller.step(claim=handle):
                assert int(rtensor.localize(handle)[-1]) == number
            assert rtensor.storage_stats()["total_bytes"] == 0


def an_interrupted_store_takes_no_memory() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtensor.RayBackend, "_put_in_ray", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rtensor.remotize(torch.ones(10))
    assert rtensor.storage_stats()["memory"]["used_bytes"] == 0


def batches_are_cleared_by_name() -> None:
    handles = rtensor.remotize([torch.ones(10), torch.ones(20)])
    rtensor.localize(handles)
    with Controller([Worker(rtensor.serve().addr, "all")]) as controller:
        drained = controller.clear_batches(handles[:1])
    assert drained.shards == 1 and drained.failures == {}
    stats = rtensor.storage_stats()
    assert stats["num_tensors"] == 1
    assert rtensor.remove(handles[1].shard_id) == 1
    assert rtensor.storage_stats()["total_bytes"] == 0


def the_limit_holds_for_rays_store() -> None:
    rtensor.set_backend(None)
    rtensor.serve().close()
    rtensor.serve(limit_bytes=1 << 20)
    rtensor.set_backend(rtensor.RayBackend())
    try:
        first = rtensor.remotize(torch.zeros(3 << 18, dtype=torch.uint8))
        stats = rtensor.storage_stats()
        assert stats["total_bytes"] >= 3 << 18 and stats["memory"]["used_bytes"] >= 3 << 18
        for count in (1 << 19, 1 << 21):
            with pytest.raises(TensorStoreFullError, match=f"{count} bytes do not fit"):
                rtensor.remotize(torch.zeros(count, dtype=torch.uint8), timeout=0.1)
        rtensor.remove(first.shard_id)
        # Removed shards have made room, and failed ones take none.
        rtensor.store("name", torch.zeros(1 << 19, dtype=torch.uint8))
    finally:
        rtensor.clear_node()
        rtensor.serve(limit_bytes=1 << 20).close()
        rtensor.serve()


def an_infinite_timeout_is_accepted() -> None:
    for seconds in (math.inf, 1e300):
        handles = rtensor.remotize([torch.arange(3)], timeout=seconds)
        assert rtensor.localize(handles, timeout=seconds)[0].tolist() == [0, 1, 2]
        out = torch.zeros(3, dtype=torch.int64)
        assert rtensor.localize(handles[0], out=out, timeout=seconds).tolist() == [0, 1, 2]


def each_store_looks_at_its_own_shards_alone() -> None:
    others = rtensor.remotize([torch.full((1,), number) for number in range(40)])
    store, asked = default_store.shards, []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def absent(self, ids: list[str]) -> list[str]:
            asked.append(len(ids))
            return store.absent(ids)

    with pytest.MonkeyPatch.context() as patch:
        # The thread that looks through all of them rests.
        patch.setattr(backends, "_RELEASE_SECONDS", 60.0)
        time.sleep(0.3)
        patch.setattr(default_store, "shards", Counting())
        for number in range(20):
            handle = rtensor.store(f"of.{number}", torch.ones(1))
            assert rtensor.fetch(handle.shard_id).item() == 1
            assert rtensor.remove(handle.shard_id) == 1
    assert sum(asked) == 40
    assert rtensor.storage_stats()["num_tensors"] == len(others)


def names_that_are_reused_after_a_drain_take_no_more_memory() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The thread that lets go of what was drained rests.
        patch.setattr(backends, "_RELEASE_SECONDS", 60.0)
        time.sleep(0.3)
        for _ in range(3):
            rtensor.store("anew", torch.ones(1000))
            # As a drain that comes from elsewhere does.
            default_store.shards.remove(["anew"])
        rtensor.store("anew", torch.ones(1000))
    assert rtensor.storage_stats()["memory"]["used_bytes"] < 2 * 4000
    rtensor.remove(["anew"])


def a_process_that_left_the_cluster_starts_no_other_one() -> None:
    """The last of these: it leaves the cluster."""
    import ray

    stored = rtensor.remotize([torch.ones(3), torch.ones(4)])
    with rtensor.step():
        rtensor.localize(stored)
    ray.shutdown()
    room = torch.empty(3)
    calls = (
        lambda: rtensor.remotize(torch.ones(3)),
        lambda: rtensor.store("name", torch.ones(3)),
        lambda: rtensor.localize(stored),
        lambda: rtensor.localize(stored[0], out=room),
    )
    for call in calls:
        with pytest.raises(InvalidInputError, match=r"no longer connected.*ray\.shutdown\(\) was called; "):
            call()
        assert not ray.is_initialized()
    # Stored tensors are released.
    assert rtensor.storage_stats()["num_tensors"] == 2
    rtensor.remove([one.shard_id for one in stored])
    assert rtensor.storage_stats()["total_bytes"] == 0


def failures_of_ray_have_the_names_of_the_guide() -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Owner:
        def put(self) -> list[Any]:
            return [ray.put(("torch.uint8", (3,), torch.zeros(3, dtype=torch.uint8).numpy()))]

    def handle_of(reference: Any) -> rtensor.RTensor:
        info = rtensor.TensorShardInfo(f"x{len(made)}", "127.0.0.1:1", reference)
        made.append(rtensor.RTensor(info, torch.empty(3, dtype=torch.uint8, device="meta")))
        return made[-1]

    made: list[rtensor.RTensor] = []
    for reference, kind in (
        (3, InvalidTypeError),
        (ray.put(7), ShardMismatchError),
        (ray.put((1, 2)), ShardMismatchError),
    ):
        with pytest.raises(kind, match="the ref of shard x"):
            rtensor.localize(handle_of(reference))
    never = ray.remote(num_cpus=1000)(lambda: None).remote()
    with pytest.raises(TimedOutError, match="did not arrive within"):
        rtensor.localize(handle_of(never), timeout=0.1)
    owner = Owner.remote()
    (reference,) = ray.get(owner.put.remote())
    assert rtensor.localize(handle_of(reference)).tolist() == [0, 0, 0]
    ray.kill(owner)
    deadline = time.monotonic() + 60
    while True:
        # Ray learns after a while that it is dead.
        # time: what comes at all comes within this time
        assert time.monotonic() < deadline
        try:
            rtensor.localize(handle_of(reference), timeout=30)
        except TransferError:
            break


TASKS = (
    a_batch_goes_through_rays_store,
    names_of_several_owners_are_kept_apart,
    actors_consume_and_are_drained,
    drained_objects_leave_rays_store,
    batches_are_cleared_by_name,
    the_limit_holds_for_rays_store,
    an_interrupted_store_takes_no_memory,
    failures_of_ray_have_the_names_of_the_guide,
    an_infinite_timeout_is_accepted,
    each_store_looks_at_its_own_shards_alone,
    names_that_are_reused_after_a_drain_take_no_more_memory,
    a_process_that_left_the_cluster_starts_no_other_one,
)
