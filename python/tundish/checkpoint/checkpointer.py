"""`Checkpointer`, which a training loop calls to save and load checkpoints.

Invariants:
    - A save is refused on all ranks, before tensors are exchanged or files written, or taken by all ranks.
    - All ranks make the same calls in the same order; a call that fails on one rank fails on all.
    - Nothing is deleted before its replacement is durable and recorded.
    - The root is released when its saves are over, whatever interrupts the wait for them.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tundish.checkpoint.dcp.load import Loaded, Target, load_from_root, no_checkpoint
from tundish.checkpoint.dcp.save import DcpSave
from tundish.checkpoint.failures import OnFailure
from tundish.checkpoint.readonly import ReadonlyRoot
from tundish.checkpoint.retention import Retention
from tundish.checkpoint.root import Checkpoint, Root, check_step, name_of, plain_step
from tundish.checkpoint.save_job import Save, SaveJob, check_wait
from tundish.checkpoint.session import open_session, open_sessions
from tundish.checkpoint.start_save import start_save
from tundish.checkpoint.training_state import Resumption, TrainingArguments, save_training
from tundish.checkpoint.write_plan import DEFAULT_SHARD_BYTES, Staging
from tundish.errors import InvalidInputError, TimedOutError

_logger = logging.getLogger("tundish.checkpoint")


class Checkpointer(ReadonlyRoot):
    """Saves checkpoints under one folder while training goes on. Collective over `group`; a context manager.

    A checkpoint appears under its name, `hf-<step>` or `dcp-<step>`, when all of it is durable, or never. Saves
    return when the tensors are in host memory; background threads write the files. One save of each kind is written
    at a time. A checkpointer whose collective call was interrupted (Ctrl-C) is closed: its next call raises.

    `list`, `latest`, `verify`, `survey` and `reading`, those of `ReadonlyRoot`, are not collective. With
    `on_failure="raise"` they too raise the error of an earlier save.

    Args:
        root: the folder of all checkpoints, the same on all ranks; created if its parent exists. Or a `Root`
            (`tundish.checkpoint.root`), which publishes elsewhere.
        group: the process group of the ranks that save together. None: all ranks of the job, or this process alone.
        keep_last: how many untagged checkpoints of each kind to keep; None keeps all. The newest always stays.
        keep_every: also keep untagged checkpoints whose step is a multiple of this.
        keep: also keep the checkpoints for which this function of a `Checkpoint` returns True, tagged or not.
        keep_tagged: how many checkpoints of each tag to keep; tags that are not named keep all of theirs.
        on_failure: what to do when a save fails in the background. "terminate" ends this process, so that a launcher
            restarts the job from the last good checkpoint. "raise" raises at the next call. A function gets the
            error. The save's future has the error in any case.
        staging_limit_bytes: host memory of each rank for staging, the same on all ranks. A save waits until earlier
            saves leave enough of it; a save that is larger than the limit is refused. None sets no limit.
        checksum: "crc64" records CRC-64/NVME of every file. With None nobody can tell later whether a byte changed.
        timeout: seconds that ranks wait for each other. None: a call waits 8 minutes for ranks that do not make it, and
            ranks wait 2 hours for the files of others. Opening waits for a job that is ending, for up to a minute.
        on_published: functions that are called with each published path, on this rank, in the background. One that
            raises fails the save's future and nothing else; so does `keep`.
        on_event: function that is called with "staged", "written", "voted" or "published", the kind and the step.

    Raises:
        InvalidInputError: an argument cannot be used, or differs between ranks. Ranks may differ in `on_failure`,
            `on_published`, `on_event` and the results of `keep`.
        StorageError: the root is a file, is not writable, or is another folder on another rank.
        RootInUseError: another job saves there, and still does after a minute, or after `timeout` if that is shorter;
            or another checkpointer of this process has the root open.

    Attributes:
        extra: the `extra` of the checkpoint that the last `resume` loaded; empty where there was none.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with td.Checkpointer("checkpoints", keep_last=2) as checkpointer:
        ...     start = checkpointer.resume(model=model, optimizer=optimizer)
        ...     for step in range(start + 1, 4):
        ...         save = checkpointer.save(step, model=model, optimizer=optimizer)
        >>> start, save.result().name
        (0, 'dcp-3')
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Root,
        *,
        group: Any = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Callable[[Checkpoint], bool] | None = None,
        keep_tagged: Mapping[str, int] | None = None,
        on_failure: OnFailure = "terminate",
        staging_limit_bytes: int | None = None,
        checksum: str | None = "crc64",
        timeout: float | None = None,
        on_published: Sequence[Callable[[Path], Any]] = (),
        on_event: Callable[[str, str, int], Any] | None = None,
    ) -> None:
        # A notebook that runs a cell again opens the root that the cell opened before.
        for opened in list(open_sessions):
            if opened.was_dropped:
                opened.close()
        self._session = open_session(
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
            staging_limit_bytes=staging_limit_bytes,
            checksum=checksum,
            on_published=on_published,
            on_event=on_event,
        )
        # A checkpointer that is dropped without `close` has its saves finished all the same.
        weakref.finalize(self, self._session.drop).atexit = False
        super().__init__(self._session.readonly.reader)
        self.extra: Mapping[str, Any] = {}
        # How many times `save` was called, in this run and those that it resumes.
        self._saves = 0

    def __repr__(self) -> str:
        session = self._session
        steps = {kind: queue.steps_under_way() for kind, queue in session.queues.items()}
        saving = "".join(f", saving {name_of(kind, step)}" for kind in steps for step in steps[kind])
        state = "" if session.closed_by is None else ", closed"
        return f"<Checkpointer {self.path}: rank {session.voter.rank} of {session.world_size}{saving}{state}>"

    def _raise_pending(self) -> None:
        self._session.raise_pending()

    # ---- A training loop ----

    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        rng: bool = True,
        hf: bool | int = False,
        config: Any = None,
        tokenizer: Any = None,
        staging: Staging = "eager",
        tag: str | None = None,
        overwrite: bool = False,
        blocking: bool = False,
    ) -> Save:
        """Collective: save everything that `resume` needs as a DCP checkpoint of `step`; returns when it is staged.

        Each argument takes one object, or a dict of names to several. Each rank saves its own random states, and its
        own states of `scheduler`, `loader` and `scaler`.

        Args:
            step: a whole number of at least 0, above every published step; `resume` returns it.
            model: an `nn.Module`, also one that is sharded or wrapped.
            optimizer: a `torch.optim.Optimizer` of parameters of `model`.
            scheduler: object with `state_dict` and `load_state_dict`, such as a learning-rate scheduler.
            loader: likewise, such as `td.loader`, `td.DispatchLoader` or torchdata's `StatefulDataLoader`.
            scaler: likewise, such as `torch.amp.GradScaler`.
            extra: values of the run (epoch, consumed tokens), the same on all ranks; JSON.
            rng: save the states of the random generators of Python, numpy and torch.
            hf: also export the model, as `save_hf` does: True, or n for every n-th save of the run.
            config: of the export, as `save_hf` takes it.
            tokenizer: of the export.
            staging: as `save_hf` takes it.
            tag: as `save_hf` takes it.
            overwrite: as `save_hf` takes it.
            blocking: as `save_hf` takes it.

        Returns:
            A future of the published path; its `export` is that of the export.

        Raises:
            Exception: as `save_hf`.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> model = torch.nn.Linear(2, 2)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> with td.Checkpointer("training") as checkpointer:
            ...     save = checkpointer.save(100, model=model, optimizer=optimizer, extra={"epoch": 1})
            >>> save.result().name
            'dcp-100'
        """
        save = save_training(
            self._session,
            step,
            TrainingArguments(model, optimizer, scheduler, loader, scaler),
            saves=self._saves + 1,
            extra=extra,
            rng=rng,
            hf=hf,
            staging=staging,
            export={"config": config, "tokenizer": tokenizer},
            job={"tag": tag, "overwrite": overwrite, "blocking": blocking},
        )
        self._saves += 1
        return save

    def resume(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
    ) -> int:
        """Collective: load what `save` saved, on any number of ranks, and set newer checkpoints aside.

        Give the objects that were given to `save`. On another number of ranks, each rank seeds its random generators
        anew, and takes the states of the first rank's scheduler, scaler and loader. A `loader` whose
        `resumes_on_any_ranks` is not True is then refused.

        Args:
            model: as `save` takes it.
            optimizer: as `save` takes it.
            scheduler: as `save` takes it.
            loader: as `save` takes it.
            scaler: as `save` takes it.
            step: the checkpoint, the same on all ranks. None takes the newest whole one, as `load_dcp` does.
            strict: refuse a checkpoint that lacks something, or holds something that was not given. With False that is
                left out, with a warning in the log.
            verify: read all bytes first, as `load_dcp` does.

        Returns:
            The step of the checkpoint; 0 if there is none. `checkpointer.extra` is its `extra`.

        Raises:
            StateMismatchError: the checkpoint does not fit; on all ranks, as all errors here. Nothing is loaded.
            InvalidTypeError: an object is of another kind.
            NotFoundError: there is no checkpoint of `step`.
            CorruptCheckpointError: the checkpoint, or every checkpoint, is damaged.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> model = torch.nn.Linear(2, 2)
            >>> with td.Checkpointer("resumed") as checkpointer:
            ...     save = checkpointer.save(7, model=model, extra={"epoch": 1})
            ...     checkpointer.resume(model=model), checkpointer.extra
            (7, {'epoch': 1})
        """
        given = TrainingArguments(model, optimizer, scheduler, loader, scaler)
        resumption = Resumption(given, strict=strict)
        loaded = self._load_if_any(
            resumption.target, step, verify=verify, trusted=(), call="resume", check=resumption.check
        )
        if loaded is not None:
            resumption.apply(self._session)
        self.extra, self._saves = resumption.extra, resumption.saves
        self.discard_after(resumption.step)
        return resumption.step

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
            model_or_tensors: an `nn.Module`; a mapping of names to tensors or DTensors; or a mapping of prefixes to
                modules, for composed models. Of a model with PEFT adapters, only the adapters are saved.
            config: object with `save_pretrained`; by default the model's own. None for a model that holds adapters.
            tokenizer: tokenizer or processor, with `save_pretrained`.
            dtype: convert floating-point tensors to this torch dtype.
            shard_bytes: largest size of a file in bytes, unless one tensor is larger or the file is an adapter's.
            source_dir: copy everything but the weights from this folder, which must not be the root. Files of the
                model, `config` or `tokenizer` take precedence.
            to_hf: converts names and tensors, for models whose training layout differs: takes a name and its tensor,
                returns pairs of them.
            staging: "eager" copies before the call returns. "lazy" copies during the next forward and backward;
                `optimizer.step()` waits until the copy is done. Any other change of the tensors before that fails the
                save. Writes through `.data` are not noticed: they do not change torch's version counter.
            optimizer: the optimizer, or a list of them, whose step waits for a lazy copy.
            tag: a name for retention ("snapshot").
            overwrite: replace a published checkpoint of this step. The save waits in the background for those who
                read it, up to half of `timeout`; then it fails with `CheckpointInUseError`.
            blocking: return when the checkpoint is published.

        Returns:
            A future of the published path.

        Raises:
            InvalidInputError: an argument or a tensor cannot be used, or what several ranks hold is not the same on all
                of them; on all ranks, as all errors here.
            InvalidTypeError: likewise; also for a model that mixes kinds of adapters.
            StepExistsError: the step is published.
            StepOrderError: the step is below the newest.
            StorageError: the disk has too little room.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> model = torch.nn.Linear(2, 2)
            >>> with td.Checkpointer("exports") as checkpointer:
            ...     save = checkpointer.save_hf(500, model)
            >>> sorted(path.name for path in save.result().iterdir())
            ['model.safetensors', 'tundish.json']
        """
        session = self._session
        with session.collective("save_hf"):
            job = SaveJob(
                kind="hf",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                call="save_hf",
                make_plan=session.export_plan(
                    model_or_tensors,
                    config=config,
                    tokenizer=tokenizer,
                    dtype=dtype,
                    shard_bytes=shard_bytes,
                    source_dir=source_dir,
                    to_hf=to_hf,
                    staging=staging,
                    optimizer=optimizer,
                ),
            )
            return start_save(session, job)

    def save_dcp(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Any = None,
        trusted: Sequence[type] = (),
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
            state_dict: nested, of tensors, DTensors and other objects, as `torch.distributed.checkpoint` takes it. One
                rank saves what several hold: objects and tensors of up to 64 KiB have to be the same on all of them.
            extra: values of the run (step, epoch, consumed tokens), the same on all ranks; JSON.
            rank_extra: state of this rank alone, such as its random generators.
            trusted: types of objects in the state dict beside those that `load_dcp` reads by itself. Loading needs
                them, too.
            staging: as for `save_hf`.
            optimizer: as for `save_hf`.
            tag: as for `save_hf`.
            overwrite: as for `save_hf`.
            blocking: as for `save_hf`.

        Returns:
            A future of the published path.

        Raises:
            Exception: as `save_hf`.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("states") as checkpointer:
            ...     save = checkpointer.save_dcp(500, {"w": torch.ones(2)}, extra={"epoch": 1})
            >>> save.result().name
            'dcp-500'
        """
        session = self._session
        with session.collective("save_dcp"):
            job = SaveJob(
                kind="dcp",
                step=plain_step(step),
                tag=tag,
                overwrite=overwrite,
                blocking=blocking,
                call="save_dcp",
                make_plan=functools.partial(
                    DcpSave,
                    session.planner,
                    state_dict,
                    extra=extra,
                    rank_extra=rank_extra,
                    trusted=trusted,
                    staging=staging,
                    optimizer=optimizer,
                ),
                extra=extra,
            )
            return start_save(session, job)

    # ---- Keeping, going back and loading ----

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step` whatever retention says, as long as this checkpointer is open. Not collective.

        Any rank may protect any step. The first rank removes old checkpoints, so protection by other ranks takes effect
        at the next save.

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
        self._session.check_open()
        self._raise_pending()
        self._session.protect(check_step(plain_step(step)))

    def discard_after(self, step: int) -> None:
        """Collective: set all checkpoints above `step` aside, after a rollback to it. Nothing is deleted.

        Saving below the newest step is refused; this makes `step` the newest. Call it on all ranks, whether or not
        there is anything above.

        Args:
            step: a whole number of at least 0. Checkpoints above it are renamed to `discarded-<name>`.

        Raises:
            InvalidInputError: a save is under way; on all ranks, as all errors here.
            PeerFailedError: another rank failed, or passed another step.
            CheckpointInUseError: a process reads a checkpoint above `step`.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("discarded") as checkpointer:
            ...     for step in (1, 2):
            ...         _ = checkpointer.save_hf(step, {"w": torch.ones(2)}, blocking=True)
            ...     checkpointer.discard_after(1)
            ...     [checkpoint.step for checkpoint in checkpointer.list()]
            [1]
        """
        session, step = self._session, plain_step(step)
        with session.collective("discard_after"):
            # All ranks agree before anything is set aside.
            with session.called(f"discard_after({step})", f"discard_after of step {step}"):
                session.failure.raise_pending()
                check_step(step)
                if any(queue.steps_under_way() for queue in session.queues.values()):
                    raise InvalidInputError("a save is under way: wait() for it before discarding steps")
            with session.agreed(f"setting aside the steps above {step}"):
                if session.writable is not None:
                    session.writable.discard_after(step)

    def load_dcp(
        self,
        state_dict: dict[str, Any],
        step: int | None = None,
        *,
        verify: bool = True,
        trusted: Sequence[type] = (),
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
            trusted: types of objects in the state dict that are read too. Reading an object calls its type, so anybody
                who can write to the root could have this process call it. Without it these are read: numbers, text,
                bytes, builtin containers, `collections`' containers, numpy arrays and random states, tensors,
                `Namespace`, `Path`, `datetime`, and members of enumerations whose module is imported.

        Returns:
            `extra`, and a mapping of each rank that saved to its `rank_extra`. The mapping reads what this rank has
            not read yet when it is looked up. `dict(rank_extras)` reads everything now.

        Raises:
            NotFoundError: there is no checkpoint; on all ranks, as all errors here.
            CorruptCheckpointError: the checkpoint, or every checkpoint, is damaged.
            CheckpointInUseError: another process locks readers out of it.
            StateMismatchError: `state_dict` does not fit, or has two names for one tensor whose saved values differ.
            InvalidTypeError: an object is of a type that is not read.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> state = {"w": torch.zeros(2)}
            >>> with td.Checkpointer("loaded") as checkpointer:
            ...     _ = checkpointer.save_dcp(1, {"w": torch.ones(2)}, extra={"epoch": 3})
            ...     extra, rank_extras = checkpointer.load_dcp(state)
            >>> state["w"], extra
            (tensor([1., 1.]), {'epoch': 3})
        """
        return self._load(state_dict, step, verify=verify, trusted=trusted)[1]

    def _load(
        self,
        target: Target,
        step: int | None,
        *,
        verify: bool = True,
        trusted: Sequence[type] = (),
    ) -> tuple[int, Loaded]:
        """As `load_dcp`; returns the step that was loaded too."""
        loaded = self._load_if_any(target, step, verify=verify, trusted=trusted, call="load_dcp")
        if loaded is None:
            # On all ranks: a first start is not the failure of one rank.
            raise no_checkpoint(self.path)
        return loaded

    def _load_if_any(
        self,
        target: Target,
        step: int | None,
        *,
        verify: bool,
        trusted: Sequence[type],
        call: str,
        check: Callable[[], None] | None = None,
    ) -> tuple[int, Loaded] | None:
        """As `_load`, for `call`; None if there is no checkpoint. `check`: raises where an argument cannot be used."""
        session, step = self._session, plain_step(step)
        with session.collective(call):
            with session.called(f"{call}()", call):
                session.failure.raise_pending()
                if check is not None:
                    check()
            # A save of this checkpointer is visible to its load.
            session.queues["dcp"].wait(None)
            with session.agreed(f"{call}: waiting for saves"):
                session.failure.raise_pending()
            return load_from_root(
                target,
                session.readonly,
                step,
                verify=verify,
                trusted=trusted,
                voter=session.voter,
            )

    # ---- Waiting and closing ----

    def wait(self, timeout: float | None = None) -> None:
        """Block until no save is under way. Not collective.

        Args:
            timeout: seconds to wait; None waits without end.

        Raises:
            TimedOutError: a save is not over in time.
            InvalidTypeError: `timeout` is no number.
            Exception: with `on_failure="raise"`, the error of a save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("awaited") as checkpointer:
            ...     save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            ...     checkpointer.wait()
            ...     save.done()
            True
        """
        self._session.refuse_in_callback("wait")
        check_wait(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        for queue in self._session.queues.values():
            if not queue.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimedOutError(
                    f"saves of steps {queue.steps_under_way()} were not over within {timeout} s"
                )
        self._session.failure.raise_pending()

    def stats(self) -> dict[str, int | None]:
        """Report the staging memory and the saves under way. Not collective.

        Returns:
            `"staging_in_use_bytes"`, `"staging_peak_bytes"` and `"staging_limit_bytes"` (None: no limit): host memory
            that staging takes; `"hf_saves_under_way"` and `"dcp_saves_under_way"`: numbers of saves.

        Raises:
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import tundish as td
            >>> with td.Checkpointer("counted") as checkpointer:
            ...     checkpointer.stats()["hf_saves_under_way"]
            0
        """
        self._raise_pending()
        stats = self._session.budget.stats()
        for kind, queue in self._session.queues.items():
            stats[f"{kind}_saves_under_way"] = len(queue.steps_under_way())
        return stats

    def close(self) -> None:
        """Finish the saves under way and release the root. The second call does nothing.

        If Ctrl-C ends the wait, the saves go on and the root is released when they are over.

        Raises:
            InvalidInputError: it is called in a callback of a save.
            Exception: with `on_failure="raise"`, the error of a save, after everything is released.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> checkpointer = td.Checkpointer("closed")
            >>> save = checkpointer.save_hf(1, {"w": torch.ones(2)})
            >>> checkpointer.close()
            >>> save.done()
            True
        """
        session = self._session
        if os.getpid() != session.process:
            return
        session.refuse_in_callback("close")
        session.closed_by = session.closed_by or ""
        try:
            session.close()
        except BaseException:
            session.close_later()
            raise
        session.failure.raise_pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            # The error that ends the block says more than the one of closing.
            if error is None:
                raise
            _logger.exception("a save failed while another error ended the block")
