"""Plans in folders: publishes them, and maps them from a folder of their own or from a cache.

Invariants: a plan is mapped whole or not at all. A plan that goes missing from a cache on the way is built again.
Anything else that lies in its place stays as it is, and the error names it and says what to do.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path

from tundish import _native
from tundish.errors import AlreadyExistsError, NotFoundError, PlanFormatError, StorageError
from tundish.packing.build.destination import PlanDestination
from tundish.packing.plan import PackPlan, fields_of

__all__ = ["Tick", "map_plan", "path_exists", "publish_plan"]

# Receives the progress of long work: phase, done, total. An exception that it raises ends the work.
Tick = Callable[[str, int, int], None]
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


def publish_plan(request: _native.PackRequest, target: Path, tick: Tick | None, expected: str | None) -> str:
    """Publish the plan as `target`, unless there is a plan already, and return its fingerprint.

    Args:
        request: The checked arguments.
        target: The folder.
        tick: Receives progress.
        expected: The fingerprint that the inputs gave before. Inputs that give another one now publish nothing.
    """
    # An existing plan needs no room on the disk, so this comes first.
    if not path_exists(target / "plan.json"):
        try:
            metadata = _native.pack_to_folder(request, target, tick, expected)
            return str(json.loads(metadata)["fingerprint"])
        except AlreadyExistsError:
            if not path_exists(target / "plan.json"):
                raise
    return expected or _native.plan_fingerprint(request, tick)


def map_plan(
    request: _native.PackRequest, destination: PlanDestination, expected: str, tick: Tick | None
) -> PackPlan:
    """Map the plan with the fingerprint `expected`; in a cache, build it if it is missing.

    Raises:
        PlanFormatError: The plan is damaged; the message names the file.
        NotFoundError: A part of it is missing and stays missing.
        AlreadyExistsError: The folder holds something else.
        StorageError: The cache cannot be created or read.
    """
    target = destination.folder(expected)
    is_cached = destination.cache_dir is not None
    plan = _cached_plan(request, target, expected, tick) if is_cached else map_existing_plan(target)
    if plan.fingerprint != expected:
        raise AlreadyExistsError(
            errno.EEXIST,
            f"holds another plan (fingerprint {plan.fingerprint}, not {expected}); "
            "choose another folder or remove this one",
            str(target),
        )
    return plan.with_lengths(request["lengths"])


def map_existing_plan(target: Path) -> PackPlan:
    """Map the plan that lies at `target`."""
    advice = f"to have it made again, remove {target} and make the same call"
    try:
        return PackPlan.load(target, progress=False)
    except PlanFormatError as error:
        raise PlanFormatError(f"{error}; {advice}") from error
    except NotFoundError as error:
        raise NotFoundError(error.errno, f"{error.strerror}; {advice}", error.filename) from error


def _cached_plan(request: _native.PackRequest, target: Path, expected: str, tick: Tick | None) -> PackPlan:
    """Map the plan at `target` in a cache.

    If another process publishes first, its plan is mapped. A plan that is removed before it is mapped is built again;
    once mapped, it stays readable.
    """
    for _ in range(ATTEMPTS):
        missing = not path_exists(target / "plan.json")
        if missing:
            _make_folder(target.parent)
        try:
            if missing:
                publish_plan(request, target, tick, expected)
            return map_existing_plan(target)
        except AlreadyExistsError as error:
            if not _is_being_removed(target, request["overlong"]):
                reason = "is no whole plan, though it is named like one of this cache; remove it, and the plan is made"
                raise AlreadyExistsError(errno.EEXIST, reason, str(target)) from error
        except NotFoundError:
            if not _is_being_removed(target, request["overlong"]):
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


def _is_being_removed(target: Path, overlong: str) -> bool:
    """Wait until a plan that lacks a file is gone, or whole because it was built again; False if it stays."""
    whole = {"plan.json", *(f"{field}.npy" for field in fields_of(overlong))}
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
