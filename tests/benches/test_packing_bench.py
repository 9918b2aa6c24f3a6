"""The forms that packing is measured against are right, and agree with tundish."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tundish as td


def token_by_token(lengths: list[int], order: list[int], max_length: int) -> dict[str, list[int]]:
    """The hard plan from one list entry a token."""
    tokens = [(place, offset) for place, sample in enumerate(order) for offset in range(lengths[sample])]
    plan: dict[str, list[int]] = {
        name: []
        for name in ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
    }
    for begin in range(0, len(tokens) - max_length + 1, max_length):
        pack = tokens[begin : begin + max_length]
        places = range(pack[0][0], pack[-1][0] + 1)
        plan["dataset_id"].append(0)
        plan["indices"] += [order[place] for place in places]
        plan["indices_cu_len"].append(len(plan["indices"]))
        plan["start_offset"].append(pack[0][1])
        plan["end_offset"].append(pack[-1][1] + 1)
        plan["longest"].append(max(sum(place == own for own, _ in pack) for place in places))
    return plan


@pytest.mark.parametrize("max_length", [1, 2, 7, 64])
@pytest.mark.parametrize("longest", [1, 3, 50])
def test_forms_agree_with_each_other_and_with_pack(
    bench: SimpleNamespace, max_length: int, longest: int
) -> None:
    generator = np.random.default_rng(max_length * 1000 + longest)
    for samples in (1, 2, 40):
        lengths = generator.integers(0, longest + 1, samples).astype(np.int32)
        order = generator.permutation(samples)
        expected = token_by_token(lengths.tolist(), order.tolist(), max_length)
        for form in (bench.numpy_forms.chunked, bench.numpy_forms.vectorised):
            arrays = form(lengths, order, max_length)
            assert {field: arrays[field].tolist() for field in bench.numpy_forms.FIELDS} == expected
            assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}
        arrays = td.pack(lengths, max_length, order=order).arrays()
        assert {field: arrays[field].tolist() for field in bench.numpy_forms.FIELDS} == expected


def test_forms_agree_over_several_chunks(bench: SimpleNamespace) -> None:
    samples = 3 * bench.numpy_forms.PACKS_IN_A_CHUNK
    lengths = bench.distributions.draw_lengths(samples, bench.distributions.TEXT)
    order = bench.distributions.draw_order(samples)
    expected = bench.numpy_forms.chunked(lengths, order, 900)
    assert expected["dataset_id"].size > 2 * bench.numpy_forms.PACKS_IN_A_CHUNK
    for arrays in (
        bench.numpy_forms.vectorised(lengths, order, 900),
        td.pack(lengths, 900, order=order).arrays(),
    ):
        for field in bench.numpy_forms.FIELDS:
            np.testing.assert_array_equal(arrays[field], expected[field])


def test_lengths_on_disk_are_those_in_memory(bench: SimpleNamespace, tmp_path: Path) -> None:
    bench.distributions.write_lengths(tmp_path / "lengths.npy", 1000, bench.distributions.CHAT)
    written = np.load(tmp_path / "lengths.npy")
    np.testing.assert_array_equal(written, bench.distributions.draw_lengths(1000, bench.distributions.CHAT))
    assert written.min() >= 1 and written.max() <= 32768
