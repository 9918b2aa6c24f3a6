"""The same tensors saved again: nothing that was found at them before is taken for granted."""

from __future__ import annotations

import collections
import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from exporting import export, staged
from tundish.checkpoint.hf import export_plan as drawing
from tundish.checkpoint.hf import metadata_cache as unchanged
from tundish.checkpoint.hf.metadata_cache import facts_if_unchanged, remember
from tundish.checkpoint.hf.stager import plan_hf
from tundish.checkpoint.staging import tensor_copy as blocks
from tundish.checkpoint.tensors import READER
from tundish.errors import InvalidInputError, InvalidTypeError

POOL = torch.arange(64, dtype=torch.float32)


def made() -> dict[str, torch.Tensor]:
    return {name: torch.arange(start, start + 16.0).view(4, 4) for start, name in enumerate("abc")}


@pytest.fixture(autouse=True, params=[READER, None], ids=["read together", "asked one by one"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what newer versions of torch have, and as with an older one."""
    for module in (blocks, unchanged):
        monkeypatch.setattr(module, "READER", request.param)
    for kept in (unchanged._facts, drawing._drawn):
        monkeypatch.setattr(kept, "_kept", type(kept._kept)())


def known(tensors: dict[str, torch.Tensor]) -> bool:
    return facts_if_unchanged(tensors) is not None


def set_data(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Assign to the first tensor what `of` makes of it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a"].data = of(tensors["a"])

    return change


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "shape": set_data(lambda one: one.view(2, 8)),
    "fewer": set_data(lambda one: one[:2]),
    "dtype": set_data(lambda one: one.view(torch.int32)),
    "strides": set_data(lambda one: one.t()),
    "negated": set_data(lambda one: torch._neg_view(one)),
    "memory": set_data(lambda one: one + 1),
    "larger": lambda tensors: tensors["a"].resize_(8, 8).fill_(3),
    "set": lambda tensors: tensors["a"].set_(POOL.untyped_storage(), 8, (4, 4), (4, 1)),
    "tied": lambda tensors: tensors["a"].set_(tensors["c"]),
    "value": lambda tensors: tensors["a"].fill_(9),
    "another": lambda tensors: tensors.update(a=torch.full((4, 4), 7.0)),
    "a parameter": lambda tensors: tensors.update(a=nn.Parameter(tensors["a"])),
    "order": lambda tensors: tensors.update(a=tensors.pop("a")),
    "more": lambda tensors: tensors.update(d=torch.ones(3)),
    "empty": lambda tensors: tensors["a"].resize_(0, 4),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changed_since_the_last_save_is_saved_as_it_is(change: Any, tmp_path: Path) -> None:
    tensors = made()
    for number in range(2):
        export(tmp_path / str(number), tensors)
    change(tensors)
    for number in range(2, 4):
        export(tmp_path / str(number), tensors)
        loaded = load_file(tmp_path / str(number) / "model.safetensors")
        expected = {
            name: one for name, one in tensors.items() if name != "c" or change is not CHANGES["tied"]
        }
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].equal(tensor.detach()), name


REFUSED: list[tuple[Callable[[dict[str, torch.Tensor]], Any], type[Exception], str]] = [
    (lambda tensors: tensors["a"].untyped_storage().resize_(0), InvalidInputError, "'a' has no values"),
    (lambda tensors: tensors["a"].untyped_storage().resize_(32), InvalidInputError, "'a' has no values"),
    (
        lambda tensors: tensors.update(a=tensors["a"].to("meta")),
        InvalidInputError,
        "'a' is on the meta device",
    ),
    (lambda tensors: tensors.update(a=tensors["a"].to_sparse()), InvalidTypeError, "'a' is sparse_coo"),
    (lambda tensors: tensors.update(a=tensors["a"].to_mkldnn()), InvalidTypeError, "'a' is _mkldnn"),
    (set_data(lambda one: one.to(torch.complex128)), InvalidTypeError, "'a' is torch.complex128"),
    (lambda tensors: tensors.update(a="x"), InvalidTypeError, "'a' is a str"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_what_became_unfit_since_the_last_save_is_refused(change: Any, kind: Any, message: str) -> None:
    tensors = made()
    for _ in range(2):
        plan_hf(tensors).release()
    change(tensors)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            plan_hf(tensors)


def test_integers_of_fewer_bits_are_told_from_bytes() -> None:
    values = torch.arange(16, dtype=torch.uint8)
    tensors = {"other": values + 1, "w": values}
    for _ in range(2):
        plan_hf(tensors).release()
        tensors["w"] = values.view(torch.uint4)
        for _ in range(2):
            with pytest.raises(InvalidTypeError, match=r"'w' is torch\.uint4"):
                plan_hf(tensors)
        tensors["w"] = values


@pytest.mark.parametrize("count", [16, 1 << 20])
def test_what_was_cut_and_lies_where_another_lay_is_not_read(count: int) -> None:
    cut = torch.ones(count)
    cut.untyped_storage().resize_(cut.nbytes // 4)
    # As before memory was freed, and a part of it taken again: of a plan nothing is read.
    memory = (ctypes.c_byte * cut.nbytes).from_address(cut.data_ptr())
    tensors = {"w": torch.frombuffer(memory, dtype=torch.float32), "v": torch.ones(count)}
    plan_hf(tensors).release()
    tensors["w"] = cut
    with pytest.raises(InvalidInputError, match="'w' has no values"), staged(plan_hf(tensors)):
        pass


def test_tensors_are_known_again_while_nothing_changes() -> None:
    tensors = made()
    assert not known(tensors)
    plan_hf(tensors).release()
    assert known(tensors)
    assert known(dict(tensors))
    tensors["a"].add_(1)
    assert known(tensors)


def test_names_are_known_by_their_letters() -> None:
    tensors = {"layers.0.w": torch.ones(2), "layers.1.w": torch.zeros(2)}
    remember(tensors, ())
    # As those of a state dict, which are made anew each time.
    again = {"".join(list(name)): one for name, one in tensors.items()}
    assert known(again) and next(iter(again)) is not next(iter(tensors))
    assert not known(dict(zip(("layers.0.w", "layers.2.w"), tensors.values(), strict=True)))
    assert not known({name: one for name, one in tensors.items() if name == "layers.0.w"})


def test_a_dict_with_an_order_of_its_own_is_judged_each_time() -> None:
    tensors = collections.OrderedDict(made())
    remember(tensors, ())
    tensors.move_to_end("a")
    assert not known(tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": torch.empty(0)},
        {"w": torch.ones(4, 4).t()},
        {"w": torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {}))},
    ],
    ids=["empty", "strided", "subclass"],
)
def test_what_an_address_and_a_shape_do_not_tell_is_judged_each_time(tensors: Any) -> None:
    remember(tensors, ())
    assert not known(tensors)


def test_no_tensor_is_kept_alive() -> None:
    tensors = made()
    plan_hf(tensors).release()
    watched = [weakref.ref(tensor) for tensor in tensors.values()]
    tensors.clear()
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


def test_what_did_not_change_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = made()
    plan_hf(tensors).release()

    def draw(*_: Any) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(drawing, "_draw", draw)
    plan_hf(dict(tensors)).release()
    for change in ({"dtype": torch.float16}, {"shard_bytes": 64}, {"to_hf": lambda name, one: [(name, one)]}):
        with pytest.raises(AssertionError, match="drawn again"):
            plan_hf(tensors, **change)
    tensors["a"].data = tensors["a"] + 1
    with pytest.raises(AssertionError, match="drawn again"):
        plan_hf(tensors)


def test_arguments_that_change_between_saves_are_followed(tmp_path: Path) -> None:
    tensors = made()
    for number, dtype in enumerate([None, torch.float16, torch.float16, None, torch.float64]):
        export(tmp_path / str(number), tensors, dtype=dtype)
        for name, one in load_file(tmp_path / str(number) / "model.safetensors").items():
            assert one.dtype == (dtype or torch.float32)
            assert one.equal(tensors[name].to(one.dtype))


def test_only_the_last_few_names_are_kept() -> None:
    given = [{f"{number}.w": torch.ones(2)} for number in range(6)]
    for tensors in given:
        plan_hf(tensors).release()
    assert [known(tensors) for tensors in given] == [False] * 2 + [True] * 4
    # What is saved again is one of the last.
    plan_hf(given[2]).release()
    remember(given[2], ())
    remember(given[0], ())
    assert [known(tensors) for tensors in given] == [True, False, True, False, True, True]


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "conjugated": lambda: torch.full((3,), 1 + 2j, dtype=torch.complex64).conj(),
    "complex": lambda: torch.full((3,), 1 + 2j, dtype=torch.complex64),
    "strided": lambda: torch.arange(12.0).view(3, 4).t(),
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "of a computation": lambda: nn.Parameter(torch.ones(3)) * 2,
    "without memory": lambda: torch._efficientzerotensor((3,)),
    "a number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4),
    "packed": lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "flags": lambda: torch.tensor([True, False]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_values_are_saved_however_torch_keeps_them(view: Any, tmp_path: Path) -> None:
    tensors = {"first": torch.arange(5.0), "w": view()}
    for number in range(2):
        export(tmp_path / str(number), tensors)
        loaded = load_file(tmp_path / str(number) / "model.safetensors")
        for name, tensor in tensors.items():
            expected = tensor.detach().clone().resolve_conj().resolve_neg().contiguous()
            assert loaded[name].dtype == expected.dtype and loaded[name].shape == expected.shape
            assert loaded[name].reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))


def test_nothing_of_a_function_that_converted_is_kept(tmp_path: Path) -> None:
    class Model:
        """Something large."""

    model = Model()
    gone = weakref.ref(model)

    def convert(name: str, tensor: torch.Tensor, _: Model = model) -> list[tuple[str, torch.Tensor]]:
        return [(f"model.{name}", tensor + 0)]

    export(tmp_path / "hf", made(), to_hf=convert)
    del convert, model
    gc.collect()
    assert gone() is None
