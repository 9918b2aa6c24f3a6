"""`Checkpointer`, which a training loop calls to save and load checkpoints.

Invariants:
    - A save is refused on all ranks, before tensors are exchanged or files written, or taken by all ranks.
    - All ranks make the same calls in the same order; a call that fails on one rank fails on all.
    - Nothing is deleted before its replacement is durable and recorded.
    - The root is released when its saves are over, whatever interrupts the wait for them.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tundish.checkpoint.checkpointer_resources import open_checkpointers
from tundish.checkpoint.dcp.loading.load import load_from_root
from tundish.checkpoint.dcp.loading.open_checkpoint import LoadingRanks
from tundish.checkpoint.dcp.saving.dcp_stager import DcpStager
from tundish.checkpoint.hf.hf_stager import HfStager
from tundish.checkpoint.open_root import open_root
from tundish.checkpoint.publish.failure_policy import OnFailure
from tundish.checkpoint.publish.readonly_root import (
    Checkpoints,
    Kind,
    check_step,
    format_steps,
    plain_step,
)
from tundish.checkpoint.publish.retention import Checkpoint, Retention
from tundish.checkpoint.save import Save, check_wait
from tundish.checkpoint.stager import DEFAULT_SHARD_BYTES, Staging
from tundish.checkpoint.start_save import SaveRequest, start_save
from tundish.errors import InvalidInputError, NotFoundError, TimedOutError

__all__ = ["Checkpointer"]

# More votes than a call takes.
_VOTES_PER_CALL = 256
# How long an interrupted rank waits for the others to hear of it.
_REPORT_SECONDS = 0.3

_logger = logging.getLogger("tundish.checkpoint")


class Checkpointer:
    """Saves checkpoints under one folder while training goes on. Collective over `group`; a context manager.

    A checkpoint appears under its name, `hf-<step>` or `dcp-<step>`, when all of it is durable, or never. Saves
    return when the tensors are in host memory; background threads write the files. One save of each kind is written
    at a time. A checkpointer whose collective call was interrupted (Ctrl-C) is closed: its next call raises.

    Args:
        root: the folder of all checkpoints, the same on all ranks; created if its parent exists.
        group: the process group of the ranks that save together. None: all ranks of the job, or this process alone.
        keep_last: how many untagged checkpoints of each kind to keep; None keeps all. The newest always stays.
        keep_every: also keep untagged checkpoints whose step is a multiple of this.
        keep: also keep the checkpoints for which this function of a `Checkpoint` returns True, tagged or not.
        keep_tagged: how many checkpoints of each tag to keep; tags that are not named keep all of theirs.
        on_failure: what to do when a save fails in the background. "terminate" ends this process, so that a launcher
            restarts the job from the last good checkpoint. "raise" raises at the next call. A function gets the
            error. The save's future has the error in any case.
        writers_per_node: how many processes of a node write at once. None: `TUNDISH_WRITERS_PER_NODE`, else 1.
        staging_limit_bytes: host memory of each rank for staging, the same on all ranks. A save waits until earlier
            saves leave enough of it; a save that is larger than the limit is refused. None sets no limit.
        checksum: "crc64" records CRC-64/NVME of every file. With None nobody can tell later whether a byte changed.
        timeout: seconds that a step of a save waits for the other ranks.
        on_published: functions that are called with each published path, on this rank, in the background. One that
            raises fails the save's future and nothing else; so does `keep`.
        on_event: function that is called with "staged", "written", "voted" or "published", the kind and the step.

    Raises:
        InvalidInputError: an argument cannot be used, or differs between ranks. Ranks may differ in `on_failure`,
            `on_published`, `on_event` and the results of `keep`.
        StorageError: the root is a file, is not writable, or is another folder on another rank.
        RootInUseError: another job saves there, and still does after a minute.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> model = torch.nn.Linear(2, 2)
        >>> with td.Checkpointer("checkpoints", keep_last=2) as checkpointer:
        ...     save = checkpointer.save_dcp(100, {"model": model.state_dict()}, extra={"step": 100})
        ...     extra, _ = checkpointer.load_dcp({"model": model.state_dict()})
        >>> save.result().name, extra
        ('dcp-100', {'step': 100})
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
        # None while it is open, else why it was closed, for the message.
        self._closed_by: str | None = None
        # The collective call that each thread is in.
        self._current = threading.local()
        # A notebook that runs a cell again opens the root that the cell opened before.
        for opened in list(open_checkpointers):
            if opened.was_dropped:
                opened.close()
        self._resources = open_root(
            root,
            group=group,
            timeout=timeout,
            make_retention=functools.partial(
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
        self.path = self._resources.path
        # A checkpointer that is dropped without `close` has its saves finished all the same.
        weakref.finalize(self, self._resources.drop).atexit = False

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
            step: a whole number of at least 0, above every published step.
            model_or_tensors: an `nn.Module` (of one that holds peft adapters, only these are saved); a mapping of
                names to tensors or DTensors; or a mapping of prefixes to modules, for composed models.
            config: object with `save_pretrained`; by default the model's own. None for a model that holds adapters.
            tokenizer: tokenizer or processor, with `save_pretrained`.
            dtype: convert floating-point tensors to this torch dtype.
            shard_bytes: largest size of a file in bytes, unless one tensor is larger or the file is an adapter's.
            source_dir: copy everything but the weights from this folder, which must not be the root. Files of the
                model, `config` or `tokenizer` take precedence.
            to_hf: converts names and tensors, for models whose training layout differs: takes a name and its tensor,
                returns pairs of them.
            staging: "eager" copies before the call returns. "lazy" copies during the next forward and backward and
                holds up `optimizer.step()` until the copy is done. Other changes of the tensors before that fail the
                save, except writes through `.data`, which torch does not count.
            optimizer: the optimizer, or a list of them, whose step a lazy save holds up.
            tag: a name for retention ("snapshot").
            overwrite: replace a published checkpoint of this step. The save waits in the background for those who
                read it, up to half of `timeout`; then it fails with `CheckpointInUseError`.
            blocking: return when the checkpoint is published.

        Returns:
            A future of the published path.

        Raises:
            InvalidInputError: an argument or a tensor cannot be used; on all ranks, as all errors here.
            InvalidTypeError: likewise; also for a model that mixes kinds of adapters.
            StepExistsError: the step is published.
            StepOrderError: the step is below the newest.
            StorageError: the disk has too little room.
            Exception: with `on_failure="raise"`, the error of an earlier save.
        """
        resources = self._resources
        with self._collective("save_hf"):
            request = SaveRequest(
                kind="hf",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                make_stager=functools.partial(
                    HfStager,
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
                    group=resources.group,
                    exchange_group=resources.exchange_group,
                    are_nodes_alike=resources.are_nodes_alike,
                ),
            )
            return start_save(resources, request)

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

        The files are plain DCP, which `torch.distributed.checkpoint.load` reads.

        Args:
            step: a whole number of at least 0, above every published step.
            state_dict: nested, of tensors, DTensors and other objects, as `torch.distributed.checkpoint` takes it.
            extra: facts about the run (step, epoch, consumed tokens), the same on all ranks; JSON.
            rank_extra: state of this rank alone, such as its random generators.
            staging, optimizer, tag, overwrite, blocking: as for `save_hf`.

        Returns:
            A future of the published path.

        Raises:
            Exception: as `save_hf`.
        """
        resources = self._resources
        with self._collective("save_dcp"):
            request = SaveRequest(
                kind="dcp",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                make_stager=functools.partial(
                    DcpStager,
                    resources.planner,
                    state_dict,
                    extra=extra,
                    rank_extra=rank_extra,
                    staging=staging,
                    optimizer=optimizer,
                ),
                extra=extra,
            )
            return start_save(resources, request)

    # ---- Reading ----

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, or those of one kind; each kind sorted by step. Not collective."""
        self._raise_pending()
        return self._resources.readonly.list(kind)

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`; None if there is none. Not collective."""
        self._raise_pending()
        return self._resources.readonly.latest(kind)

    def verify(self, path: str | os.PathLike[str]) -> builtins.list[str]:
        """Read every byte of a checkpoint again, as `tundish.checkpoint.verify`. Not collective."""
        self._raise_pending()
        return self._resources.readonly.verify(path)

    def reading(self, step: int, kind: Kind = "hf") -> contextlib.AbstractContextManager[Path]:
        """Keep the checkpoint of `step` from being removed while the block reads it. Not collective."""
        self._raise_pending()
        return self._resources.readonly.reading(step, kind)

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step` whatever retention says, as long as this checkpointer is open. Not collective.

        Any rank may protect any step. The first rank removes old checkpoints. It learns of the step with the next save
        that begins.

        Args:
            step: a step that is published or being saved.

        Raises:
            NotFoundError: there is no checkpoint of `step`.
            InvalidInputError: the checkpointer is closed, or `step` is no whole number of at least 0.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("protected", keep_last=1) as checkpointer:
            ...     for step in (1, 2, 3):
            ...         _ = checkpointer.save_hf(step, {"w": torch.ones(2)}, blocking=True)
            ...         if step == 1:
            ...             checkpointer.protect(1)
            ...     [checkpoint.step for checkpoint in checkpointer.list()]
            [1, 3]
        """
        self._check_open()
        self._raise_pending()
        step = check_step(plain_step(step))
        self._check_is_known(step)
        self._resources.protected.add(step)
        if self._resources.writable is not None:
            self._resources.writable.protect([step])

    def discard_after(self, step: int) -> None:
        """Collective: set all checkpoints above `step` aside, after a rollback to it. Nothing is deleted.

        Saving below the newest step is refused; this makes `step` the newest. Call it on all ranks, whether or not
        there is anything above.
        """
        resources, step = self._resources, plain_step(step)
        with self._collective("discard_after"):
            # All ranks agree before anything is set aside.
            with resources.agreed(f"discard_after of step {step}"):
                resources.failure.raise_pending()
                check_step(step)
                if any(queue.steps_under_way() for queue in resources.queues.values()):
                    raise InvalidInputError("a save is under way: wait() for it before discarding steps")
            with resources.agreed(f"setting aside the steps above {step}"):
                if resources.writable is not None:
                    resources.writable.discard_after(step)

    def load_dcp(
        self, state_dict: dict[str, Any], step: int | None = None, *, verify: bool = True
    ) -> tuple[dict[str, Any], Mapping[int, Any]]:
        """Collective: load a DCP checkpoint into `state_dict`, in place, on any number of ranks.

        Waits for a DCP save that is under way. To train on from the loaded step, call `discard_after` next: newer
        checkpoints of either kind would be in the way of later saves.

        Args:
            state_dict: as it was saved, or parts of it, with the tensors to load into; empty to get `extra` alone.
                Floating-point values are converted to the dtype of the target.
            step: the checkpoint, the same on all ranks. None takes the newest whole one: a damaged one is passed over
                with an error in the log. A step that is named raises instead.
            verify: read all bytes first, each rank a part of them, and compare their checksums; sizes alone, with a
                warning, if no checksum was recorded.

        Returns:
            `extra`, and a mapping of each rank that saved to its `rank_extra`. The mapping reads what this rank has
            not read yet when it is looked up. `dict(rank_extras)` reads everything now.

        Raises:
            NotFoundError: there is no checkpoint; on all ranks, as all errors here.
            CorruptCheckpointError: the checkpoint, or every checkpoint, is damaged.
            CheckpointInUseError: another process locks readers out of it.
            StateMismatchError: `state_dict` does not fit.
        """
        resources, step = self._resources, plain_step(step)
        with self._collective("load_dcp"):
            # A save of this checkpointer is visible to its load.
            resources.queues["dcp"].wait(None)
            with resources.agreed("load_dcp"):
                resources.failure.raise_pending()
            ranks = LoadingRanks(resources.voter, resources.timeout)
            return load_from_root(state_dict, resources.readonly, step, verify=verify, ranks=ranks)

    # ---- Waiting and closing ----

    def wait(self, timeout: float | None = None) -> None:
        """Block until no save is under way. Not collective.

        Args:
            timeout: seconds to wait; None waits without end.

        Raises:
            TimedOutError: a save is not over in time.
            Exception: with `on_failure="raise"`, the error of a save.
        """
        self._refuse_in_callback("wait")
        check_wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        for queue in self._resources.queues.values():
            if not queue.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimedOutError(
                    f"saves of steps {queue.steps_under_way()} were not over within {timeout} s"
                )
        self._resources.failure.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Bytes of host memory that staging uses, and the steps under way, by kind."""
        self._raise_pending()
        return {
            "staging": self._resources.budget.stats(),
            "under_way": {kind: queue.steps_under_way() for kind, queue in self._resources.queues.items()},
        }

    def close(self) -> None:
        """Finish the saves under way and release the root. The second call does nothing.

        If Ctrl-C ends the wait, the saves go on and the root is released when they are over. With
        `on_failure="raise"` it raises the error of a save, after everything is released.
        """
        if os.getpid() != self._resources.process:
            return
        self._refuse_in_callback("close")
        self._closed_by = self._closed_by or ""
        try:
            self._resources.close()
        except BaseException:
            self._resources.close_later()
            raise
        self._resources.failure.raise_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            # The error that ends the block says more than the one of closing.
            if error is None:
                raise
            _logger.exception("a save failed while another error ended the block")

    @contextlib.contextmanager
    def _collective(self, call: str) -> Iterator[None]:
        """A block in which this rank makes a collective call; an interrupt in it closes the checkpointer."""
        self._check_open()
        self._refuse_in_callback(call)
        outer = getattr(self._current, "call", None)
        if outer is not None:
            raise InvalidInputError(
                f"{call}() was called inside {outer}(), by a signal handler or a function that was given: the other "
                "ranks cannot know of it. Have the handler set a flag, and save between two steps"
            )
        self._current.call = call
        try:
            # The votes of a call have numbers of its own, so that ranks meet again after one left a call early.
            voter = self._resources.voter
            voter.skip_to(-(-voter.last_vote.number // _VOTES_PER_CALL) * _VOTES_PER_CALL)
            yield
        except Exception:
            raise
        except BaseException as interrupt:
            self._close_after_interrupt(call, interrupt)
            raise
        finally:
            self._current.call = None

    def _close_after_interrupt(self, call: str, interrupt: BaseException) -> None:
        """Tell the other ranks that this one left the call, and close."""
        self._closed_by = f", since {call}() was interrupted by {type(interrupt).__name__}"
        resources = self._resources
        try:
            with contextlib.suppress(Exception):
                resources.voter.vote(interrupt, what=call, timeout=_REPORT_SECONDS)
        except BaseException as caught:
            if caught is not interrupt:
                raise
        finally:
            # Ranks that wait for this one in a vote or an exchange fail now; saves under way have voters of their own.
            resources.voter.close()
            if resources.exchange_group is not None:
                resources.exchange_group.close()
            self._resources.close_later()

    def _check_open(self) -> None:
        if os.getpid() != self._resources.process:
            raise InvalidInputError(
                "this checkpointer was made before a fork: use it in the process that made it"
            )
        # Callbacks of the saves that a close waits for may still use it.
        if self._closed_by is not None and not self._is_in_callback():
            raise InvalidInputError(f"this checkpointer is closed{self._closed_by}: make a new one")

    def _check_is_known(self, step: int) -> None:
        """Refuse a step that is neither published nor being saved."""
        resources = self._resources
        # First, since a save may be published between the two looks.
        if any(step in queue.steps_under_way() for queue in resources.queues.values()):
            return
        steps = sorted({one.step for one in resources.readonly.list()})
        if step not in steps:
            raise NotFoundError(
                errno.ENOENT,
                f"{self.path} has no checkpoint of step {step}, and none is being saved ({format_steps(steps)}): call "
                "protect after the save begins",
                str(self.path),
            )

    def _raise_pending(self) -> None:
        """Raise the error of a save on the training thread; a callback must not consume it."""
        if not self._is_in_callback():
            self._resources.failure.raise_pending()

    def _refuse_in_callback(self, call: str) -> None:
        if self._is_in_callback():
            raise InvalidInputError(
                f"{call}() in a callback of a save would wait for that save itself: call it on the thread that trains"
            )

    def _is_in_callback(self) -> bool:
        """Whether the caller is a function of the user's on the thread of a save."""
        return any(queue.is_own_thread() for queue in self._resources.queues.values())
