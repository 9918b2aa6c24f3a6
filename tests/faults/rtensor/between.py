"""A way to a process that can be cut and mended."""

from __future__ import annotations

import socket
import threading

from tundish import rtensor


class Between:
    """Passes bytes on to a process and back, but where it is cut."""

    def __init__(self, addr: str) -> None:
        self._to = addr
        self._is_cut = False
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.addr = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def handle(self, handle: rtensor.RTensor) -> rtensor.RTensor:
        """The same shard, reached this way."""
        return rtensor.RTensor(handle.shard._replace(node_addr=self.addr), handle.data)

    def cut(self) -> None:
        self._is_cut = True
        for one in self._open:
            _end(one)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        _end(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
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
