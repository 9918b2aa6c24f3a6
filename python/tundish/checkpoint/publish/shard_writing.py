"""Runs the Rust shard writer of one save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tundish._native import ShardWriter
from tundish.checkpoint.stager import WriteOptions

__all__ = ["finishing"]


@contextlib.contextmanager
def finishing(writer: ShardWriter, options: WriteOptions) -> Iterator[None]:
    """A block that ends with `writer.finish()`: it reports progress, and where it raises, the writer is stopped.

    A writer that is not stopped would go on writing into a folder that its save has given up.
    """
    options.set_progress(lambda: writer.progress()[0])
    try:
        yield
    except BaseException:
        writer.abort()
        raise
    finally:
        written = writer.progress()[0]
        # The save outlives the writer.
        options.set_progress(lambda: written)
