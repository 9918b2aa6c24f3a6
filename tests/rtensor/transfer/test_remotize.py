"""Stores tensors and gets them back, in one process."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tundish import rtensor
from tundish.errors import InvalidInputError, InvalidTypeError, ShardGoneError, TensorStoreFullError
from tundish.rtensor.tensor_store import default_store

pytestmark = pytest.mark.usefixtures("local")


def test_a_nested_batch_goes_and_comes_back() -> None:
    array = np.arange(3)
    batch = {
        "ids": torch.arange(6).view(2, 3),
        "more": [torch.rand(2, 2), ("text", None, 3, 2.5, torch.tensor(True))],
        "array": array,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    handles = rtensor.remotize(batch)
    assert isinstance(handles["ids"], rtensor.RTensor) and handles["more"][1][:4] == ("text", None, 3, 2.5)
    assert handles["array"] is array
    back = rtensor.localize(handles)
    assert torch.equal(back["ids"], batch["ids"]) and torch.equal(back["more"][0], batch["more"][0])
    assert back["more"][1][4].item() is True
    assert type(back["parameter"]) is torch.Tensor and not back["parameter"].requires_grad
    assert rtensor.localize(["nothing", 1]) == ["nothing", 1]
    assert rtensor.remotize({"nothing": 1}) == {"nothing": 1}


@pytest.mark.parametrize("torch_tells", [True, False], ids=["torch 2.10", "torch before"])
def test_every_dtype_comes_back_bit_for_bit(torch_tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch_tells:
        monkeypatch.setattr("tundish.rtensor.dense_tensors.DLPACK_EXCHANGE", None)
    bits = torch.arange(256, dtype=torch.uint8).repeat(2).view(4, 128)
    seen = set()
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            tensor = bits % 2 == 0 if dtype is torch.bool else bits.view(dtype)
            handle = rtensor.remotize(tensor)
        except (RuntimeError, InvalidTypeError):
            # A type that nothing can be viewed as, such as a quantized one.
            continue
        back = handle.to_local()
        assert back.dtype is dtype and back.shape == tensor.shape
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
        seen.add(str(dtype).removeprefix("torch."))
    assert seen >= {
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "uint16",
        "bool",
        "float64",
        "int8",
    }


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1, 1, 1, 1), (7,)])
def test_every_shape_comes_back(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    handle = rtensor.remotize(tensor)
    assert handle.shape == shape
    back = handle.to_local()
    assert torch.equal(back, tensor)
    back.add_(1)


def test_values_are_stored_not_their_base() -> None:
    base = torch.rand(1000, 1000)
    views = [base[3, 5:9], base.t()[:2], base[::500], base[:1, :1].expand(2, 3)]
    handles = rtensor.remotize(views)
    assert rtensor.storage_stats()["total_bytes"] < 20_000
    for view, back in zip(views, rtensor.localize(handles), strict=True):
        assert torch.equal(back, view)
    lazy = torch.complex(torch.rand(3), torch.rand(3))
    conj, neg = rtensor.localize(rtensor.remotize([lazy.conj(), lazy.conj().imag]))
    assert torch.equal(conj, lazy.conj()) and torch.equal(neg, -lazy.imag)
    negative = torch._neg_view(torch.ones(3))
    assert rtensor.localize(rtensor.remotize(negative)).tolist() == [-1.0] * 3


def test_later_changes_reach_neither_the_shard_nor_the_tensor() -> None:
    tensor = torch.zeros(4)
    handle = rtensor.remotize(tensor)
    tensor.fill_(1)
    first = rtensor.localize(handle)
    assert first.tolist() == [0.0] * 4
    first.fill_(2)
    assert rtensor.localize(handle).tolist() == [0.0] * 4


def test_the_same_tensor_is_stored_once_and_comes_back_as_one() -> None:
    tensor = torch.rand(3)
    handles = rtensor.remotize({"a": tensor, "b": [tensor, tensor.detach()], "c": tensor.view(1, 3)})
    assert rtensor.storage_stats()["num_tensors"] == 2
    assert handles["a"] == handles["b"][0] == handles["b"][1] != handles["c"]
    back = rtensor.localize(handles)
    assert back["a"] is back["b"][0]
    again = rtensor.remotize([torch.ones(2) for _ in range(50)])
    assert len(set(again)) == 50
    as_integers = rtensor.localize(rtensor.remotize([tensor, tensor.view(torch.int32)]))[1]
    assert as_integers.dtype is torch.int32


@pytest.mark.parametrize("columns", [3, 100_000])
def test_rows_of_a_handle_can_be_fetched(columns: int) -> None:
    tensor = torch.rand(10, columns)
    handle = rtensor.remotize(tensor)
    parts = rtensor.localize([handle[2:5], handle[9:], handle[4:4], handle[2:9][1:3]])
    for part, meant in zip(parts, (tensor[2:5], tensor[9:], tensor[4:4], tensor[3:5]), strict=True):
        assert torch.equal(part, meant)
        part.fill_(0)
    assert torch.equal(handle.to_local(), tensor)
    # Whichever come together: nobody writes into another one's.
    parts = rtensor.localize([handle[:], handle[3:5], handle, handle[4:9], handle[2:5]])
    meant = [tensor, tensor[3:5], tensor, tensor[4:9], tensor[2:5]]
    for part, expected in zip(parts, meant, strict=True):
        assert torch.equal(part, expected)
        part.fill_(0)


def test_into_tensors_of_the_callers() -> None:
    tensor = torch.rand(4, 3)
    handle = rtensor.remotize(tensor)
    room = torch.empty(4, 3)
    assert rtensor.localize(handle, out=room) is room and torch.equal(room, tensor)
    gaps = torch.zeros(4, 6)
    back = rtensor.localize({"a": handle, "b": handle[1:2]}, out=[gaps[:, ::2], torch.empty(1, 3)])
    assert torch.equal(gaps[:, ::2], tensor) and torch.equal(back["b"], tensor[1:2])
    assert not gaps[:, 1::2].any()
    # torch negates this view only when it is read.
    negative = torch._neg_view(torch.zeros(4, 3))
    assert torch.equal(rtensor.localize(handle, out=negative), tensor)
    for wrong, why in (
        (torch.empty(4, 4), "of shape"),
        (torch.empty(4, 3, dtype=torch.float64), "torch.float64"),
        (torch.empty(4, 3, requires_grad=True), "requires a gradient"),
        ([], "1 handle"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            rtensor.localize(handle, out=wrong)
    both = torch.zeros(6, 3)
    halves = rtensor.localize([handle[:1], handle[3:]], out=[both[:1], both[1:2]])
    assert torch.equal(torch.cat(halves), tensor[::3])


def test_columns_of_a_tensor_are_output_buffers() -> None:
    table = torch.zeros(60, 40)
    values = torch.rand(60, 40)
    rtensor.localize([rtensor.remotize(column) for column in values.unbind(1)], out=table.unbind(1))
    assert torch.equal(table, values)


def test_wrapper_subclasses_are_refused_as_output_buffers() -> None:
    """Its own memory is nowhere: what was received into it ended the process."""
    room = TwoTensor(torch.zeros(3), torch.zeros(3))
    with pytest.raises(InvalidInputError, match=r"out\[0\] has no memory"):
        rtensor.localize(rtensor.remotize(torch.ones(3)), out=room)


@pytest.mark.usefixtures("local")
def test_autograd_notices_that_an_output_buffer_changed() -> None:
    room, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    result = (room * weight).sum()
    rtensor.localize(rtensor.remotize(torch.arange(3.0)), out=room)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "make it dense first"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.empty(2, device="meta"), "no values"),
        (lambda: torch.ones(2, dtype=torch.int8).view(torch.qint8), r"torch\.qint8, which cannot be stored"),
        (fake, "no values"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
def test_tensors_that_are_more_than_values_are_refused_with_their_path(make: Any, why: str) -> None:
    with pytest.raises(InvalidTypeError, match=rf'obj\["a"\]\[1\] is a .*{why}|obj\["a"\]\[1\] is a {why}'):
        rtensor.remotize({"a": [1, make()]})
    assert rtensor.storage_stats()["num_tensors"] == 0


def test_a_tensor_of_a_dtype_that_others_cannot_have_is_refused_with_its_name() -> None:
    with pytest.raises(
        InvalidTypeError, match=r"to be stored as some\.name is a tensor of torch\.quint8, which"
    ):
        rtensor.store("some.name", torch.ones(2, dtype=torch.uint8).view(torch.quint8))
    assert rtensor.storage_stats()["num_tensors"] == 0


def cut(size: int, *, view: bool = False) -> torch.Tensor:
    """As wrappers leave a parameter that they have sharded."""
    tensor = torch.ones(1000, 40)
    shown = tensor[:, ::2] if view else tensor
    tensor.untyped_storage().resize_(size)
    return shown


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize("view", [False, True])
def test_memory_that_was_freed_is_neither_read_nor_written(size: int, view: bool) -> None:
    handle = rtensor.remotize(torch.ones(1000, 20 if view else 40))
    for stored in ([cut(size, view=view)], {"attention_mask": cut(size, view=view)}):
        with pytest.raises(InvalidInputError, match="freed or cut"):
            rtensor.remotize(stored)
    with pytest.raises(InvalidInputError, match="freed or cut"):
        rtensor.store("name", cut(size, view=view))
    with pytest.raises(InvalidInputError, match=r"out\[0\] has no memory"):
        rtensor.localize(handle, out=cut(size, view=view))


def test_zero_tensors_without_memory_are_stored() -> None:
    zeros = torch._efficientzerotensor((3, 2))
    assert rtensor.localize(rtensor.remotize(zeros)).tolist() == [[0, 0]] * 3
    with pytest.raises(InvalidInputError, match=r"out\[0\] has no memory"):
        rtensor.localize(rtensor.remotize(torch.ones(3, 2)), out=zeros)


def test_tensors_inside_a_transformation_are_refused() -> None:
    def sum_of(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidTypeError, match=r"torch\.func"):
            rtensor.remotize([tensor])
        return tensor.sum()

    assert torch.func.vmap(sum_of)(torch.ones(2, 3)).tolist() == [3, 3]
    assert torch.func.grad(sum_of)(torch.ones(3)).tolist() == [1, 1, 1]


def test_named_shards() -> None:
    handle = rtensor.store("weights:0", torch.arange(5))
    assert handle.shard_id == "weights:0"
    assert rtensor.fetch("weights:0").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidInputError, match="exists already"):
        rtensor.store("weights:0", torch.zeros(1))
    rtensor.store("more", torch.zeros(2, 3))
    stats = rtensor.storage_stats()
    assert (stats["num_tensors"], stats["unclaimed_entries"]) == (2, 2)
    assert rtensor.remove(["weights:0", "weights:0", "unknown"]) == 1
    assert rtensor.storage_stats()["num_tensors"] == 1
    with pytest.raises(ShardGoneError, match="no such shards: weights:0"):
        handle.to_local()
    with pytest.raises(ShardGoneError, match="no such shards"):
        rtensor.fetch("unknown")
    assert rtensor.clear_fetch_buffer("unknown") == 0
    cleared = rtensor.clear_node()
    assert cleared["cleared_count"] == cleared["num_tensors"] == 1 and cleared["total_bytes"] >= 24
    assert rtensor.storage_stats()["num_tensors"] == 0


def test_a_step_removes_its_claims_only() -> None:
    this, following = rtensor.remotize([torch.rand(8), torch.rand(8)])
    with rtensor.step(claim=this) as step:
        assert rtensor.localize(this).numel() == 8
        assert rtensor.storage_stats()["unclaimed_entries"] == 1
    with pytest.raises(ShardGoneError, match="drained or removed"):
        rtensor.localize(this)
    assert rtensor.localize(following).numel() == 8
    with rtensor.step(claim=[following]) as second:
        assert second.number > step.number
    assert rtensor.storage_stats()["num_tensors"] == 0


def test_a_step_that_fails_drains_too() -> None:
    handle = rtensor.remotize(torch.rand(8))
    with pytest.raises(ZeroDivisionError), rtensor.step(claim=handle):
        1 / 0  # noqa: B018
    assert rtensor.storage_stats()["num_tensors"] == 0


def test_nested_steps_and_claims_of_missing_shards_are_refused() -> None:
    handle = rtensor.remotize(torch.rand(8))
    with rtensor.step(), pytest.raises(InvalidInputError, match="in a step already"), rtensor.step():
        pass
    other = rtensor.RTensor(rtensor.TensorShardInfo("unknown", "local"), torch.empty(1, device="meta"))
    with pytest.raises(ShardGoneError, match="unknown"), rtensor.step(claim=[other]):
        pass
    assert rtensor.localize(handle).numel() == 8


def test_kept_shards_outlive_a_step_of_the_process() -> None:
    kept, drained = rtensor.remotize([torch.rand(8), torch.rand(8)])
    with rtensor.step(claim=[kept, drained]):
        assert rtensor.keep({"carry": kept}) == 1
    assert rtensor.localize(kept).numel() == 8
    with pytest.raises(ShardGoneError):
        rtensor.localize(drained)
    with rtensor.step(claim=kept):
        pass
    assert rtensor.storage_stats()["num_tensors"] == 0


def test_tensors_that_outlive_their_shards_are_escaped_and_seen(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.rand(1 << 20)
    handle = rtensor.remotize(tensor)
    with rtensor.step(claim=handle):
        held = rtensor.localize(handle)
    assert "escaped" in caplog.text and str(tensor.nbytes) in caplog.text
    assert rtensor.storage_stats()["memory"]["escaped_bytes"] >= tensor.nbytes
    # Its memory is not used again before it is gone.
    rtensor.remotize(torch.zeros(1 << 20))
    assert torch.equal(held, tensor)
    del held
    gc.collect()
    assert rtensor.storage_stats()["memory"]["escaped_bytes"] == 0


def test_backends_are_refused_that_are_none() -> None:
    for wrong in (rtensor.LocalBackend, object(), "http"):
        with pytest.raises(InvalidTypeError, match="give an instance"):
            rtensor.set_backend(wrong)  # type: ignore[arg-type]
    far = rtensor.RTensor(rtensor.TensorShardInfo("a", "10.0.0.1:80"), torch.empty(1, device="meta"))
    with pytest.raises(InvalidInputError, match="LocalBackend reads this process only"):
        far.to_local()


def test_at_the_limit_a_store_waits_and_then_raises() -> None:
    stats = rtensor.storage_stats()["memory"]
    default_store.shards.set_limits(1 << 20, 1 << 20)
    try:
        with pytest.raises(TensorStoreFullError, match="never fit"):
            rtensor.remotize(torch.zeros(1 << 20))
        held = rtensor.remotize(torch.zeros(500_000, dtype=torch.uint8))
        with pytest.raises(TensorStoreFullError, match="do not fit"):
            rtensor.remotize(torch.zeros(900_000, dtype=torch.uint8), timeout=0.2)
        assert rtensor.localize(held).numel() == 500_000
    finally:
        default_store.shards.set_limits(stats["limit_bytes"], stats["limit_bytes"])
