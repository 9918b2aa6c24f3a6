"""Columns that no row of a batch's mask uses are left out of what is stored."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tundish import rtensor
from tundish.errors import InvalidInputError, InvalidTypeError

pytestmark = pytest.mark.usefixtures("local")


def test_columns_that_no_row_uses_are_left_out() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]])
    batch: dict[str, Any] = {
        "attention_mask": mask,
        "input_ids": torch.arange(10).view(2, 5),
        "rewards": torch.rand(2),
        "other": torch.rand(3, 5),
        "nested": [torch.rand(2, 5)],
    }
    for given in (batch, UserDict(batch)):
        back = rtensor.localize(rtensor.remotize(given))
        assert type(back) is type(given)
        assert back["attention_mask"].shape == back["input_ids"].shape == (2, 3)
        assert torch.equal(back["input_ids"], batch["input_ids"][:, :3])
        assert (
            back["rewards"].shape == (2,)
            and back["other"].shape == (3, 5)
            and back["nested"][0].shape == (2, 5)
        )
    assert batch["input_ids"].shape == (2, 5)
    whole = rtensor.localize(rtensor.remotize(batch, trim=False))
    assert torch.equal(whole["input_ids"], batch["input_ids"])
    # With three dimensions, and where no row uses anything.
    cube = {"attention_mask": torch.tensor([[[True, False]], [[False, False]]]), "x": torch.rand(2, 1, 2)}
    assert rtensor.remotize(cube)["x"].shape == (2, 1, 1)
    nothing = torch.zeros(2, 3, dtype=torch.int64)
    assert rtensor.remotize({"attention_mask": nothing, "x": torch.rand(2, 3)})["x"].shape == (2, 0)
    assert rtensor.remotize({"attention_mask": torch.zeros(3), "x": torch.rand(3, 3)})["x"].shape == (3, 3)


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (2, 4, 5), (2, 5, 5), (2, 5, 7), (2, 1, 5), (5, 5), (5, 2)])
def test_a_tensor_of_another_shape_than_the_mask_stays_whole(shape: tuple[int, ...]) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]])
    image = torch.rand(shape)
    back = rtensor.localize(rtensor.remotize({"attention_mask": mask, "pixel_values": image}))
    assert back["attention_mask"].shape == (2, 3)
    assert torch.equal(back["pixel_values"], image)


def test_named_tensors_are_cut_where_the_mask_has_its_columns() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0]])
    logits, image = torch.rand(2, 5, 5), torch.rand(2, 3, 5, 5)
    batch = {
        "attention_mask": mask,
        "ids": mask,
        "logits": logits,
        "image": image,
        "nested": {"logits": logits},
    }
    back = rtensor.localize(rtensor.remotize(batch, trim=("logits",)))
    assert torch.equal(back["logits"], logits[:, :3])
    assert back["ids"].shape == (2, 3) and torch.equal(back["image"], image)
    # A dict without a mask of its own is not cut.
    assert torch.equal(back["nested"]["logits"], logits)
    for width in (3, 5):
        full = mask.clone()
        full[0, width - 1] = 1
        with pytest.raises(InvalidInputError, match=r"trim names 'image', whose shape \(2, 3, 5, 5\)"):
            rtensor.remotize({**batch, "attention_mask": full}, trim=["image"])
    for wrong in ("logits", 3, [3], None):
        with pytest.raises(InvalidTypeError, match="trim is"):
            rtensor.remotize(batch, trim=wrong)  # type: ignore[arg-type]


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


def test_a_name_to_trim_that_nothing_has_is_refused() -> None:
    batch = {"attention_mask": torch.tensor([[1, 0, 0]]), "logits": torch.ones(1, 3, 9)}
    with pytest.raises(InvalidInputError, match="trim names 'logit', which no dict holds"):
        rtensor.remotize([batch], trim=("logit",))
