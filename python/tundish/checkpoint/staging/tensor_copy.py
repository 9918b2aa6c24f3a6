"""Copies tensors into one buffer, from a CUDA device and on the host.

Invariants:
    - Bits that are not converted are copied as they are.
    - A copy touches nothing of value outside of its tensor's place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tundish._native import TensorCopy
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.tensors import READER, check_memories, check_memory

__all__ = [
    "Block",
    "begin_host_copy",
    "check_on_devices",
    "copy_from_device",
    "finish_host_copy",
    "transfers",
]

# Tensors below this are packed on the device: one transfer of many costs less than a transfer of each.
_PACKED_BELOW_BYTES = 1 << 20
_MOST_PACKED_BYTES = 16 << 20
# Bytes between two packed tensors, which are transferred too.
_MOST_GAP_BYTES = 4096
# By the size of an element, the dtype whose copy moves bits unchanged.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Any device converts these into each other.
_CONVERTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# Copied between two looks at signals: some ten milliseconds.
_PIECE_BYTES = 16 << 20

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Local tensors and their places in one buffer.

    Attributes:
        buffer: where they are copied to.
        places: the place of each, sorted.
        sources: the tensors, on any device.
        names: of each, for messages.
        free_from: of each, where the bytes before its place begin that may be overwritten. None: there are none.
    """

    buffer: Buffer
    places: Places
    sources: Sequence[torch.Tensor]
    names: Sequence[str] = ()
    free_from: Sequence[int] | None = None

    def chosen(self, numbers: Sequence[int]) -> Block:
        """The block of some of the tensors, by number, in order."""
        if len(numbers) == len(self.sources):
            return self
        return Block(
            buffer=self.buffer,
            places=Places([self.places[number] for number in numbers]),
            sources=[self.sources[number] for number in numbers],
            names=[self.names[number] for number in numbers],
            free_from=None if self.free_from is None else [self.free_from[number] for number in numbers],
        )


def copy_from_device(device: torch.device, block: Block, side: torch.cuda.Stream) -> None:
    """Queue the copies of what is on `device`, on the current stream, which is `side`."""
    for numbers in transfers(block, device):
        sources = [block.sources[number] for number in numbers]
        places = [block.places[number] for number in numbers]
        if len(numbers) == 1:
            # Converted on the device: torch would convert in host memory before the transfer is over.
            ready = sources[0].to(places[0].dtype).resolve_conj().resolve_neg().contiguous()
        else:
            ready = _pack(sources, places, device)
        whole = Place(places[0].start, places[-1].stop, ready.dtype, ready.shape)
        block.buffer.view(whole).copy_(ready, non_blocking=True)
        for source in sources:
            source.record_stream(side)


def transfers(block: Block, device: torch.device) -> Iterator[list[int]]:
    """Numbers of the tensors on `device` that are copied in one transfer: a large one, or small ones close together."""
    packed: list[int] = []
    packed_key, start, end = None, 0, 0
    for number, (place, source) in enumerate(zip(block.places, block.sources, strict=True)):
        if source.device != device or not source.numel():
            continue
        key = (source.dtype, place.dtype) if _can_be_packed(source, place) else None
        free_from = place.start if block.free_from is None else block.free_from[number]
        fits = (
            key is not None
            and key == packed_key
            and free_from <= end
            and place.start - end <= _MOST_GAP_BYTES
            and place.stop - start <= _MOST_PACKED_BYTES
        )
        if packed and not fits:
            yield packed
            packed = []
        if not packed:
            packed_key, start = key, place.start
        packed.append(number)
        end = place.stop
    if packed:
        yield packed


def _can_be_packed(source: torch.Tensor, place: Place) -> bool:
    return (
        place.stop - place.start < _PACKED_BELOW_BYTES
        and (source.dtype == place.dtype or {source.dtype, place.dtype} <= _CONVERTED)
        and place.dtype.itemsize in _AS_INTEGERS
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


def _pack(sources: Sequence[torch.Tensor], places: Sequence[Place], device: torch.device) -> torch.Tensor:
    """One tensor on the device that holds all sources as they lie in the buffer, gaps included."""
    dtype = places[0].dtype
    if sources[0].dtype == dtype:
        # As integers, since copies of floats change the bits of NaNs.
        dtype = _AS_INTEGERS[dtype.itemsize]
        sources = [source.view(dtype) for source in sources]
    # Lengths of sources and of the gaps between them, in turn.
    bounds = [bound - places[0].start for place in places for bound in (place.start, place.stop)]
    lengths = [(stop - start) // dtype.itemsize for start, stop in itertools.pairwise(bounds)]
    flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    torch._foreach_copy_(list(flat.split_with_sizes(lengths)[::2]), [source.view(-1) for source in sources])
    return flat


def check_on_devices(blocks: Sequence[Block]) -> None:
    """Refuse freed memory before anything is queued: to read it is an error that ends the use of the device."""
    for block in blocks:
        check_memories(_names_of(block), block.sources)
        for number, source in enumerate(block.sources):
            if source.is_cuda and not source.is_contiguous():
                check_memory(_names_of(block)[number], source)


def begin_host_copy(block: Block, threads: int) -> TensorCopy:
    """Let Rust threads begin with the tensors on the host that are copied as they are."""
    return block.buffer.image.fill(block.places.spans, block.sources, threads, READER)


def finish_host_copy(block: Block, copy: TensorCopy) -> None:
    """Finish `copy`, and let torch copy the tensors on the host that are converted or not contiguous."""
    copy.finish()
    pairs = []
    for number in copy.left:
        source = block.sources[number]
        if not source.is_cuda:
            check_memory(_names_of(block)[number], source)
            pairs.append((block.buffer.view(block.places[number]), source))
    for piece in _in_pieces(pairs):
        # One call for all of them releases the GIL.
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in piece], [source for _, source in piece])


def _names_of(block: Block) -> Sequence[str]:
    return block.names or [f"tensor {number}" for number in range(len(block.sources))]


def _in_pieces(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Runs of pairs of up to `_PIECE_BYTES`; a larger pair is cut along its first dimension."""
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
