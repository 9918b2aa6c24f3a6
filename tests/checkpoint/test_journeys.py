"""What of a device is copied in one transfer: here the way is gone in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tundish.checkpoint import staging
from tundish.checkpoint.buffers import Buffer, Place, Places

_HOST = torch.device("cpu")

# From the dtype of a tensor to the one it is saved as, its shape, whether it is a view, or elsewhere, and what lies
# before it.
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
    st.sampled_from(["whole", "transposed", "conjugated", "elsewhere"]),
    st.sampled_from([0, 0, 3, 64, 1000, 6000]),
)


@pytest.fixture(scope="module", autouse=True)
def no_streams() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        yield


def block_of(tensors: list[Any]) -> staging.Block:
    places, sources, end = [], [], 0
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
    return staging.Block(buffer=Buffer(end + 1), places=Places(places), sources=sources)


@given(tensors=st.lists(_TENSOR, max_size=40))
@example(
    tensors=[
        ((torch.float32, torch.float32), (5,), form, 0)
        for form in ("whole", "whole", "elsewhere", "whole", "whole")
    ]
)
@settings(max_examples=150)
def test_everything_comes_to_its_place_whatever_it_travels_with(tensors: list[Any]) -> None:
    block = block_of(tensors)
    block.buffer.bytes.fill_(1)
    staging._copy_from(_HOST, block, None)  # type: ignore[arg-type]
    for place, source in zip(block.places, block.sources, strict=True):
        if source.is_meta:
            assert block.buffer.bytes[place.start : place.stop].eq(1).all()
        else:
            assert torch.equal(block.buffer.view(place), source.resolve_conj().to(place.dtype))
    block.buffer.release()


def test_small_ones_of_a_kind_travel_together_and_no_more_than_so_much() -> None:
    small = ((torch.float32, torch.bfloat16), (600, 500), "whole", 1000)
    large = ((torch.float32, torch.bfloat16), (1200, 500), "whole", 0)
    other = ((torch.float32, torch.float32), (5,), "whole", 0)
    block = block_of([small] * 30 + [large] + [small] * 2 + [other] * 3)
    journeys = list(staging._journeys(block, _HOST))
    assert journeys == [
        [*range(27)],
        [*range(27, 30)],
        [30],
        [31, 32],
        [33, 34, 35],
    ]
    block.buffer.release()
