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

import told
from between import Between
from false_worker import FalseWorker
from peers import Peer
from tundish import rtensor
from tundish.errors import DrainError, ShardGoneError
from tundish.rtensor import Controller, Worker


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with Peer() as owner, Peer() as consumer:
        yield owner, consumer


@pytest.fixture(autouse=True)
def empty(peers: tuple[Peer, Peer]) -> Iterator[None]:
    yield
    for peer in peers:
        peer.call(told.clear)


def workers_of(peers: tuple[Peer, Peer]) -> list[Worker]:
    owner, consumer = peers
    return [Worker(owner.addr, "rollout"), Worker(consumer.addr, "actor")]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_an_interrupted_end_of_a_step_is_made_up_for(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    handles = owner.call(told.make, 3, 10)

    def stop_and_interrupt(_: list[str]) -> None:
        raise KeyboardInterrupt

    hook = Worker("inference", "server", 0, stop_and_interrupt)
    with Controller([hook, *workers_of(peers)]) as controller:
        with pytest.raises(KeyboardInterrupt), controller.step(claim=handles):
            consumer.call(told.sums, handles)
        # Consumers are told before owners, who never were.
        assert owner.call(told.stats)[0]["num_tensors"] == 3
        controller.update(workers_of(peers))
        for _ in range(2):
            with controller.step():
                pass
            assert owner.call(told.stats)[0]["num_tensors"] == 0
            assert consumer.call(told.stats)[1]["num_entries"] == 0


def test_an_interrupted_request_leaves_nothing_for_the_next_one(peers: tuple[Peer, Peer]) -> None:
    owner, _ = peers
    with Controller([Worker(owner.addr)], timeout=60) as controller:
        with controller.step():
            pass
        owner.signal(signal.SIGSTOP)
        try:
            asking = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            asking.start()
            with pytest.raises(KeyboardInterrupt):
                controller.clear_batches(
                    rtensor.RTensor(rtensor.TensorShardInfo("x", owner.addr), torch.empty(1, device="meta"))
                )
        finally:
            owner.signal(signal.SIGCONT)
        with controller.step():
            pass


@pytest.mark.parametrize("moment", ["begin", "within", "end"])
def test_ctrl_c_does_not_wait_for_a_worker_that_stands_still(moment: str, peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    handles = owner.call(told.make, 2, 10)
    with Controller(workers_of(peers), timeout=60) as controller:
        with controller.step():
            pass
        before = threading.active_count()

        def stand_still() -> None:
            consumer.signal(signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

        def step() -> None:
            if moment == "begin":
                stand_still()
            with controller.step(claim=handles):
                consumer.call(told.sums, handles)
                stand_still()
                if moment == "within":
                    time.sleep(60)

        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                step()
            with Controller(workers_of(peers), timeout=60) as other:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    other.stats()
            assert time.monotonic() - began < 4
        finally:
            consumer.signal(signal.SIGCONT)
        # What was under way has come to its end, and is made up for.
        until(lambda: threading.active_count() <= before, "threads of the other one stay")
        with controller.step(claim=handles if moment == "begin" else None):
            pass
        assert consumer.call(told.stats)[1]["num_entries"] == owner.call(told.stats)[0]["num_tensors"] == 0


def test_a_line_that_breaks_between_two_steps_is_no_matter(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    with Controller(workers_of(peers)) as controller:
        with controller.step():
            pass
        controller._lines.forget([consumer.addr])
        until(lambda: consumer.call(told.current_step) is None, "a line that ended says nothing")
        handles = owner.call(told.make, 2, 10)
        consumer.call(told.sums, handles)
        with controller.step(claim=handles):
            pass
        assert consumer.call(told.stats)[1]["num_entries"] == owner.call(told.stats)[0]["num_tensors"] == 0


# Who takes the end of its line for that of the controller gives up what it claimed. Where not even a connection is made
# at the end, the line is the same one when it is there again.
@pytest.mark.parametrize(("leave", "come_back"), [(Between.cut, Between.mend), (Between.go, Between.come)])
def test_an_owner_that_cannot_be_reached_at_the_end_is_drained_later(
    leave: Callable[[Between], None], come_back: Callable[[Between], None], peers: tuple[Peer, Peer]
) -> None:
    owner, _ = peers
    between = Between(owner.addr)
    try:
        handles = [between.handle(one) for one in owner.call(told.make, 3, 10)]
        with Controller([Worker(between.addr, "rollout")]) as controller:
            with controller.step(claim=handles):
                leave(between)
                until(lambda: owner.call(told.stats)[0]["unclaimed_entries"] == 3, "claims stay")
            assert owner.call(told.stats)[0]["num_tensors"] == 3
            come_back(between)
            with controller.step():
                pass
            assert owner.call(told.stats)[0]["num_tensors"] == 0
    finally:
        between.close()


def test_claims_are_made_over_a_line_that_was_lost_since_the_last_ones(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    between = Between(owner.addr)
    try:
        # As of an owner that is no worker: nothing but claims is asked of it.
        with Controller([Worker(consumer.addr)]) as controller:
            for _ in range(2):
                handles = [between.handle(one) for one in owner.call(told.make, 3, 10)]
                with controller.step(claim=handles):
                    assert owner.call(told.stats)[0]["unclaimed_entries"] == 0
                assert owner.call(told.stats)[0]["num_tensors"] == 0
                between.cut()
                between.mend()
    finally:
        between.close()


def test_what_is_fetched_after_a_step_that_did_not_begin_ends_with_the_next(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    gone = rtensor.RTensor(
        rtensor.TensorShardInfo("nobody.has.this", owner.addr), torch.empty(1, device="meta")
    )
    handles = owner.call(told.make, 2, 10)
    with Controller(workers_of(peers)) as controller:
        with controller.step():
            pass
        with pytest.raises(ShardGoneError), controller.step(claim=gone):
            pass
        # It takes the end of the line for that of the controller; what it was fetching in its step fails then.
        until(lambda: consumer.call(told.current_step) is None, "the step that did not begin goes on")
        consumer.call(told.sums, handles)
        with controller.step():
            pass
        assert consumer.call(told.stats)[1]["num_entries"] == 0


def hold_a_step(workers: list[Worker], handles: Any) -> int:
    controller = Controller(workers)
    step = controller.step(claim=handles)
    number = step.__enter__().number
    told.held.append((controller, step))
    return number


def end_the_step() -> None:
    controller, step = told.held.pop()
    step.__exit__(None, None, None)
    controller.close()


def test_two_controllers_do_not_end_each_others_steps(peers: tuple[Peer, Peer]) -> None:
    owner, consumer = peers
    theirs, ours = owner.call(told.make, 2, 10), owner.call(told.make, 2, 10)
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
        storage = owner.call(told.stats)[0]
        assert (storage["num_tensors"], storage["unclaimed_entries"]) == (2, 0)
        assert consumer.call(told.sums, theirs) == [0, 10]
        other.call(end_the_step)
        assert owner.call(told.stats)[0]["num_tensors"] == 0


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
    handles = owner.call(told.make, 2, 10)
    controller = Program(["-c", FORKING, owner.addr, rtensor.dumps(handles).hex()], stdout=PIPE)
    assert controller.stdout is not None
    child = int(controller.stdout.readline())
    try:
        assert owner.call(told.stats)[0]["unclaimed_entries"] == 0
        controller.kill()
        until(
            lambda: owner.call(told.stats)[0]["unclaimed_entries"] == 2,
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
    handles = owner.call(told.make, 2, 10)
    words = ["-c", LEAVING, owner.addr, rtensor.dumps(handles).hex()]
    with Program(words, stdin=PIPE, stdout=PIPE) as controller:
        assert controller.stdin is not None and controller.stdout is not None
        try:
            ended = int(controller.stdout.readline())
            assert owner.call(told.stats)[0]["num_tensors"] == 2
            assert ended == 7, "a child uses the connections of its parent's controller"
            assert consumer.call(told.sums, handles) == [0, 10]
            controller.stdin.close()
            assert controller.wait(60) == 0
        finally:
            controller.kill()
    assert owner.call(told.stats)[0]["num_tensors"] == 0


def test_a_worker_that_is_told_of_later_is_shown_the_token() -> None:
    with Peer(token="of-the-job") as owner:
        handles = owner.call(told.make, 2, 10)
        with Controller([], token="of-the-job") as controller:
            assert list(controller.clear_batches(handles).failures)
            assert owner.call(told.stats)[0]["num_tensors"] == 2
            controller.update([Worker(owner.addr)])
            controller.clear_batches(handles)
            assert owner.call(told.stats)[0]["num_tensors"] == 0


def test_silent_workers_are_not_waited_for_one_after_the_other_when_tried_again() -> None:
    over = threading.Event()

    def stand_still(path: str) -> dict[str, Any]:
        if path.startswith("/buffer/clear"):
            over.wait(60)
        return {}

    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(FalseWorker(stand_still)) for _ in range(12)]
        stack.callback(over.set)
        workers = [Worker(one.addr, "consumer", rank) for rank, one in enumerate(silent)]
        controller = stack.enter_context(Controller(workers, timeout=0.5))
        handle = rtensor.RTensor(rtensor.TensorShardInfo("x", silent[0].addr), torch.empty(1, device="meta"))
        assert len(controller.clear_batches(handle).failures) == 12
        began = time.monotonic()
        with pytest.raises(DrainError) as caught:
            controller.clear_batches(handle)
        assert time.monotonic() - began < 3.0
        assert len(caught.value.workers) == 12


def test_consumers_are_told_before_owners_when_tried_again_too() -> None:
    told_at_last: list[str] = []
    is_well = threading.Event()

    def worker(name: str) -> Callable[[str], Any]:
        def answer(path: str) -> Any:
            if path.endswith("/end"):
                if not is_well.is_set():
                    # What is no answer: it is told again.
                    return []
                if name == "consumer":
                    time.sleep(0.3)
                told_at_last.append(name)
            return {"status": "ok"}

        return answer

    with contextlib.ExitStack() as stack:
        owner, consumer = (stack.enter_context(FalseWorker(worker(name))) for name in ("owner", "consumer"))
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
    handles = owner.call(told.make, 2, 10)
    addresses = " ".join(peer.addr for peer in peers)
    job = run(["-c", SUSPENDED, kind, addresses, rtensor.dumps(handles).hex()])
    assert job.returncode == 1
    assert "ZeroDivisionError: of the training" in job.stderr
    until(lambda: owner.call(told.stats)[0]["unclaimed_entries"] == 2, "its claims stay")
