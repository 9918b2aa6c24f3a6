"""A way to a process that can be cut and mended."""

from __future__ import annotations

import socket
import threading

from tundish import rtensor


class CuttableProxy:
    """Passes bytes on to a process and back, but where it is cut, or is not there."""

    def __init__(self, addr: str) -> None:
        self._to = addr
        self._is_cut = False
        self._open: list[socket.socket] = []
        # Holds the port, so that it is nobody else's where this is not there.
        self._holder = _socket_at(0)
        self._port = self._holder.getsockname()[1]
        self.addr = f"127.0.0.1:{self._port}"
        self.come()

    def handle(self, handle: rtensor.RTensor) -> rtensor.RTensor:
        """The same shard, reached this way."""
        return rtensor.RTensor(handle.shard._replace(node_addr=self.addr), handle.data)

    def cut(self) -> None:
        self._is_cut = True
        for one in self._open:
            _end(one)

    def mend(self) -> None:
        self._is_cut = False

    def come(self) -> None:
        """Be there (again)."""
        self._listener = _socket_at(self._port)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def go(self) -> None:
        """End what is open, and refuse what comes."""
        _end(self._listener)
        self._listener.close()
        for one in self._open:
            _end(one)

    def close(self) -> None:
        self._is_cut = True
        self.go()
        self._holder.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            host, _, port = self._to.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _socket_at(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with source:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        _end(source)
        _end(target)


def _end(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
