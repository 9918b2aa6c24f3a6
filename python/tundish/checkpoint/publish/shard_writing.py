"""How a save of either kind sees its files to the disk.

What always holds: a writer that is not finished is stopped, so that no thread goes on writing into a folder that
its save has given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tundish._native import ShardWriter
from tundish.checkpoint.save import WriteOptions

__all__ = ["finishing"]


@contextlib.contextmanager
def finishing(writer: ShardWriter, options: WriteOptions) -> Iterator[None]:
    """A block that ends with `writer.finish()`: its progress can be asked for, and it is stopped where it raises."""
    options.progress(lambda: writer.progress()[0])
    try:
        yield
    except BaseException:
        writer.abort()
        raise
    finally:
        written = writer.progress()[0]
        # The writer is not held on to.
        options.progress(lambda: written)
