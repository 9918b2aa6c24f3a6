"""Steps of a job whose consumers are killed and started again at random: nothing is left of any step.

A rollout, three roles and a controller, each a process. With a fixed seed; 10 000 steps under `make soak`. After every
step the ledger of every living process sums to zero; the processes that live through all of it have no more memory,
descriptors, threads or mappings in the end than when they had warmed up.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.rtensor import soak_functions
from support.rtensor.peers import Peer, PeerError
from support.soak import IS_SOAK

from tundish.rtensor import Worker

STEPS = 10_000 if IS_SOAK else 100
WARM_UP = STEPS // 5
# On average, steps between two events.
BETWEEN_EVENTS = 25
# The third role, the reference, is never killed.
MORTAL = ("actor", "critic")
# A consumer is killed before it fetches, during it, after it, while the step is drained, or after that; or a consumer
# fetches while the step is drained.
EVENTS = ("unasked", "fetching", "fetched", "draining", "drained", "late")
# Events whose consumer does not fetch with the others.
UNASKED = ("unasked", "late")
SHARDS_OF_A_BATCH = 4


class Belongings(NamedTuple):
    """Resources of a process."""

    resident_bytes: int
    descriptors: int
    threads: int
    mappings: int


class Job:
    """The processes, with a spare one for the next that is killed."""

    def __init__(self) -> None:
        self.owner, self.controller, self._spare = Peer(), Peer(), Peer()
        self.consumers = {role: Peer() for role in (*MORTAL, "ref")}
        self.dead: set[str] = set()
        self.controller.call(soak_functions.control, self._workers())
        self._is_updated = True

    def _workers(self) -> list[Worker]:
        consumers = [Worker(peer.addr, role) for role, peer in self.consumers.items()]
        return [Worker(self.owner.addr, "rollout"), *consumers]

    def kill(self, role: str) -> None:
        """Does not wait for the end."""
        self.consumers[role].signal(signal.SIGKILL)
        self.dead.add(self.consumers[role].addr)

    def start_again(self, role: str) -> None:
        self.consumers[role].close()
        self.consumers[role], self._spare = self._spare, Peer()
        self._is_updated = False

    def tell_controller(self) -> None:
        self.controller.call(soak_functions.update, self._workers())
        self._is_updated = True

    def begin_step(self, batch: Any) -> int:
        """Its number. A controller that was not told who is there finds out, and nothing has begun then."""
        if not self._is_updated:
            with pytest.raises(PeerError, match="does not answer") as raised:
                self.controller.call(soak_functions.begin, batch)
            assert raised.value.kind == "DrainError"
            self.tell_controller()
        number: int = self.controller.call(soak_functions.begin, batch)
        return number

    def lasting(self) -> dict[str, Belongings]:
        """Of those that live through all of it."""
        peers = {"rollout": self.owner, "controller": self.controller, "ref": self.consumers["ref"]}
        return {name: _belongings(peer) for name, peer in peers.items()}

    def close(self) -> None:
        for peer in (self.owner, self.controller, self._spare, *self.consumers.values()):
            peer.close()


def _belongings(peer: Peer) -> Belongings:
    process = Path(f"/proc/{peer.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Belongings(
        1024 * int(status["VmRSS"].split()[0]),
        len(list((process / "fd").iterdir())),
        int(status["Threads"]),
        len((process / "maps").read_text().splitlines()),
    )


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


@pytest.mark.timeout(7200 if IS_SOAK else 300)
def test_nothing_is_left_of_any_step_whichever_process_is_killed(job: Job) -> None:
    draw = random.Random(6)
    begun: dict[str, Belongings] = {}
    batch = job.owner.call(soak_functions.rollout, 0, soak_functions.ROWS[0])
    for number in range(STEPS):
        event = draw.choice(EVENTS) if draw.randrange(BETWEEN_EVENTS) == 0 else None
        role = draw.choice(MORTAL)
        batch = take_step(job, batch, number, draw, role, event)
        if event == "drained":
            job.kill(role)
        if event not in (None, "late"):
            job.start_again(role)
            if draw.random() < 0.5:
                job.tell_controller()
        if number == WARM_UP:
            begun = job.lasting()
    assert len(job.dead) > STEPS / BETWEEN_EVENTS / 2
    deadline = time.monotonic() + 60
    while (grown := growth(begun, job.lasting())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grown


def take_step(job: Job, batch: Any, number: int, draw: random.Random, role: str, event: str | None) -> Any:
    """One step, to whose role happens something. Returns what the next one uses up, which is made meanwhile."""
    current = job.begin_step(batch)
    job.owner.begin(soak_functions.rollout, number + 1, draw.choice(soak_functions.ROWS))
    if event == "unasked":
        job.kill(role)
    asked = {name: peer for name, peer in job.consumers.items() if name != role or event not in UNASKED}
    for peer in asked.values():
        peer.begin(soak_functions.consume, batch, number, draw.getrandbits(32))
    if event == "fetching":
        job.kill(role)
    for name, peer in asked.items():
        if (name, event) != (role, "fetching"):
            peer.result()
    following = job.owner.result()
    if event in ("fetched", "draining"):
        job.kill(role)
    if event == "fetched":
        # Else nobody says whether it is dead before the drain comes.
        job.consumers[role].kill()
    job.controller.begin(soak_functions.end)
    excused = set(job.dead)
    if event == "late":
        # Its fetches of this step or the next are refused, or drained with the step.
        job.consumers[role].begin(soak_functions.consume, batch, number, draw.getrandbits(32))
        excused.add(job.consumers[role].addr)
        try:
            job.consumers[role].result()
        except PeerError as error:
            assert error.kind == "ShardGoneError", error  # noqa: PT017 (it may as well not fail)
    said = job.controller.result()
    assert not [text for text in said if not any(addr in text for addr in excused)], said
    unclaimed = {job.owner.addr: SHARDS_OF_A_BATCH}
    assert not job.controller.call(soak_functions.unbalanced, current, excused, unclaimed)
    return following


def growth(
    begun: dict[str, Belongings], ended: dict[str, Belongings]
) -> dict[str, tuple[Belongings, Belongings]]:
    """The processes that have grown, and from which size to which."""
    return {
        name: (begun[name], now)
        for name, now in ended.items()
        if now.resident_bytes > begun[name].resident_bytes * 1.02
        # Threads and connections come and go with what there is to do.
        or now.descriptors > begun[name].descriptors + 4
        or now.threads > begun[name].threads + 4
        or now.mappings > begun[name].mappings + 16
    }
