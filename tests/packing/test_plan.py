"""`PackPlan`: its folder, its look-ups, its check, its figures."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_what_is_saved_is_loaded(plan: td.PackPlan, folder: Path) -> None:
    loaded = td.PackPlan.load(folder, LENGTHS)
    assert loaded.path == folder
    assert loaded.facts == plan.facts
    for name in FIELDS:
        column = getattr(loaded, name)
        assert column.dtype == np.int32
        assert not column.flags.writeable
        assert np.array_equal(column, getattr(plan, name))
    assert list(loaded) == list(plan)
    loaded.verify()


def test_the_files_are_plain_npy(plan: td.PackPlan, folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        [f"{name}.npy" for name in FIELDS] + ["plan.json"]
    )
    for name in FIELDS:
        column = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        assert np.array_equal(column, getattr(plan, name))
    assert json.loads((folder / "plan.json").read_text())["fingerprint"] == plan.fingerprint


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"order": np.arange(2000)[::-1]}, {"drop_last": False}])
def test_files_written_directly_hold_the_same_bytes(options: dict[str, object], tmp_path: Path) -> None:
    td.pack(LENGTHS, 128, **options).save(tmp_path / "saved")
    td.pack(LENGTHS, 128, out=tmp_path / "direct", **options)
    names = [f"{name}.npy" for name in FIELDS] + ["plan.json"]
    for name in names:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct", "saved"]


def test_without_lengths_the_stops_of_whole_pieces_are_open(plan: td.PackPlan, folder: Path) -> None:
    loaded = td.PackPlan.load(folder)
    assert plan.has_lengths and not loaded.has_lengths
    for open_pack, full_pack in zip(loaded, plan, strict=True):
        *inner, last = open_pack.pieces
        assert all(piece.stop is None for piece in inner)
        assert last == full_pack.pieces[-1]
        for left, right in zip(open_pack.pieces, full_pack.pieces, strict=True):
            assert left[:2] == right[:2]


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


def set_fact(name: str, value: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        facts = json.loads(file.read_text())
        facts[name] = value
        file.write_text(json.dumps(facts))

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
        ("plan.json", set_fact("format_version", 2), "version 2"),
        ("plan.json", set_fact("format_version", None), "format_version"),
        ("plan.json", set_fact("max_length", 0), "max_length"),
        ("plan.json", set_fact("packs", -1), "-1"),
        ("plan.json", set_fact("surprise", 1), "surprise"),
        ("plan.json", set_fact("mode", "other"), "other"),
        ("plan.json", set_fact("fingerprint", "x"), "fingerprint"),
        ("plan.json", set_fact("tokens_packed", 1), "tokens"),
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
        ("indices_cu_len.npy", rewrite(values={0: 0}), "add up"),
        ("indices_cu_len.npy", rewrite(values={7: -1}), "add up"),
        ("indices_cu_len.npy", rewrite(values={-1: 10**6}), "add up"),
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


def test_damage_that_loading_cannot_see_is_found_in_use(folder: Path) -> None:
    """Values inside the columns are not all checked on loading; they must never be trusted with memory."""
    rewrite(values={0: 2**31 - 1, 5: -7})(folder / "indices.npy")
    damaged = td.PackPlan.load(folder, LENGTHS)
    with pytest.raises(PlanMismatchError, match="no such sample"):
        damaged[0]
    with pytest.raises(PlanMismatchError, match="pack 0"):
        damaged.verify()


def test_verify_finds_any_changed_value(tmp_path: Path) -> None:
    lengths = LENGTHS[:15]
    plan = td.pack(lengths, 128, seed=5)
    for name in FIELDS:
        for position in range(len(getattr(plan, name))):
            folder = tmp_path / "plan"
            plan.save(folder)
            rewrite(values={position: int(getattr(plan, name)[position]) + 1})(folder / f"{name}.npy")
            try:
                broken = td.PackPlan.load(folder, lengths)
            except PlanFormatError:
                broken = None
            if broken is not None:
                with pytest.raises(PlanMismatchError):
                    broken.verify()
            shutil.rmtree(folder)


def test_verify_against_other_lengths(plan: td.PackPlan) -> None:
    other = LENGTHS.copy()
    other[np.flatnonzero(other)[3]] -= 1
    with pytest.raises(PlanMismatchError):
        plan.verify(other)
    with pytest.raises(PlanMismatchError, match="2000"):
        plan.verify(LENGTHS[:-1])
    swapped = LENGTHS.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    with pytest.raises(PlanMismatchError):
        plan.verify(swapped)
    unattached = pickle.loads(pickle.dumps(plan))
    unattached.verify(LENGTHS)


def test_verify_needs_lengths(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="lengths"):
        td.PackPlan.load(folder).verify()
    with pytest.raises(PlanMismatchError):
        td.PackPlan.load(folder, LENGTHS[1:])


def test_getitem(plan: td.PackPlan) -> None:
    everything = list(plan)
    assert plan[-1] == everything[-1]
    assert plan[np.int64(3)] == everything[3]
    assert plan[2:7] == everything[2:7]
    assert plan[::-500] == everything[::-500]
    for bad in (len(plan), -len(plan) - 1):
        with pytest.raises(IndexError, match=str(len(plan))):
            plan[bad]
    with pytest.raises(TypeError):
        plan["0"]


def test_lookup_is_many_getitems(plan: td.PackPlan) -> None:
    ids = np.random.default_rng(0).integers(0, len(plan), 300)
    for wanted in (ids, ids.tolist(), ids.astype(np.uint16), ids[::-2], []):
        assert list(plan.lookup(wanted)) == [plan[int(i)] for i in wanted]
    for bad in ([len(plan)], [-1]):
        with pytest.raises(IndexError):
            plan.lookup(bad)
    with pytest.raises(TypeError):
        plan.lookup([0.5])


def _packs_of(plan: td.PackPlan) -> list[td.Pack]:
    return list(plan)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_plans_travel_to_workers(plan: td.PackPlan, folder: Path, method: str, mapped: bool) -> None:
    sent = td.PackPlan.load(folder, LENGTHS) if mapped else plan
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        assert pool.submit(_packs_of, sent).result(timeout=60) == list(plan)


def test_a_mapped_plan_is_small_to_pickle(folder: Path) -> None:
    assert len(pickle.dumps(td.PackPlan.load(folder))) < 1000


def test_mapped_lengths_travel_as_where_they_lie(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    lengths = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    plan = td.pack(lengths, 128, out=tmp_path / "plan")
    pickled = pickle.dumps(plan)
    assert len(pickled) < 1000
    assert list(pickle.loads(pickled)) == list(plan)
    part = pickle.loads(pickle.dumps(td.pack(lengths[3:900], 128)))
    assert list(part) == list(td.pack(LENGTHS[3:900], 128))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 40), st.booleans(), st.integers(0, 9))
def test_stats_add_up(lengths: list[int], max_length: int, drop_last: bool, seed: int) -> None:
    plan = td.pack(lengths, max_length, seed=seed, drop_last=drop_last)
    stats = plan.stats()
    packs_of_sample: dict[int, int] = {}
    taken: dict[int, int] = {}
    for pack in plan:
        for piece in pack.pieces:
            packs_of_sample[piece.sample] = packs_of_sample.get(piece.sample, 0) + 1
            taken[piece.sample] = taken.get(piece.sample, 0) + piece.stop - piece.start
    cut = {sample for sample, count in packs_of_sample.items() if count > 1}
    cut |= {sample for sample, tokens in taken.items() if tokens < lengths[sample]}
    assert stats["samples"] == len(packs_of_sample)
    assert stats["samples_cut"] == len(cut)
    assert stats["tokens"] == sum(lengths)
    assert stats["tokens_packed"] == sum(taken.values())
    assert stats["tokens_dropped"] == sum(lengths) - sum(taken.values())
    counts = [len(pack.pieces) for pack in plan]
    assert stats["max_pieces_per_pack"] == max(counts, default=0)
    assert stats["pieces_per_pack"] == (sum(counts) / len(counts) if counts else 0)
    assert stats["longest"] == max((p.stop - p.start for pack in plan for p in pack.pieces), default=0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from(["natural", "seed", "given"]),
)
def test_sample_index_is_megatrons(lengths: list[int], max_length: int, kind: str) -> None:
    """Row i is the position in the order, and the offset, of token i * max_length."""
    order = list(range(len(lengths)))
    options: dict[str, object] = {}
    if kind == "seed":
        order = td.packing.shuffled_indices(len(lengths), 3).tolist()
        options = {"seed": 3}
    elif kind == "given":
        order.reverse()
        options = {"order": order}
    plan = td.pack(lengths, max_length, **options)
    tokens = [(position, offset) for position, s in enumerate(order) for offset in range(lengths[s])]
    found = plan.sample_index(order if kind == "given" else None)
    assert [tuple(row) for row in found.tolist()] == tokens[::max_length]


def test_sample_index_needs_one_stream() -> None:
    with pytest.raises(InvalidInputError, match="global_pack"):
        td.pack_datasets([[5], [5]], 2).sample_index()
    assert td.pack_datasets([[5], [5]], 4, global_pack=True).sample_index().tolist() == [
        [0, 0],
        [0, 4],
        [1, 3],
    ]


def test_impossible_requests_are_errors_not_the_end_of_the_process() -> None:
    plan = td.pack(np.ones(100, dtype=np.int8), 10)
    with pytest.raises(InvalidInputError, match="memory"):
        plan.lookup(np.broadcast_to(np.int64(0), 2**44))
    for threads in (0, -1, 2**70, True, "x", 1.5):
        with pytest.raises((InvalidInputError, InvalidTypeError), match="threads"):
            plan.verify(threads=threads)


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


def test_negative_numbers_in_a_folder_reach_nobody(tmp_path: Path) -> None:
    for name in ("dataset_id", "indices", "start_offset", "end_offset"):
        folder = tmp_path / name
        td.pack_datasets([[8], [8]], 8, out=folder)
        rewrite(values={0: -1})(folder / f"{name}.npy")
        with pytest.raises(PlanMismatchError, match=name):
            td.PackPlan.load(folder)[0]


def test_the_facts_are_a_copy(plan: td.PackPlan) -> None:
    plan.facts["samples"].append(9)
    assert plan.facts["samples"] == [2000]


def test_repr_names_the_plan(folder: Path) -> None:
    text = repr(td.PackPlan.load(folder))
    assert "packs of 128 tokens" in text and str(folder) in text
