"""Takes a save from the caller's thread: plans it, votes on it, stages it and hands it to the save queue.

Invariants:
    - A save is refused on all ranks, before tensors are exchanged or files written, or taken by all ranks.
    - Once it is taken, it reaches the save queue of every rank, even if staging fails.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tundish.checkpoint.checkpointer_resources import CheckpointerResources
from tundish.checkpoint.publish.finalizer import QueuedSave
from tundish.checkpoint.publish.kinds_and_steps import Kind, check_step
from tundish.checkpoint.publish.writable_root import Begun
from tundish.checkpoint.save import Save
from tundish.checkpoint.staging import Staged
from tundish.checkpoint.write_plan import SavePlan
from tundish.distributed import same_arguments
from tundish.errors import CallbackError, InvalidInputError, InvalidTypeError

__all__ = ["SaveRequest", "start_save"]

_logger = logging.getLogger("tundish.checkpoint")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of a save. `make_plan` looks at the tensors and refuses what cannot be saved."""

    kind: Kind
    step: int
    tag: str | None
    overwrite: bool
    blocking: bool
    make_plan: Callable[[], SavePlan]
    extra: Mapping[str, Any] | None = None

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.kind} of step {self.step}"


def start_save(resources: CheckpointerResources, request: SaveRequest) -> Save:
    """Collective: take a save; returns when it is staged, or published if the request is blocking.

    Raises, on all ranks, the error of any rank, or of an earlier save.
    """
    queue = resources.queues[request.kind]
    queue.wait_for_turn()
    attempt = _Attempt(resources, request)
    try:
        staged = attempt.agree()
        queued = _queued_save(resources, request, staged, attempt)
    except BaseException:
        attempt.release()
        raise
    try:
        try:
            staged.copy()
            queued.staged = queued.save._staged_save = staged
        except BaseException as caught:
            # The finalizer's next vote tells the other ranks.
            queued.staged, queued.caller_raises = caught, True
            attempt.give_back()
            # The frames hold views of staged tensors.
            traceback.clear_frames(caught.__traceback__)
            raise
        finally:
            queue.submit(queued)
        if request.blocking:
            queued.save.result()
    except BaseException as caught:
        if request.blocking and caught is not queued.staged:
            _act_on_unraised(resources, queued, caught)
        raise
    return queued.save


def _act_on_unraised(resources: CheckpointerResources, queued: QueuedSave, raised: BaseException) -> None:
    """Have the failure policy act on a failure that the caller does not hear of, as Ctrl-C ended the wait for it."""
    if not queued.save.done():
        queued.caller_raises = False
        return
    error = queued.save.exception()
    if error is not None and error is not raised and not isinstance(error, CallbackError):
        resources.failure.act(error, queued.what)


def _queued_save(
    resources: CheckpointerResources, request: SaveRequest, staged: Staged, attempt: _Attempt
) -> QueuedSave:
    name = f"{request.kind}-{request.step}"
    is_queue_thread = resources.queues[request.kind].is_own_thread
    return QueuedSave(
        save=Save(request.kind, request.step, staged.file_bytes, is_queue_thread=is_queue_thread),
        number=resources.voter.last_vote.number,
        folder=resources.path / f".{name}.incomplete",
        target=resources.path / name,
        tag=request.tag,
        overwrite=request.overwrite,
        extra=copy.deepcopy(dict(request.extra or {})),
        begun=attempt.begun,
        needs_room=attempt.needs_room,
        caller_raises=request.blocking,
        release=attempt.give_back,
    )


class _Attempt:
    """A save until it is taken, with its plan, its memory and its folder in the root.

    Attributes:
        begun: the checkpoint that the first rank began; None on the others.
        needs_room: whether old checkpoints have to go before anything is written; known to the first rank.
    """

    def __init__(self, resources: CheckpointerResources, request: SaveRequest) -> None:
        self._resources = resources
        self._request = request
        # The part of the staging budget, and the memory.
        self._memory = contextlib.ExitStack()
        self._plan: SavePlan | None = None
        self.begun: Begun | None = None
        self.needs_room = False

    def agree(self) -> Staged:
        """Collective: refuse the save if it can be refused, else reserve its resources."""
        resources, request = self._resources, self._request
        same, flag = same_arguments(call=request.what), False
        replicas: Mapping[str, str] = {}
        error: BaseException | None = None
        staged: Staged | None = None
        try:
            plan = self._make_plan()
            same = same_arguments(
                call=request.what,
                tag=repr(request.tag),
                overwrite=request.overwrite,
                content=plan.fingerprint,
            )
            flag = plan.needs_ranks
            if resources.world_size > 1:
                replicas = plan.replicas
            if not flag:
                staged = self._reserve(plan)
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            # The frames hold memory that was being reserved.
            traceback.clear_frames(caught.__traceback__)
            error = caught
        given = json.dumps([flag, dict(replicas)])
        found = resources.voter.combine(given, _compared, error, what=request.what, same=same)
        any_needs, do_replicas_differ = json.loads(found)
        vote = resources.voter.last_vote
        if not any_needs and not do_replicas_differ:
            plan.agree(vote, any_needs=False, do_replicas_differ=False)
        else:
            try:
                has_changed = plan.agree(vote, any_needs=any_needs, do_replicas_differ=do_replicas_differ)
                if has_changed or staged is None:
                    staged = self._reserve(plan)
            except Exception as caught:  # noqa: BLE001 (the vote raises it again)
                traceback.clear_frames(caught.__traceback__)
                error = caught
            resources.voter.vote(error, what=f"{request.what}: reserving")
        if staged is None:
            raise RuntimeError(f"{request.what} was taken without its memory")
        return staged

    def release(self) -> None:
        """Give everything back."""
        self.give_back()
        self._abandon()

    def give_back(self) -> None:
        """Give back everything but the folder."""
        self._memory.close()
        if self._plan is not None:
            self._plan.release()

    def _make_plan(self) -> SavePlan:
        resources, request = self._resources, self._request
        resources.failure.raise_pending()
        check_step(request.step)
        tag = request.tag
        if tag is not None and (not isinstance(tag, str) or not tag or not tag.isprintable()):
            raise InvalidInputError(f"tag is {tag!r}: give a word of printable characters, or None")
        _check_flag("overwrite", request.overwrite)
        _check_flag("blocking", request.blocking)
        queue = resources.queues[request.kind]
        if request.step in queue.steps_under_way():
            raise InvalidInputError(f"{request.what}: a save of this step is under way already")
        queue.start()
        self._plan = request.make_plan()
        return self._plan

    def _reserve(self, plan: SavePlan) -> Staged:
        self._memory.close()
        write_plan = plan.write_plan()
        # First, since a refused save must not wait for memory.
        self._begin(write_plan.checkpoint_bytes)
        size = write_plan.staged_bytes
        self._resources.budget.take(size, self._request.what)
        self._memory.callback(self._resources.budget.give_back, size)
        staged = Staged(write_plan)
        self._memory.callback(staged.release)
        return staged

    def _begin(self, checkpoint_bytes: int) -> None:
        """On the first rank: make the folder of the step, or refuse the step."""
        writable, request = self._resources.writable, self._request
        self._abandon()
        if writable is not None:
            # Before it begins, since Ctrl-C may come. Abandoning a step that was not begun does nothing.
            self.begun = Begun(
                kind=request.kind,
                step=request.step,
                tag=request.tag,
                size=checkpoint_bytes,
                # Each rank writes one, as a rule.
                files=self._resources.world_size,
                overwrite=request.overwrite,
            )
            self.needs_room = writable.begin(self.begun, wait_for_saves=self._wait_for_saves)

    def _abandon(self) -> None:
        if self.begun is not None and self._resources.writable is not None:
            self._resources.writable.abandon(self._request.kind, self._request.step)
        self.begun = None

    def _wait_for_saves(self) -> None:
        """Wait until no save is under way: retention then makes room."""
        resources = self._resources
        steps = sorted({step for queue in resources.queues.values() for step in queue.steps_under_way()})
        if steps:
            _logger.warning(
                "%s waits for the saves of steps %s: the disk has too little room before they are over",
                self._request.what,
                steps,
            )
        # The other ranks wait in the vote for `timeout`; this must end well before.
        until = time.monotonic() + resources.voter.timeout / 2
        for queue in resources.queues.values():
            queue.wait(max(0.0, until - time.monotonic()))


def _compared(given: list[str]) -> str:
    """Whether any rank needs preparation, and whether any two have different hashes under one name."""
    known: dict[str, str] = {}
    any_needs = do_replicas_differ = False
    for needs, replicas in map(json.loads, given):
        any_needs = any_needs or needs
        do_replicas_differ = do_replicas_differ or any(
            known.setdefault(name, digest) != digest for name, digest in replicas.items()
        )
    return json.dumps([any_needs, do_replicas_differ])


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")
