"""A file system of a few megabytes, for tests of full disks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, timeout=30)
    try:
        yield folder
    finally:
        # Lazily: the traceback of an error that the test saw may keep a file open.
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)
