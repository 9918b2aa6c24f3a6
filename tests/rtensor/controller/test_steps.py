"""Drains: of all ranks and roles, at the end of a step, of what was claimed and what was fetched."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.rtensor import peer_functions
from support.rtensor.peers import Peer, PeerError
from support.rtensor.workers import entries, fetch_everywhere, workers_of

from tundish import rtensor
from tundish.errors import (
    DrainError,
    InvalidInputError,
    ShardGoneError,
)
from tundish.rtensor import Controller, Worker

pytestmark = pytest.mark.usefixtures("emptied")


def test_batches_are_cleared_from_every_rank_of_every_role(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    batch = {
        "one": owners[0].call(peer_functions.make, 3, 10),
        "two": owners[1].call(peer_functions.make, 2, 10),
    }
    other = owners[1].call(peer_functions.make, 2, 10)
    fetch_everywhere([batch, other], consumers)
    # Owners consume too, each what the other one has.
    fetch_everywhere(batch, owners)
    rtensor.localize(batch)
    batch["one"][0].to_local()
    drained = controller.clear_batches(batch, {"again": [batch["one"]]}, "no handle", None)
    assert (drained.entries, drained.shards, drained.failures) == (3 * 5 + 2 + 3, 5, {})
    assert drained.bytes >= 5 * 80
    assert drained.left == {controller.workers[2 + number]: 2 for number in range(3)}
    assert entries(owners) == [(0, 0), (2, 0)] and entries(consumers) == [(0, 2)] * 3
    assert rtensor.fetch_buffer_stats()["num_entries"] == 0
    assert batch["one"][0].data.is_meta, "it keeps no tensor"
    with pytest.raises(ShardGoneError, match="drained or removed"):
        rtensor.localize(batch["one"][0])
    for peer in consumers:
        with pytest.raises(PeerError, match="drained or removed") as raised:
            peer.call(peer_functions.sums, batch["one"])
        assert raised.value.kind == "ShardGoneError"


def test_long_lists_of_ids_go_in_parts(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tundish.rtensor.workers._MOST_IDS", 2)
    handles = owners[0].call(peer_functions.make, 5, 10)
    fetch_everywhere(handles, consumers)
    drained = controller.clear_batches(handles)
    assert (drained.entries, drained.shards, drained.failures, drained.left) == (15, 5, {}, {})
    handles = owners[1].call(peer_functions.make, 5, 10)
    with controller.step(claim=handles):
        assert owners[1].call(peer_functions.stats)[0]["unclaimed_entries"] == 0
    assert entries(owners) == [(0, 0), (0, 0)]


def test_ids_are_written_once_for_all_workers(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = owners[0].call(peer_functions.make, 50, 1)
    fetch_everywhere(handles, consumers)
    written: list[str] = []
    dumps = json.dumps

    def noted(obj: Any, **options: Any) -> str:
        written.append(dumps(obj, **options))
        return written[-1]

    def with_ids() -> int:
        return sum(handles[-1].shard_id in text for text in written)

    monkeypatch.setattr(json, "dumps", noted)
    with controller.step():
        controller.keep(handles)
    assert with_ids() == 1
    controller.clear_batches(handles)
    # For those who drop what they fetched, and for the owner.
    assert with_ids() == 3
    assert entries([owners[0], *consumers]) == [(0, 0)] * 4


def test_clear_batches_without_handles_clears_nothing(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    fetch_everywhere(owners[0].call(peer_functions.make, 2, 10), consumers)
    assert controller.clear_batches() == controller.clear_batches({}, [None, "text"]) == (0, 0, 0, {}, {})
    assert entries(consumers) == [(0, 2)] * 3 and entries(owners) == [(2, 0), (0, 0)]


def test_a_step_drains_its_claims_and_its_fetches(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tundish.rtensor")
    claimed = [owners[0].call(peer_functions.make, 3, 1000), owners[1].call(peer_functions.make, 3, 1000)]
    following = owners[0].call(peer_functions.make, 2, 1000)
    for way in (peer_functions.sums, peer_functions.sums_over_sockets):
        with controller.step(claim=claimed) as step:
            fetch_everywhere([claimed, following], consumers, way)
            claimed[0][0].to_local()
            assert entries(consumers) == [(0, 8)] * 3
            storage, _ = owners[0].call(peer_functions.stats)
            assert storage["unclaimed_entries"] == 2
        assert entries(owners) == [(2, 0), (0, 0)] and entries(consumers) == [(0, 0)] * 3
        assert tuple(controller.stats()) == controller.workers
        for stats in controller.stats().values():
            assert isinstance(stats, dict)
            (ledger,) = [one for one in stats["steps"] if one["step"] == step.number]
            assert (
                ledger["has_ended"]
                and ledger["held_bytes"] == ledger["viewed_bytes"] == ledger["escaped_bytes"] == 0
            )
            assert ledger["stored_bytes"] + ledger["fetched_bytes"] == ledger["freed_bytes"] > 0
        assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
        assert caplog.text.count("is drained") == 5
        caplog.clear()
        assert claimed[0][0].data.is_meta, "it keeps no tensor"
        with pytest.raises(ShardGoneError):
            rtensor.localize(claimed)
        claimed, following = [following], owners[0].call(peer_functions.make, 2, 1000)
        claimed.append(owners[1].call(peer_functions.make, 4, 10))


def test_the_callers_number_of_a_step_is_in_counts_errors_and_warnings_of_all_processes(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 1, 1000)
    with controller.step(claim=handles, number=120) as step:
        assert step.number == 120
        assert [peer.call(peer_functions.current_step) for peer in consumers] == [120] * 3
        consumers[0].call(peer_functions.hold, handles)
        with pytest.raises(InvalidInputError, match="in step 120:"), controller.step():
            pass
    assert f"{controller.workers[2]}: 8000 bytes of step 120 escaped" in caplog.text
    consumers[0].call(peer_functions.let_go)
    # A job that goes on from an earlier checkpoint has it again.
    with controller.step(number=120):
        assert consumers[0].call(peer_functions.current_step) == 120
    nobody = Controller([Worker("127.0.0.1:9")])
    with pytest.raises(DrainError, match="did not begin step 121: "), nobody.step(number=121):
        pass


def test_fetches_between_steps_are_drained_too(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    fetch_everywhere(handles, consumers)
    for _ in range(2):
        with controller.step():
            assert entries(consumers) == [(0, 2)] * 3
        assert entries(consumers) == [(0, 0)] * 3
        fetch_everywhere(handles, consumers)
    assert not caplog.records


def test_owners_are_drained_when_all_consumers_were(owners: list[Peer], controller: Controller) -> None:
    stored: list[int] = []

    def look(_: list[str]) -> None:
        stored.append(entries(owners)[0][0])

    controller.update([*controller.workers, Worker("inference", "server", 3, look)])
    with controller.step(claim=owners[0].call(peer_functions.make, 2, 10)):
        pass
    controller.clear_batches(owners[0].call(peer_functions.make, 3, 10))
    assert stored == [2, 3] and entries(owners)[0] == (0, 0)


def test_fetches_of_the_controllers_own_process_are_drained_too(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)

    def entries_after(fetching: Any) -> list[int]:
        rtensor.localize(fetching)
        found = [rtensor.fetch_buffer_stats()["num_entries"]]
        with controller.step():
            pass
        return [*found, rtensor.fetch_buffer_stats()["num_entries"]]

    with Controller(workers_of(owners, consumers)) as controller:
        # Before there is a step, between two, and after one that was none.
        assert entries_after(handles) == [2, 0]
        assert entries_after(handles) == [2, 0]
        workers = controller.workers
        with Peer() as dead:
            gone = Worker(dead.addr, "critic", 7)
        controller.update([*workers, gone])
        with pytest.raises(DrainError, match="did not begin"), controller.step():
            pass
        controller.update(workers)
        assert entries_after(handles) == [2, 0]
        with controller.step():
            rtensor.localize(handles)
        assert rtensor.fetch_buffer_stats()["num_entries"] == 0
        rtensor.localize(handles)
        assert controller.keep(handles[0]) == 1
        with controller.step():
            pass
        assert rtensor.fetch_buffer_stats()["num_entries"] == 1
        with controller.step(claim=handles):
            rtensor.localize(handles)
        assert rtensor.fetch_buffer_stats()["num_entries"] == 0


def test_fetches_while_a_step_is_drained_belong_to_the_next_one(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    with controller.step():
        pass
    following = owners[0].call(peer_functions.make, 2, 10)

    def fetch(_: list[str]) -> None:
        # The consumers that serve have ended the step already.
        fetch_everywhere(following, consumers)

    controller.update([*controller.workers, Worker("inference", "server", 3, fetch)])
    with controller.step():
        pass
    assert entries(consumers) == [(0, 2)] * 3
    controller.update(controller.workers[:-1])
    with controller.step():
        pass
    assert entries(consumers) == [(0, 0)] * 3


def test_fetches_of_other_threads_at_the_end_of_a_step_belong_to_the_next_one(
    owners: list[Peer],
) -> None:
    following = owners[0].call(peer_functions.make, 2, 10)
    logger = logging.getLogger("tundish.rtensor")

    class Fetch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # As another thread does, just then.
            if "is drained" in record.getMessage():
                rtensor.localize(following)

    handler = Fetch()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        with rtensor.step():
            pass
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert rtensor.fetch_buffer_stats()["num_entries"] == 2
    with rtensor.step():
        pass
    assert rtensor.fetch_buffer_stats()["num_entries"] == 0


def test_a_step_that_raises_is_drained(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with pytest.raises(PeerError, match="after it was fetched"), controller.step(claim=handles):
        consumers[0].call(peer_functions.sums_and_fail, handles)
    assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3
    with controller.step():
        pass


def test_batches_are_cleared_within_a_step_and_steps_are_not_nested(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    early, late = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=[early, late]):
        fetch_everywhere([early, late], consumers)
        assert controller.clear_batches(early).shards == 1
        assert entries(owners)[0] == (1, 0) and entries(consumers) == [(0, 1)] * 3
        with pytest.raises(InvalidInputError, match="is in step"), controller.step():
            pass
    assert entries(owners)[0] == (0, 0)
