"""State of loaders and samplers survives the conversion to JSON and back."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from tundish.checkpoint.dcp.rank_extra import from_json, to_json
from tundish.errors import InvalidInputError, InvalidTypeError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.sampled_from(["~", "a"]) | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


def same(got: Any, given: Any) -> bool:
    if type(got) is not type(given):
        return False
    if isinstance(given, float):
        return (got == given and math.copysign(1, got) == math.copysign(1, given)) or (
            math.isnan(got) and math.isnan(given)
        )
    if isinstance(given, list | tuple):
        return len(got) == len(given) and all(map(same, got, given))
    if isinstance(given, dict):
        return same(list(got), list(given)) and all(same(got[key], given[key]) for key in given)
    return bool(got == given)


@hypothesis.given(values)
def test_values_survive_json(value: Any) -> None:
    assert same(from_json(to_json(value, "rank_extra")), value)


@hypothesis.given(st.integers(min_value=-(10**6000), max_value=10**6000))
@hypothesis.settings(max_examples=20)
def test_integers_of_any_length_survive_json(value: int) -> None:
    assert from_json(to_json(value, "rank_extra")) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.randn(3, 4).t(),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.get_rng_state(),
        torch.randn(1, 3)[:, 1],
    ],
    ids=["one number", "turned", "bfloat16", "float8", "empty", "bool", "bytes", "one of a column"],
)
def test_tensors_survive_json(tensor: torch.Tensor) -> None:
    got = from_json(to_json({"t": tensor}, "rank_extra"))["t"]
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    own = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert torch.equal(got.reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8))
    # It is nobody else's memory, and may be written to.
    got.zero_()


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.array(2.5), np.float32(1.5), np.array(["a", "bc"])]
)
def test_arrays_survive_json(array: Any) -> None:
    got = from_json(to_json(array, "rank_extra"))
    assert type(got) is type(array)
    assert got.dtype == array.dtype and got.shape == array.shape
    assert (got == array).all()


def test_random_generators_continue_from_their_state() -> None:
    told = to_json((random.getstate(), np.random.default_rng(3).bit_generator.state), "rank_extra")
    expected = random.random()
    state, numpy_state = from_json(told)
    random.setstate(state)
    assert random.random() == expected
    generator = np.random.default_rng(0)
    generator.bit_generator.state = numpy_state
    assert generator.random() == np.random.default_rng(3).random()


class Loader:
    """A class whose objects cannot be kept without its code."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"loader": [1, Loader()]}, "rank_extra['loader'][1]"),
        ({"seen": {1, 2}}, "rank_extra['seen']"),
        ({"c": 1j}, "rank_extra['c']"),
        (torch.eye(2).to_sparse(), "rank_extra"),
        (torch.empty(2, device="meta"), "rank_extra"),
        (np.array([Loader()]), "rank_extra"),
    ],
    ids=["object", "set", "complex", "sparse", "meta", "array of objects"],
)
def test_unsupported_values_are_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(InvalidTypeError) as refusal:
        to_json(value, "rank_extra")
    assert str(refusal.value).startswith(f"{where} is ")


def test_self_containing_values_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidInputError, match="contains itself"):
        to_json(value, "rank_extra")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"~": []}',
        '{"~": ["os.system", "true"]}',
        '{"~": ["tensor", "load", [1], ""]}',
        '{"~": ["tensor", "float32", [3], "AAAA"]}',
        '{"~": ["array", "O", [1], "AAAAAAAAAAA="]}',
        '{"~": ["dict", [[[1], 2]]]}',
        '{"~": 3}',
        "[" * 100000,
    ],
)
def test_a_damaged_file_runs_no_code_and_raises(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError)):
        from_json(text.encode())


def test_plain_values_are_plain_json() -> None:
    state = {"epoch": 3, "position": [1, 2.5, None, True, "a"]}
    assert json.loads(to_json(state, "rank_extra")) == state
