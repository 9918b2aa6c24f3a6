"""Writes the files of an export beside its weights: configs, code, tokenizer, and the contents of a source folder.

Invariants:
    - Everything but the tokenizer has its state at the call: configs are in memory, source files are open.
    - Files of the caller's objects take precedence over files of the source folder with the same name.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch

from tundish.checkpoint.hf.adapters import Adapters
from tundish.checkpoint.hf.safetensors import INDEX_NAME
from tundish.checkpoint.hf.transformers import save_settings, set_dtype
from tundish.checkpoint.write_plan import SmallFile
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError, format_type

# Weights and trainer states, in the formats in which they lie beside a config.
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".distcp",
)
# Version control and download caches, which keep weights under other names, and the manifest of a checkpoint.
_LEFT_OUT = (".git", ".cache", "tundish.json")
# With this file, from_pretrained looks for the weights of the whole model.
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Sidecars:
    """The files beside the weights.

    Attributes:
        files: contents, or open files to copy, by their names in the checkpoint.
        tokenizer: the caller's tokenizer or processor, or None.
        size: bytes of `files`.
    """

    files: dict[str, bytes | BinaryIO]
    tokenizer: Any
    size: int

    def contents(self) -> list[SmallFile]:
        """All files, with those of the tokenizer, which take precedence."""
        found: dict[str, bytes | BinaryIO] = dict(self.files)
        if self.tokenizer is not None:
            found |= _saved(lambda scratch: self.tokenizer.save_pretrained(scratch))
        return [SmallFile(name, contents) for name, contents in found.items()]

    def release(self) -> None:
        """Close the files. Never raises."""
        for file in self.files.values():
            if not isinstance(file, bytes):
                file.close()


def collect_sidecars(
    *,
    model: Any,
    adapters: Adapters | None = None,
    config: Any,
    tokenizer: Any,
    source_dir: str | os.PathLike[str] | None,
    root: Path | None = None,
    dtype: torch.dtype | None,
    index: bytes | None,
) -> Sidecars:
    """Collect the files beside the weights; release the result.

    Args:
        model: a transformers model, or None.
        adapters: the adapters of a model that has some.
        config: replaces the model's own config.
        tokenizer: has `save_pretrained`, or is None.
        source_dir: a folder to copy from.
        root: the folder of all checkpoints, which is left out if it lies in `source_dir`.
        dtype: the weights are converted to this dtype.
        index: the contents of the index of the shards, or None.

    Raises:
        InvalidTypeError: `config` or `tokenizer` cannot be saved, or `source_dir` is no path.
        NotFoundError: `source_dir` is no folder.
        InvalidInputError: `source_dir` is the root, or contains a circle of links or a name that is not UTF-8; or both
            a `config` and adapters are given.
        StorageError: a file in `source_dir` cannot be read.
        Exception: raised by the `save_pretrained` of a config.
    """
    for name, one in (("config", config), ("tokenizer", tokenizer)):
        if one is not None and not callable(getattr(one, "save_pretrained", None)):
            raise InvalidTypeError(
                f"{name} is {format_type(one)}, which has no save_pretrained: give an object of transformers"
            )
    if config is not None and adapters is not None:
        raise InvalidInputError(
            "config is given for a model that holds adapters: beside adapters a config.json says that the whole "
            "model is there, and from_pretrained would look for its weights; leave config out"
        )
    settings = _settings(model, adapters, config, dtype)
    if index is not None:
        settings[INDEX_NAME] = index
    replaced = settings.keys() if adapters is None else {_CONFIG, *settings}
    files = {} if source_dir is None else _open_source_files(source_dir, root, replaced)
    size = sum(os.fstat(file.fileno()).st_size for file in files.values())
    return Sidecars(
        files={**files, **settings}, tokenizer=tokenizer, size=size + sum(map(len, settings.values()))
    )


def _settings(
    model: Any, adapters: Adapters | None, config: Any, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """The files of configs and code, by name."""
    if model is None and adapters is None and config is None:
        return {}

    def save(scratch: str) -> None:
        if adapters is not None:
            adapters.save_settings(scratch)
        elif model is not None:
            save_settings(model, config, dtype, scratch)
        else:
            own = copy.deepcopy(config)
            set_dtype(own, dtype)
            own.save_pretrained(scratch)

    return _saved(save)


def _saved(save: Callable[[str], Any]) -> dict[str, bytes]:
    """The files that `save` writes into the folder that it gets, by name."""
    with TemporaryDirectory() as scratch:
        save(scratch)
        folder = Path(scratch)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def _open_source_files(source_dir: Any, root: Path | None, left_out: Collection[str]) -> dict[str, BinaryIO]:
    """The open files of a source folder, by their relative paths; without those in `left_out`."""
    if not isinstance(source_dir, str | os.PathLike):
        raise InvalidTypeError(f"source_dir is {source_dir!r}: give the path of a folder")
    folder = Path(source_dir)
    if not folder.is_dir():
        raise NotFoundError(errno.ENOENT, "source_dir is not a folder", str(folder))
    if root is not None and folder.samefile(root):
        raise InvalidInputError(
            f"source_dir is {str(folder)!r}, the root of the checkpoints: give the folder of one model"
        )
    with contextlib.ExitStack() as stack:
        try:
            named = [(_relative_name(path, folder), path) for path in _source_files(folder, root)]
            opened: dict[str, BinaryIO] = {
                name: stack.enter_context(path.open("rb")) for name, path in named if name not in left_out
            }
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"cannot read source_dir ({error.strerror or error})",
                str(error.filename or folder),
            ) from error
        stack.pop_all()
        return opened


def _source_files(folder: Path, root: Path | None) -> Iterator[Path]:
    """The files to copy; links to folders are followed."""
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        if root is not None and Path(here).samefile(root):
            folders.clear()
            continue
        status = Path(here).stat()
        if (status.st_dev, status.st_ino) in seen:
            raise InvalidInputError(f"{here} is a link to a folder that source_dir has already: take it out")
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(here, name)
            # Not pipes, and not links that lead nowhere.
            if name not in _LEFT_OUT and not name.endswith(_WEIGHTS) and path.is_file():
                yield path


def _relative_name(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"{str(path)!r} in source_dir has a name that is no UTF-8: rename it, or take it out"
        ) from None
    return name
