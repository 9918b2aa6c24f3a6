"""A process that receives flattened objects, rebuilds them, and sends them back the same way."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

import tundish as td


def send(obj: Any, connection: Connection) -> None:
    """Send the schema in bytes, then the tensors in one buffer, as its layout says."""
    tensors, schema = td.tree.flatten(obj)
    buffer = torch.zeros(schema.layout.total, dtype=torch.uint8)
    for place, tensor in zip(schema.layout.tensors_in(buffer), tensors, strict=True):
        if tensor.is_contiguous():
            length = tensor.numel() * tensor.itemsize
            start = tensor.storage_offset() * tensor.itemsize
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (length,), (1,))
            start = place.storage_offset() * tensor.itemsize
            buffer[start : start + length] = raw
        else:
            place.copy_(tensor)
    connection.send_bytes(pickle.dumps(schema))
    connection.send_bytes(buffer.numpy())


def receive(connection: Connection) -> Any:
    """Rebuild the object that `send` sent at the other end.

    Raises:
        EOFError: the other end closed.
    """
    encoded = connection.recv_bytes()
    if not encoded:
        raise EOFError("the other end closed")
    schema = pickle.loads(encoded)
    received = connection.recv_bytes()
    buffer = torch.zeros(max(len(received), 1), dtype=torch.uint8)
    if received:
        buffer[: len(received)] = torch.frombuffer(bytearray(received), dtype=torch.uint8)
    return td.tree.unflatten(schema, schema.layout.tensors_in(buffer))


class EchoProcess:
    """The process, which lives until it is closed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def round_trip(self, obj: Any) -> Any:
        send(obj, self._connection)
        failure = self._connection.recv()
        if failure is not None:
            raise RuntimeError(failure)
        return receive(self._connection)

    def close(self) -> None:
        # An empty schema is the end. A child that another test forked may hold the connection open.
        self._connection.send_bytes(b"")
        self._process.join(30)
        assert self._process.exitcode == 0, f"the process ended with {self._process.exitcode}"
        self._connection.close()


def _answer(connection: Connection) -> None:
    # Warnings of torch about sparse tensors are no failure.
    if not sys.warnoptions:
        import warnings

        warnings.simplefilter("ignore")
    while True:
        try:
            obj = receive(connection)
        except EOFError:
            return
        except Exception:
            connection.send(traceback.format_exc())
            continue
        connection.send(None)
        send(obj, connection)
