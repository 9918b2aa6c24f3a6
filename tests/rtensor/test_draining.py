"""Drains: of all ranks and roles, at the end of a step, of what was claimed and what was fetched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import told
from peers import Peer, PeerError

from tundish import rtensor
from tundish._native import ShardStore
from tundish.errors import (
    DrainError,
    InvalidInputError,
    InvalidTypeError,
    NotAuthorizedError,
    ShardGoneError,
)
from tundish.rtensor import Controller, Worker

ROLES = ("actor", "critic", "ref")


@pytest.fixture(scope="module")
def owners() -> Iterator[list[Peer]]:
    with Peer() as one, Peer() as two:
        yield [one, two]


@pytest.fixture(scope="module")
def consumers() -> Iterator[list[Peer]]:
    with Peer() as one, Peer() as two, Peer() as three:
        yield [one, two, three]


@pytest.fixture(autouse=True)
def empty(owners: list[Peer], consumers: list[Peer]) -> Iterator[None]:
    yield
    for peer in (*owners, *consumers):
        peer.call(told.clear)
    told.clear()


@pytest.fixture
def controller(owners: list[Peer], consumers: list[Peer]) -> Iterator[Controller]:
    with Controller(workers_of(owners, consumers), timeout=10) as made:
        yield made


def workers_of(owners: list[Peer], consumers: list[Peer]) -> list[Worker]:
    return [
        *(Worker(peer.addr, "rollout", rank) for rank, peer in enumerate(owners)),
        *(
            Worker(peer.addr, role, rank)
            for rank, (peer, role) in enumerate(zip(consumers, ROLES, strict=False))
        ),
    ]


def entries(peers: list[Peer]) -> list[tuple[int, int]]:
    """Of each, what it stores and what it has fetched."""
    found = [peer.call(told.stats) for peer in peers]
    return [(storage["num_tensors"], buffer["num_entries"]) for storage, buffer in found]


def fetch_everywhere(handles: Any, consumers: list[Peer], way: Any = told.sums) -> None:
    for peer in consumers:
        peer.begin(way, handles)
    for peer in consumers:
        peer.result()


def test_batches_are_cleared_from_every_rank_of_every_role(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    batch = {"one": owners[0].call(told.make, 3, 10), "two": owners[1].call(told.make, 2, 10)}
    other = owners[1].call(told.make, 2, 10)
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
            peer.call(told.sums, batch["one"])
        assert raised.value.kind == "ShardGoneError"


def test_long_lists_of_ids_go_in_parts(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tundish.rtensor.lines._MOST_IDS", 2)
    handles = owners[0].call(told.make, 5, 10)
    fetch_everywhere(handles, consumers)
    drained = controller.clear_batches(handles)
    assert (drained.entries, drained.shards, drained.failures, drained.left) == (15, 5, {}, {})
    handles = owners[1].call(told.make, 5, 10)
    with controller.step(claim=handles):
        assert owners[1].call(told.stats)[0]["unclaimed_entries"] == 0
    assert entries(owners) == [(0, 0), (0, 0)]


def test_without_handles_nothing_is_cleared(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    fetch_everywhere(owners[0].call(told.make, 2, 10), consumers)
    assert controller.clear_batches() == controller.clear_batches({}, [None, "text"]) == (0, 0, 0, {}, {})
    assert entries(consumers) == [(0, 2)] * 3 and entries(owners) == [(2, 0), (0, 0)]


def test_a_step_drains_what_was_claimed_and_what_was_fetched(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tundish.rtensor")
    claimed = [owners[0].call(told.make, 3, 1000), owners[1].call(told.make, 3, 1000)]
    following = owners[0].call(told.make, 2, 1000)
    for way in (told.sums, told.sums_over_sockets):
        with controller.step(claim=claimed) as step:
            fetch_everywhere([claimed, following], consumers, way)
            claimed[0][0].to_local()
            assert entries(consumers) == [(0, 8)] * 3
            storage, _ = owners[0].call(told.stats)
            assert storage["unclaimed_entries"] == 2
        assert entries(owners) == [(2, 0), (0, 0)] and entries(consumers) == [(0, 0)] * 3
        assert tuple(controller.stats()) == controller.workers
        for stats in controller.stats().values():
            assert isinstance(stats, dict)
            (ledger,) = [one for one in stats["epochs"] if one["epoch"] == step.number]
            assert ledger["has_ended"] and ledger["held_bytes"] == ledger["viewed_bytes"] == 0
            assert ledger["stored_bytes"] + ledger["fetched_bytes"] == ledger["freed_bytes"] > 0
        assert not [record for record in caplog.records if record.levelno > logging.DEBUG]
        assert caplog.text.count("is drained") == 5
        caplog.clear()
        assert claimed[0][0].data.is_meta, "it keeps no tensor"
        with pytest.raises(ShardGoneError):
            rtensor.localize(claimed)
        claimed, following = [following], owners[0].call(told.make, 2, 1000)
        claimed.append(owners[1].call(told.make, 4, 10))


def test_steps_are_numbered_on_by_the_next_controller(owners: list[Peer], consumers: list[Peer]) -> None:
    numbers = []
    for _ in range(2):
        with Controller(workers_of(owners, consumers)) as controller:
            for _ in range(2):
                with controller.step() as step:
                    numbers.append(step.number)
    assert numbers == sorted(set(numbers))


def test_what_is_fetched_between_steps_is_drained_too(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(told.make, 2, 10)
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
    with controller.step(claim=owners[0].call(told.make, 2, 10)):
        pass
    controller.clear_batches(owners[0].call(told.make, 3, 10))
    assert stored == [2, 3] and entries(owners)[0] == (0, 0)


def test_controllers_of_one_process_take_turns(owners: list[Peer], consumers: list[Peer]) -> None:
    workers = workers_of(owners, consumers)
    with Controller(workers) as one, Controller(workers) as two:
        for controller in (one, two, two, one, two, one, one):
            handles = owners[0].call(told.make, 2, 10)
            with controller.step(claim=handles):
                fetch_everywhere(handles, consumers)
            assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3


def test_what_the_controllers_own_process_fetches_is_drained_too(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    handles = owners[0].call(told.make, 2, 10)

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
    # And when there is no controller any more.
    handles = owners[0].call(told.make, 2, 10)
    with Controller(workers_of(owners, consumers)) as controller:
        with controller.step():
            pass
        rtensor.localize(handles)
    assert rtensor.fetch_buffer_stats()["num_entries"] == 0


def test_what_is_fetched_while_a_step_is_drained_belongs_to_the_next_one(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    with controller.step():
        pass
    following = owners[0].call(told.make, 2, 10)

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


def test_what_other_threads_fetch_at_the_end_of_a_step_of_one_process_belongs_to_the_next_one(
    owners: list[Peer],
) -> None:
    following = owners[0].call(told.make, 2, 10)
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


def test_what_is_left_is_warned_of(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(told.make, 2, 10)
    with controller.step():
        pass
    with controller.step():
        consumers[1].call(told.sums_in_step_of_its_own, handles, 123_456)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = record.getMessage()
    assert "rank 1 (critic)" in text and consumers[1].addr in text and "2 entries" in text and "bytes" in text
    assert "the oldest of step 123456" in text
    consumers[1].call(told.end, 123_456)


def test_what_is_left_after_a_step_of_one_process_is_warned_of(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    said = consumers[0].call(step_that_leaves, owners[0].call(told.make, 2, 10))
    assert len(said) == 1 and "2 entries" in said[0] and "the oldest of step 123456" in said[0]
    consumers[0].call(told.end, 123_456)


def step_that_leaves(handles: Any) -> list[str]:
    """What is warned of."""
    said: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    note = Note(logging.WARNING)
    logging.getLogger("tundish.rtensor").addHandler(note)
    try:
        with rtensor.step():
            told.sums_in_step_of_its_own(handles, 123_456)
    finally:
        logging.getLogger("tundish.rtensor").removeHandler(note)
    return said


def test_tensors_that_outlive_the_step_are_warned_of(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(told.make, 1, 1000)
    with controller.step(claim=handles):
        consumers[2].call(told.hold, handles)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        "8000 bytes of step" in record.getMessage() and f"ref 2 at {consumers[2].addr}" in record.getMessage()
    )
    consumers[2].call(told.let_go)


def test_a_step_that_raises_is_drained(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(told.make, 2, 10)
    with pytest.raises(PeerError, match="after it was fetched"), controller.step(claim=handles):
        consumers[0].call(told.sums_and_fail, handles)
    assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3
    with controller.step():
        pass


def test_batches_are_cleared_within_a_step_and_steps_are_not_nested(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    early, late = owners[0].call(told.make, 2, 10)
    with controller.step(claim=[early, late]):
        fetch_everywhere([early, late], consumers)
        assert controller.clear_batches(early).shards == 1
        assert entries(owners)[0] == (1, 0) and entries(consumers) == [(0, 1)] * 3
        with pytest.raises(InvalidInputError, match="is in step"), controller.step():
            pass
    assert entries(owners)[0] == (0, 0)


def test_claims_of_what_is_not_there_take_nothing(owners: list[Peer], controller: Controller) -> None:
    there = owners[0].call(told.make, 2, 10)
    gone = owners[1].call(told.make, 1, 10)
    controller.clear_batches(gone)
    again = rtensor.loads(rtensor.dumps(gone))
    missing = f"rollout 1 at {owners[1].addr}.*{gone[0].shard_id}"
    with pytest.raises(ShardGoneError, match=missing), controller.step(claim=[there, again]):
        pass
    with controller.step(claim=there):
        pass
    assert entries(owners) == [(0, 0), (0, 0)]


def test_what_one_controller_claims_another_cannot(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(told.make, 2, 10)
    with controller.step(claim=handles[:1]), Controller([Worker(owners[0].addr)]) as other:
        with pytest.raises(ShardGoneError, match="another step"), other.step(claim=handles):
            pass
        assert entries(owners)[0] == (2, 0)


def test_a_controller_that_ends_gives_up_its_claims(owners: list[Peer], consumers: list[Peer]) -> None:
    handles = owners[0].call(told.make, 2, 10)
    with Peer() as leader:
        leader.call(claim_and_stay, workers_of(owners, consumers), handles)
        assert owners[0].call(told.stats)[0]["unclaimed_entries"] == 0
        leader.kill()
        deadline = time.monotonic() + 10
        while owners[0].call(told.stats)[0]["unclaimed_entries"] < 2:
            assert time.monotonic() < deadline, "the claims of a dead controller stay"
            time.sleep(0.02)
    assert consumers[0].call(told.sums, handles) == [0, 10]


def claim_and_stay(workers: list[Worker], handles: Any) -> None:
    controller = Controller(workers)
    step = controller.step(claim=handles)
    step.__enter__()
    told.held.append((controller, step))


def test_a_worker_that_was_away_is_drained_in_the_next_step(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(told.make, 1, 10)
    hooked: list[list[str]] = []

    def drain(ids: list[str]) -> None:
        hooked.append(ids)
        if len(hooked) == 1:
            raise ConnectionError("it is away")

    controller.update([*controller.workers, Worker("inference", "server", 3, drain)])
    drained = controller.clear_batches(handles)
    assert [str(worker) for worker in drained.failures] == ["server 3 at inference"]
    assert "which is tried again: server 3 at inference fails: ConnectionError: it is away" in caplog.text
    assert entries(owners)[0] == (0, 0)
    with controller.step():
        pass
    assert hooked[:2] == [[handles[0].shard_id]] * 2


def test_what_fails_twice_is_raised(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(told.make, 1, 10)
    with Peer() as dead:
        # Nobody listens there any more.
        worker = Worker(dead.addr, "critic", 7)
    controller.update([*controller.workers, worker])
    assert list(controller.clear_batches(handles).failures) == [worker]
    again = (lambda: controller.clear_batches(handles),) * 2
    for call in (*again, lambda: controller.step().__enter__()):
        with pytest.raises(DrainError, match=f"critic 7 at {dead.addr}") as raised:
            call()
        assert raised.value.workers == (worker,)
    # Left out, it is no matter any more.
    controller.update(controller.workers[:-1])
    with controller.step():
        pass


def test_who_is_left_out_is_let_go_of(consumers: list[Peer], controller: Controller) -> None:
    with controller.step():
        pass
    assert consumers[2].call(current_epoch) is not None
    controller.update(controller.workers[:-1])
    deadline = time.monotonic() + 20
    while consumers[2].call(current_epoch) is not None:
        assert time.monotonic() < deadline, "its line stays"
        time.sleep(0.02)
    assert consumers[1].call(current_epoch) is not None


def current_epoch() -> int | None:
    return ShardStore.current_epoch()


def test_an_owner_that_is_no_worker_and_gone_is_left_out_too(
    owners: list[Peer], controller: Controller
) -> None:
    with Peer() as dead:
        handles = dead.call(told.make, 1, 10)
    (failed,) = controller.clear_batches(handles).failures
    assert failed == Worker(dead.addr, "owner")
    with pytest.raises(DrainError, match=f"owner 0 at {dead.addr}"), controller.step():
        pass
    controller.update(controller.workers)
    with controller.step(claim=owners[0].call(told.make, 1, 10)):
        pass
    assert entries(owners)[0] == (0, 0)


def test_a_step_that_a_worker_does_not_begin_is_none(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(told.make, 1, 10)
    with Peer() as dead:
        worker = Worker(dead.addr, "critic", 7)
    controller.update([*controller.workers, worker])
    with pytest.raises(DrainError, match="did not begin step"), controller.step(claim=handles):
        pass
    controller.update(controller.workers[:-1])
    assert entries(owners)[0] == (1, 0)
    with controller.step(claim=handles):
        pass
    assert entries(owners)[0] == (0, 0)


def test_what_is_kept_goes_on(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    kept, drained = owners[0].call(told.make, 2, 10)
    with controller.step(claim=[kept, drained]):
        fetch_everywhere([kept, drained], consumers)
        copy = rtensor.loads(rtensor.dumps(kept))
        assert controller.keep(kept) == 4
    assert entries(owners)[0] == (1, 0) and entries(consumers) == [(0, 1)] * 3
    assert consumers[0].call(told.sums, copy) == [0]
    assert not caplog.records
    with controller.step(claim=copy):
        pass
    assert entries(owners)[0] == (0, 0) and entries(consumers) == [(0, 0)] * 3


def test_the_workers_are_looked_at_by_another_thread_meanwhile(
    owners: list[Peer], controller: Controller
) -> None:
    is_over, wrong = threading.Event(), []

    def look() -> None:
        while not is_over.is_set():
            wrong.extend(answer for answer in controller.stats().values() if isinstance(answer, Exception))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(10):
            with controller.step(claim=owners[0].call(told.make, 1, 10)):
                pass
    finally:
        is_over.set()
        looking.join()
    assert not wrong
    assert entries(owners)[0] == (0, 0)


def test_a_guarded_job_is_drained_with_its_token() -> None:
    with Peer(token="of-the-job") as guarded, Peer() as other:
        handles = guarded.call(told.make, 2, 10)
        workers = [Worker(guarded.addr, "rollout"), Worker(other.addr, "actor")]
        with (
            Controller(workers) as stranger,
            pytest.raises(DrainError, match="wants the token") as raised,
            stranger.step(),
        ):
            pass
        assert isinstance(raised.value.__cause__, NotAuthorizedError)
        # Whom only a handle names is not shown it.
        with (
            Controller(workers[1:], token="of-the-job") as narrow,
            pytest.raises(DrainError, match="wants the token"),
            narrow.step(claim=handles),
        ):
            pass
        with Controller(workers, token="of-the-job") as controller, controller.step(claim=handles):
            pass
        assert guarded.call(told.stats)[0]["num_tensors"] == 0


def test_workers_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="two workers serve at"):
        Controller([Worker("a:1", "x", 0), Worker("a:1", "y", 1)])
    with pytest.raises(InvalidInputError, match="no address"):
        Controller([Worker("http://a/", "x", 0)])
    with pytest.raises(InvalidTypeError, match="not a function"):
        Controller([Worker("a", "x", 0, "hook")])  # type: ignore[arg-type]
