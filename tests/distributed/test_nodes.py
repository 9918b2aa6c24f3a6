"""Which ranks share a node: by the launcher's variables where they fit, else by what the kernel says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome

from tundish.distributed import node_group
from tundish.distributed.nodes import RankLocation, split_into_nodes
from tundish.errors import InvalidInputError


def locations(
    local_sizes: list[int], *, groups: bool = True, identities: list[str] | None = None
) -> list[RankLocation]:
    """What torchrun tells the ranks of nodes of these sizes."""
    made: list[RankLocation] = []
    for group_rank, size in enumerate(local_sizes):
        for local_rank in range(size):
            made.append(
                RankLocation(
                    rank=len(made),
                    identity="machine" if identities is None else identities[len(made)],
                    group_rank=group_rank if groups else None,
                    local_rank=local_rank,
                    local_world_size=size,
                )
            )
    return made


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("sizes", [[1], [4], [2, 2], [3, 1], [1, 3, 2], [1, 1, 1]])
def test_torchruns_variables_tell_nodes_apart_on_one_machine(sizes: list[int], groups: bool) -> None:
    nodes = split_into_nodes(locations(sizes, groups=groups), is_whole_job=True)
    assert [len(node) for node in nodes] == sizes
    assert [rank for node in nodes for rank in node] == list(range(sum(sizes)))


def test_ranks_that_share_no_kernel_share_no_node_whatever_the_launcher_says() -> None:
    told = locations([4], identities=["a", "b", "a", "b"])
    assert split_into_nodes(told, is_whole_job=True) == [(0, 2), (1, 3)]


def test_without_variables_the_kernel_tells() -> None:
    bare = [RankLocation(rank=rank, identity=identity) for rank, identity in enumerate("abab")]
    assert split_into_nodes(bare, is_whole_job=True) == [(0, 2), (1, 3)]


def test_variables_of_some_ranks_only_are_not_believed() -> None:
    told = [*locations([2, 2])[:3], RankLocation(rank=3, identity="machine")]
    assert split_into_nodes(told, is_whole_job=True) == [(0, 1, 2, 3)]


def test_ranks_dealt_out_in_turn_are_not_taken_for_ranks_that_count_through() -> None:
    # Four ranks on two machines, the even ones on the first: RANK - LOCAL_RANK is 0, 1, 1, 2.
    told = [
        RankLocation(rank=rank, identity="ab"[rank % 2], local_rank=rank // 2, local_world_size=2)
        for rank in range(4)
    ]
    assert split_into_nodes(told, is_whole_job=True) == [(0, 2), (1, 3)]
    # Of a part of the job the numbers alone would not show it.
    assert split_into_nodes(told[:3], is_whole_job=False) == [(0, 2), (1,)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_rank": 0, "local_rank": 0, "local_world_size": 2},  # twice the same local rank
        {"group_rank": 0, "local_rank": 1, "local_world_size": 3},  # two sizes of one node
        {"group_rank": 0, "local_rank": 2, "local_world_size": 2},  # a local rank beyond the size
    ],
)
def test_variables_that_contradict_each_other_are_not_believed(wrong: dict[str, int]) -> None:
    told = [
        RankLocation(rank=0, identity="a", group_rank=0, local_rank=0, local_world_size=2),
        RankLocation(rank=1, identity="a", **wrong),
        RankLocation(rank=2, identity="a", group_rank=1, local_rank=0, local_world_size=1),
    ]
    assert split_into_nodes(told, is_whole_job=False) == [(0, 1, 2)]


def test_part_of_a_job_is_split_like_the_whole() -> None:
    told = locations([3, 1, 2])
    part = [told[5], told[0], told[2], told[3]]
    assert split_into_nodes(part, is_whole_job=False) == [(5,), (0, 2), (3,)]


def test_variables_of_another_rank_are_not_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    standing = RankLocation.of_this_process(3)
    assert (standing.group_rank, standing.local_rank, standing.local_world_size) == (1, 1, 2)
    started_by_it = RankLocation.of_this_process(0)
    assert (started_by_it.group_rank, started_by_it.local_rank) == (None, None)
    monkeypatch.setenv("GROUP_RANK", "one")
    with pytest.raises(InvalidInputError, match="GROUP_RANK is 'one'"):
        RankLocation.of_this_process(3)


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
