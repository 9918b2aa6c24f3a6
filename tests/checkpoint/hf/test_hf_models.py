"""Models of transformers, saved as their own `save_pretrained` saves them."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoint.custom_model_code import CODE
from support.checkpoint.dcp_states import bits
from support.checkpoint.exports import assert_same_export, export
from support.checkpoint.sharded_models import SMALL
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.staging import Staged
from tundish.errors import InvalidInputError, InvalidTypeError

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    # Batch norms keep running means in buffers, and counters of other dtypes.
    "buffers": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "shared experts": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40)
    ),
    "tied thrice": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=67, decoder_start_token_id=0
        )
    ),
    "tied bias": lambda: BertForMaskedLM(
        BertConfig(
            hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=67
        )
    ),
    "transposed": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67)),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers draws progress lines of its own."""
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def reloaded(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = type(model).from_pretrained(folder, dtype="auto").state_dict()
    return state


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_save_pretrained(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model = MODELS[name]()
    before = copy.deepcopy(model.config.to_dict())
    export(tmp_path / "ours", model, shard_bytes=shard_bytes)
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")
    state = model.state_dict()
    loaded = reloaded(tmp_path / "ours", model)
    assert loaded.keys() == state.keys()
    for key, tensor in state.items():
        assert bits(loaded[key]) == bits(tensor), key


@pytest.mark.parametrize("name", ["experts", "tied thrice"])
def test_a_loaded_model(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "first")
    model = type(model).from_pretrained(tmp_path / "first")
    export(tmp_path / "ours", model, shard_bytes=20_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_wrapped_model_is_the_model(wrap: Any, tmp_path: Path) -> None:
    model = MODELS["experts"]()
    export(tmp_path / "ours", wrap(model))
    model.save_pretrained(tmp_path / "theirs")
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_conversion_to_another_dtype(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    export(tmp_path / "ours", model, dtype=torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_the_model_keeps_in_float32_are_not_cast(tmp_path: Path) -> None:
    class Routed(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("input_layernorm",)

    export(tmp_path / "ours", Routed(LlamaConfig(**SMALL)), dtype=torch.bfloat16)
    dtypes = {
        name: tensor.dtype for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items()
    }
    assert dtypes["model.layers.0.input_layernorm.weight"] == torch.float32
    assert dtypes["model.layers.0.post_attention_layernorm.weight"] == torch.bfloat16


def test_nan_and_infinite_values_are_saved_unchanged(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        weight.view(torch.int32).fill_(0x7FC12345)
        model.get_parameter("model.norm.weight").fill_(-torch.inf)
    export(tmp_path / "ours", model)
    loaded = reloaded(tmp_path / "ours", model)
    for key, tensor in model.state_dict().items():
        assert bits(loaded[key]) == bits(tensor)


def test_a_save_during_training(tmp_path: Path) -> None:
    model = MODELS["tied"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 60, (2, 12))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plan = HfExport(model, shard_bytes=20_000)
    save = Staged(plan.write_plan())
    save.copy()
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    step()
    model.config.rope_theta = 1.0
    model.generation_config.max_length = 7
    from support.checkpoint.exports import write

    write(save, tmp_path / "ours")
    save.release()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.generation_config.max_length != 7
    for key, tensor in loaded.state_dict().items():
        assert bits(tensor) == bits(expected[key])
        assert not tensor.equal(model.state_dict()[key])


def test_models_by_prefix(tmp_path: Path) -> None:
    parts = {"vision_tower": MODELS["buffers"](), "language_model": MODELS["experts"]()}
    export(tmp_path / "ours", parts, config=parts["language_model"].config, shard_bytes=20_000)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert list(index["metadata"]) == ["total_size"]
    found: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "ours" / file)
    assert sorted(found) == sorted(index["weight_map"])
    assert sum(tensor.nbytes for tensor in found.values()) == index["metadata"]["total_size"]
    for prefix, model in parts.items():
        model.save_pretrained(tmp_path / prefix)
        for name, tensor in load_file(tmp_path / prefix / "model.safetensors").items():
            assert bits(found.pop(f"{prefix}.{name}")) == bits(tensor)
    assert found == {}
    assert (tmp_path / "ours" / "config.json").exists()


def test_code_of_a_custom_model_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling_own_tundish.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    own = importlib.import_module("modeling_own_tundish")
    own.OwnConfig.register_for_auto_class()
    own.OwnModel.register_for_auto_class("AutoModel")
    model = own.OwnModel(own.OwnConfig())
    export(tmp_path / "ours", model)
    assert not hasattr(model.config, "auto_map")
    model.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours" / "modeling_own_tundish.py").exists()
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")


def test_undeclared_ties_are_refused() -> None:
    model = MODELS["llama"]()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(InvalidInputError, match=r"layers\.0\.mlp\.\w+\.weight, .* does not declare"):
        HfExport(model)


class Pair(PreTrainedModel):
    """Two layers of one weight, both declared as tied to the other."""

    config_class = LlamaConfig
    _tied_weights_keys: ClassVar = {"a.weight": "b.weight", "b.weight": "a.weight"}

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.b = nn.Linear(3, 3)
        self.a = nn.Linear(3, 3)
        self.a.weight = self.b.weight


def test_weights_that_only_the_caller_tied_are_all_written(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
    model.lm_head.weight = model.model.embed_tokens.weight
    export(tmp_path / "saved", model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_one_of_the_declared_tied_weights_is_kept(tmp_path: Path) -> None:
    model = Pair(LlamaConfig(**SMALL, tie_word_embeddings=True))
    export(tmp_path / "ours", model)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_export(tmp_path / "ours", tmp_path / "theirs")
    assert sorted(load_file(tmp_path / "ours" / "model.safetensors")) == ["a.bias", "b.bias", "b.weight"]


def test_configs_that_cannot_be_saved_are_refused_at_once(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    HfExport(model)
    # transformers generates with this and refuses to save it.
    model.generation_config.num_beams = 1
    model.generation_config.num_return_sequences = 4
    with pytest.raises(ValueError, match="num_return_sequences"):
        HfExport(model)


def test_a_quantization_that_cannot_be_saved_is_refused() -> None:
    from transformers.quantizers.quantizer_quanto import QuantoHfQuantizer

    model = MODELS["llama"]()
    quantizer = QuantoHfQuantizer.__new__(QuantoHfQuantizer)
    quantizer.quantization_config = transformers.QuantoConfig(weights="int8")
    model.hf_quantizer = quantizer
    with pytest.raises(InvalidTypeError, match=r"quantized \(quanto\)"):
        HfExport(model)


def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = MODELS["llama"]()
    with pytest.raises(InvalidInputError, match=r"'model\.embed_tokens\.weight' is on the meta device"):
        HfExport(model)
