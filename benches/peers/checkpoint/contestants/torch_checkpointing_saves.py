"""torch-checkpointing: its `CheckpointManager` as its README has it, which stages in a thread and writes in a process.

Its staging runs beside the training until the lock that an optimizer's step has to take; the lock is taken at once
here, since a save returns when the tensors may be changed. It has no fsync. Its direct I/O writes what is not
aligned, which ext4 refuses, so that it is turned off.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from checkpoint.contestants import State, fsync_files
from checkpoint.state import whole_of


class Managed:
    def __init__(self, root: Path, state: State) -> None:
        self._manager = CheckpointManager(
            CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
        )

    def save(self, folder: Path, state: State) -> Any:
        written = self._manager.save(str(folder), {"model": dict(state)})
        assert written is not None
        with self._manager.lock():
            return _Handle(written, folder)

    def read(self, folder: Path, state: State) -> State:
        read: State = self._manager.load(str(folder), into={"model": whole_of(state)})["model"]
        return read

    def close(self) -> None:
        self._manager.close()


class _Handle:
    def __init__(self, written: Future[Any], folder: Path) -> None:
        self._written = written
        self._folder = folder

    def done(self) -> bool:
        return self._written.done()

    def wait(self) -> None:
        self._written.result()
        # The first rank renames the folder when all have written.
        while not self._folder.exists():
            time.sleep(0.001)
        fsync_files(self._folder)
