"""Copies tensors into one buffer, from a CUDA device and on the host.

Invariants:
    - Bits that are not converted are copied as they are.
    - A copy changes no byte that is used outside of its tensor's place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tundish._native import TensorCopy
from tundish.checkpoint.staging.buffers import Buffer, Place
from tundish.checkpoint.tensors import INSPECTOR, check_memory
from tundish.tensor_bytes import INTEGER_DTYPES

__all__ = [
    "BufferCopy",
    "begin_host_copy",
    "copy_from_device",
    "finish_host_copy",
    "transfers",
]

# Smaller tensors are packed on the device: one transfer of many costs less than a transfer of each.
_PACKED_BELOW_BYTES = 1 << 20
_MOST_PACKED_BYTES = 16 << 20
# Most bytes between two packed tensors; they are transferred too.
_MOST_GAP_BYTES = 4096
# Every device converts these into each other.
_CONVERTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# Torch copies this much between two checks for signals: some ten milliseconds.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCopy:
    """Local tensors and their places in one buffer.

    Attributes:
        buffer: the target.
        places: the place of each tensor, sorted and without overlap.
        sources: the tensors, on any device.
        names: of the tensors, for messages.
        are_gaps_free: whether bytes between the places may be overwritten.
    """

    buffer: Buffer
    places: Sequence[Place]
    sources: Sequence[torch.Tensor]
    names: Sequence[str]
    are_gaps_free: bool = False

    def chosen(self, numbers: Sequence[int]) -> BufferCopy:
        """The block of some of the tensors, by number, in order."""
        if len(numbers) == len(self.sources):
            return self
        return BufferCopy(
            buffer=self.buffer,
            places=[self.places[number] for number in numbers],
            sources=[self.sources[number] for number in numbers],
            names=[self.names[number] for number in numbers],
        )


def copy_from_device(device: torch.device, block: BufferCopy, side: torch.cuda.Stream) -> None:
    """Queue the copies of tensors on `device` on the current stream, which is `side`."""
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


def transfers(block: BufferCopy, device: torch.device) -> Iterator[list[int]]:
    """The numbers of the tensors of each transfer from `device`: a large one, or small ones that lie close together."""
    packed: list[int] = []
    packed_key, start, end = None, 0, 0
    for number, (place, source) in enumerate(zip(block.places, block.sources, strict=True)):
        if not source.numel():
            continue
        is_here = source.device == device
        key = (source.dtype, place.dtype) if is_here and _can_be_packed(source, place) else None
        gap = place.start - end
        fits = (
            key is not None
            and key == packed_key
            and gap <= (_MOST_GAP_BYTES if block.are_gaps_free else 0)
            and place.stop - start <= _MOST_PACKED_BYTES
        )
        if packed and not fits:
            yield packed
            packed = []
        if not is_here:
            continue
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
        and place.dtype.itemsize in INTEGER_DTYPES
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


def _pack(sources: Sequence[torch.Tensor], places: Sequence[Place], device: torch.device) -> torch.Tensor:
    """One tensor on the device that holds all sources as they lie in the buffer, gaps included."""
    dtype = places[0].dtype
    if sources[0].dtype == dtype:
        # As integers, since copies of floats change the bits of NaNs.
        dtype = INTEGER_DTYPES[dtype.itemsize]
        sources = [source.view(dtype) for source in sources]
    # Lengths of sources and of the gaps between them, in turn.
    bounds = [bound - places[0].start for place in places for bound in (place.start, place.stop)]
    lengths = [(stop - start) // dtype.itemsize for start, stop in itertools.pairwise(bounds)]
    flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    torch._foreach_copy_(list(flat.split_with_sizes(lengths)[::2]), [source.view(-1) for source in sources])
    return flat


def begin_host_copy(block: BufferCopy, threads: int) -> TensorCopy:
    """Let Rust threads begin with the tensors on the host that are copied as they are."""
    return block.buffer.image.begin_copy(block.places, block.sources, threads, INSPECTOR)


def finish_host_copy(block: BufferCopy, copy: TensorCopy) -> None:
    """Finish `copy`, and let torch copy the tensors on the host that are converted or not contiguous."""
    copy.finish()
    for number in copy.left:
        source = block.sources[number]
        if not source.is_cuda:
            check_memory(block.names[number], source)
            for target, part in _cut(block.buffer.view(block.places[number]), source.detach()):
                target.copy_(part)


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of parts along the first dimension, of some `_PIECE_BYTES` each."""
    if target.nbytes <= _PIECE_BYTES:
        return iter([(target, source)])
    rows = max(1, len(target) * _PIECE_BYTES // target.nbytes)
    return zip(torch.split(target, rows), torch.split(source, rows), strict=True)
