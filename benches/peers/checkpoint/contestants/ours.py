"""tundish through its public functions, with their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tundish as td
from checkpoint.contestants import State
from checkpoint.state import own_parts, whole_of

# A replicated model is shared out by files; with the default of 5 GB there would be one, and one rank would write it.
_SHARD_BYTES_OF_MANY = 1_150_000_000


class Ours:
    """`kind`: "hf" or "dcp"."""

    def __init__(self, root: Path, state: State, *, kind: str, lazy: bool = False) -> None:
        self._kind = kind
        self._optimizer = torch.optim.SGD(list(state.values()), lr=0.1)
        self._checkpointer = td.Checkpointer(root, on_failure="raise")
        self._options: dict[str, Any] = {}
        if lazy:
            self._options |= {"staging": "lazy", "optimizer": self._optimizer}
        if kind == "hf" and torch.distributed.is_initialized():
            self._options["shard_bytes"] = _SHARD_BYTES_OF_MANY

    def save(self, folder: Path, state: State) -> _OurHandle:
        save = self._checkpointer.save_hf if self._kind == "hf" else self._checkpointer.save_dcp
        return _OurHandle(save(_step(folder), state, **self._options), self._optimizer)

    def read(self, folder: Path, state: State) -> State:
        if self._kind == "hf":
            from safetensors.torch import load_file

            read: dict[str, torch.Tensor] = {}
            for path in folder.glob("*.safetensors"):
                read |= load_file(path)
            return own_parts(read, state)
        target = whole_of(state)
        self.load(folder, target)
        return target

    def load(self, folder: Path, target: dict[str, Any]) -> None:
        self._checkpointer.load_dcp(target, step=_step(folder))

    def close(self) -> None:
        self._checkpointer.close()


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


class _OurHandle:
    def __init__(self, save: Any, optimizer: torch.optim.Optimizer) -> None:
        self._save = save
        self._optimizer = optimizer

    def before_changes(self) -> None:
        # Nothing to step, since there are no gradients; but a step is what a lazy save holds up.
        self._optimizer.step()

    def done(self) -> bool:
        return self._save.done()

    def wait(self) -> None:
        self._save.result()
