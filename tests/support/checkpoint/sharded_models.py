"""Models spread over ranks in the ways that training knows, for tests of exports.

Every rank builds the same model from the same seed, so the whole of it can be made again on any of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 10, 6))
        self.down = nn.Parameter(torch.randn(4, 6, 10))


class Net(nn.Module):
    """A small model with sizes that ranks do not divide, counters and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)
        self.experts = Experts()
        self.odd = nn.Parameter(torch.randn(7, 5))
        self.tiny = nn.Parameter(torch.randn(1, 3))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.zeros(9), persistent=False)


def whole(layout: str) -> nn.Module:
    """The model of `layout` before it is spread."""
    torch.manual_seed(3)
    if layout.startswith("llama"):
        return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=layout.endswith("tied")))
    if layout.startswith("mixtral"):
        return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))
    return Net()


def spread(layout: str) -> nn.Module:
    """The same model over all ranks: ddp, fsdp, hsdp, tp, fsdp+tp, ep (with fsdp), replicated, or of transformers."""
    size = distributed.get_world_size()
    model = whole(layout)
    if layout in ("hsdp", "fsdp+tp", "ep"):
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    elif layout != "ddp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("inner",))
    if layout in ("tp", "fsdp+tp"):
        parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout == "ep":
        place(model.experts, mesh["inner"], Shard(0))
        fully_shard(model.experts, mesh=mesh["outer"])
    if layout == "replicated":
        for module in model.modules():
            place(module, mesh, Replicate())
    if layout in ("fsdp", "llama", "llama-tied", "mixtral"):
        for layer in getattr(getattr(model, "model", None), "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if layout in ("fsdp+tp", "ep"):
        fully_shard(model, mesh=mesh["outer"])
    if layout == "hsdp":
        fully_shard(model, mesh=mesh)
    return nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model


def place(module: nn.Module, mesh: Any, placement: Any) -> None:
    """Make the module's own parameters DTensors."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
