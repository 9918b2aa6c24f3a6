"""Runs work on another thread with the caller's current CUDA device.

In torch every thread has a current device of its own; a new thread starts with the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch

P = ParamSpec("P")


def on_this_device(work: Callable[P, None]) -> Callable[P, None]:
    """Wrap `work` to run on another thread with this thread's CUDA device; unchanged where CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it so
        return work
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        torch.cuda.set_device(device)
        work(*args, **kwargs)

    return run
