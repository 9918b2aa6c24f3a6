"""A frame and the bytes of a tensor are exactly what torch.save writes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from tundish.checkpoint.dcp.format import ALIGNMENT, record_frame_of

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
]
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (64, 512), (300, 7, 5)]


def item_of(tensor: torch.Tensor) -> bytes:
    frame = record_frame_of(tensor.dtype, tensor.shape)
    return frame.head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() + frame.tail


def records_of(archive: bytes) -> dict[str, tuple[int, int]]:
    """Size and start of the data of each record."""
    records = {}
    for entry in zipfile.ZipFile(io.BytesIO(archive)).infolist():
        lengths = archive[entry.header_offset + 26 :][:4]
        name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
        records[entry.filename] = (entry.file_size, entry.header_offset + 30 + name + extra)
        assert entry.compress_type == zipfile.ZIP_STORED
    return records


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_item_equals_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(size, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    tensor = data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    ours, stream = item_of(tensor), io.BytesIO()
    torch.save(tensor, stream)
    theirs = stream.getvalue()

    found, expected = records_of(ours), records_of(theirs)
    assert found == expected
    for name, (length, start) in found.items():
        assert start % ALIGNMENT == 0
        # The number by which torch tells files apart in its own logs depends on checksums.
        if name != "archive/.data/serialization_id":
            assert ours[start : start + length] == theirs[start : start + length], name

    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert item_of(loaded) == ours


@pytest.mark.parametrize("size", [(1 << 32) - 2, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_tensors_beyond_32_bits_are_read(tmp_path: Path, size: int) -> None:
    frame = record_frame_of(torch.uint8, torch.Size((size,)))
    path = tmp_path / "item"
    with path.open("wb") as file:
        # A hole in the file in the place of gigabytes.
        file.write(frame.head)
        file.seek(size - 1, io.SEEK_CUR)
        file.write(b"\7" + frame.tail)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (size,)
    assert loaded[-1] == 7 and loaded[0] == 0
    names = [entry.filename for entry in zipfile.ZipFile(path).infolist()]
    assert zipfile.ZipFile(path).getinfo("archive/data/0").file_size == size
    assert "archive/version" in names


def test_a_frame_takes_no_memory_of_its_tensor() -> None:
    frame = record_frame_of(torch.float32, torch.Size((1 << 30, 1 << 12)))
    assert len(frame.head) + len(frame.tail) < 2048
