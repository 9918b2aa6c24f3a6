"""Real ranks for tests: processes that join one torch.distributed job and that a test can signal.

The processes come from a fork server that has torch imported already. A job takes over the processes that earlier jobs
left as they found them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.distributed.rank_state import RankState, restored
from support.interrupts import until_it_waits
from support.waiting import PATIENCE

LAUNCHER, RANK0, FILE = "launcher", "rank0", "file"
_INIT_METHODS = {RANK0: "tcp://127.0.0.1:{}", LAUNCHER: "env://", FILE: "file://{}"}
_LEAVE = "leave"
_STARTING_SECONDS = 30.0
# Slow imports of scenarios.
PRELOADED = [
    "hypothesis",
    "peft",
    "tabulate",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
    "tqdm",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "tundish.checkpoint.checkpointer",
    "tundish.packing.batches.sampler",
    "tundish.rtensor.controller",
    "tundish.scatter.dispatch_loader",
    "tundish.shm.shared_pool",
]


def send_signal(process_id: int, number: signal.Signals) -> None:
    """Returns once a process that is stopped stands still, with all of its threads.

    The kernel stops each when its turn comes, and on a machine with much to do one may answer before.
    """
    os.kill(process_id, number)
    until = time.monotonic() + PATIENCE
    while number == signal.SIGSTOP and not _stands_still(process_id):
        assert time.monotonic() < until, f"process {process_id} was stopped and runs on"
        time.sleep(0.001)


def _stands_still(process_id: int) -> bool:
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        # One that ended meanwhile stands still, too.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, _, fields = thread.joinpath("stat").read_text().rpartition(")")
            if fields.split()[0] not in "TtZX":
                return False
    return True


class Line:
    """A rank's connection to the test: `say` sends a message, `hear` waits for one."""

    def __init__(self, connection: multiprocessing.connection.Connection) -> None:
        self._connection = connection

    def say(self, *message: Any) -> None:
        # Bytes: `send` has a view of memory that may grow, and Ctrl-C in the middle of it leaves Python a complaint.
        self._connection.send_bytes(pickle.dumps(message))

    def hear(self) -> Any:
        return self._connection.recv()


Scenario = Callable[[int, Line], None]


@dataclass(frozen=True, kw_only=True)
class _Orders:
    """What a rank of a job is to do; see `Job`."""

    path: str
    scenario: str
    rank: int
    size: int
    host: str
    where: str
    seconds: float


def _serve(connection: multiprocessing.connection.Connection, last_words: Any) -> None:
    """Be a rank of one job after the other, until the test process closes the connection."""
    faulthandler.enable(last_words.fileno())
    import torch.distributed as distributed

    assert distributed.is_available()
    # Imported modules are never garbage. A search through them takes a third of a second, and copies them.
    gc.freeze()
    # Errors of finalizers (a socket left open) are only printed otherwise.
    warnings.simplefilter("error", ResourceWarning)
    while True:
        try:
            orders = connection.recv()
        except EOFError:
            return
        if orders == _LEAVE:
            return
        # A scenario may end without hearing all that it was told.
        if isinstance(orders, _Orders):
            _run_rank(orders, Line(connection))


def _run_rank(orders: _Orders, line: Line) -> None:
    import torch.distributed as distributed

    complaints: list[str] = []
    sys.unraisablehook = lambda unraisable: complaints.append(repr(unraisable.exc_value))
    try:
        scenario = _load(orders.path, orders.scenario)
        before = RankState()
        with restored():
            os.environ |= {"LOCAL_RANK": str(orders.rank), "LOCAL_WORLD_SIZE": str(orders.size)}
            if orders.host == LAUNCHER:
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": orders.where,
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            # How soon the ranks are there is a matter of the machine.
            starting = timedelta(seconds=max(orders.seconds, _STARTING_SECONDS))
            distributed.init_process_group(
                "gloo",
                init_method=_INIT_METHODS[orders.host].format(orders.where),
                rank=orders.rank,
                world_size=orders.size,
                timeout=starting,
            )
            # gloo fails on a rank that still connects when another one has left the group already.
            distributed.barrier()
            distributed.distributed_c10d._set_pg_timeout(
                timedelta(seconds=orders.seconds), distributed.group.WORLD
            )
            scenario(orders.rank, line)
            if distributed.is_initialized():
                distributed.destroy_process_group()
            gc.collect()
            if complaints:
                raise AssertionError(complaints)
        line.say("end of scenario", before.changes())
    except BaseException:
        line.say("crash", traceback.format_exc())
        raise


@functools.cache
def _module(path: str) -> types.ModuleType:
    """The test file `path` as a module, however pytest named the one it made of it."""
    specification = importlib.util.spec_from_file_location("scenarios", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    # It stays, like other modules.
    gc.freeze()
    return module


def _load(path: str, name: str) -> Scenario:
    scenario: Scenario = getattr(_module(path), name)
    return scenario


class RankProcess:
    """A process that is a rank of one job after the other."""

    def __init__(self) -> None:
        preload()
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._last_words, told = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(theirs, told))
        self._process.start()
        theirs.close()
        told.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def exit_code(self) -> int | None:
        """With what it ended, once its scenario is over; None where it did not end."""
        with contextlib.suppress(OSError):
            self.connection.send(_LEAVE)
        self._process.join(PATIENCE)
        return self._process.exitcode

    def end(self) -> str:
        """The signal or the status that it ended with, and where its threads were if it crashed."""
        self._process.join(PATIENCE)
        code = self._process.exitcode
        stacks = bytearray()
        with open(self._last_words.fileno(), "rb", closefd=False) as reader:
            while self._last_words.poll() and (part := reader.read1()):
                stacks += part
        end = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        return f"{end}\n{stacks.decode(errors='replace')}"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """After `kill`."""
        self._process.join(PATIENCE)
        self._process.close()
        self.connection.close()
        self._last_words.close()


# Processes that a job left as it found them, and that wait for the next one.
_idle: list[RankProcess] = []


def _take(size: int) -> list[RankProcess]:
    taken: list[RankProcess] = []
    while _idle and len(taken) < size:
        process = _idle.pop()
        if process.is_alive():
            taken.append(process)
        else:
            process.close()
    return [*taken, *(RankProcess() for _ in range(size - len(taken)))]


def end_idle() -> None:
    """End the processes that wait for a job."""
    for process in _idle:
        process.kill()
    while _idle:
        _idle.pop().close()


def preload() -> None:
    """Have the fork server import what takes long when it starts; one that runs already imports nothing any more."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def settle() -> None:
    """Have this process keep from now on what it keeps from its first job on; for tests that look for leftovers."""
    import torch.distributed as distributed

    distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    multiprocessing.forkserver.ensure_running()


class Job:
    """`size` ranks that run `scenario`; leaving the block ends what still runs.

    Its processes are those that earlier jobs left as they found them, and new ones where these are too few. A process
    that was signalled, failed, or is changed (see `rank_state`) ends with its job.

    Args:
        scenario: a function at the top level of a test file.
        size: how many ranks.
        folder: for the store in a file.
        host: where the job's store is served: by the launcher (as torchrun does; here the test process), by rank 0, or
            in a file in `folder`.
        seconds: the default group's timeout.
        fresh: whether all processes are new and end with the job, for a scenario that must not see what earlier ones
            left: caches, peaks of memory, failpoints.
    """

    def __init__(
        self,
        scenario: Scenario,
        size: int,
        folder: Path,
        *,
        host: str = LAUNCHER,
        seconds: float = 30.0,
        fresh: bool = False,
    ) -> None:
        import torch.distributed as distributed

        self.size = size
        self._store: Any = None
        where = str(folder / "store")
        if host == LAUNCHER:
            self._store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            where = str(self._store.port)
        elif host == RANK0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                where = str(probe.getsockname()[1])
        self._ranks = [RankProcess() for _ in range(size)] if fresh else _take(size)
        self._is_fresh = fresh
        # Ranks that came to the end of the scenario and left their process as it was.
        self._reusable: set[int] = set()
        self._signalled: set[int] = set()
        for rank, process in enumerate(self._ranks):
            orders = _Orders(
                path=inspect.getfile(scenario),
                scenario=scenario.__name__,
                rank=rank,
                size=size,
                host=host,
                where=where,
                seconds=seconds,
            )
            process.connection.send(orders)

    def says(self, rank: int) -> bool:
        """Whether `rank` says something within a tenth of a second."""
        return self._ranks[rank].connection.poll(0.1)

    def hear(self, rank: int) -> Any:
        """The next message of `rank`; a tuple."""
        process = self._ranks[rank]
        if not process.connection.poll(PATIENCE):
            raise TimeoutError(f"rank {rank} says nothing")
        try:
            message = process.connection.recv()
        except EOFError:
            raise EOFError(f"rank {rank} ended: {process.end()}") from None
        if message[0] == "crash":
            raise AssertionError(f"rank {rank}:\n{message[1]}")
        if message[0] == "end of scenario":
            if not message[1]:
                self._reusable.add(rank)
            return message[:1]
        return message

    def hear_all(self, *ranks: int) -> list[Any]:
        return [self.hear(rank) for rank in ranks or range(self.size)]

    def tell(self, rank: int, message: Any = None) -> None:
        self._ranks[rank].connection.send(message)

    def tell_all(self, message: Any = None, ranks: Iterable[int] | None = None) -> None:
        """Tell the same to `ranks`, all by default."""
        for rank in range(self.size) if ranks is None else ranks:
            self.tell(rank, message)

    def signal(self, rank: int, number: signal.Signals) -> None:
        self._signalled.add(rank)
        send_signal(self._ranks[rank].pid, number)

    def interrupt(self, rank: int) -> None:
        """Ctrl-C, once the main thread of `rank` waits for something."""
        until_it_waits(self._ranks[rank].pid)
        self.signal(rank, signal.SIGINT)

    def exit_code(self, rank: int) -> int | None:
        """With what `rank` ended; None where it did not."""
        return self._ranks[rank].exit_code()

    def expect_end(self, *ranks: int) -> None:
        """`ranks` (all by default) come to the end of the scenario; those that cannot be used again exit well."""
        ranks = ranks or tuple(range(self.size))
        for rank in ranks:
            assert self.hear(rank) == ("end of scenario",)
        for rank in ranks:
            if not self._can_be_used_again(rank):
                assert self.exit_code(rank) == 0, f"rank {rank} exits with {self.exit_code(rank)}"

    def _can_be_used_again(self, rank: int) -> bool:
        return rank in self._reusable and rank not in self._signalled and not self._is_fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = []
        for rank, process in enumerate(self._ranks):
            if self._can_be_used_again(rank) and process.is_alive():
                _idle.append(process)
            else:
                process.kill()
                ended.append(process)
        for process in ended:
            process.close()


def run_job(scenario: Scenario, size: int, folder: Path, *told: Any, **settings: Any) -> None:
    """Run a job whose ranks are all told the same and come to the end of the scenario."""
    with Job(scenario, size, folder, **settings) as job:
        for message in told:
            job.tell_all(message)
        job.expect_end()


def on_nodes(rank: int, size: int) -> None:
    """Be on a node of so many ranks, as torchrun says it."""
    os.environ |= {
        "GROUP_RANK": str(rank // size),
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
    }


def voter_on_node(name: str) -> Any:
    """A voter without a first vote, of a rank whose node is called `name`."""
    from tundish.distributed import voter

    before, voter.node_identity = voter.node_identity, lambda: name
    try:
        return voter.Voter(first_vote=False)
    finally:
        voter.node_identity = before


def outcome(call: Callable[[], Any]) -> tuple[str, str, Any]:
    """The result of `call`: the error's kind ("" for none), its text, and the ranks that it names."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "rank", getattr(error, "ranks", None))
    return "", "", None
