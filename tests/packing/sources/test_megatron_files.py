"""Token counts and samples of the indexed datasets of Megatron-LM."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from support.packing.sources import assert_packs_alike, write_megatron

import tundish as td
from tundish.errors import InvalidInputError, NotFoundError

SEQUENCES = [[1, 2, 3], [4], [], [5, 6], [65_535, 0, 7, 8]]
DOCUMENTS = [2, 0, 1, 2]
JOINED = [[1, 2, 3, 4], [], [], [5, 6, 65_535, 0, 7, 8]]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "corpus_text_document.idx"
    write_megatron(path, SEQUENCES, DOCUMENTS)
    return path


def test_sequences_and_documents(index: Path) -> None:
    for source in (index, index.with_suffix(".bin"), index.with_suffix(""), str(index)):
        assert_packs_alike(source, SEQUENCES)
        assert_packs_alike(source, SEQUENCES, "sequences")
        assert_packs_alike(source, JOINED, "documents")
    lengths = td.packing.lengths(index)
    assert isinstance(lengths, np.memmap) and lengths.dtype == np.int32


def test_samples_are_views_of_the_mapped_file(index: Path) -> None:
    with index.with_suffix(".bin").open("r+b") as file:
        sample = td.packing.open_samples(index)[3]
        assert (sample.tolist(), sample.dtype) == ([5, 6], np.uint16)
        file.seek(8)
        file.write(struct.pack("<H", 9))
        file.flush()
        assert sample.tolist() == [9, 6]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8")])
def test_tokens_of_other_widths(code: int, dtype: str, tmp_path: Path) -> None:
    sequences = [[1, 2], [3], [4, 5, 100]]
    write_megatron(tmp_path / "a.idx", sequences, [1, 2], code=code, dtype=dtype)
    assert_packs_alike(tmp_path / "a.idx", sequences)
    assert_packs_alike(tmp_path / "a.idx", [[1, 2], [3, 4, 5, 100]], "documents")


def test_an_index_without_sequences(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.idx", [], [])
    assert_packs_alike(tmp_path / "a.idx", [])
    assert_packs_alike(tmp_path / "a.idx", [], "documents")


def test_damaged_files_are_refused(index: Path, tmp_path: Path) -> None:
    whole = index.read_bytes()
    lengths_at, pointers_at, documents_at = 34, 34 + 4 * 5, 34 + 12 * 5

    def changed(offset: int, form: str, value: int) -> bytes:
        content = bytearray(whole)
        struct.pack_into(form, content, offset, value)
        return bytes(content)

    for content, message in (
        (b"", "not an index of Megatron-LM"),
        (changed(26, "<Q", 0)[:documents_at], "its documents do not go from sequence 0 to 5"),
        (b"TNTIDX\x00\x00" + bytes(30), "not an index of Megatron-LM"),
        (changed(9, "<Q", 2), "has version 2 and dtype 8"),
        (changed(17, "<B", 9), "has version 1 and dtype 9"),
        (whole[:-1], f"holds {len(whole) - 1} bytes, and its header asks for {len(whole)}"),
        (changed(18, "<Q", 2**63), "its header asks for"),
        (changed(lengths_at + 4, "<i", -1), "sequence 1 has -1 tokens"),
        (changed(documents_at, "<q", 1), "its documents do not go from sequence 0 to 5"),
        (changed(documents_at + 8, "<q", 4), "its documents do not go from sequence 0 to 5"),
    ):
        index.write_bytes(content)
        for ask in (td.packing.lengths, td.packing.open_samples):
            with pytest.raises(InvalidInputError, match=message):
                ask(index)
    for content, message in (
        (changed(pointers_at + 8, "<q", 4), "sequence 1 does not begin where the one before it ends"),
        (changed(pointers_at, "<q", -6), "sequence 0 does not begin|sequence 1 does not begin"),
        (changed(lengths_at + 16, "<i", 5), r"\.bin: holds 20 bytes, and .*\.idx needs 22"),
        (changed(17, "<B", 6), "holds float64, and tokens are integers"),
    ):
        index.write_bytes(content)
        with pytest.raises(InvalidInputError, match=message):
            td.packing.open_samples(index)
    index.write_bytes(whole)
    with pytest.raises(
        InvalidInputError, match="has no column 'pages': its columns are 'sequences' and 'documents'"
    ):
        td.packing.lengths(index, "pages")
    with pytest.raises(InvalidInputError, match=r"holds tokens alone, and columns is \['labels'\]"):
        td.packing.open_samples(index, columns=["labels"])


def test_a_missing_half_is_named(index: Path) -> None:
    index.with_suffix(".bin").rename(index.with_name("other.bin"))
    with pytest.raises(NotFoundError, match=r"corpus_text_document\.idx is its index"):
        td.packing.open_samples(index)
    with pytest.raises(NotFoundError, match=r"it is the index of other\.bin"):
        td.packing.lengths(index.with_name("other.bin"))
    assert td.packing.lengths(index).tolist() == [3, 1, 0, 2, 4]
