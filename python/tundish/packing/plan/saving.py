"""Saves a plan as a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tundish import _native
from tundish.errors import AlreadyExistsError, TundishError
from tundish.packing.arguments.paths import as_new_folder
from tundish.progress import ProgressLine

__all__ = ["save_plan"]


def save_plan(
    columns: Sequence[NDArray[Any]], metadata: str, path: str | os.PathLike[str], *, progress: bool | None
) -> None:
    """Publish a plan as `PackPlan.save` documents.

    Raises:
        AlreadyExistsError: Something else than this plan lies there.
    """
    try:
        with ProgressLine("plan", progress) as line:
            _native.save_plan(columns, metadata, as_new_folder(path, "path"), line.callback)
    except AlreadyExistsError:
        if not _lies_at(path, metadata):
            raise


def _lies_at(path: str | os.PathLike[str], metadata: str) -> bool:
    try:
        found, _ = _native.open_plan(path)
    except (TundishError, OSError):
        return False
    return bool(json.loads(found) == json.loads(metadata))
