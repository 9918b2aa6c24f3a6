"""The options of a `PackedStream` that decide what its packs hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError
from tundish.packing.build.pack_arguments import PackArguments

__all__ = ["StreamOptions"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How samples come into packs; the names are those of `pack`.

    Attributes:
        window: Packs that are open at once; 1 in all modes but "ordered".
    """

    mode: str
    max_length: int
    window: int
    overlong: str
    drop_last: bool
    max_samples: int | None
    align: int

    @classmethod
    def checked(
        cls,
        max_length: Any,
        *,
        mode: Any,
        window: Any,
        overlong: Any,
        drop_last: Any,
        max_samples: Any,
        align: Any,
    ) -> StreamOptions:
        """The options, as `pack` would take them.

        Raises:
            InvalidTypeError: One is of the wrong type.
            InvalidInputError: One is out of range, or the mode does not use it.
        """
        if mode == "best_fit":
            raise InvalidInputError(
                "mode 'best_fit' sorts all samples by length, and a stream gives one after the other: choose "
                "mode='ordered', or plan the samples with td.pack"
            )
        request = PackArguments(
            lengths=[],
            is_single=True,
            max_length=max_length,
            mode=mode,
            drop_last=drop_last,
            overlong=overlong,
            window=window,
            max_samples=max_samples,
            align=align,
        ).checked()
        options = cls(
            mode=request["modes"][0],
            max_length=request["max_length"],
            window=request["window"],
            overlong=request["overlong"],
            drop_last=request["drop_last"],
            max_samples=request["max_samples"],
            align=request["align"],
        )
        # Refused here, and not when samples come.
        options.new_window()
        return options

    def new_window(self) -> _native.StreamWindow | None:
        """A window without packs; None for hard packing, which has one open pack.

        Raises:
            InvalidInputError: So many packs cannot be open at once.
        """
        if self.mode == "hard":
            return None
        return _native.StreamWindow(self.window, self.max_length, self.max_samples, self.align)
