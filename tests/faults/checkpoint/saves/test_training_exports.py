"""`from_pretrained` loads exports of a running training: the weights of that step, bit by bit.

While an export is gathered and written, training goes on and changes every weight. In one process, sharded by FSDP2
on two and four ranks, and with experts of their own on each two of four.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line

STAGINGS = ("eager", "lazy")


def with_experts_apart() -> Any:
    """A Mixtral on a mesh of two dimensions: experts spread over one, everything sharded over the other.

    Experts get the tokens of all ranks of their mesh, and give their parts of the result (the f and g of
    "Megatron-LM", Shoeybi et al., 2019).
    """
    import torch
    from support.checkpoint.sharded_models import place, whole
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "expert"))
    group = mesh["expert"].get_group()

    class Spread(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.view_as(tokens)

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            summed = gradient.contiguous()
            distributed.all_reduce(summed, group=group)
            return summed

    class Collect(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, parts: torch.Tensor) -> torch.Tensor:
            summed = parts.clone()
            distributed.all_reduce(summed, group=group)
            return summed

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def forward_of(experts: Any) -> Any:
        def forward(tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tokens, weights = Spread.apply(tokens), Spread.apply(weights)
            up, down = experts.gate_up_proj.to_local(), experts.down_proj.to_local()
            parts = torch.zeros_like(tokens)
            for number in range(len(up)):
                token, rank = torch.where(chosen == mesh["expert"].get_local_rank() * len(up) + number)
                gate, value = (tokens[token] @ up[number].T).chunk(2, dim=-1)
                made = (experts.act_fn(gate) * value) @ down[number].T * weights[token, rank, None]
                parts = parts.index_add(0, token, made)
            return Collect.apply(parts)

        return forward

    model = whole("mixtral")
    for layer in model.model.layers:  # type: ignore[union-attr]
        experts = layer.mlp.experts  # type: ignore[union-attr]
        place(experts, mesh["expert"], Shard(0))
        experts.forward = forward_of(experts)
        fully_shard(experts, mesh=mesh["data"])
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def train_and_export(rank: int, line: Line) -> None:
    """Trains, exports in between, and says of each export whether `from_pretrained` gives what the model was then."""
    import torch
    from support.checkpoint.dcp_states import assert_same, whole
    from support.checkpoint.sharded_models import spread
    from support.checkpoint.sharded_models import whole as unspread
    from torch import distributed
    from transformers import AutoModelForCausalLM

    from tundish.checkpoint import Checkpointer

    layout, root = line.hear()
    if not distributed.is_initialized():
        model: Any = unspread(layout)
    else:
        model = with_experts_apart() if layout == "experts" else spread(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    may_write = threading.Event()

    def on_event(event: str, kind: str, step: int) -> None:
        if event == "staged":
            assert may_write.wait(60)

    def train(step: int) -> None:
        tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with Checkpointer(root, on_failure="raise", on_event=on_event) as checkpointer:
        for number, staging in enumerate(STAGINGS):
            first = 10 * number
            for step in range(first, first + 3):
                train(step)
            then = whole(model.state_dict())
            named = {} if staging == "eager" else {"staging": staging, "optimizer": optimizer}
            may_write.clear()
            save = checkpointer.save_hf(first + 3, model, shard_bytes=20_000, **named)
            for step in range(first + 3, first + 6):
                train(step)
            assert not save.done()
            may_write.set()
            # It is gathered and written while this goes on.
            for step in range(first + 6, first + 9):
                train(step)
            path = save.result(60)
            now = whole(model.state_dict())
            if rank == 0:
                loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
                assert_same(loaded, then)
                assert not any(
                    torch.equal(then[name], now[name]) for name in then if then[name].is_floating_point()
                )
                checkpointer.verify(path)
                assert len(list(path.glob("*.safetensors"))) > 1
    line.say(STAGINGS)


@pytest.mark.parametrize(("layout", "size"), [("llama", 2), ("llama", 4), ("mixtral", 2), ("experts", 4)])
def test_from_pretrained_loads_the_model_of_its_step(layout: str, size: int, tmp_path: Path) -> None:
    with Job(train_and_export, size, tmp_path) as job:
        job.tell_all((layout, tmp_path / "root"))
        assert job.hear_all() == [(STAGINGS,)] * size
        job.expect_end()


def test_from_pretrained_loads_the_model_of_one_process(tmp_path: Path) -> None:
    class Here:
        said: Any = None

        def hear(self) -> Any:
            return "llama-tied", tmp_path / "root"

        def say(self, *message: Any) -> None:
            self.said = message

    here = Here()
    train_and_export(0, here)  # type: ignore[arg-type]
    assert here.said == (STAGINGS,)
