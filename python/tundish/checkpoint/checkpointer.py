"""The checkpointer: opens a root over a group of ranks and takes saves from the caller's thread.

It owns a lane a kind (`lane`), the staging budget, the failure policy and, on the group's first rank, the root.
What always holds:

1. A save is refused on all ranks, before anything is staged, or taken by all.
2. All ranks make the same calls in the same order; a call that fails on one rank fails on all.
3. Nothing is deleted before what replaces it is durable and recorded.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import functools
import logging
import os
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tundish import _native
from tundish.checkpoint.budget import StagingBudget
from tundish.checkpoint.dcp.saver import DcpSaver
from tundish.checkpoint.failure import FailurePolicy, OnFailure
from tundish.checkpoint.hf.plan import plan_hf
from tundish.checkpoint.lane import Job, Lane
from tundish.checkpoint.owner import Owner
from tundish.checkpoint.reading import KINDS, Checkpoints, Kind, ReadOnlyRoot, check_step
from tundish.checkpoint.retention import Checkpoint, Retention
from tundish.checkpoint.saves import DEFAULT_SHARD_BYTES, Plan, Save, Staged, Staging, WritesThrough
from tundish.distributed import Voter, long_timeout_group
from tundish.distributed.groups import membership, seconds_of
from tundish.errors import InvalidInputError, StorageError

__all__ = ["Checkpointer"]

_NONCE = ".tundish-opening"

_logger = logging.getLogger("tundish.checkpoint")
_open_checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """Saves checkpoints under one folder while training goes on. Collective over `group`; a context manager.

    A checkpoint appears under its name, `hf-<step>` or `dcp-<step>`, when all of it is durable, or never. Saves
    return when the tensors are in host memory; files are written in the background by threads that leave
    the processors to the training. One save a kind is written at a time.

    Args:
        root: the folder of all checkpoints, the same one on all ranks; made where its parent exists.
        group: the ranks that save together (None: all ranks of the job, or this process alone).
        keep_last: untagged checkpoints of each kind to keep; None keeps all. The newest is always kept.
        keep_every: also keep steps that are a multiple of this.
        keep: also keep what this function of a `Checkpoint` says.
        keep_tagged: how many of each tag to keep; tags that are not named keep all of theirs.
        on_failure: what a save that fails in the background does: "terminate" ends this process (a
            launcher then restarts the job from the last good checkpoint), "raise" raises at the next call, a
            function gets the error. The save's future has the error in any case.
        writers_per_node: processes of a node that write at once; None: `TUNDISH_WRITERS_PER_NODE`, else 1.
        staging_limit_bytes: host memory of each rank for staging, the same on all; a save that exceeds what is
            free waits for the one before it; an export that is larger is written while the caller waits. None does
            not bound it.
        checksum: "crc64" records CRC-64/NVME of every file; None none.
        timeout: seconds that a step of a save waits for the other ranks.
        on_published: functions of a published path, called on this rank in the background.
        on_event: called with "staged", "written", "voted" or "published", the kind and the step, for those
            who watch the order of things.

    Raises:
        InvalidInputError: an argument that cannot be used.
        StorageError: a root that is a file, is not writable, or is another folder on another rank.
        RootInUseError: another job saves there.
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
        member = membership(group)
        self._process = os.getpid()
        self._group = group
        self._rank = member.rank
        self._world_size = len(member.ranks)
        self._index = member.ranks.index(member.rank)
        self._owner: Owner | None = None
        self._lanes: dict[Kind, Lane] = {}
        self._hf_group: Any = None
        self._closed = False
        self._on_event = on_event
        self._timeout = seconds_of(timeout)
        self.path = Path(root).absolute()
        with contextlib.ExitStack() as stack:
            self._voter = stack.enter_context(Voter(group, timeout=self._timeout))
            with self._voted("opening"):
                retention = Retention(
                    keep_last=keep_last, keep_every=keep_every, keep=keep, keep_tagged=keep_tagged or {}
                )
                self._budget = StagingBudget(staging_limit_bytes)
                self._failure = FailurePolicy(on_failure, member.rank)
                writers = _writers_per_node(writers_per_node)
                if checksum not in ("crc64", None):
                    raise InvalidInputError(f"checksum is {checksum!r}: give 'crc64' or None")
                if self._index == 0:
                    self._owner = Owner(self.path, retention)
                    stack.callback(self._owner.close)
                    self._owner.tell_recovered()
            self._meet()
            self._view = ReadOnlyRoot(self.path)
            if self._world_size > 1:
                self._hf_group = stack.enter_context(long_timeout_group(self._timeout, member.ranks))
            self._dcp = DcpSaver(group, timeout=self._timeout)
            stack.callback(self._dcp.close)
            for kind in KINDS:
                self._lanes[kind] = Lane(
                    kind=kind,
                    voter=stack.enter_context(Voter(group, timeout=self._timeout)),
                    publisher=self._owner,
                    world_size=self._world_size,
                    writers_per_node=writers,
                    checksum=checksum is not None,
                    announce=self._announce,
                    on_published=tuple(on_published),
                    failed=self._failure.act,
                    timeout=self._timeout,
                )
            self._resources = stack.pop_all()
        _open_checkpointers.add(self)

    def _meet(self) -> None:
        """Make sure that all ranks see the same folder and may write to it."""
        nonce = self.path / _NONCE
        with self._voted("opening"):
            if self._index == 0:
                _native.replace_file(nonce, uuid.uuid4().hex.encode())
        seen, error = "", None
        try:
            with tempfile.TemporaryFile(dir=self.path):
                seen = nonce.read_text()
        except OSError as caught:
            error = StorageError(
                caught.errno or errno.EIO,
                "is not the same writable folder on this rank as on the first: give a root that all ranks share",
                str(self.path),
            )
        try:
            self._voter.vote(
                error, what=f"opening {self.path}", same=seen or "nothing", timeout=self._timeout
            )
        finally:
            if self._index == 0:
                nonce.unlink(missing_ok=True)

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
            model_or_tensors: an `nn.Module`; a mapping of names to tensors or DTensors; or a mapping of prefixes to
                modules, for composed models.
            config: has `save_pretrained`; by default the model's own.
            tokenizer: tokenizer or processor, likewise.
            dtype: convert floating-point tensors to this.
            shard_bytes: no file holds more, unless one tensor does.
            source_dir: take everything but the weights from this folder, where there is no `config`.
            to_hf: converts names and tensors, one at a time, of models whose training layout differs:
                called with a name and its tensor, gives pairs of them.
            staging: "eager" copies before it returns; "lazy" returns at once, copies during the next forward and
                backward, and holds up `optimizer.step()` until it is done.
            optimizer: of a lazy staging.
            tag: a name for retention ("snapshot").
            overwrite: exchange a published checkpoint of this step.
            blocking: return when the checkpoint is published.

        Returns a future of the published path.

        Raises what is wrong with the arguments or the tensors, on all ranks: `InvalidInputError`,
        `StepExistsError`, `StepOrderError`, `StorageError` (too little disk). With `on_failure="raise"` also what an
        earlier save failed with.
        """

        def make_plan() -> Plan:
            return plan_hf(
                model_or_tensors,
                config=config,
                tokenizer=tokenizer,
                dtype=dtype,
                shard_bytes=shard_bytes,
                source_dir=source_dir,
                to_hf=to_hf,
                staging=staging,
                optimizer=optimizer,
                group=self._group,
                background_group=self._hf_group,
            )

        return self._save("hf", step, make_plan, tag=tag, overwrite=overwrite, blocking=blocking)

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

        def make_plan() -> Plan:
            return self._dcp.plan(
                state_dict, extra=extra, rank_extra=rank_extra, staging=staging, optimizer=optimizer
            )

        return self._save(
            "dcp", step, make_plan, tag=tag, overwrite=overwrite, blocking=blocking, extra=extra
        )

    def _save(
        self,
        kind: Kind,
        step: int,
        make_plan: Callable[[], Plan],
        *,
        tag: str | None,
        overwrite: bool,
        blocking: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> Save:
        self._check_open()
        lane = self._lanes[kind]
        lane.wait_for_turn()
        what = f"save_{kind} of step {step}"
        with contextlib.ExitStack() as undo:
            with self._voted(what) as same:
                self._failure.raise_pending()
                check_step(step)
                _check_tag(tag)
                if step in lane.steps_under_way():
                    raise InvalidInputError(f"{what}: a save of this step is under way already")
                plan = make_plan()
                undo.callback(plan.release)
                if self._owner is not None:
                    self._owner.begin(kind, step, plan.written_bytes, overwrite=overwrite)
                    undo.callback(self._owner.abandon, kind, step)
                through = self._budget.limit if self._exceeds_limit(plan) else None
                taken = plan.staged_bytes if through is None else through
                self._budget.take(taken, what)
                undo.callback(self._budget.give_back, taken)
                if through is None:
                    plan.reserve()
                agreed = through if plan.files else None
                same(
                    f"step {step}, tag {tag}, overwrite {bool(overwrite)}, through {agreed}, {plan.fingerprint}"
                )
            undo.pop_all()
        own = sum(file.size for file in plan.files if file.rank == self._index)
        save = Save(kind, step, own if plan.files else plan.staged_bytes)
        job = Job(
            save=save,
            folder=self.path / f".{kind}-{step}.incomplete",
            target=self.path / f"{kind}-{step}",
            tag=tag,
            overwrite=overwrite,
            extra=copy.deepcopy(dict(extra or {})),
            is_answered=blocking,
            release=functools.partial(self._budget.give_back, taken),
        )
        try:
            job.staged = self._stage(plan, job, lane, through)
        except BaseException as caught:
            # The other ranks are told in the lane's next vote.
            plan.release()
            job.staged, job.is_answered = caught, True
            raise
        finally:
            lane.submit(job)
        if blocking:
            save.result()
        return save

    def _exceeds_limit(self, plan: Plan) -> bool:
        """Whether some rank would stage more than the limit: answered alike on all ranks.

        Where a plan does not know the files of other ranks, each answers for itself: their staging is no collective.
        """
        sizes = [0 if plan.files else plan.staged_bytes] * self._world_size
        for file in plan.files:
            sizes[file.rank] += file.size
        limit = self._budget.limit
        return limit is not None and max(sizes) > limit and isinstance(plan, WritesThrough)

    def _stage(self, plan: Plan, job: Job, lane: Lane, through: int | None) -> Staged:
        if through is None or not isinstance(plan, WritesThrough):
            return plan.stage()
        _logger.warning("%s writes through: it is larger than staging_limit_bytes=%d", job.what, through)
        lane.wait(None)
        return plan.write_through(job.folder, lane.options(job.save), through)

    # ---- What is there ----

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, or those of one kind, by step. Not collective."""
        return self._view.list(kind)

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`; None where there is none. Not collective."""
        return self._view.latest(kind)

    def verify(self, path: str | os.PathLike[str]) -> None:
        """Read every byte of a checkpoint again, as `tundish.checkpoint.verify`. Not collective."""
        self._view.verify(path)

    def reading(self, step: int, kind: Kind = "hf") -> contextlib.AbstractContextManager[Path]:
        """Keep the checkpoint of `step` from being pruned while the block reads it. Not collective."""
        return self._view.reading(step, kind)

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step`, whatever retention says, as long as this checkpointer lives."""
        check_step(step)
        if self._owner is not None:
            self._owner.protect(step)

    def discard_after(self, step: int) -> None:
        """Collective: set all checkpoints above `step` aside, after a rollback to it.

        Saving below the newest step is refused; this makes `step` the newest. What is set aside is not deleted.
        Call it on all ranks, whether there is anything above or not: what one rank sees of the root may be older.
        """
        self._check_open()
        with self._voted(f"discard_after of step {step}"):
            self._failure.raise_pending()
            check_step(step)
            if any(lane.steps_under_way() for lane in self._lanes.values()):
                raise InvalidInputError("a save is under way: wait() for it before discarding steps")
            if self._owner is not None:
                self._owner.discard_after(step)

    def load_dcp(
        self, state_dict: dict[str, Any], step: int | None = None, *, verify: bool = True
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        """Collective: load a DCP checkpoint into `state_dict`, in place, on this world size whatever it was saved on.

        A DCP save that is under way is waited for.

        Args:
            state_dict: as it was saved, or parts of it, with the tensors to load into; empty for `extra` alone.
            step: the checkpoint; None takes the newest whole one: where a byte of the newest is wrong, the one before
                it, with a warning. A step that is named raises instead.
            verify: read all bytes first and compare their checksums.

        Returns `extra` and the `rank_extra` of every rank that saved, by rank.

        Raises `NotFoundError` where there is none, `CorruptCheckpointError`, and `StateMismatchError` where
        `state_dict` does not fit, on all ranks.
        """
        self._check_open()
        # What this checkpointer was given to save is there when it loads.
        self._lanes["dcp"].wait(None)
        return self._dcp.load(state_dict, view=self._view, step=step, verify=verify, voter=self._voter)

    # ---- Waiting, failing, ending ----

    def wait(self, timeout: float | None = None) -> None:
        """Block until no save is under way. Not collective.

        Raises `TimeoutError`; with `on_failure="raise"` what a save failed with.
        """
        for lane in self._lanes.values():
            if not lane.wait(timeout):
                raise TimeoutError(
                    f"saves of steps {lane.steps_under_way()} were not over within {timeout} s"
                )
        self._failure.raise_pending()

    def stats(self) -> dict[str, Any]:
        """Bytes of host memory that staging uses, and steps under way, by kind."""
        return {
            "staging": self._budget.stats(),
            "under_way": {kind: lane.steps_under_way() for kind, lane in self._lanes.items()},
        }

    def close(self) -> None:
        """Finish the saves under way and let go of the root. The second call does nothing.

        With `on_failure="raise"` it raises what a save failed with, when everything is let go of.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        _open_checkpointers.discard(self)
        for lane in self._lanes.values():
            lane.close()
        self._resources.close()
        self._failure.raise_pending()

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
        if self._closed:
            raise InvalidInputError("this checkpointer is closed")

    def _announce(self, event: str, kind: str, step: int) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event, kind, step)
        except Exception:
            _logger.exception("on_event failed at %r of %s step %d", event, kind, step)

    @contextlib.contextmanager
    def _voted(self, what: str) -> Iterator[Callable[[str], None]]:
        """A block of fallible work that ends in a vote; calls what it yields with what has to be equal on all ranks.

        What is voted on has to be equal too: ranks that make different calls are told so.
        """
        error: BaseException | None = None
        same = [what]
        try:
            yield same.append
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        self._voter.vote(error, what=what, same=": ".join(same), timeout=self._timeout)


def _check_tag(tag: object) -> None:
    if tag is not None and (not isinstance(tag, str) or not tag):
        raise InvalidInputError(f"tag is {tag!r}: give a word, or None")


def _writers_per_node(given: int | None) -> int:
    text = os.environ.get("TUNDISH_WRITERS_PER_NODE", "1") if given is None else given
    where = "TUNDISH_WRITERS_PER_NODE" if given is None else "writers_per_node"
    try:
        if isinstance(text, bool):
            raise ValueError
        count = int(text)
        if count < 1:
            raise ValueError
    except ValueError:
        raise InvalidInputError(f"{where} is {text!r}: give a whole number of at least 1") from None
    return count


@atexit.register
def _finish_saves() -> None:
    """Finish the saves that are under way when the interpreter exits; Ctrl-C gives them up."""
    for checkpointer in list(_open_checkpointers):
        try:
            checkpointer.close()
        except KeyboardInterrupt:
            _logger.warning(
                "saves under %s were given up; the next start removes what they left", checkpointer.path
            )
            return
        except Exception:
            _logger.exception("a save under %s failed", checkpointer.path)
