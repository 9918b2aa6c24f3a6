"""Local ranks and sizes, from torchrun's variables or without them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tundish.distributed import is_local_rank0, local_rank, local_world_size
from tundish.errors import InvalidInputError

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, 0, 1),
        ({"WORLD_SIZE": "1"}, 0, 1),
        ({"LOCAL_RANK": "0"}, 0, 1),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 0, 8),
        ({"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}, 7, 8),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int, size: int) -> None:
    set_variables(monkeypatch, **variables)
    assert (local_rank(), local_world_size(), is_local_rank0()) == (rank, size, rank == 0)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"LOCAL_RANK": "1_0"}, "LOCAL_RANK is '1_0'"),
        ({"LOCAL_RANK": "٣"}, "LOCAL_RANK is"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local ranks 0 to 1"),
        ({"WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str) -> None:
    set_variables(monkeypatch, **variables)
    with pytest.raises(InvalidInputError, match=named):
        local_world_size()


def test_torch_is_not_imported() -> None:
    program = (
        "import sys, tundish.distributed as d; assert d.is_local_rank0(); d.vote(what='alone'); "
        "assert d.build_once_per_node(lambda: 1, what='alone') == 1; assert 'torch' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
