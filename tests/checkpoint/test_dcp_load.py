"""Loading DCP checkpoints: on other numbers of ranks, in place, whole or not at all."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tundish.checkpoint.dcp.saver import DcpSaver, load_dcp
from tundish.errors import CorruptCheckpointError, NotFoundError, StateMismatchError

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from dcp_worlds import World, assert_same, save, whole
from rank_processes import Job, Line, outcome


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    saver = DcpSaver(timeout=30)
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "note": ["kept", 1]}
    save(saver, state, tmp_path / "saved", extra={"step": 7}, rank_extra={"seen": (1, 2)})
    saver.close()
    return tmp_path / "saved"


def run(scenario: Any, size: int, folder: Path, *told: Any) -> list[Any]:
    folder.mkdir(exist_ok=True)
    with Job(scenario, size, folder) as job:
        for rank in range(size):
            job.tell(rank, told)
        said = job.hear_all()
        job.expect_end()
    return said


def trained(layout: str, seed: int = 0) -> World:
    world = World(layout, seed)
    world.train()
    return world


def save_world(rank: int, line: Line) -> None:
    folder, layout = line.hear()
    world = trained(layout)
    saver = DcpSaver(timeout=30)
    rank_extra = {"rank": rank, "rng": torch.full((3,), rank)} if rank != 1 else None
    save(saver, world.state(), folder, extra={"step": 7, "tokens": 123}, rank_extra=rank_extra)
    saver.close()
    expected = whole(world.state())
    if rank == 0:
        torch.save(expected, folder.with_name("expected"))
    line.say("saved")


def load_world(rank: int, line: Line) -> None:
    folder, layout = line.hear()
    world = trained(layout, seed=4)
    state = world.state()
    kept = state["model"]["up.weight"]
    extra, rank_extras = load_dcp(state, folder)
    assert state["model"]["up.weight"] is kept
    assert_same(whole(state), torch.load(folder.with_name("expected")))
    assert extra == {"step": 7, "tokens": 123}
    for saver_rank, value in rank_extras.items():
        expected = None if saver_rank == 1 else {"rank": saver_rank, "rng": torch.full((3,), saver_rank)}
        assert_same(value, expected)
    line.say(list(rank_extras))


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ((2, "fsdp"), (4, "fsdp")),
        ((4, "fsdp"), (1, "ddp")),
        ((4, "both"), (2, "fsdp")),
        ((1, "ddp"), (4, "hsdp")),
        ((4, "hsdp"), (2, "tp")),
    ],
)
def test_a_checkpoint_is_loaded_on_other_ranks(
    tmp_path: Path, saved_on: tuple[int, str], loaded_on: tuple[int, str]
) -> None:
    target = tmp_path / "saved"
    run(save_world, saved_on[0], tmp_path / "first", target, saved_on[1])
    for (ranks,) in run(load_world, loaded_on[0], tmp_path / "second", target, loaded_on[1]):
        assert ranks == list(range(saved_on[0]))


def test_one_process_loads_without_torch_distributed(saved: Path) -> None:
    state: dict[str, Any] = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, "note": None}
    kept = state["model"]["w"]
    assert load_dcp(state, saved) == ({"step": 7}, {0: {"seen": (1, 2)}})
    assert state["model"]["w"] is kept
    assert_same(kept, torch.arange(12.0).reshape(3, 4))
    assert state["note"] == ["kept", 1]


def test_a_part_can_be_loaded(saved: Path) -> None:
    state = {"model": {"b": torch.zeros(3, dtype=torch.bfloat16)}}
    load_dcp(state, saved)
    assert_same(state, {"model": {"b": torch.ones(3, dtype=torch.bfloat16)}})


class Counter:
    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


def test_stateful_objects_take_their_state(tmp_path: Path) -> None:
    saver = DcpSaver(timeout=30)
    save(saver, {"counter": Counter(5.0)}, tmp_path / "saved")
    saver.close()
    counter = Counter(0.0)
    state = {"counter": counter}
    load_dcp(state, tmp_path / "saved")
    assert state["counter"] is counter
    assert (counter.value.item(), counter.loads) == (5.0, 1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"w": torch.zeros(3, 4), "more": torch.zeros(1)}}, "'model.more' is not in it"),
        ({"model": {"w": torch.zeros(4, 3)}}, "'model.w' has shape (4, 3) here and (3, 4) in it"),
        ({"model": {"w": 3}}, "'model.w' is no tensor here and a tensor in it"),
        ({"note": torch.zeros(1)}, "'note' is a tensor here and no tensor in it"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_untouched(
    saved: Path, state: dict[str, Any], said: str
) -> None:
    state["model"] = {"b": torch.zeros(3)} | state.get("model", {})
    before = whole(state)
    with pytest.raises(StateMismatchError) as refusal:
        load_dcp(state, saved)
    assert said in str(refusal.value)
    assert_same(state, before)


def test_many_problems_are_told_in_short(saved: Path) -> None:
    with pytest.raises(StateMismatchError, match="and 95 more") as refusal:
        load_dcp({f"x{number}": torch.zeros(1) for number in range(100)}, saved)
    assert len(str(refusal.value)) < 600


def test_only_whole_checkpoints_are_read(saved: Path, tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 4)}}
    hidden = shutil.copytree(saved, tmp_path / ".dcp-7.incomplete")
    unrecorded = shutil.copytree(saved, tmp_path / "dcp-8")
    (unrecorded / "tundish.json").unlink()
    for folder in (hidden, unrecorded, tmp_path / "missing", saved / "tundish.json"):
        with pytest.raises(NotFoundError, match="no whole checkpoint is here"):
            load_dcp(state, folder)
    assert not state["model"]["w"].any()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"kind": "hf"}, StateMismatchError),
        ({"format_version": 2}, StateMismatchError),
        ({"world_size": "2"}, StateMismatchError),
    ],
)
def test_other_kinds_of_checkpoints_are_refused(saved: Path, change: dict[str, Any], kind: type) -> None:
    manifest = json.loads((saved / "tundish.json").read_text())
    (saved / "tundish.json").write_text(json.dumps(manifest | change))
    with pytest.raises(kind):
        load_dcp({"model": {"w": torch.zeros(3, 4)}}, saved, verify=False)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank_extra-00000.json", "tundish.json"])
def test_a_flipped_bit_is_found_before_anything_is_read(saved: Path, name: str) -> None:
    path = saved / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    state = {"model": {"w": torch.zeros(3, 4)}}
    with pytest.raises(CorruptCheckpointError) as refusal:
        load_dcp(state, saved)
    assert name in str(refusal.value)
    assert not state["model"]["w"].any()


def load_what_does_not_fit_on_one_rank(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    state = {"model": {"w": torch.zeros(3, 4) if rank != 1 else torch.zeros(5)}}
    refused = outcome(lambda: load_dcp(state, folder))
    assert not state["model"]["w"].any()
    distributed.barrier()
    if rank == 0:
        (folder / ".metadata").write_bytes(b"x")
    distributed.barrier()
    damaged = outcome(lambda: load_dcp({"model": {"w": torch.zeros(3, 4)}}, folder))
    line.say(refused, damaged)


def test_what_fails_on_one_rank_fails_on_all(saved: Path, tmp_path: Path) -> None:
    said = run(load_what_does_not_fit_on_one_rank, 2, tmp_path / "job", saved)
    (refused, damaged), (own, told) = said
    assert (
        refused[0] == "PeerFailedError" and refused[2] == 1 and "'model.w' has shape (5,) here" in refused[1]
    )
    assert own[0] == "StateMismatchError"
    assert damaged[0] == "CorruptCheckpointError" and ".metadata" in damaged[1]
    assert told[0] == "PeerFailedError" and ".metadata" in told[1]
