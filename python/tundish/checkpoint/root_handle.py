"""Closes open roots: when a checkpointer is closed or dropped, and when the interpreter exits."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from tundish.checkpoint.open_root import OpenRoot
from tundish.checkpoint.staging.buffers import trim

__all__ = ["RootHandle", "open_roots"]

_logger = logging.getLogger("tundish.checkpoint")
open_roots: set[RootHandle] = set()


class RootHandle:
    """Closes an open root once; it outlives a checkpointer that was dropped with saves under way."""

    def __init__(self, root: OpenRoot) -> None:
        self.root = root
        self.process = os.getpid()
        self.was_dropped = False
        # Re-entrant for a signal handler that closes what its own thread is closing.
        self._lock = threading.RLock()
        open_roots.add(self)

    def close(self) -> None:
        """Finish the saves under way and release the root. The second call does nothing."""
        if os.getpid() != self.process:
            return
        with self._lock:
            for queue in self.root.queues.values():
                queue.finish()
            for queue in self.root.queues.values():
                queue.close()
            self.root.resources.close()
            open_roots.discard(self)
            if not open_roots:
                # As large as a model and its optimizer; nobody needs it until a root is opened again.
                trim()

    def drop(self) -> None:
        """Called when the checkpointer is garbage."""
        self.was_dropped = True
        self.close_later()

    def close_later(self) -> None:
        """Close on another thread."""
        if self in open_roots and os.getpid() == self.process:
            # An interpreter that is ending starts no thread, and closes everything itself.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self.close, name="tundish-close", daemon=True).start()


def _finish_saves() -> None:
    """Finish the saves that are under way when the interpreter exits; Ctrl-C gives them up."""
    for handle in list(open_roots):
        try:
            handle.close()
            handle.root.failure.raise_pending()
        except KeyboardInterrupt:
            _logger.warning(
                "saves under %s were given up; the next start removes what they left", handle.root.path
            )
            return
        except Exception:
            _logger.exception("a save under %s failed", handle.root.path)


# Not `atexit`, whose functions run when Python 3.12 starts no thread any more, which votes need.
threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]  # as concurrent.futures does
