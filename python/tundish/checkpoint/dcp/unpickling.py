"""Reads pickles of a DCP checkpoint: `.metadata`, and objects of the state dict.

A pickle names the functions and types that reading it calls, so that a folder written by somebody else would be code.
These readers know a list of names, and refuse every other one.

Invariants:
    - No module is imported and nothing is called for a name that is neither on the list nor trusted by the caller.
    - A pickle changes only objects that it made: no type, function or member of an enumeration.
    - torch never sees the bytes of a checkpoint, in which it may find another format, but an archive made here.
    - Everything that torch writes into `.metadata` can be read.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickle
import re
import sys
import types
import zipfile
from collections.abc import Iterable
from enum import Enum
from typing import IO, Any, ClassVar

import numpy as np
import torch

from tundish.errors import InvalidTypeError

# Module to names in it.
_Names = dict[str, frozenset[str]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))

_OF_METADATA: _Names = {
    "torch": _DTYPES | {"Size", "device"},
    "torch.serialization": _names("_get_layout"),
    "torch.distributed.checkpoint.metadata": _names(
        "Metadata MetadataIndex StorageMeta BytesStorageMetadata TensorStorageMetadata ChunkStorageMetadata "
        "TensorProperties _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": _names("_StorageInfo _StoragePrefix"),
    # torch before 2.3
    "torch.distributed._shard.sharded_tensor.metadata": _names("TensorProperties MEM_FORMAT_ENCODING"),
    "collections": _names("OrderedDict"),
    "pathlib": _names("PosixPath PurePosixPath WindowsPath PureWindowsPath"),
    "pathlib._local": _names("PosixPath PurePosixPath WindowsPath PureWindowsPath"),
}

_OF_OBJECTS: _Names = {
    "builtins": _names(
        "bool int float complex str bytes bytearray list tuple dict set frozenset range slice object"
    ),
    # bytes, and objects without arguments, as the protocol of `torch.save` writes them.
    "_codecs": _names("encode"),
    "copyreg": _names("_reconstructor"),
    "collections": _names("OrderedDict defaultdict deque Counter"),
    "argparse": _names("Namespace"),
    "types": _names("SimpleNamespace"),
    "pathlib": _OF_METADATA["pathlib"],
    "pathlib._local": _OF_METADATA["pathlib._local"],
    "datetime": _names("datetime date time timedelta timezone"),
    "torch": _DTYPES | {"Size", "device", "Tensor"},
    "torch.serialization": _names("_get_layout"),
    "torch._utils": _names(
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter _rebuild_parameter_with_state"
    ),
    "torch._tensor": _names("_rebuild_from_type_v2"),
    "torch.nn.parameter": _names("Parameter Buffer"),
    "numpy": _names("ndarray dtype"),
    **{
        module: _names("_reconstruct scalar _frombuffer")
        for package in ("core", "_core")
        for module in (f"numpy.{package}.multiarray", f"numpy.{package}.numeric")
    },
    "numpy.random._pickle": _names("__generator_ctor __bit_generator_ctor __randomstate_ctor"),
    "numpy.random.bit_generator": _names("SeedSequence __pyx_unpickle_SeedSequence"),
    **{
        f"numpy.random._{kind.lower()}": _names(kind)
        for kind in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
    "numpy.random._pcg64": _names("PCG64 PCG64DXSM"),
}


class UntrustedNameError(pickle.UnpicklingError):
    """A pickle names something that is not read. `name`: with its module."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name}, which is not read")
        self.name = name


# Operations of pickles to what carries them out. The annotations of Python's own do not know `_Unpickler`.
_OPERATIONS: dict[int, Any] = dict(pickle._Unpickler.dispatch)

_GENERATORS = (np.random.BitGenerator, np.random.Generator, np.random.RandomState)

# Names that a pickle may use, and must not change.
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, Enum)


class _Unpickler(pickle._Unpickler):
    """Finds the names of `known`; subclasses say which. Python's, of which single operations can be replaced."""

    known: ClassVar[_Names]
    trusted: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        module, name = _renamed(module, name)
        if name in self.known.get(module, ()) or (module, name) in self.trusted:
            return super().find_class(module, name)
        raise UntrustedNameError(f"{module}.{name}")

    def _build(self) -> None:
        """Give the object below the top of the stack its state, which is on the top."""
        changed = self.stack[-2]
        if isinstance(changed, _SHARED):
            raise pickle.UnpicklingError(f"it changes {changed!r}, which a pickle may only name")
        _OPERATIONS[pickle.BUILD[0]](self)
        if isinstance(changed, np.dtype) and not _is_valid(changed):
            raise pickle.UnpicklingError("a dtype has fields outside of its elements, or hides objects")
        if isinstance(changed, _GENERATORS) and not _is_within_state(changed):
            raise pickle.UnpicklingError("a random generator has a position outside of its state")

    def _reduce(self) -> None:
        """Call the object below the top of the stack with the arguments on the top."""
        _check_called(self.stack[-2])
        _OPERATIONS[pickle.REDUCE[0]](self)

    def _new(self) -> None:
        """Make an object of the type below the top of the stack with the arguments on the top."""
        _check_called(self.stack[-2])
        _OPERATIONS[pickle.NEWOBJ[0]](self)

    def _new_with_names(self) -> None:
        """As `_new`, with arguments by name on the top."""
        _check_called(self.stack[-3])
        _OPERATIONS[pickle.NEWOBJ_EX[0]](self)

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it makes objects as Python 2 did")

    dispatch = _OPERATIONS | {
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _new,
        pickle.NEWOBJ_EX[0]: _new_with_names,
        # No version of Python 3 writes these.
        pickle.INST[0]: _refuse,
        pickle.OBJ[0]: _refuse,
    }


class _MetadataUnpickler(_Unpickler):
    known = _OF_METADATA


class _ObjectUnpickler(_Unpickler):
    known = _OF_OBJECTS

    def find_class(self, module: str, name: str) -> Any:
        if _renamed(module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _tensor_of_type
        if (module, name) == ("_codecs", "encode"):
            return _bytes_of
        found = _imported(module, name)
        return found if _is_enum(found) else super().find_class(module, name)


def read_metadata(file: IO[bytes]) -> Any:
    """The contents of `.metadata`, a `Metadata` unless the file is damaged. Raises anything for a damaged one."""
    return _MetadataUnpickler(file).load()


def read_object(data: bytes, trusted: frozenset[tuple[str, str]] = frozenset()) -> Any:
    """The object that `torch.save` wrote.

    Raises:
        UntrustedNameError: it names something else than the known types and `trusted`.
        Exception: the bytes are damaged.
    """
    unpickler = type("Unpickler", (_ObjectUnpickler,), {"trusted": trusted})
    # torch reads the tensors of the object, with this class for the rest.
    reader: Any = types.SimpleNamespace(Unpickler=unpickler, __name__="tundish")
    return torch.load(_repacked(data), map_location="cpu", pickle_module=reader, weights_only=False)


# The records of an archive of `torch.save` that hold an object.
_RECORD = re.compile(r"[^/]*/(data\.pkl|byteorder|data/\d+)")


def _repacked(data: bytes) -> io.BytesIO:
    """A new archive with the records of `data` that hold an object.

    torch and `zipfile` may find different records in the same bytes, and torch runs the programs of some.
    """
    records: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > len(data):
            raise zipfile.BadZipFile("its records are compressed, or share bytes")
        for entry in archive.infolist():
            if found := _RECORD.fullmatch(entry.filename):
                records[found[1]] = archive.read(entry)
    repacked = io.BytesIO()
    with zipfile.ZipFile(repacked, "w") as archive:
        for name, record in {"version": b"3\n", **records}.items():
            archive.writestr(f"archive/{name}", record)
    repacked.seek(0)
    return repacked


def names_of(trusted: Any) -> frozenset[tuple[str, str]]:
    """The names of the types that a caller trusts. Raises `InvalidTypeError` for something else than types."""
    if not isinstance(trusted, Iterable) or not all(isinstance(kind, type) for kind in trusted):
        raise InvalidTypeError(f"trusted is {trusted!r}: give a list of types, whose pickles are read")
    return frozenset((kind.__module__, kind.__qualname__) for kind in trusted)


def _renamed(module: str, name: str) -> tuple[str, str]:
    """A name of Python 2, which the protocol of `torch.save` writes, as it is called now."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _imported(module: str, name: str) -> Any:
    """The object with this name in a module that is imported already; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not `getattr`, at which some modules import others.
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    return found


def _is_enum(found: Any) -> bool:
    """Whether it is an enumeration; a call of one without members would make a new one."""
    return isinstance(found, type) and issubclass(found, Enum) and len(found) > 0


def _member(kind: Any, name: Any) -> Any:
    """`getattr` for members of enumerations alone."""
    if not _is_enum(kind) or name not in kind.__members__:
        raise UntrustedNameError("builtins.getattr")
    return kind.__members__[name]


def _check_called(called: Any) -> None:
    """Refuse the call of `numpy.ndarray`: with a buffer of addresses it makes objects of them."""
    # Arrays are pickled by other functions.
    if isinstance(called, type) and issubclass(called, np.ndarray):
        raise pickle.UnpicklingError("it calls numpy.ndarray")


def _bytes_of(text: Any, encoding: Any) -> bytes:
    """`_codecs.encode` for the bytes in a pickle of protocol 2 alone: other encodings import modules."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes {type(text).__name__} as {encoding!r:.100}")
    return text.encode("latin1")


def _tensor_of_type(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """torch's `_rebuild_from_type_v2`, which sets attributes of the result, for tensors alone."""
    _check_called(make)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise pickle.UnpicklingError(f"{kind!r} is no type of tensors")
    return torch._tensor._rebuild_from_type_v2(make, kind, arguments, state)  # type: ignore[no-untyped-call]


def _is_within_state(generator: Any) -> bool:
    """Whether the position of a random generator lies within its state. numpy reads there without a check."""
    bits = generator if isinstance(generator, np.random.BitGenerator) else generator._bit_generator
    position = {"MT19937": lambda: bits.state["state"]["pos"], "Philox": lambda: bits.state["buffer_pos"]}
    most = {"MT19937": 624, "Philox": 4}
    kind = type(bits).__name__
    return kind not in position or 0 <= position[kind]() <= most[kind]


def _is_valid(dtype: np.dtype[Any]) -> bool:
    """Whether numpy makes a dtype with the same layout, so that no element reaches beyond an array's memory."""
    if dtype.subdtype is not None:
        made = np.dtype(dtype.subdtype)
    elif dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names or ()]
        made = np.dtype(
            {
                "names": list(dtype.names or ()),
                "formats": [field[0] for field in fields],
                "offsets": [field[1] for field in fields],
                "itemsize": dtype.itemsize,
            },
            align=dtype.isalignedstruct,
        )
    else:
        made = np.dtype(dtype.str)
    return (made.itemsize, made.flags, made.alignment) == (dtype.itemsize, dtype.flags, dtype.alignment)
