"""Plans that already lie in a folder: maps them, and builds a missing plan of a cache.

Invariants: a plan is mapped whole or not at all. A plan that goes missing from a cache on the way is built again.
Anything else that lies in its place stays as it is, and the error names it and says what to do.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tundish.errors import AlreadyExistsError, NotFoundError, PlanFormatError, StorageError
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["cached_plan", "map_existing_plan", "path_exists"]

# Attempts to map a plan that somebody keeps removing.
ATTEMPTS = 3
# Seconds that removing a plan file by file may take.
REMOVAL = 1.0


def path_exists(path: Path) -> bool:
    """Whether anything lies at `path`.

    Raises:
        StorageError: The file system refused to tell.
    """
    try:
        return path.exists()
    except OSError as error:
        raise StorageError(error.errno, f"cannot be examined: {error.strerror}", str(path)) from error


def map_existing_plan(target: Path) -> PackPlan:
    """Map the plan that lies at `target`.

    Raises:
        PlanFormatError: It is damaged; the message names the file.
        NotFoundError: A part of it is missing.
    """
    advice = f"to have it made again, remove {target} and make the same call"
    try:
        return PackPlan.load(target, progress=False)
    except PlanFormatError as error:
        raise PlanFormatError(f"{error}; {advice}") from error
    except NotFoundError as error:
        raise NotFoundError(error.errno, f"{error.strerror}; {advice}", error.filename) from error


def cached_plan(target: Path, fields: Sequence[str], publish: Callable[[], object]) -> PackPlan:
    """Map the plan at `target` in a cache, and call `publish` to build it if it is missing.

    If another process publishes first, its plan is mapped. A plan that is removed before it is mapped is built again;
    once mapped, it stays readable.

    Args:
        target: The plan's folder.
        fields: The columns of the plan.
        publish: Builds the plan in the folder.

    Raises:
        PlanFormatError: The plan is damaged.
        NotFoundError: A part of it is missing and stays missing.
        AlreadyExistsError: Something else lies there.
        StorageError: The cache cannot be created or read.
        TundishError: As `publish` raises.
    """
    for _ in range(ATTEMPTS):
        missing = not path_exists(target / "plan.json")
        if missing:
            _make_folder(target.parent)
        try:
            if missing:
                publish()
            return map_existing_plan(target)
        except AlreadyExistsError as error:
            if not _is_being_removed(target, fields):
                reason = "is no whole plan, though it is named like one of this cache; remove it, and the plan is made"
                raise AlreadyExistsError(errno.EEXIST, reason, str(target)) from error
        except NotFoundError:
            if not _is_being_removed(target, fields):
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


def _is_being_removed(target: Path, fields: Sequence[str]) -> bool:
    """Wait until a plan that lacks a file is gone, or whole because it was built again; False if it stays."""
    whole = {"plan.json", *(f"{field}.npy" for field in fields)}
    deadline = time.monotonic() + REMOVAL
    while True:
        try:
            files = {file.name for file in target.iterdir()}
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if not files or files >= whole:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
