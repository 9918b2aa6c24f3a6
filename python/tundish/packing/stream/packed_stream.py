"""`PackedStream`: packs of samples that come one after the other.

Invariants: a state belongs to the packs that were given out, and to no others. A state is loaded completely or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from tundish.errors import InvalidInputError, StateMismatchError
from tundish.packing.arguments import as_integer
from tundish.packing.dataset.custom_positions import Positions
from tundish.packing.dataset.item_builder import ItemBuilder
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.dataset.sample_keys import Padding
from tundish.packing.stream.source_reader import SourceReader, Worker, check_source, epoch_of, passes_once
from tundish.packing.stream.stream_options import StreamOptions
from tundish.packing.stream.stream_packer import StreamPacker
from tundish.packing.stream.stream_state import StreamState

__all__ = ["PackedStream"]


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

    Memory: at most `window + 1` packs of `max_length` tokens, and the sample that was read last. A token takes 8 bytes,
    or 16 if samples have labels or masks of their own, and what the columns take.

    In the workers of a `DataLoader`, each worker packs a part of the samples. A torch `IterableDataset` (those of
    Hugging Face and of webdataset are) splits itself and is left alone. Of any other source, each worker reads all
    samples and packs every `num_workers`-th.

    Args:
        samples: An iterable of samples: a streaming dataset, a list, an object whose `__iter__` makes a generator. A
            generator passes once.
        max_length: Tokens a pack, at least 1, and at most 2**28 unless the mode is "hard".
        mode: "ordered", "sequential" or "hard".
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
        positions: As in `PackedDataset`.
        num_packs: Packs of an iteration, in all workers together: of *w* workers, each gives `num_packs // w`, and the
            first `num_packs % w` one more. A resumed iteration gives the rest. None means all packs.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: An argument is out of range or not one of the mode's.

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
        positions: Positions | None = None,
        num_packs: int | None = None,
    ) -> None:
        check_source(samples)
        self.samples = samples
        self._num_packs = None if num_packs is None else as_integer(num_packs, "num_packs", 1, 2**63 - 1)
        self._options = StreamOptions.checked(
            max_length,
            mode=mode,
            window=window,
            overlong=overlong,
            drop_last=drop_last,
            max_samples=max_samples,
            align=align,
        )
        self._reader = RowReader(columns, sample_columns)
        self._builder = ItemBuilder(
            self._reader.columns,
            self._reader.sample_columns,
            mask_first_token=mask_first_token,
            positions=positions,
            pad_token_id=pad_token_id,
        )
        # Loaded, and not gone on from yet.
        self._loaded: StreamState | None = None
        # The iteration that was begun last.
        self._iteration: _Iteration | None = None
        self._is_begun = False

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
                "and load the state of a torchdata StatefulDataLoader with as many workers"
            )
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
        if self._loaded is not None and self._loaded.epoch not in (None, epoch):
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last pack that was given out.

        It holds the open packs, the rest of the sample that is being cut, and how far the source is: its own state if
        it has `state_dict` and `load_state_dict`, else the number of samples that it gave. With workers each worker
        has a state, which torchdata's `StatefulDataLoader` collects.

        Returns:
            A dict of numbers, strings and tensors, and what the source's state and `sample_columns` hold. It has about
            as many bytes as the open packs.

        Example:
            >>> import tundish as td
            >>> stream = td.PackedStream([[1, 2], [3, 4], [5, 6]], max_length=2, mode="sequential")
            >>> first = next(iter(stream))
            >>> stream.state_dict()["packs"]
            1
        """
        state = self._loaded if self._iteration is None else self._iteration.state()
        if state is None:
            state = StreamState(worker=None, epoch=epoch_of(self.samples))
        return state.to_dict(self._options, self._reader)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on after the packs that were given out when the state was taken.

        The source must give the same samples in the same order. If it has a state of its own, it is loaded; else the
        samples that were read are read again and left out. A Hugging Face stream with `shuffle(buffer_size=…)` is read
        again too, because its state lacks the samples in the buffer.

        Args:
            state: As `state_dict` returned it.

        Raises:
            StateMismatchError: It is no state of a `PackedStream`, is damaged, or is of one with other options. Nothing
                changes.

        Example:
            >>> import tundish as td
            >>> stream = td.PackedStream([[1, 2], [3, 4], [5, 6]], max_length=2, mode="sequential")
            >>> first = next(iter(stream))
            >>> stream.load_state_dict(stream.state_dict())
            >>> [item["input_ids"].tolist() for item in stream]
            [[3, 4], [5, 6]]
        """
        loaded = StreamState.from_dict(state, self._options, self._reader)
        # Datasets of Hugging Face go on from a state only in its epoch.
        if loaded.epoch not in (None, epoch_of(self.samples)):
            self.set_epoch(loaded.epoch)
        self._loaded, self._iteration = loaded, None

    @property
    def _distributed(self) -> Any:
        """How a Hugging Face source is split by node: a `DispatchLoader` refuses to read one rank's part for all."""
        return getattr(self.samples, "_distributed", None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iteration: a copy in another process begins its own."""
        return self.__dict__ | {"_iteration": None}


class _Iteration:
    """One iteration over the packs, from a state on."""

    def __init__(self, stream: PackedStream, start: StreamState) -> None:
        self._start = start
        self._reader = SourceReader(stream.samples, stream._reader, start.worker, start.source)
        self._packer = StreamPacker(stream._options, stream._reader.columns, start.packs)
        self._builder = stream._builder
        self._align = stream._options.align
        self._num_packs = stream._num_packs

    def items(self) -> Iterator[dict[str, Any]]:
        packs, given = self._packer.packs(self._reader), self._start.packs.closed
        own = _own_packs(self._num_packs, self._start.worker)
        while own is None or given < own:
            pieces = next(packs, None)
            if pieces is None:
                if own is not None:
                    raise self._ended_early(given, own)
                return
            given += 1
            sizes = [len(piece.tokens) for piece in pieces]
            yield self._builder.build(pieces, [0] * len(pieces), sizes, sizes, self._align)

    def state(self) -> StreamState:
        return self._start._replace(source=self._reader.state(), packs=self._packer.state())

    def _ended_early(self, given: int, own: int) -> InvalidInputError:
        worker, where = self._start.worker, ""
        if worker is not None:
            where = f" in worker {worker.number} of {worker.total}, which is to give {own}"
        return InvalidInputError(
            f"the source ended after {given} packs{where}, and num_packs is {self._num_packs}: lower num_packs, or "
            "give a source that begins again at its end, for example a Hugging Face stream with repeat(None)"
        )


def _own_packs(num_packs: int | None, worker: Worker | None) -> int | None:
    """How many of `num_packs` packs this process gives."""
    if num_packs is None or worker is None:
        return num_packs
    return num_packs // worker.total + int(worker.number < num_packs % worker.total)


def _place(worker: Worker | None) -> str:
    return "without workers" if worker is None else f"in worker {worker.number} of {worker.total}"
