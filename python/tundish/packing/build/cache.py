"""Plans that lie in a folder already when they are asked for.

Owns what becomes of such a plan between being found and being mapped. What always holds: a whole plan is mapped; in
a cache a missing one is built, also when it goes missing on the way; whatever else lies there is left as it is and
refused with a sentence that names it and says what to do.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

from tundish.errors import AlreadyExistsError, NotFoundError, PlanFormatError, StorageError
from tundish.packing.plan import FIELDS, PackPlan

__all__ = ["cached_plan", "found_plan", "is_there"]

# A plan that is taken away this often as soon as it is there is not worth another attempt.
ATTEMPTS = 3
# Seconds in which whoever removes a plan, file by file, is expected to come to its end.
REMOVAL = 1.0
FILES = {"plan.json", *(f"{field}.npy" for field in FIELDS)}


def is_there(path: Path) -> bool:
    """Whether there is anything at `path`; raises `StorageError` where the system does not tell."""
    try:
        return path.exists()
    except OSError as error:
        raise StorageError(error.errno, f"cannot be looked at: {error.strerror}", str(path)) from error


def found_plan(target: Path) -> PackPlan:
    """Map the plan that lies at `target`.

    Raises:
        PlanFormatError, NotFoundError: it is damaged or not whole; the message names the file.
    """
    advice = f"to have it made again, remove {target} and make the same call"
    try:
        return PackPlan.load(target, progress=False)
    except PlanFormatError as error:
        raise PlanFormatError(f"{error}; {advice}") from error
    except NotFoundError as error:
        raise NotFoundError(error.errno, f"{error.strerror}; {advice}", error.filename) from error


def cached_plan(target: Path, publish: Callable[[], object]) -> PackPlan:
    """Map the plan at `target` in a cache; `publish` makes it there, unless somebody else was faster.

    A plan that a clean-up job removes before it is mapped is built again; once mapped, it stays readable.

    Raises:
        PlanFormatError, NotFoundError: it is damaged, or a part of it is missing and stays missing.
        AlreadyExistsError: something else lies there.
        StorageError: the cache cannot be made or looked at.
        What `publish` raises.
    """
    for _ in range(ATTEMPTS):
        missing = not is_there(target / "plan.json")
        if missing:
            _make_folder(target.parent)
        try:
            if missing:
                publish()
            return found_plan(target)
        except AlreadyExistsError as error:
            if not _is_being_removed(target):
                reason = "is no whole plan, though it is named like one of this cache; remove it, and the plan is made"
                raise AlreadyExistsError(errno.EEXIST, reason, str(target)) from error
        except NotFoundError:
            if not _is_being_removed(target):
                raise
    raise NotFoundError(
        errno.ENOENT,
        f"was removed {ATTEMPTS} times before it could be mapped: keep clean-up jobs away from the cache_dir",
        str(target),
    )


def _make_folder(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise AlreadyExistsError(
            error.errno, "is not a folder, so it cannot be the cache_dir", str(cache)
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot make the cache_dir: {error.strerror}", str(cache)) from error


def _is_being_removed(target: Path) -> bool:
    """Wait for a plan that lacks a file to be gone, or whole because somebody made it again; False if it stays."""
    deadline = time.monotonic() + REMOVAL
    while True:
        try:
            files = {file.name for file in target.iterdir()}
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if not files or files >= FILES:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
