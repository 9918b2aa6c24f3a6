"""`RowReader`: the rows of a dataset as samples.

Invariants: each tuple of keys is checked once, not for each row, because a look-up takes a tenth of the time. `None`
stands for a key that is not there, as in rows of joined HF datasets.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.dataset.sample_keys import (
    CONSTANT_KEYS,
    IGNORED_KEYS,
    MADE_KEYS,
    MASK_KEYS,
    as_columns,
    as_sample_columns,
    dtype_of,
)
from tundish.packing.dataset.samples import (
    BOOLEANS,
    INTEGERS,
    MASK,
    NUMBERS,
    TOKEN_IDS,
    ArrayKind,
    Extras,
    Sample,
    as_array,
    column_names,
    name_sample,
)

__all__ = ["RowReader"]

_COLUMN_KINDS: dict[type[np.generic], ArrayKind] = {
    np.bool_: BOOLEANS,
    np.int64: INTEGERS,
    np.float32: NUMBERS,
}
# A message lists at most so many keys.
_SHOWN_KEYS = 8


class _Schema(NamedTuple):
    """Which of the keys of a row are masks, and which hold constants; `is_plain` if it has no extras at all."""

    masks: tuple[str, ...]
    constants: tuple[str, ...]
    is_plain: bool


class RowReader:
    """Reads rows that may have the given columns beside tokens, labels and masks."""

    def __init__(self, columns: Any, sample_columns: Any) -> None:
        self.columns = as_columns(columns)
        self.sample_columns = as_sample_columns(sample_columns, self.columns)
        self._kinds = {name: _COLUMN_KINDS[dtype_of(padding)] for name, padding in self.columns.items()}
        self._named = (*self.columns, *self.sample_columns)
        self._known = {"input_ids", "labels", *MASK_KEYS, *CONSTANT_KEYS, *IGNORED_KEYS, *self._named}
        self._schemas: dict[tuple[Hashable, ...], _Schema] = {}

    def check_dataset(self, dataset: Any, number: int) -> None:
        """Check the keys of a dataset that tells them; those of others are checked as their rows are read.

        Raises:
            InvalidTypeError: it has no `input_ids`.
            InvalidInputError: it has an unknown key, or lacks a column.
        """
        keys = column_names(dataset)
        if keys is not None:
            self._schema(tuple(keys), f"dataset {number}")

    def read(self, row: Any, dataset: int, number: int) -> Sample:
        """Read one row; `dataset` and `number` name it in errors.

        Raises:
            InvalidTypeError: it holds something else than token ids, or a mask or column is of a wrong dtype.
            InvalidInputError: its labels, masks or columns are not as many as its tokens; a column is missing; or a key
                is unknown.
        """
        # The first question is for speed: the others take longer than all else that is asked of a dict.
        if type(row) is not dict and (isinstance(row, np.ndarray) or not isinstance(row, Mapping)):
            tokens = as_array(row, None, dataset, number, TOKEN_IDS)
            if self._named:
                raise InvalidInputError(
                    f"{name_sample(dataset, number)} is {format_type(row)} of token ids, and has no "
                    f"{', '.join(self._named)}: a sample with columns is a mapping with input_ids"
                )
            return Sample(tokens, tokens, dataset, number)
        keys = tuple(row)
        schema = self._schemas.get(keys) or self._schema(keys, name_sample(dataset, number))
        tokens = as_array(row["input_ids"], "input_ids", dataset, number, TOKEN_IDS)
        own = row.get("labels")
        labels = tokens if own is None else as_array(own, "labels", dataset, number, TOKEN_IDS)
        if len(labels) != len(tokens):
            raise InvalidInputError(
                f"{name_sample(dataset, number)} has {len(tokens)} input_ids but {len(labels)} labels: "
                "they must be as many"
            )
        if schema.is_plain:
            return Sample(tokens, labels, dataset, number)
        return Sample(
            tokens, labels, dataset, number, self._extras(row, schema, len(tokens), dataset, number)
        )

    def _extras(
        self, row: Mapping[str, Any], schema: _Schema, tokens: int, dataset: int, number: int
    ) -> Extras:
        def arrays(kinds: Iterable[tuple[str, ArrayKind]]) -> dict[str, NDArray[Any]]:
            found = {}
            for key, kind in kinds:
                value = row[key]
                if value is None:
                    continue
                array = found[key] = as_array(value, key, dataset, number, kind)
                if len(array) != tokens:
                    raise InvalidInputError(
                        f"{key} of {name_sample(dataset, number)} has {len(array)} entries for {tokens} input_ids: "
                        "give one a token"
                    )
            return found

        columns = arrays(self._kinds.items())
        if missing := [key for key in self.columns if key not in columns]:
            raise InvalidInputError(
                f"{name_sample(dataset, number)} has None as its {', '.join(missing)}: give one entry a token, or take "
                "the name out of columns"
            )
        return Extras(
            masks=arrays((key, MASK) for key in schema.masks),
            constants=arrays((key, MASK) for key in schema.constants),
            columns=columns,
            values={key: row[key] for key in self.sample_columns},
        )

    def _schema(self, keys: tuple[Hashable, ...], where: str) -> _Schema:
        """Check keys that were not seen before; `where` names what has them."""
        if "input_ids" not in keys:
            raise InvalidTypeError(f"{where} has no input_ids; its keys are {_listed(keys)}")
        if missing := [name for name in self._named if name not in keys]:
            raise InvalidInputError(
                f"{where} lacks {', '.join(missing)}, named in columns or sample_columns; its keys are {_listed(keys)}"
                ". (A sample that has no value for one of sample_columns has None there)"
            )
        unknown = [key for key in keys if key not in self._known]
        if made := [key for key in unknown if key in MADE_KEYS]:
            raise InvalidInputError(
                f"{where} has {_listed(made)}, which PackedDataset or PackedCollator makes from the pieces: remove "
                f"it, in a HF Dataset with remove_columns({_listed(made)})"
            )
        if unnamed := [key for key in unknown if not isinstance(key, str)]:
            raise InvalidInputError(
                f"{where} has the key {unnamed[0]!r}, which is {format_type(unnamed[0])}: keys of samples are strings"
            )
        if unknown:
            raise InvalidInputError(
                f"{where} has {_listed(unknown)}, which PackedDataset does not know: carry what each token has with "
                f"columns={{{unknown[0]!r}: 0.0}}, where 0.0 is the padding value, and what a sample has once with "
                f"sample_columns={_listed(unknown)}; or remove it, in a HF Dataset with "
                f"remove_columns({_listed(unknown)})"
            )
        masks = tuple(key for key in MASK_KEYS if key in keys)
        constants = tuple(key for key in CONSTANT_KEYS if key in keys and key not in self._named)
        is_plain = not (masks or constants or self._named)
        schema = self._schemas[keys] = _Schema(masks, constants, is_plain)
        return schema


def _listed(keys: Sequence[Hashable]) -> list[Hashable]:
    return sorted(keys, key=str)[:_SHOWN_KEYS]
