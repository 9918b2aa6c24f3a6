"""One process saves through a checkpointer: publication, refusals and retention."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish._native import staging_stats
from tundish.checkpoint import Checkpoint, Checkpointer, open_readonly
from tundish.errors import (
    CallbackError,
    InvalidInputError,
    InvalidTypeError,
    StepExistsError,
    StepOrderError,
    TimedOutError,
)


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(1000, dtype=torch.float32), "bias": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpointer(root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(root, on_failure="raise") as opened:
        yield opened


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_an_export_holds_the_model_as_it_was_at_the_call(checkpointer: Checkpointer, model: Any) -> None:
    import transformers

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save = checkpointer.save_hf(10, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    path = save.result(60)
    assert path == checkpointer.path / "hf-10"
    assert save.done()
    written, total = save.progress()
    assert written == total > 0
    save.staged()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert loaded.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(loaded[name], tensor), name
    assert checkpointer.latest() == path
    assert (checkpointer.path / "hf-latest").resolve() == path
    checkpointer.verify(path)
    manifest = json.loads((path / "tundish.json").read_text())
    assert (manifest["kind"], manifest["step"], manifest["world_size"]) == ("hf", 10, 1)


def test_a_blocking_and_a_background_save_are_byte_identical(checkpointer: Checkpointer, model: Any) -> None:
    blocking = checkpointer.save_hf(1, model, blocking=True).result(0)
    background = checkpointer.save_hf(2, model).result(60)
    names = sorted(file.name for file in blocking.iterdir())
    assert names == sorted(file.name for file in background.iterdir())
    assert {"config.json", "model.safetensors"} <= set(names)
    for name in set(names) - {"tundish.json"}:
        assert (blocking / name).read_bytes() == (background / name).read_bytes(), name


def test_the_save_before_is_complete_when_the_next_is_written(
    root: Path, tensors: dict[str, torch.Tensor]
) -> None:
    events: list[tuple[str, int]] = []
    held = threading.Event()

    def on_event(event: str, kind: str, step: int) -> None:
        assert kind == "hf"
        events.append((event, step))
        if (event, step) == ("written", 1):
            held.wait(30)

    with Checkpointer(root, on_event=on_event, on_failure="raise") as checkpointer:
        first = checkpointer.save_hf(1, tensors)
        second = checkpointer.save_hf(2, tensors)
        assert not first.done()
        assert ("staged", 2) not in events
        held.set()
        second.result(60)
        assert first.done()
    expected = [(event, step) for step in (1, 2) for event in ("staged", "written", "voted", "published")]
    assert events == expected


def test_a_wait_for_both_kinds_takes_no_longer_than_it_is_told(
    root: Path, tensors: dict[str, torch.Tensor]
) -> None:
    held = {"hf": threading.Event(), "dcp": threading.Event()}

    def on_event(event: str, kind: str, step: int) -> None:
        if event == "written":
            held[kind].wait(30)

    with Checkpointer(root, on_event=on_event, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, tensors)
        checkpointer.save_dcp(1, dict(tensors))
        # The one is over shortly before the time is, the other never.
        threading.Timer(1.8, held["hf"].set).start()
        begun = time.monotonic()
        try:
            with pytest.raises(TimedOutError, match=r"saves of steps \[1\] were not over within 2 s") as late:
                checkpointer.wait(2)
            assert isinstance(late.value, TimeoutError)
            took = time.monotonic() - begun
        finally:
            held["dcp"].set()
    # time: two waits of 2 s would take this long
    assert 2 <= took < 3.8


@pytest.mark.parametrize("name", ["overwrite", "blocking"])
def test_flags_that_are_none_are_refused(
    checkpointer: Checkpointer, tensors: dict[str, torch.Tensor], name: str
) -> None:
    for save in (checkpointer.save_hf, checkpointer.save_dcp):
        with pytest.raises(InvalidTypeError, match=f"{name} must be True or False, not 3"):
            save(1, dict(tensors), **{name: 3})  # type: ignore[arg-type]
    assert checkpointer.latest() is None


def test_steps_that_cannot_be_saved_are_refused(
    checkpointer: Checkpointer, tensors: dict[str, torch.Tensor]
) -> None:
    checkpointer.save_hf(5, tensors, blocking=True)
    with pytest.raises(StepExistsError, match="5"):
        checkpointer.save_hf(5, tensors)
    with pytest.raises(StepOrderError, match="4"):
        checkpointer.save_hf(4, tensors)
    for step in (-1, 1.5, True, "7", None):
        with pytest.raises(InvalidInputError, match="step"):
            checkpointer.save_hf(step, tensors)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="tag"):
        checkpointer.save_hf(6, tensors, tag="")
    assert [one.step for one in checkpointer.list()] == [5]
    assert not list(checkpointer.path.glob(".*incomplete"))
    # Refusals leave everything as usable as before.
    checkpointer.save_hf(6, tensors, blocking=True)


@pytest.mark.usefixtures("two_threads")
def test_a_save_that_is_refused_while_it_is_copied_gives_all_back(
    checkpointer: Checkpointer, tensors: dict[str, torch.Tensor]
) -> None:
    checkpointer.save_hf(5, tensors, blocking=True)
    large = {"w": torch.ones(256 << 20, dtype=torch.uint8)}
    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(StepExistsError, match="5"):
        checkpointer.save_hf(5, large)
    assert staging_stats()["in_use"] == checkpointer.stats()["staging_in_use_bytes"] == 0
    assert len(os.listdir("/proc/self/task")) == threads


def test_a_save_that_is_refused_waits_for_no_memory(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    with Checkpointer(root, on_failure="raise", staging_limit_bytes=100_000) as checkpointer:
        checkpointer.save_hf(5, tensors, blocking=True)
        # As if a save were under way.
        checkpointer._session.budget.take(100_000, "another save")
        with pytest.raises(StepExistsError, match="5"):
            checkpointer.save_hf(5, tensors)
        checkpointer._session.budget.give_back(100_000)
        checkpointer.save_hf(6, tensors, blocking=True)


def test_checkpoints_are_listed_one_kind_after_the_other(checkpointer: Checkpointer) -> None:
    for step in (2, 10):
        checkpointer.save_hf(step, {"a": torch.zeros(4)}, blocking=True)
        checkpointer.save_dcp(step, {"a": torch.zeros(4)}, blocking=True)
    for root in (checkpointer, open_readonly(checkpointer.path)):
        listed = [(one.kind, one.step) for one in root.list()]
        assert listed == [("dcp", 2), ("dcp", 10), ("hf", 2), ("hf", 10)]
        assert [one.step for one in root.list("hf")] == [2, 10]


def test_overwrite_exchanges_a_whole_checkpoint(checkpointer: Checkpointer) -> None:
    checkpointer.save_hf(3, {"a": torch.zeros(4)}, blocking=True)
    path = checkpointer.save_hf(3, {"b": torch.ones(4)}, overwrite=True, blocking=True).result(0)
    assert list(load(path)) == ["b"]
    assert [one.step for one in checkpointer.list()] == [3]
    checkpointer.verify(path)


def test_old_checkpoints_go_and_named_ones_stay(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    with Checkpointer(
        root, keep_last=2, keep_every=10, keep_tagged={"best": 1}, on_failure="raise"
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save_hf(step, tensors, blocking=True)
        checkpointer.protect(1)
        with checkpointer.reading(2) as path:
            for step in (3, 4, 10):
                checkpointer.save_hf(step, tensors, blocking=True)
            # It is being read.
            assert path.exists()
        for step, tag in [(11, "best"), (12, "best"), (13, None), (14, None)]:
            checkpointer.save_hf(step, tensors, tag=tag, blocking=True)
        assert [(one.step, one.tag) for one in checkpointer.list("hf")] == [
            (1, None),
            (10, None),
            (12, "best"),
            (13, None),
            (14, None),
        ]
    assert open_readonly(root).latest() == root / "hf-14"


@contextlib.contextmanager
def mounted_on(folder: Path) -> Iterator[None]:
    """Make `folder` a mount point, which nobody can rename."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_checkpoint_that_a_person_removed_needs_no_pruning(
    root: Path, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def keep(one: Checkpoint) -> bool:
        shutil.rmtree(one.path)
        return False

    with Checkpointer(root, keep_last=1, keep=keep, on_failure="raise") as checkpointer:
        for step in (1, 2):
            checkpointer.save_hf(step, tensors, blocking=True)
        assert [one.step for one in checkpointer.list()] == [2]
    told = [record for record in caplog.records if str(root / "hf-1") in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]


def test_a_checkpoint_that_cannot_be_removed_fails_no_save_and_goes_later(
    root: Path, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a folder takes root")
    with Checkpointer(root, keep_last=1, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, tensors, blocking=True)
        with mounted_on(root / "hf-1"):
            for step in (2, 3):
                checkpointer.save_hf(step, tensors, blocking=True)
            assert [one.step for one in checkpointer.list()] == [1, 3]
        told = [record.levelname for record in caplog.records if "cannot be removed" in record.getMessage()]
        assert told == ["WARNING", "WARNING"]
        checkpointer.save_hf(4, tensors, blocking=True)
        assert [one.step for one in checkpointer.list()] == [4]


def test_a_file_system_that_does_not_tell_of_its_room_is_taken_at_its_word(
    root: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one in user space that has no such call.
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([512, 0, 0, 0, 0, 0, 0, 0, 0, 255]))
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, tensors, blocking=True)
        assert [one.step for one in checkpointer.list()] == [1]


def test_a_rollback_sets_newer_steps_aside(
    checkpointer: Checkpointer, tensors: dict[str, torch.Tensor]
) -> None:
    for step in (100, 200):
        checkpointer.save_hf(step, tensors, blocking=True)
    with pytest.raises(StepOrderError, match="discard_after"):
        checkpointer.save_hf(150, tensors)
    checkpointer.discard_after(100)
    assert checkpointer.latest() == checkpointer.path / "hf-100"
    checkpointer.save_hf(150, tensors, blocking=True)
    assert [one.step for one in checkpointer.list()] == [100, 150]


def test_callbacks_get_published_paths_and_fail_only_their_save(
    root: Path, tensors: dict[str, torch.Tensor]
) -> None:
    heard: list[Path] = []

    def on_published(path: Path) -> None:
        assert (path / "model.safetensors").exists()
        heard.append(path)
        if len(heard) == 1:
            raise RuntimeError("upload failed")

    with Checkpointer(root, on_published=[on_published], on_failure="raise") as checkpointer:
        save = checkpointer.save_hf(1, tensors)
        with pytest.raises(CallbackError, match="upload failed"):
            save.result(60)
        checkpointer.save_hf(2, tensors, blocking=True)
        assert [one.step for one in checkpointer.list()] == [1, 2]
    assert heard == [root / "hf-1", root / "hf-2"]


def test_closing_finishes_saves_under_way(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save_hf(1, tensors)
    assert save.result(0) == root / "hf-1"
    checkpointer.close()
    with pytest.raises(InvalidInputError, match="closed"):
        checkpointer.save_hf(2, tensors)


def test_a_root_is_no_source_of_an_export(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, tensors, blocking=True)
        with pytest.raises(InvalidInputError, match=r"source_dir is .*the root of the checkpoints"):
            checkpointer.save_hf(2, tensors, source_dir=root)
        # A folder that it lies in has files of its own, and an earlier export may be one.
        (root.parent / "config.json").write_text("{}")
        path = checkpointer.save_hf(2, tensors, source_dir=root.parent).result()
        assert sorted(one.name for one in path.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tundish.json",
        ]
        again = checkpointer.save_hf(3, tensors, source_dir=path).result()
        assert (again / "config.json").exists()
