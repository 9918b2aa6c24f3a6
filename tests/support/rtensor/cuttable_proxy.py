"""A proxy to a server whose connections can be cut."""

from __future__ import annotations

import socket
import threading

from tundish import rtensor


class CuttableProxy:
    """Forwards connections to a server, unless it is cut (accepts and closes) or stopped (refuses)."""

    def __init__(self, addr: str) -> None:
        self._to = addr
        self._is_cut = False
        self._open: list[socket.socket] = []
        # Reserves the port while the proxy is stopped.
        self._holder = _socket_at(0)
        self._port = self._holder.getsockname()[1]
        self.addr = f"127.0.0.1:{self._port}"
        self.start()

    def handle(self, handle: rtensor.RTensor) -> rtensor.RTensor:
        """A handle of the same shard through this proxy."""
        return rtensor.RTensor(handle.shard._replace(node_addr=self.addr), handle.data)

    def cut(self) -> None:
        self._is_cut = True
        for one in self._open:
            _shut_down(one)

    def mend(self) -> None:
        self._is_cut = False

    def start(self) -> None:
        """Listens."""
        self._listener = _socket_at(self._port)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Closes all connections and stops listening."""
        _shut_down(self._listener)
        self._listener.close()
        for one in self._open:
            _shut_down(one)

    def close(self) -> None:
        self._is_cut = True
        self.stop()
        self._holder.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._is_cut:
                client.close()
                continue
            host, _, port = self._to.rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=_forward, args=(source, target), daemon=True).start()


def _socket_at(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


def _forward(source: socket.socket, target: socket.socket) -> None:
    with source:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        _shut_down(source)
        _shut_down(target)


def _shut_down(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
