"""Rooms: tensors of the caller's that are received into.

What always holds: each has memory for all that comes, every element a place of its own, and no two have a place in
common, so that whatever comes into one stays as it came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidInputError, InvalidTypeError, counted
from tundish.rtensor.memory import extent, is_whole

__all__ = ["rooms_of"]

# What numpy may try to find a place that two have in common: views of one tensor take a few tries, and all of these
# take hundredths of a second. The annotations of numpy know of no such bound.
_MOST_TRIES: Any = 10_000


def rooms_of(out: Any, handles: list[RTensor]) -> list[Tensor]:
    """The tensors of `out`, one for each handle. Raises `InvalidTypeError` and `InvalidInputError`."""
    if not isinstance(out, Iterable):
        raise InvalidTypeError(f"out is a {type(out).__qualname__}: give a tensor, or a list of tensors")
    rooms = [out] if isinstance(out, Tensor) else list(out)
    if len(rooms) != len(handles):
        raise InvalidInputError(
            f"`out` has {counted(len(rooms), 'tensor')}, and there are {counted(len(handles), 'handle')}"
        )
    for number, (handle, room) in enumerate(zip(handles, rooms, strict=True)):
        if not isinstance(room, Tensor):
            raise InvalidTypeError(f"out[{number}] is a {type(room).__qualname__}, not a tensor")
        if room.layout is not torch.strided or room.is_nested or room.is_meta:
            raise InvalidTypeError(
                f"out[{number}] is not dense or has no memory: no bytes can be received into it"
            )
        if room.dtype != handle.dtype or room.shape != handle.shape:
            raise InvalidInputError(
                f"out[{number}] is {room.dtype} of shape {tuple(room.shape)}, and its handle is "
                f"{handle.dtype} of shape {tuple(handle.shape)}"
            )
        if not is_whole(room):
            raise InvalidInputError(
                f"out[{number}] has no room for its values: its storage was freed or cut, or it never had any"
            )
        if room.requires_grad:
            raise InvalidInputError(f"out[{number}] requires a gradient: give its detach()")
        if _overlaps_itself(room):
            raise InvalidInputError(
                f"out[{number}] overlaps itself: of its elements, by strides {room.stride()}, several lie in one place "
                "or may do so; give a tensor of which each has its own"
            )
    _check_apart(rooms)
    return rooms


def _overlaps_itself(room: Tensor) -> bool:
    """Whether elements may lie in one place: along a dimension, a step is no longer than all the smaller ones reach."""
    if room.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(room.stride(), room.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += (length - 1) * stride
    return False


class _Place(NamedTuple):
    """Where a room lies, all in bytes, by the dimensions along which it goes on.

    An array of it is never looked into: the memory may be a device's.
    """

    number: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def reach(self, turn: int = 0) -> int:
        """From the first byte to the last; within one turn, without the steps of whole turns."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.itemsize + sum((length - 1) * by for length, by in steps if not turn or by % turn)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self.start, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }


def _place_of(number: int, room: Tensor) -> _Place:
    steps = [step for step in zip(room.shape, room.stride(), strict=True) if step[0] > 1]
    strides = tuple(stride * room.itemsize for _, stride in steps)
    return _Place(number, room.data_ptr(), tuple(length for length, _ in steps), strides, room.itemsize)


def _check_apart(rooms: list[Tensor]) -> None:
    """Raises `InvalidInputError` where two of these have memory in common."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, room in enumerate(rooms):
        if room.numel():
            start = room.data_ptr()
            stretch = start, start + extent(room) * room.itemsize, number
            by_device.setdefault(room.device, []).append(stretch)
    for stretches in by_device.values():
        for group in _touching(stretches):
            for one, other in _suspects([_place_of(number, rooms[number]) for number in group]):
                if _share_memory(one, other):
                    first, second = sorted((one.number, other.number))
                    raise InvalidInputError(
                        f"out[{first}] and out[{second}] share memory: what comes into one would be in both; give "
                        "tensors that lie apart"
                    )


def _touching(stretches: Iterable[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Of stretches, given by start, stop and number, the numbers of those that reach into each other: each group."""
    group: list[int] = []
    end = 0
    for start, stop, number in sorted(stretches):
        if start >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(number)
        end = max(end, stop)
    if len(group) > 1:
        yield group


def _suspects(places: list[_Place]) -> Iterator[tuple[_Place, _Place]]:
    """The pairs that may have memory in common.

    Columns of one matrix all reach through each other, and of thousands there are millions of pairs: they lie apart
    within a row, which is looked at once for all of them.
    """
    lowest = min(place.start for place in places)
    turn = max((by for place in places for by in place.strides), default=1)
    turned = [
        ((place.start - lowest) % turn, (place.start - lowest) % turn + place.reach(turn), at)
        for at, place in enumerate(places)
    ]
    groups: Iterable[list[int]] = [list(range(len(places)))]
    if all(stop <= turn for _, stop, _ in turned):
        groups = _touching(turned)
    for group in groups:
        some = sorted((places[at] for at in group), key=lambda place: place.start)
        for at, one in enumerate(some):
            stop = one.start + one.reach()
            for other in itertools.islice(some, at + 1, None):
                if other.start >= stop:
                    break
                yield one, other


def _share_memory(one: _Place, other: _Place) -> bool:
    """Whether some byte is in both; where that is too hard to tell, they are taken to share one."""
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=_MOST_TRIES)
    except np.exceptions.TooHardError:
        return True
