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
        # A sample, and the first and the end of its tokens that are to be packed; None if there are none.
        self._rest: tuple[Sample, int, int] | None = None
        if start.rest is not None:
            self._rest = start.rest, 0, len(start.rest.tokens)

    def packs(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Iterate over the packs, each as the pieces in it.

        A pack comes as soon as it is closed: in hard packing when it is full, else when `window` packs were opened
        after it. The open packs come when the samples end.

        Raises:
            InvalidInputError: A sample is longer than a pack, and `overlong` is "error"; or its content is refused.
            Errors of `samples`.
        """
        while (pack := self._place_rest()) is not None:
            yield pack
        for sample in samples:
            if end := self._end(sample):
                self._rest = sample, 0, end
            while (pack := self._place_rest()) is not None:
                yield pack
        while self._open:
            self._closed += 1
            pack = self._open.popleft()
            # Only hard packing has it, and only its last pack may be short.
            if not self._options.drop_last:
                yield pack

    def state(self) -> OpenPacks:
        """What is held between two packs."""
        rest = None if self._rest is None else as_piece(*self._rest, self._columns)
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

    def _place_rest(self) -> list[Sample] | None:
        """Put the rest of the sample into packs, until that closes one; returns the pack."""
        while self._rest is not None:
            sample, start, end = self._rest
            # A sample that is refused is not gone on with.
            self._rest = None
            stop = min(end, start + self._options.max_length - self._filled)
            piece = as_piece(sample, start, stop, self._columns)
            if stop < end:
                self._rest = sample, stop, end
            if (closed := self._add(piece)) is not None:
                return closed
        return None

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
