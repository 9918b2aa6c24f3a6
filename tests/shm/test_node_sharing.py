"""`td.shm.node_shared` on real ranks: one copy a node, the same pages, read-only, built by one rank."""

from __future__ import annotations

import gc
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed.rank_processes import Job, Line, outcome, settle

# The folder from which ranks and their workers import.
from support.shm.node_tasks import Tokens, pages_of

import tundish as td


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    settle()


MIB = 1 << 20


def memory_of_this_process() -> int:
    """Bytes of Pss."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))


def is_refused(write: Any) -> bool:
    try:
        write()
    except ValueError:
        return True
    return False


def make_writable(array: np.ndarray) -> None:
    array.flags.writeable = True


def share_one(rank: int, line: Line) -> None:
    size = int(line.hear())
    if rank:
        array = td.shm.node_shared(lambda: line.say("built by the wrong rank"))
    else:
        array = td.shm.node_shared(lambda: np.arange(size, dtype=np.int64))
    assert np.array_equal(array, np.arange(size))
    gc.collect()
    line.say(
        is_refused(lambda: array.__setitem__(0, 1)), is_refused(lambda: make_writable(array)), pages_of(array)
    )
    # All ranks keep the pages until all have measured them.
    line.hear()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_have_the_same_pages_once(world: int, tmp_path: Path) -> None:
    size = 4 * MIB
    with Job(share_one, world, tmp_path) as job:
        job.tell_all(size)
        heard = job.hear_all()
        assert [message[:2] for message in heard] == [(True, True)] * world
        pages = [message[2] for message in heard]
        assert len({page["inode"] for page in pages}) == 1
        assert all(page["Rss"] >= size * 8 for page in pages)
        job.tell_all()
        job.expect_end()


def total_memory(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    nbytes = int(line.hear())
    # The first call loads modules and makes threads and connections.
    td.shm.node_shared(lambda: np.ones(1, np.uint8))
    gc.collect()
    before = memory_of_this_process()
    array = td.shm.node_shared(lambda: np.ones(nbytes, np.uint8))
    assert array[::4096].sum() == nbytes // 4096
    gc.collect()
    distributed.barrier()
    line.say(memory_of_this_process() - before, pages_of(array)["Pss"])
    line.hear()


def test_memory_of_a_node_grows_by_one_copy(tmp_path: Path) -> None:
    nbytes = 128 * MIB
    with Job(total_memory, 4, tmp_path) as job:
        job.tell_all(nbytes)
        heard = job.hear_all()
        assert nbytes <= sum(pages for _, pages in heard) <= nbytes + MIB
        assert sum(grown for grown, _ in heard) <= nbytes * 1.03 + 4 * 5 * MIB
        job.tell_all()
        job.expect_end()


def be_of_node(rank: int, node: int, local_rank: int, size: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "GROUP_RANK": str(node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }


def two_nodes(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    be_of_node(rank, min(rank, 1), max(rank - 1, 0), 3 if rank else 1)
    array = td.shm.node_shared(lambda: np.full(MIB, rank))
    line.say(int(array[0]), pages_of(array)["inode"])
    group = distributed.new_group([2, 3, 0], use_local_synchronization=True) if rank != 1 else None
    if group is not None:
        part = td.shm.node_shared(lambda: np.full(MIB, rank), group=group)
        line.say(int(part[0]), pages_of(part)["inode"])
    line.hear()


def test_nodes_on_one_machine_have_a_copy_each(tmp_path: Path) -> None:
    with Job(two_nodes, 4, tmp_path) as job:
        heard = job.hear_all()
        assert [value for value, _ in heard] == [0, 1, 1, 1]
        assert heard[0][1] != heard[1][1]
        assert len({inode for _, inode in heard[1:]}) == 1
        heard = job.hear_all(0, 2, 3)
        assert [value for value, _ in heard] == [0, 2, 2]
        assert heard[1][1] == heard[2][1]
        job.tell_all()
        job.expect_end()


def bad_calls(rank: int, line: Line) -> None:
    def call(**options: Any) -> tuple[str, str, Any]:
        return outcome(lambda: td.shm.node_shared(np.arange(3), **options))

    line.say(*call(key="odd" if rank == 1 else "even"))
    line.say(*call(key="" if rank == 1 else "even"))
    line.say(*call(key=7 if rank == 2 else "7"))
    line.say(*call(path=3 if rank == 0 else None))
    brought = np.array([{}, 1]) if rank == 0 else None
    line.say(*outcome(lambda: td.shm.node_shared(brought)))
    line.say(*outcome(lambda: td.shm.node_shared(lambda: 1 / 0)))
    good = td.shm.node_shared(np.arange(3) if rank == 0 else None, key="after all that")
    line.say(good.tolist())


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    with Job(bad_calls, 3, tmp_path) as job:
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError"] * 3
        assert all("odd" in text and "even" in text for _, text, _ in heard)
        for failing in (1, 2, 0):
            heard = job.hear_all()
            assert [found for found, _, _ in heard] == [
                "InvalidTypeError" if rank == failing else "PeerFailedError" for rank in range(3)
            ]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["InvalidTypeError", "PeerFailedError", "PeerFailedError"]
        assert all("object" in text for _, text, _ in heard)
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["ZeroDivisionError", "PeerFailedError", "PeerFailedError"]
        assert all("division by zero" in text for _, text, _ in heard)
        assert job.hear_all() == [([0, 1, 2],)] * 3
        job.expect_end()


KINDS = {
    "scalar": np.array(2.5),
    "empty": np.empty((0, 3), np.int16),
    "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "strided": np.arange(40, dtype=np.int8).reshape(4, 10)[::2, ::-3],
    "structured": np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")]),
    "half": np.arange(7, dtype=np.float16),
    "complex": np.array([1 + 2j, 3j]),
    "flags": np.array([True, False]),
    "wide": np.arange(6, dtype=">u8").reshape(2, 3),
}


@pytest.mark.parametrize("is_file_backed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_every_kind_without_torch_distributed(
    kind: str, is_file_backed: bool, tmp_path: Path
) -> None:
    given = KINDS[kind]
    array = td.shm.node_shared(given, path=tmp_path / "arrays" if is_file_backed else None)
    assert np.array_equal(array, given)
    assert (array.dtype, array.shape) == (given.dtype, given.shape)
    assert array.flags.f_contiguous == given.flags.f_contiguous or kind == "strided"
    assert not array.flags.writeable
    again = pickle.loads(pickle.dumps(array))
    assert np.array_equal(again, given)
    assert not np.shares_memory(array, given)


def test_a_tensor_is_shared_as_an_array() -> None:
    import torch

    assert td.shm.node_shared(torch.arange(4)).tolist() == [0, 1, 2, 3]
    with pytest.raises(td.errors.InvalidTypeError, match=r"tensor\.view"):
        td.shm.node_shared(torch.zeros(3, dtype=torch.bfloat16))


def test_a_segment_is_shared_without_a_copy() -> None:
    segment = td.shm.SharedArray.create((MIB,), np.int32)
    segment.array[:] = 7
    array = td.shm.node_shared(lambda: segment)
    segment.array[5] = 8
    assert array[4:7].tolist() == [7, 8, 7]
    assert not array.flags.writeable


def test_a_pickled_array_is_small_and_has_the_same_pages() -> None:
    array = td.shm.node_shared(np.arange(MIB))
    message = pickle.dumps(array)
    assert len(message) < 1024
    again = pickle.loads(message)
    assert pages_of(again)["inode"] == pages_of(array)["inode"]
    assert pickle.loads(pickle.dumps(again)).sum() == array.sum()
    # Slices and results are plain arrays.
    assert type(pickle.loads(pickle.dumps(array[3:5]))) is np.ndarray
    assert pickle.loads(pickle.dumps(array[3:5])).tolist() == [3, 4]
    assert type(array + 1) is np.ndarray
    assert (array + 1).flags.writeable
    assert (array[:3] + 1).tolist() == [1, 2, 3]


# Numpy deprecates this in favour of a view.
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_an_array_with_another_shape_is_pickled_by_value() -> None:
    array = td.shm.node_shared(np.arange(12))
    array.shape = (3, 4)
    again = pickle.loads(pickle.dumps(array))
    assert again.shape == (3, 4)
    assert np.array_equal(again, np.arange(12).reshape(3, 4))
    array.shape = (12,)
    assert pages_of(pickle.loads(pickle.dumps(array)))["inode"] == pages_of(array)["inode"]


@pytest.mark.parametrize(
    ("brought", "named"),
    [
        (None, "None"),
        (lambda: None, "None"),
        ({"ids": np.arange(3), "mask": np.ones(3)}, "a dict"),
        (lambda: {"ids": np.arange(3)}, "a dict"),
        ({1, 2}, "a set"),
        (lambda: iter([1, 2]), "a list_iterator"),
    ],
)
def test_values_other_than_arrays_are_refused_by_their_type(brought: Any, named: str) -> None:
    with pytest.raises(td.errors.InvalidTypeError, match=f"^the array is {named}: give "):
        td.shm.node_shared(brought)


@pytest.mark.parametrize("is_file_backed", [False, True])
def test_a_masked_array_is_refused_and_not_stripped_of_its_mask(is_file_backed: bool, tmp_path: Path) -> None:
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    with pytest.raises(td.errors.InvalidTypeError, match="its data and its mask"):
        td.shm.node_shared(masked, path=tmp_path if is_file_backed else None)


# Each spawned worker imports torch anew.
@pytest.mark.parametrize(
    ("method", "workers", "is_file_backed"),
    [("fork", 2, False), ("forkserver", 2, True), ("spawn", 1, False)],
)
def test_workers_of_a_loader_have_the_same_pages(
    method: str, workers: int, is_file_backed: bool, tmp_path: Path
) -> None:
    from torch.utils.data import DataLoader

    tokens = td.shm.node_shared(np.arange(MIB), path=tmp_path if is_file_backed else None)
    loader = DataLoader(
        Tokens(tokens),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,  # type: ignore[arg-type]
    )
    assert list(loader) == [[index, pages_of(tokens)["inode"]] for index in range(4)]


def readers_workers(rank: int, line: Line) -> None:
    from torch.utils.data import DataLoader

    tokens: Any = td.shm.node_shared(np.arange(MIB))
    inode = pages_of(tokens)["inode"]
    if rank == 0:
        # The builder may drop the array before the others start workers.
        del tokens
        gc.collect()
    td.distributed.vote(what="the builder has dropped it")
    if rank == 1:
        loader = DataLoader(Tokens(tokens), batch_size=None, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
        line.say(list(loader) == [[index, inode] for index in range(4)])


def test_workers_of_a_rank_that_did_not_build_have_the_same_pages(tmp_path: Path) -> None:
    with Job(readers_workers, 2, tmp_path) as job:
        assert job.hear(1) == (True,)
        job.expect_end()


def test_a_key_that_cannot_be_encoded_names_an_array(tmp_path: Path) -> None:
    for _ in range(2):
        assert td.shm.node_shared(np.arange(3), key="\ud800", path=tmp_path).tolist() == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def logged_shares(rank: int, line: Line) -> None:
    said: list[str] = []
    note = logging.Handler(logging.INFO)
    note.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tundish.shm")
    logger.setLevel(logging.INFO)
    logger.addHandler(note)
    td.shm.node_shared(lambda: np.zeros(MIB, np.uint8), key="tokens")
    line.say(said)


def test_the_first_rank_logs_what_was_shared(tmp_path: Path) -> None:
    with Job(logged_shares, 2, tmp_path) as job:
        (said,), (other,) = job.hear_all()
        assert other == [] and len(said) == 1
        assert "'tokens'" in said[0] and "uint8 (1048576,), 1.0 MB on each of 1 node" in said[0]
        job.expect_end()
