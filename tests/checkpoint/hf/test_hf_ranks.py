"""Exports of models that are sharded over ranks: the same bytes as from one rank, in bounded memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome

SHARD_BYTES = 700
MEBIBYTE = 1 << 20


def halves(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """A training layout that differs: matrices are kept in two parts on the hub, and called otherwise."""
    if tensor.ndim < 2:
        yield f"hub.{name}", tensor
    else:
        for part, rows in zip(("low", "high"), tensor.split((1, len(tensor) - 1)), strict=True):
            yield f"hub.{name}.{part}", rows


def arguments_of(kind: str, model: Any) -> dict[str, Any]:
    import torch

    return {
        "plain": {},
        "dtype": {"dtype": torch.bfloat16},
        "to_hf": {"to_hf": halves},
        "lazy": {"staging": "lazy", "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)},
        "lazy to_hf": {
            "to_hf": halves,
            "dtype": torch.float16,
            "staging": "lazy",
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        },
    }[kind]


def train(model: Any, optimizer: Any) -> None:
    """A step that changes every parameter and buffer; a real one where all ranks can run the model."""
    import torch

    if hasattr(model, "config"):
        given = torch.randint(0, 60, (2, 9))
        model(given, labels=given).loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for tensor in model.buffers():
            tensor.copy_(tensor.logical_not() if tensor.dtype == torch.bool else tensor + 1)


def saving(rank: int, line: Line) -> None:
    """Saves models as the test orders, and compares the files with those that one rank writes of the whole model."""
    import torch
    import torch.distributed as distributed
    from support.checkpoint.exports import connected_exchange_group, export, staged, write
    from support.checkpoint.sharded_models import spread, whole

    from tundish import _native
    from tundish.checkpoint.hf.export import HfExport

    exchange_group = connected_exchange_group()
    alone = distributed.new_group([rank], use_local_synchronization=True)
    while (order := line.hear()) is not None:
        layout, kind, folder = order
        model = spread(layout)
        arguments = arguments_of(kind, model) | {"shard_bytes": SHARD_BYTES}
        plan = HfExport(model, exchange_group=exchange_group, **arguments)
        if rank == 0:
            folder.mkdir()
        distributed.barrier()
        with staged(plan) as save:
            optimizer = arguments.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.5)
            train(model, optimizer)
            write(save, folder, is_first=rank == 0)
        assert _native.staging_stats()["in_use"] == 0
        distributed.barrier()
        writers = set(plan._plan.writers)
        if rank == 0:
            reference = whole(layout)
            for key in ("staging", "optimizer"):
                arguments.pop(key, None)
            export(folder / "alone", reference, group=alone, **arguments)
            ours = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            theirs = {path.name: path.read_bytes() for path in (folder / "alone").iterdir()}
            different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            line.say(sorted(ours), sorted(different), writers)
        line.say(plan.fingerprint)
        del model, plan, save, optimizer, arguments


NETS = ("ddp", "fsdp", "hsdp", "tp", "fsdp+tp", "ep", "replicated")
KINDS = ("plain", "dtype", "to_hf", "lazy", "lazy to_hf")
MODELS = ("llama", "llama-tied", "mixtral")


@pytest.mark.parametrize("size", [2, 4])
def test_the_same_bytes_as_from_one_rank(size: int, path_in_memory: Path) -> None:
    orders = [(layout, kind) for layout in NETS for kind in KINDS]
    orders += [(layout, kind) for layout in MODELS for kind in ("plain", "lazy")]
    with Job(saving, size, path_in_memory) as job:
        for layout, kind in orders:
            job.tell_all((layout, kind, path_in_memory / f"{layout}-{kind}"))
            names, different, writers = job.hear(0)
            assert different == [], (layout, kind)
            assert any(name.startswith("model-00002-of-") for name in names)
            assert writers == set(range(size)), "all ranks write"
            assert len(set(job.hear_all())) == 1, "all ranks plan the same"
        job.tell_all()
        job.expect_end()


def saving_alone(rank: int, line: Line) -> None:
    """Saves models of DTensors in a job of one rank, and sends the files that differ from those of whole models."""
    import torch
    from support.checkpoint.sharded_models import spread, whole

    from tundish.checkpoint import Checkpointer

    root = line.hear()
    while (order := line.hear()) is not None:
        layout, kind, step = order
        model = spread(layout)
        arguments = arguments_of(kind, model) | {"shard_bytes": SHARD_BYTES}
        with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
            save = checkpointer.save_hf(step, model, **arguments)
            train(model, arguments.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.5))
            ours = save.result(60)
            for key in ("staging", "optimizer"):
                arguments.pop(key, None)
            theirs = checkpointer.save_hf(step + 1, whole(layout), **arguments).result(60)
        names = {path.name for folder in (ours, theirs) for path in folder.iterdir()} - {"tundish.json"}
        line.say(
            [name for name in sorted(names) if (ours / name).read_bytes() != (theirs / name).read_bytes()]
        )


@pytest.mark.filterwarnings("ignore:.*staging_limit_bytes")
def test_a_job_of_one_rank_exports_dtensors(path_in_memory: Path) -> None:
    orders = [(layout, kind) for layout in ("fsdp", "tp") for kind in KINDS] + [
        ("llama", "plain"),
        ("llama", "lazy"),
    ]
    with Job(saving_alone, 1, path_in_memory) as job:
        job.tell(0, path_in_memory / "root")
        for number, (layout, kind) in enumerate(orders):
            job.tell(0, (layout, kind, 2 * number))
            (different,) = job.hear(0)
            assert different == [], (layout, kind)
        job.tell(0)
        job.expect_end()


def reset_peak() -> int:
    """Memory in use; the peak is counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


def gathering_much(rank: int, line: Line) -> None:
    """Saves 512 MiB that are spread over all ranks, and says how much memory that took at most."""
    import torch
    import torch.distributed as distributed
    from support.checkpoint.exports import connected_exchange_group, staged, write
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, full

    from tundish import _native
    from tundish.checkpoint.hf.export import HfExport

    exchange_group = connected_exchange_group()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    # Half of them have to be put together of parts that are no stretch of the file.
    tensors = {
        f"w{number}": full((4096, 4096), 0.5, device_mesh=mesh, placements=[Shard(number % 2)])
        for number in range(8)
    }
    distributed.barrier()
    while (order := line.hear()) is not None:
        kind, folder = order
        arguments: dict[str, object] = {}
        if kind == "to_hf":
            arguments["to_hf"] = lambda name, tensor: [(name, tensor.t() + 1)]
        if kind == "lazy":
            parameters = [torch.nn.Parameter(tensor) for tensor in tensors.values()]
            arguments |= {"staging": "lazy", "optimizer": torch.optim.SGD(parameters)}
        if rank == 0:
            folder.mkdir()
        distributed.barrier()
        _native.trim_staging()
        before = reset_peak()
        plan = HfExport(tensors, shard_bytes=128 * MEBIBYTE, exchange_group=exchange_group, **arguments)
        with staged(plan) as save:
            write(save, folder, is_first=rank == 0)
        line.say(peak() - before, plan.write_plan().staged_bytes, plan.write_plan().file_bytes)
        assert _native.staging_stats()["in_use"] == 0
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def test_no_rank_holds_the_whole_model(path_in_memory: Path) -> None:
    size, whole = 4, 512 * MEBIBYTE
    # Buffers of sockets and the interpreter.
    slack = 32 * MEBIBYTE
    with Job(gathering_much, size, path_in_memory, fresh=True) as job:
        for kind in ("plain", "to_hf", "lazy"):
            job.tell_all((kind, path_in_memory / kind))
            for taken, announced, own in job.hear_all():
                assert own == pytest.approx(whole / size, rel=0.01)
                assert taken < announced + slack, kind
                # One tensor comes in and parts of others go out beside the files; a lazy save remembers its part.
                beside = (
                    2 * 64 * MEBIBYTE + {"plain": 0, "to_hf": 2 * 64 * MEBIBYTE, "lazy": whole // size}[kind]
                )
                assert announced <= own + beside + MEBIBYTE
        job.tell_all()
        job.expect_end()


def failing(rank: int, line: Line) -> None:
    """Runs a conversion that fails on one rank, a save that succeeds, and saves that are refused."""
    import torch
    import torch.distributed as distributed
    from support.checkpoint.exports import connected_exchange_group, staged, write
    from support.checkpoint.sharded_models import spread
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    from tundish import _native
    from tundish.checkpoint.hf import gather as schedule
    from tundish.checkpoint.hf.export import HfExport

    # A round for each tensor, so that one fails in the middle.
    schedule.ROUND_BYTES = 1
    folder = line.hear()
    exchange_group = connected_exchange_group()
    model = spread("fsdp")

    def fail_here(name: str, tensor: Any) -> Any:
        if rank == 1 and not tensor.is_meta:
            raise KeyError(name)
        return [(name, tensor + 0)]

    def save(to_hf: Any) -> None:
        plan = HfExport(model, to_hf=to_hf, shard_bytes=SHARD_BYTES, exchange_group=exchange_group)
        with staged(plan) as staging:
            write(staging, folder, is_first=rank == 0)

    line.say(*outcome(lambda: save(fail_here)))
    assert _native.staging_stats()["in_use"] == 0
    distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    distributed.barrier()
    line.say(*outcome(lambda: save(None)))

    whole = torch.randn(8, 4)
    mesh = init_device_mesh("cpu", (2,))
    uneven = whole[: 3 + 2 * rank].contiguous()
    for tensor in (
        DTensor.from_local(whole, mesh, [Partial()]),
        DTensor.from_local(uneven, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride()),
    ):
        line.say(*outcome(lambda tensor=tensor: HfExport({"layer.w": tensor}, exchange_group=exchange_group)))
    given = {"a": whole, "b": distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])}
    line.say(*outcome(lambda: HfExport(given, shard_bytes=whole.nbytes, exchange_group=exchange_group)))


def test_an_error_of_one_rank_is_raised_there(tmp_path: Path) -> None:
    with Job(failing, 2, tmp_path) as job:
        job.tell_all(tmp_path / "hf")
        first, second = job.hear_all()
        assert first[0] == ""
        assert second[0] == "KeyError"
        assert [kind for kind, _, _ in job.hear_all()] == ["", ""]
        for sentence in ("values are yet to be reduced", "cut it as torch.chunk does"):
            for kind, text, _ in job.hear_all():
                assert kind == "InvalidInputError"
                assert text.startswith("'layer.w' is a DTensor")
                assert sentence in text
        first, second = job.hear_all()
        assert first[0] == ""
        assert second[0] == "InvalidInputError"
        assert second[1].startswith("'b' is a DTensor on a mesh without rank 1, which is to write it")
        job.expect_end()


def within_a_limit(rank: int, line: Line) -> None:
    """Saves 36 MB a rank under a limit; sends the counted bytes, the peak of memory and a hash of the files."""
    import torch
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tundish import _native
    from tundish.checkpoint import Checkpointer

    root = line.hear()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(0)
    tensors = {
        f"w{number}": distribute_tensor(torch.randn(1000, 1501), mesh, [Shard(number % 2)])
        for number in range(12)
    }
    while (order := line.hear()) is not None:
        step, limit, lazy = order
        arguments: dict[str, Any] = {}
        if lazy:
            parameters = [torch.nn.Parameter(tensor) for tensor in tensors.values()]
            arguments = {"staging": "lazy", "optimizer": torch.optim.SGD(parameters)}
        _native.trim_staging()
        with Checkpointer(root, staging_limit_bytes=limit, on_failure="raise", timeout=60) as checkpointer:
            before = reset_peak()
            path = checkpointer.save_hf(step, tensors, shard_bytes=20_000_000, **arguments).result(60)
            taken = peak() - before
            counted = checkpointer.stats()["staging_peak_bytes"]
        files = {
            file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name != "tundish.json"
        }
        line.say(counted, taken, hash(tuple(files.items())))


def test_staging_stays_within_its_limit(path_in_memory: Path) -> None:
    size = 2
    # Buffers of sockets and the interpreter.
    slack = 24 * MEBIBYTE
    with Job(within_a_limit, size, path_in_memory) as job:
        job.tell_all(path_in_memory / "root")
        found = set()
        for step, limit in enumerate((None, 200_000_000)):
            for lazy in (False, True):
                job.tell_all((2 * step + lazy, limit, lazy))
                for rank, (counted, taken, written) in enumerate(job.hear_all()):
                    found.add((rank, written))
                    assert taken < counted + slack, (limit, lazy)
                    if limit is not None:
                        assert counted <= limit, (limit, lazy)
        # Each rank has its own seed of hashes.
        assert len(found) == size
        job.tell_all()
        job.expect_end()
