"""`CheckpointerResources`: what a rank holds while a checkpointer is open, which calls are accepted, and the closing.

It outlives a checkpointer that was dropped with saves under way. The interpreter closes all of them when it exits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tundish.checkpoint.buffers import StagingBudget, trim
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.hf.gather import ExchangeGroup
from tundish.checkpoint.publish.failure_policy import FailurePolicy
from tundish.checkpoint.publish.kinds_and_steps import Kind, format_steps
from tundish.checkpoint.publish.readonly_root import ReadonlyRoot
from tundish.checkpoint.publish.save_queue import SaveQueue
from tundish.checkpoint.publish.writable_root import WritableRoot
from tundish.checkpoint.save import waits_for_itself
from tundish.distributed import Voter
from tundish.errors import InvalidInputError, NotFoundError

__all__ = ["CheckpointerResources", "open_checkpointers"]

_logger = logging.getLogger("tundish.checkpoint")
# More votes than a call takes.
_VOTES_PER_CALL = 256
# How long an interrupted rank waits for the others to hear of it.
_REPORT_SECONDS = 0.3
open_checkpointers: set[CheckpointerResources] = set()


@dataclass(kw_only=True, eq=False)
class CheckpointerResources:
    """The resources of one rank of an open checkpointer.

    Attributes:
        path: the folder of all checkpoints.
        group: the process group that the user gave, or None.
        world_size: number of ranks in the group.
        voter: of the caller's thread.
        failure: what a failure in the background does.
        budget: host memory for staging.
        writable: the root with its writer lock, on the first rank; None on the others.
        readonly: the root for reading.
        exchange_group: for tensors that travel through host memory; None in a world of one.
        of_first_rank: buffers of models that differ between ranks; exports have those of the first rank.
        are_nodes_alike: whether all nodes have as many ranks.
        planner: plans DCP saves.
        queues: the saves under way, by kind.
        protected: the steps that this rank protects.
        exit_stack: closes everything, after the queues.
        was_dropped: whether the checkpointer is garbage.
        closed_by: None while the checkpointer is open, else why it was closed, for the message.
    """

    path: Path
    group: Any
    world_size: int
    voter: Voter
    failure: FailurePolicy
    budget: StagingBudget
    writable: WritableRoot | None
    readonly: ReadonlyRoot
    exchange_group: ExchangeGroup | None
    are_nodes_alike: bool
    planner: SavePlanner
    queues: Mapping[Kind, SaveQueue]
    protected: set[int]
    exit_stack: contextlib.ExitStack
    of_first_rank: set[str] = field(default_factory=set)
    was_dropped: bool = False
    closed_by: str | None = None
    process: int = field(default_factory=os.getpid)
    # Re-entrant for a signal handler that closes what its own thread is closing.
    _lock: Any = field(default_factory=threading.RLock)
    # The collective call that each thread is in.
    _current: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        open_checkpointers.add(self)

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Collective: a block that ends in a vote; ranks that make different calls raise an error that says so."""
        return self.voter.agreed(what, same=what)

    @contextlib.contextmanager
    def collective(self, call: str) -> Iterator[None]:
        """A block in which this rank makes a collective call; an interrupt in it closes the checkpointer."""
        self.check_open()
        self.refuse_in_callback(call)
        outer = getattr(self._current, "call", None)
        if outer is not None:
            raise InvalidInputError(
                f"{call}() was called inside {outer}(), by a signal handler or a function that was given: the other "
                "ranks cannot know of it. Have the handler set a flag, and save between two steps"
            )
        self._current.call = call
        try:
            # The votes of a call have numbers of its own, so that ranks meet again after one left a call early.
            self.voter.skip_to(-(-self.voter.last_vote.number // _VOTES_PER_CALL) * _VOTES_PER_CALL)
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
        self.closed_by = f", since {call}() was interrupted by {type(interrupt).__name__}"
        try:
            with contextlib.suppress(Exception):
                self.voter.vote(interrupt, what=call, timeout=_REPORT_SECONDS)
        except BaseException as caught:
            if caught is not interrupt:
                raise
        finally:
            # Ranks that wait for this one in a vote or an exchange fail now; saves under way have voters of their own.
            self.voter.close()
            if self.exchange_group is not None:
                self.exchange_group.close()
            self.close_later()

    def check_open(self) -> None:
        """Refuse a call of a checkpointer that is closed."""
        if os.getpid() != self.process:
            raise InvalidInputError(
                "this checkpointer was made before a fork: use it in the process that made it"
            )
        # Callbacks of the saves that a close waits for may still use it.
        if self.closed_by is not None and not self._is_in_callback():
            raise InvalidInputError(f"this checkpointer is closed{self.closed_by}: make a new one")

    def raise_pending(self) -> None:
        """Raise the error of a save on the training thread; a callback must not consume it."""
        if not self._is_in_callback():
            self.failure.raise_pending()

    def refuse_in_callback(self, call: str) -> None:
        """Refuse a call that would wait for the save whose callback makes it."""
        if self._is_in_callback():
            raise waits_for_itself(call)

    def _is_in_callback(self) -> bool:
        """Whether the caller is a function of the user's on the thread of a save."""
        return any(queue.is_own_thread() for queue in self.queues.values())

    def protect(self, step: int) -> None:
        """Keep the checkpoints of a step that is published or being saved."""
        # First, since a save may be published between the two looks.
        if not any(step in queue.steps_under_way() for queue in self.queues.values()):
            steps = sorted({checkpoint.step for checkpoint in self.readonly.list()})
            if step not in steps:
                raise NotFoundError(
                    errno.ENOENT,
                    f"{self.path} has no checkpoint of step {step}, and none is being saved ({format_steps(steps)}): "
                    "call protect after the save begins",
                    str(self.path),
                )
        self.protected.add(step)
        if self.writable is not None:
            self.writable.protect([step])

    def close(self) -> None:
        """Finish the saves under way and release the root. The second call does nothing."""
        if os.getpid() != self.process:
            return
        with self._lock:
            for queue in self.queues.values():
                queue.finish()
            for queue in self.queues.values():
                queue.close()
            self.exit_stack.close()
            open_checkpointers.discard(self)
            if not open_checkpointers:
                # As large as a model and its optimizer; nobody needs it until a root is opened again.
                trim()

    def drop(self) -> None:
        """Called when the checkpointer is garbage."""
        self.was_dropped = True
        self.close_later()

    def close_later(self) -> None:
        """Close on another thread."""
        if self in open_checkpointers and os.getpid() == self.process:
            # An interpreter that is ending starts no thread, and closes everything itself.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.close, name="tundish-close", daemon=True).start()


def _finish_saves() -> None:
    """Finish the saves that are under way when the interpreter exits; Ctrl-C gives them up."""
    for root in list(open_checkpointers):
        try:
            root.close()
            root.failure.raise_pending()
        except KeyboardInterrupt:
            _logger.warning("saves under %s were given up; the next start removes what they left", root.path)
            return
        except Exception:
            _logger.exception("a save under %s failed", root.path)


# Not `atexit`, whose functions run when Python 3.12 starts no thread any more, which votes need.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]  # as concurrent.futures does
