"""A checkpoint that somebody else put into the root runs no code, and what `save_dcp` writes is read."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import functools
import importlib
import io
import os
import pathlib
import pickle
import random
import re
import struct
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoint.checkpoint_roots import add_checksums
from support.distributed.programs import run
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


def object_of_somebody_else(root: Path, data: bytes, patch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose value "o" is `data`."""
    patch.setattr("tundish.checkpoint.dcp.save._pickled", lambda *_: data)
    return checkpoint(root, {"o": 1})


def archive_of(data: bytes) -> bytes:
    """What `torch.save` would write for an object with this pickle."""
    stream, made = io.BytesIO(), io.BytesIO()
    torch.save(1, stream)
    with zipfile.ZipFile(stream) as theirs, zipfile.ZipFile(made, "w") as ours:
        for name in theirs.namelist():
            ours.writestr(name, data if name.endswith("/data.pkl") else theirs.read(name))
    return made.getvalue()


class Program(torch.nn.Module):
    """A TorchScript program that writes a file when it is loaded."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def forward(self) -> str:
        return self.mark

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.mark, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.mark = state[0]
        # torch leaves out what changes nothing.
        written = torch.from_file(self.mark, True, 8, dtype=torch.uint8).fill_(65)
        self.training = bool(written.sum())


def with_second_directory(archive: bytes) -> bytes:
    """The same records for torch, which finds their directory by its offset; for Python, others of no meaning."""
    end = archive.rfind(b"PK\5\6")
    count, size, start = struct.unpack("<HII", archive[end + 10 : end + 20])
    entries = [
        struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, *([0] * 4), 33, 0, 0, 0, 1, *([0] * 6))
        + b"%d" % (n % 10)
        for n in range(count)
    ]
    comment = size - sum(map(len, entries))
    entries[-1] = entries[-1][:32] + struct.pack("<H", comment) + entries[-1][34:] + b" " * comment
    directory = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, start, 0)
    return archive[: start + size] + b"".join(entries) + directory


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.*TorchScript archive:UserWarning"
)
@pytest.mark.parametrize("change", [bytes, with_second_directory])
def test_a_program_in_the_place_of_an_object_does_not_run(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, mark = io.BytesIO(), tmp_path / "mark"
    torch.jit.save(torch.jit.script(Program(str(mark))), stream)  # type: ignore[no-untyped-call]
    saved = object_of_somebody_else(tmp_path / "root", change(stream.getvalue()), monkeypatch)
    mark.unlink(missing_ok=True)
    state = {"o": None}
    with pytest.raises((CorruptCheckpointError, InvalidTypeError), match="'o' in"):
        load_dcp(state, saved)
    assert not mark.exists() and state["o"] is None


def change_of(subject: bytes, attribute: str, value: bytes) -> bytes:
    """A pickle that sets an attribute of something that it only names."""
    name = struct.pack("<I", len(attribute)) + attribute.encode()
    return b"\x80\2" + subject + b"N}X" + name + value + b"s\x86b."


MEMBER = b"cbuiltins\ngetattr\nc%s\nColor\nX\3\0\0\0RED\x86R" % __name__.encode()
CHANGES = [
    (pathlib.PosixPath, b"cpathlib\nPosixPath\n", "exists", b"cpathlib\nPurePosixPath\n"),
    (argparse.Namespace, b"cargparse\nNamespace\n", "__init__", b"cbuiltins\nlist\n"),
    (torch._utils._rebuild_tensor_v2, b"ctorch._utils\n_rebuild_tensor_v2\n", "__defaults__", b"K\5\x85"),
    (Color.RED, MEMBER, "_value_", b"K\5"),
]


@pytest.mark.parametrize(("owner", "subject", "attribute", "value"), CHANGES)
def test_a_pickle_changes_nothing_that_it_only_names(
    owner: Any, subject: bytes, attribute: str, value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = getattr(owner, attribute)
    data = archive_of(change_of(subject, attribute, value))
    saved = object_of_somebody_else(tmp_path / "root", data, monkeypatch)
    try:
        with pytest.raises(CorruptCheckpointError, match="it changes"):
            load_dcp({"o": None}, saved)
        assert getattr(owner, attribute) == before
    finally:
        if getattr(owner, attribute) != before:
            setattr(owner, attribute, before)


def test_metadata_of_somebody_else_changes_no_type(tmp_path: Path) -> None:
    saved, before = checkpoint(tmp_path / "root", {"w": torch.ones(3)}), pathlib.PosixPath.exists
    (saved / ".metadata").write_bytes(change_of(*CHANGES[0][1:]))
    add_checksums(saved)
    try:
        with pytest.raises(CorruptCheckpointError, match="it changes"):
            load_dcp({"w": torch.zeros(3)}, saved)
        assert pathlib.PosixPath.exists is before
    finally:
        if pathlib.PosixPath.exists is not before:
            del pathlib.PosixPath.exists


class Forged:
    """An array whose elements are addresses; `dtype` says how the pickle hides that."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def __reduce__(self) -> Any:
        if self._dtype == "O":
            return np.ndarray, ((1,), np.dtype("O"), bytearray(b"A" * 8))
        return np.frombuffer, (b"A" * 8, self._dtype)


class ForgedDtype:
    """A dtype whose pickled state is false."""

    def __init__(self, fields: Any, size: int) -> None:
        self._state = (3, "|", None, tuple(fields), fields, size, 1, 0)

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), self._state


@pytest.mark.parametrize(
    "value",
    [Forged("O"), ForgedDtype({"a": (np.dtype("O"), 0)}, 8), ForgedDtype({"a": (np.dtype("i8"), 9999)}, 8)],
    ids=["objects of bytes", "hidden objects", "field outside"],
)
def test_an_array_reaches_only_its_own_memory(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    saved = object_of_somebody_else(tmp_path / "root", stream.getvalue(), monkeypatch)
    # In a process of its own: following an address would end it.
    code = f"from tundish.checkpoint import load_dcp; state = {{'o': 0}}; load_dcp(state, {str(saved)!r}); print(state)"
    process = run(["-c", code])
    assert process.returncode == 1
    assert re.search(r"(InvalidTypeError|CorruptCheckpointError): 'o' in", process.stderr)


def values(*of: Any) -> bytes:
    """Operations of a pickle that put values on the stack, one after the other."""
    return b"".join(pickle.dumps(value, 2)[2:-1] for value in of)


ARRAY = b"cnumpy\nndarray\n"
ADDRESSES = ((1,), np.dtype("O"), bytearray(b"A" * 8))
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"


@pytest.mark.parametrize(
    "operations",
    [
        ARRAY + values(ADDRESSES) + b"\x81",
        ARRAY + values(ADDRESSES, {}) + b"\x92",
        b"(" + ARRAY + values(*ADDRESSES) + b"o",
        b"(" + values(*ADDRESSES) + b"inumpy\nndarray\n",
        FROM_TYPE + b"(" + ARRAY + b"ctorch\nTensor\n" + values(ADDRESSES) + b"NtR",
    ],
    ids=["NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "a tensor's type"],
)
def test_no_operation_makes_objects_of_addresses(
    operations: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = object_of_somebody_else(tmp_path / "root", archive_of(b"\x80\2" + operations + b"."), monkeypatch)
    # In a process of its own: following an address would end it.
    code = f"from tundish.checkpoint import load_dcp; state = {{'o': 0}}; load_dcp(state, {str(saved)!r}); print(state)"
    process = run(["-c", code])
    assert process.returncode == 1
    assert re.search(r"CorruptCheckpointError: 'o' in.*(it calls numpy|as Python 2 did)", process.stderr)


class WithState:
    """Its pickle makes an object by a call, and gives it a state."""

    def __init__(self, make: Any, argument: Any, state: Any) -> None:
        self._parts = make, (argument,), state

    def __reduce__(self) -> Any:
        return self._parts


def forged(kind: Any, position: int) -> dict[str, Any]:
    """The state of a random generator of numpy at another position."""
    state: dict[str, Any] = kind(3).state
    (state["state"] if "pos" in state["state"] else state)[
        "pos" if "pos" in state["state"] else "buffer_pos"
    ] = position
    return state


PICKLED = importlib.import_module("numpy.random._pickle")


@pytest.mark.parametrize(
    ("make", "argument", "kind", "most"),
    [
        ("__bit_generator_ctor", np.random.MT19937, np.random.MT19937, 624),
        ("__bit_generator_ctor", np.random.Philox, np.random.Philox, 4),
        ("__generator_ctor", "MT19937", np.random.MT19937, 624),
        ("__randomstate_ctor", "MT19937", np.random.MT19937, 624),
    ],
)
def test_random_generators_read_only_their_own_state(
    make: str, argument: Any, kind: Any, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, position in enumerate([0, most, -1, most + 1, 10**6]):
        stream = io.BytesIO()
        torch.save(WithState(getattr(PICKLED, make), argument, forged(kind, position)), stream)
        saved = object_of_somebody_else(tmp_path / str(number), stream.getvalue(), monkeypatch)
        state: dict[str, Any] = {"o": None}
        if 0 <= position <= most:
            load_dcp(state, saved)
            assert "MT19937" in repr(state["o"]) or "Philox" in repr(state["o"])
        else:
            with pytest.raises(CorruptCheckpointError, match="position outside of its state"):
                load_dcp(state, saved)


@pytest.mark.parametrize("encoding", ["zlib_codec", "idna", "utf-8", 3])
def test_bytes_are_encoded_in_one_way_alone(
    encoding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = b"\x80\2c_codecs\nencode\n" + values(("text", encoding)) + b"R."
    saved = object_of_somebody_else(tmp_path / "root", archive_of(pickled), monkeypatch)
    before = set(sys.modules)
    with pytest.raises(CorruptCheckpointError, match="it encodes str as"):
        load_dcp({"o": None}, saved)
    assert not {name for name in sys.modules.keys() - before if name.startswith("encodings.")}


def test_a_name_that_is_not_read_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    saved = object_of_somebody_else(tmp_path / "root", archive_of(b"\x80\2clazy\nModel\n."), monkeypatch)
    with pytest.raises(InvalidTypeError, match=r"lazy\.Model"):
        load_dcp({"o": None}, saved)
    assert asked == []


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
