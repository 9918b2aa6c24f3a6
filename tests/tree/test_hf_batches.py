"""Batches and outputs of transformers: no dicts, or dicts that are more."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.tree.comparison import assert_same
from support.tree.echo_process import EchoProcess

import tundish as td

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402 (after the skip)
from transformers.utils import ModelOutput  # noqa: E402


def encoding() -> Any:
    data = {"input_ids": torch.arange(600).view(2, 300), "attention_mask": torch.ones(2, 300)}
    return transformers.BatchEncoding(data, n_sequences=1)


def output() -> Any:
    hidden = tuple(torch.rand(2, 3) for _ in range(3))
    return CausalLMOutputWithPast(loss=torch.tensor(1.5), logits=torch.rand(2, 3, 4), hidden_states=hidden)


def features() -> Any:
    return transformers.BatchFeature(
        {"pixel_values": [torch.rand(3, 4, 4), torch.rand(3, 2, 2)], "sizes": [4, 2]}
    )


def bare_output() -> Any:
    return ModelOutput(a=torch.ones(2), b=None)


@pytest.mark.parametrize("make", [encoding, output, features, bare_output])
def test_batches_and_outputs_come_back(make: Any, echo: EchoProcess) -> None:
    obj = {"batch": make()}
    # Of its attributes come back those that it gives pickle, as from the worker of a DataLoader.
    expected = pickle.loads(pickle.dumps(obj))
    tensors, schema = td.tree.flatten(obj)
    assert_same(expected, td.tree.unflatten(schema, tensors))
    assert_same(expected, echo.round_trip(obj))


def test_an_output_has_its_items_as_attributes(echo: EchoProcess) -> None:
    obj = output()
    back = echo.round_trip(obj)
    assert back.logits is back["logits"] and back.hidden_states is back["hidden_states"] is back[2]
    assert back.past_key_values is None and list(back) == ["loss", "logits", "hidden_states"]


def test_encodings_of_a_fast_tokenizer_travel(echo: EchoProcess) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    batch = fast(["a b", "b c"], return_tensors="pt")
    back = echo.round_trip(batch)
    assert type(back) is type(batch) and back.is_fast
    assert back.tokens(1) == batch.tokens(1) == ["b", "?"]
    assert torch.equal(back["input_ids"], batch["input_ids"])


def test_an_image_and_its_processor_output(echo: EchoProcess) -> None:
    image = pytest.importorskip("PIL.Image").effect_noise((8, 6), 50)
    back = echo.round_trip({"image": image, "features": features()})
    assert back["image"].size == (8, 6) and back["image"].tobytes() == image.tobytes()
    assert type(back["features"]) is transformers.BatchFeature and back["features"].sizes == [4, 2]


def test_a_cache_travels_with_its_tensors_apart(echo: EchoProcess) -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.rand(1, 2, 300, 4), torch.rand(1, 2, 300, 4), 0)
    tensors, schema = td.tree.flatten({"cache": cache})
    assert sum(tensor.numel() for tensor in tensors) >= 2 * 2400 and len(pickle.dumps(schema)) < 9600
    back = echo.round_trip({"cache": cache})["cache"]
    assert type(back) is type(cache)
    assert torch.equal(back.layers[0].keys, cache.layers[0].keys)
