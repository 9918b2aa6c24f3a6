"""`PackPlan`: its look-ups, its figures, its travels to other processes."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, OutOfMemoryError, PlanMismatchError

LENGTHS = np.random.default_rng(11).integers(0, 300, 2000)


@pytest.fixture
def plan() -> td.PackPlan:
    return td.pack(LENGTHS, 128, seed=5)


@pytest.fixture
def folder(plan: td.PackPlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan")
    return tmp_path / "plan"


def test_getitem(plan: td.PackPlan) -> None:
    everything = list(plan)
    assert plan[-1] == everything[-1]
    assert plan[np.int64(3)] == everything[3]
    assert plan[2:7] == everything[2:7]
    assert plan[::-500] == everything[::-500]
    for bad in (len(plan), -len(plan) - 1):
        with pytest.raises(IndexError, match=str(len(plan))):
            plan[bad]
    with pytest.raises(InvalidTypeError, match="by its number, got '0'"):
        plan["0"]  # type: ignore[call-overload]
    with pytest.raises(InvalidTypeError, match=r"a slice of integers, got slice\('a', None, None\)"):
        plan["a":]  # type: ignore[misc]
    with pytest.raises(InvalidInputError, match=r"whose step is not 0, got slice\(None, None, 0\)"):
        plan[::0]


def test_lookup_is_many_getitems(plan: td.PackPlan) -> None:
    ids = np.random.default_rng(0).integers(0, len(plan), 300)
    for wanted in (ids, ids.tolist(), ids.astype(np.uint16), ids[::-2], []):
        assert list(plan.lookup(wanted)) == [plan[int(i)] for i in wanted]
    for bad in ([len(plan)], [-1]):
        with pytest.raises(IndexError):
            plan.lookup(bad)
    with pytest.raises(TypeError):
        plan.lookup([0.5])


def test_looking_up_lengths_takes_no_longer_with_many_datasets() -> None:
    datasets = [np.array([3, 0, 5], dtype=np.int16)] * 10_000
    plan = td.pack_datasets(datasets, 4, global_pack=True)
    bare = td.packing.PackPlan(plan._columns, plan._metadata_json)
    packs = np.arange(len(plan) - 1000, len(plan))

    def best(plan: td.PackPlan) -> float:
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            plan.lookup(packs)
            times.append(time.perf_counter() - begun)
        return min(times)

    # Looked for dataset by dataset, they took hundreds of times as long.
    assert best(plan) < 20 * best(bare)
    joined = td.pack(np.concatenate(datasets), 4)
    assert np.array_equal(plan.lookup(packs).stop, joined.lookup(packs).stop)


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
    assert stats["samples_empty"] == lengths.count(0)
    assert (stats["samples_overlong"], stats["padding_align"]) == (0, 0)
    assert stats["padding"] == len(plan) * max_length - sum(taken.values())
    counts = [len(pack.pieces) for pack in plan]
    assert stats["max_pieces_per_pack"] == max(counts, default=0)
    assert stats["pieces_per_pack"] == (sum(counts) / len(counts) if counts else 0)
    assert stats["longest"] == max((p.stop - p.start for pack in plan for p in pack.pieces), default=0)


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=6), st.integers(1, 40))
def test_stats_of_datasets_are_those_of_each(datasets: list[list[int]], max_length: int) -> None:
    stats = td.pack_datasets(datasets, max_length).stats()
    alone = [td.pack(lengths, max_length).stats() for lengths in datasets]
    for key in ("packs", "pieces", "samples", "samples_cut", "tokens", "tokens_packed", "tokens_dropped"):
        assert stats[key] == sum(each[key] for each in alone), key


def test_stats_take_no_memory_for_each_pack() -> None:
    # Two datasets, each with a tail: where it begins is looked up in a column of eight million packs.
    plan = td.pack_datasets([[7 * 4_000_000 + 3]] * 2, 7)
    tracemalloc.start()
    try:
        stats = plan.stats()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stats["packs"] == 8_000_000 and stats["tokens_dropped"] == 6
    assert most < 2 * len(plan), "less than half of one column"


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


def test_sample_index_takes_the_order_and_the_lengths_of_the_plan(tmp_path: Path) -> None:
    lengths, order = [8, 0, 5, 3, 4], [3, 2, 1, 0, 4]
    plan = td.pack(lengths, 8, order=order, out=tmp_path / "plan")
    for same in (order, np.array(order, np.uint64), np.repeat(order, 2)[::2]):
        assert plan.sample_index(same).tolist() == [[0, 0], [3, 0], [4, 0]]
    with pytest.raises(InvalidInputError, match="order="):
        plan.sample_index()
    for other in ([3, 2, 0, 1, 4], order[1:], []):
        with pytest.raises(PlanMismatchError):
            plan.sample_index(other)
    with pytest.raises(InvalidInputError, match="load the plan with lengths="):
        td.PackPlan.load(tmp_path / "plan").sample_index(order)
    with pytest.raises(PlanMismatchError):
        td.PackPlan.load(tmp_path / "plan", [8, 0, 5, 4, 3]).sample_index(order)
    with pytest.raises(PlanMismatchError, match="leave the order out"):
        td.pack(lengths, 8).sample_index(order)
    with pytest.raises(InvalidInputError, match="repeats packs"):
        td.pack(lengths, 8, multiple_of=4, remainder="repeat").sample_index()


def test_sample_index_is_wide_where_it_has_to_be() -> None:
    assert td.pack([2**32 + 7], 2**31).sample_index().dtype == np.int64
    narrow = td.pack([2**31, 3], 2**31).sample_index()
    assert narrow.dtype == np.int32 and narrow.tolist() == [[0, 0], [1, 0]]
    assert td.pack([], 8).sample_index().shape == (0, 2)


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
    with pytest.raises(OutOfMemoryError, match="memory"):
        plan.lookup(np.broadcast_to(np.int64(0), 2**44))
    for threads in (0, -1, 2**70, True, "x", 1.5):
        with pytest.raises((InvalidInputError, InvalidTypeError), match="threads"):
            plan.verify(threads=threads)


def test_the_metadata_is_a_copy(plan: td.PackPlan) -> None:
    plan.metadata["samples"].append(9)
    assert plan.metadata["samples"] == [2000]


def test_repr_names_the_plan(folder: Path) -> None:
    text = repr(td.PackPlan.load(folder))
    assert "packs of 128 tokens" in text and str(folder) in text
