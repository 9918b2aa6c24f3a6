"""The parts of a DTensor that each rank holds equal those of torch."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from tundish.checkpoint.placements import RankPart, check_placement, rank_parts_of, rectangles
from tundish.errors import InvalidInputError


def spread(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> Any:
    """The parts of a DTensor that are read, on a mesh of the ranks 10, 11, …; its local tensor is that of rank 10."""
    ranks = torch.arange(10, 10 + math.prod(mesh_shape)).view(mesh_shape)
    whole = torch.arange(math.prod(shape)).view(shape)
    local = cut(whole, mesh_shape, placements, (0,) * len(mesh_shape))
    mesh = SimpleNamespace(mesh=ranks, get_coordinate=lambda: [0] * len(mesh_shape))
    return SimpleNamespace(device_mesh=mesh, placements=placements, shape=torch.Size(shape), local=local)


def cut(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[Any, ...], at: tuple[int, ...]
) -> torch.Tensor:
    """The part of the rank at coordinate `at`, as torch cuts it."""
    for placement, size, place in zip(placements, mesh_shape, at, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(whole, size, with_padding=False)
            whole = pieces[place]
    return whole


def taken(whole: torch.Tensor, rank_part: RankPart) -> torch.Tensor:
    """The part of `whole` that its rank holds, as `rank_part` says."""
    local = torch.full(rank_part.shape, -1)
    for place, part in rectangles(rank_part.runs):
        local[part] = whole[place]
    return local


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4)),
    )
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@given(layouts())
def test_parts_equal_those_of_torch(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]],
) -> None:
    shape, mesh_shape, placements = layout
    whole = torch.arange(math.prod(shape)).view(shape)
    tensor = spread(shape, mesh_shape, placements)
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    for reader, home in enumerate(coordinates):
        rank_parts = {rank_part.rank: rank_part for rank_part in rank_parts_of(tensor, 10 + reader)}
        seen = torch.zeros(shape, dtype=torch.int64)
        for place, at in enumerate(coordinates):
            part = cut(whole, mesh_shape, placements, at)
            is_other_replica = any(
                placement.is_replicate() and here != there
                for placement, here, there in zip(placements, home, at, strict=True)
            )
            if is_other_replica or 0 in part.shape:
                assert 10 + place not in rank_parts
                continue
            assert taken(whole, rank_parts[10 + place]).equal(part)
            for where, _ in rectangles(rank_parts[10 + place].runs):
                seen[where] += 1
        assert seen.eq(1).all()


def test_even_parts_are_one_rectangle() -> None:
    both = spread((8, 6), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    for rank_part in rank_parts_of(both, 10):
        assert len(list(rectangles(rank_part.runs))) == 1


def test_ranks_outside_of_the_mesh_hold_nothing() -> None:
    assert rank_parts_of(spread((8,), (2,), (Shard(0),)), 12) == ()


def checked(tensor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tundish.checkpoint.placements.local_of", lambda given: given.local)
    check_placement("layer.w", tensor, 10)


def test_layouts_that_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for placements in ((Shard(0), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Replicate())):
        checked(spread((5, 7), (2, 3), placements), monkeypatch)
    # The first rank holds nothing of it.
    checked(spread((0, 7), (2, 3), (Shard(0), Shard(1))), monkeypatch)


def test_layouts_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ragged(Shard):
        pass

    with pytest.raises(InvalidInputError, match=r"'layer.w' .* Ragged is not known"):
        checked(spread((5, 7), (2,), (Ragged(0),)), monkeypatch)
    tensor = spread((5, 7), (2,), (Replicate(),))
    tensor.placements = (Partial(),)
    with pytest.raises(InvalidInputError, match=r"'layer.w' .* Partial is not known"):
        checked(tensor, monkeypatch)
    tensor = spread((5, 7), (2,), (Shard(0),))
    tensor.local = tensor.local[:2]
    with pytest.raises(InvalidInputError, match=r"rank 10 holds \(3, 7\).* local tensor has shape \(2, 7\)"):
        checked(tensor, monkeypatch)
