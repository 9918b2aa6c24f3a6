"""Saves of tensors on CUDA devices."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint.dcp_states import World, assert_same, run, whole
from support.distributed.nccl_ranks import nccl_group
from support.distributed.rank_processes import Line
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tundish import _native
from tundish.checkpoint import Checkpointer, buffers
from tundish.checkpoint.hf.gather import ROUND_BYTES

# Cycles: some hundred milliseconds, in which a copy that is not waited for would be missed.
_SLOW = 500_000_000


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    assert _native.staging_stats()["in_use"] == 0


def saved(path: Path, name: str = "w") -> torch.Tensor:
    if path.name.startswith("hf"):
        return load_file(path / "model.safetensors")[name]
    found = {name: torch.zeros(1 << 22)}
    with Checkpointer(path.parent, on_failure="raise") as checkpointer:
        checkpointer.load_dcp(found, int(path.name.rpartition("-")[2]))
    return found[name]


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_device_does_after_an_eager_save_changes_nothing(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = {"w": torch.zeros(1 << 22, device="cuda", dtype=dtype)}
    paths = []
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        for step in (1, 2, 3):
            torch.cuda._sleep(_SLOW)
            weights["w"].fill_(step)
            if kind == "hf":
                save = checkpointer.save_hf(step, weights, dtype=torch.float32)
            else:
                save = checkpointer.save_dcp(step, weights)
            weights["w"].fill_(-1)
            paths.append(save)
        found = [save.result(60) for save in paths]
    for step, path in enumerate(found, 1):
        assert saved(path).eq(step).all()


@pytest.mark.needs_gpu
def test_a_step_on_a_device_comes_after_the_lazy_copy(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(1 << 22, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        for step in (1, 2, 3):
            torch.cuda._sleep(_SLOW)
            save = checkpointer.save_hf(step, {"w": weight}, staging="lazy", optimizer=optimizer)
            weight.grad = torch.full_like(weight, -1)
            optimizer.step()
            assert saved(save.result(60)).eq(step - 1).all()


@pytest.mark.needs_gpu
def test_conjugated_and_negated_device_views_are_saved(tmp_path: Path) -> None:
    values = torch.full((1 << 20,), 1 + 2j, device="cuda")
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        torch.cuda._sleep(_SLOW)
        path = checkpointer.save_hf(1, {"w": values.conj(), "n": values.conj().imag}).result(60)
    assert saved(path).eq(1 - 2j).all()
    assert saved(path, "n").eq(-2).all()


_KINDS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
    torch.complex64,
)


def of_many_kinds() -> dict[str, torch.Tensor]:
    """Small tensors of any bits, NaNs among them, most of them on a device, some of them views; the same each time."""
    torch.manual_seed(0)
    drawn = random.Random(0)
    made = {}
    for number in range(600):
        # Those of one kind are often neighbours, and those that hold what is packed look like this.
        dtype = drawn.choice(_KINDS) if number % 3 == 0 else torch.bfloat16
        shape = drawn.choice(
            [(), (0,), (7,), (33, 5), (301, 8), (700, 1000) if number % 20 == 0 else (64, 64)]
        )
        count = math.prod(shape)
        if dtype is torch.bool:
            tensor = torch.randint(0, 2, shape).bool()
        else:
            bits = torch.randint(0, 256, (max(count, 1) * dtype.itemsize,), dtype=torch.uint8)
            tensor = bits.view(dtype)[:count].reshape(shape)
        if drawn.random() < 0.9:
            tensor = tensor.cuda()
        if tensor.dim() == 2 and drawn.random() < 0.2:
            tensor = tensor.T
        if dtype.is_complex and drawn.random() < 0.5:
            tensor = tensor.conj() if drawn.random() < 0.5 else tensor.conj().imag
        made[f"w{number:03}"] = tensor
    return made


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["hf", "as float32", "lazy", "dcp"])
def test_many_small_device_tensors_are_saved_unchanged(kind: str, tmp_path: Path) -> None:
    given = of_many_kinds()
    # Where they are: torch conjugates what came to the host before it is there.
    expected = {name: tensor.resolve_conj().resolve_neg().cpu() for name, tensor in given.items()}
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        torch.cuda._sleep(_SLOW)
        if kind == "dcp":
            checkpointer.save_dcp(1, given, blocking=True)
            found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
            checkpointer.load_dcp(found, 1)
        else:
            parameters = [nn.Parameter(tensor) for tensor in given.values() if tensor.is_floating_point()]
            arguments: dict[str, Any] = {
                "hf": {},
                "as float32": {"dtype": torch.float32},
                "lazy": {"staging": "lazy", "optimizer": torch.optim.SGD(parameters)},
            }[kind]
            found = load_file(checkpointer.save_hf(1, given, **arguments).result(60) / "model.safetensors")
    if kind == "as float32":
        expected = {
            # As the device does it: what becomes of a NaN's bits is its own affair.
            name: given[name].float().cpu() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
            for name, tensor in expected.items()
        }
    assert_same(found, expected)


@pytest.mark.needs_gpu
def test_background_conversions_on_a_device_are_waited_for(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=1)

    def convert(name: str, tensor: torch.Tensor) -> Any:
        made = tensor.cuda()
        torch.cuda._sleep(_SLOW)
        return [(name, made + 1)]

    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        weights = {"w": weight}
        save = checkpointer.save_hf(1, weights, staging="lazy", optimizer=optimizer, to_hf=convert)
        assert saved(save.result(60)).eq(2).all()


@pytest.mark.needs_gpu
def test_conversions_take_little_of_a_device(tmp_path: Path) -> None:
    weights = {f"w{number}": torch.zeros(8 << 20, device="cuda") for number in range(32)}
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda._sleep(_SLOW)
        checkpointer.save_hf(1, weights, to_hf=lambda name, tensor: [(name, tensor + 1)], blocking=True)
        # Of a gigabyte.
        assert torch.cuda.max_memory_allocated() - before <= 4 * ROUND_BYTES


@pytest.mark.needs_gpu
def test_saves_keep_no_memory_of_a_device_for_themselves(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(8 << 20, device="cuda")}
    with Checkpointer(tmp_path / "root", on_failure="raise", keep_last=1) as checkpointer:
        reserved = []
        for step in range(5):
            checkpointer.save_hf(step, weights, dtype=torch.bfloat16, blocking=True)
            reserved.append(torch.cuda.memory_reserved())
    assert reserved == reserved[:1] * 5


@pytest.mark.needs_gpu
@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_pinned_memory_of_an_earlier_model_is_freed(kind: str, tmp_path: Path) -> None:
    small, large = (torch.ones(size << 20, device="cuda") for size in (1, 8))
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        save: Any = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step, tensor in enumerate((small, large), 1):
            save(step, {"w": tensor}, blocking=True)
            (kept,) = buffers._pinned
            assert kept.size >= tensor.nbytes


@pytest.mark.needs_gpu
def test_memory_that_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ones = torch.ones(3, device="cuda")
    runtime: Any = torch.cuda.cudart()
    image = _native.FileImage(4096)
    torch.cuda.check_error(runtime.cudaHostRegister(image.address, 4096, 1))
    try:
        # Pinned memory cannot be pinned again.
        monkeypatch.setattr(buffers, "FileImage", lambda _: image)
        buffers.Buffer(4096, is_pinned=True).release()
    finally:
        torch.cuda.check_error(runtime.cudaHostUnregister(image.address))
    assert "4096 bytes of host memory cannot be pinned" in caplog.text
    # The training hears nothing of it.
    assert (ones + ones).sum() == 6


@pytest.mark.needs_gpu(2)
def test_callbacks_run_on_the_callers_device(tmp_path: Path) -> None:
    seen: list[int] = []
    before = torch.cuda.current_device()
    torch.cuda.set_device(1)
    try:
        with Checkpointer(
            tmp_path / "root",
            on_failure="raise",
            on_published=[lambda _: seen.append(torch.cuda.current_device())],
        ) as checkpointer:
            checkpointer.save_hf(1, {"w": torch.ones(3, device="cuda")}, blocking=True)
    finally:
        torch.cuda.set_device(before)
    assert seen == [1]


def save_over_nccl(rank: int, line: Line) -> None:
    (root,) = line.hear()
    group = nccl_group(rank)
    mesh = DeviceMesh.from_group(group, "cuda")
    locals_of = {f"w{number}": torch.zeros(1000 + number, 3, device="cuda") for number in range(40)}
    weights = {
        name: nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        for name, local in locals_of.items()
    }
    optimizer = torch.optim.SGD(weights.values(), lr=1)
    with Checkpointer(root, group=group, on_failure="raise") as checkpointer:
        for step, arguments in enumerate(
            (
                {},
                {"dtype": torch.bfloat16},
                {"to_hf": lambda name, tensor: [(name, tensor + 0)]},
                {"staging": "lazy", "optimizer": optimizer},
            ),
            1,
        ):
            torch.cuda._sleep(_SLOW)
            for local in locals_of.values():
                local.fill_(step)
            save = checkpointer.save_hf(step, weights, shard_bytes=100_000, **arguments)
            if "staging" in arguments:
                save.staged()
            for local in locals_of.values():
                local.fill_(-1)
            save.result(60)
    line.say("saved")


@pytest.mark.needs_gpu
def test_device_shards_are_gathered_over_nccl(tmp_path: Path) -> None:
    assert run(save_over_nccl, 2, tmp_path, tmp_path / "root") == [("saved",)] * 2
    for step in range(1, 5):
        found = {
            name: tensor
            for file in (tmp_path / "root" / f"hf-{step}").glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        assert len(found) == 40
        for number in range(40):
            assert found[f"w{number}"].shape == (2 * (1000 + number), 3)
            assert found[f"w{number}"].eq(step).all()


def train_over_nccl(rank: int, line: Line) -> None:
    (root,) = line.hear()
    group = nccl_group(rank)
    mesh = DeviceMesh.from_group(group, "cuda")
    world = World("fsdp", mesh=mesh)
    expected, saves = {}, []
    with Checkpointer(root, group=group, on_failure="raise") as checkpointer:
        for step in range(1, 5):
            torch.cuda._sleep(_SLOW)
            world.train()
            expected[step] = whole(world.state())
            staging: dict[str, Any] = [{}, {"staging": "lazy", "optimizer": world.optimizer}][step % 2]
            saves.append(checkpointer.save_hf(step, world.state()["model"], **staging))
            saves.append(checkpointer.save_dcp(step, world.state(), extra={"step": step}, **staging))
        world.train()
        for save in saves:
            save.result(60)
        other = World("fsdp", seed=3, mesh=mesh)
        other.train()
        for step in range(1, 5):
            state = other.state()
            assert checkpointer.load_dcp(state, step)[0] == {"step": step}
            assert_same(whole(state), expected[step])
    if rank == 0:
        for step in range(1, 5):
            assert_same(load_file(root / f"hf-{step}" / "model.safetensors"), expected[step]["model"])
    line.say("the same")


@pytest.mark.needs_gpu
def test_a_model_sharded_over_devices_is_saved_while_it_trains_and_resumed(tmp_path: Path) -> None:
    assert run(train_over_nccl, 2, tmp_path, tmp_path / "root") == [("the same",)] * 2
