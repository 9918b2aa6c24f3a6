"""The same tensors saved again: nothing that was found at them before is taken for granted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from exporting import export

from tundish.checkpoint.hf.plan import plan_hf
from tundish.checkpoint.hf.unchanged import facts_if_unchanged, remember
from tundish.errors import InvalidInputError, InvalidTypeError

POOL = torch.arange(64, dtype=torch.float32)


def made() -> dict[str, torch.Tensor]:
    return {name: torch.arange(start, start + 16.0).view(4, 4) for start, name in enumerate("abc")}


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


@pytest.mark.parametrize(("start", "count"), [(0, 512), (16, 1008)], ids=["cut", "moved"])
def test_other_memory_at_the_same_address_is_seen(start: int, count: int) -> None:
    # As when memory is freed and other memory taken at the same place.
    memory = bytearray(8192)
    before = torch.frombuffer(memory, dtype=torch.float32, count=1008)
    after = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=start * 4)
    tensors = {"w": before[16:32]}
    remember(tensors, ())
    assert known(tensors)
    tensors["w"] = after[16 - start : 32 - start]
    assert tensors["w"].data_ptr() == before[16:32].data_ptr()
    assert not known(tensors)


def test_tensors_are_known_again_while_nothing_changes() -> None:
    tensors = made()
    assert not known(tensors)
    plan_hf(tensors).release()
    assert known(tensors)
    assert known(dict(tensors))
    tensors["a"].add_(1)
    assert known(tensors)


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
