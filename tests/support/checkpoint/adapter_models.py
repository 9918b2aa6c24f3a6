"""Models with adapters of peft for tests of exports, and the comparison of their files."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from support.checkpoint.exports import header_and_data
from support.checkpoint.sharded_models import whole

TWO = "two"


def take_any_peft() -> None:
    """transformers may ask for a version of peft that is not out yet, though it works with the one that is there."""
    importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION = "0"


def adapted(kind: str) -> Any:
    """The same model on every rank, not sharded yet, with adapters that were changed.

    TWO: an adapter "default" with modules of its own beside it, and one "other"; else of the type `kind` of peft.
    """
    take_any_peft()
    with warnings.catch_warnings():
        # peft asks transformers what that warns of.
        warnings.simplefilter("ignore")
        model = _with_adapters(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or ".other." in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def _with_adapters(kind: str) -> Any:
    import peft

    model: Any = whole("llama")
    if kind == TWO:
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=3, modules_to_save=["lm_head"])
        model = peft.get_peft_model(model, lora)
        model.add_adapter(
            "other", peft.LoraConfig(target_modules=["gate_proj", "q_proj"], r=2, use_dora=True)
        )
    elif kind == "computed":
        config = peft.VBLoRAConfig(
            target_modules=["q_proj"], r=4, num_vectors=8, vector_length=4, save_only_topk_weights=True
        )
        model = peft.get_peft_model(model, config)
    elif kind == "chosen ranks":
        config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        ranks = {name for name, _ in model.named_parameters() if "lora_E" in name}
        config.rank_pattern = {
            name.removeprefix("base_model.model."): [True] * 2 + [False] * 10 for name in ranks
        }
    elif kind == "prompts":
        config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    elif kind == "added":
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=3))
    return model


def files(folder: Path) -> dict[str, bytes]:
    """All files in a folder and in the folders in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def assert_same_adapters(ours: Path, theirs: Path, but: Collection[str] = ()) -> None:
    """Both folders hold the same files, byte for byte, but for the padding of headers and for the order of sets."""
    assert sorted(set(files(ours)) - set(but)) == sorted(files(theirs))
    for name, expected in files(theirs).items():
        if name.endswith(".safetensors"):
            assert header_and_data(ours / name) == header_and_data(theirs / name), name
        elif name.endswith("adapter_config.json"):
            assert _sorted(ours / name) == _sorted(theirs / name), name
        else:
            assert (ours / name).read_bytes() == expected, name


def _sorted(config: Path) -> dict[str, Any]:
    # peft writes a set in whatever order it has.
    return {
        key: sorted(value, key=str) if isinstance(value, list) else value
        for key, value in json.loads(config.read_text()).items()
    }
