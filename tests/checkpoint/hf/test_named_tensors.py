"""The kinds of models that `save_hf` takes, the names of their tensors, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tundish.checkpoint.named_tensors import check_name, named_tensors
from tundish.errors import InvalidInputError, InvalidTypeError

# torch.compile imports what torch itself gave up.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)


class Model(nn.Module):
    """With a child that has the name of a data-parallel wrapper's and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.module = Layer()
        self.last = Layer()


NAMES = ["inner.module.weight", "inner.module.kept", "last.weight", "last.kept"]


def names(given: Any) -> list[str]:
    return [part.prefix + name for part in named_tensors(given) for name in part.tensors]


class Engine(nn.Module):
    """As other libraries wrap models: DeepSpeed's engine, Megatron's Float16Module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap",
    [
        Model,
        lambda: nn.DataParallel(Model()),
        lambda: torch.compile(Model()),
        lambda: nn.DataParallel(torch.compile(Model())),
        lambda: torch.compile(nn.DataParallel(Model())),
        lambda: Engine(nn.DataParallel(Model())),
    ],
)
def test_names_of_wrappers_are_removed(wrap: Any) -> None:
    (part,) = named_tensors(wrap())
    assert list(part.tensors) == NAMES
    assert isinstance(part.module, Model)
    assert part.prefix == ""


def test_the_name_of_activation_checkpointing_is_removed() -> None:
    model = Model()
    model.last = checkpoint_wrapper(model.last)
    # The wrapper takes its name off itself; a mapping made by hand may still have it.
    assert names(model) == NAMES
    assert names({f"last._checkpoint_wrapped_module.{name}": torch.ones(1) for name in ("a", "b")}) == [
        "last.a",
        "last.b",
    ]


def test_names_of_a_mapping() -> None:
    given = [
        "module.a.w",
        "_orig_mod.module.b",
        "module.module.c",
        "x.module.w",
        "module",
        "submodule.w",
        "ä ö",
    ]
    kept = ["a.w", "b", "c", "x.module.w", "module", "submodule.w", "ä ö"]
    assert names({name: torch.ones(1) for name in given}) == kept


def test_tensors_are_not_copied() -> None:
    model = Model()
    (part,) = named_tensors(model)
    assert part.tensors["last.weight"] is model.last.weight


def test_modules_by_prefix() -> None:
    given = {"vision": Layer(), "text.": torch.compile(Layer()), "": Layer()}
    assert names(given) == [
        "vision.weight",
        "vision.kept",
        "text.weight",
        "text.kept",
        "weight",
        "kept",
    ]
    with pytest.raises(InvalidInputError, match=r"'a.weight' is there twice, under two prefixes"):
        named_tensors({"a": Layer(), "a.": Layer()})
    with pytest.raises(InvalidTypeError, match="prefix of a module is 3"):
        named_tensors({3: Layer()})


@pytest.mark.parametrize(
    "name",
    [
        "",
        "__metadata__",
        "a\0b",
        "a\nb",
        "\ud800",
        "..",
        "a..b",
        "a/../b",
        "/etc/passwd",
        "\\\\host",
        "C:/w",
        "C:\\w",
    ],
)
def test_unusable_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot name a tensor"):
        check_name(name)
    with pytest.raises(InvalidInputError, match="cannot name a tensor"):
        named_tensors({name: torch.ones(1)})
    if name:
        with pytest.raises(InvalidInputError, match="cannot name a tensor"):
            named_tensors({name: Layer()})


@pytest.mark.parametrize(
    "name", ["module.", "module./etc", "_orig_mod./etc", "module._orig_mod.", "module.C:/w"]
)
def test_names_that_are_unusable_without_wrappers_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot name a tensor"):
        named_tensors({name: torch.ones(1)})


@pytest.mark.parametrize("name", [3, None, b"w", ("a", "b")])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(InvalidTypeError, match="names are strings"):
        named_tensors({name: torch.ones(1)})


def test_names_that_are_equal_without_wrappers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="'a' is there twice, once the names of"):
        named_tensors({"a": torch.ones(1), "module.a": torch.ones(1)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "cannot save an int"),
        ([torch.ones(1)], "cannot save a list"),
        ({"a": 3}, "'a' is an int, not a tensor"),
        ({"a": torch.ones(1), "b": Layer()}, "'b' is a module among tensors"),
        ({"a": {"b": torch.ones(1)}}, "'a' is a dict, not a tensor"),
    ],
)
def test_arguments_that_are_no_model_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidTypeError, match=message):
        named_tensors(given)


@pytest.mark.parametrize("given", [{}, nn.Module(), {"a": nn.Module()}])
def test_an_empty_model_is_refused(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="nothing to save"):
        named_tensors(given)


def test_extra_state_is_refused() -> None:
    class Extra(Layer):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(
        InvalidTypeError, match=r"_extra_state.*give the mapping of names to tensors without it"
    ):
        named_tensors(Extra())
