"""Helpers of the pool tests."""

from __future__ import annotations

import pytest

each_method = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
