"""Conversion of the tensors of the training to those in the files, and their shapes beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tundish.checkpoint.hf.conversion import (
    Conversion,
    cast_products,
    identity_conversion,
    join_conversions,
    reverting_conversion,
    to_hf_conversion,
)
from tundish.checkpoint.tensors import TensorSpec
from tundish.errors import InvalidInputError, InvalidTypeError

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
SOURCES: tuple[TensorSpec, ...] = (("a", (4, 6), F32), ("b", (6,), BF16), ("c", (), torch.int64))


def values(specs: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
    return [
        torch.arange(max(1, torch.Size(shape).numel())).view(shape).to(dtype) for _, shape, dtype in specs
    ]


def converted(conversion: Conversion) -> dict[str, torch.Tensor]:
    """Every product, each unit on its own."""
    tensors = values(conversion.sources)
    made: dict[str, torch.Tensor] = {}
    for unit in conversion.units:
        given = [tensors[source] for source in unit.sources]
        outcome = given if unit.convert is None else unit.convert(given)
        for product, tensor in zip(unit.products, outcome, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == conversion.products[product][1:]
            made[conversion.products[product][0]] = tensor
    assert list(made) != [] or not conversion.products
    return made


def test_as_they_are() -> None:
    conversion = identity_conversion(SOURCES)
    assert conversion.products == SOURCES
    assert not conversion.converts
    assert list(converted(conversion)) == ["a", "b", "c"]
    # A loop that saves the same tensors again plans nothing anew.
    assert identity_conversion(tuple(SOURCES)) is conversion


def halves(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits "a", renames "b", drops "c"."""
    if name == "a":
        for number, part in enumerate(tensor.chunk(2)):
            yield f"a.{number}", part.to(BF16)
    elif name == "b":
        yield "renamed", tensor


def test_a_function_converts_one_tensor_at_a_time() -> None:
    conversion = to_hf_conversion(SOURCES, halves)
    assert conversion.products == (("a.0", (2, 6), BF16), ("a.1", (2, 6), BF16), ("renamed", (6,), BF16))
    assert [unit.sources for unit in conversion.units] == [(0,), (1,), (2,)]
    assert [unit.products for unit in conversion.units] == [(0, 1), (2,), ()]
    # A tensor that is only renamed is copied straight to its place.
    assert conversion.units[1].convert is None
    made = converted(conversion)
    assert made["a.1"].tolist() == torch.arange(12, 24).view(2, 6).tolist()


def test_a_function_that_needs_values_gets_zeros() -> None:
    def through_numpy(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.from_numpy(tensor.float().numpy() + 1))]

    conversion = to_hf_conversion(SOURCES[:1], through_numpy)
    assert conversion.products == (("a", (4, 6), F32),)
    assert converted(conversion)["a"][0, 0] == 1


@pytest.mark.parametrize(
    "outcome", [3, "ab", [("a",)], [("a", 3)], [("a", "b", "c")], {"a": 1}, torch.ones(3), None]
)
def test_functions_that_give_no_pairs_are_refused(outcome: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"of 'a'.* iterable of pairs of a name and a tensor"):
        to_hf_conversion(SOURCES, lambda name, tensor: outcome)


def test_names_from_a_function_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="to_hf gives the name 'same' twice"):
        to_hf_conversion(SOURCES, lambda name, tensor: [("same", tensor)])
    with pytest.raises(InvalidInputError, match=r"'\.\./a' looks like a path"):
        to_hf_conversion(SOURCES, lambda name, tensor: [(f"../{name}", tensor)])
    with pytest.raises(InvalidTypeError, match="the name of a tensor is 3"):
        to_hf_conversion(SOURCES, lambda name, tensor: [(3, tensor)])


def test_a_function_that_gives_nothing_at_all_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nothing to save: to_hf gives no tensor"):
        to_hf_conversion(SOURCES, lambda name, tensor: [])


def test_errors_of_a_function_are_its_own() -> None:
    def fail(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        raise KeyError(name)

    with pytest.raises(KeyError, match="a"):
        to_hf_conversion(SOURCES, fail)


def test_a_function_whose_shapes_depend_on_values_is_refused() -> None:
    def by_values(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.view(-1)[: 2 if tensor.is_meta else 3].clone())]

    (unit, *_) = to_hf_conversion(SOURCES[:1], by_values).units
    assert unit.convert is not None
    with pytest.raises(InvalidInputError, match=r"the conversion of a gives .*\(3,\).* and gave .*\(2,\)"):
        unit.convert(values(SOURCES)[:1])


def merged_layout(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers reverts experts: one tensor into many views, two into one, one renamed."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(named.items()):
        if name.endswith("experts"):
            up, down = (part.contiguous() for part in tensor.chunk(2, dim=1))
            for kind, part in (("up", up), ("down", down)):
                for number, expert in enumerate(part.chunk(len(tensor), dim=0)):
                    made[f"{name}.{number}.{kind}"] = expert.squeeze(0)
        elif name.endswith(".low"):
            made[name.replace(".low", ".whole")] = torch.cat([tensor, named[name.replace(".low", ".high")]])
            made[name.replace(".low", ".double")] = tensor * 2
        elif not name.endswith(".high"):
            made[f"renamed.{name}"] = tensor
    return made


MERGED: tuple[TensorSpec, ...] = (
    ("1.experts", (3, 4, 2), F32),
    ("1.high", (2, 2), F32),
    ("1.low", (3, 2), F32),
    ("norm", (5,), BF16),
    ("2.experts", (3, 4, 2), F32),
)


def test_a_conversion_is_split_into_units() -> None:
    conversion = reverting_conversion(MERGED, merged_layout)
    whole = merged_layout({name: tensor for (name, _, _), tensor in zip(MERGED, values(MERGED), strict=True)})
    assert [name for name, _, _ in conversion.products] == list(whole)
    assert sorted(unit.sources for unit in conversion.units) == [(0,), (1, 2), (3,), (4,)]
    assert [unit.convert is None for unit in sorted(conversion.units, key=lambda unit: unit.sources)] == [
        False,
        False,
        True,
        False,
    ]
    made = converted(conversion)
    for name, tensor in whole.items():
        assert made[name].equal(tensor)
    # The views of one memory make a block, as huggingface_hub has them.
    blocks: dict[int, set[str]] = {}
    for (name, _, _), block in zip(conversion.products, conversion.blocks, strict=True):
        blocks.setdefault(block, set()).add(name)
    assert {"1.experts.0.up", "1.experts.1.up", "1.experts.2.up"} in blocks.values()
    assert {"renamed.norm"} in blocks.values()
    assert len(blocks) == 7


def test_a_conversion_that_changes_nothing() -> None:
    assert reverting_conversion(MERGED, lambda named: named) is identity_conversion(MERGED)


def test_products_without_sources_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="which weights 'new' is converted from"):
        reverting_conversion(MERGED, lambda named: {"new": torch.zeros(3)})


def test_a_conversion_that_depends_on_other_weights_is_refused() -> None:
    def by_company(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[: len(named)] + 0 for name, tensor in named.items()}

    unit = reverting_conversion(MERGED, by_company).units[0]
    assert unit.convert is not None
    with pytest.raises(InvalidInputError, match=r"the conversion of 1\.experts gives the shapes"):
        unit.convert(values(MERGED)[:1])


def test_several_models_together() -> None:
    conversion = join_conversions(
        [("text.", reverting_conversion(MERGED, merged_layout)), ("", identity_conversion(SOURCES))]
    )
    assert converted(conversion)["text.1.whole"].shape == (5, 2)
    assert converted(conversion)["b"].shape == (6,)
    assert conversion.products[-1] == SOURCES[-1]
    assert [
        conversion.unit_of[number].products.count(number) for number in range(len(conversion.products))
    ] == [1] * len(conversion.products)
    assert len(set(conversion.blocks)) == 7 + 3
    with pytest.raises(InvalidInputError, match="together have the name 'a' twice"):
        join_conversions([("", identity_conversion(SOURCES)), ("", identity_conversion(SOURCES[:1]))])


def test_floats_are_cast() -> None:
    specs: tuple[TensorSpec, ...] = (
        ("m.weight", (2,), F32),
        ("m.half", (2,), torch.float16),
        ("m.count", (2,), torch.int64),
        ("m.mask", (2,), torch.bool),
        ("m.wave", (2,), torch.complex64),
        ("q.weight", (2,), FP8),
        ("q.weight_scale_inv", (1,), F32),
        ("q.input_scale", (1,), F32),
        ("q.bias", (2,), F32),
        ("n.scale", (2,), F32),
        ("router.bias", (2,), F32),
    )
    conversion = identity_conversion(specs)
    given = {name: dtype for name, _, dtype in specs}
    assert cast_products(conversion, None, "router") == specs
    assert {name: dtype for name, _, dtype in cast_products(conversion, BF16, "router")} == given | {
        "m.weight": BF16,
        "m.half": BF16,
        "q.bias": BF16,
        "n.scale": BF16,
    }
    assert {name: dtype for name, _, dtype in cast_products(conversion, BF16, None)}["router.bias"] == BF16


def test_names_to_keep_are_those_of_the_model() -> None:
    conversion = to_hf_conversion(
        (("a", (4,), F32), ("b", (4,), F32)), lambda name, tensor: [(f"new.{name}", tensor)]
    )
    assert [dtype for _, _, dtype in cast_products(conversion, BF16, "^a$")] == [F32, BF16]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_unknown_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidTypeError, match=f"'w' is {dtype}, which a safetensors file cannot hold"):
        cast_products(identity_conversion((("w", (1,), dtype),)), None, None)
