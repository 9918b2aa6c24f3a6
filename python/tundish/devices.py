"""The device that a thread works on.

torch's current device is each thread's own, and a new thread begins on the first: what means "cuda" there means the
memory of another rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch

__all__ = ["on_this_device"]

P = ParamSpec("P")


def on_this_device(work: Callable[P, None]) -> Callable[P, None]:
    """`work` for another thread, on the CUDA device that this one is on; as it is where torch uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
        return work
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        torch.cuda.set_device(device)
        work(*args, **kwargs)

    return run
