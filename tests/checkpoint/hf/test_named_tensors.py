"""The kinds of models that `save_hf` takes, the names of their tensors, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tundish.checkpoint.tensors import check_name, named_tensors
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


class Outer(nn.Module):
    """A model whose only child has the name of a wrapper's."""

    def __init__(self, child: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(child, module)


class Float16Module(Outer):
    """As Megatron wraps models."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__("module", module)


Float16Module.__module__ = "megatron.core.transformer.module"


@pytest.mark.parametrize(
    "wrap",
    [
        Model,
        lambda: nn.DataParallel(Model()),
        lambda: torch.compile(Model()),
        lambda: nn.DataParallel(torch.compile(Model())),
        lambda: torch.compile(nn.DataParallel(Model())),
        lambda: Float16Module(nn.DataParallel(Model())),
    ],
)
def test_names_of_wrappers_are_removed(wrap: Any) -> None:
    (part,) = named_tensors(wrap())
    assert list(part.tensors) == NAMES
    assert isinstance(part.module, Model)
    assert part.prefix == ""


@pytest.mark.parametrize("child", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_a_child_of_the_model_that_is_called_as_a_wrapper_s_keeps_its_name(child: str) -> None:
    model = Outer(child, Layer())
    assert names(model) == [f"{child}.weight", f"{child}.kept"]
    assert named_tensors(model)[0].module is model
    assert names(nn.DataParallel(model)) == [f"{child}.weight", f"{child}.kept"]


def test_names_of_wrappers_within_a_model_are_removed() -> None:
    model = Model()
    model.last = torch.compile(checkpoint_wrapper(model.last))
    assert names(model) == NAMES
    assert names(torch.compile(nn.DataParallel(model))) == NAMES


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["module.a.w", "module.b"], ["a.w", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.module.b"], ["a", "module.b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["module", "x.module.w", "submodule.w", "ä ö"], ["module", "x.module.w", "submodule.w", "ä ö"]),
    ],
)
def test_a_prefix_of_a_mapping_is_removed_where_every_name_has_it(given: list[str], kept: list[str]) -> None:
    assert names({name: torch.ones(1) for name in given}) == kept


def test_the_name_of_a_wrapper_inside_a_mapping_is_kept_and_said(caplog: pytest.LogCaptureFixture) -> None:
    given = ["embed.w", "layers.0._orig_mod.w"]
    assert names({name: torch.ones(1) for name in given}) == given
    assert "'layers.0._orig_mod.w'" in caplog.text


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
    with pytest.raises(InvalidInputError, match=r"two tensors have the name 'a.weight', under two prefixes"):
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
    with pytest.raises(InvalidInputError, match=r"cannot name a tensor|looks like a path"):
        check_name(name)
    with pytest.raises(InvalidInputError, match=r"cannot name a tensor|looks like a path"):
        named_tensors({name: torch.ones(1)})
    if name:
        with pytest.raises(InvalidInputError, match=r"cannot name a tensor|looks like a path"):
            named_tensors({name: Layer()})


@pytest.mark.parametrize(
    "name", ["module.", "module./etc", "_orig_mod./etc", "module._orig_mod.", "module.C:/w"]
)
def test_names_that_are_unusable_without_wrappers_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot name a tensor|looks like a path"):
        named_tensors({name: torch.ones(1)})


@pytest.mark.parametrize("name", [3, None, b"w", ("a", "b")])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(InvalidTypeError, match="names are strings"):
        named_tensors({name: torch.ones(1)})


def test_names_that_are_equal_without_wrappers_are_refused() -> None:
    model = Model()
    model.last = torch.compile(model.last)
    model.last._buffers["kept"] = torch.ones(1)
    with pytest.raises(InvalidInputError, match=r"two tensors have the name 'last.kept' without those of"):
        named_tensors(model)


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
