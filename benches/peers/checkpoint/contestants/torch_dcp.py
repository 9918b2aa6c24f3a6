"""torch.distributed.checkpoint: blocking, in a thread, and in a process that it hands shared memory to.

The process as the documentation of `StagingOptions` and `DefaultStager` puts it together: one stager for all saves,
whose shared memory is kept.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint.contestants import State
from checkpoint.contestants.safetensors_saves import Done
from checkpoint.state import whole_of


class Blocking:
    def __init__(self, root: Path, state: State) -> None:
        # Its own group where there is one, since the job's belongs to the training.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, folder: Path, state: State) -> Any:
        writer = dcp.FileSystemWriter(folder, thread_count=2)
        dcp.save(dict(state), storage_writer=writer, process_group=self._group)
        return Done()

    def read(self, folder: Path, state: State) -> State:
        target = whole_of(state)
        self.load(folder, target)
        return target

    def load(self, folder: Path, target: dict[str, Any]) -> None:
        dcp.load(target, checkpoint_id=str(folder), process_group=self._group)

    def close(self) -> None:
        pass


class Threaded(Blocking):
    def save(self, folder: Path, state: State) -> Any:
        return FutureHandle(dcp.async_save(dict(state), checkpoint_id=str(folder), process_group=self._group))


class InProcess(Blocking):
    def __init__(self, root: Path, state: State) -> None:
        super().__init__(root, state)
        self._stager = DefaultStager(
            # The other three need a device.
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, folder: Path, state: State) -> Any:
        return FutureHandle(
            dcp.async_save(
                dict(state),
                checkpoint_id=str(folder),
                process_group=self._group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self._stager,
            )
        )

    def close(self) -> None:
        self._stager.close()


class FutureHandle:
    """Of a `concurrent.futures.Future`."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
