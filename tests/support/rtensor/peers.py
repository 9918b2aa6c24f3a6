"""`Peer`: another process for tests, which serves and calls functions.

It comes from the fork server of the tests, so that one takes tenths of a second.
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
from support.distributed.rank_processes import preload, send_signal
from support.waiting import PATIENCE


class PeerError(Exception):
    """An error that a function raised in a peer: its class name and message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def _serve(connection: Connection, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The modules of the fork server are no garbage: collections skip them.
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
                specification = importlib.util.spec_from_file_location(f"called_{len(modules)}", path)
                assert specification is not None and specification.loader is not None
                modules[path] = importlib.util.module_from_spec(specification)
                specification.loader.exec_module(modules[path])
            answer = True, getattr(modules[path], name)(*arguments)
        except BaseException as error:
            answer = False, (type(error).__name__, str(error))
        connection.send(answer)


class Peer:
    """A process that serves with these options; it starts in the background. A context manager."""

    def __init__(self, **options: Any) -> None:
        preload()
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    @functools.cached_property
    def addr(self) -> str:
        """The address of its server; waits until it serves."""
        return str(self._receive())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a test module in the process; returns its result."""
        self.begin(function, *arguments)
        return self.result()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        assert self.addr
        self._pipe.send((inspect.getfile(function), function.__name__, arguments))

    def result(self) -> Any:
        succeeded, answer = self._receive()
        if not succeeded:
            raise PeerError(*answer)
        return answer

    def has_answered(self) -> bool:
        return self._pipe.poll()

    def _receive(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError("a peer does not answer")
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        send_signal(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE)

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
