"""`StreamPacker`: the packs of one pass, in memory that is bounded in tokens.

Invariants:
1. Pack *i* is pack *i* of the plan that `pack` makes of the same lengths in the same order.
2. The pieces of open packs own their memory. Nothing else of a sample is kept, but while it is being cut.
3. Between two packs the state is complete: the open packs, and the rest of the sample that is being cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tundish.errors import InvalidInputError
from tundish.packing.dataset.sample_keys import Padding
from tundish.packing.dataset.samples import Sample, name_sample
from tundish.packing.stream.pieces import as_piece
from tundish.packing.stream.stream_options import StreamOptions

__all__ = ["OpenPacks", "StreamPacker"]


class OpenPacks(NamedTuple):
    """What a pass through a stream holds between two packs.

    Attributes:
        closed: Packs that were given out.
        packs: The pieces of each open pack, the oldest first.
        rest: The tokens of the sample being cut that no pack has, as one piece, or None.
    """

    closed: int = 0
    packs: Sequence[Sequence[Sample]] = ()
    rest: Sample | None = None


class StreamPacker:
    """Packs samples as they come.

    Args:
        options: How they come into packs.
        columns: The columns of the samples, with their padding values.
        start: The open packs to go on with.
    """

    def __init__(self, options: StreamOptions, columns: Mapping[str, Padding], start: OpenPacks) -> None:
        self._options = options
        self._columns = columns
        self._window = options.new_window()
        self._closed = start.closed
        self._open = deque(list(pack) for pack in start.packs)
        # Tokens in the open pack of hard packing.
        self._filled = 0
        lengths = [[len(piece.tokens) for piece in pack] for pack in self._open]
        if self._window is not None:
            self._window.reopen(self._closed, lengths)
        elif lengths:
            self._filled = sum(lengths[0])
        # The sample that is being cut, the first of its tokens that no pack has, and the end of those that are packed.
        self._cut: tuple[Sample, int, int] | None = None
        if start.rest is not None:
            self._cut = start.rest, 0, len(start.rest.tokens)

    def packs(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Iterate over the packs, each as the pieces in it.

        A pack comes as soon as it is closed: in hard packing when it is full, else when `window` packs were opened
        after it. The open packs come when the samples end.

        Raises:
            InvalidInputError: A sample is longer than a pack, and `overlong` is "error"; or its content is refused.
            Errors of `samples`.
        """
        if self._cut is not None:
            yield from self._place(*self._cut)
        for sample in samples:
            yield from self._place(sample, 0, self._end(sample))
        while self._open:
            self._closed += 1
            pack = self._open.popleft()
            # Only hard packing has it, and only its last pack may be short.
            if not self._options.drop_last:
                yield pack

    def state(self) -> OpenPacks:
        """What is held between two packs."""
        rest = None
        if self._cut is not None:
            sample, start, end = self._cut
            rest = as_piece(sample, start, end, self._columns) if start < end else None
        return OpenPacks(self._closed, [list(pack) for pack in self._open], rest)

    def _end(self, sample: Sample) -> int:
        """How many tokens of a sample are packed."""
        tokens, max_length = len(sample.tokens), self._options.max_length
        if tokens <= max_length or self._options.mode == "hard":
            return tokens
        match self._options.overlong:
            case "split":
                return tokens
            case "truncate":
                return max_length
            case "drop":
                return 0
        raise InvalidInputError(
            f"{name_sample(sample.dataset, sample.number)} has {tokens} tokens, and max_length is {max_length}: pass "
            f"overlong='split' to cut such samples into parts, overlong='truncate' to keep their first {max_length} "
            "tokens, or overlong='drop' to leave them out"
        )

    def _place(self, sample: Sample, start: int, end: int) -> Iterator[list[Sample]]:
        """Put the tokens `start` … `end` - 1 of a sample into packs, and yield those that this closes."""
        max_length = self._options.max_length
        while start < end:
            stop = min(end, start + max_length - self._filled)
            # A sample that is refused is not gone on with.
            self._cut = None
            piece = as_piece(sample, start, stop, self._columns)
            self._cut = sample, stop, end
            start = stop
            closed = self._add(piece)
            if closed is not None:
                yield closed
        self._cut = None

    def _add(self, piece: Sample) -> list[Sample] | None:
        """Put a piece into its pack; the pack that this closes, if there is one."""
        tokens = len(piece.tokens)
        if self._window is None:
            number = self._closed
            self._filled += tokens
        else:
            number = self._window.place(tokens)
        if number - self._closed == len(self._open):
            self._open.append([])
        self._open[number - self._closed].append(piece)
        if self._filled < self._options.max_length and len(self._open) <= self._options.window:
            return None
        self._filled = 0
        self._closed += 1
        return self._open.popleft()
