"""The bindings of staging memory, the shard writer and verification."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoint.checkpoint_roots import add_manifest_checksum, crc64

from tundish import _native
from tundish._native import FileImage, FileMetadata, ShardWriter, TensorInspector
from tundish.checkpoint.tensors import INSPECTOR
from tundish.errors import (
    AlreadyExistsError,
    CorruptCheckpointError,
    InvalidInputError,
    NotFoundError,
    OutOfMemoryError,
)

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = _native.staging_stats()["in_use"]
    yield
    gc.collect()
    assert _native.staging_stats()["in_use"] == before, "an image was not given back"
    assert _native.trim_staging() >= 0
    assert _native.staging_stats()["cached"] == 0
    assert not [name for name in thread_names() if name.startswith("tundish-write")]


def thread_names() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:
            continue  # It ended while the list was read.
    return names


def image_of(data: bytes) -> FileImage:
    image = FileImage(len(data))
    memoryview(image)[:] = data
    return image


def new_writer(folder: Path, *files: tuple[str, int], checksum: bool = True) -> ShardWriter:
    return ShardWriter(folder, files, checksum=checksum)


def test_an_image_is_memory_that_torch_and_python_share() -> None:
    image = FileImage(3 * MIB + 5)
    assert image.size == 3 * MIB + 5 and image.address % 4096 == 0
    view = memoryview(image)
    assert (view.nbytes, view.readonly, view.format) == (image.size, False, "B")
    tensor = torch.frombuffer(image, dtype=torch.uint8)
    assert tensor.data_ptr() == image.address
    tensor.fill_(7)
    view[1] = 9
    assert tensor[:3].tolist() == [7, 9, 7]
    halves = torch.frombuffer(image, dtype=torch.bfloat16, count=4, offset=2)
    halves.copy_(torch.tensor([1.5, -2.0, 0.0, float("inf")]))
    assert bytes(view[2:10]).hex() == "c03f00c00000807f"
    assert memoryview(FileImage(0)).nbytes == 0


def test_memory_lives_as_long_as_a_view_of_it_and_is_used_again() -> None:
    before = _native.staging_stats()["in_use"]
    image = FileImage(2 * MIB)
    tensor = torch.frombuffer(image, dtype=torch.uint8)
    tensor.fill_(3)
    address = image.address
    del image
    gc.collect()
    assert _native.staging_stats()["in_use"] == before + 2 * MIB
    assert int(tensor.sum()) == 3 * 2 * MIB
    del tensor
    gc.collect()
    assert _native.staging_stats()["in_use"] == before
    assert FileImage(2 * MIB - 9).address == address
    assert _native.staging_stats()["cached"] >= 2 * MIB


def test_saves_of_changing_sizes_take_no_more_memory_than_the_largest() -> None:
    _native.trim_staging()
    sizes = [[70 * MIB + 3], [20 * MIB, 50 * MIB + 1], [71 * MIB], [5 * MIB] * 14, [70 * MIB + 3]]
    held = []
    for images in sizes:
        taken = [FileImage(size) for size in images]
        stats = _native.staging_stats()
        held.append(stats["in_use"] + stats["cached"])
        del taken
    assert max(held) <= 1.05 * 71 * MIB


@pytest.mark.parametrize("size", [2**62, 2**63 - 1])
def test_memory_that_cannot_be_is_refused_with_the_size(size: int) -> None:
    with pytest.raises(OutOfMemoryError, match=str(size)) as refusal:
        FileImage(size)
    assert isinstance(refusal.value, MemoryError)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("inspector", [INSPECTOR, None], ids=["read together", "asked one by one"])
def test_an_image_is_filled_with_tensors_that_lie_in_memory_as_in_the_file(
    inspector: TensorInspector | None, threads: int
) -> None:
    # More than a thread begins with while the rest is looked at.
    numbers = torch.arange(11 * MIB, dtype=torch.int32)
    tensors = [numbers[:5], numbers[5 : 5 * MIB], numbers[:0], numbers[:6].view(2, 3).t(), numbers[5 * MIB :]]
    tensors[3:3] = [torch.arange(8, dtype=torch.int16), numbers[7:9].view(torch.float32)]
    image = FileImage(sum(tensor.nbytes for tensor in tensors) + 300)
    memory = torch.frombuffer(image, dtype=torch.uint8).fill_(0xA5)
    expected, places = memory.clone(), []
    start = 100
    for number, tensor in enumerate(tensors):
        places.append((start, start + tensor.nbytes, torch.int32 if number != 3 else torch.int16))
        if number not in (4, 5):
            expected[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        start += tensor.nbytes + (64 if number == 1 else 0)
    copy = image.begin_copy(places, tensors, threads, inspector)
    assert copy.left == [4, 5]
    copy.finish()
    assert memory.equal(expected)
    with pytest.raises(ValueError, match="finished or aborted before"):
        copy.finish()


@pytest.mark.parametrize("how", ["aborted", "dropped"])
def test_an_abandoned_copy_ends(how: str) -> None:
    tensors = [torch.ones(64 * MIB, dtype=torch.uint8)] * 8
    places = [(number * 64 * MIB, (number + 1) * 64 * MIB, torch.uint8) for number in range(8)]
    image = FileImage(512 * MIB)
    memory = torch.frombuffer(image, dtype=torch.uint8).zero_()
    copy = image.begin_copy(places, tensors, 2, INSPECTOR)
    if how == "aborted":
        copy.abort()
        copy.abort()
        with pytest.raises(ValueError, match="finished or aborted before"):
            copy.finish()
    del copy
    memory.zero_()
    time.sleep(0.05)
    assert not memory.any()


@pytest.mark.parametrize(
    ("places", "message"),
    [([(0, 4), (3, 8)], r"place 1 is 3\.\.8, after 4"), ([(4, 8), (0, 4)], "place 1"), ([(8, 4)], "place 0")],
)
def test_places_out_of_order_are_refused(places: list[tuple[int, int]], message: str) -> None:
    given = [(*place, torch.uint8) for place in places]
    with pytest.raises(ValueError, match=message):
        FileImage(8).begin_copy(given, [torch.ones(4, dtype=torch.uint8)] * len(given), 1, INSPECTOR)


@pytest.mark.parametrize("wrong", [0, 1, 19])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("inspector", [INSPECTOR, None], ids=["read together", "asked one by one"])
def test_nothing_is_copied_beyond_its_place(
    inspector: TensorInspector | None, threads: int, wrong: int
) -> None:
    tensors = [torch.ones(MIB, dtype=torch.uint8)] * 20
    places = [(number * MIB, (number + 1) * MIB, torch.uint8) for number in range(20)]
    image = FileImage(20 * MIB)
    memory = torch.frombuffer(image, dtype=torch.uint8).fill_(0)
    for size in (MIB - 1, MIB + 1):
        given = [*tensors[:wrong], torch.full((size,), 2, dtype=torch.uint8), *tensors[wrong + 1 :]]
        with pytest.raises(ValueError, match=f"place {wrong} is not as large as its tensor"):
            image.begin_copy(places, given, threads, inspector)
        assert not memory.eq(2).any()
    for given in (tensors[1:], [*tensors, tensors[0]]):
        with pytest.raises(ValueError, match="places for"):
            image.begin_copy(places, given, threads, inspector)
    with pytest.raises(ValueError, match="place 19 ends at 20971520, after the image"):
        FileImage(20 * MIB - 1).begin_copy(places, tensors, threads, inspector)
    copy = image.begin_copy(places, tensors, threads, inspector)
    copy.finish()
    assert copy.left == []
    assert memory.eq(1).all()


@pytest.mark.parametrize("left", [0, 4, 15])
@pytest.mark.parametrize("inspector", [INSPECTOR, None], ids=["read together", "asked one by one"])
def test_a_tensor_whose_storage_ends_before_it_does_is_not_read(
    inspector: TensorInspector | None, left: int
) -> None:
    whole, cut = torch.ones(8, dtype=torch.uint8), torch.ones(24, dtype=torch.uint8)[8:]
    cut.untyped_storage().resize_(8 + left)
    image = FileImage(24)
    memory = torch.frombuffer(image, dtype=torch.uint8).zero_()
    places = [(0, 8, torch.uint8), (8, 24, torch.uint8)]
    copy = image.begin_copy(places, [whole, cut], 1, inspector)
    copy.finish()
    assert copy.left == [1]
    assert memory.tolist() == [1] * 8 + [0] * 16


def test_files_hold_the_bytes_and_their_checksums(tmp_path: Path) -> None:
    data = {"a": os.urandom(70_001), "sub/folder/b": os.urandom(4096), "empty": b""}
    writer = new_writer(tmp_path, *((name, len(contents)) for name, contents in data.items()))
    image = image_of(data["a"])
    writer.write("a", 4096, image, 4096, 70_001 - 4096)
    writer.write("a", 0, image, 0, 4096)
    del image
    writer.write("sub/folder/b", 0, image_of(b"lead" + data["sub/folder/b"]), 4, 4096)
    facts = writer.finish()
    assert facts == [FileMetadata(name, len(contents), crc64(contents)) for name, contents in data.items()]
    assert {name: (tmp_path / name).read_bytes() for name in data} == data
    assert writer.progress() == (74_097, 74_097)
    assert writer.finish() == facts


def test_facts_are_values() -> None:
    facts = FileMetadata("a", 5, crc64(b"bytes"))
    assert (facts.name, facts.size, facts.checksum) == ("a", 5, crc64(b"bytes"))
    assert facts == FileMetadata("a", 5, crc64(b"bytes")) and hash(facts) == hash(
        FileMetadata("a", 5, crc64(b"bytes"))
    )
    assert facts != FileMetadata("a", 5, None)
    assert eval(repr(facts)) == facts
    with pytest.raises(InvalidInputError, match="md5"):
        FileMetadata("a", 5, "md5:00")


def test_without_checksums_there_are_none(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, ("a", 3), checksum=False)
    writer.write("a", 0, image_of(b"abc"), 0, 3)
    assert writer.finish() == [FileMetadata("a", 3, None)]


def test_others_run_while_a_writer_is_waited_for(tmp_path: Path) -> None:
    size = 400 * MIB
    writer = new_writer(tmp_path, ("a", size))
    image = FileImage(size)
    memoryview(image)[::4096] = bytes(size // 4096)
    ticks, over = [0], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    writer.write("a", 0, image, 0, size)
    before, start = ticks[0], time.monotonic()
    writer.finish()
    # A thread that needs the GIL gets on during the whole wait.
    expected = (time.monotonic() - start) / 0.05
    over.set()
    thread.join()
    # time: a tick takes a millisecond, and has 50 of them
    assert ticks[0] - before >= min(expected, 2)


@pytest.mark.parametrize("abort", [True, False])
def test_an_aborted_or_dropped_writer_holds_nothing(tmp_path: Path, abort: bool) -> None:
    size = 300 * MIB
    writer = new_writer(tmp_path, ("a", size))
    writer.write("a", 0, FileImage(size), 0, size)
    if abort:
        writer.abort()
        with pytest.raises(InvalidInputError, match="aborted"):
            writer.finish()
        with pytest.raises(InvalidInputError, match="aborted"):
            writer.write("a", 0, FileImage(1), 0, 1)
        writer.abort()
    del writer  # The fixture looks for what is left.


def test_bad_input_is_refused_with_the_file(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, ("a", 10), ("b", 10))
    image = FileImage(20)
    for name, offset, start, length in [
        ("c", 0, 0, 1),
        ("a", 5, 0, 6),
        ("a", 0, 15, 6),
        ("a", 2**64 - 1, 0, 1),
        ("a", 0, 2**64 - 1, 1),
    ]:
        with pytest.raises(InvalidInputError, match=str(tmp_path / name)):
            writer.write(name, offset, image, start, length)
    writer.write("a", 0, image, 0, 10)
    with pytest.raises(InvalidInputError, match="submitted before"):
        writer.write("a", 9, image, 0, 1)
    with pytest.raises(InvalidInputError, match=str(tmp_path / "b")):
        writer.finish()
    writer.write("b", 0, image, 0, 10)
    assert [facts.name for facts in writer.finish()] == ["a", "b"]
    with pytest.raises(AlreadyExistsError, match="a") as refusal:
        new_writer(tmp_path, ("a", 10))
    assert refusal.value.filename == str(tmp_path / "a")
    with pytest.raises(NotFoundError):
        new_writer(tmp_path / "missing", ("a", 10))
    for name in ("../a", "/a", "", "tundish.json", "x/../y", "a\0b"):
        with pytest.raises(InvalidInputError):
            new_writer(tmp_path, (name, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def write_checkpoint(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    facts = [_native.write_small_file(folder, name, contents) for name, contents in files.items()]
    manifest = {
        "format_version": 1,
        "kind": "hf",
        "step": 3,
        "files": [{"name": one.name, "size": one.size, "checksum": one.checksum} for one in facts],
    }
    (folder / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest, indent=2)))


def test_sidecars_and_files_of_others_are_summed(tmp_path: Path) -> None:
    facts = _native.write_small_file(tmp_path, "sub/config.json", b"{}")
    assert facts == FileMetadata("sub/config.json", 2, crc64(b"{}"))
    assert (tmp_path / "sub/config.json").read_bytes() == b"{}"
    with pytest.raises(AlreadyExistsError):
        _native.write_small_file(tmp_path, "sub/config.json", b"[]")
    assert _native.checksum_file(tmp_path / "sub/config.json") == FileMetadata("config.json", 2, crc64(b"{}"))
    with pytest.raises(NotFoundError) as refusal:
        _native.checksum_file(tmp_path / "missing")
    assert refusal.value.filename == str(tmp_path / "missing")
    with pytest.raises(InvalidInputError):
        _native.write_small_file(tmp_path, "../out", b"")


def test_verification_names_every_file_that_is_not_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "hf-3"
    files = {"model": os.urandom(20 * MIB), "sub/config.json": b"{}", "lost": b"x", "cut": bytes(5000)}
    write_checkpoint(folder, files)
    seen: list[tuple[str, int, int]] = []
    _native.verify_checkpoint(folder, progress=lambda *update: seen.append(update))
    assert all(phase == "verify" and done <= total for phase, done, total in seen)
    (folder / "lost").unlink()
    (folder / "more").write_bytes(b"")
    os.truncate(folder / "cut", 4999)
    with (folder / "model").open("r+b") as file:
        file.seek(11 * MIB)
        byte = file.read(1)[0]
        file.seek(11 * MIB)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CorruptCheckpointError) as found:
        _native.verify_checkpoint(folder)
    assert found.value.paths == ("cut", "lost", "model", "more")
    assert str(folder) in str(found.value) and "cut has 4999 bytes" in str(found.value)
    with pytest.raises(NotFoundError):
        _native.verify_checkpoint(tmp_path / "hf-4")


def test_an_error_of_the_progress_callback_ends_the_verification(tmp_path: Path) -> None:
    # A hole that takes longer to read than the time to the first look at the callback.
    size = 8192 * MIB
    with (tmp_path / "model").open("wb") as file:
        file.truncate(size)
    files = [{"name": "model", "size": size, "checksum": f"crc64nvme:{0:016x}"}]
    manifest = {"format_version": 1, "kind": "hf", "step": 3, "files": files}
    (tmp_path / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest)))

    def refuse(phase: str, done: int, total: int) -> None:
        raise RuntimeError(f"{phase} {total}")

    with pytest.raises(RuntimeError, match=f"verify {size}"):
        _native.verify_checkpoint(tmp_path, progress=refuse)
