"""Methods of saving, each as its own users run it.

A process opens a method once and saves repeatedly into new folders. `save` returns when the caller may change the
tensors. Its result waits until the files are durable in the named folder. A method without an fsync of its own gets
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

__all__ = ["METHODS", "Handle", "Method", "Saver", "State", "fsync_files"]

State = Mapping[str, torch.Tensor]


class Handle(Protocol):
    """A save under method."""

    def done(self) -> bool:
        """Whether it is over, as its method sees it; a training loop asks after each step."""

    def wait(self) -> None:
        """Block until its files are durable."""


class Saver(Protocol):
    """A method of saving that is open in this process."""

    def save(self, folder: Path, state: State) -> Handle: ...
    def read(self, folder: Path, state: State) -> State:
        """What is in the files, in the form of `state`."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method is called, where it lies and what it needs.

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


def _way(
    name: str, module: str, function: str, *, arguments: Mapping[str, Any] | None = None, **facts: bool
) -> Method:
    return Method(
        name=name,
        module=f"checkpoint.contestants.{module}",
        function=function,
        arguments=arguments or {},
        **facts,
    )


METHODS = {
    "copy": _way("Tensor.copy_", "plain", "EagerCopy"),
    "bytes": _way("bare copies", "plain", "BareCopies"),
    "writes": _way("bare direct writes", "plain", "DirectWrites"),
    "hf": _way("tundish save_hf", "ours", "Ours", arguments={"kind": "hf"}),
    "hf lazy": _way("tundish save_hf, lazy", "ours", "Ours", arguments={"kind": "hf", "lazy": True}),
    "hf unsummed": _way(
        "tundish save_hf, no checksums", "ours", "Ours", arguments={"kind": "hf", "checksum": None}
    ),
    "dcp": _way("tundish save_dcp", "ours", "Ours", arguments={"kind": "dcp"}),
    "safetensors": _way("safetensors save_file", "plain", "Safetensors", fsyncs=False),
    "seed": _way("the seed's form", "seed_form", "SeedForm"),
    "torch save": _way("DCP save, 2 threads", "torch_dcp", "Blocking"),
    "torch thread": _way("DCP async_save, thread", "torch_dcp", "Threaded"),
    "torch process": _way(
        "DCP async_save, process, cached shared memory", "torch_dcp", "InProcess", needs_group=True
    ),
    "torch-checkpointing": _way("torch-checkpointing", "torch_checkpointing_saves", "Managed", fsyncs=False),
    "orbax": _way("Orbax", "orbax_saves", "Standard"),
    "nvrx": _way("NVRx", "nvrx_saves", "Persistent", needs_group=True),
}


def fsync_files(folder: Path) -> None:
    """Make every file under `folder` durable, one after the other, and the folders."""
    for path in [*(path for path in folder.rglob("*")), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
