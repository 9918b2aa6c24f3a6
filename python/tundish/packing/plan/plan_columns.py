"""`PlanColumns`: the columns of a plan, what `plan.json` says about them, and the look-up of packs.

Invariants: the columns are read-only. A column is int32 where all its values fit, else int64.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import PlanMismatchError, format_count
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.packing.plan.fields import fields_of, plan_parts
from tundish.packing.plan.pack import Pack, PackBatch, Piece, pack_numbers

__all__ = ["PlanColumns"]

# Packs that are made together when a plan is iterated. Python's garbage collector would walk the pieces of many more
# packs again and again while they are made.
_ITERATED = 32


class PlanColumns:
    """The part of `PackPlan` that statistics, plots and exports read. `PackPlan` documents the attributes."""

    dataset_id: IntegerArray
    indices: IntegerArray
    indices_cu_len: IntegerArray
    start_offset: IntegerArray
    end_offset: IntegerArray
    longest: IntegerArray
    piece_start: IntegerArray | None = None
    piece_stop: IntegerArray | None = None

    def __init__(
        self,
        columns: Sequence[NDArray[Any]],
        metadata: str,
        *,
        lengths: Sequence[IntegerArray] | None = None,
        path: Path | None = None,
        block: NDArray[np.uint8] | None = None,
    ) -> None:
        """Make a plan of columns that were checked; `pack`, `pack_datasets` and `load` call it.

        Args:
            columns: The columns, in the order of `fields_of`.
            metadata: The content of `plan.json`.
            lengths: The lengths to attach, one array a dataset.
            path: The folder that the columns are mapped from.
            block: The shared memory that the columns lie in; a pickled plan refers to it.
        """
        self._metadata_json = metadata
        self._metadata: dict[str, Any] = json.loads(metadata)
        parts = plan_parts(self._metadata)
        # Options are the same for all datasets whose mode has them.
        hard: dict[str, Any] = next((part["hard"] for part in parts if part.get("hard")), {})
        whole: dict[str, Any] = next((part["whole"] for part in parts if part.get("whole")), {})
        self._columns = tuple(columns)
        self._fields = fields_of(whole.get("overlong"))
        for name, column in zip(self._fields, self._columns, strict=True):
            column.flags.writeable = False
            setattr(self, name, column)
        self._lengths = None if lengths is None else list(lengths)
        if self._lengths is not None:
            self._check_sample_counts(self._lengths)
        self._reader = _native.PackLookup(self._columns, self._lengths, self._metadata["global_pack"])
        self.path = path
        self._block = block
        self.max_length: int = self._metadata["max_length"]
        self.mode: str = self._metadata["mode"]
        mixed = [part["mode"] for part in self._metadata.get("parts", [])]
        self.modes: tuple[str, ...] = tuple(mixed or [self.mode] * len(self._metadata["samples"]))
        self.seed: int | None = self._metadata["seed"]
        self.drop_last: bool | None = hard.get("drop_last")
        self.overlong: str | None = whole.get("overlong")
        windows = [part["whole"]["window"] for part in parts if part["mode"] == "ordered"]
        self.window: int | None = windows[0] if windows else whole.get("window")
        self.max_samples: int | None = whole.get("max_samples")
        self.align: int = whole.get("align", 1)
        self.max_cost: int | None = whole.get("max_cost")
        multiple = self._metadata.get("multiple") or {}
        self.multiple_of: int | None = multiple.get("of")
        self.remainder: str | None = multiple.get("remainder")
        self.packs_repeated: int = multiple.get("packs", 0) if self.remainder == "repeat" else 0
        self.global_pack: bool = self._metadata["global_pack"]
        self.num_samples: tuple[int, ...] = tuple(self._metadata["samples"])
        self.num_tokens: int = self._metadata["tokens"]
        self.fingerprint: str = self._metadata["fingerprint"]

    def _check_sample_counts(self, lengths: Sequence[IntegerArray]) -> None:
        expected = self._metadata["samples"]
        found = [len(column) for column in lengths]
        if found != expected:
            raise PlanMismatchError(
                f"the plan was made for {format_count(len(expected), 'dataset')} of {expected[:8]} samples, "
                f"and the lengths are of {format_count(len(found), 'dataset')} of {found[:8]}"
            )

    @property
    def has_lengths(self) -> bool:
        """Whether the samples' lengths are attached, so that every `Piece.stop` is known."""
        return self._lengths is not None

    @property
    def lengths(self) -> list[IntegerArray] | None:
        """The samples' lengths, one array a dataset, where they are attached."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, in memory or in files."""
        return sum(column.nbytes for column in self._columns)

    def __len__(self) -> int:
        return len(self._columns[2])

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | list[Pack]:
        """Return pack `index`; negative numbers count from the end, a slice gives a list.

        Raises:
            NoSuchPackError: There is no such pack (an `IndexError`).
            InvalidTypeError: The index is neither an integer nor a slice of integers.
            InvalidInputError: The step of a slice is 0.
        """
        number = pack_numbers(index, len(self))
        if isinstance(number, range):
            return list(self.lookup(np.arange(number.start, number.stop, number.step, dtype=np.int64)))
        dataset_id, pieces = self._reader.pack(number)
        return Pack(dataset_id, [Piece._make(piece) for piece in pieces])

    def __iter__(self) -> Iterator[Pack]:
        for start in range(0, len(self), _ITERATED):
            stop = min(start + _ITERATED, len(self))
            yield from self.lookup(np.arange(start, stop, dtype=np.int64))

    def lookup(self, pack_ids: Any) -> PackBatch:
        """Return many packs at once, as arrays.

        Args:
            pack_ids: Pack numbers, integers, shape (k,), each in 0 … len(plan) - 1.

        Returns:
            A `tundish.packing.PackBatch`, whose attributes are arrays, and which iterates over its `Pack`s.

        Raises:
            NoSuchPackError: A number is out of range.
            PlanMismatchError: The columns are damaged, or name a sample that the attached lengths lack.

        Example:
            >>> from tundish import pack
            >>> batch = pack([5, 3, 9], 4).lookup([0, 3])
            >>> batch.sample.tolist(), batch.start.tolist(), batch.stop.tolist()
            ([0, 2], [0, 4], [4, 8])
        """
        return PackBatch(*self._reader.lookup(as_integer_array(pack_ids, "pack_ids")))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The content of `plan.json`."""
        return copy.deepcopy(self._metadata)
