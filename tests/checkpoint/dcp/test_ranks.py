"""Several ranks save DCP checkpoints while training goes on, and other numbers of ranks resume."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import World, assert_same, run, whole
from support.distributed.rank_processes import Line, outcome
from torch import distributed
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tundish.checkpoint import Checkpointer
from tundish.checkpoint.dcp import plan as dcp_plan
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave
from tundish.checkpoint.hf import gather


def train_and_save(rank: int, line: Line) -> None:
    (root,) = line.hear()
    world = World("fsdp")
    saves = []
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        for step in range(1, 7):
            world.train()
            # Optimizer states appear with the first step; from then on everything is planned already.
            staging = ("eager", "lazy")[step % 2]
            if step % 2 == 0:
                expected = whole(world.state())
                if rank == 0:
                    torch.save(expected, root.parent / f"expected-{step}")
            saves.append(
                checkpointer.save_dcp(
                    step,
                    world.state(),
                    extra={"step": step},
                    rank_extra={"rank": rank, "step": step},
                    staging=staging,
                    optimizer=world.optimizer if staging == "lazy" else None,
                )
            )
    line.say([str(save.result(60)) for save in saves])


def resume(rank: int, line: Line) -> None:
    (root,) = line.hear()
    world = World("fsdp", seed=3)
    world.train()
    with Checkpointer(root, on_failure="raise") as checkpointer:
        state = world.state()
        extra, rank_extras = checkpointer.load_dcp(state)
        assert_same(whole(state), torch.load(root.parent / f"expected-{extra['step']}"))
        # The newest is damaged now, the one before it is whole.
        if rank == 0:
            path = root / "dcp-6" / "__1_0.distcp"
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 1
            path.write_bytes(data)
        distributed.barrier()
        before = whole(state)
        named = outcome(lambda: checkpointer.load_dcp(state, 6))
        assert_same(whole(state), before)
        older, _ = checkpointer.load_dcp(state)
        missing = outcome(lambda: checkpointer.load_dcp(state, 99))
    line.say(extra, rank_extras, named, older, missing)


def test_training_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for (paths,) in run(train_and_save, 2, tmp_path / "first", root):
        assert paths == [str(root / f"dcp-{step}") for step in range(1, 7)]
    assert sorted(path.name for path in root.glob("dcp-?")) == ["dcp-5", "dcp-6"]
    said = run(resume, 4, tmp_path / "second", root)
    for rank, (extra, rank_extras, named, older, missing) in enumerate(said):
        assert extra == {"step": 6}
        assert rank_extras == {0: {"rank": 0, "step": 6}, 1: {"rank": 1, "step": 6}}
        assert named[0] == ("CorruptCheckpointError" if rank == 0 else "PeerFailedError")
        assert "__1_0.distcp" in named[1]
        assert older == {"step": 5}
        assert missing[0] == "NotFoundError"


def fail_on_one_rank(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = {"w": torch.full((1000,), 1.0), "mine": {str(rank): torch.zeros(3)}}
    said = []
    write_plan = DcpSave.write_plan
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        for step, failing in enumerate((1, 0, None)):
            # Another form each time, so that there is something to plan.
            state[f"more{step}"] = torch.ones(2)

            def fail(self: DcpSave) -> Any:
                raise OSError(f"rank {rank} cannot reserve")

            DcpSave.write_plan = fail if rank == failing else write_plan  # type: ignore[method-assign]
            said.append(outcome(lambda: checkpointer.save_dcp(step, state, blocking=True)))  # noqa: B023
        assert checkpointer.stats()["staging_in_use_bytes"] == 0
        loaded = {"w": torch.zeros(1000)}
        checkpointer.load_dcp(loaded)
    assert_same(loaded, {"w": state["w"]})
    line.say(said)


def test_an_error_after_planning_refuses_only_that_save_on_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for rank, (said,) in enumerate(run(fail_on_one_rank, 2, tmp_path / "job", root)):
        for failing, (kind, text, _) in zip((1, 0), said, strict=False):
            assert kind == ("OSError" if rank == failing else "PeerFailedError"), text
            assert f"rank {failing} cannot reserve" in text
        assert said[2][0] == ""
    assert [path.name for path in sorted(root.glob("*dcp-[0-9]*"))] == ["dcp-2"]


def fail_while_planning(rank: int, line: Line) -> None:
    (root,) = line.hear()
    pack = dcp_plan._pack_values

    def fail(held: Any) -> str:
        dcp_plan._pack_values = pack
        raise MemoryError("no memory for the list of values")

    with Checkpointer(root, on_failure="raise", timeout=300) as checkpointer:
        if rank == 1:
            dcp_plan._pack_values = fail
        begun = time.monotonic()
        said = outcome(lambda: checkpointer.save_dcp(1, {"w": torch.ones(3)}))
        seconds = time.monotonic() - begun
        checkpointer.save_dcp(2, {"w": torch.ones(3)}, blocking=True)
    line.say(said, seconds)


def test_no_rank_waits_for_one_that_fails_while_planning(tmp_path: Path) -> None:
    first, second = run(fail_while_planning, 2, tmp_path / "job", tmp_path / "root")
    assert first[0][0] == "PeerFailedError" and "no memory for the list" in first[0][1]
    assert second[0][0] == "MemoryError"
    assert max(first[1], second[1]) < 20


def refuse_on_all(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = {"w": torch.ones(3)}
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        said = [
            outcome(lambda: checkpointer.save_dcp(1, state, extra={"rank": rank})),
            outcome(
                lambda: checkpointer.save_dcp(1, state if rank else {"w": torch.empty(3, device="meta")})
            ),
            outcome(lambda: checkpointer.save_dcp(1, state, extra=rank or None)),
        ]
        # The first rank takes back what it began, after the others know that it is off.
        assert rank > 0 or not list(root.glob(".dcp-*"))
        checkpointer.save_dcp(1, state, blocking=True)
    line.say(said)


def test_a_refusal_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    said = run(refuse_on_all, 2, tmp_path / "job", tmp_path / "root")
    for rank, (refusals,) in enumerate(said):
        assert [kind for kind, _, _ in refusals].count("") == 0
        assert refusals[1][0] == ("InvalidInputError" if rank == 0 else "PeerFailedError")
        assert "meta device" in refusals[1][1]
        assert refusals[2][0] == ("InvalidTypeError" if rank == 1 else "PeerFailedError")
    assert (tmp_path / "root" / "dcp-1").is_dir()


def save_beyond_a_limit(rank: int, line: Line) -> None:
    (root,) = line.hear()
    numbers = range(16 if rank == 0 else 1)
    state = {"mine": {f"{rank}-{number}": torch.arange(float(1 << 16)) + number for number in numbers}}
    with Checkpointer(root, on_failure="raise", staging_limit_bytes=1 << 20) as checkpointer:
        try:
            checkpointer.save_dcp(1, state)
            refusal = ("", "")
        except Exception as error:
            refusal = (type(error).__name__, str(error))
        small = {"mine": {f"{rank}": torch.arange(9.0)}}
        checkpointer.save_dcp(1, small, blocking=True)
        line.say(refusal, checkpointer.stats()["staging_in_use_bytes"])


def test_a_save_larger_than_the_staging_limit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (first, in_use), (second, _) = run(save_beyond_a_limit, 2, tmp_path / "job", tmp_path / "root")
    assert first[0] == "InvalidInputError"
    assert "staging_limit_bytes" in first[1]
    assert second[0] == "PeerFailedError"
    assert in_use == 0


@pytest.mark.parametrize("size", [1, 2])
def test_later_changes_of_extra_are_not_saved(tmp_path: Path, size: int) -> None:
    run(change_extra, size, tmp_path / "job", tmp_path / "root")


def change_extra(rank: int, line: Line) -> None:
    (root,) = line.hear()
    extra: dict[str, Any] = {"seen": {"files": [1]}}
    with Checkpointer(root, on_failure="raise") as checkpointer:
        save = checkpointer.save_dcp(1, {"w": torch.ones(1 << 20)}, extra=extra)
        extra["seen"]["files"].append(2)
        save.result(60)
        assert save.progress()[0] == save.progress()[1]
        loaded, _ = checkpointer.load_dcp({"w": torch.zeros(1 << 20)})
        assert loaded == {"seen": {"files": [1]}}
        assert checkpointer.list("dcp")[0].extra == loaded
    line.say("done")


def destroy_meanwhile(rank: int, line: Line) -> None:
    (root,) = line.hear()
    world = World("fsdp")
    world.train()
    expected = whole(world.state())
    destroyed = threading.Event()

    def on_event(event: str, kind: str, step: int) -> None:
        if event == "staged":
            destroyed.wait(30)

    checkpointer = Checkpointer(root, on_failure="raise", on_event=on_event, timeout=30)
    saves = [checkpointer.save_dcp(1, world.state()), checkpointer.save_hf(1, world.model)]
    distributed.destroy_process_group()
    destroyed.set()
    paths = [save.result(60) for save in saves]
    checkpointer.close()
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()}}
    distributed_checkpoint.load(loaded, checkpoint_id=paths[0], no_dist=True)
    assert_same(loaded["model"], expected["model"])
    line.say([str(path) for path in paths])


def test_a_process_group_may_be_destroyed_while_a_save_is_under_way(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for said in run(destroy_meanwhile, 2, tmp_path / "job", root):
        assert said == ([str(root / "dcp-1"), str(root / "hf-1")],)


def wait_for_an_owner(rank: int, line: Line) -> None:
    root, program = line.hear()
    owner = None
    if rank == 0:
        alone = {
            name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name
        }
        owner = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=alone
        )
        assert owner.stdout is not None
        owner.stdout.readline()
    distributed.barrier()
    started = time.monotonic()
    if owner is not None:
        threading.Timer(1.0, owner.communicate).start()
    Checkpointer(root, on_failure="raise", timeout=20).close()
    line.say(time.monotonic() - started)


def test_ranks_outwait_a_dying_owner_of_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    program = f"""if True:
        import os, sys, tundish as td
        checkpointer = td.Checkpointer({str(root)!r})
        print("up", flush=True)
        sys.stdin.read()
        os._exit(0)
    """
    (seconds,), _ = run(wait_for_an_owner, 2, tmp_path / "job", root, program)
    # The owner is there for a second.
    assert seconds >= 0.9


def save_other_forms(rank: int, line: Line) -> None:
    (root,) = line.hear()
    mesh = init_device_mesh("cpu", (2,))

    def spread(rows: int, seed: int) -> DTensor:
        whole_one = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        return DTensor.from_local(whole_one.chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)

    def plain(*size: int) -> torch.Tensor:
        return torch.full(size, float(len(size)))

    mine = f"mine-{rank}"
    states: list[dict[str, Any]] = [
        {"spread": spread(8, 1), "both": plain(4)},
        {"spread": spread(8, 2), "both": plain(4)},
        # Of another form on one rank alone, then on the other, then on both as it was.
        {"spread": spread(8, 3), "both": plain(4)} | ({"late": plain(2, 2)} if rank == 1 else {}),
        {"spread": spread(8, 4), "both": plain(4), "late": plain(2, 2)},
        {"spread": spread(8, 5), "both": plain(4)},
        # Of another form on all: another size, other leaves, and what only one rank has.
        {"spread": spread(6, 6), "both": plain(3), "objects": [5]},
        {"spread": spread(6, 7), mine: plain(5)},
        {"spread": spread(6, 8), mine: plain(5)},
        {"nested": {"spread": spread(6, 9)}, "nested.both": plain(2)},
    ]
    planned: list[int] = []
    plan = SavePlanner.plan
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        for step, state in enumerate(states):
            calls: list[int] = []
            SavePlanner.plan = lambda *given, calls=calls: (calls.append(1), plan(*given))[1]  # type: ignore[method-assign]
            expected = whole(state)
            save = checkpointer.save_dcp(step, state)
            planned.append(len(calls))
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            save.result(60)
            target = {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
                for name, value in state.items()
            }
            checkpointer.load_dcp(target, step)
            if "nested" not in state:
                assert_same(whole(target), expected)
        names = {
            step: " ".join(sorted(FileSystemReader(root / f"dcp-{step}").read_metadata().state_dict_metadata))
            for step in range(len(states))
        }
    line.say(planned, names)


def test_all_ranks_notice_a_new_form_on_any_rank(tmp_path: Path) -> None:
    said = run(save_other_forms, 2, tmp_path / "job", tmp_path / "root")
    for planned, names in said:
        # Ranks plan only where something is new on one of them.
        assert planned == [1, 0, 1, 1, 1, 1, 1, 0, 1]
        assert names == {
            **dict.fromkeys((0, 1, 4), "both spread"),
            **dict.fromkeys((2, 3), "both late spread"),
            5: "both objects spread",
            **dict.fromkeys((6, 7), "mine-0 mine-1 spread"),
            8: "nested.both nested.spread",
        }


def count_groups(rank: int, line: Line) -> None:
    (root,) = line.hear()
    made: list[str] = []
    make = gather.temporary_group

    def counted(name: str, *given: Any, **named: Any) -> Any:
        made.append(name)
        return make(name, *given, **named)

    gather.temporary_group = counted
    world = World("fsdp")
    whole_model = torch.nn.Linear(4, 4)
    said = []
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        checkpointer.save_hf(1, whole_model, blocking=True)
        checkpointer.save_dcp(1, world.state(), blocking=True)
        checkpointer.load_dcp(world.state())
        said.append(len(made))
        for step in (2, 3):
            checkpointer.save_hf(step, world.model, blocking=True)
            said.append(len(made))
    line.say(said)


def test_ranks_connect_only_for_exports_of_sharded_tensors(tmp_path: Path) -> None:
    """A connection between every two of thousands of ranks is what takes longest, and most descriptors."""
    assert run(count_groups, 3, tmp_path / "job", tmp_path / "root") == [([0, 1, 1],)] * 3
