"""Models with adapters that are sharded over ranks, saved as `save_pretrained` saves the whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome

KINDS = ("plain", "dtype", "lazy")
# Less than some tensors: they take several windows.
LIMIT_BYTES = 300


def spread(model: Any, *, is_by_layer: bool = True) -> Any:
    """The model, sharded over all ranks: layer by layer, or as one unit beside its prompts."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    apart = ("LlamaDecoderLayer", "LlamaForCausalLM") if is_by_layer else ("PromptEmbedding",)
    # Inner modules come first.
    for module in reversed(list(model.modules())):
        if type(module).__name__ in apart:
            fully_shard(module, mesh=mesh)
    return model if isinstance(model, FSDPModule) else fully_shard(model, mesh=mesh)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a tensor was gathered or placed otherwise")


def saving(rank: int, line: Line) -> None:
    """Saves models as the test orders, and compares each export with that of `save_pretrained`."""
    import warnings

    import torch
    from support.checkpoint.adapter_models import adapted, assert_same_adapters
    from torch import distributed
    from torch.distributed.tensor import DTensor

    from tundish.checkpoint import Checkpointer, verify

    whole_of, full_tensor, redistribute = adapted, DTensor.full_tensor, DTensor.redistribute
    warnings.filterwarnings("ignore", ".*Could not find a config file")
    while (order := line.hear()) is not None:
        adapters, kind, is_parallel, folder = order
        model = whole_of(adapters)
        # Prompts are computed of what is whole, whatever the base is.
        spread(model.base_model if adapters == "prompts" else model)
        if is_parallel:
            # As transformers marks what it spreads itself: peft then gathers whatever it is given.
            model._tp_size = distributed.get_world_size()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        dtype = torch.bfloat16 if kind == "dtype" else None
        with Checkpointer(folder, on_failure="raise", timeout=60) as checkpointer:
            DTensor.full_tensor = DTensor.redistribute = refuse
            try:
                save = checkpointer.save_hf(
                    1,
                    model,
                    dtype=dtype,
                    shard_bytes=1,
                    staging="lazy" if kind == "lazy" else "eager",
                    optimizer=optimizer,
                )
            finally:
                DTensor.full_tensor, DTensor.redistribute = full_tensor, redistribute
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            path = save.result(60)
        if rank == 0:
            whole_of(adapters).to(dtype).save_pretrained(folder / "theirs")
            assert_same_adapters(path, folder / "theirs", but={"tundish.json"})
            assert verify(path) == []
        distributed.barrier()
        line.say("same")


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_adapters_give_the_same_files(size: int, path_in_memory: Path) -> None:
    orders = [("two", kind, False) for kind in KINDS]
    orders += [("added", "plain", False), ("added", "lazy", False), ("two", "plain", True)]
    orders += [("prompts", "plain", False)]
    with Job(saving, size, path_in_memory) as job:
        for number, order in enumerate(orders):
            (path_in_memory / str(number)).mkdir()
            job.tell_all((*order, path_in_memory / str(number)))
            assert job.hear_all() == [("same",)] * size, order
        job.tell_all()
        job.expect_end()


def saving_what_is_computed(rank: int, line: Line) -> None:
    """Saves adapters whose weights peft computes when it saves; sends the errors, and saves other adapters."""
    import warnings

    from support.checkpoint.adapter_models import adapted

    from tundish.checkpoint import Checkpointer

    warnings.filterwarnings("ignore", ".*Could not find a config file")
    root = line.hear()
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        for adapters in ("computed", "prompts", "chosen ranks"):
            # Some weights are all layers' own.
            model = spread(adapted(adapters), is_by_layer=False)
            line.say(*outcome(lambda model=model: checkpointer.save_hf(1, model)))
        checkpointer.save_hf(1, spread(adapted("two"))).result(60)
    line.say("saved")


def test_weights_computed_from_sharded_parameters_are_refused(path_in_memory: Path) -> None:
    with Job(saving_what_is_computed, 2, path_in_memory) as job:
        job.tell_all(path_in_memory / "root")
        for kind in ("VBLORA", "PROMPT_TUNING", "ADALORA"):
            for kind_of_error, said, *_ in job.hear_all():
                assert kind_of_error == "InvalidInputError"
                assert f"saves of the adapter 'default' ({kind}) are computed of parameters" in said
        assert job.hear_all() == [("saved",)] * 2
        job.expect_end()
