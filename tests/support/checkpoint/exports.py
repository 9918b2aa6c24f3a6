"""Saves Hugging Face exports as the checkpointer does, without one, and compares folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tundish._native import FileMetadata
from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.hf.gather import ExchangeGroup
from tundish.checkpoint.root import DiskDraft, WriteOptions
from tundish.checkpoint.staging import Staged
from tundish.distributed import voter_of

PAGE = 4096


def options(progress: Any = lambda ask: None) -> WriteOptions:
    return WriteOptions(checksum=True, set_progress=progress)


def connected_exchange_group() -> ExchangeGroup:
    """Collective: an exchange group of all ranks of the job."""
    group = ExchangeGroup(voter_of(None))
    group.connect("exchange")
    return group


@contextlib.contextmanager
def staged(export: HfExport) -> Iterator[Staged]:
    """The staged save, released after the block."""
    with contextlib.ExitStack() as resources:
        resources.callback(export.release)
        save = Staged(export.write_plan())
        resources.callback(save.release)
        save.copy()
        yield save


def write(save: Staged, folder: Path, *, is_first: bool = True) -> list[FileMetadata]:
    """Write a staged save into `folder`, which is created if it is missing."""
    folder.mkdir(exist_ok=True)
    save.wait_staged(60)
    facts = save.write(DiskDraft(folder), options())
    return facts + (save.write_late_files(DiskDraft(folder), []) if is_first else [])


def export(folder: Path, model_or_tensors: Any, **arguments: Any) -> list[FileMetadata]:
    with staged(HfExport(model_or_tensors, **arguments)) as save:
        return write(save, folder)


def header_and_data(path: Path) -> tuple[bytes, bytes]:
    """The header of a safetensors file without its padding, and the data."""
    contents = path.read_bytes()
    start = 8 + int.from_bytes(contents[:8], "little")
    return contents[8:start].rstrip(b" "), contents[start:]


def assert_same_export(ours: Path, theirs: Path) -> None:
    """Both folders hold the same files, byte for byte, but for the padding of headers: ours fill pages."""
    assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
    for path in ours.iterdir():
        if path.suffix == ".safetensors":
            assert header_and_data(path) == header_and_data(theirs / path.name), path.name
            assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % PAGE == 0
        else:
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path.name
