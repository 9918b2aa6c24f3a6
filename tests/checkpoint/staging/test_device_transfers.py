"""Which tensors of a device are copied in one transfer; here the device is the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import BufferCopy, copy_from_device, transfers
from tundish.checkpoint.write_plan import Place

_HOST = torch.device("cpu")

# The dtype of a tensor and the one it is saved as; its shape; whether it is a view, or elsewhere, or not of this copy;
# and the bytes before it.
_TENSOR = st.tuples(
    st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16),
            (torch.int64, torch.int64),
            (torch.bool, torch.bool),
            (torch.complex64, torch.complex64),
        ]
    ),
    st.sampled_from([(), (0, 3), (5,), (4, 7), (600, 500)]),
    st.sampled_from(["whole", "transposed", "conjugated", "elsewhere", "not chosen"]),
    st.sampled_from([0, 0, 3, 64, 1000, 6000]),
)


@pytest.fixture(scope="module", autouse=True)
def no_streams() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        yield


def _around(form: str, before: int = 0) -> list[Any]:
    """Of one kind, one of another form in the middle."""
    return [
        ((torch.float32, torch.float32), (5,), "whole" if number != 2 else form, before)
        for number in range(5)
    ]


def block_of(tensors: list[Any], *, is_free: bool = True) -> tuple[BufferCopy, list[Place]]:
    """A block of the chosen tensors, and the places of the others; `is_free`: gaps may be overwritten."""
    places, sources, others, end = [], [], [], 0
    for (dtype, saved_as), shape, form, before in tensors:
        values = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else None) * 5
        source = values.to(dtype)
        if form == "transposed" and source.dim() == 2:
            source = source.T
        if form == "conjugated" and dtype.is_complex:
            source = source.conj()
        if form == "elsewhere":
            source = source.to("meta")
        start = end + before
        start += -start % saved_as.itemsize
        end = start + source.numel() * saved_as.itemsize
        places.append(Place(start, end, saved_as, source.shape))
        sources.append(source)
        if form in ("elsewhere", "not chosen"):
            others.append(places[-1])
    block = BufferCopy(
        buffer=Buffer(end + 1),
        places=places,
        sources=sources,
        names=[f"tensor {number}" for number in range(len(sources))],
        are_gaps_free=is_free,
    )
    chosen = [number for number, (_, _, form, _) in enumerate(tensors) if form != "not chosen"]
    return block.chosen(chosen), others


@given(tensors=st.lists(_TENSOR, max_size=40), is_free=st.booleans())
@example(tensors=_around("elsewhere"), is_free=True)
@example(tensors=_around("not chosen"), is_free=True)
@example(tensors=_around("whole", before=64), is_free=False)
def test_each_tensor_is_copied_to_its_place_alone(tensors: list[Any], is_free: bool) -> None:
    block, others = block_of(tensors, is_free=is_free)
    block.buffer.bytes.fill_(1)
    copy_from_device(_HOST, block, None)  # type: ignore[arg-type]
    for place in others:
        assert block.buffer.bytes[place.start : place.stop].eq(1).all()
    for place, source in zip(block.places, block.sources, strict=True):
        if not source.is_meta:
            assert torch.equal(block.buffer.view(place), source.resolve_conj().to(place.dtype))
            block.buffer.bytes[place.start : place.stop] = 1
    assert is_free or block.buffer.bytes.eq(1).all()
    block.buffer.release()


def test_small_tensors_share_bounded_transfers() -> None:
    small = ((torch.float32, torch.bfloat16), (600, 500), "whole", 1000)
    large = ((torch.float32, torch.bfloat16), (1200, 500), "whole", 0)
    other = ((torch.float32, torch.float32), (5,), "whole", 0)
    block, _ = block_of([small] * 30 + [large] + [small] * 2 + [other] * 3)
    found = list(transfers(block, _HOST))
    assert found == [[*range(27)], [*range(27, 30)], [30], [31, 32], [33, 34, 35]]
    block.buffer.release()
