"""torch reads saved DCP checkpoints as they were staged, for every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import (
    World,
    assert_same,
    bits,
    gathered,
    new_planner,
    read,
    reserve,
    run,
    save,
    whole,
    write,
)
from support.distributed.rank_processes import Line
from support.soak import IS_SOAK
from torch import distributed
from torch.distributed import checkpoint as dcp

from tundish._native import staging_stats, verify_checkpoint
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave

# Each number of ranks and each layout; all pairs in the long form.
LAYOUTS = [(1, "ddp"), (2, "fsdp"), (2, "tp"), (4, "hsdp"), (4, "both")]
if IS_SOAK:
    LAYOUTS += [(1, "fsdp"), (2, "ddp"), (4, "ddp"), (4, "fsdp"), (4, "tp")]


def train_and_save(rank: int, line: Line) -> None:
    folder, layout = line.hear()
    planner = new_planner()
    for number in range(3):
        world = World(layout)
        world.train(number + 1)
        state = world.state() | {"step": 255 + number, "run": {"name": "n" * (number % 2), "seen": [number]}}
        expected = whole(state)
        plan = DcpSave(planner, state)
        staged = reserve(plan)
        staged.copy()
        # From here on the training goes on, and what was given to the save changes in every way it can.
        state["run"]["seen"].append(7)
        world.train()
        with torch.no_grad():
            for parameter in world.model.parameters():
                parameter.fill_(math.nan)
        write(staged, folder / str(number))

        other = World(layout, seed=9)
        loaded = other.state() | {"step": 0, "run": {"name": "", "seen": []}}
        dcp.load(loaded, checkpoint_id=folder / str(number))
        assert_same(whole(loaded), expected)
        if rank == 0:
            verify_checkpoint(folder / str(number))
            assert_same(read(folder / str(number)), expected)
    line.say("saved")


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_torch_reads_what_was_staged(tmp_path: Path, size: int, layout: str) -> None:
    run(train_and_save, size, tmp_path, tmp_path, layout)


def save_replicas(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    planner = new_planner()
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(8)}
    used = []
    for number in range(2):
        plan = DcpSave(planner, state)
        before = staging_stats()["in_use"]
        staged = reserve(plan)
        staged.copy()
        used.append((plan.write_plan().staged_bytes, staging_stats()["in_use"] - before))
        facts = write(staged, folder / str(number))
        assert staging_stats()["in_use"] == before
    line.say(used, sum(fact.size for fact in facts if fact.name.endswith(".distcp")))


def test_a_rank_stages_only_what_it_writes(tmp_path: Path) -> None:
    for used, written in run(save_replicas, 4, tmp_path, tmp_path):
        # Two of eight equal tensors each, from the first save on.
        assert 8000 < written < 8000 + 2 * 2048
        for staged_bytes, in_use in used:
            assert staged_bytes == written
            assert written <= in_use <= written + 64 * 1024
    assert_same(
        read(tmp_path / "1"), {f"w{number}": torch.full((1000,), float(number)) for number in range(8)}
    )


def save_stages_of_a_pipeline(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    planner = new_planner()
    # Ranks 0 and 1 hold one stage, 2 and 3 the other, all of them a part that is the same.
    state: dict[str, Any] = {
        f"stage{rank // 2}": {"w": torch.full((6, 2), float(rank // 2))},
        "all": torch.ones(3),
    }
    save(planner, state, folder / "first")
    if rank == 3:
        state["late"] = torch.arange(4.0)
    save(planner, state, folder / "second")
    save(planner, state, folder / "third")
    if rank == 1:
        del state["stage0"]
    save(planner, state, folder / "fourth")
    line.say("saved")


def test_ranks_may_hold_different_things(tmp_path: Path) -> None:
    run(save_stages_of_a_pipeline, 4, tmp_path, tmp_path)
    expected = {
        "stage0": {"w": torch.zeros(6, 2)},
        "all": torch.ones(3),
        "stage1": {"w": torch.ones(6, 2)},
        "late": torch.arange(4.0),
    }
    for name in ("first", "second", "third", "fourth"):
        loaded = read(tmp_path / name)
        assert loaded.keys() == expected.keys() - ({"late"} if name == "first" else set())
        for key, value in loaded.items():
            assert_same(value, expected[key])
        verify_checkpoint(tmp_path / name)


def hold_different_things_under_one_name(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    planner = new_planner()
    plan = DcpSave(planner, {"w": torch.zeros(2 + rank % 2)})
    try:
        reserve(plan)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        plan.release()
    assert staging_stats()["in_use"] == 0
    # It is over with the save that was wrong.
    save(planner, {"w": torch.zeros(2)}, folder / "next")
    line.say(message)


def test_different_things_under_one_name_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for rank, (message,) in enumerate(run(hold_different_things_under_one_name, 2, tmp_path, tmp_path)):
        assert message.startswith("PeerFailedError" if rank else "InvalidInputError")
        expected = (
            "'w' is a float32 tensor of shape (2,) on rank 0 and a float32 tensor of shape (3,) on rank 1"
        )
        assert expected in message
    assert_same(read(tmp_path / "next"), {"w": torch.zeros(2)})


def save_uneven_parts(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    (folder,) = line.hear()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole_tensors = {
        "few": torch.arange(6.0).reshape(3, 2),
        "one": torch.arange(5.0).reshape(1, 5),
        "none": torch.empty(0, 3),
        "columns": torch.arange(14.0).reshape(2, 7),
        "scalar": torch.tensor(2.5),
        "corner": torch.arange(15.0).reshape(3, 5),
        "twice": torch.arange(11.0),
        "copies": torch.arange(9.0),
        "sub": torch.arange(4.0),
    }
    state = {
        "few": distribute_tensor(whole_tensors["few"], mesh, [Shard(0)]),
        "one": distribute_tensor(whole_tensors["one"], mesh, [Shard(0)]),
        "none": distribute_tensor(whole_tensors["none"], mesh, [Shard(0)]),
        "columns": distribute_tensor(whole_tensors["columns"], mesh, [Shard(1)]),
        "scalar": distribute_tensor(whole_tensors["scalar"], mesh, [Replicate()]),
        "corner": distribute_tensor(whole_tensors["corner"], square, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(whole_tensors["twice"], square, [Shard(0), Shard(0)]),
        "copies": distribute_tensor(whole_tensors["copies"], square, [Replicate(), Shard(0)]),
        # Each half of the ranks has the same tensor on a mesh of its own.
        "sub": distribute_tensor(whole_tensors["sub"], square["b"], [Shard(0)]),
    }
    planner = new_planner()
    facts = save(planner, state, folder / "saved")
    for value in state.values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=folder / "saved")
    assert_same(whole(state), whole_tensors)
    sizes = gathered(sum(fact.size for fact in facts if fact.name.endswith(".distcp")))
    # Every element once: 78 of four bytes, and what frames take; nothing where a rank has nothing.
    assert sum(sizes) < 78 * 4 + 30 * 2048
    for name, tensor in dcp.FileSystemReader(folder / "saved").read_metadata().state_dict_metadata.items():
        assert name == "none" or all(math.prod(chunk.sizes) > 0 for chunk in tensor.chunks), name
    if rank == 0:
        assert_same(read(folder / "saved"), whole_tensors)
    line.say("saved")


def test_uneven_shards_are_saved(tmp_path: Path) -> None:
    run(save_uneven_parts, 4, tmp_path, tmp_path)


def test_every_kind_of_tensor_keeps_its_bits(planner: SavePlanner, tmp_path: Path) -> None:
    noise = torch.randint(-128, 128, (4096,), dtype=torch.int8)
    state: dict[str, Any] = {
        str(dtype): noise.view(dtype)
        for dtype in (
            *(
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.float8_e5m2,
            ),
            *(torch.int64, torch.int16, torch.uint8, torch.uint16, torch.uint64, torch.complex64),
        )
    }
    state["bool"] = noise > 0
    state["scalar"] = torch.tensor(-0.0)
    state["empty"] = torch.empty(3, 0)
    state["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    state["slice"] = torch.arange(100)[3:90:7]
    state["expanded"] = torch.ones(1, 3).expand(5, 3)
    state["conjugate"] = torch.complex(torch.arange(3.0), torch.ones(3)).conj()
    state["parameter"] = torch.nn.Parameter(torch.arange(3.0))
    state["nan"] = torch.tensor([math.nan, math.inf, -math.inf])
    save(planner, state, tmp_path / "saved")
    loaded = read(tmp_path / "saved")
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert bits(loaded[name]) == bits(tensor.resolve_conj()), name


def test_objects_come_back_unchanged(planner: SavePlanner, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "zero": 0.0,
        "minus zero": -0.0,
        "one": 1,
        "many digits": 10**5000,
        "true": True,
        "nothing": None,
        "text": "a",
        "bytes": b"a",
        "nested": {
            "list": [1, (2, 3)],
            "of tensors": [torch.ones(2), {"deep": 5}],
            "tuple": (torch.zeros(1), "x"),
        },
    }
    expected = whole(state)
    plan = DcpSave(planner, state)
    staged = reserve(plan)
    staged.copy()
    state["nested"]["list"].append(4)
    state["nested"]["tuple"][0].fill_(8)
    write(staged, tmp_path / "saved")
    loaded = read(tmp_path / "saved")
    assert loaded.keys() == expected.keys()
    assert math.copysign(1, loaded["minus zero"]) == -1 and math.copysign(1, loaded["zero"]) == 1
    for name in ("one", "many digits", "true", "nothing", "text", "bytes"):
        assert_same(loaded[name], expected[name])
    assert loaded["nested"]["list"] == [1, (2, 3)]
    assert loaded["nested"]["tuple"][0].item() == 0
    assert_same(loaded["nested"]["of tensors"], expected["nested"]["of tensors"])


def test_objects_of_another_length_move_later_ones(planner: SavePlanner, tmp_path: Path) -> None:
    for number, length in enumerate((0, 1000, 10, 100_000, 0)):
        state = {
            "first": "n" * length,
            "w": torch.full((3,), float(number)),
            "v": torch.ones(2),
            "last": [length],
        }
        save(planner, state, tmp_path / str(number))
        assert_same(read(tmp_path / str(number)), state)


class Counter:
    """Stateful, as torchtitan's parts are."""

    def __init__(self) -> None:
        self.steps = torch.tensor(3)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_stateful_objects_save_their_state(planner: SavePlanner, tmp_path: Path) -> None:
    save(planner, {"counter": Counter()}, tmp_path / "saved")
    assert_same(read(tmp_path / "saved"), {"counter": {"steps": torch.tensor(3)}})
