"""Opens a root for a checkpointer: checks the arguments and makes everything that it holds while it is open.

Invariants:
    - Ranks open together or fail together, each with a reason. What was made before a failure is closed.
    - One checkpointer holds the root's writer lock, through the group's first rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.checkpoint.buffers import StagingBudget
from tundish.checkpoint.checkpointer_resources import CheckpointerResources
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.hf.gather import ExchangeGroup
from tundish.checkpoint.publish.failure_policy import FailurePolicy, OnFailure
from tundish.checkpoint.publish.finalizer import Finalizer
from tundish.checkpoint.publish.kinds_and_steps import KINDS, Kind
from tundish.checkpoint.publish.readonly_root import ReadonlyRoot, path_of
from tundish.checkpoint.publish.retention import Retention
from tundish.checkpoint.publish.save_queue import SaveQueue
from tundish.checkpoint.publish.writable_root import WAIT_SECONDS, WritableRoot
from tundish.distributed import Voter, group_info, local_world_size
from tundish.errors import InvalidInputError, InvalidTypeError, StorageError
from tundish.timeouts import timeout_seconds

__all__ = ["open_checkpointer"]


_logger = logging.getLogger("tundish.checkpoint")


def open_checkpointer(
    root: Any,
    *,
    group: Any,
    timeout: Any,
    make_retention: Callable[[], Retention],
    on_failure: OnFailure,
    writers_per_node: Any,
    staging_limit_bytes: Any,
    checksum: Any,
    on_published: Sequence[Callable[[Path], Any]],
    on_event: Callable[[str, str, int], Any] | None,
) -> CheckpointerResources:
    """Collective over `group`: open the root. Takes the arguments of `Checkpointer`, and raises as it does.

    `make_retention` checks the arguments of the retention.
    """
    member = group_info(group)
    world_size, is_first = len(member.ranks), member.rank == member.ranks[0]
    seconds = timeout_seconds(timeout)
    writable: WritableRoot | None = None
    with contextlib.ExitStack() as stack:
        voter = stack.enter_context(Voter(group, timeout=seconds))
        # The first rank waits for a writer that is ending, and the others for the first rank.
        wait = min(WAIT_SECONDS, seconds)
        with voter.agreed("opening", same="opening", timeout=seconds + WAIT_SECONDS):
            path = path_of(root, "root")
            retention = make_retention()
            budget = StagingBudget(staging_limit_bytes)
            failure = FailurePolicy(on_failure, member.rank)
            writers = _writers_per_node(writers_per_node)
            _check_functions(on_event, on_published)
            if checksum not in ("crc64", None):
                raise InvalidInputError(f"checksum is {checksum!r}: give 'crc64' or None")
            if is_first:
                writable = WritableRoot(path, retention, wait_seconds=wait)
                stack.callback(writable.close)
                writable.log_recovered()
        shared = {
            "keep_last": retention.keep_last,
            "keep_every": retention.keep_every,
            "keep": None if retention.keep is None else "a function",
            "keep_tagged": dict(sorted(retention.keep_tagged.items())),
            # Not the environment variable: nodes may be of different sizes.
            "writers_per_node": writers_per_node,
            "staging_limit_bytes": budget.limit,
            "checksum": checksum,
            "timeout": seconds,
        }
        are_nodes_alike = _compare_ranks(path, writable, voter, shared=shared)
        exchange_group = None
        if world_size > 1:
            exchange_group = ExchangeGroup(member.ranks, seconds)
            stack.callback(exchange_group.close)
        queues: dict[Kind, SaveQueue] = {}
        protected: set[int] = set()
        for kind in KINDS:
            finalizer = Finalizer(
                kind=kind,
                # In the background ranks wait for slow disks: nothing to warn of.
                voter=stack.enter_context(Voter(group, timeout=seconds, warn_after=None)),
                writable=writable,
                world_size=world_size,
                writers_per_node=writers,
                checksum=checksum is not None,
                notify=_safe_notifier(on_event),
                on_published=tuple(on_published),
                protected=protected,
            )
            queues[kind] = SaveQueue(finalizer, failure.act)
        return CheckpointerResources(
            path=path,
            group=group,
            world_size=world_size,
            voter=voter,
            failure=failure,
            budget=budget,
            writable=writable,
            readonly=ReadonlyRoot(path),
            exchange_group=exchange_group,
            are_nodes_alike=are_nodes_alike,
            planner=SavePlanner(voter),
            queues=queues,
            protected=protected,
            exit_stack=stack.pop_all(),
        )


def _compare_ranks(
    path: Path, writable: WritableRoot | None, voter: Voter, *, shared: Mapping[str, Any]
) -> bool:
    """Make sure that all ranks see the same writable folder and were given the same arguments.

    Returns whether all nodes have as many ranks.
    """
    what = f"opening {path}"
    text = json.dumps([_node_size(), {name: repr(value) for name, value in shared.items()}])
    # Only the first rank has the gathered texts.
    given = [json.loads(answer) for answer in voter.gather(text, what=what)]
    error: BaseException | None = None
    owner = ""
    try:
        _compare([arguments for _, arguments in given], voter.ranks)
        owner = _owner_of(path, writable)
    except (InvalidInputError, StorageError) as caught:
        error = caught
    differ = len({size for size, _ in given}) > 1
    return not voter.vote(error, what=what, same=f"owner {owner}", flag=differ)


def _owner_of(path: Path, writable: WritableRoot | None) -> str:
    """The random text in the writer lock that the first rank holds: another folder has another one."""
    if writable is not None:
        return writable.owner
    number = errno.EACCES
    try:
        owner = _native.open_checkpoints_readonly(path).owner()
        # A file to try it with would need room on the disk.
        if owner is not None and os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            return owner
    except OSError as caught:
        number = caught.errno or number
    raise StorageError(
        number,
        "is not the same writable folder on this rank as on the first: give a root that all ranks share",
        str(path),
    )


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


def _writers_per_node(given: Any) -> int:
    text = os.environ.get("TUNDISH_WRITERS_PER_NODE", "1") if given is None else given
    where = "TUNDISH_WRITERS_PER_NODE" if given is None else "writers_per_node"
    try:
        if isinstance(text, bool) or (given is not None and not isinstance(given, int)):
            raise ValueError
        count = int(text)
        if count < 1:
            raise ValueError
    except ValueError:
        raise InvalidInputError(f"{where} is {text!r}: give a whole number of at least 1") from None
    return count


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
