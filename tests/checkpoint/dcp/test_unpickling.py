"""A checkpoint that somebody else put into the root runs no code, and what `save_dcp` writes is read."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import os
import pathlib
import pickle
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoint.checkpoint_roots import add_checksums
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from tundish.checkpoint import Checkpointer, load_dcp
from tundish.checkpoint.dcp.unpickling import read_metadata
from tundish.errors import CorruptCheckpointError, InvalidTypeError


class Color(enum.Enum):
    RED = 1


class Settings:
    """A type of the user's."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.rate == self.rate

    __hash__ = None  # type: ignore[assignment]


class Command:
    """Its pickle calls a function when it is read."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


def checkpoint(root: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        return checkpointer.save_dcp(1, state).result()


READ = {
    "numbers": [1, 2.5, 10**50, True, None, 1 + 2j],
    "bytes": (b"abc", bytearray(b"d"), "ä"),
    "containers": ({"a": {1, 2}}, frozenset("ab"), collections.deque([1], maxlen=3), range(3), slice(1, 2)),
    "mappings": (
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
    ),
    "namespace": (argparse.Namespace(lr=0.1), types.SimpleNamespace(a=1)),
    "path": pathlib.Path("/some/where"),
    "time": (
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        datetime.timedelta(1),
        datetime.date(2020, 1, 2),
    ),
    "member": Color.RED,
    "random": random.Random(3).getstate(),
    "torch": (torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided),
}


def test_objects_come_back(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "root", READ)
    state = dict.fromkeys(READ)
    load_dcp(state, saved)
    assert state == READ
    assert {name: type(value) for name, value in state.items()} == {
        name: type(value) for name, value in READ.items()
    }


def test_arrays_tensors_and_random_states_come_back(tmp_path: Path) -> None:
    generators = [
        np.random.Generator(kind(3)) for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM)
    ]
    generators += [np.random.Generator(kind(3)) for kind in (np.random.Philox, np.random.SFC64)]
    given = {
        "legacy": (np.random.RandomState(3).get_state(),),
        "generators": tuple(generators),
        "arrays": (
            np.arange(3.0),
            np.float32(2),
            np.array(["a", 1], dtype=object),
            np.zeros(2, dtype="i4,f4"),
        ),
        "tensors": (torch.arange(3, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(2))),
    }
    state: dict[str, Any] = dict.fromkeys(given)
    load_dcp(state, checkpoint(tmp_path / "root", given))
    np.testing.assert_equal(state["legacy"], given["legacy"])
    assert [one.integers(1000) for one in state["generators"]] == [one.integers(1000) for one in generators]
    np.testing.assert_equal(state["arrays"], given["arrays"])
    assert all(map(torch.equal, state["tensors"], given["tensors"]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_everything_that_torch_writes_into_metadata_is_read(tmp_path: Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    state: dict[str, Any] = {"nested": {"list": [torch.ones(2), {"x": 1}], "object": (1, 2)}}
    for dtype in dtypes:
        value = torch.zeros(16, dtype=torch.uint8)
        try:
            value = value.view(dtype)
            torch_checkpoint.save({"w": value}, checkpoint_id=tmp_path / str(dtype), no_dist=True)
        except (RuntimeError, CheckpointException):
            # torch writes no tensors of this dtype.
            continue
        state[str(dtype)] = value
    assert len(state) > 20
    torch_checkpoint.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with (tmp_path / "theirs" / ".metadata").open("rb") as file:
        ours = read_metadata(file)
        file.seek(0)
        assert ours == pickle.load(file)


CALLS = [
    ("posix.system", lambda mark: Command(os.system, f"touch {mark}")),
    ("builtins.eval", lambda mark: Command(eval, f"open({str(mark)!r}, 'w')")),
    ("builtins.getattr", lambda mark: Command(getattr, pathlib.Path(mark), "touch")),
    ("functools.partial", lambda mark: Command(functools.partial(Path.touch, mark))),
]


@pytest.mark.parametrize(("named", "make"), CALLS)
def test_metadata_of_somebody_else_runs_no_code(named: str, make: Any, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "root", {"w": torch.ones(3)})
    (saved / ".metadata").write_bytes(pickle.dumps(make(tmp_path / "mark")))
    add_checksums(saved)
    state = {"w": torch.zeros(3)}
    with pytest.raises(CorruptCheckpointError, match=named):
        load_dcp(state, saved)
    assert not (tmp_path / "mark").exists()
    assert not state["w"].any()


@pytest.mark.parametrize(("named", "make"), CALLS)
def test_an_object_of_somebody_else_runs_no_code(
    named: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A save that refuses nothing, as somebody else may write it.
    monkeypatch.setattr("tundish.checkpoint.dcp.save.read_object", lambda *_: None)
    saved = checkpoint(tmp_path / "root", {"w": torch.ones(3), "o": make(tmp_path / "mark")})
    state = {"w": torch.zeros(3), "o": None}
    with pytest.raises(InvalidTypeError, match=named):
        load_dcp(state, saved)
    assert not (tmp_path / "mark").exists()
    assert state["o"] is None and not state["w"].any()


def test_a_type_of_the_user_is_saved_and_read_where_it_is_trusted(tmp_path: Path) -> None:
    said = f"trusted=[{__name__}.Settings]"
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, {"settings": Settings(0.5)}, trusted=[Settings]).result()
    state = {"settings": Settings()}
    with pytest.raises(InvalidTypeError) as refusal:
        load_dcp(state, saved)
    assert said in str(refusal.value)
    assert state == {"settings": Settings()}
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.load_dcp(state, trusted=[Settings])
    assert state == {"settings": Settings(0.5)}
    with pytest.raises(InvalidTypeError, match="give a list of types"):
        load_dcp(state, saved, trusted=["Settings"])  # type: ignore[list-item]


class Outer:
    class Inner:
        """Its pickle names `getattr`, which is not called."""


class Unreadable:
    """Can be pickled, and fails when it is read."""

    def __reduce__(self) -> Any:
        return Unreadable, ("one argument too many",)


@pytest.mark.parametrize(
    ("value", "trusted", "why"),
    [
        (Settings(), [], r"names .*Settings.* trusted=\[.*Settings\] here and to load_dcp"),
        ((1, [Settings()]), [Color], r"names .*Settings"),
        (Command(print, "hello"), [Command], "names builtins.print"),
        (Outer.Inner(), [Outer, Outer.Inner], "names builtins.getattr"),
        (Unreadable(), [Unreadable], "takes no arguments"),
        (lambda: 1, [], "cannot be saved as a pickle"),
    ],
)
def test_what_no_load_could_read_is_refused_before_anything_is_saved(
    value: Any, trusted: list[type], why: str, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        with pytest.raises(InvalidTypeError, match=f"'x.o', .*{why}"):
            checkpointer.save_dcp(1, {"x": {"o": value}, "w": torch.ones(2)}, trusted=trusted)
        assert checkpointer.list() == []
        # A structure that is known is checked, too.
        state = {"x": {"o": (1, 2)}, "w": torch.ones(2)}
        checkpointer.save_dcp(1, state, blocking=True)
        with pytest.raises(InvalidTypeError, match=f"'x.o', .*{why}"):
            checkpointer.save_dcp(2, {**state, "x": {"o": value}}, trusted=trusted)
        assert [one.step for one in checkpointer.list()] == [1]


def test_trusted_types_are_types(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer,
        pytest.raises(InvalidTypeError, match="give a list of types"),
    ):
        checkpointer.save_dcp(1, {"w": torch.ones(2)}, trusted=["Settings"])  # type: ignore[list-item]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_metadata_of_another_user_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoint(tmp_path / "root", {"w": torch.ones(3)})
    load_dcp({"w": torch.zeros(3)}, saved)
    assert "another user" not in caplog.text
    os.chown(saved / ".metadata", 12345, -1)
    load_dcp({"w": torch.zeros(3)}, saved)
    assert f"{saved / '.metadata'} belongs to another user" in caplog.text
