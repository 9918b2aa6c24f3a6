"""Files that are larger than the memory there is for them, written through windows while the caller waits.

Owns the memory of the windows and the pages between them. What always holds: the window that is filled, and those
before it of which something is not written yet, together take no more than the limit, unless one alone does; bytes
reach a file in whole pages, but for its end, so that they can pass the page cache.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from tundish._native import FileImage, ShardWriter
from tundish.checkpoint.staging.buffers import Buffer, unpin

__all__ = ["PAGE", "Span", "WriteWindows"]

PAGE = 4096

_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Bytes `start` … `stop` - 1 of the file `name`; `is_end`: the last of them.

    `start`: a multiple of `PAGE`; the part of that page which lies before the window comes from the window before.
    """

    name: str
    start: int
    stop: int
    is_end: bool

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.stop - self.start


class WriteWindows:
    """The windows of files, one after the other, on their way to `writer`.

    `limit_bytes`: host memory that they take, unless one alone takes more.
    """

    def __init__(self, writer: ShardWriter, limit_bytes: int) -> None:
        # What an earlier save was staged in is within the limit, but not beside windows.
        unpin()
        self._writer = writer
        self._limit = limit_bytes
        self._handed_in = 0
        # Of windows that are not written: what is handed in with them, and what they take.
        self._unwritten: collections.deque[tuple[int, int]] = collections.deque()
        self._filled: tuple[Span, Buffer] | None = None

    def turn_to(self, span: Span) -> Buffer:
        """Hand in what is filled; the memory of the next window, once there is room for it.

        It begins with what the window before has of its first page.
        """
        rest = self.hand_in()
        self._wait_for_room(span)
        buffer = Buffer(span.size)
        memoryview(buffer.image)[: len(rest)] = rest
        self._filled = span, buffer
        return buffer

    def hand_in(self) -> bytes:
        """Let what is filled be written; gives the bytes that belong onto the first page of the next window."""
        if self._filled is None:
            return b""
        (span, buffer), self._filled = self._filled, None
        length = span.size if span.is_end else span.stop // PAGE * PAGE - span.start
        self._writer.write(span.name, span.start, buffer.image, 0, length)
        self._handed_in += length
        self._unwritten.append((self._handed_in, span.size))
        rest = bytes(memoryview(buffer.image)[length:])
        # The writer has it as long as it needs it.
        buffer.release()
        return rest

    def release(self) -> None:
        """Give back the memory of a window that is not handed in."""
        if self._filled is not None:
            self._filled[1].release()
            self._filled = None

    def _wait_for_room(self, span: Span) -> None:
        while self._unwritten:
            written = self._writer.progress()[0]
            while self._unwritten and self._unwritten[0][0] <= written:
                self._unwritten.popleft()
            if sum(taken for _, taken in self._unwritten) + span.size <= max(self._limit, span.size):
                return
            # This hands nothing in, but raises what the writer failed with, which would be waited for without end.
            self._writer.write(span.name, 0, FileImage(0), 0, 0)
            time.sleep(_POLL_SECONDS)
