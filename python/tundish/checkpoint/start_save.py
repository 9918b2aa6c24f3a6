"""Takes a save from the caller's thread: plans it, votes on it, stages it and hands it to the save queue.

Invariants:
    - A save is refused on all ranks, before tensors are exchanged or files written, or taken by all ranks.
    - A rank comes to the first vote at once: it waits for earlier saves after that. So the vote can tell which ranks do
      not make the call.
    - Once it is taken, it reaches the save queue of every rank, even if staging fails.
"""

from __future__ import annotations

import copy
import json
import logging
import time
import traceback
from collections.abc import Mapping

from tundish.checkpoint.root import Checkpoint, check_step
from tundish.checkpoint.save_job import Save, SaveJob, SaveState
from tundish.checkpoint.session import Session
from tundish.checkpoint.staging import Staged
from tundish.checkpoint.write_plan import SavePlan
from tundish.distributed import same_arguments
from tundish.errors import CallbackError, InvalidInputError, InvalidTypeError

_logger = logging.getLogger("tundish.checkpoint")


def start_save(session: Session, job: SaveJob) -> Save:
    """Collective: take a save; returns when it is staged, or published if the job is blocking.

    Raises, on all ranks, the error of any rank, or of an earlier save.
    """
    queue = session.queues[job.kind]
    try:
        staged = _agree(session, job)
        job.future = Save(job.kind, job.step, staged.file_bytes, is_queue_thread=queue.is_own_thread)
        job.number = session.voter.last_vote.number
        job.extra = copy.deepcopy(dict(job.extra or {}))
        job.caller_raises = job.blocking
        job.state = SaveState.TAKEN
    except BaseException:
        job.release()
        _abort(session, job)
        raise
    try:
        try:
            staged.copy()
            job.staged = job.future._staged_save = staged
        except BaseException as caught:
            # The next vote in the background tells the other ranks.
            job.staged, job.caller_raises = caught, True
            job.release()
            # The frames hold views of staged tensors.
            traceback.clear_frames(caught.__traceback__)
            raise
        finally:
            job.held_seconds = time.monotonic() - job.started
            queue.submit(job)
        if job.blocking:
            job.future.result()
    except BaseException as caught:
        if job.blocking and caught is not job.staged:
            _act_on_unraised(session, job, caught)
        raise
    return job.future


def _act_on_unraised(session: Session, job: SaveJob, raised: BaseException) -> None:
    """Have the failure policy act on a failure that the caller does not hear of, as Ctrl-C ended the wait for it."""
    if not job.save.done():
        job.caller_raises = False
        return
    error = job.save.exception()
    if error is not None and error is not raised and not isinstance(error, CallbackError):
        session.failure.act(error, job.what)


def _agree(session: Session, job: SaveJob) -> Staged:
    """Collective: refuse the save if it can be refused, else reserve its resources."""
    same, needs_ranks = same_arguments(call=job.what), False
    replicas: Mapping[str, str] = {}
    error: BaseException | None = None
    staged: Staged | None = None
    try:
        plan = _plan(session, job)
        same = same_arguments(
            call=job.what, tag=repr(job.tag), overwrite=job.overwrite, content=plan.fingerprint
        )
        needs_ranks = plan.needs_ranks
        if session.world_size > 1:
            replicas = plan.replicas
        if not needs_ranks and session.queues[job.kind].has_turn():
            staged = _reserve(session, job, plan, may_wait=False)
    except Exception as caught:  # noqa: BLE001 (the vote raises it again)
        # The frames hold memory that was being reserved.
        traceback.clear_frames(caught.__traceback__)
        error = caught
    given = json.dumps([needs_ranks, staged is None, dict(replicas)])
    with session.absent_ranks_named(f"{job.call}(step={job.step})"):
        found = session.voter.combine(
            given, _compared, error, what=job.what, same=same, timeout=session.call_timeout
        )
    any_needs, any_waits, do_replicas_differ = json.loads(found)
    vote = session.voter.last_vote
    if not (any_needs or any_waits or do_replicas_differ):
        plan.agree(vote, any_needs=False, do_replicas_differ=False)
    else:
        try:
            has_changed = plan.agree(vote, any_needs=any_needs, do_replicas_differ=do_replicas_differ)
            if has_changed or staged is None:
                session.queues[job.kind].wait_for_turn()
                # Of a save that was waited for.
                session.failure.raise_pending()
                staged = _reserve(session, job, plan, may_wait=True)
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            traceback.clear_frames(caught.__traceback__)
            error = caught
        session.voter.vote(error, what=f"{job.what}: reserving")
    if staged is None:
        raise RuntimeError(f"{job.what} was taken without its memory")
    return staged


def _compared(given: list[str]) -> str:
    """Whether any rank needs preparation, any has to wait, and any two have different hashes under one name."""
    known: dict[str, str] = {}
    any_needs = any_waits = do_replicas_differ = False
    for needs, waits, replicas in map(json.loads, given):
        any_needs, any_waits = any_needs or needs, any_waits or waits
        do_replicas_differ = do_replicas_differ or any(
            known.setdefault(name, digest) != digest for name, digest in replicas.items()
        )
    return json.dumps([any_needs, any_waits, do_replicas_differ])


def _plan(session: Session, job: SaveJob) -> SavePlan:
    """Check the arguments and look at the tensors."""
    session.failure.raise_pending()
    check_step(job.step)
    tag = job.tag
    if tag is not None and (not isinstance(tag, str) or not tag or not tag.isprintable()):
        raise InvalidInputError(f"tag is {tag!r}: give a word of printable characters, or None")
    _check_flag("overwrite", job.overwrite)
    _check_flag("blocking", job.blocking)
    queue = session.queues[job.kind]
    if job.step in queue.steps_under_way():
        raise InvalidInputError(f"{job.what}: a save of this step is under way already")
    queue.start()
    job.plan = job.make_plan()
    return job.plan


def _reserve(session: Session, job: SaveJob, plan: SavePlan, *, may_wait: bool) -> Staged | None:
    """Begin the checkpoint on the first rank, and take this rank's memory.

    Returns None if that has to wait for earlier saves, unless it `may_wait`.
    """
    job.memory.close()
    write_plan = plan.write_plan()
    _abort(session, job)
    # First, since a refused save must not wait for memory.
    if session.writable is not None:
        # Noted before it begins, since Ctrl-C may come. Aborting a step that was not begun does nothing.
        job.wanted = Checkpoint(
            kind=job.kind,
            step=job.step,
            path=session.root.path_of(job.name),
            tag=job.tag,
            size=write_plan.checkpoint_bytes,
            # Each rank writes one, as a rule.
            files=session.world_size,
        )
        needs_room = session.writable.begin(
            job.wanted,
            overwrite=job.overwrite,
            wait_for_saves=(lambda: _wait_for_saves(session, job)) if may_wait else None,
        )
        if needs_room is None:
            return None
        job.needs_room = needs_room
    size = write_plan.staged_bytes
    if not session.budget.take(size, job.what, may_wait=may_wait):
        return None
    job.memory.callback(session.budget.give_back, size)
    staged = Staged(write_plan)
    job.memory.callback(staged.release)
    return staged


def _abort(session: Session, job: SaveJob) -> None:
    if job.wanted is not None and session.writable is not None:
        session.writable.abort(job.wanted)
    job.wanted = None


def _wait_for_saves(session: Session, job: SaveJob) -> None:
    """Wait until no save is under way: retention then makes room."""
    steps = sorted({step for queue in session.queues.values() for step in queue.steps_under_way()})
    if steps:
        _logger.warning(
            "%s waits for the saves of steps %s: the disk has too little room before they are over",
            job.what,
            steps,
        )
    # The other ranks wait in the vote for `timeout`; this must end well before.
    until = time.monotonic() + session.voter.timeout / 2
    for queue in session.queues.values():
        queue.wait(max(0.0, until - time.monotonic()))


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")
