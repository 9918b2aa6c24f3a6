"""How a save of either kind sees its files to the disk.

What always holds: a writer that is not finished is stopped, so that no thread goes on writing into a folder that
its save has given up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tundish._native import ShardWriter
from tundish.checkpoint.saves import WriteOptions

__all__ = ["finishing"]

_REPORT_SECONDS = 0.2


@contextlib.contextmanager
def finishing(writer: ShardWriter, options: WriteOptions) -> Iterator[None]:
    """A block that ends with `writer.finish()`: reports progress during it, and stops the writer where it raises."""
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(_REPORT_SECONDS):
            options.progress(writer.progress()[0])

    reporter = threading.Thread(target=report, name="tundish-write-progress", daemon=True)
    reporter.start()
    try:
        yield
    except BaseException:
        writer.abort()
        raise
    finally:
        is_over.set()
        reporter.join()
    options.progress(writer.progress()[0])
