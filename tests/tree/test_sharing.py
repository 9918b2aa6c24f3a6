"""Objects and memory that are named twice are carried once, and come back shared."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.tree.comparison import assert_same
from support.tree.echo_process import EchoProcess

import tundish as td


class Unknown:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@dataclasses.dataclass
class Known:
    inside: Any


def trip(obj: Any, echo: EchoProcess) -> Any:
    back = echo.round_trip(obj)
    assert_same(obj, back)
    return back


def carried(obj: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in td.tree.flatten(obj)[0])


def test_a_tensor_named_twice_is_carried_once(echo: EchoProcess) -> None:
    one = torch.arange(1000)
    obj = {"a": one, "b": [one, {"c": one}], "d": [one, one, one, one, one]}
    assert carried(obj) == 8000
    back = trip(obj, echo)
    back["a"][0] = 7
    assert back["b"][1]["c"] is back["a"] and back["d"][4][0] == 7


@pytest.mark.parametrize("other", [torch.float32, torch.int32, torch.uint8, torch.bfloat16])
def test_views_of_one_storage_are_carried_once(other: torch.dtype, echo: EchoProcess) -> None:
    base = torch.arange(24, dtype=torch.float32)
    obj = {
        "whole": base,
        "part": base[5:9],
        "across": base.view(4, 6).t(),
        "columns": base.view(4, 6)[:, 1::2],
        "same": base.detach(),
        "bytes": base.view(other),
        "row": base[20:].view(other),
    }
    assert carried(obj) == 96
    back = trip(obj, echo)
    back["whole"].fill_(1.0)
    for name, tensor in back.items():
        assert torch.equal(
            tensor, torch.ones(24).view(other)[: tensor.numel()].view_as(tensor)
        ) or tensor.dtype == (torch.float32), name
        assert tensor.dtype != torch.float32 or bool((tensor == 1).all()), name


def test_parts_that_overlap_without_a_whole(echo: EchoProcess) -> None:
    base = torch.arange(1_000_000)
    obj = [base[1001:1005], base[1003:1009]]
    assert carried(obj) <= 8 * 10
    back = trip(obj, echo)
    back[0][2] = -1
    assert back[1][0] == -1


def test_a_wide_dtype_begins_where_it_may_although_a_narrow_one_is_first(echo: EchoProcess) -> None:
    base = torch.arange(64, dtype=torch.uint8)
    obj = [base[21:41], base.view(torch.int64)[4:6], base.view(torch.complex64)[3:4]]
    back = trip(obj, echo)
    back[1].zero_()
    assert back[0].tolist() == [*range(21, 32), *[0] * 9]


def test_parts_beside_each_other_do_not_carry_what_is_between(echo: EchoProcess) -> None:
    base = torch.arange(1_000_000)
    obj = [base[10:20], base[999_000:999_010], *base[100:108].unbind(), base[50:50], base[0:5]]
    assert carried(obj) == 8 * 33
    trip(obj, echo)


def test_gradients_do_not_spread_over_shared_memory(echo: EchoProcess) -> None:
    base = torch.ones(3)
    wants = base.detach().requires_grad_()
    back = trip({"plain": base, "wants": wants, "parameter": torch.nn.Parameter(base)}, echo)
    assert not back["plain"].requires_grad
    back["plain"].fill_(2.0)
    assert back["wants"].tolist() == back["parameter"].tolist() == [2.0, 2.0, 2.0]


def test_containers_arrays_and_unknown_objects_are_shared_too(echo: EchoProcess) -> None:
    inner, array, numbers = [torch.ones(2)], np.arange(3), list(range(100))
    parameter, date = torch.nn.Parameter(torch.ones(2)), Tagged(torch.ones(2))
    obj = {"a": [inner, array, numbers, parameter, date], "b": (inner, array, numbers, parameter, date)}
    back = trip(obj, echo)
    assert all(one is other for one, other in zip(back["a"], back["b"], strict=True))


def test_a_container_is_one_inside_other_objects_and_outside(echo: EchoProcess) -> None:
    inner = {"deep": [torch.ones(2)], "array": np.arange(3)}
    obj = [inner, Unknown(inner), Unknown([inner]), inner, Known(inner)]
    assert carried(obj) == 32
    back = echo.round_trip(obj)
    outside, first, second, again, known = back
    assert outside is again is known.inside is first.inside is second.inside[0]
    assert_same(obj, back)


def test_a_tensor_in_an_unknown_object_is_shared_with_those_outside(echo: EchoProcess) -> None:
    one = torch.ones(1000)
    obj = {
        "out": one,
        "in": Tagged(one),
        "part": Tagged(one[:10]),
        "parameter": Tagged(torch.nn.Parameter(one)),
    }
    assert carried(obj) == 4000
    back = trip(obj, echo)
    back["out"][0] = 5
    assert back["in"].tensor is back["out"] and back["part"].tensor[0] == back["parameter"].tensor[0] == 5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).requires_grad_(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(0, 3).requires_grad_(),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["gradient", "parameter", "empty", "sparse", "conjugate"],
)
def test_more_than_a_plain_tensor_in_an_unknown_object_and_outside(
    tensor: torch.Tensor, echo: EchoProcess
) -> None:
    """The same object inside and outside; equal ones that are not the same stay two."""
    other = tensor.clone().detach().requires_grad_(tensor.requires_grad)
    back = trip([Unknown(tensor), tensor, other, Unknown(other)], echo)
    assert back[0].inside is back[1]
    assert back[3].inside is back[2]
    assert back[1] is not back[2]
    back = trip([tensor, Unknown([tensor, other])], echo)
    assert back[0] is back[1].inside[0]
    assert back[0] is not back[1].inside[1]


@pytest.mark.parametrize("dtype", ["f4", ">f4", "U3", [("a", "i4")]])
@pytest.mark.parametrize("is_writable", [True, False])
def test_an_array_in_an_unknown_object_and_outside(dtype: Any, is_writable: bool, echo: EchoProcess) -> None:
    array = np.zeros(100_000, dtype)
    array.flags.writeable = is_writable
    obj = [Unknown({"deep": array}), array]
    assert carried(obj) == array.nbytes
    assert len(pickle.dumps(td.tree.flatten(obj)[1])) < 2000
    back = trip(obj, echo)
    assert back[0].inside["deep"] is back[1]


def test_an_array_and_a_tensor_of_its_memory(echo: EchoProcess) -> None:
    array = np.arange(5)
    obj = [array, torch.from_numpy(array)]
    assert carried(obj) == 40
    back = trip(obj, echo)
    back[1][0] = 9
    assert back[0][0] == 9


@pytest.mark.parametrize(
    "parts",
    [
        lambda base: [base[:60], base[40:]],
        lambda base: [base[40:], base[:0], base[:60]],
        lambda base: [base[:40], base[60:], base[30:70]],
        lambda base: [base[:60], torch.from_numpy(base)[40:]],
        lambda base: [base[20:90], base[3:].view(np.uint8)[1:100], base[10:40].view(np.float64)],
        # The first two begin in the bytes that are carried before the wide one, for its alignment.
        lambda base: [base[:2].view(np.uint8)[:7], base[3:].view(np.uint8), base[4:8].view(np.complex64)],
    ],
)
def test_arrays_that_overlap_in_part(parts: Callable[[Any], list[Any]], echo: EchoProcess) -> None:
    """None of them has a storage in which all of them lie."""
    obj = parts(np.arange(100, dtype=np.float32))
    tensors, _ = td.tree.flatten(obj)
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.numel())
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    assert carried(obj) <= 400
    back = trip(obj, echo)
    for one, there in itertools.combinations(range(len(obj)), 2):
        assert np.shares_memory(back[one], back[there]) == np.shares_memory(obj[one], obj[there])


def test_misaligned_arrays_are_copied(echo: EchoProcess) -> None:
    raw = torch.arange(64, dtype=torch.uint8).numpy()
    trip([raw[:40], raw[1:33].view(np.float32), raw[8:16].view(np.int64)], echo)


@pytest.mark.parametrize("gap", [1, 2, 4, 8])
def test_tensors_to_put_together_may_lie_anywhere(gap: int) -> None:
    rows = torch.arange(8, dtype=torch.float64)
    tensors, schema = td.tree.flatten([rows.view(torch.uint8), rows[2:], rows.view(torch.int16)])
    assert [tensor.dtype for tensor in tensors] == [torch.uint8]
    packed = [torch.cat([torch.zeros(gap, dtype=torch.uint8), tensor])[gap:] for tensor in tensors]
    octets, values, shorts = td.tree.unflatten(schema, packed)
    assert torch.equal(octets, rows.view(torch.uint8)) and torch.equal(values, rows[2:])
    assert torch.equal(shorts, rows.view(torch.int16))
    values.fill_(0.0)
    assert octets[16:].count_nonzero() == 0 == shorts[8:].count_nonzero()


def test_views_of_a_tensor_with_gaps_share_its_values() -> None:
    rows = torch.arange(8.0)
    tensors, schema = td.tree.flatten([rows, rows[2:]])
    spread = torch.stack([tensors[0], torch.zeros(8)], dim=1)[:, 0]
    first, second = td.tree.unflatten(schema, [spread])
    second.fill_(-1.0)
    assert first.tolist() == [0.0, 1.0, *[-1.0] * 6]


def test_writing_to_one_tensor_of_a_buffer_is_no_change_of_another() -> None:
    _, schema = td.tree.flatten({"weights": torch.ones(3), "labels": torch.ones(3)})
    buffer = torch.zeros(schema.layout.total, dtype=torch.uint8)
    back = td.tree.unflatten(schema, schema.layout.tensors_in(buffer))
    wants = torch.ones(3, requires_grad=True)
    loss = (wants * back["weights"]).sum()
    back["labels"].fill_(-100.0)
    loss.backward()


class Tagged:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
