"""Fixtures with the modules of the bench that need no peer from the package index."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.distributed.programs import Program

PEERS = Path(__file__).resolve().parents[2] / "benches" / "peers"
MODULES = {
    "measure": "measure",
    "report": "report",
    "distributions": "packing.distributions",
    "numpy_forms": "packing.numpy_forms",
    "processes": "processes",
    "checkpoint_processes": "checkpoint.processes",
    "state": "checkpoint.state",
    "contestants": "shm.contestants",
    "rtensor_processes": "rtensor.processes",
    "rtensor_tensors": "rtensor.tensors",
    "scatter_batches": "scatter.batches",
    "scatter_cases": "scatter.cases",
    "scatter_namespaces": "scatter.network_namespaces",
    "scatter_nodes": "scatter.nodes_case",
    "scatter_overlap": "scatter.overlap_case",
    "timing": "shm.timing",
    "two_queues": "shm.contestants.two_queues",
    "two_queue_pool": "shm.two_queue_pool",
}
TOP_LEVEL = ("checkpoint", "measure", "packing", "processes", "report", "rtensor", "scatter", "shm")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of the bench that need no peer. They are removed from sys.modules afterwards."""
    sys.path.insert(0, str(PEERS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(path) for name, path in MODULES.items()})
    finally:
        sys.path.remove(str(PEERS))
        for name in [name for name in sys.modules if name.partition(".")[0] in TOP_LEVEL]:
            del sys.modules[name]


@pytest.fixture
def warm_programs(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the Python children of the bench from the fork server, which has imported torch."""

    def started(command: Sequence[str], *, text: bool = False, **settings: Any) -> Any:
        if command[0] != sys.executable:
            return subprocess.Popen(command, text=text, **settings)
        return Program(command[1:], text=text, **settings)

    warm = SimpleNamespace(**vars(subprocess) | {"Popen": started})
    monkeypatch.setattr(bench.processes, "subprocess", warm)
