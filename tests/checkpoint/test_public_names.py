"""The public names of `tundish.checkpoint` are few and have examples."""

from __future__ import annotations

import inspect
from concurrent.futures import Future

import pytest

from tundish.checkpoint import Checkpointer, ReadonlyRoot, Save


def test_a_save_shows_a_future_and_its_progress() -> None:
    added = {name for name in dir(Save) if not name.startswith("_")} - set(dir(Future))
    assert added == {"progress", "staged"}


@pytest.mark.parametrize("kind", [Checkpointer, ReadonlyRoot, Save])
def test_every_public_method_has_an_example(kind: type) -> None:
    methods = {
        name: method for name, method in inspect.getmembers(kind, callable) if not name.startswith("_")
    }
    own = {name: method for name, method in methods.items() if method.__module__.startswith("tundish")}
    assert [name for name, method in own.items() if "Example:" not in (method.__doc__ or "")] == []
