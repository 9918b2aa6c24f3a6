"""`CheckpointerResources`: everything that a rank holds while a checkpointer is open, and how it is closed.

It outlives a checkpointer that was dropped with saves under way. The interpreter closes all of them when it exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tundish.checkpoint.dcp.saving.save_planner import SavePlanner
from tundish.checkpoint.hf.gather.exchange_group import ExchangeGroup
from tundish.checkpoint.publish.failure_policy import FailurePolicy
from tundish.checkpoint.publish.readonly_root import Kind, ReadonlyRoot
from tundish.checkpoint.publish.save_queue import SaveQueue
from tundish.checkpoint.publish.writable_root import WritableRoot
from tundish.checkpoint.staging.budget import StagingBudget
from tundish.checkpoint.staging.buffers import trim
from tundish.distributed import Voter

__all__ = ["CheckpointerResources", "open_checkpointers"]

_logger = logging.getLogger("tundish.checkpoint")
open_checkpointers: set[CheckpointerResources] = set()


@dataclass(kw_only=True, eq=False)
class CheckpointerResources:
    """The resources of one rank of an open checkpointer.

    Attributes:
        path: the folder of all checkpoints.
        group: the process group that the user gave, or None.
        world_size: number of ranks in the group.
        timeout: seconds that a step waits for the other ranks.
        voter: of the caller's thread.
        failure: what a failure in the background does.
        budget: host memory for staging.
        writable: the root with its writer lock, on the first rank; None on the others.
        readonly: the root for reading.
        exchange_group: for tensors that travel through host memory; None in a world of one.
        are_nodes_alike: whether all nodes have as many ranks.
        planner: plans DCP saves.
        queues: the saves under way, by kind.
        protected: the steps that this rank protects.
        exit_stack: closes everything, after the queues.
        was_dropped: whether the checkpointer is garbage.
    """

    path: Path
    group: Any
    world_size: int
    timeout: float
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
    was_dropped: bool = False
    process: int = field(default_factory=os.getpid)
    # Re-entrant for a signal handler that closes what its own thread is closing.
    _lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        open_checkpointers.add(self)

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Collective: a block that ends in a vote; ranks that make different calls raise an error that says so."""
        return self.voter.agreed(what, same=what, timeout=self.timeout)

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
