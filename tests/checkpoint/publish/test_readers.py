"""Readers of a root while its owner replaces and removes checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import torch

from tundish.checkpoint import Checkpointer, open_readonly
from tundish.errors import CheckpointInUseError, NotFoundError


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(step))}


def test_a_reader_of_no_root_hears_which_folder_to_give(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as refusal:
        open_readonly(tmp_path / "nix")
    assert (
        str(refusal.value) == f"[Errno 2] {tmp_path / 'nix'} does not exist: give the root of a Checkpointer"
    )


def test_a_replaced_checkpoint_is_readable_all_the_time(tmp_path: Path) -> None:
    root = tmp_path / "root"
    errors: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        readonly = open_readonly(root)
        try:
            while not is_over.is_set():
                with readonly.reading(1) as path:
                    assert (path / "model.safetensors").is_file()
                assert readonly.verify("hf-1") == []
                # The save waits for readers in turn, and is to find none now and then.
                is_over.wait(0.01)
        except BaseException as error:
            errors.append(error)

    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, weights(0), blocking=True)
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(20):
                checkpointer.save_hf(1, weights(number), overwrite=True, blocking=True)
        finally:
            is_over.set()
            reader.join(60)
    assert errors == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_read_ends_where_its_block_does_whatever_was_forked_in_it(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    with Checkpointer(tmp_path / "root", on_failure="raise", keep_last=1) as checkpointer:
        checkpointer.save_hf(1, weights(1), blocking=True)
        with checkpointer.reading(1):
            # As a loader's workers, which outlive what they were started in.
            child = os.fork()
            if child == 0:
                os.close(theirs)
                os.read(ours, 1)
                os._exit(0)
            checkpointer.save_hf(2, weights(2), blocking=True)
            assert [one.step for one in checkpointer.list()] == [1, 2]
            with pytest.raises(CheckpointInUseError, match="hf-1"):
                checkpointer.discard_after(0)
        checkpointer.save_hf(3, weights(3), blocking=True)
        left = [one.step for one in checkpointer.list()]
        os.close(ours)
        os.close(theirs)
        os.waitpid(child, 0)
    assert left == [3]


def test_a_process_that_writes_into_an_old_checkpoint_fails_no_save(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Checkpointer(root, on_failure="raise", keep_last=1) as checkpointer:
        old = checkpointer.save_hf(1, weights(1)).result(60)
        # To remove these takes longer than to write one more.
        for number in range(1000):
            (old / f"sample-{number}").touch()
        folder = os.open(old, os.O_RDONLY)

        def evaluate() -> None:
            with contextlib.suppress(FileNotFoundError):
                for number in range(1 << 20):
                    os.close(os.open(f"result-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
                    if is_over.is_set():
                        return

        is_over = threading.Event()
        evaluator = threading.Thread(target=evaluate)
        evaluator.start()
        try:
            checkpointer.save_hf(2, weights(2)).result(60)
        finally:
            is_over.set()
            evaluator.join(60)
            os.close(folder)
        assert [one.step for one in checkpointer.list()] == [2]
    Checkpointer(root).close()
    assert sorted(os.listdir(root)) == [".owner", "hf-2", "hf-latest"]
