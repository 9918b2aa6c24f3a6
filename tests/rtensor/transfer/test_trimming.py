"""Columns that no row of a batch's mask uses are left out of what is stored."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tundish import rtensor
from tundish.errors import InvalidTypeError

pytestmark = pytest.mark.usefixtures("local")


def test_columns_that_no_row_uses_are_left_out() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]])
    batch: dict[str, Any] = {
        "attention_mask": mask,
        "input_ids": torch.arange(10).view(2, 5),
        "per_layer": torch.rand(2, 4, 5),
        "rewards": torch.rand(2),
        "other": torch.rand(3, 5),
        "nested": [torch.rand(2, 5)],
    }
    for given in (batch, UserDict(batch)):
        back = rtensor.localize(rtensor.remotize(given))
        assert type(back) is type(given)
        assert {
            key: back[key].shape[-1] for key in ("attention_mask", "input_ids", "per_layer")
        } == dict.fromkeys(("attention_mask", "input_ids", "per_layer"), 3)
        assert torch.equal(back["per_layer"], batch["per_layer"][..., :3])
        assert (
            back["rewards"].shape == (2,)
            and back["other"].shape == (3, 5)
            and back["nested"][0].shape == (2, 5)
        )
    assert batch["input_ids"].shape == (2, 5)
    whole = rtensor.localize(rtensor.remotize(batch, trim=False))
    assert torch.equal(whole["input_ids"], batch["input_ids"])
    # With three dimensions, and where no row uses anything.
    cube = {"attention_mask": torch.tensor([[[True, False]], [[False, False]]]), "x": torch.rand(2, 2)}
    assert rtensor.remotize(cube)["x"].shape == (2, 1)
    nothing = torch.zeros(2, 3, dtype=torch.int64)
    assert rtensor.remotize({"attention_mask": nothing, "x": torch.rand(2, 3)})["x"].shape == (2, 0)
    assert rtensor.remotize({"attention_mask": torch.zeros(3), "x": torch.rand(3, 3)})["x"].shape == (3, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_masks_of_integers_cut(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]]).to(dtype)
    assert rtensor.remotize({"attention_mask": mask, "x": torch.rand(2, 3)})["x"].shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_floating_point_mask_cuts_nothing(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]]).to(dtype)
    assert rtensor.remotize({"attention_mask": mask, "x": torch.rand(2, 3)})["x"].shape == (2, 3)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2, 3)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.ones(2, 3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        lambda: torch.ones(2, 3, dtype=torch.int8).view(torch.qint8),
        fake,
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_mask_that_is_no_values_is_refused_with_its_path(mask: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r'obj\["attention_mask"\] is a '):
        rtensor.remotize({"input_ids": torch.ones(2, 3), "attention_mask": mask()})


def test_a_mask_that_torch_compares_with_nothing_leaves_nothing_out() -> None:
    mask = torch.ones(2, 3, dtype=torch.uint8).view(torch.bits8)
    back = rtensor.localize(rtensor.remotize({"attention_mask": mask, "input_ids": torch.ones(2, 3)}))
    assert back["attention_mask"].dtype is torch.bits8 and back["input_ids"].shape == (2, 3)
