"""Libraries and functions that save, each as its own users run it.

A process opens a contestant once and saves repeatedly into new folders. `save` returns when the caller may change the
tensors. Its result waits until the files are durable in the named folder. A contestant without an fsync of its own gets
one for each file (`fsyncs` is False).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

State = Mapping[str, torch.Tensor]


class Handle(Protocol):
    """A save under way."""

    def done(self) -> bool:
        """Whether it is over, as its contestant sees it; a training loop asks after each step."""

    def wait(self) -> None:
        """Block until its files are durable."""


class Saver(Protocol):
    """A contestant that is open in this process."""

    def save(self, folder: Path, state: State) -> Handle: ...
    def read(self, folder: Path, state: State) -> State:
        """The content of the files, in the form of `state`."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """The name of a contestant, its module and its needs.

    `fsyncs`: whether it makes its files durable itself. `needs_group`: whether it needs a process group even where
    there is one rank.
    """

    name: str
    module: str
    function: str
    arguments: Mapping[str, Any]
    fsyncs: bool = True
    needs_group: bool = False

    def open(self, root: Path, state: State) -> Saver:
        """Open it in this process, for saves of `state` into folders of `root`."""
        make: Callable[..., Saver] = getattr(importlib.import_module(self.module), self.function)
        return make(root, state, **self.arguments)


def _contestant(
    name: str, module: str, function: str, *, arguments: Mapping[str, Any] | None = None, **facts: bool
) -> Contestant:
    return Contestant(
        name=name,
        module=f"checkpoint.contestants.{module}",
        function=function,
        arguments=arguments or {},
        **facts,
    )


CONTESTANTS = {
    "copy": _contestant("Tensor.copy_", "floors", "EagerCopy"),
    "bytes": _contestant("bare copies", "floors", "BareCopies"),
    "writes": _contestant("bare direct writes", "floors", "DirectWrites"),
    "hf": _contestant("tundish save_hf", "ours", "Ours", arguments={"kind": "hf"}),
    "hf lazy": _contestant("tundish save_hf, lazy", "ours", "Ours", arguments={"kind": "hf", "lazy": True}),
    "dcp": _contestant("tundish save_dcp", "ours", "Ours", arguments={"kind": "dcp"}),
    "safetensors": _contestant("safetensors save_file", "safetensors_saves", "Safetensors", fsyncs=False),
    "seed": _contestant("the seed's form", "forked_writer", "ForkedWriter"),
    "torch save": _contestant("DCP save, 2 threads", "torch_dcp", "Blocking"),
    "torch thread": _contestant("DCP async_save, thread", "torch_dcp", "Threaded"),
    "torch process": _contestant(
        "DCP async_save, process, cached shared memory", "torch_dcp", "InProcess", needs_group=True
    ),
    "torch-checkpointing": _contestant(
        "torch-checkpointing", "torch_checkpointing_saves", "Managed", fsyncs=False
    ),
    "orbax": _contestant("Orbax", "orbax_saves", "Standard"),
    "nvrx": _contestant("NVRx", "nvrx_saves", "Persistent", needs_group=True),
}


def fsync_files(folder: Path) -> None:
    """Make every file under `folder` durable, one after the other, and the folders."""
    for path in [*(path for path in folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
