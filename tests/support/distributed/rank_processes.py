"""Real ranks for tests: processes that join one torch.distributed job and that a test can signal.

The processes come from a fork server that has torch imported already, which makes a job cost tenths
of a second instead of seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LAUNCHER, RANK0, FILE = "launcher", "rank0", "file"
PATIENCE = 60.0  # time: what comes at all comes within this time
_STARTING_SECONDS = 30.0
# Slow imports of scenarios.
_PRELOADED = [
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
    "tundish.packing.sampler",
    "tundish.rtensor.controller",
    "tundish.scatter.dispatch_loader",
    "tundish.shm.pool.shared_pool",
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


def _load(path: str, name: str) -> Scenario:
    """The scenario `name` of the test file `path`, however pytest named the module it made of it."""
    specification = importlib.util.spec_from_file_location("scenarios", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    scenario: Scenario = getattr(module, name)
    return scenario


def _run_rank(
    path: str,
    name: str,
    rank: int,
    size: int,
    host: str,
    where: str,
    seconds: float,
    connection: multiprocessing.connection.Connection,
    last_words: multiprocessing.connection.Connection,
) -> None:
    faulthandler.enable(last_words.fileno())
    import torch.distributed as distributed

    # Imported modules are never garbage. A search through them takes a third of a second, and copies them.
    gc.freeze()
    init_method = {RANK0: f"tcp://127.0.0.1:{where}", LAUNCHER: "env://", FILE: f"file://{where}"}[host]
    if host == LAUNCHER:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": where,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    line = Line(connection)
    # Errors of finalizers (a socket left open) are only printed otherwise.
    warnings.simplefilter("error", ResourceWarning)
    complaints: list[str] = []
    sys.unraisablehook = lambda unraisable: complaints.append(repr(unraisable.exc_value))
    try:
        scenario = _load(path, name)
        # How soon the ranks are there is a matter of the machine.
        starting = timedelta(seconds=max(seconds, _STARTING_SECONDS))
        distributed.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=starting
        )
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), distributed.group.WORLD)
        scenario(rank, line)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        gc.collect()
        if complaints:
            raise AssertionError(complaints)
        line.say("end of scenario")
    except BaseException:
        line.say("crash", traceback.format_exc())
        raise


def preload() -> None:
    """Have the fork server import what takes long when it starts; one that runs already imports nothing any more."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def settle() -> None:
    """Have this process keep from now on what it keeps from its first job on; for tests that look for leftovers."""
    import torch.distributed as distributed

    distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    multiprocessing.forkserver.ensure_running()


class Job:
    """`size` ranks that run `scenario`; leaving the block ends what still runs.

    `host` says where the job's store is served: by the launcher (as torchrun does; here the test process),
    by rank 0, or in a file in `folder`. `seconds` is the default group's timeout.
    """

    def __init__(
        self, scenario: Scenario, size: int, folder: Path, *, host: str = LAUNCHER, seconds: float = 30.0
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
        preload()
        context = multiprocessing.get_context("forkserver")
        self._lines, self._last_words, self._processes = [], [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            last_words, told = context.Pipe(duplex=False)
            about = inspect.getfile(scenario), scenario.__name__, rank, size, host, where, seconds
            process = context.Process(target=_run_rank, args=(*about, theirs, told))
            process.start()
            theirs.close()
            told.close()
            self._lines.append(mine)
            self._last_words.append(last_words)
            self._processes.append(process)

    def says(self, rank: int) -> bool:
        """Whether `rank` says something within a tenth of a second."""
        return self._lines[rank].poll(0.1)

    def hear(self, rank: int) -> Any:
        """The next message of `rank`; a tuple."""
        if not self._lines[rank].poll(PATIENCE):
            raise TimeoutError(f"rank {rank} says nothing")
        try:
            message = self._lines[rank].recv()
        except EOFError:
            raise EOFError(f"rank {rank} ended: {self._end_of(rank)}") from None
        if message[0] == "crash":
            raise AssertionError(f"rank {rank}:\n{message[1]}")
        return message

    def hear_all(self, *ranks: int) -> list[Any]:
        return [self.hear(rank) for rank in ranks or range(len(self._lines))]

    def tell(self, rank: int, message: Any = None) -> None:
        self._lines[rank].send(message)

    def signal(self, rank: int, number: signal.Signals) -> None:
        process_id = self._processes[rank].pid
        assert process_id is not None
        send_signal(process_id, number)

    def exit_code(self, rank: int) -> int | None:
        """With what `rank` ended; None where it did not."""
        self._processes[rank].join(PATIENCE)
        return self._processes[rank].exitcode

    def _end_of(self, rank: int) -> str:
        """The signal or the status that `rank` ended with, and where its threads were if it crashed."""
        code = self.exit_code(rank)
        stacks = bytearray()
        with open(self._last_words[rank].fileno(), "rb", closefd=False) as reader:
            while self._last_words[rank].poll() and (part := reader.read1()):
                stacks += part
        end = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        return f"{end}\n{stacks.decode(errors='replace')}"

    def expect_end(self, *ranks: int) -> None:
        """`ranks` (all by default) come to the end of the scenario and exit well."""
        ranks = ranks or tuple(range(len(self._lines)))
        for rank in ranks:
            assert self.hear(rank) == ("end of scenario",)
        for rank in ranks:
            assert self.exit_code(rank) == 0, f"rank {rank} exits with {self.exit_code(rank)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process, *ends in zip(self._processes, self._lines, self._last_words, strict=True):
            process.join(PATIENCE)
            process.close()
            for end in ends:
                end.close()


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
