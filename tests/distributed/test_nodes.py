"""Which ranks share a node: those of one kernel and one `GROUP_RANK`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome

from tundish.distributed import node_group, node_identity
from tundish.distributed.nodes import _node_name
from tundish.errors import InvalidInputError


def test_variables_of_another_rank_are_not_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert _node_name(3) == f"{node_identity()}/1"
    # This process was started by a rank of another job.
    assert _node_name(0) == f"{node_identity()}/None"
    monkeypatch.setenv("GROUP_RANK", "one")
    with pytest.raises(InvalidInputError, match="GROUP_RANK is 'one'"):
        _node_name(3)


def test_without_variables_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert _node_name(0) == _node_name(1) == f"{node_identity()}/None"


def be_of_node(rank: int, node: int, local_rank: int, size: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "GROUP_RANK": str(node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }


def members(group: Any) -> list[int]:
    import torch.distributed as distributed

    return list(distributed.get_process_group_ranks(group))


def groups_of_nodes(rank: int, line: Line) -> None:
    import torch
    import torch.distributed as distributed

    # One rank on the first node, three on the second, all on this machine.
    be_of_node(rank, min(rank, 1), max(rank - 1, 0), 3 if rank else 1)
    node = node_group()
    total = torch.tensor(rank)
    distributed.all_reduce(total, group=node)
    line.say(members(node), total.item(), node_group() is node)

    if rank != 1:
        part = distributed.new_group([3, 0, 2], use_local_synchronization=True)
        line.say(members(node_group(part)), node_group(part) is node)


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_groups_of_nodes(host: str, tmp_path: Path) -> None:
    with Job(groups_of_nodes, 4, tmp_path, host=host) as job:
        assert job.hear_all() == [
            ([0], 0, True),
            ([1, 2, 3], 6, True),
            ([1, 2, 3], 6, True),
            ([1, 2, 3], 6, True),
        ]
        # torch sorts the ranks of a new group.
        assert job.hear_all(0, 2, 3) == [([0], False), ([2, 3], False), ([2, 3], False)]
        job.expect_end()


def destroyed_and_bad(rank: int, line: Line) -> None:
    import torch.distributed as distributed

    node = node_group(timeout=20)
    line.say(members(node))
    distributed.destroy_process_group(node)
    again = node_group()
    line.say(members(again), again is node, again is node_group())
    if rank == 1:
        os.environ["GROUP_RANK"] = "first"
    line.say(*outcome(node_group))
    if rank == 1:
        del os.environ["GROUP_RANK"]
    line.say(node_group() is again)
    line.say(*outcome(lambda: node_group(timeout=0)))


def test_a_group_that_was_destroyed_and_a_variable_that_is_no_number(tmp_path: Path) -> None:
    with Job(destroyed_and_bad, 3, tmp_path) as job:
        assert job.hear_all() == [([0, 1, 2],)] * 3
        assert job.hear_all() == [([0, 1, 2], False, True)] * 3
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "InvalidInputError", "PeerFailedError"]
        assert all("GROUP_RANK is 'first'" in text for _, text, _ in heard)
        assert job.hear_all() == [(True,)] * 3
        assert [kind for kind, _, _ in job.hear_all()] == ["InvalidInputError"] * 3
        job.expect_end()


def test_a_process_that_is_alone_has_no_group() -> None:
    assert node_group() is None
    with pytest.raises(InvalidInputError, match="positive"):
        node_group(timeout=-1)
