"""Claims, and what is kept: what ends with whose step."""

from __future__ import annotations

from typing import Any

import pytest
from support.rtensor import peer_functions
from support.rtensor.peers import Peer
from support.rtensor.workers import entries, fetch_everywhere, workers_of
from support.waiting import until

from tundish import rtensor
from tundish.errors import ShardGoneError
from tundish.rtensor import Controller, Worker

pytestmark = pytest.mark.usefixtures("emptied")


def unclaimed(owner: Peer) -> int:
    entries: int = owner.call(peer_functions.stats)[0]["unclaimed_entries"]
    return entries


def test_a_claim_of_a_missing_shard_claims_nothing(owners: list[Peer], controller: Controller) -> None:
    there = owners[0].call(peer_functions.make, 2, 10)
    gone = owners[1].call(peer_functions.make, 1, 10)
    controller.clear_batches(gone)
    again = rtensor.loads(rtensor.dumps(gone))
    missing = f"rollout 1 at {owners[1].addr}.*{gone[0].shard_id}"
    with pytest.raises(ShardGoneError, match=missing), controller.step(claim=[there, again]):
        pass
    with controller.step(claim=there):
        pass
    assert entries(owners) == [(0, 0), (0, 0)]


def test_a_shard_has_one_claimant(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles[:1]), Controller([Worker(owners[0].addr)]) as other:
        with pytest.raises(ShardGoneError, match="another step"), other.step(claim=handles):
            pass
        assert entries(owners)[0] == (2, 0)


def test_a_controller_that_ends_gives_up_its_claims(owners: list[Peer], consumers: list[Peer]) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with Peer() as leader:
        leader.call(claim_and_stay, workers_of(owners, consumers), handles)
        assert owners[0].call(peer_functions.stats)[0]["unclaimed_entries"] == 0
        leader.kill()
        until(lambda: unclaimed(owners[0]) == 2, "the claims of a dead controller stay")
        # Each hears of it by a line of its own, and what is fetched while its step ends is gone with that.
        until(
            lambda: consumers[0].call(peer_functions.current_step) is None,
            "the step of a dead controller goes on",
        )
    assert consumers[0].call(peer_functions.sums, handles) == [0, 10]


def claim_and_stay(workers: list[Worker], handles: Any) -> None:
    controller = Controller(workers)
    step = controller.step(claim=handles)
    step.__enter__()
    peer_functions.held.append((controller, step))


def test_kept_shards_outlive_the_step(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    kept, drained = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=[kept, drained]):
        fetch_everywhere([kept, drained], consumers)
        copy = rtensor.loads(rtensor.dumps(kept))
        assert controller.keep(kept) == 4
    assert entries(owners)[0] == (1, 0) and entries(consumers) == [(0, 1)] * 3
    assert consumers[0].call(peer_functions.sums, copy) == [0]
    assert not caplog.records
    with controller.step(claim=copy):
        pass
    assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3


def test_shards_kept_between_two_steps_end_with_the_claiming_one(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        pass
    fetch_everywhere(handles, consumers)
    assert controller.keep(handles) == 6
    with controller.step(claim=handles[0]):
        pass
    assert entries([owners[0], *consumers]) == [(1, 0), *[(0, 1)] * 3]
    with controller.step(claim=handles[1]):
        pass
    assert entries([owners[0], *consumers]) == [(0, 0)] * 4


def test_shards_kept_by_an_earlier_controller_end_with_the_claiming_step(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    workers = workers_of(owners, consumers)
    with Controller(workers) as one, one.step():
        fetch_everywhere(handles, consumers)
        one.keep(handles)
    with Controller(workers) as next_one:
        with next_one.step():
            pass
        assert entries(consumers) == [(0, 2)] * 3
        with next_one.step(claim=handles):
            pass
        assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3


def test_kept_shards_end_with_the_step_of_any_controller_that_claims_them(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with Controller(controller.workers) as keeper:
        with controller.step(claim=handles):
            fetch_everywhere(handles, consumers)
            keeper.keep(handles)
        with controller.step(claim=handles[0]):
            pass
        assert entries(owners)[0] == (1, 0) and entries(consumers) == [(0, 1)] * 3
        with keeper.step(claim=handles[1]):
            pass
        assert entries([owners[0], *consumers]) == [(0, 0)] * 4


def test_shards_of_an_owner_that_is_no_worker_can_be_kept(owners: list[Peer], consumers: list[Peer]) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    # And that is this process itself.
    own = rtensor.remotize([peer_functions.torch.ones(3)])
    with Controller([Worker(consumers[0].addr)]) as controller:
        with controller.step(claim=[handles, own]):
            consumers[0].call(peer_functions.sums, handles)
            # The controller neither drains nor keeps what the owner fetches from others.
            owners[0].call(peer_functions.sums, rtensor.loads(rtensor.dumps(own)))
            assert controller.keep([handles[0], own]) == 3
        assert entries(owners[:1]) == [(1, 1)] and rtensor.storage_stats()["num_tensors"] == 1
        with Controller([Worker(owners[0].addr)]) as its_own, its_own.step():
            pass
        assert entries(owners[:1]) == [(1, 0)]
        assert consumers[0].call(peer_functions.sums, [handles[0], *own]) == [0, 3]
        with controller.step(claim=[handles[0], own]):
            pass
    assert entries([owners[0], consumers[0]]) == [(0, 0)] * 2 and rtensor.storage_stats()["num_tensors"] == 0


def test_controllers_of_one_process_take_turns(owners: list[Peer], consumers: list[Peer]) -> None:
    workers = workers_of(owners, consumers)
    with Controller(workers) as one, Controller(workers) as two:
        for controller in (one, two, two, one, two, one, one):
            handles = owners[0].call(peer_functions.make, 2, 10)
            with controller.step(claim=handles):
                fetch_everywhere(handles, consumers)
            assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3


def test_steps_are_numbered_on_by_the_next_controller(owners: list[Peer], consumers: list[Peer]) -> None:
    numbers = []
    for _ in range(2):
        with Controller(workers_of(owners, consumers)) as controller:
            for _ in range(2):
                with controller.step() as step:
                    numbers.append(step.number)
    assert numbers == sorted(set(numbers))


def test_an_owner_that_lost_the_connection_removes_the_claimed_shards(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles):
        controller._connections.keep_only(frozenset())
        until(lambda: unclaimed(owners[0]) == 2, "its claims stay")
        # A request opens the connection again.
        controller.stats()
    assert entries(owners)[0] == (0, 0)
