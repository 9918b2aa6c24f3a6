"""`StreamState`: the state of a `PackedStream`, and its form as a dict."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from tundish.errors import StateMismatchError, format_type
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.stream.pieces import pack_pieces, unpack_pieces
from tundish.packing.stream.source_reader import SourceState, Worker
from tundish.packing.stream.stream_options import StreamOptions
from tundish.packing.stream.stream_packer import OpenPacks

__all__ = ["StreamState"]

_KIND, _VERSION = "PackedStream", 1


class StreamState(NamedTuple):
    """How far an iteration is.

    Attributes:
        worker: The worker of a `DataLoader` that packs.
        epoch: The epoch that the source says it is in.
        source: How far the source is.
        packs: The packs that are open.
    """

    worker: Worker | None
    epoch: int | None
    source: SourceState = SourceState()
    packs: OpenPacks = OpenPacks()

    def to_dict(self, options: StreamOptions, reader: RowReader) -> dict[str, Any]:
        """The state as `from_dict` takes it."""
        closed, packs, rest = self.packs
        pieces = [piece for pack in packs for piece in pack]
        if rest is not None:
            pieces.append(rest)
        return {
            "kind": _KIND,
            "version": _VERSION,
            "options": _options_dict(options, reader),
            "worker": None if self.worker is None else list(self.worker),
            "epoch": self.epoch,
            "samples": self.source.samples,
            "is_exhausted": self.source.is_exhausted,
            "source": copy.deepcopy(self.source.state),
            "packs": closed,
            "pieces_of_open_packs": [len(pack) for pack in packs],
            "has_rest": rest is not None,
            "pieces": pack_pieces(pieces, reader.columns, reader.sample_columns),
        }

    @classmethod
    def from_dict(cls, state: Any, options: StreamOptions, reader: RowReader) -> StreamState:
        """The state that `to_dict` made a dict of.

        Raises:
            StateMismatchError: It is another dict, or of a stream with other options.
        """
        _check_kind(state)
        try:
            _check_options(state["options"], _options_dict(options, reader))
            worker = state["worker"]
            pieces = unpack_pieces(state["pieces"])
            rest = pieces.pop() if state["has_rest"] else None
            packs, first = [], 0
            for count in state["pieces_of_open_packs"]:
                packs.append(pieces[first : first + count])
                first += count
            if first != len(pieces) or len(packs) > options.window:
                raise ValueError(f"{len(packs)} open packs of {first} pieces, and {len(pieces)} pieces")
            # A full pack of hard packing is closed.
            most = options.max_length - (options.mode == "hard")
            if any(not 0 < sum(len(piece.tokens) for piece in pack) <= most for pack in packs):
                raise ValueError(f"an open pack that is empty or has more than {most} tokens")
            samples, closed = operator.index(state["samples"]), operator.index(state["packs"])
            epoch = None if state["epoch"] is None else operator.index(state["epoch"])
            if min(samples, closed, epoch or 0) < 0 or not isinstance(state["is_exhausted"], bool):
                raise ValueError(
                    f"{samples} samples, {closed} packs, epoch {epoch}, is_exhausted={state['is_exhausted']!r}"
                )
            return cls(
                None if worker is None else Worker(*worker),
                epoch,
                SourceState(samples, copy.deepcopy(state["source"]), state["is_exhausted"]),
                OpenPacks(closed, packs, rest),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, StateMismatchError):
                raise
            raise StateMismatchError(
                f"the state of the stream was cut or edited: {type(error).__name__}: {error}"
            ) from error


def _options_dict(options: StreamOptions, reader: RowReader) -> dict[str, Any]:
    columns = {"columns": dict(reader.columns), "sample_columns": list(reader.sample_columns)}
    return dataclasses.asdict(options) | columns


def _check_kind(state: Any) -> None:
    if not isinstance(state, Mapping) or state.get("kind") != _KIND:
        found = (
            f"its keys are {list(state)[:8]}" if isinstance(state, Mapping) else f"it is {format_type(state)}"
        )
        raise StateMismatchError(
            f"this is no state of a PackedStream: {found}; pass what its state_dict() returned"
        )
    if state.get("version") != _VERSION:
        raise StateMismatchError(
            f"the state has version {state.get('version')!r}, and this release of tundish reads {_VERSION}: load it "
            "with the release that saved it"
        )


def _check_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if saved[name] != value:
            raise StateMismatchError(
                f"the state is of a stream with {name}={saved[name]!r}, and this one has {name}={value!r}: make the "
                "stream with the same options"
            )
