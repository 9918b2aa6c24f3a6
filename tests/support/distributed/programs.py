"""Programs of users for tests, as `subprocess` starts them with `python`, without the time of their imports.

Their processes come from the fork server, which has torch imported already: one costs tenths of a second instead of
seconds. A program has a `__main__`, arguments, an environment, a folder and standard streams of its own. It sees the
mounts of its test, and ends as an interpreter does: threads are joined, `atexit` functions run, modules are cleared. A
program that Ctrl-C ends has the status 1 and is not killed by the signal. A test of that, of imports or of the memory
of a bare interpreter starts an interpreter instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from support.distributed.rank_processes import preload
from support.waiting import PATIENCE

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
_CLONE_NEWNS = 0x00020000


class Program:
    """`python *words`, with the part of `subprocess.Popen` that tests need; pipes carry text by default.

    `words` begin with `-c` and code, `-m` and a module, or the path of a script. A context manager as `Popen` is one.
    """

    def __init__(
        self,
        words: Sequence[object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
        text: bool = True,
    ) -> None:
        self.args = [str(word) for word in words]
        self.returncode: int | None = None
        self.stdin, their_stdin = _ends(stdin, 0, text=text)
        self.stdout, their_stdout = _ends(stdout, 1, text=text)
        self.stderr, their_stderr = _ends(stderr, 2, text=text)
        preload()
        with their_stdin, their_stdout, their_stderr:
            streams = their_stdin, their_stdout, their_stderr
            about = self.args, dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd())
            # Those of this thread alone, where a test has a `/dev/shm` of its own.
            mounts = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/mnt"
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_run, args=(*about, mounts, start_new_session, streams))
            self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]
        # A signal to its process group reaches it.
        with contextlib.suppress(ProcessLookupError):
            while start_new_session and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Whatever it is still to say, through pipes of text; TimeoutExpired where that has no end."""
        until = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        streams = [
            stream for stream in (self.stdout, self.stderr) if stream is not None and not stream.closed
        ]
        said = dict.fromkeys(streams, b"")
        # Without threads: they would share the mounts of this one, which then could not leave its own.
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                for key, _ in selector.select(left):
                    part = os.read(key.fd, 1 << 16)
                    said[key.fileobj] += part  # type: ignore[index]
                    if not part:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        out, err = (
            None if one is None else said.get(one, b"").decode() for one in (self.stdout, self.stderr)
        )
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The fork server may have reaped it already, and be about to say so.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


@contextlib.contextmanager
def started_ranks(words: Sequence[object], size: int, **settings: Any) -> Iterator[list[Program]]:
    """A program as all ranks of a job on one node, as torchrun starts it, which serves the store; killed at the end."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    of_job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    ranks = [
        Program(words, env={**os.environ, **of_job, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **settings)
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def run_ranks(words: Sequence[object], size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as all ranks of a job, to its end."""
    with started_ranks(words, size, stdout=PIPE, stderr=PIPE) as ranks:
        said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
        return [
            subprocess.CompletedProcess(rank.args, rank.wait(), out, err)
            for rank, (out, err) in zip(ranks, said, strict=True)
        ]


def run(
    words: Sequence[object],
    *,
    input: str | None = None,  # noqa: A002
    timeout: float = PATIENCE,
    check: bool = False,
    **settings: Any,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with `capture_output`, in text."""
    program = Program(words, stdin=DEVNULL if input is None else PIPE, stdout=PIPE, stderr=PIPE, **settings)
    try:
        out, err = program.communicate(input, timeout)
    finally:
        program.kill()
    done = subprocess.CompletedProcess(program.args, program.wait(), out, err)
    if check:
        done.check_returncode()
    return done


def become(words: Sequence[str]) -> NoReturn:
    """Be `python *words` from here on, to its end."""
    status: Any = 0
    try:
        _execute(words)
    except SystemExit as left:
        status = left.code
    except BaseException as error:
        _tell(error)
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    # Not the end of a process of `multiprocessing`, which calls no `atexit`, but that of an interpreter.
    ctypes.pythonapi.Py_Exit(status or 0)
    raise AssertionError("unreachable")


def _ends(given: Any, number: int, *, text: bool) -> tuple[IO[Any] | None, Connection]:
    """The two ends of a standard stream: this process's and the program's."""
    if given == PIPE:
        reader, writer = os.pipe()
        mine, theirs = (reader, writer) if number else (writer, reader)
        return open(mine, ("r" if number else "w") + ("" if text else "b")), Connection(theirs)
    if given == DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    if given is None:
        given = number
    return None, Connection(os.dup(given if isinstance(given, int) else given.fileno()))


def _run(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    mounts: str,
    leads: bool,
    streams: Sequence[Connection],
) -> NoReturn:
    # Imported modules are never garbage, and a search through them takes long.
    gc.freeze()
    if leads:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    # Its own: those of the fork server know whether its files can be sought.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    _see(mounts)
    os.chdir(folder)
    become(words)


def _see(mounts: str) -> None:
    if os.path.exists("/proc/self/ns/mnt") and os.readlink(mounts) != os.readlink("/proc/self/ns/mnt"):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(mounts, "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNS) != 0:
                raise OSError(ctypes.get_errno(), "cannot see the mounts of the test")


def _tell(error: BaseException) -> None:
    """Handle an uncaught error as an interpreter does; it is kept to the end, with all that it refers to."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
    sys.excepthook(type(error), error, trace)


def _execute(words: Sequence[str]) -> None:
    first, *arguments = words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv = list(words)
        main.__file__ = first
        with open(first, "rb") as script:
            exec(compile(script.read(), first, "exec"), main.__dict__)
