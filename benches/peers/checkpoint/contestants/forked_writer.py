"""The seed's form: a forked child writes the host tensors that are kept from save to save, and a thread waits for it.

The child takes a lock on a file, so that few write at once, and calls safetensors' `save_file`; the thread joins it,
gathers how it went on all ranks, and the first rank renames the folder.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from checkpoint.contestants import State, fsync_files


class ForkedWriter:
    def __init__(self, root: Path, state: State) -> None:
        root.mkdir(exist_ok=True)
        self._cached: dict[str, torch.Tensor] = {}
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1

    def save(self, folder: Path, state: State) -> Any:
        mine = list(state)[self._rank :: self._world]
        for name in mine:
            if name not in self._cached:
                self._cached[name] = torch.empty_like(state[name], device="cpu")
            self._cached[name].copy_(state[name])
        unfinished = folder.with_name(f"{folder.name}.incomplete")
        unfinished.mkdir(exist_ok=True)
        path = unfinished / f"model-{self._rank}.safetensors"
        child = multiprocessing.get_context("fork").Process(
            target=_write, args=({name: self._cached[name] for name in mine}, path, folder.parent / "lock")
        )
        child.start()
        thread = threading.Thread(target=self._finish, args=(child, unfinished, folder))
        thread.start()
        return _Handle(thread, folder)

    def _finish(self, child: Any, unfinished: Path, folder: Path) -> None:
        child.join()
        statuses = [child.exitcode]
        if self._group is not None:
            statuses = [None] * self._world
            dist.all_gather_object(statuses, child.exitcode, group=self._group)
        if any(statuses):
            raise RuntimeError(f"writing {folder} ended with {statuses}")
        if self._rank == 0:
            fsync_files(unfinished)
            unfinished.rename(folder)
        if self._group is not None:
            dist.barrier(group=self._group)

    def read(self, folder: Path, state: State) -> State:
        read: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            read |= load_file(path)
        return read

    def close(self) -> None:
        pass


def _write(tensors: dict[str, torch.Tensor], path: Path, lock: Path) -> None:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save_file(tensors, path, metadata={"format": "pt"})
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class _Handle:
    def __init__(self, thread: threading.Thread, folder: Path) -> None:
        self._thread = thread
        self._folder = folder

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if not self._folder.exists():
            raise RuntimeError(f"{self._folder} was not saved")
