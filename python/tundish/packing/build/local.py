"""Builds a plan in one process: in memory, or in a folder that is then mapped."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

from tundish import _native
from tundish.errors import AlreadyExistsError
from tundish.packing.build.cache import cached_plan, map_existing_plan, path_exists
from tundish.packing.build.destination import PlanDestination
from tundish.packing.plan.fields import fields_of
from tundish.packing.plan.pack_plan import PackPlan
from tundish.progress import ProgressLine

__all__ = ["Tick", "build_local_plan", "cached_or_published", "map_plan", "publish_plan"]

# Receives the progress of long work: phase, done, total. An exception that it raises ends the work.
Tick = Callable[[str, int, int], None]


def build_local_plan(request: Callable[[], _native.PackRequest], destination: PlanDestination) -> PackPlan:
    """Build the plan of `request`, which checks the arguments when it is called, at `destination`."""
    with ProgressLine("pack", destination.progress) as line:
        destination.check()
        checked = request()
        if destination.is_memory:
            metadata, columns = _native.pack(checked, line.callback)
            return PackPlan(columns, metadata, lengths=checked["lengths"])
        if destination.cache_dir is None:
            expected = publish_plan(checked, destination.folder(""), line.callback, None)
        else:
            expected = _native.plan_fingerprint(checked, line.callback)
        return map_plan(checked, destination, expected, line.callback)


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


def cached_or_published(
    request: _native.PackRequest, target: Path, tick: Tick | None, expected: str
) -> PackPlan:
    """Map the plan at `target` in a cache, and build it if it is missing."""
    fields = fields_of(request["overlong"])
    return cached_plan(target, fields, lambda: publish_plan(request, target, tick, expected))


def map_plan(
    request: _native.PackRequest, destination: PlanDestination, expected: str, tick: Tick | None
) -> PackPlan:
    """Map the plan with the fingerprint `expected`, and build it again if it went missing from a cache.

    Raises:
        AlreadyExistsError: The folder holds another plan.
    """
    target = destination.folder(expected)
    if destination.cache_dir is not None:
        plan = cached_or_published(request, target, tick, expected)
    else:
        plan = map_existing_plan(target)
    if plan.fingerprint != expected:
        raise AlreadyExistsError(
            errno.EEXIST,
            f"holds another plan (fingerprint {plan.fingerprint}, not {expected}); "
            "choose another folder or remove this one",
            str(target),
        )
    return plan.with_lengths(request["lengths"])
