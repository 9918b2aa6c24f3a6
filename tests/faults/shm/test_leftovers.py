"""Sweeps find and remove the named segments of killed processes, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.shm.script_process import ScriptError, ScriptProcess

from tundish.shm import sweep

CREATE = "held = SharedArray.from_array(np.full(1000, {value}), name='{name}')"
ATTACH = "read = SharedArray.attach('{name}')"


def names(segments: tuple[object, ...]) -> list[str]:
    return [segment.name for segment in segments]  # type: ignore[attr-defined]


def killed(name: str, value: int = 1) -> int:
    """The pid of a process that was killed while it had a segment."""
    with ScriptProcess() as script:
        script.run(CREATE.format(name=name, value=value))
        script.kill()
        return script.pid


def test_the_segment_of_a_killed_creator_is_found_and_swept(folder: Path) -> None:
    pid = killed("tokens")
    seen = sweep(dry_run=True)
    assert names(seen.removed) == ["tokens"]
    assert seen.removed[0].made_by == pid
    assert seen.removed[0].path == folder / f"tundish-{os.getuid()}-tokens"
    assert seen.removed[0].path.exists()
    assert names(sweep().removed) == ["tokens"]
    assert sweep().removed == ()


def test_the_first_segment_of_the_next_run_sweeps(folder: Path) -> None:
    killed("old")
    with ScriptProcess() as script:
        script.run(CREATE.format(name="new", value=2))
        assert [path.name for path in folder.iterdir()] == [f"tundish-{os.getuid()}-new"]
        assert script.finish() == 0


def test_the_name_of_a_dead_segment_is_free(folder: Path) -> None:
    killed("tokens", 1)
    with ScriptProcess() as reader, ScriptProcess() as creator:
        with pytest.raises(ScriptError) as missing:
            reader.run(ATTACH.format(name="tokens"))
        assert missing.value.kind == "NotFoundError"
        creator.run(CREATE.format(name="tokens", value=2))
        reader.run(ATTACH.format(name="tokens"))
        assert reader.run("answer = int(read.array.sum())") == 2000
        assert creator.finish() == 0
        assert reader.finish() == 0


def test_a_creator_killed_while_others_map_it_takes_nothing_from_them(folder: Path) -> None:
    with ScriptProcess() as creator, ScriptProcess() as reader, ScriptProcess() as second:
        creator.run(CREATE.format(name="tokens", value=3))
        reader.run(ATTACH.format(name="tokens"))
        creator.kill()
        report = sweep()
        assert (report.removed, names(report.live)) == ((), ["tokens"])
        # Others can still attach by its name.
        second.run(ATTACH.format(name="tokens"))
        assert reader.run("answer = int(read.array.sum())") == 3000
        with pytest.raises(ScriptError, match="or by processes that are attached to it"):
            second.run(CREATE.format(name="tokens", value=4))
        reader.run("read.close(); del read")
        assert second.run("answer = int(read.array.sum())") == 3000
        # The last process removes the name.
        assert second.finish() == 0


def test_one_sweep_removes_the_segments_of_all_killed_processes(folder: Path) -> None:
    scripts = [ScriptProcess() for _ in range(4)]
    for number, script in enumerate(scripts):
        script.run(CREATE.format(name=f"of{number}", value=number))
    for number, script in enumerate(scripts):
        script.run(ATTACH.format(name=f"of{(number + 1) % 4}"))
    for script in scripts:
        script.process.send_signal(signal.SIGKILL)
    for script in scripts:
        with script:
            script.process.wait()
    assert names(sweep().removed) == ["of0", "of1", "of2", "of3"]


def test_a_creator_killed_before_it_is_done_leaves_nothing(folder: Path) -> None:
    before = os.statvfs(folder).f_bfree
    with ScriptProcess() as script:
        script.start(
            "from tundish.shm import shared_array as array\n"
            "array._copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "SharedArray.from_array(np.arange(100000)[::2], name='half')"
        )
        assert script.process.wait(timeout=30) == -signal.SIGKILL
    assert list(folder.iterdir()) == []
    assert os.statvfs(folder).f_bfree == before


def test_a_child_made_by_fork_holds_inherited_segments(folder: Path) -> None:
    with ScriptProcess() as script:
        script.run(CREATE.format(name="tokens", value=5))
        # It lives until the pipe of its parent is closed, and writes nothing to it.
        child = script.run("answer = os.fork()\nif answer == 0:\n    signal.pause()\n    os._exit(0)")
        script.kill()
        try:
            assert names(sweep().live) == ["tokens"]
        finally:
            os.kill(child, signal.SIGKILL)
        # It is no child of this process: only the locks show its end.
        for _ in range(1000):
            if sweep().removed:
                break
        else:
            raise AssertionError("it is dead")


def test_a_script_that_never_closes_leaves_nothing(folder: Path) -> None:
    with ScriptProcess() as script:
        script.run(CREATE.format(name="tokens", value=5))
        script.run("view = held.array[10:]")
        assert script.finish() == 0
    assert list(folder.iterdir()) == []


def test_files_of_another_user_are_never_touched(folder: Path) -> None:
    with ScriptProcess() as other:
        other.run("import shutil; os.setuid(65534)")
        other.run(CREATE.format(name="theirs", value=1))
        theirs = folder / "tundish-65534-theirs"
        assert theirs.exists()
        # In a shared folder, any user can choose a name like those of this user.
        posing = folder / f"tundish-{os.getuid()}-posing"
        other.run(f"shutil.copyfile({str(theirs)!r}, {str(posing)!r}); os.chmod({str(posing)!r}, 0o666)")
        assert posing.stat().st_uid == 65534
        other.kill()
        report = sweep()
        assert (report.removed, report.live, report.failed) == ((), (), ())
        assert theirs.exists()
        assert posing.exists()
    with ScriptProcess() as creator:
        with pytest.raises(ScriptError, match="another user or program"):
            creator.run(CREATE.format(name="posing", value=1))
        with pytest.raises(ScriptError, match="there is no segment"):
            creator.run(ATTACH.format(name="posing"))
        # The other user sweeps its own segments only.
        killed("ours")
        creator.run("os.setuid(65534)")
        assert creator.run("answer = [one.name for one in sweep().removed]") == ["theirs"]
        posing.unlink()
    assert names(sweep().removed) == ["ours"]


def test_files_of_another_program_are_never_touched(folder: Path) -> None:
    others = [folder / f"tundish-{os.getuid()}-theirs", folder / "psm_12345"]
    others[0].write_bytes(b"x" * 10000)
    others[1].write_bytes(b"")
    killed("ours")
    assert names(sweep().removed) == ["ours"]
    assert sweep().live == ()
    for path in others:
        assert path.exists()
        path.unlink()


def test_two_runs_side_by_side_do_not_see_each_other(folder: Path) -> None:
    with ScriptProcess() as one, ScriptProcess() as two:
        one.run(CREATE.format(name="one", value=1))
        two.run(CREATE.format(name="two", value=2))
        assert one.run("answer = [x.name for x in sweep().removed]") == []
        with pytest.raises(ScriptError, match=f"held by process {one.pid}") as taken:
            two.run("SharedArray.create(10, np.int64, name='one')")
        assert taken.value.kind == "AlreadyExistsError"
        one.kill()
        assert two.run("answer = [x.name for x in sweep().removed]") == ["one"]
        assert two.run("answer = int(held.array.sum())") == 2000
        assert two.finish() == 0


def test_the_command_lists_and_sweeps(folder: Path) -> None:
    killed("dead")
    with ScriptProcess() as script:
        # Not the first segment of the process, so that it does not sweep.
        script.run("sweeping = SharedArray.create(1, np.int8, name='first')")
        killed("left")
        script.run(CREATE.format(name="living", value=1))
        listed = subprocess.run(
            [sys.executable, "-m", "tundish", "shm", "ls"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert [(line.split()[0], line.split()[-1]) for line in listed] == [
            ("first", "held"),
            ("left", "dead"),
            ("living", "held"),
        ]
        assert f"made by {script.pid} " in listed[2]
        assert script.finish() == 0
    swept = subprocess.run(
        [sys.executable, "-m", "tundish", "shm", "sweep"], capture_output=True, text=True, check=True
    )
    assert swept.stdout.startswith("removed left: ")
