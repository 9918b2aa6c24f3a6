"""Models that hold adapters, saved as their own `save_pretrained` saves them."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoint.adapter_models import TWO, adapted, assert_same_adapters, files, take_any_peft
from support.checkpoint.custom_model_code import CODE
from support.checkpoint.dcp_states import bits
from support.checkpoint.exports import export
from support.checkpoint.sharded_models import SMALL
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tundish.checkpoint import Checkpointer, open_readonly
from tundish.checkpoint.hf.export import HfExport
from tundish.errors import CorruptCheckpointError, InvalidInputError, InvalidTypeError

take_any_peft()
with warnings.catch_warnings():
    # peft asks transformers what that warns of.
    warnings.simplefilter("ignore")
    import peft

# Warnings of peft while it makes and saves adapters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted"),
    pytest.mark.filterwarnings("ignore:.*Could not find a config file"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]

LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 2}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "of a task": lambda: peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "with modules": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head", "norm"]),
    "with tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 5]),
    "with biases": lambda: peft.LoraConfig(**LORA, bias="all"),
    "of embeddings": lambda: peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], r=2),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    "computed": lambda: peft.VBLoRAConfig(
        target_modules=["q_proj"], r=4, num_vectors=8, vector_length=4, save_only_topk_weights=True
    ),
    "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "encoded prompts": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers draws progress lines of its own, and says how it makes a vocabulary larger."""
    torch.manual_seed(0)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of the model that is adapted."""
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def with_adapter(base: Path, config: Any) -> Any:
    """The model of peft, with adapters that are no longer as they began."""
    return changed(peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config))


def changed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


def settings_of(model: Any) -> Any:
    configs = {name: copy.deepcopy(vars(config)) for name, config in model.peft_config.items()}
    return configs, copy.deepcopy(model.config.to_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_save_pretrained(kind: str, base: Path, tmp_path: Path) -> None:
    model = with_adapter(base, KINDS[kind]())
    before = settings_of(model)
    # Each adapter is one file: peft looks for no other.
    export(tmp_path / "ours", model, shard_bytes=1)
    assert settings_of(model) == before
    model.save_pretrained(tmp_path / "theirs")
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["inference_mode"] is True
    assert config["base_model_name_or_path"] == str(base)
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "ours")
    expected = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "theirs")
    assert_same_state(loaded, expected)


def assert_same_state(left: Any, right: Any) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert bits(tensor) == bits(theirs[name]), name


def test_the_ranks_that_adalora_chose_are_saved_and_unchanged(base: Path, tmp_path: Path) -> None:
    model = with_adapter(base, KINDS["adalora"]())
    pattern = {}
    for name, parameter in model.named_parameters():
        if "lora_E" in name:
            pattern[name.removeprefix("base_model.model.")] = [True, False, True] + [False] * (
                len(parameter) - 3
            )
    model.peft_config["default"].rank_pattern = pattern
    export(tmp_path / "ours", model)
    assert model.peft_config["default"].rank_pattern is pattern
    assert any(".default" in name for name in pattern)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")
    tensors = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert {len(tensor) for name, tensor in tensors.items() if "lora_E" in name} == {2}


def test_a_changed_vocabulary_is_saved(base: Path, tmp_path: Path) -> None:
    larger = LlamaForCausalLM.from_pretrained(base)
    larger.resize_token_embeddings(SMALL["vocab_size"] + 5)
    model = changed(peft.get_peft_model(larger, KINDS["lora"]()))
    export(tmp_path / "ours", model)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")
    names = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"} <= names.keys()


def test_each_adapter_except_the_default_has_its_own_folder(tmp_path: Path) -> None:
    model = adapted(TWO)
    export(tmp_path / "ours", model)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")
    assert {"other/adapter_model.safetensors", "other/adapter_config.json"} <= files(tmp_path / "ours").keys()
    # And with no default one.
    model.delete_adapter("default")
    export(tmp_path / "alone", model)
    model.save_pretrained(tmp_path / "their alone")
    assert_same_adapters(tmp_path / "alone", tmp_path / "their alone")


def test_peft_and_transformers_load_the_export(base: Path, tmp_path: Path) -> None:
    model = with_adapter(base, KINDS["of a task"]())
    export(tmp_path / "ours", model)
    tokens = torch.arange(9)[None]
    model.eval()
    for load in (
        peft.AutoPeftModelForCausalLM.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
        lambda folder: peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder),
    ):
        loaded = load(tmp_path / "ours").eval()
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def added(base: Path) -> Any:
    """A transformers model with two adapters; the first is active."""
    model = LlamaForCausalLM.from_pretrained(base)
    model.add_adapter(peft.LoraConfig(**LORA), "first")
    model.add_adapter(peft.LoraConfig(target_modules=["o_proj"], r=3), "second")
    model.set_adapter("first")
    return changed(model)


def test_a_transformers_model_saves_its_active_adapter(base: Path, tmp_path: Path) -> None:
    model = added(base)
    for name in ("first", "second"):
        model.set_adapter(name)
        before = settings_of(model)
        export(tmp_path / f"our {name}", model, shard_bytes=1)
        assert settings_of(model) == before
        model.save_pretrained(tmp_path / f"their {name}")
        assert_same_adapters(tmp_path / f"our {name}", tmp_path / f"their {name}")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"our {name}").eval()
        tokens = torch.arange(9)[None]
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    model.set_adapter(["first", "second"])
    with pytest.raises(InvalidInputError, match=r"first, second are active, and LlamaForCausalLM saves one"):
        HfExport(model)
    model.set_adapter([])
    with pytest.raises(
        InvalidInputError, match=r"no adapter is active, and LlamaForCausalLM saves the active"
    ):
        HfExport(model)
    # Without its adapters it is a model as any.
    model.delete_adapter(["first", "second"])
    export(tmp_path / "whole", model)
    assert (tmp_path / "whole" / "model.safetensors").exists()


def test_code_of_a_custom_model_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling_adapted_tundish.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    own = importlib.import_module("modeling_adapted_tundish")
    own.OwnConfig.register_for_auto_class()
    own.OwnModel.register_for_auto_class("AutoModel")
    model = own.OwnModel(own.OwnConfig())
    model.add_adapter(peft.LoraConfig(target_modules=["layer"], r=2))
    export(tmp_path / "ours", model)
    assert not hasattr(model.config, "auto_map")
    model.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours" / "modeling_adapted_tundish.py").exists()
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("staging", ["eager", "lazy"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_save_during_training(dtype: torch.dtype | None, staging: Any, tmp_path: Path) -> None:
    model = adapted(TWO)
    expected = copy.deepcopy(model)
    expected.to(dtype).save_pretrained(tmp_path / "theirs")
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.1)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        save = checkpointer.save_hf(1, model, dtype=dtype, staging=staging, optimizer=optimizer)
        model.peft_config["default"].lora_alpha = 77
        tokens = torch.randint(0, 60, (2, 12))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        path = save.result(60)
    assert_same_adapters(path, tmp_path / "theirs", but={"tundish.json"})
    saved = load_file(path / "adapter_model.safetensors")
    trained = peft.get_peft_model_state_dict(model)
    assert any(not torch.equal(saved[name], tensor.to(dtype)) for name, tensor in trained.items())


def test_weights_that_the_base_keeps_in_float32_are_not_cast(tmp_path: Path) -> None:
    class Routed(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("norm",)

    model = peft.get_peft_model(Routed(LlamaConfig(**SMALL)), KINDS["with modules"]())
    export(tmp_path / "ours", model, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    dtypes = {name.removeprefix("base_model.model."): tensor.dtype for name, tensor in tensors.items()}
    assert dtypes["model.norm.weight"] == torch.float32
    assert dtypes["lm_head.weight"] == torch.bfloat16


def test_peft_is_asked_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(TWO)
    asked: list[str] = []
    choose = peft.get_peft_model_state_dict

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["adapter_name"])
        return choose(*args, **kwargs)

    monkeypatch.setattr(peft, "get_peft_model_state_dict", counted)
    changes: list[Callable[[], object]] = [
        lambda: changed(model),
        lambda: model.add_adapter("third", peft.LoraConfig(target_modules=["o_proj"], r=3)),
        lambda: setattr(model.peft_config["other"], "bias", "all"),
        # Of which the model card tells.
        lambda: model.get_base_model().add_model_tags(["tagged"]),
        lambda: setattr(model.get_base_model(), "name_or_path", "elsewhere"),
    ]
    export(tmp_path / "first", model)
    for number, change in enumerate(changes):
        asked.clear()
        change()
        export(tmp_path / f"ours {number}", model)
        assert asked == [[], ["default", "other", "third"], ["other"], [], []][number]
        model.save_pretrained(tmp_path / f"theirs {number}")
        assert_same_adapters(tmp_path / f"ours {number}", tmp_path / f"theirs {number}")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_weights_untied_between_saves_are_saved_separately(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], r=2)
    base = LlamaForCausalLM(LlamaConfig(**{**SMALL, "tie_word_embeddings": True}))
    model = changed(peft.get_peft_model(base, config))
    export(tmp_path / "tied", model)
    head = base.lm_head.base_layer
    assert head.weight is base.model.embed_tokens.base_layer.weight
    head.weight = nn.Parameter(torch.full_like(head.weight, 7.0), requires_grad=False)
    export(tmp_path / "untied", model)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_adapters(tmp_path / "untied", tmp_path / "theirs")


def partitioned(parameter: Any) -> None:
    """As ZeRO-3 of DeepSpeed leaves a parameter while nobody computes with it."""
    parameter.ds_id, parameter.ds_status, parameter.ds_numel = 3, "NOT_AVAILABLE", parameter.numel()
    parameter.data = torch.empty(0)


@pytest.mark.parametrize("kind", ["lora", "computed", "prompts"])
def test_parameters_sharded_by_deepspeed_are_refused(kind: str, base: Path) -> None:
    model = with_adapter(base, KINDS[kind]())
    for parameter in model.parameters():
        if parameter.requires_grad:
            partitioned(parameter)
    with pytest.raises(InvalidInputError, match=r"is sharded by DeepSpeed \(ZeRO-3\) and has no values here"):
        HfExport(model)
    whole = LlamaForCausalLM.from_pretrained(base)
    partitioned(whole.lm_head.weight)
    empty = nn.Parameter(torch.empty(0))
    for one in (whole, {"some": empty, "lm_head.weight": whole.lm_head.weight}):
        with pytest.raises(InvalidInputError, match=r"^'lm_head\.weight' is sharded by DeepSpeed"):
            HfExport(one)
    HfExport({"some": empty}).release()


def wrapped_inside(model: Any) -> Any:
    layers = model.base_model.model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)
    layers[0].self_attn.q_proj = torch.compile(layers[0].self_attn.q_proj)
    return model


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, wrapped_inside])
def test_a_wrapped_model_is_the_model(wrap: Any, tmp_path: Path) -> None:
    model = adapted(TWO)
    model.save_pretrained(tmp_path / "theirs")
    export(tmp_path / "ours", wrap(model))
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs")


def test_checkpoints_of_adapters_are_listed_verified_and_pruned(tmp_path: Path) -> None:
    model = adapted(TWO)
    root = tmp_path / "root"
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            path = checkpointer.save_hf(step, model, blocking=True).result()
        assert checkpointer.verify(path) == []
    readonly = open_readonly(root)
    assert [one.step for one in readonly.list("hf")] == [2, 3]
    listed = [file["name"] for file in json.loads((path / "tundish.json").read_text())["files"]]
    assert sorted(listed) == sorted(set(files(path)) - {"tundish.json"})
    damaged = bytearray((path / "other" / "adapter_model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "other" / "adapter_model.safetensors").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match=r"other/adapter_model\.safetensors"):
        readonly.verify(path)


def test_config_json_is_not_copied_beside_adapters(base: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").write_text("{}")
    (base / "README.md").write_text("of the base")
    model = with_adapter(base, KINDS["lora"]())
    export(tmp_path / "ours", model, source_dir=base)
    model.save_pretrained(tmp_path / "theirs")
    added = {"tokenizer.json", "generation_config.json"}
    assert_same_adapters(tmp_path / "ours", tmp_path / "theirs", but=added)
    assert added <= files(tmp_path / "ours").keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


def test_adapters_that_cannot_be_saved_are_refused(base: Path) -> None:
    model = with_adapter(base, KINDS["lora"]())
    mixed = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), KINDS["lora"](), mixed=True)
    with pytest.raises(
        InvalidTypeError, match=r"PeftMixedModel\) mixes kinds of adapters, which peft cannot"
    ):
        HfExport(mixed)
    for one in (model, mixed, added(base)):
        with pytest.raises(InvalidTypeError, match=r"under 'part\.' holds adapters"):
            HfExport({"part": one})
    with pytest.raises(InvalidInputError, match=r"to_hf is given for the adapters of a PeftModel"):
        HfExport(model, to_hf=lambda name, tensor: [(name, tensor)])
    with pytest.raises(InvalidInputError, match=r"config is given for a model that holds adapters"):
        HfExport(model, config=model.config)
    named = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), KINDS["lora"](), adapter_name="a/b")
    with pytest.raises(InvalidInputError, match=r"an adapter is called 'a/b', which cannot name its folder"):
        HfExport(named)
    # Once they are merged it is a model as any.
    HfExport(model.merge_and_unload()).release()
