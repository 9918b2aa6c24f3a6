"""Controllers that are interrupted, cut off, killed, and not alone: nothing stays, and nobody loses anything."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.distributed.programs import PIPE, Program, run
from support.rtensor import peer_functions
from support.rtensor.cuttable_proxy import CuttableProxy
from support.rtensor.fake_worker import FakeWorker
from support.rtensor.peers import Peer
from support.waiting import NOTICED, until

from tundish import rtensor
from tundish.errors import DrainError, InvalidInputError, ShardGoneError
from tundish.rtensor import Controller, Worker

# It is promised within half a second; a machine that is busy with other tests takes longer.


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with Peer() as owner, Peer() as consumer:
        yield owner, consumer


@pytest.fixture(autouse=True)
def empty(peers: tuple[Peer, Peer]) -> Iterator[None]:
    yield
    for peer in peers:
        peer.call(peer_functions.clear)


def workers_of(peers: tuple[Peer, Peer]) -> list[Worker]:
    owner, consumer = peers
    return [Worker(owner.addr, "rollout"), Worker(consumer.addr, "actor")]


@pytest.mark.parametrize("moment", ["begin", "within", "end"])
def test_ctrl_c_closes_the_controller_at_once_though_a_worker_stands_still(
    moment: str, peers: tuple[Peer, Peer]
) -> None:
    owner, consumer = peers
    handles = owner.call(peer_functions.make, 2, 10)
    before = threading.active_count()
    controller = Controller(workers_of(peers), timeout=60)
    interrupted: list[float] = []

    def interrupt() -> None:
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def stand_still() -> None:
        consumer.signal(signal.SIGSTOP)
        threading.Timer(0.3, interrupt).start()

    def step() -> None:
        if moment == "begin":
            stand_still()
        with controller.step(claim=handles):
            consumer.call(peer_functions.sums, handles)
            stand_still()
            if moment == "within":
                time.sleep(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            step()
        assert time.monotonic() - interrupted[0] < NOTICED
        with pytest.raises(InvalidInputError, match=r"this controller is closed \(it was interrupted\)"):
            controller.step().__enter__()
        until(lambda: threading.active_count() <= before, "its threads stay")
    finally:
        consumer.signal(signal.SIGCONT)
    # Nothing was lost: the claims were given up, and another controller drains everybody.
    until(lambda: owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 2, "its claims stay")
    until(lambda: consumer.call(peer_functions.stats)[1]["num_entries"] == 0, "its step goes on")
    with Controller(workers_of(peers)) as other, other.step(claim=handles):
        pass
    assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0


def test_a_connection_that_breaks_between_two_steps_does_no_harm(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    with Controller(workers_of(peers)) as controller:
        with controller.step():
            pass
        controller._connections.keep_only({owner.addr})
        until(lambda: consumer.call(peer_functions.current_step) is None, "a line that ended says nothing")
        handles = owner.call(peer_functions.make, 2, 10)
        consumer.call(peer_functions.sums, handles)
        with controller.step(claim=handles):
            pass
        assert (
            consumer.call(peer_functions.stats)[1]["num_entries"]
            == owner.call(peer_functions.stats)[0]["num_tensors"]
            == 0
        )


# An owner whose connection ends takes the controller for dead and gives up its claims. If no connection can be made at
# the end, the same one is used when it is there again.
@pytest.mark.parametrize(
    ("leave", "come_back"),
    [(CuttableProxy.cut, CuttableProxy.mend), (CuttableProxy.stop, CuttableProxy.start)],
)
def test_an_owner_that_cannot_be_reached_at_the_end_is_drained_later(
    leave: Callable[[CuttableProxy], None],
    come_back: Callable[[CuttableProxy], None],
    peers: tuple[Peer, Peer],
) -> None:
    owner, _ = peers
    between = CuttableProxy(owner.addr)
    try:
        handles = [between.handle(one) for one in owner.call(peer_functions.make, 3, 10)]
        with Controller([Worker(between.addr, "rollout")]) as controller:
            with controller.step(claim=handles):
                leave(between)
                until(lambda: owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 3, "claims stay")
            assert owner.call(peer_functions.stats)[0]["num_tensors"] == 3
            come_back(between)
            with controller.step():
                pass
            assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0
    finally:
        between.close()


def test_claims_reconnect_after_a_lost_connection(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    between = CuttableProxy(owner.addr)
    try:
        # As of an owner that is no worker: nothing but claims is asked of it.
        with Controller([Worker(consumer.addr)]) as controller:
            for _ in range(2):
                handles = [between.handle(one) for one in owner.call(peer_functions.make, 3, 10)]
                with controller.step(claim=handles):
                    assert owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 0
                assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0
                between.cut()
                between.mend()
    finally:
        between.close()


def test_fetches_after_a_step_that_did_not_begin_end_with_the_next(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    gone = rtensor.RTensor(
        rtensor.TensorShardInfo("nobody.has.this", owner.addr), torch.empty(1, device="meta")
    )
    handles = owner.call(peer_functions.make, 2, 10)
    with Controller(workers_of(peers)) as controller:
        with controller.step():
            pass
        with pytest.raises(ShardGoneError), controller.step(claim=gone):
            pass
        # It takes the end of the line for that of the controller; what it was fetching in its step fails then.
        until(
            lambda: consumer.call(peer_functions.current_step) is None, "the step that did not begin goes on"
        )
        consumer.call(peer_functions.sums, handles)
        with controller.step():
            pass
        assert consumer.call(peer_functions.stats)[1]["num_entries"] == 0


def hold_a_step(workers: list[Worker], handles: Any) -> int:
    controller = Controller(workers)
    step = controller.step(claim=handles)
    number = step.__enter__().number
    peer_functions.held.append((controller, step))
    return number


def end_the_step() -> None:
    controller, step = peer_functions.held.pop()
    step.__exit__(None, None, None)
    controller.close()


def test_two_controllers_do_not_end_each_others_steps(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    theirs, ours = owner.call(peer_functions.make, 2, 10), owner.call(peer_functions.make, 2, 10)
    with Peer() as other, Controller(workers_of(peers)) as controller:
        with controller.step() as step:
            pass
        # Ours has begun the next one ahead; theirs is the one after it, which ours would be then.
        number = other.call(hold_a_step, workers_of(peers), theirs)
        assert number > step.number
        numbers = []
        for claim in (None, None, ours):
            with controller.step(claim=claim) as step:
                numbers.append(step.number)
        assert number not in numbers
        storage = owner.call(peer_functions.stats)[0]
        assert (storage["num_tensors"], storage["unclaimed_entries"]) == (2, 0)
        assert consumer.call(peer_functions.sums, theirs) == [0, 10]
        other.call(end_the_step)
        assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0


FORKING = """
import os, sys, time
from tundish import rtensor

handles = rtensor.loads(bytes.fromhex(sys.argv[2]))
controller = rtensor.Controller([rtensor.Worker(sys.argv[1])])
step = controller.step(claim=handles)
step.__enter__()
child = os.fork()
if child == 0:
    # As a worker of a loader of data does, and stays behind.
    print(os.getpid(), flush=True)
    time.sleep(100)
time.sleep(100)
"""


def test_a_child_of_a_dead_controller_holds_no_claims(peers: tuple[Peer, Peer]) -> None:
    owner, _ = peers
    handles = owner.call(peer_functions.make, 2, 10)
    controller = Program(["-c", FORKING, owner.addr, rtensor.dumps(handles).hex()], stdout=PIPE)
    assert controller.stdout is not None
    child = int(controller.stdout.readline())
    try:
        assert owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 0
        controller.kill()
        until(
            lambda: owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 2,
            "the claims of a dead controller stay",
        )
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
        os.kill(child, signal.SIGKILL)


LEAVING = """
import os, sys
from tundish import rtensor
from tundish.errors import InvalidInputError
with rtensor.Controller([rtensor.Worker(sys.argv[1])]) as controller:
    with controller.step(claim=rtensor.loads(bytes.fromhex(sys.argv[2]))):
        child = os.fork()
        if child == 0:
            try:
                controller.stats()
            except InvalidInputError:
                sys.exit(7)
            sys.exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        sys.stdin.read()
"""


def test_a_child_that_leaves_the_block_of_a_step_does_not_end_it(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    handles = owner.call(peer_functions.make, 2, 10)
    words = ["-c", LEAVING, owner.addr, rtensor.dumps(handles).hex()]
    with Program(words, stdin=PIPE, stdout=PIPE) as controller:
        assert controller.stdin is not None and controller.stdout is not None
        try:
            ended = int(controller.stdout.readline())
            assert owner.call(peer_functions.stats)[0]["num_tensors"] == 2
            assert ended == 7, "a child uses the connections of its parent's controller"
            assert consumer.call(peer_functions.sums, handles) == [0, 10]
            controller.stdin.close()
            assert controller.wait(60) == 0
        finally:
            controller.kill()
    assert owner.call(peer_functions.stats)[0]["num_tensors"] == 0


def test_silent_workers_are_not_waited_for_one_after_the_other_when_tried_again() -> None:
    over = threading.Event()

    def stand_still(path: str) -> dict[str, Any]:
        if path.startswith("/buffer/clear"):
            over.wait(60)
        return {}

    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(FakeWorker(stand_still)) for _ in range(12)]
        stack.callback(over.set)
        workers = [Worker(one.addr, "consumer", rank) for rank, one in enumerate(silent)]
        controller = stack.enter_context(Controller(workers, timeout=0.5))
        handle = rtensor.RTensor(rtensor.TensorShardInfo("x", silent[0].addr), torch.empty(1, device="meta"))
        assert len(controller.clear_batches(handle).failures) == 12
        began = time.monotonic()
        with pytest.raises(DrainError) as caught:
            controller.clear_batches(handle)
        # time: twelve times the timeout, one after the other
        assert time.monotonic() - began < 12 * 0.5
        assert len(caught.value.workers) == 12


def test_repeated_drains_go_to_consumers_before_owners() -> None:
    told_at_last: list[str] = []
    is_well = threading.Event()

    def worker(name: str) -> Callable[[str], Any]:
        def answer(path: str) -> Any:
            if path.endswith("/end"):
                if not is_well.is_set():
                    # Not an answer: the request is sent again.
                    return []
                if name == "consumer":
                    time.sleep(0.3)
                told_at_last.append(name)
            return {"status": "ok"}

        return answer

    with contextlib.ExitStack() as stack:
        owner, consumer = (stack.enter_context(FakeWorker(worker(name))) for name in ("owner", "consumer"))
        workers = [Worker(owner.addr, "rollout"), Worker(consumer.addr, "actor")]
        controller = stack.enter_context(Controller(workers, timeout=5))
        handle = rtensor.RTensor(rtensor.TensorShardInfo("x", owner.addr), torch.empty(1, device="meta"))
        with controller.step(claim=handle):
            pass
        is_well.set()
        controller.clear_batches(handle)
    assert told_at_last[:2] == ["consumer", "owner"]


SUSPENDED = """
import sys
from tundish import rtensor

def batches():
    handles = rtensor.loads(bytes.fromhex(sys.argv[3]))
    if sys.argv[1] == "alone":
        with rtensor.step():
            yield rtensor.localize(handles)
    else:
        workers = [rtensor.Worker(addr) for addr in sys.argv[2].split()]
        with rtensor.Controller(workers) as controller, controller.step(claim=handles):
            yield rtensor.localize(handles)

def train():
    # The error's traceback keeps it, suspended in its step, until the interpreter ends.
    iterator = batches()
    for batch in iterator:
        raise ZeroDivisionError("of the training")

train()
"""


@pytest.mark.parametrize("kind", ["alone", "controller"])
def test_a_job_that_fails_ends_though_a_generator_is_still_in_a_step(
    kind: str, peers: tuple[Peer, Peer]
) -> None:
    owner, _ = peers
    handles = owner.call(peer_functions.make, 2, 10)
    addresses = " ".join(peer.addr for peer in peers)
    job = run(["-c", SUSPENDED, kind, addresses, rtensor.dumps(handles).hex()])
    assert job.returncode == 1
    assert "ZeroDivisionError: of the training" in job.stderr
    until(lambda: owner.call(peer_functions.stats)[0]["unclaimed_entries"] == 2, "its claims stay")
