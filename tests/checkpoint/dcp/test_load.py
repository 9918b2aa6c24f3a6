"""Loads DCP checkpoints on other numbers of ranks, in place, and completely or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pickle
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.checkpoint_roots import add_checksums, add_manifest_checksum
from support.checkpoint.dcp_states import World, assert_same, new_planner, run, save, whole
from support.distributed.rank_processes import Line, outcome
from torch import distributed
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tundish._native import CheckpointRoot
from tundish.checkpoint import Checkpointer, load_dcp
from tundish.errors import (
    CheckpointInUseError,
    CorruptCheckpointError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StateMismatchError,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    planner = new_planner()
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "note": ["kept", 1]}
    save(planner, state, tmp_path / "saved", extra={"step": 7}, rank_extra={"seen": (1, 2)})
    return tmp_path / "saved"


def trained(layout: str, seed: int = 0) -> World:
    world = World(layout, seed)
    world.train()
    return world


def save_world(rank: int, line: Line) -> None:
    folder, layout = line.hear()
    world = trained(layout)
    planner = new_planner()
    rank_extra = {"rank": rank, "rng": torch.full((3,), rank)} if rank != 1 else None
    save(planner, world.state(), folder, extra={"step": 7, "tokens": 123}, rank_extra=rank_extra)
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
        ((2, "fsdp"), (4, "hsdp")),
        ((4, "both"), (1, "ddp")),
        ((1, "ddp"), (2, "tp")),
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


def test_a_part_of_a_state_can_be_loaded(saved: Path) -> None:
    state = {"model": {"b": torch.zeros(3, dtype=torch.bfloat16)}}
    load_dcp(state, saved)
    assert_same(state, {"model": {"b": torch.ones(3, dtype=torch.bfloat16)}})


def test_values_are_found_under_keys_that_are_no_strings(tmp_path: Path) -> None:
    keys = (0, 1.5, None, (1, "a"), True, "text")
    given = {
        "x": {key: {"step": number} for number, key in enumerate(keys)},
        7: torch.ones(2),
        "l": [{3: [1]}],
    }
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, given).result()
    state = {"x": {key: {"step": -1} for key in keys}, 7: torch.zeros(2), "l": [{3: None}]}
    load_dcp(state, saved)
    assert state["x"] == given["x"] and state["l"] == given["l"]
    assert [type(key) for key in state["x"]] == [type(key) for key in given["x"]]
    assert state.keys() == given.keys() and state[7].tolist() == [1, 1]


def trained_in_part(make: Any, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two modules, of which the optimizer's steps so far used the first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = make(model.parameters())
    for _ in range(steps):
        model[0](torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def train_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True)
OPTIMIZERS = {
    "adamw": ADAMW,
    "nadam": functools.partial(torch.optim.NAdam, lr=0.1),
    "damped": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.5),
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


# torch's flat form needs all values, and none is the same as no buffer where momentum is damped.
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_never_got_a_gradient_goes_on_as_in_the_uninterrupted_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, flat: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = trained_in_part(OPTIMIZERS[name], 3)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        weights, states = get_state_dict(model, optimizer, options=options)
        saved = checkpointer.save_dcp(1, {"m": weights, "o": states}).result()
    resumed, own = trained_in_part(OPTIMIZERS[name], 0)
    weights, states = get_state_dict(resumed, own, options=options)
    if flat and name == "damped":
        with pytest.raises(StateMismatchError, match=r"o.state.1.weight.momentum_buffer"):
            load_dcp({"m": weights, "o": states}, saved)
        return
    load_dcp({"m": weights, "o": states}, saved)
    set_state_dict(resumed, own, model_state_dict=weights, optim_state_dict=states, options=options)
    if name != "adagrad":
        # Which makes the state of all parameters at once.
        assert "no optimizer state of 2 parameters" in caplog.text and "1.weight" in caplog.text
    train_whole(model, optimizer)
    train_whole(resumed, own)
    assert_same(resumed.state_dict(), model.state_dict())


def test_an_optimizer_that_went_on_is_put_back(tmp_path: Path) -> None:
    model, optimizer = trained_in_part(ADAMW, 3)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save_dcp(1, {"m": model.state_dict(), "o": optimizer.state_dict()}, blocking=True)
        train_whole(model, optimizer)
        expected = whole(model.state_dict())
        state = {"m": model.state_dict(), "o": optimizer.state_dict()}
        checkpointer.load_dcp(state)
        optimizer.load_state_dict(state["o"])
    train_whole(model, optimizer)
    assert_same(model.state_dict(), expected)


def test_a_state_that_is_absent_in_part_or_of_a_renamed_parameter_is_a_mismatch(tmp_path: Path) -> None:
    model, optimizer = trained_in_part(ADAMW, 1)
    _, states = get_state_dict(model, optimizer)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, {"o": states}).result()
    _, target = get_state_dict(*trained_in_part(ADAMW, 0))
    target["state"]["0.weight"]["more"] = torch.zeros(1)
    with pytest.raises(StateMismatchError, match=r"'o.state.0.weight.more' is not in it"):
        load_dcp({"o": target}, saved)
    _, target = get_state_dict(*trained_in_part(ADAMW, 0))
    target["state"]["tower.weight"] = target["state"].pop("1.weight")
    with pytest.raises(StateMismatchError, match=r"'o.state.tower.weight.step' is not in it"):
        load_dcp({"o": target}, saved)


class Counter:
    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


def test_stateful_objects_load_their_state(tmp_path: Path) -> None:
    planner = new_planner()
    save(planner, {"counter": Counter(5.0)}, tmp_path / "saved")
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
        (
            {"model": {"w": torch.zeros(3, 4, dtype=torch.int64)}},
            "'model.w' is torch.int64 here and torch.float32",
        ),
        ({"model": {"w": torch.zeros(3, 1).expand(3, 4)}}, "'model.w' is expanded here"),
    ],
)
def test_a_mismatch_leaves_the_state_unchanged(saved: Path, state: dict[str, Any], said: str) -> None:
    state["model"] = {"b": torch.zeros(3)} | state.get("model", {})
    before = whole(state)
    with pytest.raises(StateMismatchError) as refusal:
        load_dcp(state, saved)
    assert said in str(refusal.value)
    assert_same(state, before)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.int64, torch.int8),
        (torch.uint8, torch.int8),
        (torch.int8, torch.uint64),
        (torch.uint64, torch.int64),
    ],
)
def test_integers_never_wrap_around(there: torch.dtype, here: torch.dtype, tmp_path: Path) -> None:
    planner = new_planner()
    save(planner, {"seen": torch.tensor([1, 100], dtype=there)}, tmp_path / "saved")
    state = {"seen": torch.zeros(2, dtype=here)}
    with pytest.raises(StateMismatchError, match=f"is {here} here and {there} in it, which it cannot hold"):
        load_dcp(state, tmp_path / "saved")
    assert not state["seen"].to(torch.int64).any()
    # A dtype that holds all these values takes them.
    for wider in {torch.int8: torch.int16, torch.uint8: torch.int16}.get(there, there), torch.float64:
        state = {"seen": torch.zeros(2, dtype=wider)}
        load_dcp(state, tmp_path / "saved")
        assert state["seen"].tolist() == [1, 100]


def test_long_lists_of_problems_are_shortened(saved: Path) -> None:
    with pytest.raises(StateMismatchError, match="and 95 more") as refusal:
        load_dcp({f"x{number}": torch.zeros(1) for number in range(100)}, saved)
    assert len(str(refusal.value)) < 600


def test_only_whole_checkpoints_are_read(saved: Path, tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 4)}}
    root = tmp_path / "root"
    shutil.copytree(saved, root / "dcp-5")
    shutil.copytree(saved, root / "dcp-10")
    hidden = shutil.copytree(saved, root / ".dcp-7.incomplete")
    of_torch = shutil.copytree(saved, root / "dcp-8")
    (of_torch / "tundish.json").unlink()
    unrecorded = shutil.copytree(of_torch, root / "dcp-9")
    (unrecorded / ".metadata").unlink()
    refused = {
        root: f"is a root, not a checkpoint: give {root / 'dcp-10'} (steps there: 5, 10)",
        root / "dcp-7": "does not exist: give the path of a DCP checkpoint (steps there: 5, 10)",
        tmp_path / "missing": "does not exist: give the path of a DCP checkpoint (steps there: none)",
        hidden: "is a save that is under way or was cut short: give a published checkpoint (steps there: 5, 10)",
        of_torch: "torch saved it by itself, so load it with torch.distributed.checkpoint.load",
        unrecorded: "is no checkpoint of tundish, since it has no tundish.json",
        root / "dcp-5" / "tundish.json": "is no checkpoint of tundish",
    }
    for folder, said in refused.items():
        with pytest.raises(NotFoundError) as refusal:
            load_dcp(state, folder)
        assert str(refusal.value).startswith(f"[Errno 2] {folder} ")
        assert said in str(refusal.value)
        assert refusal.value.filename == str(folder)
    for path, said in (3, "path is 3"), ("a\0b", "names no folder"), ("a\ud800", "names no folder"):
        with pytest.raises((InvalidInputError, InvalidTypeError), match=said):
            load_dcp(state, path)
    assert not state["model"]["w"].any()


def rewrite(saved: Path, change: dict[str, Any]) -> None:
    """Give the manifest other fields, and the checksum that is theirs."""
    manifest = json.loads((saved / "tundish.json").read_text())
    del manifest["checksum"]
    (saved / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest | change)))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"kind": "hf"}, StateMismatchError, "of kind 'hf'"),
        ({"format_version": 2}, CorruptCheckpointError, "version is 2"),
        ({"world_size": "2"}, CorruptCheckpointError, "cannot be understood"),
        ({"world_size": None}, CorruptCheckpointError, "says that None ranks saved it"),
        ({"world_size": 0}, CorruptCheckpointError, "says that 0 ranks saved it"),
        # Nothing counts so far.
        ({"world_size": 10**18}, CorruptCheckpointError, "ranks saved it"),
        ({"extra": [1, 2]}, CorruptCheckpointError, "an extra that no save writes"),
    ],
)
def test_foreign_manifests_are_refused(saved: Path, change: dict[str, Any], kind: type, said: str) -> None:
    rewrite(saved, change)
    with pytest.raises(kind, match=said):
        load_dcp({"model": {"w": torch.zeros(3, 4)}}, saved, verify=False)


def of_tensor(metadata: Metadata) -> TensorStorageMetadata:
    about = metadata.state_dict_metadata["w"]
    assert isinstance(about, TensorStorageMetadata)
    return about


def chunks(*boxes: tuple[int, int]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        of_tensor(metadata).chunks[:] = [
            ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([rows, 2])) for start, rows in boxes
        ]

    return change


def place_of(name: str, **fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = next(one for one in metadata.storage_data if one.fqn == name)
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(chunks(), chunks((0, 2)), chunks((0, 4), (0, 0)), chunks((0, 2), (1, 2)), chunks((2, 4))),
        *(chunks((0, 3), (2, 1)), chunks((-1, 4)), place_of("w", offset=-5), place_of("w", offset=0.5)),
        *(place_of("o", length=-1), place_of("o", offset=1 << 70), place_of("w", relative_path=None)),
        lambda metadata: metadata.storage_data.clear(),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", None),
        lambda metadata: setattr(metadata, "planner_data", 5),
        lambda metadata: setattr(metadata, "planner_data", {"w": 5}),
        lambda metadata: setattr(of_tensor(metadata).properties, "dtype", None),
        lambda metadata: setattr(of_tensor(metadata), "size", (3,)),
    ],
)
def test_metadata_that_does_not_lead_to_every_element_is_refused(
    change: Callable[[Metadata], None], tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, {"w": torch.ones(3, 2), "o": 5}).result()
    file = saved / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    add_checksums(saved)
    state: dict[str, Any] = {"w": torch.zeros(3, 2), "o": 0}
    with pytest.raises(CorruptCheckpointError, match=r"dcp-1.*\.metadata"):
        load_dcp(state, saved)
    assert not state["w"].any() and state["o"] == 0


def test_a_mapping_that_cannot_be_changed_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, {"w": torch.ones(2), "a": {"x": 1}}).result()
    state: dict[str, Any] = {"w": torch.zeros(2), "a": types.MappingProxyType({"x": 0})}
    with pytest.raises(InvalidTypeError, match=r"'a.x' lies in .*mappingproxy"):
        load_dcp(state, saved)
    assert not state["w"].any()


def test_damage_that_only_loading_finds_names_the_checkpoint(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        saved = checkpointer.save_dcp(1, {"w": torch.ones(50)}).result()
    file = saved / "__0_0.distcp"
    file.write_bytes(bytes(64) + file.read_bytes()[64:])
    with pytest.raises(CorruptCheckpointError, match=r"dcp-1.*verify=False"):
        load_dcp({"w": torch.zeros(50)}, saved, verify=False)


def link(saved: Path) -> None:
    (saved / "__0_0.distcp").rename(saved.with_name("elsewhere"))
    (saved / "__0_0.distcp").symlink_to(saved.with_name("elsewhere"))


def deep_manifest(saved: Path) -> None:
    (saved / "tundish.json").write_text("[" * 200_000)


def cut(saved: Path) -> None:
    (saved / "__0_0.distcp").write_bytes((saved / "__0_0.distcp").read_bytes()[:-1])


def no_metadata(saved: Path) -> None:
    (saved / ".metadata").unlink()


def zeroed_metadata(saved: Path) -> None:
    (saved / ".metadata").write_bytes(bytes((saved / ".metadata").stat().st_size))


def other_metadata(saved: Path) -> None:
    size = (saved / ".metadata").stat().st_size
    # A pickle of something else, as long as it was.
    (saved / ".metadata").write_bytes(pickle.dumps(1).ljust(size, b"."))


@pytest.mark.parametrize("damage", [link, deep_manifest, cut, no_metadata, zeroed_metadata, other_metadata])
def test_without_verification_sizes_are_checked(saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved)
    state = {"model": {"w": torch.zeros(3, 4)}}
    with pytest.raises(CorruptCheckpointError):
        load_dcp(state, saved, verify=False)
    assert not state["model"]["w"].any()


class Meddler:
    """Takes away what is being loaded, in the middle of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refusals: list[BaseException] = []

    def state_dict(self) -> dict[str, Any]:
        with contextlib.closing(CheckpointRoot(self.root, wait_seconds=0)) as owner:
            try:
                owner.discard_after(0)
            except CheckpointInUseError as error:
                self.refusals.append(error)
        return {"value": torch.zeros(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


def test_a_checkpoint_is_not_removed_while_it_is_loaded(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        path = checkpointer.save_dcp(7, {"meddler": {"value": torch.ones(1)}}).result()
    meddler = Meddler(path.parent)
    load_dcp({"meddler": meddler}, path.parent / "dcp-latest")
    # Once when the state dict was looked at, once when it was filled.
    assert len(meddler.refusals) == 2
    meddler.state_dict()
    assert len(meddler.refusals) == 2


def test_an_optimizer_without_state_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = fresh()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save_dcp(1, state, blocking=True)
        checkpointer.load_dcp(state)
        # A part is nobody's mistake.
        checkpointer.load_dcp({"model": model.state_dict()})
        checkpointer.load_dcp({})
        assert "not loaded" not in caplog.text
        model, optimizer = fresh()
        checkpointer.load_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert "6 values that" in caplog.text
    assert "under 'optimizer.state' are not loaded" in caplog.text
    assert "get_state_dict" in caplog.text


def load_other_steps(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = {"w": torch.zeros(3)}
    with Checkpointer(root, on_failure="raise", timeout=30) as checkpointer:
        for step in (8, 10):
            checkpointer.save_dcp(step, {"w": torch.full((3,), step)}, blocking=True)
        told = [
            outcome(lambda: checkpointer.load_dcp(state, 8 if rank == 0 else 10)),
            outcome(lambda: checkpointer.load_dcp(state, None if rank == 0 else 10)),
            outcome(lambda: checkpointer.load_dcp(state, -1 if rank == 0 else 10)),
        ]
        # One rank sees another checkpoint under the same name.
        mine = root if rank == 0 else shutil.copytree(root, root.with_name("copy"), symlinks=True)
        if rank == 1:
            shutil.rmtree(mine / "dcp-10")
            shutil.copytree(mine / "dcp-8", mine / "dcp-10")
        told.append(outcome(lambda: load_dcp(state, mine / "dcp-10")))
        assert not state["w"].any()
        checkpointer.load_dcp(state, 8)
        assert state["w"].tolist() == [8, 8, 8]
    line.say(*told)


def test_all_ranks_load_the_same_or_none_does(tmp_path: Path) -> None:
    for told in run(load_other_steps, 2, tmp_path / "job", tmp_path / "root"):
        assert all(
            each[0] in {"InvalidInputError", "PeerFailedError", "StateMismatchError"} for each in told
        ), told


@pytest.mark.parametrize("step", [-1, 1.5, True, "8", 1 << 63])
def test_invalid_steps_are_refused(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        with pytest.raises(InvalidInputError, match="step is"):
            checkpointer.load_dcp({}, step)
        with pytest.raises(InvalidInputError, match="step is"), checkpointer.reading(step):
            pass


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
        # Of the size it should have: only who reads it finds it.
        (folder / ".metadata").write_bytes(bytes((folder / ".metadata").stat().st_size))
    distributed.barrier()
    damaged = outcome(lambda: load_dcp({"model": {"w": torch.zeros(3, 4)}}, folder))
    line.say(refused, damaged)


def test_a_failure_on_one_rank_fails_all(saved: Path, tmp_path: Path) -> None:
    said = run(load_what_does_not_fit_on_one_rank, 2, tmp_path / "job", saved)
    (refused, damaged), (own, told) = said
    assert (
        refused[0] == "PeerFailedError" and refused[2] == 1 and "'model.w' has shape (5,) here" in refused[1]
    )
    assert own[0] == "StateMismatchError"
    assert damaged[0] == "CorruptCheckpointError" and ".metadata" in damaged[1]
    assert told[0] == "PeerFailedError" and ".metadata" in told[1]
