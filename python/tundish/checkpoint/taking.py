"""How a save is taken from the caller's thread: refused or reserved, voted on, staged, handed to its lane.

What always holds: a save is refused on all ranks, before anything is staged, or taken by all; what was taken for a
save that comes to nothing is given back; a save that is taken comes to its lane on every rank, whatever its staging
fails with.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tundish.checkpoint.finalizing import Job
from tundish.checkpoint.lane import Lane
from tundish.checkpoint.opening import Opened
from tundish.checkpoint.reading import Kind, check_step
from tundish.checkpoint.saves import HasNews, News, Plan, Save, Staged, WritesThrough
from tundish.errors import InvalidInputError
from tundish.waiting import wait_for

__all__ = ["Request", "take"]

_logger = logging.getLogger("tundish.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A save as it was asked for. `make_plan`: looks at the tensors, and refuses what cannot be saved of them."""

    kind: Kind
    step: int
    tag: str | None
    overwrite: bool
    blocking: bool
    make_plan: Callable[[], Plan]
    extra: Mapping[str, Any] | None = None

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.kind} of step {self.step}"


@dataclass(frozen=True, kw_only=True)
class _Reserved:
    """A plan with what it takes. `held_bytes`: of the budget; `through`: as it writes while the caller waits."""

    plan: Plan
    held_bytes: int
    through: WritesThrough | None


def take(opened: Opened, request: Request) -> Save:
    """Collective: take a save; returns when it is staged, or published where it blocks.

    Raises, on all ranks, what is wrong with it, or what an earlier one failed with.
    """
    lane = opened.lanes[request.kind]
    with contextlib.ExitStack() as undo:
        reserved, job, error, same, news = None, None, None, request.what, News.NONE
        try:
            lane.wait_for_turn()
            reserved = _reserve(opened, request, undo)
            job = _job_of(opened, request, reserved)
            same += f": tag {request.tag}, overwrite {bool(request.overwrite)}, {reserved.plan.fingerprint}"
            news = reserved.plan.news if isinstance(reserved.plan, HasNews) else News.NONE
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            # Memory that was being reserved, which else stays until somebody collects the error's cycle.
            traceback.clear_frames(caught.__traceback__)
            error = caught
        greatest, interruption = _vote(opened, request, same, news, error)
        undo.pop_all()
    if reserved is None or job is None:
        raise RuntimeError(f"{request.what} was taken without a plan")
    try:
        if isinstance(reserved.plan, HasNews):
            reserved.plan.react_to(greatest, opened.voter.meeting)
        if interruption is not None:
            # The other ranks took the save: it fails as any does whose staging fails on one rank.
            raise interruption
        job.staged, job.undo = _stage(opened, lane, job, reserved), None
    except BaseException as caught:
        # The other ranks are told in the lane's next vote.
        job.staged, job.is_answered = caught, True
        # Here, so that nobody waits for it; where Ctrl-C interrupts that, once more on the lane's thread.
        reserved.plan.release()
        # Views of what was staged, which else stays until somebody collects the error's cycle.
        traceback.clear_frames(caught.__traceback__)
        raise
    finally:
        try:
            lane.submit(job)
        except BaseException:
            # Though Ctrl-C interrupted it: the other ranks go on with the save.
            lane.submit(job)
            raise
    if request.blocking:
        try:
            wait_for(lambda pause: bool(concurrent.futures.wait([job.save], pause).done))
            job.save.result()
        except BaseException:
            if not job.save.done():
                # Ctrl-C ended the wait, so nobody hears of a failure from here.
                job.is_answered = False
            raise
    return job.save


def _vote(
    opened: Opened, request: Request, same: str, news: News, error: BaseException | None
) -> tuple[News, BaseException | None]:
    """Collective: take the save, on all ranks or none; the greatest news of any.

    Where Ctrl-C came when all had taken it, that is given, too: the others go on.
    """

    def vote(error: BaseException | None, note: bool) -> tuple[bool, BaseException | None]:
        try:
            return opened.voter.vote(
                error, what=request.what, same=same, note=note, timeout=opened.timeout
            ), None
        except BaseException as caught:
            noted = opened.voter.note_in_spite_of_interrupt()
            if noted is None:
                raise
            return noted, caught

    has_any, interruption = vote(error, news > News.NONE)
    if not has_any:
        return News.NONE, interruption
    is_broken, interruption = vote(interruption, news is News.BROKEN_GROUP)
    return News.BROKEN_GROUP if is_broken else News.OTHER_FORM, interruption


def _reserve(opened: Opened, request: Request, undo: contextlib.ExitStack) -> _Reserved:
    """Refuse what can be refused, else take what the save needs; `undo` gives it back."""
    opened.failure.raise_pending()
    check_step(request.step)
    _check_tag(request.tag)
    if request.step in opened.lanes[request.kind].steps_under_way():
        raise InvalidInputError(f"{request.what}: a save of this step is under way already")
    opened.lanes[request.kind].start()
    plan = request.make_plan()
    undo.callback(plan.release)
    if opened.owner is not None:
        opened.owner.begin(request.kind, request.step, plan.written_bytes, overwrite=request.overwrite)
        undo.callback(opened.owner.abandon, request.kind, request.step)
    limit = opened.budget.limit
    is_larger = limit is not None and plan.most_staged_bytes > limit
    through = plan if is_larger and isinstance(plan, WritesThrough) else None
    held = plan.staged_bytes if through is None or limit is None else through.through_bytes(limit)
    opened.budget.take(held, request.what)
    undo.callback(opened.budget.give_back, held)
    if through is None:
        plan.reserve()
    return _Reserved(plan=plan, held_bytes=held, through=through)


def _job_of(opened: Opened, request: Request, reserved: _Reserved) -> Job:
    plan, name = reserved.plan, f"{request.kind}-{request.step}"
    own = sum(file.size for file in plan.files if file.rank == opened.index)
    return Job(
        save=Save(request.kind, request.step, own if plan.files else plan.staged_bytes),
        folder=opened.path / f".{name}.incomplete",
        target=opened.path / name,
        tag=request.tag,
        overwrite=request.overwrite,
        extra=copy.deepcopy(dict(request.extra or {})),
        is_answered=request.blocking,
        undo=plan.release,
        release=functools.partial(opened.budget.give_back, reserved.held_bytes),
    )


def _stage(opened: Opened, lane: Lane, job: Job, reserved: _Reserved) -> Staged:
    limit = opened.budget.limit
    if reserved.through is None or limit is None:
        return reserved.plan.stage()
    _logger.warning("%s writes through: it is larger than staging_limit_bytes=%d", job.what, limit)
    lane.wait(None)
    return reserved.through.write_through(job.folder, lane.options(job.save), limit)


def _check_tag(tag: object) -> None:
    if tag is not None and (not isinstance(tag, str) or not tag or not tag.isprintable()):
        raise InvalidInputError(f"tag is {tag!r}: give a word of printable characters, or None")
