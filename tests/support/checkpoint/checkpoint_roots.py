"""Roots of checkpoints without a checkpointer: how tests save to one, and processes that have one open."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from support.distributed.programs import PIPE, Program
from tundish import _native

Root = _native.CheckpointRoot


def manifest(kind: str, step: int, sizes: dict[str, int], **more: object) -> str:
    files = [{"name": name, "size": size, "checksum": None} for name, size in sizes.items()]
    fields = {"format_version": 1, "kind": kind, "step": step, "world_size": 1, "tag": None, "files": files}
    return json.dumps(fields | more)


def crc64(data: bytes) -> str:
    """CRC-64/NVME byte by byte, from the definition."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x9A6C9329AC4BC9B5 if byte & 1 else 0)
        table.append(byte)
    value = 2**64 - 1
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return f"crc64nvme:{value ^ 2**64 - 1:016x}"


def add_manifest_checksum(text: str) -> str:
    """A manifest with the checksum of itself, for folders that tests change."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},\n  "checksum": "{crc64(body.encode())}"\n}}\n'


def add_checksums(folder: Path) -> None:
    """Give the manifest of a checkpoint the sizes and checksums of the files as they are."""
    path = folder / "tundish.json"
    fields = json.loads(path.read_text())
    del fields["checksum"]
    for file in fields["files"]:
        data = (folder / file["name"]).read_bytes()
        file.update(size=len(data), checksum=crc64(data))
    path.write_text(add_manifest_checksum(json.dumps(fields)))


def save(
    root: Root, kind: str, step: int, *, overwrite: bool = False, mark: str = "", **more: object
) -> Path:
    folder = root.begin(kind, step, overwrite=overwrite)
    files = {"weights": f"{kind} {step} {mark}", "inner/rest": "rest"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    sizes = {name: len(text) for name, text in files.items()}
    return root.publish(kind, step, manifest(kind, step, sizes, **more), overwrite=overwrite)


@contextlib.contextmanager
def started(program: str, *arguments: object) -> Iterator[Program]:
    process = Program(["-c", program, *arguments], stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
