"""A plan as a folder: what is written, what is read, and what is refused."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.packing.plans import changed

import tundish as td
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    PlanFormatError,
    PlanMismatchError,
)

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
LENGTHS = np.random.default_rng(11).integers(0, 300, 2000)


@pytest.fixture
def plan() -> td.PackPlan:
    return td.pack(LENGTHS, 128, seed=5)


@pytest.fixture
def folder(plan: td.PackPlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan")
    return tmp_path / "plan"


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"order": np.arange(2000)[::-1]}, {"drop_last": False}])
def test_files_written_directly_hold_the_same_bytes(options: dict[str, object], tmp_path: Path) -> None:
    td.pack(LENGTHS, 128, **options).save(tmp_path / "saved")
    td.pack(LENGTHS, 128, out=tmp_path / "direct", **options)
    names = [f"{name}.npy" for name in FIELDS] + ["plan.json"]
    for name in names:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct", "saved"]


@pytest.mark.parametrize("packs", [0, 1, 9, 1000])
def test_numpy_writes_the_same_files(packs: int, tmp_path: Path) -> None:
    """So whatever numpy writes is read: it is byte for byte what this library writes."""
    for name, lengths in {"int32": np.full(packs, 8), "int64": np.full(packs, 2**40)}.items():
        td.pack(lengths, int(lengths.max(initial=8)), out=tmp_path / name)
        for field in FIELDS:
            file = tmp_path / name / f"{field}.npy"
            before = file.read_bytes()
            np.save(file, np.load(file))
            assert file.read_bytes() == before
        td.PackPlan.load(tmp_path / name, lengths).verify()


def reformat(version: tuple[int, int]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        column = np.load(file)
        with file.open("wb") as stream:
            np.lib.format.write_array(stream, column, version=version)

    return change


def reword(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Another header of the same length that means the same, or nothing."""

    def change(file: Path) -> None:
        content = file.read_bytes()
        header, values = content[:128], content[128:]
        assert old in header
        header = header.replace(old, new)
        file.write_bytes(header[:127].ljust(127) + b"\n" + values)

    return change


def align_to_16(file: Path) -> None:
    """As numpy before 1.14 did."""
    content = file.read_bytes()
    text = content[10:128].rstrip()
    text += b" " * (-(10 + len(text) + 1) % 16) + b"\n"
    file.write_bytes(content[:8] + len(text).to_bytes(2, "little") + text + content[128:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reformat((2, 0)), "version 2.0"),
        (reformat((3, 0)), "version 3.0"),
        (align_to_16, "another header"),
        (reword(b"False", b"True "), "another header"),
        (reword(b"'<i4'", b"'=i4'"), "dtype '=i4'"),
        (reword(b"'<i4'", b"'<u4'"), "dtype '<u4'"),
        (reword(b"'<i4'", b"'|O' "), "dtype '.O'"),
        (reword(b"'descr': ", b"'descr':  "), "another header"),
        (reword(b"'descr'", b'"descr"'), "another header"),
        (reword(b", }", b"}"), "another header"),
        (reword(b"(", b"(+"), "another header"),
        (reword(b"(", b"(0"), "another header"),
        (reword(b",)", b")"), "another header"),
        (reword(b"'shape'", b"'shape': (9,), 'shape'"), "another header|truncated|shape"),
    ],
)
def test_a_header_that_numpy_does_not_write_for_us_is_refused(
    folder: Path, change: Callable[[Path], None], says: str
) -> None:
    for field in ("indices", "longest"):
        file = folder / f"{field}.npy"
        kept = file.read_bytes()
        change(file)
        with pytest.raises(PlanFormatError, match=says) as caught:
            td.PackPlan.load(folder)
        assert str(file) in str(caught.value)
        file.write_bytes(kept)
    td.PackPlan.load(folder)


def test_mapped_columns_outlive_the_plan_and_stay_read_only(folder: Path) -> None:
    expected = np.load(folder / "indices.npy")
    column = td.PackPlan.load(folder).indices
    shutil.rmtree(folder)
    gc.collect()
    assert np.array_equal(column, expected)
    with pytest.raises(ValueError, match="WRITEABLE"):
        column.flags.writeable = True


def test_a_mapped_plan_holds_no_file_open(folder: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    plan = td.PackPlan.load(folder)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert len(plan) > 0


def test_saving_the_same_plan_twice_is_fine_and_another_is_refused(plan: td.PackPlan, folder: Path) -> None:
    plan.save(folder)
    with pytest.raises(AlreadyExistsError, match="plan"):
        td.pack(LENGTHS, 64).save(folder)
    with pytest.raises(AlreadyExistsError, match="another plan"):
        td.pack(LENGTHS, 64, out=folder)
    assert td.PackPlan.load(folder).fingerprint == plan.fingerprint
    assert td.pack(LENGTHS, 128, seed=5, out=folder).fingerprint == plan.fingerprint


def test_a_folder_with_other_content_is_left_alone(plan: td.PackPlan, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    for save in (lambda: plan.save(target), lambda: td.pack(LENGTHS, 64, out=target)):
        with pytest.raises(FileExistsError):
            save()
    assert [file.name for file in tmp_path.rglob("*")] == ["mine", "thesis.tex"]
    taken = tmp_path / "file"
    taken.write_text("x")
    with pytest.raises(OSError, match="file"):
        plan.save(taken)
    with pytest.raises(OSError, match="file"):
        td.pack(LENGTHS, 64, cache_dir=taken)
    with pytest.raises(NotFoundError, match="absent"):
        plan.save(tmp_path / "absent" / "plan")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def edit(old: str, new: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))

    return change


def rewrite(**changes: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        column = np.load(file)
        column = column.astype(changes.get("dtype", column.dtype)).reshape(changes.get("shape", column.shape))
        for position, value in dict(changes.get("values", {})).items():
            column[position] = value
        np.save(file, column)

    return change


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("plan.json", lambda file: file.write_text('{"format_version": 1}'), "version 1"),
        ("plan.json", lambda file: file.write_text("{}"), "format_version"),
        ("plan.json", edit('"max_length": 128', '"max_length": 129'), "damaged"),
        ("plan.json", edit('"mode": "hard"', '"mode": "hart"'), "damaged"),
        ("plan.json", edit("\n  ", "\n "), "damaged"),
        ("plan.json", lambda file: file.write_text("{"), "JSON"),
        ("plan.json", lambda file: file.write_bytes(b"\xff\xfe"), "text"),
        ("plan.json", lambda file: file.write_text("[]"), "JSON|format_version"),
        *[(f"{field}.npy", truncate, "truncated") for field in FIELDS],
        *[(f"{field}.npy", lambda file: file.write_bytes(b""), "truncated") for field in FIELDS],
        *[(f"{field}.npy", rewrite(dtype=np.float32), "dtype") for field in FIELDS],
        *[(f"{field}.npy", rewrite(dtype=">i4"), "dtype") for field in FIELDS],
        *[(f"{field}.npy", rewrite(dtype=np.int16), "dtype") for field in FIELDS],
        *[(f"{field}.npy", rewrite(shape=(-1, 1)), "shape") for field in FIELDS],
        ("longest.npy", lambda file: file.write_bytes(file.read_bytes() + b"0"), "too long"),
        ("longest.npy", lambda file: file.write_bytes(b"not an array"), "npy"),
        ("indices_cu_len.npy", rewrite(values={7: -1}), "damaged"),
    ],
)
def test_a_damaged_folder_is_refused_by_file(
    folder: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    damage(folder / name)
    with pytest.raises(PlanFormatError, match=says) as caught:
        td.PackPlan.load(folder)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("name", [*[f"{field}.npy" for field in FIELDS], "plan.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(NotFoundError) as caught:
        td.PackPlan.load(folder)
    assert caught.value.filename == str(folder / name)
    shutil.rmtree(folder)
    with pytest.raises(NotFoundError):
        td.PackPlan.load(folder)


@pytest.mark.parametrize("field", ["dataset_id", "indices", "start_offset", "end_offset", "longest"])
def test_a_flipped_byte_of_a_column_is_never_trained_on(folder: Path, field: str) -> None:
    file = folder / f"{field}.npy"
    good = file.read_bytes()
    samples = [[number] * length for number, length in enumerate(LENGTHS)]
    for position in (128, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        damaged = td.PackPlan.load(folder, LENGTHS)
        dataset = td.PackedDataset(samples, damaged)
        for use in (
            lambda damaged=damaged: damaged[0],
            lambda damaged=damaged: list(damaged),
            lambda dataset=dataset: dataset[len(dataset) - 1],
            damaged.arrays,
            damaged.verify,
            damaged.ledger,
            lambda damaged=damaged: damaged.save(folder.parent / "copy"),
            pickle.loads(pickle.dumps(damaged)).arrays,
        ):
            with pytest.raises(PlanFormatError, match=str(file)):
                use()
    file.write_bytes(good)
    assert list(td.PackPlan.load(folder, LENGTHS)) == list(td.pack(LENGTHS, 128, seed=5))
    assert not (folder.parent / "copy").exists()


@pytest.mark.parametrize("name", ["plan.json", "indices.npy"])
def test_what_is_no_regular_file_is_refused_at_once(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(PlanFormatError, match="regular file"):
        td.PackPlan.load(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(PlanFormatError, match="regular file"):
        td.PackPlan.load(folder)


@pytest.mark.parametrize("path", ["", ".", b"plan", 7])
def test_a_plan_cannot_take_the_place_of_the_current_folder(
    path: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InvalidInputError, InvalidTypeError)):
        td.pack([8], 8, out=path)
    with pytest.raises((InvalidInputError, InvalidTypeError)):
        td.pack([8], 8).save(path)
    assert Path.cwd() == tmp_path and list(tmp_path.iterdir()) == []


def test_negative_numbers_in_columns_reach_nobody() -> None:
    plan = td.pack_datasets([[8], [8]], 8)
    for name in ("dataset_id", "indices", "start_offset", "end_offset"):
        columns = {field: getattr(plan, field).copy() for field in FIELDS}
        columns[name][0] = -1
        with pytest.raises(PlanMismatchError, match=name):
            changed(plan, list(columns.values()))[0]


@pytest.mark.usefixtures("tmp_path_of_all")
def test_a_folder_that_may_not_be_listed_is_loaded_all_the_same(folder: Path) -> None:
    """As root nothing is forbidden, so it is tried as nobody."""
    folder.chmod(0o111)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(PermissionError):
            os.listdir(folder)
        td.PackPlan.load(folder, LENGTHS).verify()
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.mark.parametrize("length", [-1, -5, 2**64 - 1, 2**63])
@pytest.mark.parametrize("global_pack", [False, True])
def test_attached_lengths_that_are_none_reach_nobody(length: int, global_pack: bool) -> None:
    plan = td.pack_datasets([[5, 5], [5, 5]], 5, global_pack=global_pack)
    bad = np.array([5, length], dtype=np.int64 if length < 0 else np.uint64)
    attached = plan.with_lengths([[5, 5], bad])
    assert attached[2].pieces == [td.Piece(2 if global_pack else 0, 0, 5)]
    short = plan.with_lengths([bad, [5, 5]])
    with pytest.raises(PlanMismatchError, match="pack 1 takes sample 1 of dataset 0"):
        short.lookup([0, 1])
