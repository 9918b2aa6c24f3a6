"""Saving DCP checkpoints: torch reads what was staged, whatever training did since and however it was spread."""

from __future__ import annotations

import math
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tundish._native import staging_stats, verify_folder
from tundish.checkpoint.dcp.leaves import leaves_of
from tundish.checkpoint.dcp.saver import DcpSaver
from tundish.checkpoint.staging import Copies

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

import dcp_worlds
from dcp_worlds import Net, World, assert_same, bits, gathered, new_saver, save, whole, write
from rank_processes import Job, Line

LAYOUTS = [
    *((1, "ddp"), (1, "fsdp")),
    *((2, "ddp"), (2, "fsdp"), (2, "tp")),
    *((4, "ddp"), (4, "fsdp"), (4, "hsdp"), (4, "tp"), (4, "both")),
]


@pytest.fixture
def saver() -> Any:
    made = new_saver()
    yield made
    made.close()


def read(folder: Path) -> Any:
    """What torch makes of a checkpoint, whole and in one process."""
    target = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=False)


def run(scenario: Any, size: int, folder: Path, *told: Any) -> list[Any]:
    """Run a scenario in a folder; what each rank said last."""
    with Job(scenario, size, folder) as job:
        for rank in range(size):
            job.tell(rank, (folder, *told))
        said = job.hear_all()
        job.expect_end()
    return said


def train_and_save(rank: int, line: Line) -> None:
    folder, layout = line.hear()
    world = World(layout)
    world.train()
    saver = new_saver()
    for number in range(3):
        state = world.state() | {"step": 255 + number, "run": {"name": "n" * (number % 2), "seen": [number]}}
        expected = whole(state)
        plan = saver.plan(state)
        plan.reserve()
        staged = plan.stage()
        # From here on the training goes on, and what was handed in changes in every way it can.
        state["run"]["seen"].append(7)
        world.train()
        with torch.no_grad():
            for parameter in world.model.parameters():
                parameter.fill_(math.nan)
        write(staged, folder / str(number))

        other = World(layout, seed=9)
        other.train()
        loaded = other.state() | {"step": 0, "run": {"name": "", "seen": []}}
        dcp.load(loaded, checkpoint_id=folder / str(number))
        assert_same(whole(loaded), expected)
        if rank == 0:
            verify_folder(folder / str(number))
            assert_same(read(folder / str(number)), expected)
        world = World(layout)
        world.train(number + 2)
    saver.close()
    line.say("saved")


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_torch_reads_what_was_staged(tmp_path: Path, size: int, layout: str) -> None:
    run(train_and_save, size, tmp_path, layout)


def save_replicas(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    saver = new_saver()
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(8)}
    used = []
    for number in range(2):
        plan = saver.plan(state)
        before = staging_stats()["in_use"]
        plan.reserve()
        staged = plan.stage()
        used.append((plan.staged_bytes, staging_stats()["in_use"] - before))
        facts = write(staged, folder / str(number))
        assert staging_stats()["in_use"] == before
    saver.close()
    line.say(used, sum(fact.size for fact in facts if fact.name.endswith(".distcp")))


def test_a_rank_stages_what_it_writes_and_no_more(tmp_path: Path) -> None:
    for used, written in run(save_replicas, 4, tmp_path):
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
    saver = new_saver()
    # Ranks 0 and 1 hold one stage, 2 and 3 the other, all of them a part that is the same.
    state: dict[str, Any] = {
        f"stage{rank // 2}": {"w": torch.full((6, 2), float(rank // 2))},
        "all": torch.ones(3),
    }
    save(saver, state, folder / "first")
    if rank == 3:
        state["late"] = torch.arange(4.0)
    save(saver, state, folder / "second")
    save(saver, state, folder / "third")
    if rank == 1:
        del state["stage0"]
    save(saver, state, folder / "fourth")
    saver.close()
    line.say("saved")


def test_ranks_may_hold_different_things(tmp_path: Path) -> None:
    run(save_stages_of_a_pipeline, 4, tmp_path)
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
        verify_folder(tmp_path / name)


def hold_different_things_under_one_name(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    saver = new_saver()
    plan = saver.plan({"w": torch.zeros(2 + rank % 2)})
    plan.reserve()
    try:
        plan.stage()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        plan.release()
    assert staging_stats()["in_use"] == 0
    # It is over with the save that was wrong.
    save(saver, {"w": torch.zeros(2)}, folder / "next")
    saver.close()
    line.say(message)


def test_different_things_under_one_name_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for rank, (message,) in enumerate(run(hold_different_things_under_one_name, 2, tmp_path)):
        here, there = f"({2 + rank},)", f"({3 - rank},)"
        assert message.startswith(
            f"InvalidInputError: 'w' is a float32 tensor of shape {here} on rank {rank} and "
        )
        assert f"{there} on rank {1 - rank}" in message
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
    saver = new_saver()
    facts = save(saver, state, folder / "saved")
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
    saver.close()
    line.say("saved")


def test_parts_that_ranks_do_not_divide(tmp_path: Path) -> None:
    run(save_uneven_parts, 4, tmp_path)


def test_every_kind_of_tensor_keeps_its_bits(saver: DcpSaver, tmp_path: Path) -> None:
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
    save(saver, state, tmp_path / "saved")
    loaded = read(tmp_path / "saved")
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert bits(loaded[name]) == bits(tensor.resolve_conj()), name


def test_other_objects_come_back_as_they_were(saver: DcpSaver, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "zero": 0.0,
        "minus zero": -0.0,
        "one": 1,
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
    plan = saver.plan(state)
    plan.reserve()
    staged = plan.stage()
    state["nested"]["list"].append(4)
    state["nested"]["tuple"][0].fill_(8)
    write(staged, tmp_path / "saved")
    loaded = read(tmp_path / "saved")
    assert loaded.keys() == expected.keys()
    assert math.copysign(1, loaded["minus zero"]) == -1 and math.copysign(1, loaded["zero"]) == 1
    for name in ("one", "true", "nothing", "text", "bytes"):
        assert_same(loaded[name], expected[name])
    assert loaded["nested"]["list"] == [1, (2, 3)]
    assert loaded["nested"]["tuple"][0].item() == 0
    assert_same(loaded["nested"]["of tensors"], expected["nested"]["of tensors"])


def test_objects_of_other_lengths_move_what_follows(saver: DcpSaver, tmp_path: Path) -> None:
    for number, length in enumerate((0, 1000, 10, 100_000, 0)):
        state = {
            "first": "n" * length,
            "w": torch.full((3,), float(number)),
            "v": torch.ones(2),
            "last": [length],
        }
        save(saver, state, tmp_path / str(number))
        assert_same(read(tmp_path / str(number)), state)


class Counter:
    """Stateful, as torchtitan's parts are."""

    def __init__(self) -> None:
        self.steps = torch.tensor(3)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_stateful_objects_are_asked_for_their_state(saver: DcpSaver, tmp_path: Path) -> None:
    save(saver, {"counter": Counter()}, tmp_path / "saved")
    assert_same(read(tmp_path / "saved"), {"counter": {"steps": torch.tensor(3)}})


def partial_tensor(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (2,))
    alone = distributed.new_group([0])
    outsider = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    crooked = DTensor.from_local(
        torch.ones(2 + rank), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    said = []
    saver = new_saver()
    refused = [(saver, DTensor.from_local(torch.ones(2), mesh, [Partial()])), (saver, crooked)]
    if rank == 0:
        alone_saver = new_saver(alone)
        refused.append((alone_saver, outsider))
    for one, tensor in refused:
        try:
            one.plan({"w": tensor})
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    saver.close()
    if rank == 0:
        alone_saver.close()
    line.say(said)


def test_layouts_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    with Job(partial_tensor, 2, tmp_path) as job:
        ((first,), _) = job.hear_all()
        job.expect_end()
    assert [kind for kind, _ in first] == ["InvalidInputError"] * 3
    assert "yet to be reduced" in first[0][1]
    assert "its local tensor has shape (2,)" in first[1][1]
    assert "a part on rank 1, which is not in the group" in first[2][1]


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        # That it is a prototype.
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        ({}, "InvalidInputError", "nothing to save"),
        ([1], "InvalidTypeError", "is a list"),
        ({1: torch.ones(1)}, "InvalidTypeError", "1 names"),
        ({"../up": torch.ones(1)}, "InvalidInputError", "'../up'"),
        ({"a.b": 1, "a": {"b": 2}}, "InvalidInputError", "a.b"),
        ({"w": torch.empty(1, device="meta")}, "InvalidInputError", "'w' is on the meta device"),
        ({"w": torch.eye(2).to_sparse()}, "InvalidTypeError", "'w' is sparse"),
        ({"w": ragged()}, "InvalidTypeError", "'w' is nested"),
        ({"w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}, "InvalidTypeError", "'w' is bits8"),
        ({"f": lambda: 1}, "InvalidTypeError", "'f', a function, cannot be pickled"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_staged(
    saver: DcpSaver, state: Any, kind: str, said: str
) -> None:
    before = staging_stats()["in_use"]
    with pytest.raises((ValueError, TypeError)) as refusal:
        saver.plan(state)
    assert type(refusal.value).__name__ == kind
    assert said in str(refusal.value)
    assert staging_stats()["in_use"] == before
    saver.plan({"w": torch.ones(1)})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"extra": [("step", 1)]}, "extra is a list"),
        ({"extra": {"step": torch.tensor(1)}}, "extra is no JSON"),
        ({"extra": {"loss": math.nan}}, "extra is no JSON"),
        ({"extra": {1: 2}}, "extra is no JSON"),
        ({"rank_extra": {"loader": object()}}, "rank_extra['loader'] is a builtins.object"),
        ({"staging": "later"}, "staging is 'later'"),
        ({"staging": "lazy"}, "give optimizer="),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(saver: DcpSaver, arguments: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refusal:
        saver.plan({"w": torch.ones(1)}, **arguments)
    assert said in str(refusal.value)


def test_plans_of_other_facts_have_other_fingerprints(saver: DcpSaver) -> None:
    state = {"w": torch.ones(1)}
    same = [
        saver.plan(state, extra={"a": 1, "b": 2}),
        saver.plan(state, extra={"b": 2, "a": 1}, rank_extra=3),
    ]
    assert same[0].fingerprint == same[1].fingerprint
    assert saver.plan(state, extra={"a": 2, "b": 2}).fingerprint != same[0].fingerprint
    assert saver.plan(state).fingerprint != same[0].fingerprint


def test_a_plan_that_is_not_staged_gives_its_memory_back(saver: DcpSaver) -> None:
    before = staging_stats()["in_use"]
    plan = saver.plan({"w": torch.ones(1 << 20)})
    plan.reserve()
    assert staging_stats()["in_use"] >= before + (1 << 22)
    plan.release()
    assert staging_stats()["in_use"] == before


def test_a_lazy_save_holds_what_was_before_the_optimizers_step(saver: DcpSaver, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(8)), Net().norm)
    model.register_buffer("average", torch.zeros(1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    train()
    for number in range(3):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        expected = whole(state)
        plan = saver.plan(state, staging="lazy", optimizer=optimizer)
        plan.reserve()
        staged = plan.stage()
        with torch.no_grad():
            model.average.fill_(number + 1)
        train()
        write(staged, tmp_path / str(number))
        loaded = read(tmp_path / str(number))
        assert_same(loaded["model"], expected["model"])
        assert_same(loaded["optimizer"]["state"], expected["optimizer"]["state"])


def test_a_lazy_save_copies_in_the_background_what_the_step_alone_changes(
    saver: DcpSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(8, 8)
    model.register_buffer("average", torch.zeros(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    copied: dict[bool, int] = {True: 0, False: 0}
    run_copies = Copies.run

    def count(self: Copies) -> None:
        copied[threading.current_thread() is threading.main_thread()] += sum(
            len(block.sources) for block in self._blocks
        )
        run_copies(self)

    monkeypatch.setattr(Copies, "run", count)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(saver, state, tmp_path / "lazy", staging="lazy", optimizer=optimizer)
    # Weight and bias, and four states of each; at once the buffer, which any forward may change.
    assert copied == {True: 1, False: 10}


LARGE = 8 << 20


def save_through(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    saver = new_saver()
    # Tensors of many sizes, one of them larger than the limit; rank 0 alone goes through.
    state: dict[str, Any] = {f"w{number}": torch.randn(number * 997) for number in range(120)}
    state |= {
        "large": torch.randn(LARGE // 4),
        "half": torch.randn(70001).to(torch.bfloat16),
        "last": list(range(9999)),
    }
    state |= {
        f"own{rank}": torch.full((3, 5), float(rank)),
        "scalars": {str(n): torch.tensor(n) for n in range(50)},
    }
    expected = whole(state)
    saved = []
    for number, limit in enumerate((1 << 20, 50_000, 5000)):
        plan = saver.plan(state, extra={"n": number})
        target = folder / str(number)
        if rank == 0:
            target.mkdir()
            staged = plan.write_through(target, dcp_worlds.OPTIONS, limit)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        else:
            plan.reserve()
            staged = plan.stage()
        write(staged, target)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                state[name].copy_(value)
        saved.append(staging_stats()["peak"])
    if rank == 0:
        torch.save(expected, folder / "expected")
    saver.close()
    line.say(saved)


def test_a_file_larger_than_the_limit_is_written_through(tmp_path: Path) -> None:
    (peaks,), _ = run(save_through, 2, tmp_path)
    # The large tensor takes its size twice at most, whatever the limit; the file of rank 0 is larger.
    assert max(peaks) < 1.1 * LARGE + (1 << 20) * 1.5
    expected = torch.load(tmp_path / "expected") | {"own1": torch.ones(3, 5)}
    for number in range(3):
        verify_folder(tmp_path / str(number))
        assert_same(read(tmp_path / str(number)), expected)


def test_a_save_of_the_same_form_is_planned_once(
    saver: DcpSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tundish.checkpoint.dcp.writer import StagedPlanner

    planned: list[int] = []
    create = StagedPlanner.create_local_plan
    monkeypatch.setattr(StagedPlanner, "create_local_plan", lambda self: (planned.append(1), create(self))[1])
    for number in range(3):
        save(saver, {"w": torch.full((3,), float(number))}, tmp_path / str(number))
    assert len(planned) == 1
    assert_same(read(tmp_path / "2"), {"w": torch.full((3,), 2.0)})
    save(saver, {"v": torch.zeros(3)}, tmp_path / "other")
    assert len(planned) == 2


def test_nothing_of_a_state_is_kept_alive(saver: DcpSaver, tmp_path: Path) -> None:
    import gc
    import weakref

    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    save(saver, {"w": tensor}, tmp_path / "saved")
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "state",
    [
        {"b": torch.ones(2), "a.b": torch.ones(3), "a": torch.ones(())},
        {"b": torch.ones(2), "a": {"b": torch.ones(3), "c": {7: torch.ones(1)}}},
        {"b": torch.ones(2), "list": [torch.ones(1), {"x": 1}], "numbers": [1, 2], "step": 3},
    ],
    ids=["flat", "nested", "mixed"],
)
def test_names_and_paths_are_those_of_torchs_planner(state: dict[str, Any]) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    first = leaves_of(state)
    assert first.form.paths == planner.mappings
    assert [name for name, _ in first] == list(planner.state_dict)
    assert all(value is planner.state_dict[name] for name, value in first)
    assert leaves_of(state, first.form).form is first.form
    # The same names and values on other paths are another form.
    moved = {name: value for name, value in state.items() if name != "b"} | {"b": {"b": state["b"]}}
    assert leaves_of(moved, first.form).form is not first.form
