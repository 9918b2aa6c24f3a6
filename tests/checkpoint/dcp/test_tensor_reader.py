"""Tensors are read directly into their targets, with the same values as torch's reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import new_planner, save
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from tundish.checkpoint.dcp.reader import TensorReader, _fill

STATE = {
    "rows": torch.arange(60.0).reshape(5, 3, 4),
    "scalar": torch.tensor(7, dtype=torch.int32),
    "empty": torch.zeros(0, 3),
    "half": torch.arange(9).to(torch.bfloat16),
    "truth": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "unsigned": torch.arange(5).to(torch.uint16),
}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    planner = new_planner()
    save(planner, dict(STATE), tmp_path / "saved")
    return tmp_path / "saved"


def reader_of(folder: Path) -> TensorReader:
    """Of a folder without a manifest, as torch writes it."""
    published: Any = SimpleNamespace(path=folder, open=lambda file: (folder / file).open("rb"))
    return TensorReader(published)


def load(reader: FileSystemReader, targets: dict[str, Any], **asked: tuple[list[int], list[int]]) -> None:
    """Load into the targets; of those that are `asked` for, what lies at these offsets and of these lengths."""
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner()
    reader.set_up_storage_reader(metadata, False)
    planner.set_up_planner({name: torch.empty_like(STATE[name]) for name in targets}, metadata, False)
    items = [
        narrowed(item, *asked[item.dest_index.fqn]) if item.dest_index.fqn in asked else item
        for item in planner.create_local_plan().items
    ]
    planner.state_dict = dict(targets)
    reader.read_data(LoadPlan(items), planner).wait()


def narrowed(item: ReadItem, offsets: list[int], lengths: list[int]) -> ReadItem:
    zeros = torch.Size([0] * len(lengths))
    return dataclasses.replace(
        item, storage_offsets=torch.Size(offsets), lengths=torch.Size(lengths), dest_offsets=zeros
    )


def left_to_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of items that torch's reader reads from now on."""
    names: list[str] = []
    read_data = FileSystemReader.read_data

    def noting(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        names.extend(item.dest_index.fqn for item in plan.items)
        return read_data(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", noting)
    return names


@pytest.mark.parametrize("name", STATE)
def test_every_kind_of_tensor_is_read_into_its_target(
    name: str, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = left_to_torch(monkeypatch)
    target = torch.zeros_like(STATE[name])
    before = target._version
    load(reader_of(ours), {name: target})
    assert torch.equal(target, STATE[name])
    assert target._version > before or not target.numel(), "autograd would not notice"
    assert not names


@pytest.mark.parametrize(
    ("offsets", "lengths"), [([1, 0, 0], [3, 3, 4]), ([2, 1, 1], [2, 2, 3]), ([4, 0, 3], [1, 3, 1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_equal_those_of_torchs_reader(
    offsets: list[int], lengths: list[int], dtype: torch.dtype, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, target = torch.zeros(lengths, dtype=dtype), torch.zeros(lengths, dtype=dtype)
    load(FileSystemReader(ours), {"rows": expected}, rows=(offsets, lengths))
    names = left_to_torch(monkeypatch)
    load(reader_of(ours), {"rows": target}, rows=(offsets, lengths))
    assert torch.equal(target, expected)
    assert expected.any()
    assert not names


def test_a_noncontiguous_target_is_loaded(ours: Path) -> None:
    target = torch.zeros(4, 3, 5).permute(2, 1, 0)
    around = torch.zeros(18)
    load(reader_of(ours), {"rows": target, "half": around[::2]})
    assert torch.equal(target, STATE["rows"])
    assert torch.equal(around[::2], torch.arange(9.0))
    assert not around[1::2].any()


def test_a_strided_column_is_loaded(ours: Path) -> None:
    # torch calls it contiguous, whatever its stride.
    around = torch.zeros(1, 3, dtype=torch.bfloat16)
    load(reader_of(ours), {"half": around[:, 1]}, half=([4], [1]))
    assert around.tolist() == [[0, 4, 0]]


def test_other_record_formats_are_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch writes checksums into its frames.
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"rows": STATE["rows"]}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    names = left_to_torch(monkeypatch)
    target = torch.zeros(5, 3, 4)
    load(reader_of(tmp_path / "theirs"), {"rows": target})
    assert torch.equal(target, STATE["rows"])
    assert names == ["rows"]


def test_reads_stay_within_the_memory_of_a_tensor(ours: Path) -> None:
    target = torch.zeros(5, 3, 4)
    target.untyped_storage().resize_(100)
    with (ours / "__0_0.distcp").open("rb", buffering=0) as file:
        assert not _fill(target, file, 0)
    assert not any(target.untyped_storage())
