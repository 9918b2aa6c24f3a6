"""Plans a save with the other ranks, once for each structure of the state dict.

Every rank sends the list of its values to the first one, which assigns each block to one holder. Saves of a known
structure exchange nothing.

Invariant: a structure counts as known only after all ranks planned it together. If it is new to one rank, all plan
again.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from tundish.checkpoint.dcp.file_layout import FileLayout
from tundish.checkpoint.dcp.flattened_state import FlattenedState, StateStructure
from tundish.checkpoint.dcp.saving.local_values import LocalValue, LocalValues, assign_values
from tundish.distributed import Voter

__all__ = ["FilesByRank", "RankShare", "SavePlanner"]

# About the bytes that an item takes in a file beside those of its tensor.
_ITEM_BYTES = 2048


class FilesByRank:
    """The files of all ranks, kept on the first one. Packed: ten thousand ranks may have millions of items.

    Attributes:
        total_bytes: about the bytes of all files together.
    """

    def __init__(self, texts: Sequence[str], owned: Sequence[Sequence[int]], total_bytes: int) -> None:
        self._texts = texts
        self._owned = owned
        self.total_bytes = total_bytes + _ITEM_BYTES * sum(map(len, owned))

    def __iter__(self) -> Iterator[tuple[LocalValues, Sequence[int]]]:
        """Of each rank the values that it holds, and the indices of those that it saves."""
        return zip(map(_unpack_values, self._texts), self._owned, strict=True)


class RankShare:
    """The values that one rank saves.

    Attributes:
        local_values: the values that the rank holds.
        tensors, objects: indices of the values that it saves.
        structure: of the state dict.
        files: on the first rank, the files of all ranks.
        layout: of the last save.
        metadata: on the first rank, the notes of all ranks at the last save and the `.metadata` that follows from them.
    """

    def __init__(
        self,
        local_values: LocalValues,
        owned: Sequence[int],
        structure: StateStructure | None = None,
        files: FilesByRank | None = None,
    ) -> None:
        self.local_values = local_values
        saved = [(number, value) for number in owned if (value := local_values[number]) is not None]
        self.tensors = [number for number, value in saved if value.dtype]
        self.objects = [number for number, value in saved if not value.dtype]
        self.structure = structure
        self.files = files
        self.layout: FileLayout | None = None
        self.metadata: tuple[Sequence[str], bytes] | None = None

    def values(self, numbers: Sequence[int]) -> list[LocalValue]:
        """The values of these indices."""
        return [value for number in numbers if (value := self.local_values[number]) is not None]


class SavePlanner:
    """The ranks that save together; remembers this rank's part of the last structure.

    Args:
        voter: of the callers' threads.
    """

    def __init__(self, voter: Voter) -> None:
        self.rank = voter.rank
        self.index = voter.index
        self._voter = voter
        self._part: RankShare | None = None

    @property
    def known_structure(self) -> StateStructure | None:
        """The structure of the last state dict, which was checked."""
        return None if self._part is None else self._part.structure

    def known_part(self, state: FlattenedState) -> RankShare | None:
        """This rank's part of `state`; None if its structure is new."""
        return self._part if self._part is not None and self._part.structure is state.structure else None

    def plan(self, state: FlattenedState, local_values: LocalValues) -> RankShare:
        """Collective: find this rank's part of `state`; the rank holds `local_values`. Fails on all ranks or on none.

        Raises:
            InvalidInputError: as `assign_values`.
        """
        voter, what = self._voter, "planning what each rank saves"
        text, error = "", None
        try:
            text = _pack_values(local_values)
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        texts = voter.gather(text, error, what=what)
        owned: list[list[int]] = []
        total, reply = 0, None
        try:
            if texts:
                everyone = list(map(_unpack_values, texts))
                owned, total = assign_values(everyone, voter.ranks)
                # Mostly a rank saves all that it holds.
                pairs = zip(owned, everyone, strict=True)
                reply = _pack([None if len(own) == len(values) else own for own, values in pairs])
        except Exception as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        reply = voter.broadcast(reply, error, what=what)
        numbers = _unpack(reply)[self.index]
        owned_here = range(len(local_values)) if numbers is None else numbers
        files = FilesByRank(texts, owned, total) if texts else None
        self._part = RankShare(local_values, owned_here, state.structure, files)
        return self._part


def _pack(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _pack_values(local_values: LocalValues) -> str:
    # Names are printable text, so that no field contains a line break.
    return _pack([None if value is None else "\n".join(value) for value in local_values])


# Ranks that hold the same send the same text.
@functools.lru_cache(maxsize=8)
def _unpack_values(text: str) -> LocalValues:
    return [None if row is None else LocalValue(*row.split("\n")) for row in _unpack(text)]
