"""gRPC: one call for a case, answered by a stream of messages, one a tensor."""

from __future__ import annotations

import json

import torch

from rtensor.contestants import grpc_unary

__all__ = ["Consumer", "Owner"]

Owner = grpc_unary.Owner


class Consumer(grpc_unary.Consumer):
    def fetch(self, case: str) -> list[torch.Tensor]:
        messages = self.all(json.dumps(case).encode())
        return [torch.frombuffer(message, dtype=torch.float32) for message in messages]
