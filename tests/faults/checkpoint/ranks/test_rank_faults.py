"""One rank fails, hangs, panics or ends: the others raise an error that names it, and later saves succeed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support.checkpoint import failpoints as failpoints
from support.checkpoint.rank_commands import (
    MIB,
    answer,
    assert_fine,
    assert_saved,
    begin_and_hold,
    each,
    end,
    obey,
    save,
    tell,
)
from support.distributed.rank_processes import Job
from support.waiting import NOTICED

TIMEOUT = 5.0


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_rank_that_fails_is_named_on_all_and_no_later_save_fails(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        assert_fine(each(job, "open", root))
        save(job, kind, 1)
        begin_and_hold(job, kind, 2)
        tell(job, 1, "limit_files", MIB)
        answer(job, 1)
        each(job, "let_go")
        (error, text, rank), (own_error, own_text, _) = each(job, "result", kind, 2)
        assert (error, rank) == ("PeerFailedError", 1)
        assert own_error == "StorageError"
        assert own_text.startswith("[Errno 27]")
        assert f".{kind}-2.incomplete/" in own_text
        assert own_text in text
        assert [len(told) for told in each(job, "failed")] == [1, 1]
        tell(job, 1, "unlimit_files")
        answer(job, 1)
        save(job, kind, 3)
        assert each(job, "failed") == [[], []]
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {kind: [1, 3]})


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_panic_in_the_writer_of_one_rank_fails_the_save_and_no_later_one(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    name = {"hf": "model-00001-of-00002.safetensors", "dcp": "__1_0.distcp"}[kind]
    call = failpoints.SystemCall("write", str(root / f".{kind}-2.incomplete" / name), 0)
    with Job(obey, 2, tmp_path, fresh=True) as job:
        each(job, "arm", failpoints.environment(call, "panic 0"))
        assert_fine(each(job, "open", root))
        save(job, kind, 1)
        assert_fine(each(job, "save", kind, 2))
        said = {error: (text, rank) for error, text, rank in each(job, "result", kind, 2)}
        text, rank = said.pop("PeerFailedError")
        assert rank in (0, 1)
        assert "told to at call 0" in text
        assert name in text
        assert said, "the rank whose writer panicked raises what it panicked with"
        save(job, kind, 3)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {kind: [1, 3]})


@pytest.mark.parametrize(
    ("kind", "stopped", "event", "steps"),
    [
        ("hf", 1, "staged", [1, 3]),
        ("dcp", 0, "written", [1, 3]),
        # All ranks had written and voted so: it is whole, and published though nobody waited for it.
        ("dcp", 0, "voted", [1, 2, 3]),
    ],
)
def test_a_rank_that_stands_still_is_a_failure_and_not_a_hang(
    kind: str, stopped: int, event: str, steps: list[int], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        assert_fine(each(job, "open", root, timeout=TIMEOUT))
        save(job, kind, 1)
        begin_and_hold(job, kind, 2, event=event)
        job.signal(stopped, signal.SIGSTOP)
        tell(job, 1 - stopped, "let_go")
        answer(job, 1 - stopped)
        started = time.monotonic()
        tell(job, 1 - stopped, "result", kind, 2)
        error, text, ranks = answer(job, 1 - stopped)
        assert (error, ranks) == ("VoteTimeoutError", (stopped,))
        assert f"save_{kind} of step 2" in text
        assert time.monotonic() - started > TIMEOUT - 1
        job.signal(stopped, signal.SIGCONT)
        tell(job, stopped, "let_go")
        answer(job, stopped)
        tell(job, stopped, "result", kind, 2)
        error, _, _ = answer(job, stopped)
        assert error == "VoteTimeoutError"
        assert [len(told) for told in each(job, "failed")] == [1, 1]
        save(job, kind, 3)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {kind: steps})


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_closed_or_ended_fails_the_others_next_save_at_once(gone: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        assert_fine(each(job, "open", root))
        save(job, "hf", 1)
        tell(job, gone, "close")
        assert_fine([answer(job, gone)])
        started = time.monotonic()
        tell(job, 1 - gone, "save", "hf", 2)
        error, text, rank = answer(job, 1 - gone)
        assert (error, rank) == ("PeerFailedError", gone), text
        assert time.monotonic() - started < NOTICED
        # On the rank that closed it is refused without the others.
        tell(job, gone, "save", "hf", 2)
        assert answer(job, gone)[:2] == ("InvalidInputError", "this checkpointer is closed: make a new one")
        tell(job, 1 - gone, "close")
        assert_fine([answer(job, 1 - gone)])
        end(job)
    assert_saved(root, {"hf": [1]})


def test_two_saves_of_one_step_are_refused_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        assert_fine(each(job, "open", root))
        for kind in ("hf", "dcp"):
            begin_and_hold(job, kind, 2)
            for error, text, _ in each(job, "again", kind, 2):
                assert error in ("InvalidInputError", "PeerFailedError")
                assert "a save of this step is under way already" in text
            each(job, "let_go")
            assert_fine(each(job, "result", kind, 2))
            (error, text, _), (other_error, other_text, _) = each(job, "again", kind, 2)
            assert (error, other_error) == ("StepExistsError", "PeerFailedError")
            assert f"{kind}-2 is there already" in text
            assert text in other_text
            # Ranks that save two steps at once, or two kinds.
            for rank in (0, 1):
                tell(job, rank, "again", kind, 3 + rank)
            assert {answer(job, rank)[0] for rank in (0, 1)} <= {"PeerFailedError", "InvalidInputError"}
            save(job, kind, 3)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {"dcp": [2, 3], "hf": [2, 3]})


def loop_that_fails(rank: int, line: object) -> None:
    """The training loop of the second rank fails while a save is under way."""
    from support.checkpoint.rank_commands import tensors

    from tundish.checkpoint import Checkpointer

    root = line.hear()  # type: ignore[attr-defined]
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, tensors(1))
        checkpointer.save_dcp(1, tensors(1))
        if rank == 1:
            raise KeyError("the loss is no number")
        checkpointer.save_hf(2, tensors(2))


def test_an_exception_in_the_loop_of_one_rank_ends_all_and_loses_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(loop_that_fails, 2, tmp_path) as job:
        job.tell_all(root)
        with pytest.raises(AssertionError, match="KeyError: 'the loss is no number'"):
            job.hear(1)
        with pytest.raises(AssertionError, match=r"PeerFailedError: .*rank 1"):
            job.hear(0)
        assert [job.exit_code(rank) for rank in (0, 1)] == [1, 1]
    from tundish.checkpoint import open_readonly

    # The save that was under way when it failed was finished.
    for checkpoint in open_readonly(root).list():
        assert checkpoint.step == 1
        open_readonly(root).verify(checkpoint.path)
    assert len(open_readonly(root).list()) == 2
