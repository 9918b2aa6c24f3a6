"""Shared arrays within one process: contents, write access, refused inputs, and memory that is used again."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shm.leftovers import descriptors, mapped

import tundish as td
from tundish.errors import InvalidInputError
from tundish.shm import Handle, SharedArray, set_cache_limit

PLAIN = (
    numpy_strategies.boolean_dtypes()
    | numpy_strategies.integer_dtypes(endianness="?")
    | numpy_strategies.unsigned_integer_dtypes(endianness="?")
    | numpy_strategies.floating_dtypes(endianness="?", sizes=(16, 32, 64, 128))
    | numpy_strategies.complex_number_dtypes(endianness="?", sizes=(64, 128, 256))
    | numpy_strategies.byte_string_dtypes(min_len=1)
    | numpy_strategies.unicode_string_dtypes(min_len=1, endianness="?")
    | numpy_strategies.datetime64_dtypes(endianness="?")
    | numpy_strategies.timedelta64_dtypes(endianness="?")
)
DTYPES = PLAIN | numpy_strategies.nested_dtypes(PLAIN, max_leaves=6, max_itemsize=400)
SHAPES = numpy_strategies.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def raw(array: np.ndarray[Any, Any]) -> bytes:
    return array.tobytes(order="A")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of any dtype, in either order, or cut from larger ones."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    size = dtype.itemsize * int(np.prod(shape, dtype=int))
    seed = draw(st.integers(0, 255))
    array = np.ndarray(shape, dtype, buffer=bytearray((seed + 7 * at) % 256 for at in range(size)))
    how = draw(st.sampled_from(["C", "F", "cut", "backward"]))
    if how == "F":
        return array.copy(order="F")
    if how == "cut" and array.ndim and array.shape[0] > 2:
        return array[1::2]
    return array[..., ::-1] if how == "backward" and array.ndim else array


@given(arrays())
def test_a_copy_is_equal_in_shape_order_dtype_and_every_byte(array: np.ndarray[Any, Any]) -> None:
    with SharedArray.from_array(array) as shared, SharedArray.attach(shared.handle) as attached:
        for copy in (shared.array, attached.array):
            assert copy.shape == array.shape
            assert copy.dtype == array.dtype
            assert copy.flags.c_contiguous or array.flags.f_contiguous
            assert copy.flags.f_contiguous or not array.flags.f_contiguous
            # Bytes between fields have no value, and some of the others are no number.
            with np.errstate(invalid="ignore"):
                assert np.array_equal(copy, array) or raw(copy) == raw(np.array(array, order="A"))
            assert copy.ctypes.data % 64 == 0
        assert shared.nbytes == attached.nbytes == array.nbytes


@given(dtype=DTYPES, shape=SHAPES, order=st.sampled_from(["C", "F"]))
def test_a_created_array_is_zero_and_its_owner_writes_while_others_read(
    dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> None:
    with (
        SharedArray.create(shape, dtype, order=order) as shared,
        SharedArray.attach(shared.handle) as attached,
    ):
        assert not any(shared.array.tobytes())
        assert (shared.array.shape, shared.array.dtype) == (shape, dtype)
        assert shared.array.flags[f"{order}_CONTIGUOUS"]
        shared.array.view(np.ndarray)[...] = np.ndarray(
            shape, dtype, buffer=bytes(b"1" * shared.nbytes), order=order
        )
        assert raw(attached.array) == raw(shared.array)
        assert shared.nbytes == 0 or any(attached.array.tobytes())


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [8, 16], "itemsize": 40}),
        np.dtype([("a", "i1"), ("b", "f8", (2, 3))], align=True),
        np.dtype([(("A title", "a"), ">i4"), ("b", [("c", "V3"), ("d", "m8[ms]")])]),
        np.dtype([("", "i4"), ("größe", "U3")]),
        np.dtype([]),
        np.dtype("V5"),
        np.dtype("S0"),
    ],
    ids=str,
)
def test_dtypes_that_are_laid_out_by_hand_come_back(dtype: np.dtype[Any]) -> None:
    array = np.zeros(3, dtype)
    with SharedArray.from_array(array) as shared, SharedArray.attach(shared.handle) as attached:
        assert attached.array.dtype == array.dtype
        assert attached.array.dtype.fields == array.dtype.fields


def test_large_arrays_are_copied_whole() -> None:
    array = np.arange(9_000_001, dtype=np.int64)
    for source in (array, array[::-1], np.asfortranarray(array[:9_000_000].reshape(3000, 3000)), array[5:]):
        for _ in range(2):
            # The second time, the memory is used again.
            with SharedArray.from_array(source) as shared:
                assert np.array_equal(shared.array, source)


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (np.array([None]), TypeError, "has Python objects"),
        (np.zeros(2, [("a", "i4"), ("b", [("c", object)])]), TypeError, "has Python objects"),
        (np.zeros(2, [("a", object, (2,))]), TypeError, "has Python objects"),
        (np.zeros(2, [("a", "i4"), ("b", "f8")])[["b", "a"]], ValueError, "repack_fields"),
        (np.ma.masked_array([1, 2], [True, False]), TypeError, "a masked array cannot be shared"),
        ([1, 2], TypeError, "cannot share a list: give"),
        (np.array(["a"], np.dtypes.StringDType()), TypeError, "has Python objects"),
        (
            np.zeros(1, [(f"field{number}", "i4") for number in range(300)]),
            ValueError,
            "share its fields one by one",
        ),
    ],
    ids=["objects", "nested", "subarray", "order", "masked", "list", "strings", "many fields"],
)
def test_arrays_that_cannot_be_shared_are_refused(given: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        SharedArray.from_array(given)
    assert isinstance(caught.value, td.TundishError)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (((-1,), "i4"), ValueError),
        (((2.0,), "i4"), TypeError),
        ((True, "i4"), TypeError),
        (((2,), "no dtype"), TypeError),
        (((1 << 40, 1 << 40), "i8"), ValueError),
        (((2,), object), TypeError),
        # It would have no bytes, but numpy has no such array.
        (((0, 1 << 62), "f8"), ValueError),
        (((1,) * 65, "i1"), ValueError),
    ],
)
def test_arrays_that_cannot_be_created_are_refused(arguments: tuple[Any, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        SharedArray.create(*arguments)
    assert isinstance(caught.value, td.TundishError)
    with pytest.raises(ValueError, match="order is 'K'"):
        SharedArray.create(2, "i4", order="K")  # type: ignore[arg-type]


def test_more_than_the_memory_that_is_left_is_refused_beforehand() -> None:
    before = td.shm.stats()
    with pytest.raises(
        MemoryError, match=r"a segment of \d+ bytes does not fit: \d+ bytes are left"
    ) as caught:
        SharedArray.create(1 << 55, np.uint8)
    assert isinstance(caught.value, td.errors.OutOfMemoryError)
    assert td.shm.stats() == before


def test_readers_and_the_owner_of_a_copy_cannot_write() -> None:
    with SharedArray.from_array(np.arange(4)) as shared, SharedArray.attach(shared.handle) as attached:
        for array in (shared.array, attached.array):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                array.flags.writeable = True


def test_a_segment_is_sealed() -> None:
    with SharedArray.create(1000, np.uint8) as shared:
        path = f"/proc/self/fd/{shared.handle.descriptor}"
        for change in (lambda: os.truncate(path, 0), lambda: os.truncate(path, 1 << 20)):
            with pytest.raises(PermissionError):
                change()
        fresh = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(fresh, b"x", 4096)
            with pytest.raises(PermissionError):
                mmap.mmap(fresh, 8192)
            assert os.stat(fresh).st_mode & 0o777 == 0o600
        finally:
            os.close(fresh)
        assert not shared.array.any()


def test_attaching_twice_maps_once() -> None:
    with SharedArray.from_array(np.arange(100_000)) as shared:
        shared.array.sum()
        maps, open_files = mapped(), descriptors()
        attached = [SharedArray.attach(shared.handle) for _ in range(5)]
        assert {one.array.ctypes.data for one in attached} == {shared.array.ctypes.data}
        assert mapped() == maps and descriptors() == open_files


def test_closing_while_a_view_lives_is_safe() -> None:
    shared = SharedArray.from_array(np.arange(1000))
    array, part = shared.array, SharedArray.attach(shared.handle).array[10:20]
    shared.close()
    shared.close()
    set_cache_limit(0)
    other = SharedArray.from_array(np.zeros(1000, np.int64))
    assert array.sum() == 499_500 and part.sum() == 145 and not other.array.any()
    for use in (lambda: shared.array, lambda: shared.handle, shared.tensor, lambda: pickle.dumps(shared)):
        with pytest.raises(ValueError, match="is closed"):
            use()
    assert repr(shared) == "<SharedArray, closed>"


def test_memory_is_given_back_when_the_last_view_dies() -> None:
    set_cache_limit(0)
    before = len(mapped()), len(descriptors())
    shared = SharedArray.create(100_000, np.float64)
    view = shared.array[1:][::2].reshape(-1, 2)
    shared.close()
    assert len(mapped()) > before[0]
    view[:] = 3
    del view
    assert (len(mapped()), len(descriptors())) == before


def test_a_pickled_array_is_attached_where_it_is_unpickled() -> None:
    with SharedArray.create(5, np.int32) as shared:
        copy = pickle.loads(pickle.dumps(shared))
        shared.array[:] = 7
        assert copy.array.tolist() == [7] * 5
        assert not copy.array.flags.writeable
        assert repr(copy) == "<SharedArray (5,) int32, reader>"


def test_a_handle_is_small_for_every_dtype() -> None:
    dtype = [(f"field{number}", "f8", (3, 3)) for number in range(60)]
    with SharedArray.create((1000, 10), dtype) as shared:
        assert len(pickle.dumps(shared.handle)) < 300
        assert len(pickle.dumps(shared)) < 300
        again = pickle.loads(pickle.dumps(shared.handle))
        assert again == shared.handle


def inode(handle: Handle) -> int:
    return os.stat(f"/proc/self/fd/{handle.descriptor}").st_ino


def test_memory_is_used_again_and_handles_of_before_lead_nowhere() -> None:
    shared = SharedArray.from_array(np.arange(50_000))
    old, first = shared.handle, inode(shared.handle)
    shared.close()
    with SharedArray.create(50_000, np.int64) as again:
        assert inode(again.handle) == first
        assert not again.array.any()
        with pytest.raises(td.errors.SegmentGoneError, match="its owner has given it back"):
            SharedArray.attach(old)
        assert isinstance(td.errors.SegmentGoneError("x"), FileNotFoundError)
        assert str(td.errors.SegmentGoneError(2, "it is gone", "it")) == "[Errno 2] it is gone"
    with pytest.raises(td.errors.SegmentGoneError, match="its owner has given it back"):
        SharedArray.attach(old)


def test_memory_is_not_used_again_while_a_view_of_this_process_lives() -> None:
    shared = SharedArray.from_array(np.arange(50_000))
    reader = SharedArray.attach(shared.handle)
    view, first = reader.array, inode(shared.handle)
    shared.close()
    reader.close()
    assert td.shm.stats()["escaped_bytes"] > view.nbytes
    with SharedArray.from_array(np.zeros(50_000, np.int64)) as other:
        assert inode(other.handle) != first
        assert view.sum() == sum(range(50_000))
        del view
        assert td.shm.stats()["escaped_bytes"] == 0
        with SharedArray.from_array(np.ones(50_000, np.int64)) as again:
            assert inode(again.handle) == first


def test_stats_count_mapped_cached_and_escaped_bytes_and_their_peak() -> None:
    set_cache_limit(0)
    set_cache_limit(1 << 30)
    before = td.shm.stats()
    assert before["cached_bytes"] == before["escaped_bytes"] == 0
    size = 1_000_000 + 4096 - 1_000_000 % 4096 + 4096
    shared = SharedArray.create(1_000_000, np.uint8)
    assert td.shm.stats()["mapped_bytes"] == before["mapped_bytes"] + size
    shared.close()
    assert td.shm.stats() == {**before, "cached_bytes": size, "peak_bytes": td.shm.stats()["peak_bytes"]}
    assert td.shm.stats()["peak_bytes"] >= size
    set_cache_limit(size - 1)
    assert td.shm.stats()["cached_bytes"] == 0


def test_the_cache_is_bounded_and_the_oldest_goes_first() -> None:
    set_cache_limit(5 << 20)
    made = [SharedArray.create(1 << 20, np.uint8) for _ in range(8)]
    inodes = [inode(one.handle) for one in made]
    for one in made:
        one.close()
    assert 3 << 20 < td.shm.stats()["cached_bytes"] <= 5 << 20
    again = [SharedArray.create(1 << 20, np.uint8) for _ in range(4)]
    assert {inode(one.handle) for one in again} == set(inodes[4:])
    for limit, kind in ((-1, ValueError), (1 << 80, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(kind, match="limit_bytes is"):
            set_cache_limit(limit)  # type: ignore[arg-type]


def test_many_small_arrays_do_not_keep_all_their_descriptors() -> None:
    before = len(descriptors())
    made = [SharedArray.create(10, np.uint8) for _ in range(400)]
    for one in made:
        one.close()
    assert len(descriptors()) - before <= 128


def test_threads_share_and_close_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(60):
                value = seed * 1000 + number
                with SharedArray.from_array(np.full(3000 + 500 * (number % 3), value)) as shared:
                    view = SharedArray.attach(shared.handle).array
                assert (view == value).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_ctrl_c_ends_a_copy_and_leaves_nothing() -> None:
    script = """
import os, signal, threading, time
import numpy as np
import tundish as td

array = np.zeros(1 << 29, np.uint8)
# The memory of an interrupted copy is kept for the next one, within the limit.
td.shm.set_cache_limit(0)
interrupted = 0
for wait in (0.0, 0.02, 0.05):
    timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            td.shm.SharedArray.from_array(array).close()
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
stats = td.shm.stats()
maps = sum("memfd" in line for line in open("/proc/self/maps"))
print(interrupted, stats["mapped_bytes"], stats["cached_bytes"], maps)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100
    )
    assert not ran.stderr, ran.stderr
    assert ran.stdout == "3 0 0 0\n"


def test_zeros_are_zeros_after_an_array_that_was_refused() -> None:
    wide = np.dtype([(f"field_number_{number:04d}", "u1") for number in range(1000)])
    with pytest.raises(InvalidInputError, match="share its fields one by one"):
        SharedArray.from_array(np.full(2000 * 1000, 7, np.uint8).view(wide))
    with SharedArray.create(2000 * 1000, np.uint8) as zeros:
        assert not zeros.array.any()


def test_a_signal_handler_that_returns_does_not_disturb() -> None:
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        array = np.arange(20_000_000)
        with SharedArray.from_array(array) as shared:
            assert np.array_equal(shared.array, array)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard


def test_shared_memory_comes_without_torch() -> None:
    script = "\n".join(
        [
            "import sys, numpy, tundish.shm",
            "tundish.shm.SharedArray.from_array(numpy.zeros(3)).array.sum(); tundish.shm.stats()",
            "print('torch' in sys.modules)",
        ]
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"
