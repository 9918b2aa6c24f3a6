"""Masks of samples become labels of the pieces of a pack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tundish.packing.dataset.sample_keys import CONSTANT_KEYS
from tundish.packing.dataset.samples import IGNORED_LABEL, Sample, refuse_first

__all__ = ["apply_masks"]

_MASK_ADVICE = "a mask holds 0 and 1; carry weights with columns={'loss_weight': 0.0}"
_CONSTANT_ADVICE = {
    "attention_mask": "packs hold no padding; tokenize without padding, or take padded tokens out, and plan again",
    "token_type_ids": "it is left out only where it is 0; carry it with columns={'token_type_ids': 0}",
}


def apply_masks(
    labels: NDArray[np.int64], samples: Sequence[Sample], starts: Sequence[int], stops: Sequence[int]
) -> None:
    """Set the labels of tokens that are not learned to -100, in place; checks all masks and constants.

    Raises:
        InvalidInputError: A mask holds another number than 0 and 1, or a constant is another one.
    """
    first = 0
    for sample, start, stop in zip(samples, starts, stops, strict=True):
        last = first + stop - start
        if sample.extras is not None:
            for key, mask in sample.extras.masks.items():
                part = mask[start:stop]
                learned = part != 0
                if part.dtype.kind != "b":
                    refuse_first(learned & (part != 1), part, start, key, sample, _MASK_ADVICE)
                labels[first:last][~learned] = IGNORED_LABEL
            for key, constant in sample.extras.constants.items():
                part = constant[start:stop]
                refuse_first(part != CONSTANT_KEYS[key], part, start, key, sample, _CONSTANT_ADVICE[key])
        first = last
