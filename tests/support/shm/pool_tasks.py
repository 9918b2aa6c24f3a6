"""Functions that workers of the pool tests run. A module of its own, light to import in spawned workers."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def echo(item: Any) -> Any:
    return item


def squared(item: int) -> tuple[int, int]:
    return item * item, os.getpid()


def touch_and_wait(item: tuple[str, float]) -> int:
    """Create the file `path`, then sleep; with 0 seconds wait for the file `go`."""
    path, seconds = item
    Path(path).touch()
    if seconds:
        time.sleep(seconds)
    while not seconds and not Path(path).with_name("go").exists():
        time.sleep(0.002)
    return os.getpid()


def touch(path: str) -> str:
    Path(path).open("x").close()
    return path


def describe(_item: Any, **shared: Any) -> dict[str, Any]:
    """A worker's view of its shared arguments, and the outcome of writing to them."""
    seen: dict[str, Any] = {"pid": os.getpid()}
    for name, value in shared.items():
        if not isinstance(value, np.ndarray):
            seen[name] = value
            continue
        try:
            value[...] = value
            refusal = "none"
        except ValueError as error:
            refusal = str(error)
        order = value.flags.c_contiguous, value.flags.f_contiguous
        seen[name] = (value.dtype, value.shape, order, value.tobytes(), refusal, value.ctypes.data % 64)
    return seen


class LateElsewhere:
    """Takes a minute to be unpickled, except the first time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        try:
            Path(self.folder, "first").touch(exist_ok=False)
        except FileExistsError:
            Path(self.folder, "second").touch()
            time.sleep(60)


class Counted:
    """Creates a file each time it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        (Path(self.folder) / f"{os.getpid()}-{time.monotonic_ns()}").touch()


def pid_with(_item: Any, counted: Counted) -> int:
    time.sleep(0.002)
    return os.getpid()


class OddError(Exception):
    """Can be pickled, but not be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LocalError(Exception):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Unloadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("never to be unpickled")


def misbehave(item: str) -> Any:
    """Fail in the way that `item` names, without ending the process."""
    if item == "raise":
        raise LookupError("asked for")
    if item == "odd error":
        raise OddError("one", "two")
    if item == "local error":
        raise LocalError("cannot travel")
    if item == "lambda":
        return lambda: None
    if item == "unloadable":
        return Unloadable()
    if item == "exit":
        raise SystemExit(3)
    if item == "long error":
        raise ValueError("x" * 100_000)
    return item


def die(item: Any) -> Any:
    """End this process in the way that `item` names."""
    if item == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "exit":
        os._exit(7)
    if item == "segfault":
        # The handler of pytest would print all stacks.
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "mid-result":
        return DyingResult()
    if item == "mid-large-result":
        return [np.zeros(1 << 20), DyingResult()]
    if item == "pid":
        return os.getpid()
    if item == "sleep":
        time.sleep(600)
    return item


class DyingResult:
    """Kills its worker while it is pickled."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def large(item: tuple[int, int]) -> np.ndarray[Any, Any]:
    """As many numbers as asked for, all of them `value`."""
    value, count = item
    return np.full(count, value, np.int64)


def total(item: Any) -> Any:
    """Return the sums of one or several arrays, and whether they are writable."""
    arrays = item if isinstance(item, list) else [item]
    return [int(array.sum()) for array in arrays], [array.flags.writeable for array in arrays]


def item_of(item: int, numbers: np.ndarray[Any, Any]) -> int:
    return int(numbers[item])


def nested(item: int) -> list[int]:
    import tundish as td

    with td.shm.SharedPool(item_of, {"numbers": np.arange(100) * item}, max_workers=2) as pool:
        return list(pool.map(range(4)))


def interrupt_handler(_item: Any) -> tuple[Any, set[Any]]:
    return signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())


def naps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class Called:
    """A callable object."""

    def __call__(self, item: Any, a: Any, b: Any) -> Any:
        return item, a, b

    def method(self, item: Any, a: Any, b: Any) -> Any:
        return item, a, b


def more_than_values(_item: Any, quantized: Any, marked: Any) -> tuple[Any, ...]:
    told = quantized.q_scale(), quantized.q_zero_point(), quantized.dequantize().tolist()
    return *told, type(marked).__name__, marked.mark
