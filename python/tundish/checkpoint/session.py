"""`Session`: what a rank holds while a checkpointer is open, from opening to the exit of the interpreter.

It says which calls are accepted, and outlives a checkpointer that was dropped with saves under way. The interpreter
closes all sessions when it exits.

Invariants:
    - Ranks open together or fail together, each with a reason. What was made before a failure is closed.
    - One session owns a root, through the group's first rank.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tundish.checkpoint.buffers import StagingBudget, trim
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.failures import FailurePolicy, OnFailure
from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.hf.gather import ExchangeGroup
from tundish.checkpoint.publish import Finalizer, SaveQueue
from tundish.checkpoint.readonly import ReadonlyRoot
from tundish.checkpoint.retention import Retention, WritableRoot, log_recovered
from tundish.checkpoint.root import KINDS, WAIT_SECONDS, DiskRoot, Kind, Root, format_steps, path_of
from tundish.checkpoint.save_job import waits_for_itself
from tundish.distributed import Voter, group_info, local_world_size
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
    VoteTimeoutError,
    format_ranks,
)
from tundish.timeouts import timeout_seconds

_logger = logging.getLogger("tundish.checkpoint")
# How long a call waits for ranks that do not make it. Shorter than the ten minutes after which NCCL ends a process that
# waits in another collective: the error must name the cause before that.
CALL_SECONDS = 480.0
# How long ranks wait for the work of others: files may be large, and disks slow.
WORK_SECONDS = 7200.0
# More votes than a call takes.
_VOTES_PER_CALL = 256
# How long an interrupted rank waits for the others to hear of it.
_REPORT_SECONDS = 0.3
open_sessions: set[Session] = set()


@dataclass(kw_only=True, eq=False)
class Session:
    """The resources of one rank of an open checkpointer.

    Attributes:
        root: where checkpoints are published.
        group: the process group that the user gave, or None.
        world_size: number of ranks in the group.
        voter: of the caller's thread.
        call_timeout: seconds that a call waits for ranks that do not make it.
        failure: what a failure in the background does.
        budget: host memory for staging.
        writable: the root with its retention, on the first rank; None on the others.
        readonly: the root as readers find it.
        exchange_group: for tensors that travel through host memory; None in a world of one.
        of_first_rank: buffers of models that differ between ranks; exports have those of the first rank.
        are_nodes_alike: whether all nodes have as many ranks.
        planner: plans DCP saves.
        queues: the saves under way, by kind.
        exit_stack: closes everything, after the queues.
        was_dropped: whether the checkpointer is garbage.
        closed_by: None while the checkpointer is open, else why it was closed, for the message.
    """

    root: Root
    group: Any
    world_size: int
    voter: Voter
    call_timeout: float
    failure: FailurePolicy
    budget: StagingBudget
    writable: WritableRoot | None
    readonly: ReadonlyRoot
    exchange_group: ExchangeGroup | None
    are_nodes_alike: bool
    planner: SavePlanner
    queues: Mapping[Kind, SaveQueue]
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
        open_sessions.add(self)

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Collective: a block that ends in a vote; ranks that make different calls raise an error that says so."""
        return self.voter.agreed(what, same=what)

    @contextlib.contextmanager
    def called(self, call: str, what: str) -> Iterator[None]:
        """Collective: a block without any wait, at the start of a call. Its vote finds the ranks that do not call.

        Args:
            call: as the user writes it.
            what: for the vote; the same on all ranks.
        """
        with self.absent_ranks_named(call), self.voter.agreed(what, same=what, timeout=self.call_timeout):
            yield

    @contextlib.contextmanager
    def absent_ranks_named(self, call: str) -> Iterator[None]:
        """A block with the first vote of a call; ranks that do not come to it get an error of their own."""
        try:
            yield
        except VoteTimeoutError as error:
            if not error.ranks or self.voter.rank in error.ranks:
                raise
            raise VoteTimeoutError(
                f"{format_ranks(error.ranks)} never called {call}, within {self.call_timeout:g} s of rank "
                f"{self.voter.rank}: all ranks make this call, with the same step. If a rank may come later than that, "
                "give Checkpointer(timeout=…); if it hangs, look at its stack",
                error.ranks,
            ) from None

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

    def export_plan(self, model_or_tensors: Any, **options: Any) -> Callable[[], HfExport]:
        """The function that plans an export of these ranks. `options`: as `save_hf` takes them."""
        return functools.partial(
            HfExport,
            model_or_tensors,
            root=self.root.path,
            group=self.group,
            exchange_group=self.exchange_group,
            voter=self.voter,
            of_first_rank=self.of_first_rank,
            are_nodes_alike=self.are_nodes_alike,
            **options,
        )

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
            steps = sorted({checkpoint.step for checkpoint in self.root.list()})
            if step not in steps:
                raise NotFoundError(
                    errno.ENOENT,
                    f"{self.root.path} has no checkpoint of step {step}, and none is being saved "
                    f"({format_steps(steps)}): call protect after the save begins",
                    str(self.root.path),
                )
        self.root.protect(step)

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
            open_sessions.discard(self)
            if not open_sessions:
                # As large as a model and its optimizer; nobody needs it until a root is opened again.
                trim()

    def drop(self) -> None:
        """Called when the checkpointer is garbage."""
        self.was_dropped = True
        self.close_later()

    def close_later(self) -> None:
        """Close on another thread."""
        if self in open_sessions and os.getpid() == self.process:
            # An interpreter that is ending starts no thread, and closes everything itself.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.close, name="tundish-close", daemon=True).start()


def open_session(
    root: Any,
    *,
    group: Any,
    timeout: Any,
    make_retention: Callable[[], Retention],
    on_failure: OnFailure,
    staging_limit_bytes: Any,
    checksum: Any,
    on_published: Sequence[Callable[[Path], Any]],
    on_event: Callable[[str, str, int], Any] | None,
) -> Session:
    """Collective over `group`: open the root. Takes the arguments of `Checkpointer`, and raises as it does.

    `make_retention` checks the arguments of the retention.
    """
    member = group_info(group)
    world_size, is_first = len(member.ranks), member.rank == member.ranks[0]
    seconds = WORK_SECONDS if timeout is None else timeout_seconds(timeout)
    with contextlib.ExitStack() as stack:
        voter = stack.enter_context(Voter(group, timeout=seconds))
        # The first rank waits for a writer that is ending, and the others for the first rank.
        wait = min(WAIT_SECONDS, seconds)
        with voter.agreed("opening", same="opening", timeout=seconds + WAIT_SECONDS):
            location = _location_of(root)
            retention = make_retention()
            budget = StagingBudget(staging_limit_bytes)
            failure = FailurePolicy(on_failure, member.rank)
            _check_functions(on_event, on_published)
            if checksum not in ("crc64", None):
                raise InvalidInputError(f"checksum is {checksum!r}: give 'crc64' or None")
            opened = _open_root(location, owns=is_first, wait_seconds=wait)
            stack.callback(opened.close)
            writable = WritableRoot(opened, retention) if is_first else None
        shared = {
            "keep_last": retention.keep_last,
            "keep_every": retention.keep_every,
            "keep": None if retention.keep is None else "a function",
            "keep_tagged": dict(sorted(retention.keep_tagged.items())),
            "staging_limit_bytes": budget.limit,
            "checksum": checksum,
            "timeout": seconds,
        }
        are_nodes_alike = _compare_ranks(opened, voter, shared=shared)
        exchange_group = None
        if world_size > 1:
            exchange_group = ExchangeGroup(voter)
            stack.callback(exchange_group.close)
        queues: dict[Kind, SaveQueue] = {}
        for kind in KINDS:
            finalizer = Finalizer(
                kind=kind,
                # In the background ranks wait for slow disks: nothing to warn of.
                voter=stack.enter_context(Voter(group, timeout=seconds, warn_after=None)),
                root=opened,
                writable=writable,
                world_size=world_size,
                checksum=checksum is not None,
                notify=_safe_notifier(on_event),
                on_published=tuple(on_published),
            )
            queues[kind] = SaveQueue(finalizer, failure.act)
        return Session(
            root=opened,
            readonly=ReadonlyRoot(location),
            group=group,
            world_size=world_size,
            voter=voter,
            call_timeout=CALL_SECONDS if timeout is None else seconds,
            failure=failure,
            budget=budget,
            writable=writable,
            exchange_group=exchange_group,
            are_nodes_alike=are_nodes_alike,
            planner=SavePlanner(voter),
            queues=queues,
            exit_stack=stack.pop_all(),
        )


def _location_of(root: Any) -> Path | Root:
    """A root that the caller opened, or the path of one."""
    return root if isinstance(root, Root) else path_of(root, "root")


def _open_root(location: Path | Root, *, owns: bool, wait_seconds: float) -> Root:
    if not isinstance(location, Path):
        return location.share()
    root = DiskRoot(location, owns=owns, wait_seconds=wait_seconds)
    if owns:
        log_recovered(root)
    return root


def _compare_ranks(root: Root, voter: Voter, *, shared: Mapping[str, Any]) -> bool:
    """Make sure that all ranks see the same writable root and were given the same arguments.

    Returns whether all nodes have as many ranks.
    """
    what = f"opening {root.path}"
    text = json.dumps([_node_size(), {name: repr(value) for name, value in shared.items()}])
    # Only the first rank has the gathered texts.
    given = [json.loads(answer) for answer in voter.gather(text, what=what)]
    error: BaseException | None = None
    owner = ""
    try:
        _compare([arguments for _, arguments in given], voter.ranks)
        owner = root.identity()
    except (InvalidInputError, StorageError) as caught:
        error = caught
    differ = len({size for size, _ in given}) > 1
    return not voter.vote(error, what=what, same=f"owner {owner}", flag=differ)


def _node_size() -> int | None:
    """How many ranks this node has; None where the launcher does not say."""
    try:
        return local_world_size()
    except InvalidInputError:
        return None


def _compare(given: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    """Refuse arguments that differ between ranks. `given`: of each rank, on the first one; empty on the others."""
    problems = []
    for name in given[0] if given else ():
        other = next((at for at, one in enumerate(given) if one[name] != given[0][name]), None)
        if other is not None:
            problems.append(
                f"{name} is {given[0][name]} on rank {ranks[0]} and {given[other][name]} on rank {ranks[other]}"
            )
    if problems:
        raise InvalidInputError(f"{'; '.join(problems)}: give all ranks the same")


def _check_functions(on_event: Any, on_published: Any) -> None:
    if on_event is not None and not callable(on_event):
        raise InvalidTypeError(f"on_event is {on_event!r}: give a function of an event, a kind and a step")
    if not isinstance(on_published, Sequence) or not all(map(callable, on_published)):
        raise InvalidTypeError(f"on_published is {on_published!r}: give a list of functions of a path")


def _safe_notifier(on_event: Callable[[str, str, int], Any] | None) -> Callable[[str, str, int], None]:
    """Wrap `on_event` so that it cannot fail a save."""

    def notify(event: str, kind: str, step: int) -> None:
        if on_event is None:
            return
        try:
            on_event(event, kind, step)
        except BaseException:
            # An exit too: it would end the thread of the saves, and nothing else.
            _logger.exception("on_event failed at %r of %s step %d", event, kind, step)

    return notify


def _finish_saves() -> None:
    """Finish the saves that are under way when the interpreter exits; Ctrl-C gives them up."""
    for session in list(open_sessions):
        try:
            session.close()
            session.failure.raise_pending()
        except KeyboardInterrupt:
            _logger.warning(
                "saves under %s were given up; the next start removes what they left", session.root.path
            )
            return
        except Exception:
            _logger.exception("a save under %s failed", session.root.path)


# Not `atexit`, whose functions run when Python 3.12 starts no thread any more, which votes need.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]  # as concurrent.futures does
