"""Samples in streams, and the packs that the plan of the same samples has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import tundish as td

COLUMNS = {"weight": 0.0, "kind": -1}


def draw_samples(lengths: Sequence[int], form: str = "rows") -> list[Any]:
    """Samples of these lengths; no two tokens are the same. `form` is "arrays", "lists" or "rows"."""
    samples: list[Any] = []
    first = 0
    for number, length in enumerate(lengths):
        tokens = np.arange(first, first + length)
        if form == "arrays":
            samples.append(tokens.astype(np.int32))
        elif form == "lists":
            samples.append(tokens.tolist())
        else:
            row = {"input_ids": tokens, "weight": tokens / 4, "kind": tokens % 5, "name": f"sample {number}"}
            row |= {
                "labels": -tokens,
                "loss_mask": tokens % 3 > 0,
                "attention_mask": np.ones(length, np.int8),
            }
            samples.append(row)
        first += length
    return samples


def carried(form: str) -> dict[str, Any]:
    """The arguments that carry all that such samples have."""
    return {"columns": COLUMNS, "sample_columns": ["name"]} if form == "rows" else {}


def planned_items(samples: Sequence[Any], options: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    """The items of the plan that `td.pack` makes of the same samples in the same order."""
    lengths = [len(sample["input_ids"] if isinstance(sample, dict) else sample) for sample in samples]
    return list(td.PackedDataset(list(samples), td.pack(lengths, **options), **arguments))


def assert_same_items(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for item, own in zip(found, expected, strict=True):
        assert item.keys() == own.keys()
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                assert item[key].dtype == value.dtype and torch.equal(item[key], value), key
            else:
                assert item[key] == value, key


@st.composite
def stream_options(draw: Any) -> tuple[dict[str, Any], list[int]]:
    """Options that `td.pack` and `td.PackedStream` both take, and lengths that they can pack."""
    mode = draw(st.sampled_from(["ordered", "sequential", "hard"]))
    align = draw(st.sampled_from([1, 1, 3])) if mode != "hard" else 1
    options = {"mode": mode, "max_length": align * draw(st.integers(1, 20)), "align": align}
    longest = 3 * options["max_length"] + 2
    if mode == "hard":
        options["drop_last"] = draw(st.none() | st.booleans())
    else:
        options["max_samples"] = draw(st.none() | st.integers(1, 4))
        options["overlong"] = draw(st.sampled_from([None, "error", "split", "truncate", "drop"]))
        if options["overlong"] in (None, "error"):
            longest = options["max_length"]
    if mode == "ordered":
        options["window"] = draw(st.none() | st.integers(1, 5))
    return options, draw(st.lists(st.integers(0, min(3, longest)) | st.integers(0, longest), max_size=25))


class StatefulSource:
    """Gives samples, and goes on from its state; counts the samples that it gave in all."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.given = 0
        self._samples = samples
        self._position = 0
        self._loaded: int | None = None

    def __iter__(self) -> Iterator[Any]:
        # As in torchdata: one iteration goes on from what was loaded, the next ones begin anew.
        first, self._loaded = self._loaded or 0, None
        for number in range(first, len(self._samples)):
            self._position = number + 1
            self.given += 1
            yield self._samples[number]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded = state["position"]


class PlainSource:
    """Gives samples, and has no state."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.given = 0
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        for sample in self._samples:
            self.given += 1
            yield sample
