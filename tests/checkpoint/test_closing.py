"""A root is released after close, Ctrl-C and failures, and nothing waits for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.programs import run, run_ranks
from support.waiting import until

from tundish.checkpoint import Checkpointer, open_readonly
from tundish.checkpoint.save_job import Save
from tundish.checkpoint.staging import Staged
from tundish.errors import (
    CallbackError,
    CheckpointInUseError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
)

TENSORS = {"w": torch.ones(1000)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def press() -> Iterator[Callable[[float], None]]:
    """Presses Ctrl-C after so many seconds."""
    timers: list[threading.Timer] = []

    def press(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield press
    for timer in timers:
        timer.join()


class HoldAfterWriting:
    """An `on_event` that holds every save up after its files are written."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self, event: str, kind: str, step: int) -> None:
        if event == "written":
            self.go_on.wait(60)


def test_ctrl_c_in_close_ends_the_wait_and_not_the_save(root: Path, press: Callable[[float], None]) -> None:
    held = HoldAfterWriting()
    checkpointer = Checkpointer(root, on_event=held, on_failure="raise")
    save = checkpointer.save_hf(1, TENSORS)
    press(0.3)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    with pytest.raises(InvalidInputError, match="closed"):
        checkpointer.save_hf(2, TENSORS)
    assert not save.done()
    held.go_on.set()
    # The second call waits for what the first one did not.
    checkpointer.close()
    assert save.result(0) == root / "hf-1"
    Checkpointer(root, on_failure="raise").close()


def test_a_root_is_let_go_of_though_nobody_closes_a_second_time(
    root: Path, press: Callable[[float], None]
) -> None:
    held = HoldAfterWriting()

    def leave_the_block() -> None:
        with Checkpointer(root, on_event=held, on_failure="raise") as checkpointer:
            checkpointer.save_hf(1, TENSORS)
            press(0.2)
            press(0.6)
            time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        leave_the_block()
    held.go_on.set()
    # Opening waits for an owner that is about to let go.

    def opens() -> bool:
        with contextlib.suppress(OSError):
            Checkpointer(root, on_failure="raise").close()
            return True
        return False

    until(opens, "nobody lets go of the root")
    assert open_readonly(root).latest() == root / "hf-1"


CALLS: dict[str, Callable[[Checkpointer], Any]] = {
    "wait": lambda checkpointer: checkpointer.wait(),
    "close": lambda checkpointer: checkpointer.close(),
    "save_hf": lambda checkpointer: checkpointer.save_hf(9, TENSORS),
    "save_dcp": lambda checkpointer: checkpointer.save_dcp(9, TENSORS),
    "load_dcp": lambda checkpointer: checkpointer.load_dcp({}),
    "discard_after": lambda checkpointer: checkpointer.discard_after(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_callbacks_cannot_wait_for_the_save_that_calls_them(root: Path, call: str) -> None:
    told: list[BaseException] = []

    def call_back(_: Any) -> None:
        try:
            CALLS[call](checkpointer)
        except InvalidInputError as error:
            told.append(error)
            raise

    with Checkpointer(root, on_published=[call_back], on_failure=call_back) as checkpointer:
        save = checkpointer.save_hf(1, TENSORS)
        with pytest.raises(CallbackError, match=rf"{call}\(\) in a callback"):
            save.result(60)
        (root / ".hf-2.incomplete").mkdir()
        fail_staged_saves(checkpointer, root)
    assert len(told) == 2
    # Let go of nevertheless.
    Checkpointer(root, on_failure="raise").close()


@pytest.mark.parametrize("call", ["result", "exception"])
def test_callbacks_cannot_wait_for_the_future_of_the_save_that_calls_them(root: Path, call: str) -> None:
    saves: list[Save] = []
    is_known = threading.Event()
    told: list[str] = []

    def call_back(*_: Any) -> None:
        assert is_known.wait(60)
        saves[-1].staged()
        try:
            getattr(saves[-1], call)()
        except InvalidInputError as error:
            told.append(str(error))

    with Checkpointer(root, on_published=[call_back], on_event=call_back, on_failure="raise") as checkpointer:
        saves.append(checkpointer.save_hf(1, TENSORS))
        is_known.set()
        # One that is over may be asked anywhere.
        saves[0].add_done_callback(lambda save: told.append(save.result().name))
    assert told == [told[0]] * 5 + ["hf-1"]
    assert told[0].startswith(f"{call}() in a callback of a save would wait for that save itself")


def fail_staged_saves(checkpointer: Checkpointer, root: Path) -> None:
    """Save step 5, whose folder somebody takes away meanwhile."""
    save = checkpointer.save_hf(5, {"w": torch.ones(1 << 22)})
    (root / ".hf-5.incomplete").rename(root / "elsewhere")
    with pytest.raises(Exception, match="hf-5"):
        save.result(60)


PROGRAM = """
    import sys, time
    import torch, tundish as td

    def train(how, who):
        def fail(_):
            if how == "exit":
                sys.exit(3)
            raise ValueError("a bug of the user's")

        root = f"{sys.argv[1]}/{how}-{who}"
        given = {"keep": fail} if who == "keep" else {"on_published": [fail, lambda path: print("second")]}
        with td.Checkpointer(root, keep_last=1, **given) as checkpointer:
            for step in (1, 2):
                try:
                    checkpointer.save_hf(step, {"w": torch.ones(3)}).result(60)
                except td.errors.CallbackError as error:
                    print(step, error)
        time.sleep(0.5)
        print("alive", [one.step for one in td.checkpoint.open_readonly(root).list()])

    for how in ("raise", "exit"):
        for who in ("keep", "on_published"):
            print("case", how, who)
            train(how, who)
"""


def test_an_error_of_a_users_function_ends_no_training(tmp_path: Path) -> None:
    ended = run(["-c", textwrap.dedent(PROGRAM), tmp_path])
    assert ended.returncode == 0, ended.stderr
    before, *cases = ended.stdout.split("case ")
    assert before == ""
    heads = [case.splitlines()[0] for case in cases]
    assert heads == ["raise keep", "raise on_published", "exit keep", "exit on_published"]
    for head, case in zip(heads, cases, strict=True):
        how, who = head.split()
        lines = case.splitlines()[1:]
        if who == "keep":
            # It is asked once there is something that may go.
            assert [line[0] for line in lines] == ["2", "a"]
            assert lines[-1] == "alive [1, 2]"
        else:
            assert [line[0] for line in lines] == ["s", "1", "s", "2", "a"]
            assert lines[-1] == "alive [2]"
        assert ("a bug of the user's" if how == "raise" else "SystemExit(3)") in case
        assert "callback failed" in case


def test_a_function_that_exits_on_an_event_fails_nothing(root: Path) -> None:
    def leave(event: str, kind: str, step: int) -> None:
        sys.exit(1)

    with Checkpointer(root, on_event=leave, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, TENSORS).result(60)


def test_an_on_failure_that_exits_leaves_later_saves_working(root: Path) -> None:
    def leave(error: BaseException) -> None:
        sys.exit(1)

    with Checkpointer(root, on_failure=leave) as checkpointer:
        fail_staged_saves(checkpointer, root)
        checkpointer.save_hf(6, TENSORS).result(60)


def test_a_save_waits_for_readers_of_the_checkpoint_it_replaces(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = HoldAfterWriting()
    with Checkpointer(root, on_event=held, on_failure="raise") as checkpointer:
        held.go_on.set()
        checkpointer.save_hf(1, {"old": torch.zeros(3)}).result(60)
        held.go_on.clear()
        save = checkpointer.save_hf(1, {"new": torch.ones(3)}, overwrite=True)
        with open_readonly(root).reading(1) as path:
            held.go_on.set()
            with pytest.raises(TimeoutError):
                save.result(1)
            # All is written, and what is read stays.
            open_readonly(root).verify(path)
        assert save.result(60) == root / "hf-1"
        checkpointer.verify("hf-1")
    assert "waits until it can replace the checkpoint" in caplog.text


def test_an_endless_reader_fails_the_save_in_time(root: Path) -> None:
    held = HoldAfterWriting()
    with Checkpointer(root, on_event=held, on_failure="raise", timeout=1) as checkpointer:
        held.go_on.set()
        checkpointer.save_hf(1, TENSORS).result(60)
        held.go_on.clear()
        save = checkpointer.save_hf(1, TENSORS, overwrite=True)
        with open_readonly(root).reading(1):
            held.go_on.set()
            with pytest.raises(CheckpointInUseError, match="being read"):
                save.result(30)
        assert [path.name for path in root.glob(".hf-*")] == []
        with pytest.raises(OSError, match="being read"):
            checkpointer.wait()
        checkpointer.save_hf(1, TENSORS, overwrite=True).result(60)


def read(checkpointer: Checkpointer) -> None:
    with checkpointer.reading(1, "dcp"):
        pass


NEXT_CALLS: dict[str, Callable[[Checkpointer], Any]] = {
    "latest": lambda checkpointer: checkpointer.latest(),
    "list": lambda checkpointer: checkpointer.list(),
    "stats": lambda checkpointer: checkpointer.stats(),
    "protect": lambda checkpointer: checkpointer.protect(1),
    "verify": lambda checkpointer: checkpointer.verify("dcp-1"),
    "reading": read,
    "load_dcp": lambda checkpointer: checkpointer.load_dcp({}),
    "discard_after": lambda checkpointer: checkpointer.discard_after(1),
    "save_dcp": lambda checkpointer: checkpointer.save_dcp(9, TENSORS),
    "wait": lambda checkpointer: checkpointer.wait(),
    "close": lambda checkpointer: checkpointer.close(),
}


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_whatever_is_called_next_tells_of_a_failure_once(root: Path, call: str) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_dcp(1, TENSORS).result(60)
        fail_staged_saves(checkpointer, root)
        with pytest.raises(Exception, match="hf-5"):
            NEXT_CALLS[call](checkpointer)
        if call != "close":
            NEXT_CALLS[call](checkpointer)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep": 5}, "keep"),
        ({"keep_tagged": 5}, "keep_tagged"),
        ({"keep_tagged": {3: 1}}, "keep_tagged"),
        ({"on_published": print}, "on_published"),
        ({"on_published": ["upload"]}, "on_published"),
        ({"on_event": 3}, "on_event"),
        ({"root": None}, "root"),
        ({"root": b"bytes"}, "root"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(
    root: Path, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidTypeError, match=named):
        Checkpointer(**{"root": root, **arguments})
    assert not root.exists()


@pytest.mark.parametrize("given", ["", "a\0b"])
def test_a_root_without_a_name_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="root is"):
        Checkpointer(given)
    assert os.listdir(tmp_path) == []


def test_nothing_is_protected_after_the_close(root: Path) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, TENSORS)
    with pytest.raises(InvalidInputError, match="this checkpointer is closed: make a new one"):
        checkpointer.protect(1)


def test_a_step_without_a_checkpoint_is_not_protected(root: Path) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, TENSORS, blocking=True)
        checkpointer.save_hf(2, TENSORS)
        # It may still be under way.
        checkpointer.protect(2)
        with pytest.raises(NotFoundError, match=r"no checkpoint of step 99, .*steps there: 1") as refusal:
            checkpointer.protect(99)
        assert refusal.value.filename == str(root)


@pytest.mark.parametrize("timeout", ["a", "7", True, [1]])
def test_a_timeout_that_is_no_number_is_refused(root: Path, timeout: Any) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        save = checkpointer.save_hf(1, TENSORS)
        for wait in (checkpointer.wait, save.result, save.exception, save.staged):
            with pytest.raises(InvalidTypeError, match=r"timeout is .*: give a number of seconds"):
                wait(timeout)


@pytest.mark.parametrize("tag", ["\ud800", "a\nb", "\x1b[2J"])
def test_tags_that_cannot_be_written_or_shown_are_refused_at_once(root: Path, tag: str) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        with pytest.raises(InvalidInputError, match="tag"):
            checkpointer.save_hf(1, TENSORS, tag=tag)
        assert checkpointer.list() == []


EXIT = """
    import atexit, sys, threading
    import torch, tundish as td
    from torch import distributed

    def refuse(*_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    checkpointer = td.Checkpointer(sys.argv[1], timeout=60)
    model = torch.nn.Linear(8, 8)
    checkpointer.save_hf(1, model).result()
    checkpointer.save_hf(2, {"w": torch.ones(1 << 22)})
    checkpointer.save_dcp(2, {"w": torch.ones(1 << 22)})
    # As some versions of Python do from here on.
    threading._register_atexit(lambda: setattr(threading, "_start_new_thread", refuse))
"""


def test_an_exit_finishes_saves_though_no_thread_can_be_started(root: Path) -> None:
    for ended in run_ranks(["-c", textwrap.dedent(EXIT), root]):
        assert ended.returncode == 0, ended
        assert "can't create new thread" not in ended.stderr, ended
    for kind in ("hf", "dcp"):
        assert open_readonly(root).latest(kind) == root / f"{kind}-2"  # type: ignore[arg-type]  # of two


def test_a_signal_handler_may_close_a_checkpointer_that_is_closing(root: Path) -> None:
    held = HoldAfterWriting()
    checkpointer = Checkpointer(root, on_event=held, on_failure="raise")
    checkpointer.save_hf(1, TENSORS)

    def close_again(*_: object) -> None:
        held.go_on.set()
        checkpointer.close()

    before = signal.signal(signal.SIGUSR1, close_again)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        checkpointer.close()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert open_readonly(root).latest() == root / "hf-1"


def test_a_save_whose_checkpointer_is_closed_meanwhile_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(root, on_failure="raise")
    copy = Staged.copy

    def copy_and_close(staged: Staged) -> None:
        copy(staged)
        checkpointer.close()

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "copy", copy_and_close)
        with pytest.raises(InvalidInputError, match="closed while the save was taken"):
            checkpointer.save_hf(1, TENSORS)
    # The root was let go of before the save was given up, so the next owner removes what it left.
    with Checkpointer(root, on_failure="raise") as next_owner:
        assert not list(root.glob(".hf-1*"))
        assert next_owner.save_hf(1, TENSORS).result(60) == root / "hf-1"


def test_a_done_callback_that_exits_ends_nothing_else(root: Path) -> None:
    held = HoldAfterWriting()
    with Checkpointer(root, on_event=held, on_failure="raise") as checkpointer:
        first = checkpointer.save_hf(1, TENSORS)
        first.add_done_callback(lambda _: sys.exit(1))
        held.go_on.set()
        assert checkpointer.save_hf(2, TENSORS).result(60) == root / "hf-2"


def test_a_failure_that_ctrl_c_keeps_from_the_waiting_caller_is_acted_upon(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[BaseException] = []
    is_pressed = threading.Event()
    with Checkpointer(root, on_failure=heard.append) as checkpointer:
        finalizer = checkpointer._session.queues["hf"]._finalizer

        def fail(_: object) -> None:
            raise OSError(5, "the disk is gone")

        def report(*_: object) -> None:
            # The failure is known, and the caller has yet to hear of it.
            os.kill(os.getpid(), signal.SIGINT)
            assert is_pressed.wait(20)

        monkeypatch.setattr(finalizer, "finish", fail)
        monkeypatch.setattr(finalizer, "report", report)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save_hf(1, {"w": torch.ones(3)}, blocking=True)
        is_pressed.set()
        checkpointer.wait(20)
    assert [str(error) for error in heard] == ["[Errno 5] the disk is gone"]
