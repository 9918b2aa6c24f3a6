"""How a save is taken from the caller's thread: refused or reserved, voted on, staged, handed to its lane.

What always holds: a save is refused on all ranks, before any tensor is exchanged or anything is written, or taken by
all; what was taken and copied for a save that comes to nothing is given back; a save that is taken comes to its lane
on every rank, whatever its staging fails with.
"""

from __future__ import annotations

import copy
import errno
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tundish.checkpoint.open_root import OpenRoot
from tundish.checkpoint.publish.finalizer import Job
from tundish.checkpoint.publish.read_only_root import Kind, check_step
from tundish.checkpoint.publish.save_queue import SaveQueue
from tundish.checkpoint.save import News, Plan, Save, Staged
from tundish.errors import InvalidInputError, InvalidTypeError, StorageError

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


class _Reserved:
    """What a save has taken so far.

    `through_limit`: the budget, where the plan is larger and is written meanwhile. `lacks_room`: whether what is old
    has to go before anything is written; on the first rank.
    """

    def __init__(self, opened: OpenRoot, request: Request) -> None:
        self._opened = opened
        self._request = request
        self.claim = opened.budget.claim()
        self.plan: Plan | None = None
        self.through_limit: int | None = None
        self.lacks_room = False

    def take(self) -> Plan:
        """Refuse what can be refused, else take what the save needs."""
        opened, request = self._opened, self._request
        opened.failure.raise_pending()
        check_step(request.step)
        _check_tag(request.tag)
        _check_flag("overwrite", request.overwrite)
        _check_flag("blocking", request.blocking)
        if request.step in opened.lanes[request.kind].steps_under_way():
            raise InvalidInputError(f"{request.what}: a save of this step is under way already")
        opened.lanes[request.kind].start()
        self.plan = plan = request.make_plan()
        # Which begins to copy, so that all else happens meanwhile; but a save that is refused waits for no memory.
        has_memory = self.take_memory(plan, waits=False)
        if opened.owner is not None:
            self.lacks_room = opened.owner.begin(
                request.kind,
                request.step,
                plan.written_bytes,
                overwrite=request.overwrite,
                wait_for_saves=self._wait_for_saves,
            )
        self._refuse_without_room()
        if not has_memory:
            self.take_memory(plan)
        return plan

    def take_memory(self, plan: Plan, *, waits: bool = True) -> bool:
        """Take the memory that the save needs, in the place of what it has; local to this rank.

        Returns whether it did: always, unless it is not to wait for the saves under way.
        """
        self.claim.give_back()
        limit = self._opened.budget.limit
        self.through_limit = limit if limit is not None and plan.most_staged_bytes > limit else None
        self._refuse_without_room()
        held = plan.staged_bytes if self.through_limit is None else plan.through_bytes(self.through_limit)
        # If it waits for the saves under way, then here and not where other ranks have begun to exchange tensors.
        if not self.claim.take(held, self._request.what, waits=waits):
            return False
        if self.through_limit is None:
            plan.reserve()
        return True

    def _refuse_without_room(self) -> None:
        """Refuse what is written while the caller waits, where something old has to go first."""
        if self.through_limit is not None and self.lacks_room:
            raise StorageError(
                errno.ENOSPC,
                f"too little room for {self._request.what} before old ones go, which are removed in the background "
                "alone: remove them with `tundish checkpoint prune`, or give a staging_limit_bytes that it fits in",
                str(self._opened.path),
            )

    def _wait_for_saves(self) -> None:
        """Block until no save is under way: what retention does not keep goes after each, and makes room."""
        opened = self._opened
        steps = sorted({step for lane in opened.lanes.values() for step in lane.steps_under_way()})
        if steps:
            _logger.warning(
                "%s waits for the saves of steps %s: the disk has too little room before they are over",
                self._request.what,
                steps,
            )
        # The other ranks wait for this rank's vote no longer than the whole of it.
        until = time.monotonic() + opened.timeout / 2
        for lane in opened.lanes.values():
            lane.wait(max(0.0, until - time.monotonic()))

    def give_back(self) -> None:
        """Give all of it back. May be called again, where Ctrl-C interrupted it."""
        try:
            self.claim.give_back()
            if self.plan is not None:
                self.plan.release()
        finally:
            # Of a save under way there is none to be taken with this number.
            if self.plan is not None and self._opened.owner is not None:
                self._opened.owner.abandon(self._request.kind, self._request.step)


class _Ballot:
    """The vote by which a save is taken, on all ranks or none; two where a rank has news, which tell the greatest.

    Ctrl-C may come when the other ranks have taken it, and they go on: then it is taken here too, and fails as any save
    does whose staging fails on one rank. It may come before this rank's vote: of that the call (`calls`) tells them.

    `same`, `news`, `error`: what this rank brings; once it `is_taken`, `error` is what interrupted it. `number`: of the
    first vote. `greatest`: of the news of all ranks.
    """

    def __init__(self, opened: OpenRoot, request: Request) -> None:
        self._voter = opened.voter
        self._timeout = opened.timeout
        self._what = self.same = request.what
        self.news = self.greatest = News.NONE
        self.error: BaseException | None = None
        self.is_taken = False
        self.number = opened.voter.last_vote.number

    def hold(self) -> None:
        """Collective: vote. Raises, on all ranks, where the save is not taken."""
        for news in (News.OTHER_FORM, News.NO_GROUP):
            before = self._voter.last_vote.number
            try:
                is_told = self._voter.vote(
                    self.error, what=self._what, same=self.same, flag=self.news >= news, timeout=self._timeout
                )
            except BaseException as caught:  # noqa: BLE001 (raised where the others did not take the save)
                is_told, self.error = self._told_in_spite_of(caught, before), caught
            # Up to the end there is no call, and so no signal comes, before it is noted what the vote came to.
            if is_told:
                self.greatest = news
            if not is_told or news is News.NO_GROUP:
                self.is_taken = True
                return

    def _told_in_spite_of(self, caught: BaseException, before: int) -> bool:
        """What all ranks were told in the vote in which this one was interrupted; else it raises what `caught` is."""
        told = self._voter.note_in_spite_of_interrupt()
        if told is None or self._voter.last_vote.number == before:
            raise caught
        return told


def take(opened: OpenRoot, request: Request, *, leave: Callable[[], None]) -> Save:
    """Collective: take a save; returns when it is staged, or published where it blocks.

    `leave`: called when the other ranks need this one no more in the call.

    Raises, on all ranks, what is wrong with it, or what an earlier one failed with.
    """
    lane = opened.lanes[request.kind]
    reserved, ballot = _Reserved(opened, request), _Ballot(opened, request)
    try:
        try:
            lane.wait_for_turn()
            plan = reserved.take()
            job = _job_of(opened, request, plan, reserved, ballot.number)
            ballot.same += f": tag {request.tag}, overwrite {request.overwrite}, {plan.fingerprint}"
            ballot.news = plan.news
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            # Memory that was being reserved, which else stays until somebody collects the error's cycle.
            traceback.clear_frames(caught.__traceback__)
            ballot.error = caught
        ballot.hold()
    except BaseException as caught:
        if not ballot.is_taken:
            try:
                reserved.give_back()
            except BaseException:
                reserved.give_back()
                raise
            raise
        ballot.error = caught
    try:
        plan.react_to(ballot.greatest, opened.voter.last_vote)
        leave()
        if ballot.error is not None:
            # The other ranks took the save: it fails as any does whose staging fails on one rank.
            raise ballot.error
        job.staged, job.undo = _stage(lane, job, plan, reserved), None
        job.save.note_staging(job.staged)
    except BaseException as caught:
        # The other ranks are told in the lane's next vote.
        job.staged, job.is_answered = caught, True
        # Here, so that nobody waits for it; where Ctrl-C interrupts that, once more on the lane's thread.
        plan.release()
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
            job.save.result()
        except BaseException:
            if not job.save.done():
                # Ctrl-C ended the wait, so nobody hears of a failure from here.
                job.is_answered = False
            raise
    return job.save


def _job_of(opened: OpenRoot, request: Request, plan: Plan, reserved: _Reserved, number: int) -> Job:
    name = f"{request.kind}-{request.step}"
    is_own_thread = opened.lanes[request.kind].is_own_thread
    own = sum(file.size for file in plan.files if file.rank == opened.index)
    return Job(
        save=Save(
            request.kind,
            request.step,
            own if plan.files else plan.staged_bytes,
            is_own_thread=is_own_thread,
        ),
        number=number,
        folder=opened.path / f".{name}.incomplete",
        target=opened.path / name,
        tag=request.tag,
        overwrite=request.overwrite,
        extra=copy.deepcopy(dict(request.extra or {})),
        lacks_room=reserved.lacks_room,
        is_answered=request.blocking,
        undo=plan.release,
        release=reserved.claim.give_back,
    )


def _stage(lane: SaveQueue, job: Job, plan: Plan, reserved: _Reserved) -> Staged:
    if plan.compare():
        plan.release()
        reserved.take_memory(plan)
        job.save.note_total(plan.staged_bytes)
    limit = reserved.through_limit
    if limit is None:
        return plan.stage()
    _logger.warning("%s writes through: it is larger than staging_limit_bytes=%d", job.what, limit)
    lane.wait(None)
    return plan.write_through(job.folder, lane.options(job.save), limit)


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")


def _check_tag(tag: object) -> None:
    if tag is not None and (not isinstance(tag, str) or not tag or not tag.isprintable()):
        raise InvalidInputError(f"tag is {tag!r}: give a word of printable characters, or None")
