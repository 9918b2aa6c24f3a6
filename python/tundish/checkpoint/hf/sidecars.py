"""Writes the files of an export beside its weights: configs, tokenizer, and what lies in a source folder.

Invariants:
    - A source folder is only read. Its weights, and links that lead in a circle, are not copied.
    - Its files are open from the call on, so that nobody can take them away.
    - What the caller's objects write takes precedence over a file of the source folder with the same name.
    - Nothing that is written is a link, so that an export is complete by itself.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch

from tundish._native import FileMetadata, checksum_file
from tundish.checkpoint.hf.adapters import Adapters
from tundish.checkpoint.hf.pretrained import save_code, settings_of
from tundish.checkpoint.hf.shards import INDEX_NAME
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError

__all__ = ["Sidecars", "gather_sidecars"]

# Weights, and states of trainers, in the forms in which they lie beside a config.
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
# Of links that lead nowhere, whatever they say.
_NOWHERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
# Of version control and of downloads, which keep weights under names of their own; of a checkpoint of ours.
_LEFT_OUT = frozenset({".git", ".cache", "tundish.json"})
# Where it lies, from_pretrained looks for the weights of the whole model.
_BESIDE_WHOLE_MODELS = frozenset({"config.json"})


@dataclass(frozen=True, kw_only=True)
class Sidecars:
    """The files beside the weights.

    `source`: names in the checkpoint and the open files to copy there; `size`: their bytes. `settings`: config and
    generation config, this save's own. `model`: whose code is copied, where it is not part of transformers.
    `tokenizer`: or processor; the caller's, written as it is then. `index`: of the shards.
    """

    source: tuple[tuple[str, BinaryIO], ...]
    size: int
    settings: tuple[Any, ...]
    model: Any
    tokenizer: Any
    index: bytes | None

    def write(self, folder: Path, weights: Collection[str]) -> list[FileMetadata]:
        """Write everything into `folder` and make it durable; `weights` are the names of what others write there."""
        others = {path for path in folder.rglob("*") if path.is_file()}
        try:
            self._write_contents(folder)
        except OSError as error:
            # Those who write here do not say which file it was when the disk is full.
            raise StorageError(
                error.errno or errno.EIO,
                f"cannot write what lies beside the weights ({error.strerror or error})",
                error.filename or str(folder),
            ) from error
        facts = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and path not in others and name not in weights:
                known = checksum_file(path)
                facts.append(FileMetadata(name, known.size, known.checksum))
        return facts

    def release(self) -> None:
        """Close the source files. Never raises."""
        for _, file in self.source:
            file.close()

    def _write_contents(self, folder: Path) -> None:
        for name, file in self.source:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # The contents alone: the modes of a hub's cache are not those of a checkpoint.
            with target.open("wb") as copied:
                shutil.copyfileobj(file, copied)
        if self.model is not None:
            save_code(self.model, self.settings[0], str(folder))
        for one in (*self.settings, self.tokenizer):
            if one is not None:
                one.save_pretrained(str(folder))
        if self.index is not None:
            (folder / INDEX_NAME).write_bytes(self.index)
        _replace_links(folder)


def _replace_links(folder: Path) -> None:
    """Put in the place of links what they lead to, as of a source folder; those that lead nowhere are left out."""
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        target = Path(os.path.realpath(link))
        if Path(os.path.realpath(link.parent), link.name).is_relative_to(target):
            raise InvalidInputError(
                f"a save_pretrained wrote {link.relative_to(folder).as_posix()!r}, a link that leads in a circle"
            )
        link.unlink()
        if target.is_dir():
            shutil.copytree(target, link, copy_function=shutil.copyfile, ignore_dangling_symlinks=True)
        elif target.is_file():
            shutil.copyfile(target, link)


def gather_sidecars(
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
    """Collect what is written beside the weights, so that later changes of it have no effect.

    `model`: a model of transformers, or None. `adapters`: those of a model that holds some. `config`: instead of the
    model's own. `root`: the folder of all checkpoints, of which nothing is taken where it lies in `source_dir`. What it
    returns has to be released.

    Raises:
        InvalidTypeError: `config` or `tokenizer` cannot be saved; `source_dir` is no path.
        NotFoundError: `source_dir` is no folder.
        InvalidInputError: `source_dir` is the root, or holds links that lead in a circle, or names that are no text;
            there are both a `config` and adapters.
        StorageError: something in `source_dir` cannot be read.
        Whatever the `save_pretrained` of a config raises.
    """
    for name, one in (("config", config), ("tokenizer", tokenizer)):
        if one is not None and not callable(getattr(one, "save_pretrained", None)):
            raise InvalidTypeError(f"{name} is a {type(one).__name__}, which has no save_pretrained")
    own, generation = _settings_of(model, adapters, dtype)
    if config is not None:
        if adapters is not None:
            raise InvalidInputError(
                "config is given for a model that holds adapters: beside adapters a config.json says that the whole "
                "model is there, and from_pretrained would look for its weights; leave config out"
            )
        own = copy.deepcopy(config)
        if dtype is not None and hasattr(own, "dtype"):
            own.dtype = str(dtype).removeprefix("torch.")
    settings = (own, generation)
    _check_settings([one for one in settings if one is not None])
    left_out = _BESIDE_WHOLE_MODELS if adapters is not None else frozenset[str]()
    source = () if source_dir is None else _opened(source_dir, root, left_out)
    coded = model if adapters is None else adapters.coded
    return Sidecars(
        source=source,
        size=sum(os.fstat(file.fileno()).st_size for _, file in source),
        settings=settings,
        model=coded if coded is not None and coded.is_remote_code() else None,
        tokenizer=tokenizer,
        index=index,
    )


def _settings_of(model: Any, adapters: Adapters | None, dtype: torch.dtype | None) -> tuple[Any, Any]:
    if adapters is not None:
        return adapters.settings()
    return (None, None) if model is None else settings_of(model, dtype)


# Settings that could be saved, so that a training loop does not try them again at each save.
_good: collections.deque[list[Any]] = collections.deque(maxlen=8)


def _check_settings(settings: list[Any]) -> None:
    """Try whether settings can be saved: transformers refuses some that it trains with.

    Here it is an error of the call; in the background it would end the training.
    """
    said = [(type(one), one.to_dict() if hasattr(one, "to_dict") else one) for one in settings]
    if said in _good:
        return
    with TemporaryDirectory() as scratch:
        for one in settings:
            copy.deepcopy(one).save_pretrained(scratch)
        _replace_links(Path(scratch))
    _good.append(said)


def _opened(
    source_dir: Any, root: Path | None, left_out: Collection[str]
) -> tuple[tuple[str, BinaryIO], ...]:
    """Names of everything in a folder that is to be copied, in order, and the files, open; `left_out`: other names."""
    if not isinstance(source_dir, str | os.PathLike):
        raise InvalidTypeError(f"source_dir is {source_dir!r}: give the path of a folder")
    folder = Path(source_dir)
    if not folder.is_dir():
        raise NotFoundError(errno.ENOENT, "source_dir is not a folder", str(folder))
    with contextlib.ExitStack() as stack:
        try:
            own = None if root is None else _identity(root)
            if _identity(folder) == own:
                raise InvalidInputError(
                    f"source_dir is {str(folder)!r}, the root of the checkpoints: give the folder of one model"
                )
            named = [(_name_of(path, folder), path) for path in _walk(folder, (), own)]
            opened = [
                (name, stack.enter_context(path.open("rb"))) for name, path in named if name not in left_out
            ]
        except OSError as error:
            raise StorageError(
                error.errno or errno.EIO,
                f"cannot read what source_dir holds ({error.strerror or error})",
                str(error.filename or folder),
            ) from error
        stack.pop_all()
        return tuple(opened)


def _name_of(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"{str(path)!r} in source_dir has a name that is no UTF-8: rename it, or take it out"
        ) from None
    return name


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _walk(
    folder: Path, above: tuple[tuple[int, int], ...], left_out: tuple[int, int] | None
) -> Iterator[Path]:
    here = _identity(folder)
    if here == left_out:
        return
    if here in above:
        raise InvalidInputError(
            f"{folder} links to a folder that it lies in: take the link out of source_dir"
        )
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.name.endswith(_WEIGHTS):
            continue
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno in _NOWHERE and path.is_symlink():
                continue
            if error.errno == errno.ELOOP:
                raise InvalidInputError(
                    f"{path} is a link that leads to itself: take it out of source_dir"
                ) from None
            raise
        if stat.S_ISDIR(mode):
            yield from _walk(path, (*above, here), left_out)
        elif stat.S_ISREG(mode):
            yield path
