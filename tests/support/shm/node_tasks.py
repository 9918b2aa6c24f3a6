"""Functions for workers of the tests of `node_shared`."""

from __future__ import annotations

import numpy as np


def pages_of(array: np.ndarray) -> dict[str, int]:
    """The mapping of `array` in `/proc/self/smaps`: its inode, and bytes of Rss and Pss."""
    address, found, inside = array.ctypes.data, {}, False
    with open("/proc/self/smaps", encoding="ascii") as maps:
        for line in maps:
            first, *rest = line.split()
            if "-" in first and len(rest) >= 4:
                start, stop = (int(end, 16) for end in first.split("-"))
                inside = start <= address < stop
                if inside:
                    found["inode"] = int(rest[3])
            elif inside and first in ("Rss:", "Pss:"):
                found[first[:-1]] = int(rest[0]) << 10
    return found


class Tokens:
    """A dataset over a shared array; its samples say in which pages a worker found them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return [int(self.tokens[index]), pages_of(self.tokens)["inode"]]
