"""A `DispatchLoader` cannot be copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import tundish as td
from tundish.errors import NotPicklableError


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_has_no_copies(copied: Any) -> None:
    """A copy would close the loader when it is freed."""
    with td.DispatchLoader(range(4)) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(NotPicklableError, match="every process makes its own"):
            copied(loader)
        assert list(iterator) == [1, 2, 3]
