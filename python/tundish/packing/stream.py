"""`PackedStream`: packs of samples that come one after the other, and the state of a pass through them.

Invariants:
1. Pack *i* is pack *i* of the plan that `pack` makes of the same lengths in the same order.
2. The pieces of packs that are not given out own their memory. Nothing else of a sample is kept.
3. A state belongs to the packs that were given out: it changes only when an item is made, after all that may fail.
4. A state is loaded completely or refused.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import mmap
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from tundish import _native
from tundish.errors import InvalidInputError, StateMismatchError, format_type
from tundish.packing.arguments import as_integer
from tundish.packing.item import ItemBuilder, Positions
from tundish.packing.samples import Extras, Padding, Sample, SampleReader, dtype_of
from tundish.packing.stream_source import (
    SourceState,
    StreamReader,
    Worker,
    check_source,
    epoch_of,
    is_stateful,
    passes_once,
)
from tundish.saved_states import check_state

_KIND, _VERSION = "PackedStream", 1


class PackedStream(IterableDataset[dict[str, Any]]):
    """An iterable dataset of the packs of a stream of samples, which are packed as they come.

    Samples, items and their keys are those of `PackedDataset`. Pack *i* is pack *i* of the plan that `pack` makes of
    the same lengths in the same order, with the same options.

    | mode | packs | a pack is given out when |
    |---|---|---|
    | "ordered" | whole samples, each in the fullest of the last `window` packs | `window` packs were opened after it |
    | "sequential" | whole samples; one that does not fit opens the next pack | the next pack is opened |
    | "hard" | all tokens as one stream, cut every `max_length` tokens | it is full |

    The packs that are open at the end of the samples are given out then, in order. With `num_packs`, an iteration gives
    exactly so many packs and stops: ranks that each pack a part of the data then take the same number of steps.

    A sample is checked before any of its tokens comes into a pack. Memory: at most `window + 1` packs of `max_length`
    tokens, and twice the sample that was read last. A token takes 8 bytes, or 16 if samples have labels or masks of
    their own, and what the columns take.

    A stream has no `len()`, because the number of packs is not known before the end. In the workers of a `DataLoader`,
    each worker packs a part of the samples. A torch `IterableDataset` (those of Hugging Face and of webdataset are)
    splits itself and is left alone. Of any other source, each worker reads all samples and packs every
    `num_workers`-th.

    Args:
        samples: An iterable of samples: a streaming dataset, a list, an object whose `__iter__` makes a generator. A
            generator passes once.
        max_length: Tokens a pack, at least 1, and at most 2**28 unless the mode is "hard".
        mode: "ordered", "sequential" or "hard". "ordered" is the default, unlike in `pack`: what is streamed and not
            counted beforehand is mostly samples to be kept whole.
        window: For "ordered" only: open packs, as in `pack`, by default 64.
        overlong: As in `pack`: what happens to samples longer than `max_length`, unless the mode is "hard". "error",
            the default, raises when such a sample comes.
        drop_last: As in `pack`: whether "hard" leaves out a last pack that is not full, which None means.
        max_samples: As in `pack`.
        align: As in `pack`. Pieces are padded as in `PackedDataset`.
        pad_token_id: As in `PackedDataset`.
        mask_first_token: As in `PackedDataset`.
        columns: As in `PackedDataset`.
        sample_columns: As in `PackedDataset`. These values are kept until their pack is given out.
        drop_columns: As in `PackedDataset`.
        positions: As in `PackedDataset`.
        num_packs: Packs of an iteration, in all workers together: of *w* workers, each gives `num_packs // w`, and the
            first `num_packs % w` one more. A resumed iteration gives the rest. None means all packs.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: An argument is out of range or not one of the mode's. Or a source that tells its columns, or
            the first sample of a list, has a key that is not known.

    Iterating raises:
        InvalidTypeError, InvalidInputError: A sample cannot be used, as in `PackedDataset`, or is longer than
            `max_length`; the message numbers it. Or the source is a generator, and was iterated over before; or it
            ended before `num_packs` packs.
        StateMismatchError: The state that was loaded is of another worker, or the source has fewer samples than it
            says.
        Errors of the source: as they are, with a note (`__notes__`) that numbers the sample.

    Example:
        >>> import tundish as td
        >>> samples = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
        >>> stream = td.PackedStream(samples, max_length=6)
        >>> [item["input_ids"].tolist() for item in stream]
        [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    """

    def __init__(
        self,
        samples: Iterable[Any],
        max_length: int,
        *,
        mode: str = "ordered",
        window: int | None = None,
        overlong: str | None = None,
        drop_last: bool | None = None,
        max_samples: int | None = None,
        align: int = 1,
        pad_token_id: int = 0,
        mask_first_token: bool = False,
        columns: Mapping[str, Padding] | None = None,
        sample_columns: Sequence[str] | None = None,
        drop_columns: Sequence[str] | Literal["unknown"] | None = None,
        positions: Positions | None = None,
        num_packs: int | None = None,
    ) -> None:
        check_source(samples)
        self.samples = samples
        self._num_packs = None if num_packs is None else as_integer(num_packs, "num_packs", 1, 2**63 - 1)
        self._options = _checked_options(
            max_length=max_length,
            mode=mode,
            window=window,
            overlong=overlong,
            drop_last=drop_last,
            max_samples=max_samples,
            align=align,
        )
        self._reader = SampleReader(columns, sample_columns, drop_columns)
        self._reader.check_dropped([self._reader.check_source(samples, 0)])
        self._builder = ItemBuilder(
            self._reader.columns,
            self._reader.sample_columns,
            mask_first_token=mask_first_token,
            positions=positions,
            pad_token_id=pad_token_id,
        )
        # A loaded state that the next iteration starts from.
        self._loaded: StreamState | None = None
        # The iteration that was begun last.
        self._iteration: _Iteration | None = None
        self._is_begun = False
        # The state before the first sample of a source that is an iterator: it goes on where it is.
        self._first: Any = None
        # Whether workers of a `DataLoader` read the stream: a byte that is shared with processes that are forked.
        self._read_by_workers = mmap.mmap(-1, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the packs: from the state that was loaded, once; else from the beginning of the source."""
        if self._is_begun and passes_once(self.samples):
            raise InvalidInputError(
                f"the source of this PackedStream ({type(self.samples).__qualname__}) passes once, and was iterated "
                "over before: give an iterable that begins anew, for example an object whose __iter__ makes a generator"
            )
        info = get_worker_info()
        worker = None if info is None else Worker(info.id, info.num_workers)
        start = self._loaded
        if start is None:
            start = StreamState(worker=worker, epoch=epoch_of(self.samples))
        elif start.worker != worker:
            raise StateMismatchError(
                f"the state was taken {_place(start.worker)}, and it is loaded {_place(worker)}: with workers, save "
                "and load the state of td.loader or of a torchdata StatefulDataLoader, with as many workers"
            )
        self._keep_first_state()
        if start.source.state is None:
            start = start._replace(source=start.source._replace(state=self._first))
        self._read_by_workers[0] = worker is not None
        self._is_begun, self._loaded = True, None
        self._iteration = _Iteration(self, start)
        return self._iteration.items()

    def set_epoch(self, epoch: int) -> None:
        """Call the source's `set_epoch`, if it has one.

        If a state of another epoch was loaded, the next iteration begins at the beginning of the source.

        Args:
            epoch: 0 … 2**63 - 1.

        Raises:
            InvalidTypeError: It is not an integer.
            InvalidInputError: It is out of range.

        Example:
            >>> import tundish as td
            >>> td.PackedStream([[1, 2]], max_length=4).set_epoch(1)
        """
        epoch = as_integer(epoch, "epoch", 0, 2**63 - 1)
        if callable(method := getattr(self.samples, "set_epoch", None)):
            method(epoch)
            self._first = None
        if self._loaded is not None and self._loaded.epoch not in (None, epoch):
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last pack that was given out.

        It holds the packs that were not given out, and how far the source is: its own state if it has `state_dict` and
        `load_state_dict`, else the number of samples that it gave. With workers each worker has a state, which
        `tundish.loader` and torchdata's `StatefulDataLoader` collect.

        Packs that a loader fetched count as given out. So take the state after each step: after an error it also counts
        the packs of a batch that a `DataLoader` did not finish, which a resume would leave out. `tundish.loader` keeps
        the state of the last batch that it gave.

        After an error in a loop over the stream itself, the state leads to the sample that was refused, or the pack
        whose `positions` could not be made: a resume after the cure lacks nothing. The source may then be read again
        from its newest state on that this method returned before, or from the beginning.

        Keep it in `rank_extra` of `save_dcp`: each rank has its own, and its structure changes as the source goes on.

        Returns:
            A dict of numbers and strings, and what the source's state and `sample_columns` hold. It has about 4/3 of
            the bytes of the open packs.

        Raises:
            InvalidInputError: Workers of a `DataLoader` read the stream, and this is the process that started them.

        Example:
            >>> import tundish as td
            >>> stream = td.PackedStream([[1, 2], [3, 4], [5, 6]], max_length=2, mode="sequential")
            >>> first = next(iter(stream))
            >>> stream.state_dict()["packs"]
            1
        """
        if self._read_by_workers[0] and get_worker_info() is None:
            raise InvalidInputError(
                "the packs of this PackedStream came from the workers of a DataLoader, and this process does not know "
                "how far they are: iterate over td.loader(stream, batch_size=..., num_workers=...) or over torchdata's "
                "StatefulDataLoader, and save the state of that"
            )
        return self._as_dict(self._state())

    def _state(self) -> StreamState:
        """The state after the last pack that was given out, without copies of its tokens."""
        state = self._loaded if self._iteration is None else self._iteration.state()
        return StreamState(worker=None, epoch=epoch_of(self.samples)) if state is None else state

    @property
    def _open_packs(self) -> int:
        """Packs whose tokens a state has."""
        return 0 if self._iteration is None else len(self._iteration.packs)

    def _as_dict(self, state: StreamState) -> dict[str, Any]:
        return state.to_dict(self._options, self._reader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on after the packs that were given out when the state was taken.

        The iteration after that one is a whole one. The source must give the same samples in the same order. If it has
        a state of its own, it is loaded; else the samples that were read are read again and left out. A Hugging Face
        stream with `shuffle(buffer_size=…)` is read again too, because its state lacks the samples in the buffer. A
        `torchdata.nodes.Loader` begins anew when it is resumed at its end, unless it has
        `restart_on_stop_iteration=False`.

        Args:
            state: As `state_dict` returned it.

        Raises:
            StateMismatchError: It is no state of a `PackedStream`, is damaged, or is of one with other options; or it
                holds the state of a source, and this source takes none. Nothing changes.

        Example:
            >>> import tundish as td
            >>> stream = td.PackedStream([[1, 2], [3, 4], [5, 6]], max_length=2, mode="sequential")
            >>> first = next(iter(stream))
            >>> stream.load_state_dict(stream.state_dict())
            >>> [item["input_ids"].tolist() for item in stream]
            [[3, 4], [5, 6]]
        """
        self._go_to(self._from_dict(state))
        self._read_by_workers[0] = 0

    def _from_dict(self, state: Mapping[str, Any]) -> StreamState:
        """Check a state that `state_dict` returned; raises as `load_state_dict`."""
        loaded = StreamState.from_dict(state, self._options, self._reader)
        if loaded.source.state is not None and not is_stateful(self.samples):
            raise StateMismatchError(
                f"the state holds that of a source, and the source of this stream is {format_type(self.samples)} "
                "without load_state_dict: give the source that the state was taken of"
            )
        return loaded

    def _go_to(self, state: StreamState | None) -> None:
        """Have the next iteration go on from a state, or begin at the beginning of the source."""
        self._keep_first_state()
        # Datasets of Hugging Face go on from a state only in its epoch.
        if state is not None and state.epoch not in (None, epoch_of(self.samples)):
            self.set_epoch(state.epoch)
        self._loaded, self._iteration = state, None

    def _keep_first_state(self) -> None:
        if self._first is None and isinstance(self.samples, Iterator) and is_stateful(self.samples):
            source: Any = self.samples
            self._first = copy.deepcopy(source.state_dict())

    @property
    def _distributed(self) -> Any:
        """How a Hugging Face source is split by node: a `DispatchLoader` refuses to read one rank's part for all."""
        return getattr(self.samples, "_distributed", None)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value is not None)
        return f"PackedStream({type(self.samples).__name__}, {options})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iteration: a copy in another process begins its own."""
        if get_spawning_popen() is not None:
            # The copy is for a process that is being started, and which shares no memory with this one.
            self._read_by_workers[0] = 1
        state = self.__dict__ | {"_iteration": None}
        del state["_read_by_workers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._read_by_workers = mmap.mmap(-1, 1)


class _Iteration:
    """One iteration over the packs, from a state on."""

    def __init__(self, stream: PackedStream, start: StreamState) -> None:
        self._start = start
        self._reader = StreamReader(stream.samples, stream._reader, start.worker, start.source)
        self._packer = _packer_of(stream._options, start)
        self._builder = stream._builder
        self._align: int = stream._options["align"]
        self._drop_last = bool(stream._options["drop_last"])
        self._num_packs = stream._num_packs
        # Packs that were given out, and the pieces of those that were not, the oldest first.
        self._given = start.given
        self.packs = deque(list(pack) for pack in start.packs)

    def items(self) -> Iterator[dict[str, Any]]:
        own, worker = self._num_packs, self._start.worker
        if own is not None and worker is not None:
            own = own_packs(own, worker)
        while own is None or self._given < own:
            if not self._close_a_pack():
                if own is not None:
                    raise self._ended_early(own)
                return
            pack = self.packs[0]
            lengths = [len(piece.tokens) for piece in pack]
            item = self._builder.build(pack, [0] * len(pack), lengths, self._align)
            # Only now: positions may have failed, and a state taken then leads to this pack.
            self.packs.popleft()
            self._given += 1
            yield item

    def state(self) -> StreamState:
        packs = [list(pack) for pack in self.packs]
        return self._start._replace(source=self._reader.state(), given=self._given, packs=packs)

    def _close_a_pack(self) -> bool:
        """Read samples until the oldest pack takes no more, or none is left; False if there is no pack to give out."""
        while self._packer.closed() <= self._given:
            sample = self._reader.next()
            if sample is None:
                # Only hard packing has drop_last, and only its last pack may be short.
                return bool(self.packs) and not self._drop_last
            placed = self._packer.place(sample.number, len(sample.tokens))
            # All pieces first: if one is refused, none is in a pack.
            pieces = [self._builder.detached(sample, start, stop) for _, start, stop in placed]
            for (pack, _, _), piece in zip(placed, pieces, strict=True):
                while pack - self._given >= len(self.packs):
                    self.packs.append([])
                self.packs[pack - self._given].append(piece)
            self._reader.take()
        return True

    def _ended_early(self, own: int) -> InvalidInputError:
        worker, where = self._start.worker, ""
        if worker is not None:
            where = f" in worker {worker.number} of {worker.total}, which is to give {own}"
        return InvalidInputError(
            f"the source ended after {self._given} packs{where}, and num_packs is {self._num_packs}: lower "
            "num_packs, or give a source that begins again at its end, for example a Hugging Face stream with "
            "repeat(None)"
        )


def own_packs(num_packs: int, worker: Worker) -> int:
    """How many of `num_packs` packs a worker gives."""
    return num_packs // worker.total + int(worker.number < num_packs % worker.total)


def _place(worker: Worker | None) -> str:
    return "without workers" if worker is None else f"in worker {worker.number} of {worker.total}"


# The options that say how samples come into packs, as `pack` names them.
_PACK_OPTIONS = ("mode", "max_length", "window", "overlong", "drop_last", "max_samples", "align")


def _checked_options(**options: Any) -> dict[str, Any]:
    """The options, as `pack` would complete them.

    Raises:
        InvalidTypeError: One is of the wrong type.
        InvalidInputError: One is out of range, or the mode does not use it.
    """
    complete = json.loads(_native.StreamPacker(options).options())
    return {name: complete[name] for name in _PACK_OPTIONS}


def _packer_of(options: dict[str, Any], state: StreamState) -> _native.StreamPacker:
    """A packer that goes on with the packs of a state.

    Raises:
        InvalidInputError: There can be no such packs.
    """
    packer = _native.StreamPacker(options)
    packer.reopen(state.given, [[len(piece.tokens) for piece in pack] for pack in state.packs])
    return packer


# ---- The state as a dict ----


class StreamState(NamedTuple):
    """How far an iteration is.

    Attributes:
        worker: The worker of a `DataLoader` that packs.
        epoch: The epoch that the source says it is in.
        source: How far the source is.
        given: Packs that were given out.
        packs: The pieces of each pack that was not, the oldest first.
    """

    worker: Worker | None
    epoch: int | None
    source: SourceState = SourceState()
    given: int = 0
    packs: Sequence[Sequence[Sample]] = ()

    def to_dict(self, options: dict[str, Any], reader: SampleReader) -> dict[str, Any]:
        """The state as `from_dict` takes it."""
        pieces = [piece for pack in self.packs for piece in pack]
        return {
            "kind": _KIND,
            "version": _VERSION,
            "options": _options_dict(options, reader),
            "worker": None if self.worker is None else list(self.worker),
            "epoch": self.epoch,
            "samples": self.source.samples,
            "is_exhausted": self.source.is_exhausted,
            "source": copy.deepcopy(self.source.state),
            "source_samples": self.source.state_samples,
            "packs": self.given,
            "pieces_of_open_packs": [len(pack) for pack in self.packs],
            "pieces": _as_text(pieces, reader.columns, reader.sample_columns),
        }

    @classmethod
    def from_dict(cls, state: Any, options: dict[str, Any], reader: SampleReader) -> StreamState:
        """The state that `to_dict` made a dict of.

        Raises:
            StateMismatchError: It is another dict, or of a stream with other options.
        """
        check_state(state, _KIND, _VERSION)
        try:
            _check_options(state["options"], _options_dict(options, reader))
            worker = state["worker"]
            pieces = _as_pieces(state["pieces"], reader.columns)
            packs, first = [], 0
            for count in state["pieces_of_open_packs"]:
                packs.append(pieces[first : first + count])
                first += count
            if first != len(pieces):
                raise ValueError(f"{len(packs)} open packs of {first} pieces, and {len(pieces)} pieces")
            names = ("samples", "source_samples", "packs")
            samples, source_samples, given = (operator.index(state[name]) for name in names)
            epoch = None if state["epoch"] is None else operator.index(state["epoch"])
            is_good = min(given, epoch or 0) >= 0 and 0 <= source_samples <= samples
            if not is_good or not isinstance(state["is_exhausted"], bool):
                raise ValueError(
                    f"{samples} samples, {source_samples} of them in the source's state, {given} packs, epoch {epoch}, "
                    f"is_exhausted={state['is_exhausted']!r}"
                )
            source = SourceState(
                samples, copy.deepcopy(state["source"]), source_samples, state["is_exhausted"]
            )
            found = cls(None if worker is None else Worker(*worker), epoch, source, given, packs)
            _packer_of(options, found)
            return found
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StateMismatchError):
                raise
            raise StateMismatchError(
                f"the state of the stream was cut or edited: {type(error).__name__}: {error}"
            ) from error


def _options_dict(options: dict[str, Any], reader: SampleReader) -> dict[str, Any]:
    return options | {"columns": dict(reader.columns), "sample_columns": list(reader.sample_columns)}


def _check_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        # As JSON, 0, 0.0 and False differ, and NaN equals itself: a padding value says which dtype its column has.
        if json.dumps(saved[name], sort_keys=True) != json.dumps(value, sort_keys=True):
            raise StateMismatchError(
                f"the state is of a stream with {name}={saved[name]!r}, and this one has {name}={value!r}: make the "
                "stream with the same options"
            )


def _as_text(
    pieces: Sequence[Sample], columns: Mapping[str, Padding], values: Sequence[str]
) -> dict[str, Any]:
    """The pieces as numbers and text, which JSON has, and lists of the `values` that samples have once.

    Tensors would not do: `save_dcp` loads a tensor only into one of the same shape.
    """

    def text(arrays: Sequence[NDArray[Any]], dtype: type[np.generic] = np.int64) -> str:
        joined = np.concatenate((np.empty(0, dtype), *arrays), dtype=dtype)
        return base64.b64encode(joined.data).decode()

    has_labels = any(piece.labels is not piece.tokens for piece in pieces)
    extras = [piece.extras for piece in pieces if piece.extras is not None]
    return {
        "samples": [piece.number for piece in pieces],
        "lengths": [len(piece.tokens) for piece in pieces],
        "input_ids": text([piece.tokens for piece in pieces]),
        "labels": text([piece.labels for piece in pieces]) if has_labels else None,
        "columns": {
            key: text([extra.columns[key] for extra in extras], dtype_of(padding))
            for key, padding in columns.items()
        },
        "values": {key: [extra.values[key] for extra in extras] for key in values},
    }


def _as_pieces(state: Mapping[str, Any], columns: Mapping[str, Padding]) -> list[Sample]:
    """The pieces that `_as_text` made text of.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError: They do not fit together.
    """
    numbers, lengths = ([operator.index(number) for number in state[name]] for name in ("samples", "lengths"))
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))

    def parts(text: str, dtype: type[np.generic] = np.int64) -> list[NDArray[Any]]:
        array = np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)
        if array.shape != (sum(lengths),):
            raise ValueError(f"{array.shape[0]} entries for {sum(lengths)} tokens")
        return [array[start:stop] for start, stop in bounds]

    tokens = parts(state["input_ids"])
    labels = tokens if state["labels"] is None else parts(state["labels"])
    carried = {key: parts(state["columns"][key], dtype_of(padding)) for key, padding in columns.items()}
    values = state["values"]
    pieces = []
    for place, number in enumerate(numbers):
        extras = None
        if carried or values:
            own = {key: arrays[place] for key, arrays in carried.items()}
            extras = Extras({}, {}, own, {key: listed[place] for key, listed in values.items()})
        pieces.append(Sample(tokens[place], labels[place], 0, number, extras))
    if len(pieces) != len(lengths):
        raise ValueError(f"{len(lengths)} lengths for {len(pieces)} pieces")
    return pieces
