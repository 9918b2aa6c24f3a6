"""A second user of the node reads, changes, removes and exhausts nothing of this user's shared memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support.shm.pool_tasks as tasks
from support.shm.leftovers import PREFIX, children, descriptors
from support.shm.script_process import PROLOGUE, ScriptError, ScriptProcess

import tundish as td

NOBODY = 65534
# It imports everything before it changes its user, who may not read the installed files.
AS_NOBODY = (
    PROLOGUE + f"from tundish.shm import Handle\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n"
)
NAME = f"{PREFIX}of-another-user"


@pytest.fixture
def stranger() -> Iterator[ScriptProcess]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with ScriptProcess(AS_NOBODY) as stranger:
        yield stranger


def test_a_segment_without_a_name_cannot_be_attached_to_or_opened(stranger: ScriptProcess) -> None:
    with td.shm.SharedArray.from_array(np.arange(100_000)) as shared:
        handle = shared.handle
        with pytest.raises(ScriptError, match="Permission denied") as refused:
            stranger.run(f"SharedArray.attach({handle!r})")
        assert refused.value.kind == "SegmentGoneError"
        for mode in ("rb", "r+b"):
            with pytest.raises(ScriptError, match="Permission denied"):
                stranger.run(f"open('/proc/{handle.process}/fd/{handle.descriptor}', {mode!r})")
        assert (shared.array == np.arange(100_000)).all()


def test_a_named_segment_is_found_read_changed_and_removed_by_its_user_alone(stranger: ScriptProcess) -> None:
    with td.shm.SharedArray.create((1000,), np.int64, name=NAME) as shared:
        shared.array[:] = 7
        path = Path(f"/dev/shm/tundish-{os.geteuid()}-{NAME}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ScriptError) as refused:
            stranger.run(f"SharedArray.attach({NAME!r})")
        assert refused.value.kind == "NotFoundError"
        for attempt in (
            f"open({str(path)!r}, 'rb')",
            f"open({str(path)!r}, 'r+b')",
            f"os.unlink({str(path)!r})",
            f"os.rename({str(path)!r}, {str(path) + '-moved'!r})",
            f"os.truncate({str(path)!r}, 0)",
        ):
            with pytest.raises(ScriptError, match=r"Permission denied|Operation not permitted"):
                stranger.run(attempt)
        # Its own sweep neither sees nor removes it.
        report = stranger.run("found = sweep(); answer = [one.name for one in (*found.removed, *found.live)]")
        assert NAME not in report and path.exists()
        # Names of different users differ, so no user can take a name from another.
        stranger.run(f"mine = SharedArray.create((10,), np.int8, name={NAME!r})")
        assert (shared.array == 7).all()
        stranger.run("mine.close(); del mine")


def test_files_of_another_user_under_this_users_names_are_left_alone(stranger: ScriptProcess) -> None:
    path = Path(f"/dev/shm/tundish-{os.geteuid()}-{NAME}")
    stranger.run(f"os.chmod(os.open({str(path)!r}, os.O_CREAT | os.O_RDWR), 0o666)")
    try:
        with pytest.raises(td.errors.NotFoundError):
            td.shm.SharedArray.attach(NAME)
        with pytest.raises(td.errors.AlreadyExistsError, match="another user"):
            td.shm.SharedArray.create((10,), np.int8, name=NAME)
        report = td.shm.sweep()
        assert NAME not in [one.name for one in (*report.removed, *report.live)] and path.exists()
    finally:
        path.unlink()


def test_a_pool_has_no_socket_file_or_memory_that_another_user_reaches(stranger: ScriptProcess) -> None:
    with td.shm.SharedPool(tasks.large, max_workers=1) as pool:
        assert pool.submit((1, 100_000)).result(20).sum() == 100_000
        makers = {str(os.getpid()), *map(str, children())}
        assert [name for name in os.listdir("/dev/shm") if makers & set(name.split("-"))] == []
        # Its sockets are pairs without a name.
        mine = {place.removeprefix("socket:[").rstrip("]") for place in descriptors().values()}
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        # Flags, type, state, inode, and the name where there is one.
        sockets = [fields for fields in lines if fields[6] in mine]
        assert sockets and not [fields for fields in sockets if len(fields) > 7 and "tundish" in fields[7]]
        with pytest.raises(ScriptError, match="Permission denied"):
            stranger.run(f"os.listdir('/proc/{os.getpid()}/fd')")


def test_a_file_system_that_another_user_filled_is_an_error_with_the_free_size(
    folder: Path, stranger: ScriptProcess
) -> None:
    with ScriptProcess(AS_NOBODY) as filler:
        filler.run(
            f"full = open({str(folder / 'full')!r}, 'wb'); os.posix_fallocate(full.fileno(), 0, 63 << 20)"
        )
        with pytest.raises(td.errors.StorageError, match="bytes are free"):
            td.shm.SharedArray.create((4 << 20,), np.int8, name=NAME)
        # Memory without a name does not lie there.
        with td.shm.SharedArray.create((4 << 20,), np.int8) as shared:
            assert shared.array.nbytes == 4 << 20
        filler.run(f"os.unlink({str(folder / 'full')!r})")
