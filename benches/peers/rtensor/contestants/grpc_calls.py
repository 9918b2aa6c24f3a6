"""gRPC: one call a tensor, all at once; or one call a case, answered by a stream with one message a tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from rtensor.tensors import make

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

# torch warns of read-only memory; nobody writes to it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Owner:
    def __init__(self, cases: Iterable[str]) -> None:
        self._kept = {case: make(case) for case in cases}
        self._server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
        handlers = {
            "Get": grpc.unary_unary_rpc_method_handler(self._one),
            "All": grpc.unary_stream_rpc_method_handler(self._all),
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Tensors", handlers)])
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.place = json.dumps(
            {"port": port, "counts": {case: len(kept) for case, kept in self._kept.items()}}
        )

    def _one(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        case, number = json.loads(request)
        values: bytes = self._kept[case][number].numpy().tobytes()
        return values

    def _all(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for tensor in self._kept[json.loads(request)]:
            yield tensor.numpy().tobytes()


class UnaryConsumer:
    def __init__(self, place: str) -> None:
        told = json.loads(place)
        self._counts = told["counts"]
        channel = grpc.insecure_channel(f"127.0.0.1:{told['port']}", options=_OPTIONS)
        self._get = channel.unary_unary("/Tensors/Get")
        self._all = channel.unary_stream("/Tensors/All")

    def fetch(self, case: str) -> list[torch.Tensor]:
        calls = [
            self._get.future(json.dumps([case, number]).encode()) for number in range(self._counts[case])
        ]
        return [torch.frombuffer(call.result(), dtype=torch.float32) for call in calls]

    def forget(self, case: str) -> None:
        """Keeps nothing."""


class StreamConsumer(UnaryConsumer):
    def fetch(self, case: str) -> list[torch.Tensor]:
        messages = self._all(json.dumps(case).encode())
        return [torch.frombuffer(message, dtype=torch.float32) for message in messages]
