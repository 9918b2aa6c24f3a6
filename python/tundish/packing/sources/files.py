"""Finds the files that a path, a folder or a glob stands for, and their kind."""

from __future__ import annotations

import errno
import glob
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError, NotFoundError, StorageError, format_count
from tundish.packing.arguments import as_path

__all__ = ["find_files"]

# The kind of a file by the ending of its name.
_ENDINGS = {
    ".npy": "npy",
    ".npz": "npz",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".idx": "megatron",
    ".bin": "megatron",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
# Kinds of which several files are one dataset.
_IN_FILES = frozenset({"parquet", "arrow", "jsonl"})
_MAGIC = {b"\x93NUMPY": "npy", b"PAR1": "parquet", b"ARROW1": "arrow", b"MMIDIDX": "megatron"}
_OTHER_KINDS = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def find_files(source: Any) -> tuple[str, list[Path]]:
    """Return the kind of the files that `source` stands for, and the files in the order of their samples.

    Args:
        source: A path, a glob, or a list of paths.

    Returns:
        One of "npy", "npz", "parquet", "arrow", "megatron" and "jsonl", and at least one file.

    Raises:
        InvalidInputError: A file is of no kind that holds samples, or the files are of several kinds.
        NotFoundError: There is no such file.
        StorageError: A file or folder cannot be read.
    """
    if isinstance(source, list | tuple):
        paths = [as_path(path, f"source[{number}]") for number, path in enumerate(source)]
        for path in paths:
            if _mode(path) is None:
                raise NotFoundError(errno.ENOENT, "there is no such file", str(path))
        return _one_kind(paths, "the list")
    path = as_path(source, "source")
    mode = _mode(path)
    if mode is not None:
        return _folder(path) if stat.S_ISDIR(mode) else (_kind(path), [_index_of(path)])
    if glob.has_magic(str(path)):
        # A pattern may begin at the root, which Path.glob refuses.
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = [one for one in found if not one.is_dir()]
        if not files:
            raise NotFoundError(errno.ENOENT, "no file matches this glob", str(path))
        return _one_kind(files, str(path))
    index = path.with_name(f"{path.name}.idx")
    if index.is_file():
        # The name that Megatron-LM itself gives to both files.
        return "megatron", [index]
    reason = (
        "there is no such file or folder on this machine; of other datasets, give what load_dataset returns"
    )
    raise NotFoundError(errno.ENOENT, reason, str(source))


def _mode(path: Path) -> int | None:
    """The type of what is at `path`, or None if nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _kind(path: Path) -> str:
    mode = _mode(path) or 0
    if not stat.S_ISREG(mode):
        # Opening a pipe would wait.
        found = "folder" if stat.S_ISDIR(mode) else _OTHER_KINDS.get(stat.S_IFMT(mode), "device")
        raise InvalidInputError(f"{path}: is a {found}; give a regular file")
    try:
        with path.open("rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    by_content = next((name for magic, name in _MAGIC.items() if begin.startswith(magic)), None)
    kind = _ENDINGS.get(path.suffix.lower(), by_content)
    if kind is None:
        raise InvalidInputError(
            f"{path}: is of no known kind; the names of files with samples end in {', '.join(_ENDINGS)}; load others "
            "yourself, for example with datasets.load_dataset, and give the samples"
        )
    return kind


def _index_of(path: Path) -> Path:
    if path.suffix.lower() != ".bin":
        return path
    index = path.with_suffix(".idx")
    if _mode(index) is None:
        raise NotFoundError(errno.ENOENT, f"does not exist; it is the index of {path.name}", str(index))
    return index


def _one_kind(paths: Sequence[Path], where: str) -> tuple[str, list[Path]]:
    """The kind of several files, which are one dataset."""
    kinds: dict[str, Path] = {}
    for path in paths:
        kinds.setdefault(_kind(path), path)
    if len(kinds) > 1:
        named = " and ".join(f"{path} ({kind})" for kind, path in kinds.items())
        raise InvalidInputError(f"{where}: has files of several kinds, {named}: name those with the samples")
    kind = next(iter(kinds))
    if kind not in _IN_FILES and len(paths) > 1:
        raise InvalidInputError(
            f"{where}: has {format_count(len(paths), 'file')} of kind {kind}, each of which is a dataset: give them "
            "one by one, and pack them with pack_datasets"
        )
    return kind, [_index_of(path) for path in paths]


def _folder(path: Path) -> tuple[str, list[Path]]:
    """The files of a folder: one that `Dataset.save_to_disk` wrote, or one of files with samples alone."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
    if "state.json" in names:
        return "arrow", _saved_dataset(path)
    if "dataset_dict.json" in names:
        splits = [name for name in names if (path / name / "state.json").is_file()]
        raise InvalidInputError(
            f"{path}: is a folder of a DatasetDict with the splits {', '.join(splits)}: give the folder of one"
        )
    # Spark and others write marks beside their data.
    files = [path / name for name in names if not name.startswith((".", "_"))]
    others = [one.name for one in files if one.is_dir() or _ENDINGS.get(one.suffix.lower()) not in _IN_FILES]
    if others or not files:
        found = f"holds {', '.join(others[:8])}" if others else "holds no files"
        raise InvalidInputError(
            f"{path}: is a folder that {found}, and not Parquet, Arrow or JSON Lines files alone: name the files with "
            f"the samples, for example by a glob such as {path / '*.parquet'}"
        )
    return _one_kind(files, f"{path}: is a folder that")


def _saved_dataset(path: Path) -> list[Path]:
    state_path = path / "state.json"
    try:
        state = json.loads(state_path.read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        files = [path / name for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{state_path}: is not what Dataset.save_to_disk writes: {error!r}; save the dataset again"
        ) from error
    if state.get("_indices_data_files") or state.get("_indices_files") or not files:
        raise InvalidInputError(
            f"{state_path}: was written by a version of datasets before 2.0; load the dataset and save it again"
        )
    for file in files:
        if not file.is_file():
            raise NotFoundError(
                errno.ENOENT, f"{state_path} names this file, which does not exist", str(file)
            )
    return files
