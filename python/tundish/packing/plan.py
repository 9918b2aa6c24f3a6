"""`PackPlan`: the tokens and samples that make up each pack.

Invariants: the columns are read-only. A plan that was loaded or saved has passed the checks of the folder format.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from tundish import _native, logs
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NoSuchPackError,
    OutOfMemoryError,
    PlanMismatchError,
    TundishError,
    format_count,
    format_integer,
    format_share,
)
from tundish.packing.arguments import (
    IntegerArray,
    as_absolute,
    as_integer,
    as_integer_array,
    as_length_arrays,
    as_new_folder,
    as_picklable,
)
from tundish.packing.inspection.display import plan_as_html, print_packs
from tundish.packing.inspection.plan_stats import plan_ledger, plan_stats
from tundish.progress import ProgressLine

_logger = logging.getLogger("tundish.packing")

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
PIECE_FIELDS = ("piece_start", "piece_stop")


def fields_of(overlong: str | None) -> tuple[str, ...]:
    """The columns of a plan by its `overlong`, which is None in hard packing.

    Only split or truncated samples need a start and a stop for each piece.
    """
    return FIELDS + PIECE_FIELDS if overlong in ("split", "truncate") else FIELDS


class Piece(NamedTuple):
    """Tokens `start` … `stop` - 1 of sample `sample`; with `stop` None, all tokens from `start` on."""

    sample: int
    start: int
    stop: int | None


class Pack(NamedTuple):
    """One packed sequence: the pieces, in order, of samples of dataset `dataset_id`."""

    dataset_id: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class PackBatch:
    """Several packs, as arrays.

    Attributes:
        dataset_id: Dataset of each pack, int64, (packs,).
        piece_cu: Pack `k` has the pieces `piece_cu[k]:piece_cu[k + 1]`, int64, (packs + 1,).
        sample: Sample index of each piece, int64, (pieces,).
        start: First token taken of each piece's sample, int64, (pieces,).
        stop: One past the last token taken, -1 for "to the sample's end", int64, (pieces,).
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


def pack_numbers(index: Any, packs: int, what: str = "plan") -> int | range:
    """The number of the pack that `plan[index]` is, or the numbers that a slice gives, for a plan of `packs` packs.

    `what` is the plan in messages.

    Raises:
        NoSuchPackError: There is no such pack.
        InvalidTypeError: The index is neither an integer nor a slice of integers.
        InvalidInputError: The step of a slice is 0.
    """
    if isinstance(index, slice):
        try:
            return range(*index.indices(packs))
        except TypeError:
            raise InvalidTypeError(f"packs are asked for by a slice of integers, got {index!r}") from None
        except ValueError:
            raise InvalidInputError(
                f"packs are asked for by a slice whose step is not 0, got {index!r}"
            ) from None
    try:
        asked = operator.index(index)
    except TypeError:
        raise InvalidTypeError(f"a pack is asked for by its number, got {index!r}") from None
    number = asked + packs if asked < 0 else asked
    if not 0 <= number < packs:
        raise NoSuchPackError(
            f"pack {format_integer(asked)} does not exist: the {what} has {format_count(packs, 'pack')}"
        )
    return number


# Packs that are made together when a plan is iterated. Python's garbage collector would walk the pieces of many more
# packs again and again while they are made.
_ITERATED = 32


class PackPlan:
    """The tokens and samples that make up each pack of at most `max_length` tokens.

    `tundish.pack`, `tundish.pack_datasets` and `PackPlan.load` make plans. `plan[i]` is pack *i*, and `lookup` gives
    many packs at once as arrays. The columns are attributes: read-only numpy arrays of int32 or int64.

    Attributes:
        dataset_id: Dataset of each pack, (packs,).
        indices: Sample index of each piece, packs in order, (pieces,).
        indices_cu_len: Inclusive cumulative piece count, (packs,): pack *i* has the pieces
            `indices_cu_len[i - 1]:indices_cu_len[i]`, with 0 before the first.
        start_offset: First token taken from each pack's first sample, (packs,).
        end_offset: One past the last token taken from each pack's last sample, (packs,).
        longest: Tokens of each pack's longest piece, (packs,).
        piece_start, piece_stop: First token taken of each piece's sample, and one past the last, (pieces,). None unless
            `overlong` is "split" or "truncate".
        max_length: The most tokens of a pack; in mode "hard" all packs but the last are full.
        mode: "hard", "best_fit", "ordered" or "sequential".
        seed: The seed that the order was drawn from, or None.
        drop_last: Whether tails shorter than a pack were left out; None unless the mode is "hard".
        overlong: What happened to samples longer than `max_length`; None in mode "hard".
        window: Packs that were open at a time; None unless the mode is "ordered".
        max_samples: The most pieces of a pack, or None.
        align: Each piece takes a multiple of so many tokens of its pack; 1 for no padding.
        max_cost: The most that the samples of a pack cost together, or None.
        multiple_of: The number of packs was made a multiple of this, or None.
        remainder: "drop" or "repeat", how that was done; None without `multiple_of`.
        packs_repeated: Packs at the end that are the first packs again.
        global_pack: Whether all datasets were packed as one.
        num_samples: Samples of each dataset.
        num_tokens: Tokens of the ordered samples.
        fingerprint: 32 hexadecimal digits, a hash of all inputs that determine the plan.
        path: The folder that the columns are mapped from; None for a plan in memory, shared or not.

    Example:
        >>> from tundish import pack
        >>> plan = pack([5, 3, 9], 8)
        >>> len(plan), plan.indices.tolist(), plan.indices_cu_len.tolist()
        (2, [0, 1, 2], [2, 3])
    """

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
        checks: _native.PlanChecks | None = None,
    ) -> None:
        """Make a plan of columns that were checked; `pack`, `pack_datasets` and `load` call it.

        Args:
            columns: The columns, in the order of `fields_of`.
            metadata: The content of `plan.json`.
            lengths: The lengths to attach, one array a dataset.
            path: The folder that the columns are mapped from.
            checks: The checksums of mapped columns, which are compared before a pack is read.
        """
        self._metadata_json = metadata
        self._metadata: dict[str, Any] = json.loads(metadata)
        self._columns = tuple(columns)
        self._fields = fields_of(self._metadata["overlong"])
        for name, column in zip(self._fields, self._columns, strict=True):
            column.flags.writeable = False
            setattr(self, name, column)
        self._lengths = None if lengths is None else list(lengths)
        if self._lengths is not None:
            self._check_sample_counts(self._lengths)
        self._checks = checks
        self._reader = _native.PackLookup(
            self._columns, self._lengths, self._metadata["global_pack"], self._checks
        )
        self.path = path
        self.max_length: int = self._metadata["max_length"]
        self.mode: str = self._metadata["mode"]
        self.seed: int | None = self._metadata["seed"]
        self.drop_last: bool | None = self._metadata["drop_last"]
        self.overlong: str | None = self._metadata["overlong"]
        self.window: int | None = self._metadata["window"]
        self.max_samples: int | None = self._metadata["max_samples"]
        self.align: int = self._metadata["align"]
        self.max_cost: int | None = self._metadata["max_cost"]
        self.multiple_of: int | None = self._metadata["multiple_of"]
        self.remainder: str | None = self._metadata["remainder"]
        self.global_pack: bool = self._metadata["global_pack"]
        self.num_samples: tuple[int, ...] = tuple(self._metadata["samples"])
        self.packs_repeated: int = self._metadata["counts"]["packs_repeated"]
        self.num_tokens: int = self._metadata["counts"]["tokens"]
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
        return next(iter(self.lookup(np.array([number], dtype=np.int64))))

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
            PlanFormatError: A file that the packs are read from is damaged; the message names it.
            PlanMismatchError: The columns name a sample that the attached lengths lack, or contradict each other.

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

    def with_lengths(self, lengths: Any) -> Self:
        """Return the same plan with the samples' lengths attached, so that every `Piece.stop` is known.

        Args:
            lengths: As `pack` takes them; a list of arrays for several datasets.

        Returns:
            A plan that shares the columns of this one.

        Raises:
            PlanMismatchError: The lengths are of another number of samples.

        Example:
            >>> from tundish import pack
            >>> pack([5, 3, 9], 8).with_lengths([5, 3, 9])[0].pieces[0].stop
            5
        """
        arrays = as_length_arrays(lengths, single=len(self.num_samples) == 1)
        return type(self)(
            self._columns, self._metadata_json, lengths=arrays, path=self.path, checks=self._checks
        )

    def __repr__(self) -> str:
        where = f", path={str(self.path)!r}" if self.path else ""
        return (
            f"PackPlan({self._summary()}, {format_count(len(self.indices), 'piece')}, mode={self.mode!r}, "
            f"fingerprint={self.fingerprint[:12]}…{where})"
        )

    def _repr_html_(self) -> str:
        """The plan as a small table, for notebooks."""
        return plan_as_html(self)

    def _summary(self) -> str:
        most = "" if self.mode == "hard" else "up to "
        return f"{format_count(len(self), 'pack')} of {most}{format_count(self.max_length, 'token')}"

    def log(self, what: str, start: float) -> None:
        """Log at INFO, in the first process of the job, what was done with the plan since `start` of `perf_counter`."""
        stats = self.stats()
        logs.info(
            _logger,
            "%s: %s, %s full, of %s and %s, in %.1f s",
            what,
            self._summary(),
            format_share(stats["fill"]),
            format_count(int(stats["samples"]), "sample"),
            format_count(int(stats["tokens_packed"]), "token"),
            time.perf_counter() - start,
        )

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """Copy the columns as int64.

        Returns:
            The columns by the names in `tundish.packing.FIELDS`, and `piece_start` and `piece_stop` if the plan has
            them.

        Raises:
            PlanFormatError: A file that the columns are mapped from is damaged; the message names it.
            OutOfMemoryError: There is no room for them; the columns themselves are attributes of the plan.

        Example:
            >>> from tundish import pack
            >>> pack([5, 3, 9], 8).arrays()["indices"].tolist()
            [0, 1, 2]
        """
        self._reader.check()
        try:
            pairs = zip(self._fields, self._columns, strict=True)
            return {name: column.astype(np.int64) for name, column in pairs}
        except MemoryError as error:
            raise OutOfMemoryError(
                f"the columns as int64 need {8 * sum(map(len, self._columns))} bytes of memory, which the system does "
                f"not have; use the plan's attributes ({', '.join(self._fields)}), which are the columns without a copy"
            ) from error

    def stats(self) -> dict[str, int | float]:
        """Count what the plan packs, cuts and leaves out.

        Returns:
            packs, pieces: Their numbers.
            samples: Samples that the plan takes tokens of (or that lie in a pack without any).
            samples_cut: Samples that are in more than one pack, or lose their end.
            samples_empty: Samples of length 0. They are left out; in mode "hard", those on a boundary of packs are.
            samples_overlong: Samples that `overlong` split, truncated or dropped; 0 in mode "hard".
            tokens, tokens_packed, tokens_dropped: Tokens of the ordered samples.
            packs_dropped, packs_repeated, tokens_repeated: What `multiple_of` leaves out or repeats. Tokens of packs
                that are left out are in tokens_dropped, too.
            padding: Tokens that the packs lack to `max_length`; padding_align: those due to `align`.
            fill: Share of the packs that tokens take, repeated ones included; 1.0 for an empty plan.
            pieces_per_pack: Mean number of pieces; max_pieces_per_pack: the largest.
            longest: Tokens of the longest piece.

        Example:
            >>> from tundish import pack
            >>> stats = pack([5, 3, 9], 4).stats()
            >>> stats["packs"], stats["samples_cut"], stats["tokens_dropped"]
            (4, 2, 1)
        """
        return plan_stats(self._metadata)

    def ledger(self) -> dict[str, int]:
        """Account for every token, in bounded memory. The plan needs the lengths.

        Returns:
            tokens: Tokens of the ordered samples: `packed` + `truncated` + `dropped`.
            packed: Tokens in packs; cut: those of them in pieces that are no whole samples.
            truncated: Tokens behind `max_length` of samples that `overlong="truncate"` shortened.
            dropped: Tokens of the tail, of samples that `overlong="drop"` left out, or of packs that `multiple_of`
                left out.
            repeated: Tokens of packs that come again; they are not in `packed`.
            capacity: Packs times `max_length`: `packed` + `repeated` + `padding`.
            padding: Tokens that packs lack; padding_align: those due to `align`.

        Raises:
            InvalidInputError: The plan has no lengths.
            PlanMismatchError: The sums do not agree: the lengths are others, or the plan is damaged.

        Example:
            >>> from tundish import pack
            >>> ledger = pack([5, 3, 9], 8, mode="sequential", overlong="truncate").ledger()
            >>> ledger["packed"], ledger["truncated"], ledger["padding"]
            (16, 1, 0)
        """
        return plan_ledger(self)

    def sample_index(self, order: Any = None, *, progress: bool | None = None) -> IntegerArray:
        """Convert the plan to Megatron-LM's `sample_index`. The plan needs the lengths.

        Row *i* says where token `i * max_length` of the stream is. It holds the position of the token's sample in the
        order (Megatron's index into `document_index`), and the token's offset in that sample. The rows equal those of
        Megatron-Core's `build_sample_idx` for the same order, with `seq_length=max_length` and one extra token a
        sequence. One case differs: if the order begins with empty samples, Megatron's first row is (0, 0), and this one
        points at the first token. The dropped tail has a row too.

        Args:
            order: The order that was given to `pack`, if any. It is needed for a plan that was made with one.
            progress: Show progress; by default on a terminal.

        Returns:
            Shape (rows, 2), int32 where all values fit, else int64. Memory beyond it is two integers a sample.

        Raises:
            InvalidInputError: The plan is not of mode "hard", is of several datasets or repeats packs, or the order or
                the lengths are missing.
            PlanMismatchError: The plan was made with another order or other lengths.

        Example:
            >>> from tundish import pack
            >>> pack([5, 3, 9], 8).sample_index().tolist()
            [[0, 0], [2, 0], [2, 8]]
        """
        if self.mode != "hard" or (len(self.num_samples) != 1 and not self.global_pack):
            raise InvalidInputError(
                f"this plan is of mode {self.mode!r} and of {format_count(len(self.num_samples), 'dataset')}, and "
                "Megatron's sample_index can only say where one stream of tokens is cut. Read the packs with "
                "plan.lookup, or pack with mode='hard', several datasets with global_pack=True"
            )
        if self.packs_repeated:
            raise InvalidInputError(
                "this plan repeats packs, which Megatron's sample_index cannot say: pack without remainder='repeat'"
            )
        # The fingerprint tells whether these are the lengths and the order of the plan.
        self.verify(order=order, progress=progress)
        lengths = np.concatenate([np.asarray(column) for column in self._lengths or []])
        if order is not None:
            lengths = lengths[as_integer_array(order, "order")]
        elif self.seed is not None:
            lengths = lengths[_native.shuffled_indices(len(lengths), self.seed)]
        ends = np.cumsum(lengths, dtype=np.int64)
        tokens = np.arange(0, self.num_tokens, self.max_length, dtype=np.int64)
        places = np.searchsorted(ends, tokens, side="right")
        rows = np.stack([places, tokens - (ends[places] - lengths[places])], axis=1)
        return rows.astype(np.int32) if rows.max(initial=0) <= np.iinfo(np.int32).max else rows

    def save(self, path: str | os.PathLike[str], *, progress: bool | None = None) -> None:
        """Publish the plan as the folder `path`: whole and durable, or not at all.

        If the same plan already lies there, nothing happens.

        Args:
            path: The folder to make; its parent must exist.
            progress: Show progress; by default on a terminal.

        Raises:
            AlreadyExistsError: Something else lies there.
            NotFoundError: The parent folder does not exist.
            StorageError: The file system refused (read-only, full). Too little room is refused before anything is
                written.
            PlanFormatError: A file that the plan is mapped from is damaged; the message names it.

        Example:
            >>> import tempfile, tundish as td
            >>> plan, folder = td.pack([5, 3, 9], 8), tempfile.mkdtemp() + "/plan"
            >>> plan.save(folder)
            >>> td.PackPlan.load(folder).fingerprint == plan.fingerprint
            True
        """
        folder = as_new_folder(path, "path")
        try:
            with ProgressLine("plan", progress) as line:
                self._reader.save(self._metadata_json, folder, line.callback)
        except AlreadyExistsError:
            if not self._lies_at(folder):
                raise

    def _lies_at(self, folder: Path) -> bool:
        try:
            metadata, _, _ = _native.open_plan(folder)
        except (TundishError, OSError):
            return False
        return bool(json.loads(metadata) == self._metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], lengths: Any = None, *, progress: bool | None = None) -> Self:
        """Map a plan from its folder, in constant memory.

        Each file is opened once, checked and mapped: replacing or removing files later changes nothing. `plan.json` and
        the offsets are compared with their checksums here. The other columns are compared block by block, when a pack
        of a block is first read: so no damaged pack is trained on. Truncating a file later ends a process that reads
        it (SIGBUS).

        Args:
            path: A folder made by `save`, `out=` or `cache_dir=`.
            lengths: The samples' lengths to attach, as `pack` takes them (a list of arrays for several datasets).
                Every `Piece.stop` is then known. `verify` checks them against the plan.
            progress: Show progress; by default on a terminal.

        Returns:
            The plan, whose columns are mapped from the files.

        Raises:
            NotFoundError: The folder or one of its files is missing.
            PlanFormatError: A file is damaged, truncated, of another version, dtype or shape, or no regular file; the
                message names the file.
            PlanMismatchError: The lengths are of another number of samples.
            StorageError: The file system refused.

        Example:
            >>> import tempfile, tundish as td
            >>> folder = tempfile.mkdtemp() + "/plan"
            >>> td.pack([5, 3, 9], 8).save(folder)
            >>> td.PackPlan.load(folder, lengths=[5, 3, 9])[0].pieces[0].stop
            5
        """
        start = time.perf_counter()
        plan = cls.map_folder(path, lengths, progress=progress)
        plan.log(f"loaded {plan.path}", start)
        return plan

    @classmethod
    def map_folder(
        cls, path: str | os.PathLike[str], lengths: Any = None, *, progress: bool | None = None
    ) -> Self:
        """Map a plan as `load` does, without a line in the log."""
        folder = as_absolute(path, "path")
        with ProgressLine("plan", progress) as line:
            metadata, columns, checks = _native.open_plan(folder, line.callback)
        single = len(json.loads(metadata)["samples"]) == 1
        attached = None if lengths is None else as_length_arrays(lengths, single=single)
        return cls(columns, metadata, lengths=attached, path=folder, checks=checks)

    def verify(
        self,
        lengths: Any = None,
        *,
        order: Any = None,
        costs: Any = None,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Check the whole plan against the samples' lengths, in one pass.

        Every token of the ordered samples must be in one piece, or be counted as left out: in a tail, truncated or
        dropped. No pack may hold more than its limits, and all counts of `plan.json` must be right. The fingerprint
        of lengths, order and parameters must be the plan's. It is not checked which samples are put together:
        `plan.metadata["algorithm_version"]` says which version of the algorithm chose them.

        It does not check that the lengths are those of your samples; `PackedDataset` does as it reads them.

        Args:
            lengths: As `pack` took them; by default the attached ones.
            order: The order that `pack` took as `order=`. It is needed for a plan that was made with one, and refused
                for any other.
            costs: The costs that `pack` took, likewise.
            threads: As in `pack`.
            progress: Show progress; by default on a terminal.

        Raises:
            PlanMismatchError: The plan does not belong to the lengths, the order and the costs, or was made without an
                order or costs that are given. The message names the first pack or the value at fault.
            InvalidInputError: Lengths, an order or costs are missing, or `pack` would refuse them.
            PlanFormatError: A file that the plan is mapped from is damaged; the message names it.

        Example:
            >>> from tundish import pack
            >>> pack([5, 3, 9], 8, seed=1).verify()
            >>> pack([5, 3, 9], 8, order=[2, 0]).verify(order=[2, 0])
        """
        if lengths is None:
            if self._lengths is None:
                raise InvalidInputError("verify needs the lengths: pass them, or load the plan with lengths=")
            lengths = self._lengths
        single = len(self.num_samples) == 1
        arrays = as_length_arrays(lengths, single=single)
        given = None if order is None else as_integer_array(order, "order")
        costed = None if costs is None else as_length_arrays(costs, single=single, name="costs")
        with ProgressLine("plan", progress) as line:
            self._reader.verify(self._metadata_json, arrays, given, costed, threads, line.callback)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the plan to a file: `.png`, `.svg` or `.pdf`.

        The plot shows the samples' lengths, the pieces of a pack, how many samples are cut or overlong, and the tokens
        that are lost. Beside them is the padding of batches of 8 samples that are padded to their longest.
        Without lengths it shows each pack's longest piece instead, and no such batches.

        Args:
            path: The file to write; it appears complete and durable.

        Raises:
            MissingExtraError: matplotlib is not installed.
            InvalidInputError: The file has another ending.
            StorageError: The file cannot be written.
            NotFoundError: Its folder does not exist.
        """
        from tundish.packing.inspection.plot import plot_plan

        plot_plan(self, path)

    def preview(self, n: int = 3, tokenizer: Any = None, *, samples: Any = None) -> None:
        """Print the first packs: where each piece comes from, and with the samples its text and what is learned of it.

        Args:
            n: Packs to print, at least 1.
            tokenizer: An object whose `decode` makes text of a list of token ids. It needs `samples`.
            samples: What the plan was made for, as `PackedDataset` takes it: a plan holds numbers, and no tokens. Then
                `PackedDataset(samples, plan).preview` prints the packs.

        Raises:
            InvalidInputError: `n` is below 1, or there is a tokenizer and no samples.
            InvalidTypeError: `n` is no integer.
            TundishError: With samples, as `PackedDataset` and its `preview`.

        Example:
            >>> from tundish import pack
            >>> pack([5, 3, 9], 8).preview(1)
            pack 0: 8 tokens in 2 pieces
              piece 0: tokens 0:5 of sample 0
              piece 1: tokens 0:3 of sample 1
        """
        if samples is not None:
            # By its public name, because the module is built on this one. It imports torch.
            from tundish.packing import PackedDataset

            PackedDataset(samples, self).preview(n, tokenizer)
            return
        if tokenizer is not None:
            raise InvalidInputError(
                "a plan holds no tokens that the tokenizer could decode: give the samples, too, as in "
                "plan.preview(3, tokenizer, samples=samples)"
            )
        several = len(self.num_samples) > 1 and not self.global_pack
        print_packs(self[: as_integer(n, "n", 1, 2**63 - 1)], several_datasets=several)

    @classmethod
    def _in_folder(cls, path: Path, fingerprint: str, lengths: list[IntegerArray] | None) -> Self:
        """Map the plan that was pickled as its folder."""
        plan = cls.map_folder(path, lengths, progress=False)
        if plan.fingerprint != fingerprint:
            raise PlanMismatchError(f"{path} holds another plan now than the one that was pickled")
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        lengths = None if self._lengths is None else list(map(as_picklable, self._lengths))
        if self.path is not None:
            return self._in_folder, (self.path, self.fingerprint, lengths)
        return partial(type(self), lengths=lengths), (self._columns, self._metadata_json)
