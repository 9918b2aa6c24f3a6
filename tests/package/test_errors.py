"""Bad input is answered with a kind of `tundish.errors` that says what was wrong, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NoSuchPackError, StorageError, format_list

DIGITS = 10**5000
PLAN = td.pack([5, 0, 3, 8, 0, 4], 8)

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "max_length of thousands of digits": (
        lambda: td.pack([1], DIGITS),
        InvalidInputError,
        r"max_length is an integer of 16610 bits; it must be in 1 … 9223372036854775807",
    ),
    "seed": (lambda: td.pack([1], 1, seed=-DIGITS), InvalidInputError, "seed is an integer of 16610 bits"),
    "length": (
        lambda: td.pack([1, DIGITS], 1),
        InvalidInputError,
        r"lengths\[1\] is an integer of 16610 bits",
    ),
    "length beside others": (
        lambda: td.pack([-1, 2**63], 1),
        InvalidInputError,
        r"lengths\[1\] is 9223372036854775808, beyond what int64 holds",
    ),
    "samples for lengths": (
        lambda: td.pack([[1, 2], [3]], 8),
        InvalidTypeError,
        r"lengths\[0\] is a list: give one integer",
    ),
    "rows for lengths": (
        lambda: td.pack([3, {"input_ids": [1]}], 8),
        InvalidTypeError,
        r"lengths\[1\] is a dict",
    ),
    "pack of a name": (lambda: PLAN["0"], InvalidTypeError, "asked for by its number, got '0'"),  # type: ignore[call-overload]
    "pack of a half": (lambda: PLAN[0.5], InvalidTypeError, "asked for by its number, got 0.5"),  # type: ignore[call-overload]
    "shuffled_indices": (
        lambda: td.packing.shuffled_indices(DIGITS, 0),
        InvalidInputError,
        "n is an integer of 16610 bits",
    ),
    "out with a null": (lambda: td.pack([1], 1, out="a\0b"), InvalidInputError, r"out is 'a\\x00b'"),
    "out where no folder can be made": (
        lambda: td.pack([1], 1, out="/proc/plan"),
        StorageError,
        r"cannot create a folder in /proc: No such file or directory$",
    ),
    "cache_dir with a null": (
        lambda: td.pack([1], 1, cache_dir="a\0b"),
        InvalidInputError,
        r"cache_dir is 'a\\x00b'",
    ),
    "load with a null": (lambda: td.PackPlan.load("a\0b"), InvalidInputError, r"path is 'a\\x00b'"),
    "save with a null": (lambda: PLAN.save("a\0b"), InvalidInputError, r"path is 'a\\x00b'"),
    "plot with a null": (lambda: PLAN.plot("a\0b.png"), InvalidInputError, r"path is 'a\\x00b.png'"),
    "out that no bytes stand for": (
        lambda: td.pack([1], 1, out="\ud800"),
        InvalidInputError,
        r"out is '\\ud800'; no path",
    ),
    "plot to a number": (lambda: PLAN.plot(7), InvalidTypeError, "path is 7: give a path"),  # type: ignore[arg-type]
    "lookup of 2**63": (
        lambda: PLAN.lookup([2**63]),
        NoSuchPackError,
        "pack 9223372036854775808 does not exist: the plan has 2 packs",
    ),
    "lookup of 2**64": (
        lambda: PLAN.lookup([0, 2**64]),
        InvalidInputError,
        r"pack_ids\[1\] is 18446744073709551616",
    ),
    "lookup of the last unsigned": (
        lambda: PLAN.lookup(np.array([2**64 - 1], dtype=np.uint64)),
        NoSuchPackError,
        "pack 18446744073709551615 does not exist",
    ),
    "lookup of -1": (lambda: PLAN.lookup([-1]), NoSuchPackError, "pack -1 does not exist"),
    "pack of thousands of digits": (lambda: PLAN[DIGITS], NoSuchPackError, "an integer of 16610 bits"),
    "datasets that are a mapping": (
        lambda: td.pack_datasets({}, 1),  # type: ignore[arg-type]
        InvalidTypeError,
        "lengths is a dict: give a list with the lengths of each dataset",
    ),
    "datasets that are a set": (
        lambda: td.pack_datasets(set(), 1),  # type: ignore[arg-type]
        InvalidTypeError,
        "lengths is a set",
    ),
    "datasets that are a number": (
        lambda: td.pack_datasets(np.array(3), 1),  # type: ignore[arg-type]
        InvalidTypeError,
        "lengths is an ndarray",
    ),
    "datasets of numbers": (lambda: td.pack_datasets([1, 2], 1), InvalidInputError, r"lengths\[0\]"),
    "progress": (
        lambda: td.pack([1], 1, progress="yes"),  # type: ignore[arg-type]
        InvalidTypeError,
        "progress must be True, False or None, not 'yes'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_the_documented_error(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask, kind, says = BAD[case]
    with pytest.raises(kind, match=says) as caught:
        ask()
    assert isinstance(caught.value, td.TundishError)
    assert list(tmp_path.iterdir()) == []


def test_an_error_message_contains_its_path_and_errno_once(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    (taken / "file").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    for ask in (
        lambda: td.pack([1], 1, out=taken),
        lambda: td.pack([1], 1, out=taken / "missing" / "plan"),
        lambda: td.pack([1], 1, out=tmp_path / "file" / "plan"),
        lambda: td.PackPlan.load(tmp_path / "none"),
        lambda: PLAN.save("/proc/plan"),
        lambda: PLAN.plot("/proc/plan.png"),
    ):
        with pytest.raises(StorageError) as caught:
            ask()
        for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert error.errno and isinstance(error.filename, str)
            assert str(error).count(error.filename) == 1, str(error)
            assert str(error).count("rrno") == 1 and "os error" not in str(error), str(error)


def test_the_path_comes_first_where_the_message_lacks_it() -> None:
    error = StorageError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/plans/one")
    assert str(error) == "[Errno 28] /plans/one: No space left on device"
    assert str(StorageError("without a path")) == "without a path"
    assert str(StorageError(errno.ENOENT, "no such folder", "no")) == "[Errno 2] no: no such folder"


def test_a_list_names_some_and_counts_the_others() -> None:
    assert format_list(["a"]) == "a"
    assert format_list([str(number) for number in range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert format_list([str(number) for number in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
