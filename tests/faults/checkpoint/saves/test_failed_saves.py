"""Saves that fail count for nothing: not in the next save of their step, and not in retention."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tundish.checkpoint import Checkpointer, open_readonly

MIB = 1 << 20
KINDS = ["hf", "dcp"]
Limit = Callable[[int | None], None]


def save(
    checkpointer: Checkpointer, kind: str, step: int, tensors: dict[str, torch.Tensor], **named: Any
) -> Any:
    if kind == "hf":
        return checkpointer.save_hf(step, tensors, shard_bytes=2 * MIB, **named)
    return checkpointer.save_dcp(step, tensors, **named)


def load(path: Path) -> dict[str, torch.Tensor]:
    """All that lies there, under whatever name."""
    if path.name.startswith("hf"):
        files = list(path.glob("*.safetensors"))
        parts = [load_file(file) for file in files]
        assert sum(map(len, parts)) == len({name for part in parts for name in part})
        return {name: tensor for part in parts for name, tensor in part.items()}
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = path.with_name(f"{path.name}.pt")
    dcp_to_torch_save(path, target)
    found = torch.load(target)
    target.unlink()
    return dict(found)


@pytest.fixture
def limit_files() -> Iterator[Limit]:
    """Sets the size that files may have; None for any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_a_step_again_after_a_failure_leaves_nothing_of_the_first(
    kind: str, tmp_path: Path, limit_files: Limit
) -> None:
    first = {f"layer.{number}": torch.full((MIB // 4,), 1.0) for number in range(10)} | {
        "large": torch.ones(3 * MIB)
    }
    second = {f"layer.{number}": torch.full((MIB // 4,), 2.0) for number in range(3)}
    with Checkpointer(tmp_path / "root", on_failure=lambda error: None) as checkpointer:
        # Some files are written when the last one finds no room.
        limit_files(11 * MIB)
        with pytest.raises(OSError, match="too large"):
            save(checkpointer, kind, 1, first).result(60)
        limit_files(None)
        path = save(checkpointer, kind, 1, second).result(60)
        checkpointer.verify(path)
        found = load(path)
        assert found.keys() == second.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in second.items())
        assert [one.step for one in checkpointer.list()] == [1]
        assert sorted(os.listdir(tmp_path / "root")) == [
            ".owner",
            f"{kind}-1",
            f"{kind}-latest",
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_retention_counts_only_durable_steps(kind: str, tmp_path: Path, limit_files: Limit) -> None:
    """Saves that fail or are under way push nothing out, nor does what is no whole checkpoint."""
    small, large = {"w": torch.ones(9)}, {"w": torch.ones(3 * MIB)}
    root = tmp_path / "root"
    steps: list[list[int]] = []

    def on_event(event: str, kind: str, step: int) -> None:
        if event in ("staged", "written", "voted"):
            steps.append([one.step for one in open_readonly(root).list()])

    with Checkpointer(root, keep_last=2, on_failure=lambda error: None, on_event=on_event) as checkpointer:
        for step in (1, 2):
            save(checkpointer, kind, step, small, blocking=True)
        limit_files(MIB)
        for step in (3, 4, 5):
            with pytest.raises(OSError, match="too large"):
                save(checkpointer, kind, step, large).result(60)
            assert [one.step for one in checkpointer.list()] == [1, 2]
        limit_files(None)
        (root / f"{kind}-6").mkdir()
        (root / f"{kind}-6" / "tundish.json").write_text("{}")
        steps.clear()
        save(checkpointer, kind, 7, small, blocking=True)
        assert steps == [[1, 2]] * 3, "nothing goes before what replaces it is there"
        assert [one.step for one in checkpointer.list()] == [2, 7]
        for one in checkpointer.list():
            checkpointer.verify(one.path)
