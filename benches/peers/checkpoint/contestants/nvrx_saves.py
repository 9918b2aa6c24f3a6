"""nvidia-resiliency-ext: `FileSystemWriterAsync` in its persistent process, as its usage guide has it.

Its parts for a device call `torch.cuda` and fail without one: its staging of tensors (`preload_tensors`), and the
checks that compare ranks (`no_dist=False`). Without them it hands the memory of host tensors to its process as it is,
so that training would change what is being written; therefore the tensors are first copied into shared memory that is
kept, which is what its own notes want it to do with host tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

from checkpoint.contestants import State
from checkpoint.contestants.torch_dcp import Blocking
from checkpoint.state import local, whole_of


class Persistent(Blocking):
    def __init__(self, root: Path, state: State) -> None:
        super().__init__(root, state)
        self._queue = AsyncCallsQueue(persistent=True)
        self._staged = whole_of(state)
        for tensor in self._staged.values():
            local(tensor).share_memory_()

    def save(self, folder: Path, state: State) -> Any:
        for name, tensor in state.items():
            local(self._staged[name]).copy_(local(tensor))
        writer = FileSystemWriterAsync(folder, thread_count=2)
        planned = save_state_dict_async_plan(dict(self._staged), writer, self._group)
        function, _, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(
            function, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=None
        )
        self._queue.schedule_async_request(request)
        return _Handle(self._queue)

    def close(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        if self._queue.persistent_caller is not None:
            self._queue.persistent_caller.close()


class _Handle:
    def __init__(self, queue: AsyncCallsQueue) -> None:
        self._queue = queue

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        return not self._queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
