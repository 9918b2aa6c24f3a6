"""Arrow Flight: a case is a stream of record batches, one a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pyarrow as pa
import torch
from pyarrow import flight

from rtensor.tensors import make

# torch warns of read-only memory; nobody writes to it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Owner(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, cases: Iterable[str]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._kept = {
            case.encode(): pa.Table.from_batches(
                [pa.record_batch([pa.array(tensor.numpy())], ["values"]) for tensor in make(case)]
            )
            for case in cases
        }
        self.place = str(self.port)

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(self._kept[ticket.ticket])


class Consumer:
    def __init__(self, place: str) -> None:
        self._client = flight.connect(f"grpc://127.0.0.1:{place}")

    def fetch(self, case: str) -> list[torch.Tensor]:
        table = self._client.do_get(flight.Ticket(case.encode())).read_all()
        return [torch.from_numpy(chunk.to_numpy()) for chunk in table["values"].chunks]

    def forget(self, case: str) -> None:
        """Keeps nothing."""
