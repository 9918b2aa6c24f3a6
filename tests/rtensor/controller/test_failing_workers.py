"""Workers that do not do as they are told, that come and go, and that want a token."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from support.rtensor import peer_functions
from support.rtensor.fake_worker import FakeWorker
from support.rtensor.peers import Peer, PeerError
from support.rtensor.workers import entries
from support.waiting import until

from tundish.errors import (
    DrainError,
    InvalidInputError,
    InvalidTypeError,
    NotAuthorizedError,
)
from tundish.rtensor import Controller, RTensor, TensorShardInfo, Worker, trust
from tundish.rtensor.workers import WorkerConnections

pytestmark = pytest.mark.usefixtures("emptied")


def test_a_worker_that_was_away_is_drained_in_the_next_step(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 1, 10)
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


def test_a_worker_that_comes_within_a_step_is_in_it(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with Peer() as late:
        with controller.step(claim=handles) as step:
            controller.update([*controller.workers, Worker(late.addr, "critic", 7)])
            assert late.call(peer_functions.current_step) == step.number
            late.call(peer_functions.sums, handles)
        assert entries([owners[0], late]) == [(0, 0), (0, 0)]


def test_a_drain_that_fails_twice_is_raised(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(peer_functions.make, 1, 10)
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


def test_workers_that_are_left_out_are_disconnected(consumers: list[Peer], controller: Controller) -> None:
    with controller.step():
        assert consumers[2].call(peer_functions.current_step) is not None
        controller.update(controller.workers[:-1])
        until(lambda: consumers[2].call(peer_functions.current_step) is None, "its connection stays")
        assert consumers[1].call(peer_functions.current_step) is not None


def test_an_owner_that_is_no_worker_and_gone_is_left_out_too(
    owners: list[Peer], controller: Controller
) -> None:
    with Peer() as dead:
        handles = dead.call(peer_functions.make, 1, 10)
    (failed,) = controller.clear_batches(handles).failures
    assert failed == Worker(dead.addr, "owner")
    with pytest.raises(DrainError, match=f"owner 0 at {dead.addr}"), controller.step():
        pass
    controller.update(controller.workers)
    with controller.step(claim=owners[0].call(peer_functions.make, 1, 10)):
        pass
    assert entries(owners)[0] == (0, 0)


def test_a_step_that_a_worker_does_not_begin_is_none(owners: list[Peer], controller: Controller) -> None:
    handles = owners[0].call(peer_functions.make, 1, 10)
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
            with controller.step(claim=owners[0].call(peer_functions.make, 1, 10)):
                pass
    finally:
        is_over.set()
        looking.join()
    assert not wrong
    assert entries(owners)[0] == (0, 0)


def test_requests_of_two_threads_to_one_worker_take_turns() -> None:
    is_asked, may_answer, found = threading.Event(), threading.Event(), []

    def answer(path: str) -> dict[str, Any]:
        if not is_asked.is_set():
            is_asked.set()
            assert may_answer.wait(60)
        return {"num_entries": len(found)}

    with FakeWorker(answer) as false, Controller([Worker(false.addr)]) as controller:
        askers = [
            threading.Thread(target=lambda: found.extend(controller.stats().values())) for _ in range(2)
        ]
        askers[0].start()
        assert is_asked.wait(60)
        askers[1].start()
        # There is one connection, and an answer is to come on it.
        askers[1].join(0.3)
        assert askers[1].is_alive()
        may_answer.set()
        for asker in askers:
            asker.join(60)
    assert [type(one) for one in found] == [dict, dict]


def test_a_job_with_a_token_is_drained() -> None:
    with Peer(token="of-the-job") as guarded, Peer() as other:
        handles = guarded.call(peer_functions.make, 2, 10)
        workers = [Worker(guarded.addr, "rollout"), Worker(other.addr, "actor")]
        with (
            Controller(workers) as stranger,
            pytest.raises(DrainError, match="wants the token") as raised,
            stranger.step(),
        ):
            pass
        assert isinstance(raised.value.__cause__, NotAuthorizedError)
        assert "call trust" in str(raised.value)
        with Peer(token="of-the-job") as leader:
            # A process that only a handle names is not sent the token.
            with pytest.raises(PeerError, match="wants the token"):
                leader.call(drain_step, workers[1:], handles)
            leader.call(drain_step, workers, handles)
        assert guarded.call(peer_functions.stats)[0]["num_tensors"] == 0
        handles = guarded.call(peer_functions.make, 2, 10)
        trust(guarded.addr, token="of-the-job")
        drain_step(workers, handles)
        assert guarded.call(peer_functions.stats)[0]["num_tensors"] == 0


def drain_step(workers: list[Worker], handles: Any) -> None:
    with Controller(workers) as controller, controller.step(claim=handles):
        pass


def test_invalid_workers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="two workers serve at one address"):
        Controller([Worker("a:1", "x", 0), Worker("a:1", "y", 1)])
    with pytest.raises(InvalidInputError, match="is not the address"):
        Controller([Worker("http://a/", "x", 0)])
    with pytest.raises(InvalidTypeError, match="give a function"):
        Controller([Worker("a", "x", 0, "hook")])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="rank of x one at a:1 is a str"):
        Controller([Worker("a:1", "x", "one")])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="is not hashable"):
        Controller([Worker("a", "x", 0, Unhashable())])


class Unhashable:
    """As a dataclass with a `__call__` is."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, ids: list[str]) -> None: ...


@pytest.mark.parametrize("addr", ["local", "nonsense"])
def test_handles_with_unreachable_owners_are_refused_before_anything_is_drained(
    addr: str, owners: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 1, 10)
    mixed = [*handles, RTensor(TensorShardInfo("name", addr), torch.empty(2, device="meta"))]
    refused = "LocalBackend" if addr == "local" else "'nonsense' is not the address"
    with pytest.raises(InvalidInputError, match=refused), controller.step(claim=mixed):
        pass
    for call in (controller.clear_batches, controller.keep):
        with pytest.raises(InvalidInputError, match=refused):
            call(mixed)
    assert entries(owners)[0] == (1, 0)
    with controller.step(claim=handles):
        pass
    assert entries(owners)[0] == (0, 0)


# Of a worker that holds nothing.
_EMPTY = dict.fromkeys(
    ("num_entries", "total_bytes", "current_entries", "current_bytes", "kept_entries", "kept_bytes"), 0
)


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "clear_batches"])
def test_a_silent_worker_is_waited_for_once_in_a_drain(is_step: bool, consumers: list[Peer]) -> None:
    falls_silent, is_over = threading.Event(), threading.Event()
    asked: list[str] = []

    def answer(path: str) -> Any:
        if falls_silent.is_set():
            asked.append(path)
            is_over.wait(60)
        return _EMPTY

    with FakeWorker(answer) as silent, contextlib.ExitStack() as stack:
        stack.callback(is_over.set)
        workers = [Worker(silent.addr, "critic", 7), Worker(consumers[1].addr)]
        controller = stack.enter_context(Controller(workers, timeout=0.3))
        handles = consumers[1].call(peer_functions.make, 1, 10)
        step = stack.enter_context(contextlib.ExitStack())
        if is_step:
            step.enter_context(controller.step(claim=handles))
        falls_silent.set()
        if is_step:
            step.close()
        else:
            controller.clear_batches(handles)
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"{}"), (200, b""), (204, b""), (302, b""), (200, b"[]"), (202, b'{"a": 1}')]
)
def test_a_server_that_accepts_everything_has_drained_nothing(status: int, body: bytes) -> None:
    with (
        FakeWorker(lambda _: body, status=status) as proxy,
        Controller([Worker(proxy.addr)], timeout=10) as controller,
        pytest.raises(DrainError, match="no process of tundish"),
        controller.step(),
    ):
        pass


def test_workers_that_are_silent_are_not_waited_for_one_after_the_other() -> None:
    falls_silent, is_over = threading.Event(), threading.Event()

    def answer(_: str) -> Any:
        if falls_silent.is_set():
            is_over.wait(60)
        return _EMPTY

    with contextlib.ExitStack() as stack:
        workers = [Worker(stack.enter_context(FakeWorker(answer)).addr) for _ in range(16)]
        stack.callback(is_over.set)
        controller = stack.enter_context(Controller(workers, timeout=0.5))
        kept = RTensor(TensorShardInfo("name", workers[0].addr), torch.empty(2, device="meta"))
        with controller.step():
            falls_silent.set()
            with pytest.raises(DrainError, match="what to keep"):
                controller.keep(kept)
            begun = time.monotonic()
        # time: in each of a handful of rounds, one after the other, it would be half a second each
        assert time.monotonic() - begun < 16 * 0.5


class CountedAddress(str):
    """An address that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedAddress.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_step_does_not_look_through_all_workers_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"10.0.{number >> 8}.{number & 255}:1" for number in range(1000)]
    workers = [Worker(CountedAddress(addr)) for addr in addresses]
    claim = [
        RTensor(TensorShardInfo(f"of:{addr}", addr), torch.empty(2, device="meta")) for addr in addresses
    ]
    counts = {
        "num_entries": 0,
        "total_bytes": 0,
        "current_entries": 0,
        "current_bytes": 0,
        "kept_entries": 0,
        "kept_bytes": 0,
    }
    monkeypatch.setattr(WorkerConnections, "send_all", lambda _, wanted: [counts for _ in wanted])
    with Controller(workers) as controller:
        CountedAddress.compared = 0
        with controller.step(claim=claim):
            pass
        controller.clear_batches(claim)
    # Some for each of the rounds, where a worker is looked up; not a thousand.
    assert CountedAddress.compared < 100 * len(workers)
