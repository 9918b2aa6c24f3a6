"""Invalid roots and arguments are refused before anything is made."""

from __future__ import annotations

import errno
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.distributed.programs import PIPE, Program

from tundish.checkpoint import Checkpointer, open_readonly, verify
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, RootInUseError, StorageError


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"on_failure": "explode"}, "on_failure"),
        ({"staging_limit_bytes": -1}, "staging_limit_bytes"),
        ({"checksum": "md5"}, "checksum"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], named: str
) -> None:
    root = tmp_path / "root"
    with pytest.raises(InvalidInputError, match=named):
        Checkpointer(root, **arguments)
    assert not root.exists()


def test_a_root_that_is_a_file_or_closed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpointer(tmp_path / "file")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        Checkpointer(tmp_path / "loop")


def test_invalid_paths_and_steps_are_refused_with_errors_of_the_library(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    for call in (Checkpointer, open_readonly, verify):
        with pytest.raises(StorageError, match="too long"):
            call(long)
        with pytest.raises(InvalidTypeError, match="None"):
            call(None)  # type: ignore[arg-type]
        for path in ("", "a\0b", "a\ud800"):
            with pytest.raises(InvalidInputError, match="names no folder"):
                call(path)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        with pytest.raises(InvalidTypeError, match="path is 3"):
            checkpointer.verify(3)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError, match="hf-7"):
            checkpointer.verify("hf-7")


@pytest.mark.usefixtures("tmp_path_of_all")
def test_a_root_in_a_folder_that_may_not_be_looked_into_is_refused(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    is_root = os.geteuid() == 0
    for call in (Checkpointer, open_readonly, verify):
        locked.chmod(0)
        try:
            if is_root:
                os.seteuid(65534)
            with pytest.raises(StorageError) as refused:
                call(locked / "root")
        finally:
            if is_root:
                os.seteuid(0)
            locked.chmod(0o755)
        assert refused.value.errno == errno.EACCES
        assert str(locked) in str(refused.value)


def test_a_root_that_another_process_owns_is_refused_by_its_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    program = f"""
        import time, tundish.checkpoint.checkpointer
        checkpointer = tundish.checkpoint.Checkpointer({str(root)!r})
        print("open", flush=True)
        time.sleep(60)
    """
    with Program(["-c", textwrap.dedent(program)], stdout=PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        # It waits for the owner to end, but no longer than ranks wait for each other.
        with pytest.raises(RootInUseError, match=str(owner.pid)):
            Checkpointer(root, timeout=1)
        owner.kill()
        owner.wait()
        # The kernel dropped its lock, so this one need not wait.
        Checkpointer(root).close()
