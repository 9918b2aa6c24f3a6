"""AReaL's `HttpRTensorBackend` and its data service, which its workers run on a threaded werkzeug server."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable

import torch
from flask import Flask
from werkzeug.serving import make_server

from rtensor.contestants.areal_modules import areal
from rtensor.tensors import make

_rtensor = areal("infra.rpc.rtensor")


class Owner:
    def __init__(self, cases: Iterable[str]) -> None:
        for name in ("werkzeug", "DataBP"):
            logging.getLogger(name).setLevel(logging.WARNING)
        app = Flask("owner")
        app.register_blueprint(areal("infra.rpc.guard.data_blueprint").data_bp)
        server = make_server("127.0.0.1", 0, app, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        backend = _rtensor.HttpRTensorBackend()
        shards = {}
        for case in cases:
            tensors = make(case)
            shards[case] = [[backend.store(tensor), list(tensor.shape)] for tensor in tensors]
        self.place = json.dumps({"address": f"127.0.0.1:{server.server_port}", "shards": shards})


class Consumer:
    def __init__(self, place: str) -> None:
        told = json.loads(place)
        self._address, self._shards = told["address"], told["shards"]
        _rtensor.set_backend(_rtensor.HttpRTensorBackend())

    def fetch(self, case: str) -> list[torch.Tensor]:
        handles = [
            _rtensor.RTensor(
                _rtensor.TensorShardInfo(shard_id, self._address), torch.empty(shape, device="meta")
            )
            for shard_id, shape in self._shards[case]
        ]
        tensors: list[torch.Tensor] = _rtensor.RTensor.localize(handles)
        return tensors

    def forget(self, case: str) -> None:
        _rtensor.clear_fetch_buffer([shard_id for shard_id, _ in self._shards[case]])
