"""Resuming after failures and rollbacks: newer checkpoints are set aside, and none is lost."""

from __future__ import annotations

import ctypes
import json
import logging
import platform
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.programs import run

from tundish.checkpoint import Checkpointer, open_readonly
from tundish.checkpoint.readonly import ReadonlyRoot
from tundish.checkpoint.resume import choose_checkpoint, load_chosen
from tundish.errors import CorruptCheckpointError, NotFoundError


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Both kinds of steps 100 and 200."""
    root = tmp_path / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step in (100, 200):
            checkpointer.save_hf(step, tensors(step), blocking=True)
            checkpointer.save_dcp(step, tensors(step), extra={"step": step}, blocking=True)
    return root


def flip(root: Path) -> None:
    shard = root / "dcp-200" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[1500] ^= 1
    shard.write_bytes(content)


def cut(root: Path) -> None:
    for shard in (root / "dcp-200" / "__0_0.distcp", root / "hf-200" / "model.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-10])


def no_manifest(root: Path) -> None:
    (root / "dcp-200" / "tundish.json").unlink()


def never_published(root: Path) -> None:
    shutil.rmtree(root / "dcp-200")


@pytest.mark.parametrize("spoil", [flip, cut, no_manifest, never_published])
def test_after_loading_an_earlier_step_saving_goes_on_from_there(
    root: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(root)
    aside = {
        f"discarded-{name}": sorted((path.name, path.read_bytes()) for path in (root / name).iterdir())
        for name in ("hf-200", "dcp-200")
        if (root / name).exists()
    }
    with Checkpointer(root, on_failure="raise") as checkpointer:
        state = tensors(0)
        extra, _ = checkpointer.load_dcp(state)
        assert (extra["step"], state["weight"][0]) == (100, 100)
        passed_over = "the DCP checkpoint of step 200 cannot be loaded, the one before is tried: "
        assert (passed_over in caplog.text) == (root / "dcp-200").exists()
        checkpointer.discard_after(extra["step"])
        for step in (150, 200):
            checkpointer.save_hf(step, tensors(step), blocking=True)
            checkpointer.save_dcp(step, tensors(step), extra={"step": step}, blocking=True)
        assert [one.step for one in checkpointer.list("hf")] == [100, 150, 200]
        assert [one.step for one in checkpointer.list("dcp")] == [100, 150, 200]
        for one in checkpointer.list():
            checkpointer.verify(one.path)
    for name, content in aside.items():
        assert sorted((path.name, path.read_bytes()) for path in (root / name).iterdir()) == content
        assert f"set aside: {root / name}" in caplog.text


def test_the_log_says_what_a_trainer_resumes_from(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tundish.checkpoint")
    with Checkpointer(root, on_failure="raise") as checkpointer:
        load_chosen(checkpointer, tensors(0), choose_checkpoint(checkpointer))
    assert [record.getMessage() for record in caplog.records] == [f"resumed from {root / 'dcp-200'}"]


def test_where_nothing_is_whole_nothing_begins_anew_by_itself(root: Path) -> None:
    for step in (100, 200):
        (root / f"dcp-{step}" / "tundish.json").unlink()
    with Checkpointer(root, on_failure="raise") as checkpointer:
        with pytest.raises(CorruptCheckpointError, match=r"(?s)dcp-200.*no tundish\.json.*dcp-100"):
            checkpointer.load_dcp({})
        for step in (100, 200):
            shutil.rmtree(root / f"dcp-{step}")
        with pytest.raises(NotFoundError, match="there is no DCP checkpoint"):
            checkpointer.load_dcp({})
        checkpointer.discard_after(0)
        checkpointer.save_hf(100, tensors(100), blocking=True)
    assert (root / "discarded-hf-200").is_dir()


def test_a_checkpoint_published_during_the_search_is_loaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = (root / "dcp-200").rename(tmp_path / "newer")
    survey = ReadonlyRoot.survey

    def late(self: ReadonlyRoot, kind: Any = None) -> Any:
        found = survey(self, kind)
        if newer.exists():
            # As a save does that keeps the last one.
            newer.rename(root / "dcp-200")
            shutil.rmtree(root / "dcp-100")
        return found

    with Checkpointer(root, on_failure="raise") as checkpointer:
        monkeypatch.setattr(ReadonlyRoot, "survey", late)
        extra, _ = checkpointer.load_dcp(tensors(0))
    assert extra["step"] == 200


def test_a_checkpoint_that_goes_while_it_is_verified_is_not_called_damaged(root: Path) -> None:
    over = threading.Event()
    verified: list[Path] = []
    wrong: list[BaseException] = []

    def watch() -> None:
        watcher = open_readonly(root)
        while not over.is_set():
            for one in watcher.list("hf"):
                try:
                    watcher.verify(one.path)
                    verified.append(one.path)
                except NotFoundError:
                    pass
                except Exception as error:
                    wrong.append(error)

    many = {f"layer{number}": torch.ones(25_000) for number in range(100)}
    with Checkpointer(root, on_failure="raise", keep_last=1) as checkpointer:
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            for step in range(201, 216):
                checkpointer.save_hf(step, many, shard_bytes=200_000, blocking=True)
        finally:
            over.set()
            thread.join()
    assert not wrong
    assert len(verified) > 3


LOCKLESS = """
import json, logging, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
from test_resuming import refuse_flock, tensors
refuse_flock()
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from tundish.checkpoint import Checkpointer, load_dcp, open_readonly
from tundish.errors import CorruptCheckpointError
root = Path(sys.argv[1])
loaded = []
with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save_dcp(step, tensors(step), extra={"step": step}, blocking=True)
    loaded.append(checkpointer.load_dcp(tensors(0))[0]["step"])
    loaded.append(checkpointer.load_dcp(tensors(0), 2)[0]["step"])
loaded.append(load_dcp(tensors(0), root / "dcp-2")[0]["step"])
with open_readonly(root).reading(3, "dcp") as path:
    loaded.append(path.name)
open_readonly(root).verify("dcp-3")
print(json.dumps(loaded))
"""

_ALLOW, _ERRNO, _ENOSYS = 0x7FFF0000, 0x00050000, 38
_FLOCK = {"x86_64": 73, "aarch64": 32}


def refuse_flock() -> None:
    """Let the kernel answer flock as for a network file system that was mounted without locks (seccomp(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = _FLOCK[platform.machine()]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, _ERRNO | _ENOSYS), (0x06, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(code))
    # PR_SET_NO_NEW_PRIVS, then PR_SET_SECCOMP with SECCOMP_MODE_FILTER.
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0


def test_loading_works_without_file_locks(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    done = run(["-c", LOCKLESS, tmp_path / "root", Path(__file__).parent])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [3, 2, 2, "dcp-3"]
    assert f"the file system of {tmp_path / 'root'} has no locks" in done.stderr
    assert "cannot be loaded" not in done.stderr
