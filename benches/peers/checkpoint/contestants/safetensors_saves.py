"""safetensors' `save_file` and an fsync: what everybody writes first."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoint.contestants import State, fsync_files


class Done:
    """A save that was over when it returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Safetensors:
    """Saves one file. Of two ranks, the first saves the replicated tensors, and the second waits."""

    def __init__(self, root: Path, state: State) -> None:
        root.mkdir(exist_ok=True)

    def save(self, folder: Path, state: State) -> Done:
        if int(os.environ.get("RANK", "0")) == 0:
            folder.mkdir()
            save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
            fsync_files(folder)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return Done()

    def read(self, folder: Path, state: State) -> State:
        return load_file(folder / "model.safetensors")

    def close(self) -> None:
        pass
