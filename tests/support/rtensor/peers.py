"""Other processes for tests of remote tensors: each serves, and does what it is told.

They come from the fork server of the tests, so that one costs tenths of a second.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import tundish as td
from support.distributed.rank_processes import PATIENCE, preload, send_signal


class PeerError(Exception):
    """What a peer failed with: the kind and the message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def _serve(connection: Connection, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the fork server imported is never garbage, and to look through it takes long.
    gc.freeze()
    modules: dict[str, Any] = {}
    server = td.rtensor.serve(**options)
    connection.send(server.addr)
    while True:
        try:
            path, name, arguments = connection.recv()
        except EOFError:
            return
        try:
            if path not in modules:
                specification = importlib.util.spec_from_file_location(f"told_{len(modules)}", path)
                assert specification is not None and specification.loader is not None
                modules[path] = importlib.util.module_from_spec(specification)
                specification.loader.exec_module(modules[path])
            answer = True, getattr(modules[path], name)(*arguments)
        except BaseException as error:
            answer = False, (type(error).__name__, str(error))
        connection.send(answer)


class Peer:
    """A process that serves with these options; whoever makes it does not wait for it to begin. A context manager."""

    def __init__(self, **options: Any) -> None:
        preload()
        context = multiprocessing.get_context("forkserver")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    @functools.cached_property
    def addr(self) -> str:
        """Where it serves: the first that it says."""
        return str(self._hear())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a test's module returns there."""
        self.begin(function, *arguments)
        return self.result()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self.addr
        self._line.send((inspect.getfile(function), function.__name__, arguments))

    def result(self) -> Any:
        succeeded, answer = self._hear()
        if not succeeded:
            raise PeerError(*answer)
        return answer

    def has_answered(self) -> bool:
        return self._line.poll()

    def _hear(self) -> Any:
        if not self._line.poll(PATIENCE):
            raise TimeoutError("a peer says nothing")
        return self._line.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        send_signal(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
