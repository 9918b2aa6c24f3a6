"""The tensors of each case, and how every contestant reads them.

No byte of a tensor is 0xFF: the search for one reads all bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_KIB, _MIB = 1 << 10, 1 << 20
# The number of tensors, and the bytes of each.
CASES = {
    "64 KB": (1, 64 * _KIB),
    "4 MB": (1, 4 * _MIB),
    "256 MB": (1, 256 * _MIB),
    "256 × 64 KB": (256, 64 * _KIB),
    "256 × 4 MB": (256, 4 * _MIB),
}
_ABSENT = 0xFF
_PERIOD = 251

# Calls through ctypes release the GIL.
_search = ctypes.CDLL(None).memchr
_search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_search.restype = ctypes.c_void_p


def make(case: str) -> list[torch.Tensor]:
    """The float32 tensors of a case, each with different values."""
    count, size = CASES[case]
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    pattern = torch.arange(2 * _PERIOD, dtype=torch.int64).remainder_(_PERIOD).to(torch.uint8)
    for number, tensor in enumerate(tensors):
        start = number % _PERIOD
        whole = size // _PERIOD * _PERIOD
        tensor[:whole].view(-1, _PERIOD).copy_(pattern[start : start + _PERIOD])
        tensor[whole:] = pattern[start : start + size - whole]
    return [tensor.view(torch.float32) for tensor in tensors]


def read(tensors: Sequence[torch.Tensor]) -> None:
    """Reads every byte, as fast as memory gives it."""
    for tensor in tensors:
        if _search(tensor.data_ptr(), _ABSENT, tensor.nbytes) is not None:
            raise RuntimeError("a tensor has a byte that was not in it")


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """Another number for other tensors, or for another order of them."""
    found = 0
    for number, tensor in enumerate(tensors, 1):
        words = tensor.view(torch.int64)
        # The last element tells tensors with equal sums apart.
        found = (found * 31 + int(words.sum()) + int(words[-1])) * number % (1 << 61)
    return found
