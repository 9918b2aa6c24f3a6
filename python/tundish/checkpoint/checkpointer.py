"""The checkpointer: what a training loop calls.

It owns an open root (`opening`) until it is closed or nobody has it any more, and takes saves through `taking`. What
always holds:

1. A save is refused on all ranks, before any tensor is exchanged or anything is written, or taken by all.
2. All ranks make the same calls (`calls`) in the same order; a call that fails on one rank fails on all.
3. Nothing is deleted before what replaces it is durable and recorded.
4. A root is let go of when its saves are over, whatever interrupted the wait for them; the interpreter does not end
   before, whether or not somebody still has the checkpointer.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tundish.checkpoint.collective_calls import CollectiveCalls
from tundish.checkpoint.hf.stager import plan_hf
from tundish.checkpoint.open_root import Arguments, OpenRoot, open_root
from tundish.checkpoint.publish.failure_policy import OnFailure
from tundish.checkpoint.publish.read_only_root import Checkpoints, Kind, check_step, plain_step
from tundish.checkpoint.publish.retention import Checkpoint, Retention
from tundish.checkpoint.save import DEFAULT_SHARD_BYTES, Save, Staging
from tundish.checkpoint.staging.buffers import trim
from tundish.checkpoint.submit import Request, take
from tundish.errors import InvalidInputError, TimedOutError
from tundish.timeouts import deadline_of
from tundish.waiting import Thread, to_its_end

__all__ = ["Checkpointer"]

_logger = logging.getLogger("tundish.checkpoint")
_held: set[_Hold] = set()


class _Hold:
    """An open root, until it is let go of; it outlives a checkpointer that was dropped with saves under way."""

    def __init__(self, opened: OpenRoot) -> None:
        self.opened = opened
        self.process = os.getpid()
        self.was_dropped = False
        # Re-entrant for a signal's handler that closes what its own thread is closing.
        self._turn = threading.RLock()
        _held.add(self)

    def let_go(self) -> None:
        """Finish the saves under way and let go of the root. The second call does nothing."""
        if os.getpid() != self.process:
            return
        with self._turn:
            for lane in self.opened.lanes.values():
                lane.finish()
            # Ctrl-C in the middle would lose what was being closed.
            to_its_end(self._let_go_of_all)

    def _let_go_of_all(self) -> None:
        for lane in self.opened.lanes.values():
            lane.close()
        self.opened.resources.close()
        _held.discard(self)
        if not _held:
            # As much as a model and its optimizer, which nobody needs until a root is opened again.
            trim()

    def drop(self) -> None:
        """Nobody has the checkpointer any more."""
        self.was_dropped = True
        self.let_go_later()

    def let_go_later(self) -> None:
        """As `let_go`, without waiting for it."""
        # An interpreter that is ending starts no threads, and lets go of everything itself.
        if self in _held and os.getpid() == self.process:
            with contextlib.suppress(RuntimeError):
                Thread(self.let_go, "tundish-close").start()


class Checkpointer:
    """Saves checkpoints under one folder while training goes on. Collective over `group`; a context manager.

    A checkpoint appears under its name, `hf-<step>` or `dcp-<step>`, when all of it is durable, or never. Saves
    return when the tensors are in host memory; files are written in the background by threads that leave
    the processors to the training. One save a kind is written at a time.

    Args:
        root: the folder of all checkpoints, the same one on all ranks; made where its parent exists.
        group: the ranks that save together (None: all ranks of the job, or this process alone).
        keep_last: untagged checkpoints of each kind to keep; None keeps all. The newest is always kept.
        keep_every: also keep untagged ones whose step is a multiple of this.
        keep: also keep what this function of a `Checkpoint` says, tagged or not.
        keep_tagged: how many of each tag to keep; tags that are not named keep all of theirs.
        on_failure: what a save that fails in the background does: "terminate" ends this process (a
            launcher then restarts the job from the last good checkpoint), "raise" raises at the next call, a
            function gets the error. The save's future has the error in any case.
        writers_per_node: processes of a node that write at once; None: `TUNDISH_WRITERS_PER_NODE`, else 1.
        staging_limit_bytes: host memory of each rank for staging, the same on all; a save that exceeds what is
            free waits for the one before it; one that is larger is written while the caller waits, in as much, unless
            one tensor alone needs more. None does not bound it.
        checksum: "crc64" records CRC-64/NVME of every file; None none: nobody can tell later whether a byte changed.
        timeout: seconds that a step of a save waits for the other ranks.
        on_published: functions of a published path, called on this rank in the background. One that fails, fails the
            save's future and nothing else; so does `keep`.
        on_event: called with "staged", "written", "voted" or "published", the kind and the step, for those
            who watch the order of things.

    Raises:
        InvalidInputError: an argument that cannot be used, or that is another one on another rank. The ranks may
            differ in `on_failure`, `on_published`, `on_event` and what `keep` does, and in nothing else.
        StorageError: a root that is a file, is not writable, or is another folder on another rank.
        RootInUseError: another job saves there, and still does after a minute, in which it may end.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        group: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Callable[[Checkpoint], bool] | None = None,
        keep_tagged: Mapping[str, int] | None = None,
        on_failure: OnFailure = "terminate",
        writers_per_node: int | None = None,
        staging_limit_bytes: int | None = None,
        checksum: str | None = "crc64",
        timeout: float = 7200.0,
        on_published: Sequence[Callable[[Path], Any]] = (),
        on_event: Callable[[str, str, int], Any] | None = None,
    ) -> None:
        self._process = os.getpid()
        self._closed = False
        arguments = Arguments(
            root=root,
            retention=functools.partial(
                Retention,
                keep_last=keep_last,
                keep_every=keep_every,
                keep=keep,
                keep_tagged={} if keep_tagged is None else keep_tagged,
            ),
            on_failure=on_failure,
            writers_per_node=writers_per_node,
            staging_limit_bytes=staging_limit_bytes,
            checksum=checksum,
            on_published=on_published,
            on_event=on_event,
        )
        # A notebook that runs a cell again opens the root that the cell had open before.
        for hold in list(_held):
            if hold.was_dropped:
                hold.let_go()
        self._opened = open_root(arguments, group, timeout)
        self.path = self._opened.path
        self._calls = CollectiveCalls(self._opened.voter)
        self._hold = _Hold(self._opened)
        # Whoever drops it, as a function does that returns, has its saves finished all the same.
        weakref.finalize(self, self._hold.drop).atexit = False

    # ---- Saving ----

    def save_hf(
        self,
        step: int,
        model_or_tensors: Any,
        *,
        config: Any = None,
        tokenizer: Any = None,
        dtype: Any = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        source_dir: str | os.PathLike[str] | None = None,
        to_hf: Callable[..., Any] | None = None,
        staging: Staging = "eager",
        optimizer: Any = None,
        tag: str | None = None,
        overwrite: bool = False,
        blocking: bool = False,
    ) -> Save:
        """Collective: save a Hugging Face export of `step`; returns when the tensors are staged.

        Args:
            step: a whole number of at least 0, above every published one.
            model_or_tensors: an `nn.Module` (of one that holds adapters of peft, these alone); a mapping of names to
                tensors or DTensors; or a mapping of prefixes to modules, for composed models.
            config: has `save_pretrained`; by default the model's own. None of a model that holds adapters.
            tokenizer: tokenizer or processor, likewise.
            dtype: convert floating-point tensors to this.
            shard_bytes: no file holds more, unless one tensor does, or the file is an adapter's.
            source_dir: take everything but the weights from this folder, which is not the root; where both it and the
                model, `config` or `tokenizer` have a file of one name, that of the latter.
            to_hf: converts names and tensors, one at a time, of models whose training layout differs:
                called with a name and its tensor, gives pairs of them.
            staging: "eager" copies before it returns; "lazy" returns at once, copies during the next forward and
                backward, and holds up `optimizer.step()` until it is done. Changes by anybody else in between fail the
                save, but for those through `.data`, which torch does not count.
            optimizer: of a lazy staging.
            tag: a name for retention ("snapshot").
            overwrite: exchange a published checkpoint of this step. Whoever reads that is waited for in the background,
                up to half of `timeout`; then the save fails with `CheckpointInUseError`.
            blocking: return when the checkpoint is published.

        Returns a future of the published path.

        Raises what is wrong with the arguments or the tensors, on all ranks: `InvalidInputError`, `InvalidTypeError`
        (also for a model that mixes kinds of adapters), `StepExistsError`, `StepOrderError`, `StorageError` (too
        little disk). With `on_failure="raise"` also what an earlier save failed with.
        """
        opened, calls = self._opened, self._calls

        def save() -> Save:
            request = Request(
                kind="hf",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                make_plan=functools.partial(
                    plan_hf,
                    model_or_tensors,
                    config=config,
                    tokenizer=tokenizer,
                    dtype=dtype,
                    shard_bytes=shard_bytes,
                    source_dir=source_dir,
                    root=self.path,
                    to_hf=to_hf,
                    staging=staging,
                    optimizer=optimizer,
                    group=opened.group,
                    background_group=opened.background_group,
                    are_nodes_alike=opened.are_nodes_alike,
                ),
            )
            return take(opened, request, leave=calls.leave)

        return calls.make("save_hf", self._check_call, save)

    def save_dcp(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Any = None,
        staging: Staging = "eager",
        optimizer: Any = None,
        tag: str | None = None,
        overwrite: bool = False,
        blocking: bool = False,
    ) -> Save:
        """Collective: save a torch DCP checkpoint of `step`; returns when the tensors are staged.

        Args:
            step: a whole number of at least 0, above every published one.
            state_dict: nested, of tensors, DTensors and other objects, as `torch.distributed.checkpoint` takes it.
            extra: facts about the run (step, epoch, consumed tokens), the same on all ranks; JSON.
            rank_extra: what this rank alone has to remember (state of its loader and sampler).
            staging, optimizer, tag, overwrite, blocking: as for `save_hf`.

        Returns and raises as `save_hf`. The files are plain DCP, which `torch.distributed.checkpoint.load` reads.
        """
        opened, calls = self._opened, self._calls

        def save() -> Save:
            request = Request(
                kind="dcp",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                make_plan=functools.partial(
                    opened.dcp.plan,
                    state_dict,
                    extra=extra,
                    rank_extra=rank_extra,
                    staging=staging,
                    optimizer=optimizer,
                ),
                extra=extra,
            )
            return take(opened, request, leave=calls.leave)

        return calls.make("save_dcp", self._check_call, save)

    # ---- What is there ----

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, one kind after the other and each by step, or one kind's. Not collective."""
        self._raise_pending()
        return self._opened.view.list(kind)

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`; None where there is none. Not collective."""
        self._raise_pending()
        return self._opened.view.latest(kind)

    def verify(self, path: str | os.PathLike[str]) -> builtins.list[str]:
        """Read every byte of a checkpoint again, as `tundish.checkpoint.verify`. Not collective."""
        self._raise_pending()
        return self._opened.view.verify(path)

    def reading(self, step: int, kind: Kind = "hf") -> contextlib.AbstractContextManager[Path]:
        """Keep the checkpoint of `step` from being pruned while the block reads it. Not collective."""
        self._raise_pending()
        return self._opened.view.reading(step, kind)

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step`, whatever retention says, as long as this checkpointer lives. Not collective.

        Any rank may say it, of a step that is yet to come too. The first rank, which removes what is old, knows at once
        what it says itself, and hears what another one says with the next save that begins after it.
        """
        self._check_open()
        self._raise_pending()
        step = check_step(plain_step(step))
        self._opened.protected.add(step)
        if self._opened.owner is not None:
            self._opened.owner.protect([step])

    def discard_after(self, step: int) -> None:
        """Collective: set all checkpoints above `step` aside, after a rollback to it.

        Saving below the newest step is refused; this makes `step` the newest. What is set aside is not deleted.
        Call it on all ranks, whether there is anything above or not: what one rank sees of the root may be older.
        """
        opened, step = self._opened, plain_step(step)

        def discard() -> None:
            # Before anything is set aside, all ranks agree on what.
            with opened.voted(f"discard_after of step {step}"):
                opened.failure.raise_pending()
                check_step(step)
                if any(lane.steps_under_way() for lane in opened.lanes.values()):
                    raise InvalidInputError("a save is under way: wait() for it before discarding steps")
            with opened.voted(f"setting aside what is above step {step}"):
                if opened.owner is not None:
                    opened.owner.discard_after(step)

        self._calls.make("discard_after", self._check_call, discard)

    def load_dcp(
        self, state_dict: dict[str, Any], step: int | None = None, *, verify: bool = True
    ) -> tuple[dict[str, Any], Mapping[int, Any]]:
        """Collective: load a DCP checkpoint into `state_dict`, in place, on this world size whatever it was saved on.

        A DCP save that is under way is waited for. Whoever trains on from what was loaded calls `discard_after` next:
        newer checkpoints of either kind would be in the way of the saves to come.

        Args:
            state_dict: as it was saved, or parts of it, with the tensors to load into; empty for `extra` alone.
            step: the checkpoint, the same on all ranks; None takes the newest whole one: where the newest is damaged,
                the one before it, with an error in the log. A step that is named raises instead.
            verify: read all bytes first, each rank a part of them, and compare their checksums; of files that were
                saved without one only the sizes, with a warning in the log. Floating-point values are converted to the
                dtype that they find.

        Returns `extra` and the `rank_extra` of every rank that saved, by rank: a mapping that reads what this rank has
        not read yet when it is asked for it, and equals, and is pickled as, the dict of all. `dict(rank_extras)` reads
        all of them now; where the checkpoint is removed before, looking up raises `NotFoundError`.

        Raises `NotFoundError` where there is none, `CorruptCheckpointError`, `CheckpointInUseError` where somebody
        locks readers out of it, and `StateMismatchError` where `state_dict` does not fit, on all ranks.
        """
        opened, step = self._opened, plain_step(step)

        def load() -> tuple[dict[str, Any], Mapping[int, Any]]:
            # What this checkpointer was given to save is there when it loads.
            opened.lanes["dcp"].wait(None)
            with opened.voted("load_dcp"):
                opened.failure.raise_pending()
            return opened.dcp.load(state_dict, view=opened.view, step=step, verify=verify)

        return self._calls.make("load_dcp", self._check_call, load)

    # ---- Waiting, failing, ending ----

    def wait(self, timeout: float | None = None) -> None:
        """Block until no save is under way. Not collective.

        Raises `TimedOutError`; with `on_failure="raise"` what a save failed with.
        """
        self._refuse_in_callback("wait")
        deadline = deadline_of(timeout)
        for lane in self._opened.lanes.values():
            if not lane.wait(None if deadline is None else deadline - time.monotonic()):
                raise TimedOutError(
                    f"saves of steps {lane.steps_under_way()} were not over within {timeout} s"
                )
        self._opened.failure.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Bytes of host memory that staging uses, and steps under way, by kind."""
        self._raise_pending()
        return {
            "staging": self._opened.budget.stats(),
            "under_way": {kind: lane.steps_under_way() for kind, lane in self._opened.lanes.items()},
        }

    def close(self) -> None:
        """Finish the saves under way and let go of the root. The second call does nothing.

        Where Ctrl-C ends the wait, the saves go on and the root is let go of when they are over; another call waits
        for that. With `on_failure="raise"` it raises what a save failed with, when everything is let go of.
        """
        if os.getpid() != self._process:
            return
        self._refuse_in_callback("close")
        self._closed = True
        try:
            self._hold.let_go()
        except BaseException:
            self._hold.let_go_later()
            raise
        self._opened.failure.raise_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            # What ends the block tells more than what the close has to add.
            if error is None:
                raise
            _logger.exception("a save failed while another error ended the block")

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this checkpointer was made before a fork: use it in the process that made it"
            )
        # The functions of the saves that a close waits for come before it.
        if self._closed and not self._is_in_callback():
            raise InvalidInputError("this checkpointer is closed")

    def _raise_pending(self) -> None:
        """Raise what a save failed with, to whoever trains; nobody else is to hear of it first."""
        if not self._is_in_callback():
            self._opened.failure.raise_pending()

    def _check_call(self, call: str) -> None:
        self._check_open()
        self._refuse_in_callback(call)

    def _refuse_in_callback(self, call: str) -> None:
        """Refuse what waits for saves, or for other ranks, on the thread of a save."""
        if self._is_in_callback():
            raise InvalidInputError(
                f"{call}() in a callback of a save would wait for that save itself: call it on the thread that trains"
            )

    def _is_in_callback(self) -> bool:
        """Whether a function of the user's is called, on the thread of a save."""
        return any(lane.is_own_thread() for lane in self._opened.lanes.values())


def _finish_saves() -> None:
    """Finish the saves that are under way when the interpreter exits; Ctrl-C gives them up."""
    for hold in list(_held):
        try:
            hold.let_go()
            hold.opened.failure.raise_pending()
        except KeyboardInterrupt:
            _logger.warning(
                "saves under %s were given up; the next start removes what they left", hold.opened.path
            )
            return
        except Exception:
            _logger.exception("a save under %s failed", hold.opened.path)


# Not `atexit`, whose functions run when Python 3.12 starts no thread any more, which votes need.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]  # as concurrent.futures does
