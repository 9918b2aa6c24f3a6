"""Orbax: its `StandardCheckpointer`, which saves in the background, given the tensors' memory as arrays of numpy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch

from checkpoint.contestants import State


class Standard:
    def __init__(self, root: Path, state: State) -> None:
        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, folder: Path, state: State) -> Any:
        arrays = {
            name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for name, tensor in state.items()
        }
        self._checkpointer.save(folder, arrays)
        return _Handle(self._checkpointer, folder)

    def read(self, folder: Path, state: State) -> State:
        arrays = self._checkpointer.restore(folder)
        return {
            name: torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
            for name, array in arrays.items()
        }

    def close(self) -> None:
        self._checkpointer.close()


class _Handle:
    def __init__(self, checkpointer: Any, folder: Path) -> None:
        self._checkpointer = checkpointer
        self._folder = folder

    def done(self) -> bool:
        # It renames the folder last, and has no other sign.
        return self._folder.exists()

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()
