"""Tensors that belong into one buffer, and the ways into it.

Owns how tensors are copied, from a CUDA device and on the host; when, `staging` owns. What always holds: the bits of
what is not converted come as they are; nothing of value beside its place is touched by a tensor's copy.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tundish._native import TensorCopy
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.tensors import READER, check_memories, check_memory
from tundish.waiting import to_its_end

__all__ = [
    "Block",
    "check_on_devices",
    "copy_from_device",
    "copy_on_host",
    "filling_of",
    "journeys",
    "side_stream_of",
]

# Up to here torch copies with one thread, so that several tensors can be copied side by side.
_GRAIN = 32768
# Less is not worth the start of a thread.
_WORTH_THREADS_BYTES = 16 << 20
# Less than this is on its way from a device before the next transfer can be asked for.
_WORTH_A_TRANSFER = 1 << 20
# Of smaller ones, what is put together on the device first.
_TOGETHER_BYTES = 16 << 20
# What may lie between two of them: as much as is on its way meanwhile, or the rest of a page.
_MOST_BETWEEN = 4096
# By the size of an element, what moves its bits as they are.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Into each other, as any device can.
_CONVERTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# What is copied between two looks at signals: some ten milliseconds, a hundred where memory is fresh.
_PIECE_BYTES = 16 << 20

_Pair = tuple[torch.Tensor, torch.Tensor]

# One a device: torch hands out the same 32 in turn, also to those who train, and keeps what was freed on each for that
# one alone.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Local tensors that belong into one buffer, in its order. `places`: of each; `names`: for messages.

    `free_from`: of each, from where on nothing lies before it that is of value once it was copied; None where nothing
    of the buffer is free.
    """

    buffer: Buffer
    places: Places
    sources: Sequence[torch.Tensor]
    names: Sequence[str] = ()
    free_from: Sequence[int] | None = None

    def chosen(self, numbers: Sequence[int]) -> Block:
        """Some of them, by number, in order."""
        if len(numbers) == len(self.sources):
            return self
        return Block(
            buffer=self.buffer,
            places=Places([self.places[number] for number in numbers]),
            sources=[self.sources[number] for number in numbers],
            names=[self.names[number] for number in numbers],
            free_from=None if self.free_from is None else [self.free_from[number] for number in numbers],
        )


def side_stream_of(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        made = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream = _side_streams.setdefault(device, made)
    return stream


def copy_from_device(device: torch.device, block: Block, side: torch.cuda.Stream) -> None:
    for together in journeys(block, device):
        sources = [block.sources[number] for number in together]
        places = [block.places[number] for number in together]
        # Made on the device, so that few transfers are asked for, of few bytes, and the host need not wait: torch
        # conjugates and negates what came into host memory before it is there.
        if len(together) == 1:
            ready = sources[0].to(places[0].dtype).resolve_conj().resolve_neg().contiguous()
        else:
            ready = _as_they_will_lie(sources, places, device)
        whole = Place(places[0].start, places[-1].stop, ready.dtype, ready.shape)
        block.buffer.view(whole).copy_(ready, non_blocking=True)
        for source in sources:
            source.record_stream(side)


def _as_they_will_lie(
    sources: Sequence[torch.Tensor], places: Sequence[Place], device: torch.device
) -> torch.Tensor:
    """All of a journey on the device, with whatever was there between them."""
    dtype = places[0].dtype
    if sources[0].dtype == dtype:
        # As integers: what passes as a float makes every NaN the same one, and for some dtypes there is no such way.
        dtype = _AS_INTEGERS[dtype.itemsize]
        sources = [source.view(dtype) for source in sources]
    # Lengths of sources and of what is between them, in turn.
    bounds = [bound - places[0].start for place in places for bound in (place.start, place.stop)]
    lengths = [(stop - start) // dtype.itemsize for start, stop in itertools.pairwise(bounds)]
    flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    torch._foreach_copy_(list(flat.split_with_sizes(lengths)[::2]), [source.view(-1) for source in sources])
    return flat


def journeys(block: Block, device: torch.device) -> Iterator[list[int]]:
    """The numbers of what is on a device: of what is copied in one transfer, small sources of one kind close together.

    Between the places of those is nothing of value. (They are whole elements apart, as any place begins with one.)
    """
    together: list[int] = []
    key, start, end = None, 0, 0
    for number, (place, source) in enumerate(zip(block.places, block.sources, strict=True)):
        if source.device != device or not source.numel():
            continue
        this = None
        if (
            place.stop - place.start < _WORTH_A_TRANSFER
            and (source.dtype == place.dtype or {source.dtype, place.dtype} <= _CONVERTED)
            and place.dtype.itemsize in _AS_INTEGERS
            and source.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
        ):
            this = (source.dtype, place.dtype)
        free_from = place.start if block.free_from is None else block.free_from[number]
        if together and (
            this is None
            or this != key
            or free_from > end
            or place.start - end > _MOST_BETWEEN
            or place.stop - start > _TOGETHER_BYTES
        ):
            yield together
            together = []
        if not together:
            key, start = this, place.start
        together.append(number)
        end = place.stop
    if together:
        yield together


def check_on_devices(blocks: Sequence[Block]) -> None:
    # Before anything is queued: to read what was freed is an error of the device, which ends its use.
    for block in blocks:
        check_memories(_names_of(block), block.sources)
        for number, source in enumerate(block.sources):
            # Of which there may be less than from the first value to the last.
            if source.is_cuda and not source.is_contiguous():
                _check_memory_of(block, number)


def _names_of(block: Block) -> Sequence[str]:
    return block.names or [f"tensor {number}" for number in range(len(block.sources))]


def _check_memory_of(block: Block, number: int) -> None:
    """Refuse what was freed since the save was planned."""
    check_memory(_names_of(block)[number], block.sources[number])


def filling_of(block: Block, threads: int) -> TensorCopy:
    """Begins to copy all that is copied on the host as it is."""
    return block.buffer.image.fill(block.places.spans, block.sources, threads, READER)


def copy_on_host(block: Block, filling: TensorCopy, threads: int) -> None:
    """What is not on a CUDA device: bytes as they are, by `filling`; what is to be converted or rearranged by torch."""
    filling.finish()
    left = [number for number in filling.left if not block.sources[number].is_cuda]
    if not left:
        return
    for number in left:
        _check_memory_of(block, number)
    pairs = [(block.buffer.view(block.places[number]), block.sources[number]) for number in left]
    small = [pair for pair in pairs if pair[1].numel() <= _GRAIN]
    _copy_in_turn([pair for pair in pairs if pair[1].numel() > _GRAIN])
    if threads == 1 or sum(target.nbytes for target, _ in small) < _WORTH_THREADS_BYTES:
        _copy_in_turn(small)
        return
    pieces = deque(_in_pieces(small))

    def copy() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy_pieces, [pieces] * threads))

    # What is not begun when Ctrl-C comes is not begun any more.
    to_its_end(copy, hurry=pieces.clear)


def _copy_pieces(pieces: deque[list[_Pair]]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        _copy_at_once(piece)


def _copy_in_turn(pairs: Sequence[_Pair]) -> None:
    for piece in _in_pieces(pairs):
        _copy_at_once(piece)


def _copy_at_once(pairs: Sequence[_Pair]) -> None:
    # One call for all of them, of which the interpreter is free.
    with torch.no_grad():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _in_pieces(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """`pairs` in runs of up to `_PIECE_BYTES`; what is larger alone is cut along its first dimension."""
    taken: list[_Pair] = []
    filled = 0
    for target, source in (part for pair in pairs for part in _cut(*pair)):
        if taken and filled + target.nbytes > _PIECE_BYTES:
            yield taken
            taken, filled = [], 0
        taken.append((target, source))
        filled += target.nbytes
    if taken:
        yield taken


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterator[_Pair]:
    if target.nbytes <= _PIECE_BYTES:
        return iter([(target, source)])
    rows = max(1, len(target) * _PIECE_BYTES // target.nbytes)
    return zip(torch.split(target, rows), torch.split(source.detach(), rows), strict=True)
