"""Exports of tensors by name: their files, the time of their copy, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from support.checkpoint.dcp_states import bits
from support.checkpoint.exports import export, header_and_data, options, staged, write
from torch import nn

from tundish import _native
from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.root import DiskDraft
from tundish.checkpoint.staging import Staged
from tundish.errors import InvalidInputError, InvalidTypeError

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    assert _native.staging_stats()["in_use"] == 0


def tensors() -> dict[str, torch.Tensor]:
    """Of every shape and memory layout that a file can hold."""
    torch.manual_seed(0)
    square = torch.randn(6, 6)
    turning = torch.randn(3, dtype=torch.complex64)
    return {
        "plain": torch.randn(3, 5),
        "transposed": square.t(),
        "every other": torch.arange(20)[::2],
        "expanded": torch.ones(1).expand(4, 3),
        "window": square[1:4, 2:5],
        # Other values in the same memory.
        "turning": turning,
        "turning back": turning.conj(),
        "flipped sign": turning.conj().imag,
        "sign": turning.imag,
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "mask": torch.tensor([[True, False, True]]),
        "half": torch.randn(7).to(torch.bfloat16),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "counts": torch.arange(5).to(torch.uint16),
    }


@pytest.mark.parametrize("shard_bytes", [10**9, 100])
def test_every_tensor_is_saved(shard_bytes: int, tmp_path: Path) -> None:
    given = tensors()
    facts = export(tmp_path / "hf", given, shard_bytes=shard_bytes)
    assert sorted(fact.name for fact in facts) == sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert all(fact.size == (tmp_path / "hf" / fact.name).stat().st_size for fact in facts)
    assert all(fact.checksum is not None for fact in facts)
    loaded: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        loaded |= load_file(path)
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded[name]) == bits(tensor.resolve_conj())


def test_the_file_equals_that_of_safetensors(tmp_path: Path) -> None:
    given = {name: tensor.detach().resolve_conj().contiguous() for name, tensor in tensors().items()}
    export(tmp_path / "ours", given)
    safetensors.torch.save_file(given, tmp_path / "theirs", {"format": "pt"})
    assert header_and_data(tmp_path / "ours" / "model.safetensors") == header_and_data(tmp_path / "theirs")


def test_the_plan_counts_the_written_bytes(tmp_path: Path) -> None:
    plan = HfExport(tensors(), shard_bytes=100)
    with staged(plan) as save:
        in_use = _native.staging_stats()["in_use"]
        write(save, tmp_path / "hf")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "hf").iterdir()}
    assert sum(sizes.values()) == plan.write_plan().checkpoint_bytes
    files = [size for name, size in sizes.items() if name.endswith(".safetensors")]
    planned = plan.write_plan()
    assert planned.staged_bytes == planned.file_bytes == sum(files)
    assert planned.staged_bytes <= in_use <= planned.staged_bytes + 4096 * len(files)


def test_fingerprints() -> None:
    given = tensors()
    same = HfExport(given).fingerprint
    assert HfExport({name: torch.ones_like(tensor) for name, tensor in given.items()}).fingerprint == same
    others = [
        HfExport(given, shard_bytes=100),
        HfExport(given, dtype=torch.float16),
        HfExport(given, to_hf=lambda name, tensor: [(name, tensor + 0)]),
        HfExport({**given, "half": torch.zeros(8, dtype=torch.bfloat16)}),
        HfExport({**given, "one more": torch.zeros(1)}),
        HfExport(given, staging="lazy", optimizer=torch.optim.SGD([given["parameter"]])),
    ]
    assert len({same, *(plan.fingerprint for plan in others)}) == len(others) + 1


def test_ranks_that_convert_other_tensors_do_not_agree() -> None:
    plans = [
        HfExport({name: torch.zeros(3)}, to_hf=lambda name, tensor: [("x", tensor + 0)])
        for name in ("a", "b")
    ]
    assert plans[0].fingerprint != plans[1].fingerprint


def test_changes_after_staging_change_nothing(tmp_path: Path) -> None:
    given = tensors()
    expected = {name: tensor.detach().resolve_conj().clone() for name, tensor in given.items()}
    with staged(HfExport(given)) as save:
        for tensor in given.values():
            (tensor if tensor._base is None else tensor._base).detach().zero_()
        given.clear()
        write(save, tmp_path / "hf")
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in expected.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    memory = torch.randn(4, 4)
    given = {
        "a": memory,
        "same": memory,
        "also": memory.view(4, 4),
        "turned": memory.t(),
        "other shape": memory.view(2, 8),
        "part": memory[:2],
        "rest": memory[2:],
        "empty": torch.empty(0),
        "empty too": torch.empty(0),
    }
    export(tmp_path / "hf", given)
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(loaded) == sorted(set(given) - {"same", "also"})
    assert loaded["turned"].equal(memory.t())
    assert loaded["rest"].equal(memory[2:])


def test_fp8_and_its_scales_are_not_cast(tmp_path: Path) -> None:
    given = {
        "layer.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "layer.weight_scale_inv": torch.rand(1, 1),
        "layer.bias": torch.randn(8),
        "attention.k_proj.weight": torch.randn(8, 8).to(torch.float8_e5m2),
        "attention.k_proj.input_scale": torch.rand(()),
        # Of the cache, which belongs to no projection.
        "attention.k_scale": torch.rand(1),
        "norm.scale": torch.rand(8),
        "micro": torch.randint(0, 256, (4,), dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    export(tmp_path / "hf", given, dtype=torch.bfloat16)
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in given.items():
        if name in ("layer.bias", "norm.scale"):
            assert loaded[name].equal(tensor.to(torch.bfloat16))
        else:
            assert loaded[name].dtype == tensor.dtype
            assert bits(loaded[name]) == bits(tensor)


@pytest.mark.usefixtures("two_threads")
def test_many_small_tensors(tmp_path: Path) -> None:
    given = {f"w{number}": torch.full((64, 128), float(number)) for number in range(1100)}
    export(tmp_path / "hf", given, dtype=torch.float16)
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(loaded[name].equal(tensor.to(torch.float16)) for name, tensor in given.items())


def test_tensors_are_converted_one_at_a_time(tmp_path: Path) -> None:
    given = {f"w{number}": torch.full((1024, 1024), float(number)) for number in range(8)}
    alive: list[int] = []

    def split(name: str, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            alive.append(int(tensor[0, 0]))
        for number, part in enumerate((tensor * 2).chunk(4)):
            yield f"{name}.{number}", part

    export(tmp_path / "hf", given, to_hf=split, shard_bytes=10 * MEBIBYTE)
    assert sorted(alive) == list(range(8)), "each tensor is converted once"
    loaded: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        loaded |= load_file(path)
    assert len(loaded) == 32
    assert loaded["w3.2"].shape == (256, 1024)
    assert all(loaded[f"w{number}.3"].eq(2 * number).all() for number in range(8))


def test_memory_of_conversions_is_freed(tmp_path: Path) -> None:
    """Only the products of one conversion are in memory beside the files."""
    given = {f"w{number}": torch.full((1024, 1024), float(number)) for number in range(16)}
    most = 0

    def doubled(name: str, tensor: torch.Tensor) -> Any:
        nonlocal most
        if not tensor.is_meta:
            status = Path("/proc/self/statm").read_text().split()
            most = max(most, int(status[1]) * 4096)
        return [(name, tensor * 2)]

    plan = HfExport(given, to_hf=doubled)
    save = Staged(plan.write_plan())
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    save.copy()
    save.release()
    assert most - before < plan.write_plan().checkpoint_bytes + 6 * 4 * MEBIBYTE


def test_progress_is_reported(tmp_path: Path) -> None:
    told: list[Callable[[], int]] = []
    plan = HfExport({"w": torch.randn(1024, 1024)})
    with staged(plan) as save:
        save.wait_staged(10)
        save.write_late_files(DiskDraft(tmp_path), [])
        save.write(DiskDraft(tmp_path), options(told.append))
    assert told[-1]() == plan.write_plan().file_bytes
    assert not [thread for thread in threading.enumerate() if "tundish-hf" in thread.name]


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), InvalidTypeError, "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), InvalidTypeError, "sparse_csr"),
        (lambda: torch.eye(3).to_mkldnn(), InvalidTypeError, "_mkldnn"),
        (lambda: torch.empty(3, device="meta"), InvalidInputError, "meta device"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            InvalidTypeError,
            r"quantized \(qint8\)",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            InvalidTypeError,
            "no dense values|nested",
        ),
        (lambda: torch.ones(3).as_subclass(Dispatching), InvalidTypeError, "Dispatching, which has no dense"),
        (lambda: nn.UninitializedParameter(), InvalidInputError, "uninitialized"),
        (lambda: torch.ones(3, dtype=torch.complex128), InvalidTypeError, "complex128"),
    ],
)
def test_bad_tensors_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"'layer\.w' .*({message})"):
        HfExport({"fine": torch.ones(2), "layer.w": make()})


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"dtype": torch.int8}, InvalidTypeError),
        ({"dtype": "bfloat16"}, InvalidTypeError),
        ({"dtype": torch.float8_e4m3fn}, InvalidTypeError),
        ({"shard_bytes": 0}, InvalidInputError),
        ({"shard_bytes": -5}, InvalidInputError),
        ({"shard_bytes": 1.5}, InvalidInputError),
        ({"shard_bytes": True}, InvalidInputError),
        ({"shard_bytes": "5GB"}, InvalidInputError),
        ({"to_hf": 3}, InvalidTypeError),
        ({"staging": "later"}, InvalidInputError),
        ({"staging": "lazy"}, InvalidInputError),
        ({"staging": "lazy", "optimizer": []}, InvalidInputError),
        ({"staging": "lazy", "optimizer": "sgd"}, InvalidTypeError),
        ({"config": {"a": 1}}, InvalidTypeError),
        ({"tokenizer": "bert"}, InvalidTypeError),
        ({"source_dir": "missing"}, FileNotFoundError),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"(?i){'|'.join(arguments)}"):
        HfExport({"w": torch.ones(2)}, **arguments)


def test_planning_changes_nothing() -> None:
    in_use = _native.staging_stats()["in_use"]
    plan = HfExport(tensors())
    assert _native.staging_stats()["in_use"] == in_use
    save = Staged(plan.write_plan())
    assert _native.staging_stats()["in_use"] > in_use
    save.release()
    plan.release()
    plan.release()
    assert _native.staging_stats()["in_use"] == in_use


def test_memory_is_given_back_by_release() -> None:
    plan = HfExport(tensors())
    save = Staged(plan.write_plan())
    save.copy()
    save.release()
    assert _native.staging_stats()["in_use"] == 0
    save.release()


def test_a_save_without_memory_fails() -> None:
    plan = HfExport({"w": torch.zeros(1).expand(1 << 50)})
    with pytest.raises(MemoryError):
        Staged(plan.write_plan())
    plan.release()


def test_wait_staged_returns_at_once_on_the_host() -> None:
    with staged(HfExport(tensors())) as save:
        save.wait_staged(0)
        save.wait_staged(None)
