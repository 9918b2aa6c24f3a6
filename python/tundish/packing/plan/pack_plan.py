"""`PackPlan`: which tokens of which samples make up each pack.

Owns the columns of a plan: in memory of this process, in memory that ranks share, or mapped from a folder. What always
holds: the columns are read-only; a column is int32 where all its values fit, else int64; a plan that was loaded or
saved has passed the checks of the folder format.
"""

from __future__ import annotations

import copy
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NoSuchPackError,
    OutOfMemoryError,
    PlanMismatchError,
    TundishError,
    counted,
    shown,
)
from tundish.packing.block import columns_in
from tundish.packing.columns import (
    IntegerArray,
    as_absolute,
    as_integer_column,
    as_length_columns,
    as_new_folder,
    as_threads,
    packed_lengths,
    unpacked_lengths,
)

__all__ = ["FIELDS", "Pack", "PackBatch", "PackPlan", "Piece", "plan_in_block"]

# Packs that are made together when a plan is iterated. Of many more, Python's garbage collector would walk the pieces
# again and again while they are made.
_ITERATED = 32

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")


class Piece(NamedTuple):
    """Tokens `start` … `stop` - 1 of sample `sample`; `stop` None means to the sample's end."""

    sample: int
    start: int
    stop: int | None


class Pack(NamedTuple):
    """One packed sequence: the pieces, in order, of samples of dataset `dataset_id`."""

    dataset_id: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class PackBatch:
    """Several packs, column by column.

    Attributes:
        dataset_id: dataset of each pack, int64, (packs,).
        piece_cu: pack `k` has the pieces `piece_cu[k]:piece_cu[k + 1]`, int64, (packs + 1,).
        sample: sample index of each piece, int64, (pieces,).
        start: first token taken of each piece's sample, int64, (pieces,).
        stop: one past the last token taken, -1 for "to the sample's end", int64, (pieces,).
    """

    dataset_id: NDArray[np.int64]
    piece_cu: NDArray[np.int64]
    sample: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dataset_id)

    def __iter__(self) -> Iterator[Pack]:
        bounds = self.piece_cu.tolist()
        rows = zip(self.sample.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        pieces = [Piece(sample, start, None if stop < 0 else stop) for sample, start, stop in rows]
        for number, dataset in enumerate(self.dataset_id.tolist()):
            yield Pack(dataset, pieces[bounds[number] : bounds[number + 1]])


class PackPlan:
    """Which tokens of which samples make up each pack of `max_length` tokens.

    Made by `tundish.pack`, `tundish.pack_datasets` or `PackPlan.load`. `plan[i]` is pack *i*; `lookup`
    gives many at once as arrays; the six columns are attributes (read-only numpy arrays, int32
    or int64), as is what the plan was made with.

    Attributes:
        dataset_id: dataset of each pack, (packs,).
        indices: sample index of each piece, packs in order, (pieces,).
        indices_cu_len: inclusive cumulative piece count, (packs,): pack *i* has the pieces
            `indices_cu_len[i - 1]:indices_cu_len[i]`, with 0 before the first.
        start_offset: first token taken from each pack's first sample, (packs,).
        end_offset: one past the last token taken from each pack's last sample, (packs,).
        longest: tokens of each pack's longest piece, (packs,).
        max_length: tokens a pack.
        mode: the algorithm, "hard".
        seed: what the order was drawn from, or None.
        drop_last: whether the tail shorter than a pack was left out.
        global_pack: whether all datasets were packed as one.
        num_samples: samples of each dataset.
        num_tokens: tokens of the ordered samples.
        fingerprint: 32 hexadecimal digits, a hash of all inputs that determine the plan.
        path: the folder that the columns are mapped from; None for a plan in memory, shared or not.
    """

    dataset_id: IntegerArray
    indices: IntegerArray
    indices_cu_len: IntegerArray
    start_offset: IntegerArray
    end_offset: IntegerArray
    longest: IntegerArray

    def __init__(
        self,
        columns: Sequence[NDArray[Any]],
        facts: str,
        *,
        lengths: Sequence[IntegerArray] | None = None,
        path: Path | None = None,
        block: NDArray[np.uint8] | None = None,
    ) -> None:
        """Not called by users: `pack`, `pack_datasets` and `load` make plans.

        `block`: the memory that the columns lie in, where it is shared and pickled as the place it is at.
        """
        self._columns = tuple(columns)
        for name, column in zip(FIELDS, self._columns, strict=True):
            column.flags.writeable = False
            setattr(self, name, column)
        self._facts_json = facts
        self._facts: dict[str, Any] = json.loads(facts)
        self._lengths = None if lengths is None else list(lengths)
        if self._lengths is not None:
            self._check_sample_counts(self._lengths)
        self._reader = _native.PlanReader(self._columns, self._lengths, self._facts["global_pack"])
        self.path = path
        self._block = block
        self.max_length: int = self._facts["max_length"]
        self.mode: str = self._facts["mode"]
        self.seed: int | None = self._facts["seed"]
        self.drop_last: bool = self._facts["drop_last"]
        self.global_pack: bool = self._facts["global_pack"]
        self.num_samples: tuple[int, ...] = tuple(self._facts["samples"])
        self.num_tokens: int = self._facts["tokens"]
        self.fingerprint: str = self._facts["fingerprint"]

    def _check_sample_counts(self, lengths: Sequence[IntegerArray]) -> None:
        expected = self._facts["samples"]
        found = [len(column) for column in lengths]
        if found != expected:
            raise PlanMismatchError(
                f"the plan was made for {counted(len(expected), 'dataset')} of {expected[:8]} samples, "
                f"and the lengths are of {counted(len(found), 'dataset')} of {found[:8]}"
            )

    @property
    def has_lengths(self) -> bool:
        """Whether the samples' lengths are attached, so that every `Piece.stop` is known."""
        return self._lengths is not None

    @property
    def lengths(self) -> list[IntegerArray] | None:
        """The samples' lengths, one array a dataset, where they are attached."""
        return self._lengths

    def with_lengths(self, lengths: Any) -> PackPlan:
        """The same plan with the samples' lengths attached, so that every `Piece.stop` is known.

        Args:
            lengths: as `pack` takes them; a list of arrays for several datasets.

        Raises:
            PlanMismatchError: the lengths are of another number of samples.
        """
        columns = as_length_columns(lengths, single=len(self.num_samples) == 1)
        return PackPlan(self._columns, self._facts_json, lengths=columns, path=self.path, block=self._block)

    def __len__(self) -> int:
        return len(self._columns[2])

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | list[Pack]:
        """Pack `index`; negative numbers count from the end, a slice gives a list.

        Raises:
            NoSuchPackError: there is no such pack (an `IndexError`).
            InvalidTypeError: the index is neither an integer nor a slice of integers.
            InvalidInputError: the step of a slice is 0.
        """
        if isinstance(index, slice):
            try:
                start, stop, step = index.indices(len(self))
            except TypeError:
                raise InvalidTypeError(f"packs are asked for by a slice of integers, got {index!r}") from None
            except ValueError:
                raise InvalidInputError(
                    f"packs are asked for by a slice whose step is not 0, got {index!r}"
                ) from None
            return list(self.lookup(np.arange(start, stop, step, dtype=np.int64)))
        try:
            asked = operator.index(index)
        except TypeError:
            raise InvalidTypeError(f"a pack is asked for by its number, got {index!r}") from None
        number = asked + len(self) if asked < 0 else asked
        if not 0 <= number < len(self):
            raise NoSuchPackError(f"pack {shown(asked)} does not exist: the plan has {len(self)} packs")
        dataset_id, pieces = self._reader.pack(number)
        return Pack(dataset_id, [Piece._make(piece) for piece in pieces])

    def __iter__(self) -> Iterator[Pack]:
        for start in range(0, len(self), _ITERATED):
            stop = min(start + _ITERATED, len(self))
            yield from self.lookup(np.arange(start, stop, dtype=np.int64))

    def __repr__(self) -> str:
        where = f", path={str(self.path)!r}" if self.path else ""
        return (
            f"PackPlan({len(self)} packs of {self.max_length} tokens, {len(self.indices)} pieces, "
            f"mode={self.mode!r}, fingerprint={self.fingerprint[:12]}…{where})"
        )

    def lookup(self, pack_ids: Any) -> PackBatch:
        """Many packs at once, as arrays.

        Args:
            pack_ids: pack numbers, integers, shape (k,), each in 0 … len(plan) - 1.

        Returns:
            A `tundish.packing.PackBatch`, whose attributes are arrays, and which iterates over its `Pack`s.

        Raises:
            NoSuchPackError: a number is out of range.
            PlanMismatchError: the columns are damaged, or name a sample that the attached lengths lack.
        """
        return PackBatch(*self._reader.lookup(as_integer_column(pack_ids, "pack_ids")))

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """The six columns as int64, by name.

        Raises:
            OutOfMemoryError: there is no room for them; the columns themselves are attributes of the plan.
        """
        try:
            return {name: column.astype(np.int64) for name, column in zip(FIELDS, self._columns, strict=True)}
        except MemoryError as error:
            needed = 8 * sum(map(len, self._columns))
            raise OutOfMemoryError(
                f"the columns as int64 take {needed} bytes of memory, which there are not; the plan's attributes "
                f"({', '.join(FIELDS)}) are the columns as they are, without a copy"
            ) from error

    def stats(self) -> dict[str, int | float]:
        """How much of the samples the plan packs, cuts and leaves out.

        Returns:
            packs, pieces: how many.
            samples: samples that the plan takes tokens of (or that lie in a pack without any).
            samples_cut: samples that are in more than one pack, or lose their end to the dropped tail.
            tokens, tokens_packed, tokens_dropped: of the ordered samples, in tokens.
            fill: tokens_packed over packs times max_length; 1.0 for an empty plan.
            pieces_per_pack: mean; max_pieces_per_pack: largest.
            longest: longest piece, in tokens.
        """
        from tundish.packing.stats import plan_stats

        return plan_stats(self)

    def sample_index(self, order: Any = None, *, progress: bool | None = None) -> IntegerArray:
        """The plan as Megatron-LM's `sample_index`.

        Row *i* says where token `i * max_length` of the stream is: the position of its sample in the order (Megatron's
        index into `document_index`) and the token's offset in that sample. It equals what Megatron-Core's
        `build_sample_idx` gives for the same order with `seq_length=max_length` and one extra token a sequence, but
        where the order begins with empty samples: Megatron's first row is always (0, 0), and this one is where the
        first token is. There is one row for each such token, so the tail that was dropped has a row too.

        Args:
            order: the order that was given to `pack`, if one was. Needed only where empty samples lie on pack
                boundaries, which the plan does not hold; so are the lengths then. One that is given is checked: whole
                where the lengths are attached, else as far as the plan holds it, which is up to the dropped tail.
            progress: show progress; by default on a terminal.

        Returns:
            shape (rows, 2), int32 where all values fit, else int64. Memory beyond it is constant, plus one index a
            sample where empty samples lie on boundaries and the order has to be drawn from the seed.

        Raises:
            InvalidInputError: a plan of several datasets, or an order or lengths that are needed are missing.
            PlanMismatchError: the plan was made with another order, or without one, or the attached lengths are
                not its own, or its columns are damaged.
        """
        from tundish.progress import ProgressLine

        given = None if order is None else as_integer_column(order, "order")
        with ProgressLine("plan", progress) as line:
            return _native.plan_sample_index(self._columns, self._facts_json, self._lengths, given, line.callback)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The content of `plan.json`."""
        return copy.deepcopy(self._facts)

    def save(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> None:
        """Publish the plan as the folder `path`: whole and durable, or not at all.

        Saving a plan where the same plan already lies does nothing.

        Args:
            path: the folder to make; its parent must exist.
            progress: show progress; by default on a terminal.

        Raises:
            AlreadyExistsError: something else is there.
            NotFoundError: the parent folder does not exist.
            StorageError: the file system refused (read-only, full); too little room is seen before anything is
                written.
        """
        from tundish.progress import ProgressLine

        try:
            with ProgressLine("plan", progress) as line:
                _native.save_plan(self._columns, self._facts_json, as_new_folder(path, "path"), line.callback)
        except AlreadyExistsError:
            if not self._lies_at(path):
                raise

    def _lies_at(self, path: str | os.PathLike[str]) -> bool:
        try:
            facts, _ = _native.open_plan(path)
        except (TundishError, OSError):
            return False
        return bool(json.loads(facts) == self._facts)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], lengths: Any = None, *, progress: bool | None = None
    ) -> PackPlan:
        """Map a plan from its folder, in constant memory.

        Args:
            path: a folder made by `save`, `out=` or `cache_dir=`.
            lengths: the samples' lengths, as `pack` takes them (a list of arrays for several datasets), to
                attach them: every `Piece.stop` is then known. They are not checked against the plan; `verify` does.
            progress: show progress; by default on a terminal.

        Raises:
            NotFoundError: the folder or one of its files is missing.
            PlanFormatError: a file is damaged, truncated, of another version, dtype or shape, or the offset
                table does not add up; the message names the file.
            PlanMismatchError: the lengths are of another number of samples.
            StorageError: the file system refused.

        Each file is opened once, and what was checked is what is mapped: files that are replaced or removed
        meanwhile or later do not matter. Files that are overwritten in place change the plan, and a file that is
        truncated while it is mapped ends the process that reads it (SIGBUS).
        """
        from tundish.progress import ProgressLine

        folder = as_absolute(path, "path")
        with ProgressLine("plan", progress) as line:
            facts, columns = _native.open_plan(folder, line.callback)
        single = len(json.loads(facts)["samples"]) == 1
        attached = None if lengths is None else as_length_columns(lengths, single=single)
        return cls(columns, facts, lengths=attached, path=folder)

    def verify(
        self,
        lengths: Any = None,
        *,
        order: Any = None,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Check the whole plan against the samples' lengths, by another path than the one that made it.

        Checked are every entry of the six columns, their dtypes and every value of `plan.json`. The ordered samples
        are walked pack by pack: each piece must be of the next sample or go on where the pack before stopped, each
        pack must be full, and what the packs leave out is counted: the tail and where it starts, empty samples on
        boundaries, tokens. The fingerprint of lengths, order and parameters must be the plan's. None of the algorithm
        that cuts packs is used; the shuffle of a seed and the hash are the same code that made the plan.

        Not checked is what the plan does not hold: whether the lengths are those of your samples
        (`PackedDataset` compares them as it reads).

        Args:
            lengths: as `pack` took them; by default the attached ones.
            order: the order that `pack` took as `order=`. Needed for a plan that says it was made with one, else what
                it says about its order could not be checked; refused for a plan that says it was made without.
            threads: as in `pack`.
            progress: show progress; by default on a terminal.

        Raises:
            PlanMismatchError: the plan does not belong to the lengths and the order, or an order is given and the
                plan says it has none; the message names the first pack or the value at fault.
            InvalidInputError: no lengths were given and none are attached, or no order and the plan
                says it was made with one; or lengths or an order that `pack` would refuse.

        >>> from tundish import pack
        >>> pack([5, 3, 9], 8, seed=1).verify()
        >>> pack([5, 3, 9], 8, order=[2, 0]).verify(order=[2, 0])
        """
        from tundish.progress import ProgressLine

        if lengths is None:
            if self._lengths is None:
                raise InvalidInputError("verify needs the lengths: pass them, or load the plan with lengths=")
            lengths = self._lengths
        columns = as_length_columns(lengths, single=len(self.num_samples) == 1)
        self._check_sample_counts(columns)
        given = None if order is None else as_integer_column(order, "order")
        with ProgressLine("plan", progress) as line:
            _native.verify_plan(
                self._columns, self._facts_json, columns, given, as_threads(threads), line.callback
            )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan to a picture: `.png`, `.svg` or `.pdf`.

        It shows the samples' lengths (of plans without lengths attached: each pack's longest piece), pieces a pack,
        how many samples are cut, and the tokens that are lost, beside what padding would have cost.

        Raises:
            MissingExtraError: there is no matplotlib.
            InvalidInputError: another kind of picture.
            StorageError, NotFoundError: the file cannot be written.
        """
        from tundish.packing.plot import plot_plan

        plot_plan(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return _reload, (self.path, self.fingerprint, packed_lengths(self._lengths))
        if self._block is not None:
            return plan_in_block, (self._block, packed_lengths(self._lengths))
        return _rebuild, (self._columns, self._facts_json, packed_lengths(self._lengths))


def _reload(path: Path, fingerprint: str, lengths: list[Any] | None) -> PackPlan:
    plan = PackPlan.load(path, unpacked_lengths(lengths), progress=False)
    if plan.fingerprint != fingerprint:
        raise PlanMismatchError(f"{path} holds another plan now than the one that was pickled")
    return plan


def plan_in_block(block: NDArray[np.uint8], lengths: list[Any] | None) -> PackPlan:
    """The plan that lies in a block of shared memory; `lengths` as they are pickled, or as `PackPlan` takes them."""
    facts, columns = columns_in(block)
    return PackPlan(columns, facts, lengths=unpacked_lengths(lengths), block=block)


def _rebuild(columns: Sequence[NDArray[Any]], facts: str, lengths: list[Any] | None) -> PackPlan:
    return PackPlan(columns, facts, lengths=unpacked_lengths(lengths))
