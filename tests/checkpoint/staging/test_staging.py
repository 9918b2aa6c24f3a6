"""EagerCopy during the next forward and backward: over before the optimizer steps, and never half of a step."""

from __future__ import annotations

import _thread
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint.exports import staged, write
from support.interrupts import signal_once_waiting
from support.waiting import until
from torch import nn

from tundish import _native
from tundish.checkpoint import Checkpointer
from tundish.checkpoint import copies as staging
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import BufferCopy, Copies, LazyCopy, optimizers_of
from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.staging import Staged
from tundish.checkpoint.write_plan import Place
from tundish.errors import InvalidInputError, InvalidTypeError


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    # Of all threads, since those that copy have no names.
    before = _thread._count()
    yield
    assert _native.staging_stats()["in_use"] == 0
    until(lambda: _thread._count() <= before, "a thread is still there")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background copies begin when this is set: as slow as a copy can be."""
    opened = threading.Event()
    run = staging.EagerCopy.run

    def wait_and_run(self: staging.EagerCopy) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(60)
        run(self)

    monkeypatch.setattr(staging.EagerCopy, "run", wait_and_run)
    yield opened
    opened.set()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.head = nn.Linear(64, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(torch.relu(self.layer(x))).sum()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_holds(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].equal(tensor), name


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_step_waits_for_the_copy(optimizer: Any, gate: threading.Event, tmp_path: Path) -> None:
    model = Net()
    steps = optimizer([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for turn in range(3):
        gate.clear()
        expected = state(model)
        with staged(HfExport(model, staging="lazy", optimizer=steps)) as save:
            with pytest.raises(TimeoutError):
                save.wait_staged(0.01)
            # The buffer changes in the forward, and what no optimizer has may change at any time.
            model(torch.randn(4, 64)).backward()
            model.frozen.data.add_(1)
            opener = threading.Timer(0.2, gate.set)
            opener.start()
            started = time.monotonic()
            steps.step()
            assert time.monotonic() - started > 0.15
            opener.join()
            steps.zero_grad()
            write(save, tmp_path / str(turn))
        assert_holds(tmp_path / str(turn), expected)
        assert not model.layer.weight.equal(expected["layer.weight"])


def test_the_call_does_not_wait_for_the_copy(gate: threading.Event, tmp_path: Path) -> None:
    parameters = {f"w{number}": nn.Parameter(torch.zeros(1 << 20)) for number in range(8)}
    optimizer = torch.optim.SGD(parameters.values(), lr=1)
    with staged(HfExport(parameters, staging="lazy", optimizer=optimizer)) as save:
        with pytest.raises(TimeoutError):
            save.wait_staged(0)
        gate.set()
        save.wait_staged(60)
        # Nothing is left of it that would hold up a step.
        gate.clear()
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        write(save, tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors")["w3"].eq(0).all()


def test_the_copy_begins_after_the_step_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(3)
    optimizers = [torch.optim.SGD([parameter], lr=1), torch.optim.SGD([torch.zeros(1)], lr=1)]
    order: list[str] = []
    add, run = staging._StepGate.add, staging.EagerCopy.run

    def slowly_add(self: staging._StepGate, copy: LazyCopy) -> None:
        # The thread is there already; it would be through by now.
        time.sleep(0.2)
        add(self, copy)
        order.append("fence")

    def run_told(self: staging.EagerCopy) -> None:
        order.append("copy")
        run(self)

    monkeypatch.setattr(staging._StepGate, "add", slowly_add)
    monkeypatch.setattr(staging.EagerCopy, "run", run_told)
    buffer = Buffer(12)
    block = BufferCopy(
        buffer=buffer, places=[Place(0, 12, torch.float32, (3,))], sources=[parameter], names=["w"]
    )
    copy = LazyCopy([block], optimizers)
    copy.start()
    copy.wait(time.monotonic() + 60)
    assert order == ["fence", "fence", "copy"]
    del block, copy
    buffer.release()


def test_several_optimizers(gate: threading.Event, tmp_path: Path) -> None:
    model = Net()
    optimizers = [
        torch.optim.SGD(model.layer.parameters(), lr=1),
        torch.optim.Adam(model.head.parameters(), lr=1),
    ]
    expected = state(model)
    with staged(HfExport(model, staging="lazy", optimizer=optimizers)) as save:
        model(torch.randn(4, 64)).backward()
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        for optimizer in reversed(optimizers):
            optimizer.step()
        opener.join()
        write(save, tmp_path / "hf")
    assert_holds(tmp_path / "hf", expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(
            {name: tensor + 1 for name, tensor in model.state_dict().items()}
        ),
        lambda model: model.layer.weight.detach().mul_(2),
        lambda model: nn.init.zeros_(model.layer.weight),
        lambda model: torch.optim.SGD(model.layer.parameters(), lr=1).step(),
    ],
)
def test_other_changes_fail_a_lazy_save(change: Any, gate: threading.Event, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    model(torch.randn(4, 64)).backward()
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        change(model)
        gate.set()
        with pytest.raises(InvalidInputError, match=r"(layer\.weight|and more) changed while a lazy"):
            write(save, tmp_path / "hf")
        # The training goes on.
        optimizer.step()


def test_changes_after_the_copy_are_allowed(tmp_path: Path) -> None:
    model = Net()
    expected = state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        save.wait_staged(60)
        save.allow_changes()
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
        write(save, tmp_path / "hf")
    assert_holds(tmp_path / "hf", expected)


def test_cleared_gradients_and_replaced_memory_are_allowed(gate: threading.Event, tmp_path: Path) -> None:
    model = Net()
    model(torch.randn(4, 64)).backward()
    expected = state(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        model.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        # As moving a model to another device or dtype does.
        model.layer.weight.data = torch.zeros_like(model.layer.weight)
        gate.set()
        write(save, tmp_path / "hf")
    assert_holds(tmp_path / "hf", expected)


@pytest.mark.usefixtures("two_threads")
def test_copying_begins_before_the_vote() -> None:
    values = torch.randint(256, (64 << 20,), dtype=torch.uint8)
    save = Staged(HfExport({"w": values}).write_plan())
    try:
        (image,) = save._buffers
        until(lambda: image.bytes[-values.numel() :].equal(values), "nothing is copied")
    finally:
        save.release()


def test_tensors_without_an_optimizer_are_copied_at_once(gate: threading.Event) -> None:
    owned, other = torch.ones(3), torch.ones(3)
    parameter = nn.Parameter(owned)
    buffer = Buffer(48)
    targets = buffer.bytes.view(torch.float32).view(4, 3).zero_()
    block = BufferCopy(
        buffer=buffer,
        places=[Place(start, start + 12, torch.float32, (3,)) for start in (0, 12, 24)],
        sources=[parameter, other, parameter.detach().view(3)],
        names=["a", "b", "c"],
    )
    copies = Copies()
    copies.begin([block], [torch.optim.SGD([parameter], lr=1)])
    copies.run()
    assert targets.tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]
    gate.set()
    copies.wait(None)
    assert targets.tolist() == [[1] * 3, [1] * 3, [1] * 3, [0] * 3]


def test_lazy_conversions_run_in_the_background(gate: threading.Event, tmp_path: Path) -> None:
    model = Net()
    expected = {
        f"{name}.t": (tensor.t() if tensor.ndim == 2 else tensor) for name, tensor in state(model).items()
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    threads: list[str] = []

    def turned(name: str, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            threads.append(threading.current_thread().name)
        return [(f"{name}.t", tensor.t().contiguous() if tensor.ndim == 2 else tensor.clone())]

    with staged(HfExport(model, staging="lazy", optimizer=optimizer, to_hf=turned)) as save:
        model(torch.randn(4, 64)).backward()
        assert threads == []
        gate.set()
        optimizer.step()
        writer = threading.Thread(target=write, args=(save, tmp_path / "hf"), name="finalize")
        writer.start()
        writer.join()
    assert set(threads) == {"finalize"}
    assert_holds(tmp_path / "hf", expected)


def test_an_abandoned_save_holds_up_no_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        save.wait_staged(60)
    model(torch.randn(4, 64)).backward()
    optimizer.step()


def test_memory_is_released_after_the_copy_ends(gate: threading.Event) -> None:
    model = Net()
    plan = HfExport(model, staging="lazy", optimizer=torch.optim.SGD(model.parameters(), lr=1))
    save = Staged(plan.write_plan())
    save.copy()
    giving = threading.Thread(target=save.release)
    giving.start()
    giving.join(0.2)
    assert giving.is_alive()
    gate.set()
    giving.join(60)
    assert not giving.is_alive()


def test_optimizers_are_not_kept_alive() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        save.wait_staged(60)
    remains = weakref.ref(optimizer)
    del optimizer, save
    gc.collect()
    assert remains() is None


def test_an_error_of_the_copy_is_raised_by_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    run = staging.EagerCopy.run

    def fail(self: staging.EagerCopy) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("device")
        run(self)

    monkeypatch.setattr(staging.EagerCopy, "run", fail)
    with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
        model(torch.randn(4, 64)).backward()
        optimizer.step()
        with pytest.raises(MemoryError, match="device"):
            save.wait_staged(60)


def test_arguments_that_are_no_optimizer_are_refused() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD([torch.zeros(1)])
    assert optimizers_of("lazy", inner) == (inner,)
    assert optimizers_of("lazy", [inner, inner]) == (inner, inner)
    for given in (Wrapper(inner), [inner, None], "sgd"):
        with pytest.raises(InvalidTypeError, match=r"give the torch\.optim\.Optimizer itself"):
            optimizers_of("lazy", given)
    for given in (None, [], ()):
        with pytest.raises(InvalidInputError, match="give optimizer="):
            optimizers_of("lazy", given)


def test_an_optimizer_gets_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer gets one hook, however many saves it fences."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for _ in range(3):
        with staged(HfExport(model, staging="lazy", optimizer=optimizer)) as save:
            save.wait_staged(60)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    fenced: list[Any] = []
    monkeypatch.setattr(LazyCopy, "before_step", fenced.append)
    optimizer.step()
    assert fenced == []


class Adding(torch.optim.Optimizer):
    """Changes parameters in a way that is not counted by their versions."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


def test_a_step_waits_again_after_ctrl_c(gate: threading.Event) -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = Adding(parameter)
    buffer, place = Buffer(4000), Place(0, 4000, torch.float32, (1000,))
    block = BufferCopy(buffer=buffer, places=[place], sources=[parameter.detach()], names=["w"])
    copy = LazyCopy([block], [optimizer])
    copy.start()
    interrupt = signal_once_waiting()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    interrupt.join()
    go_on = threading.Timer(0.3, gate.set)
    go_on.start()
    optimizer.step()
    go_on.join()
    copy.wait(None)
    assert parameter[0] == 1
    assert buffer.view(place).eq(0).all()
    del block, copy
    buffer.release()


@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("left_bytes", [0, 4096])
def test_freed_tensors_are_refused_by_name(tmp_path: Path, kind: str, left_bytes: int) -> None:
    freed = torch.arange(1 << 16, dtype=torch.float32)
    freed.untyped_storage().resize_(left_bytes)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        save = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        with pytest.raises(InvalidInputError, match="'w' has no values"):
            save(1, {"w": freed})


@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("left_bytes", [0, 4096])
def test_tensors_freed_after_a_save_are_refused(tmp_path: Path, kind: str, left_bytes: int) -> None:
    whole, freed = torch.ones(3), torch.arange(1 << 16, dtype=torch.float32)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        save = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        save(1, {"a": whole, "w": freed}).result(60)
        freed.untyped_storage().resize_(left_bytes)
        with pytest.raises(InvalidInputError, match="'w' has no values"):
            save(2, {"a": whole, "w": freed})
        save(3, {"a": whole, "w": torch.ones(1 << 16)}).result(60)


def test_zeros_without_memory_are_saved_as_zeros(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        zeros = torch._efficientzerotensor((5000,))
        path = checkpointer.save_hf(1, {"w": zeros}).result(60)
    assert load_file(path / "model.safetensors")["w"].eq(0).all()
