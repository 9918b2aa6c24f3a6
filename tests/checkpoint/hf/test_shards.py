"""Where tensors lie in files, against the libraries whose layout it is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint.dcp_states import bits

from tundish.checkpoint.buffers import PAGE
from tundish.checkpoint.hf.safetensors import WeightFiles, assign_files, lay_out
from tundish.checkpoint.tensors import DTYPES, TensorSpec
from tundish.errors import InvalidInputError

FORMAT = (("format", "pt"),)


def specs(tensors: dict[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def laid_out(tensors: dict[str, torch.Tensor], shard_bytes: int = 10**9) -> WeightFiles:
    return lay_out(specs(tensors), tuple(range(len(tensors))), shard_bytes, FORMAT, None)


def contents(layout: WeightFiles, number: int, tensors: dict[str, torch.Tensor]) -> bytes:
    """A file as the layout says it."""
    file = layout.files[number]
    values = list(tensors.values())
    made = bytearray(file.size)
    made[: len(file.header)] = file.header
    for product, place in zip(file.products, file.places, strict=True):
        flat = values[product].contiguous().view(-1).view(torch.uint8)
        made[place.start : place.stop] = flat.numpy().tobytes()
    return bytes(made)


def header_of(file: bytes) -> bytes:
    return file[8 : 8 + int.from_bytes(file[:8], "little")].rstrip(b" ")


def data_of(file: bytes) -> bytes:
    return file[8 + int.from_bytes(file[:8], "little") :]


def of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.to(torch.bool) if dtype == torch.bool else raw.view(dtype)


def test_every_dtype_is_laid_out_as_by_safetensors(tmp_path: Path) -> None:
    names = [f"{letter}.{number}" for number in range(len(DTYPES)) for letter in "zay"]
    random.Random(0).shuffle(names)
    dtypes = [*DTYPES] * 3
    tensors = {
        name: of_dtype(dtype, 3 + number)
        for number, (name, dtype) in enumerate(zip(names, dtypes, strict=True))
    }
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 7, dtype=torch.int16)
    tensors['quoted "ä" \\'] = torch.ones(2, 3, dtype=torch.float16)
    layout = laid_out(tensors)
    ours = contents(layout, 0, tensors)
    theirs = safetensors.torch.save(tensors, {"format": "pt"})
    assert header_of(ours) == header_of(theirs)
    assert data_of(ours) == data_of(theirs)
    (tmp_path / "model.safetensors").write_bytes(ours)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), shard_bytes=st.integers(1, 120))
def test_shards_equal_those_of_huggingface_hub(sizes: list[int], shard_bytes: int) -> None:
    tensors = {f"layer.{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    layout = laid_out(tensors, shard_bytes)
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    names = list(tensors)
    held = {file.name: {names[product] for product in file.products} for file in layout.files}
    assert held == {file: set(names) for file, names in theirs.filename_to_tensors.items()}
    if layout.index is not None:
        assert json.loads(layout.index) == {
            "metadata": theirs.metadata,
            "weight_map": theirs.tensor_to_filename,
        }
    assert (layout.index is None) == (len(layout.files) == 1)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), shard_bytes=st.integers(1, 120))
def test_every_tensor_is_in_one_file(sizes: list[int], shard_bytes: int) -> None:
    tensors = {f"layer.{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    layout = laid_out(tensors, shard_bytes)
    entries = [entry for file in layout.files for entry in zip(file.products, file.places, strict=True)]
    assert sorted(product for product, _ in entries) == list(range(len(sizes)))
    assert all(place.stop - place.start == sizes[product] for product, place in entries)
    for file in layout.files:
        assert len(file.products) == 1 or file.size - len(file.header) <= shard_bytes


def test_tensors_of_a_block_share_a_file() -> None:
    tensors = {f"t{number}": torch.zeros(10, dtype=torch.uint8) for number in range(6)}
    layout = lay_out(specs(tensors), (0, 1, 0, 3, 3, 3), 20, FORMAT, None)
    files = [sorted(file.products) for file in layout.files]
    assert files == [[0, 2], [3, 4, 5], [1]]


def test_index() -> None:
    tensors = {"b": torch.zeros(3), "a": torch.zeros(5), "c": torch.zeros(1)}
    layout = lay_out(specs(tensors), (0, 1, 2), 20, FORMAT, 9)
    assert layout.index == (
        b'{\n  "metadata": {\n    "total_parameters": 9,\n    "total_size": 36\n  },\n  "weight_map": {\n'
        b'    "a": "model-00002-of-00003.safetensors",\n    "b": "model-00001-of-00003.safetensors",\n'
        b'    "c": "model-00003-of-00003.safetensors"\n  }\n}\n'
    )
    assert [file.name for file in lay_out(specs(tensors), (0, 1, 2), 99, FORMAT, 9).files] == [
        "model.safetensors"
    ]


@pytest.mark.parametrize("length", [PAGE - 200, PAGE - 90, PAGE - 80, PAGE - 70, PAGE])
def test_headers_fill_pages(length: int) -> None:
    layout = laid_out({"n" * length: torch.zeros(3)})
    (file,) = layout.files
    assert len(file.header) % PAGE == 0
    assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
    assert file.places[0].start == len(file.header)
    assert file.size == len(file.header) + 12
    assert safetensors.torch.load(file.header + bytes(12))["n" * length].tolist() == [0, 0, 0]


def test_a_header_that_is_too_long_is_refused() -> None:
    tensors: dict[str, Any] = {str(number) + "n" * 10**6: torch.zeros(1) for number in range(101)}
    with pytest.raises(InvalidInputError, match="smaller shard_bytes"):
        laid_out(tensors)
    assert len(laid_out(tensors, 4).files) == 101


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    ranks=st.lists(st.integers(0, 63), min_size=1, max_size=9, unique=True),
)
def test_ranks_finish_together(sizes: Sequence[int], ranks: Sequence[int]) -> None:
    writers = assign_files(sizes, ranks)
    assert assign_files(sizes, ranks) == writers
    assert set(writers) <= set(ranks)
    loads = [
        sum(size for size, writer in zip(sizes, writers, strict=True) if writer == rank) for rank in ranks
    ]
    # The bound of every list schedule (Graham 1966).
    assert max(loads) <= sum(sizes) / len(ranks) + max(sizes) * (1 - 1 / len(ranks)) + 1e-9
    written = [writer for size, writer in zip(sizes, writers, strict=True) if size]
    assert len(written) > len(ranks) or len(set(written)) == len(written)


def test_equal_files_go_to_the_first_ranks() -> None:
    assert assign_files([5, 5, 5], [4, 0, 5, 1]) == [4, 0, 5]
    assert assign_files([5, 5, 5, 5, 5], [4, 0]) == [4, 0, 4, 0, 4]
    assert assign_files([1, 9, 2, 8], [0, 1]) == [0, 0, 1, 1]
