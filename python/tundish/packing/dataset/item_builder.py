"""`ItemBuilder`: the pieces of a pack as a training item.

Invariants: the tensors of an item own their memory and share none with others; only a list of `sample_columns` holds
the samples' own objects.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.errors import InvalidTypeError, format_type
from tundish.packing.arguments import as_integer, check_flag
from tundish.packing.dataset.custom_positions import Positions, custom_positions
from tundish.packing.dataset.loss_masks import apply_masks
from tundish.packing.dataset.piece_layout import PieceLayout
from tundish.packing.dataset.sample_columns import collected
from tundish.packing.dataset.sample_keys import COLUMN_PADDING, Padding, dtype_of
from tundish.packing.dataset.samples import IGNORED_LABEL, Sample, joined

__all__ = ["ItemBuilder"]


class ItemBuilder:
    """Builds items, whose keys the table of `PackedDataset` lists.

    Args:
        columns: The columns, checked, with their padding values.
        sample_columns: The names of the values that samples have once, checked.
        mask_first_token: As in `PackedDataset`.
        positions: As in `PackedDataset`.
        pad_token_id: As in `PackedDataset`.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: `pad_token_id` is out of range.
    """

    def __init__(
        self,
        columns: Mapping[str, Padding],
        sample_columns: Sequence[str],
        *,
        mask_first_token: Any,
        positions: Any,
        pad_token_id: Any = 0,
    ) -> None:
        check_flag(mask_first_token, "mask_first_token")
        if positions is not None and not callable(positions):
            raise InvalidTypeError(
                f"positions is {format_type(positions)}: give a function of a piece, or None"
            )
        self._mask_first_token: bool = mask_first_token
        self._positions: Positions | None = positions
        self._pad_token_id = as_integer(pad_token_id, "pad_token_id", 0, 2**63 - 1)
        self._columns = columns
        self._sample_columns = sample_columns

    def build(
        self,
        samples: Sequence[Sample],
        starts: Sequence[int],
        stops: Sequence[int],
        sizes: Sequence[int],
        align: int,
    ) -> dict[str, Any]:
        """The item of pieces, each of which is the tokens `starts` … `stops` - 1 of its sample, `sizes` of them.

        Each piece is padded to a multiple of `align` tokens.

        Raises:
            InvalidInputError: A mask, a constant or an id is refused.
        """
        if 0 in sizes:
            # A piece without tokens is no sequence.
            samples = list(itertools.compress(samples, sizes))
            starts = list(itertools.compress(starts, sizes))
            stops = list(itertools.compress(stops, sizes))
            sizes = [size for size in sizes if size]
        layout = PieceLayout(sizes, align)
        # All samples at once: there may be many in an item.
        all_tokens, all_labels, _, _, all_extras = zip(*samples, strict=True)
        tokens = joined("input_ids", all_tokens, samples, starts, stops)
        if all(map(operator.is_, all_labels, all_tokens)):
            labels = tokens.copy()
        else:
            labels = joined("labels", all_labels, samples, starts, stops)
        has_extras = any(all_extras)
        columns: dict[str, NDArray[Any]] = {}
        if has_extras:
            apply_masks(labels, samples, starts, stops)
            columns = self._column_arrays(samples, starts, stops)
        if self._mask_first_token:
            labels[layout.tokens[:-1]] = IGNORED_LABEL
        if self._positions is None:
            positions = layout.positions()
        else:
            named = self._sample_columns
            positions = custom_positions(self._positions, tokens, columns, named, samples, layout)
        item: dict[str, Any] = {
            "input_ids": torch.from_numpy(layout.padded(tokens, self._pad_token_id)),
            "labels": torch.from_numpy(layout.padded(labels, IGNORED_LABEL)),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(layout.bounds.astype(np.int32)),
            "max_seqlen": max(layout.sizes),
        }
        for key, column in columns.items():
            item[key] = torch.from_numpy(layout.padded(column, self._columns[key]))
        if columns:
            item[COLUMN_PADDING] = dict(self._columns)
        for key in self._sample_columns:
            given = [extra.values[key] for extra in all_extras]
            values = [value for value in given if value is not None]
            if values:
                item[key] = collected(values)
        return item

    def _column_arrays(
        self, samples: Sequence[Sample], starts: Sequence[int], stops: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        """The columns of all pieces, without padding, one after the other."""
        # Every sample has extras if there are columns.
        extras = [sample.extras for sample in samples if sample.extras]
        return {
            key: joined(
                key, [extra.columns[key] for extra in extras], samples, starts, stops, dtype_of(padding)
            )
            for key, padding in self._columns.items()
        }
