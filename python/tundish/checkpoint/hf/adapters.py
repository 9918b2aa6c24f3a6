"""Finds the files of a model with peft adapters that `save_pretrained` writes: tensors of each adapter, and configs.

Follows `PeftModel.save_pretrained` of peft 0.21. For transformers models after `add_adapter` or `load_adapter` it
follows `PreTrainedModel.save_pretrained` of transformers 5.

Invariants:
    - peft is imported only if the caller's model has adapters.
    - The model and the configs of its adapters are not changed, though `save_pretrained` changes them.
    - No sharded tensor is gathered, and no tensor is copied unless peft computes it for the save.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tundish.checkpoint.hf.transformers import (
    is_pretrained,
    own_class,
    save_code,
    save_generation_config,
    tied_duplicates,
)
from tundish.checkpoint.tensors import (
    check_gathered,
    check_name,
    is_dtensor,
    name_without_wrappers,
    paths_without_wrappers,
    without_wrappers,
)
from tundish.errors import InvalidInputError, InvalidTypeError, format_type

_logger = logging.getLogger("tundish.checkpoint")

_WEIGHTS = "adapter_model.safetensors"
# This adapter lies at the top of the folder; any other has a folder of its name.
_DEFAULT = "default"
# peft's loaders expect this before the names of weights of models that are not wrapped by peft.
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter as it is saved.

    Attributes:
        folder: its folder in the export; empty for the top.
        tensors: by their names in the file.
        config: a copy of its config.
        auto_mapping: names the class of the model in the config file; None for nothing.
    """

    folder: str
    tensors: Mapping[str, torch.Tensor]
    config: Any
    auto_mapping: dict[str, str] | None

    @property
    def file(self) -> str:
        """The name of its file of weights in the export."""
        return _file_in(self.folder)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model that are saved.

    Attributes:
        model: the model that has them.
        base: the model that they adapt.
        adapters: in order.
        metadata: added to the metadata of the files.
    """

    model: Any
    base: nn.Module
    adapters: tuple[Adapter, ...]
    metadata: Mapping[str, str]

    def save_settings(self, folder: str) -> None:
        """Write everything but the weights into `folder`: configs, model card, code."""
        for adapter in self.adapters:
            path = str(Path(folder, adapter.folder))
            adapter.config.save_pretrained(path, auto_mapping_dict=adapter.auto_mapping)
        if _is_peft(self.model, "PeftModel"):
            self.model.create_or_update_model_card(folder)
        else:
            save_code(self.model, None, folder)
            save_generation_config(self.model, folder)


def holds_adapters(module: nn.Module | None) -> bool:
    """Whether `save_pretrained` of `module`, which has no wrappers, writes adapters alone."""
    is_loaded = is_pretrained(module) and getattr(module, "_hf_peft_config_loaded", False)
    return is_loaded or _is_peft(module, "PeftModel") or _is_peft(module, "PeftMixedModel")


def refuse_mixed(module: nn.Module | None) -> None:
    """Refuse a model that mixes kinds of adapters, which peft cannot save. Raises `InvalidTypeError`."""
    if _is_peft(module, "PeftMixedModel"):
        raise InvalidTypeError(
            f"the model ({type(module).__name__}) mixes kinds of adapters, which peft cannot save and load: merge "
            "them and save the merged model, or wrap it in a PeftModel for each kind"
        )


def refuse_encoded(module: Any) -> None:
    """Refuse prompts that an encoder makes: an export holds the prompts and not the encoder.

    An encoder with loaded prompts is right for inference alone; in training it makes other prompts of them.

    Raises `InvalidInputError`.
    """
    if not _is_peft(module, "PeftModel"):
        return
    for name, config in module.peft_config.items():
        is_encoded = _kind_of(config) == "P_TUNING" or getattr(config, "prefix_projection", False)
        if is_encoded and not config.inference_mode:
            raise InvalidInputError(
                f"load_best_model_at_end cannot load the adapter {name!r} ({_kind_of(config)}) again: an export holds "
                "the prompts that its encoder makes, and not the encoder; train without it, and load the best export "
                "with PeftModel.from_pretrained"
            )


def load_adapters(model: Any, folder: Path) -> bool:
    """Load the adapters of `model` from an export that `save_hf` made of it. Call it on every rank that has the model.

    Adapters that the export lacks stay as they are, and a warning names them.

    Args:
        model: a model whose parameters are not sharded.
        folder: the export.

    Returns:
        False if the export contains no adapter at all.
    """
    peft = importlib.import_module("peft")
    is_of_peft = _is_peft(model, "PeftModel")
    names = list(model.peft_config) if is_of_peft else model.active_adapters()
    files = {name: folder / _file_in(_folder_of(name) if is_of_peft else "") for name in names}
    missing = [name for name, file in files.items() if not file.is_file()]
    # A file at the top that is no adapter of the model is of an adapter that was deleted since.
    if len(missing) == len(files) and not (folder / _WEIGHTS).is_file():
        return False
    if missing:
        _logger.warning(
            "%s holds no weights of the adapters %s, which stay as they are: they were added after it was saved",
            folder,
            ", ".join(missing),
        )
    load_file = importlib.import_module("safetensors.torch").load_file
    for name, file in files.items():
        if name not in missing:
            weights = load_file(file)
            if not is_of_peft:
                weights = {key.removeprefix(_PREFIX): tensor for key, tensor in weights.items()}
            peft.set_peft_model_state_dict(model, weights, adapter_name=name)
    return True


def adapters_of(model_or_tensors: Any) -> Adapters | None:
    """The adapters of a model, as its `save_pretrained` writes them; None if it has none.

    Raises:
        InvalidTypeError: it mixes kinds of adapters, or an adapter contains a value that is no tensor.
        InvalidInputError: A transformers model has several active adapters or none. An adapter has no weights or an
            unusable name. Or weights have to be computed from sharded parameters, are sharded by DeepSpeed, or are
            tied without the model declaring it.
        Exception: raised by peft.
    """
    if not isinstance(model_or_tensors, nn.Module):
        return None
    model = without_wrappers(model_or_tensors)
    if not holds_adapters(model):
        return None
    refuse_mixed(model)
    found = _of_peft(model) if _is_peft(model, "PeftModel") else _of_transformers(model)
    for adapter in found.adapters:
        _check(adapter)
    return found


def _folder_of(adapter: str) -> str:
    return "" if adapter == _DEFAULT else adapter


def _file_in(folder: str) -> str:
    return f"{folder}/{_WEIGHTS}" if folder else _WEIGHTS


def _is_peft(module: nn.Module | None, kind: str) -> bool:
    """Whether `module` is an instance of that class of peft; imports nothing."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, getattr(peft, kind))


def _of_peft(model: Any) -> Adapters:
    state = model.state_dict(keep_vars=True)
    adapters = []
    for name, own in model.peft_config.items():
        tensors, config = _select(model, name, state)
        base = model.base_model if own.is_prompt_learning else model.base_model.model
        kind = own_class(base)
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        config.inference_mode = True
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        adapters.append(
            Adapter(
                folder=_folder_of(name),
                tensors=tensors,
                config=config,
                auto_mapping=mapping if config.task_type is None else None,
            )
        )
    return Adapters(model=model, base=model.get_base_model(), adapters=tuple(adapters), metadata={})


def _of_transformers(model: Any) -> Adapters:
    active = model.active_adapters()
    if len(active) > 1:
        raise InvalidInputError(
            f"the adapters {', '.join(active)} are active, and {type(model).__name__} saves one: choose it with "
            "model.set_adapter"
        )
    if not active:
        raise InvalidInputError(
            f"no adapter is active, and {type(model).__name__} saves the active one: choose it with model.set_adapter"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    state, metadata = (None, {}) if quantizer is None else quantizer.get_state_dict_and_metadata(model)
    tensors, config = _select(model, active[0], model.state_dict(keep_vars=True) if state is None else state)
    tensors = {_PREFIX + name: tensor for name, tensor in tensors.items()}
    dropped = tied_duplicates(model, tensors) | set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    adapter = Adapter(folder="", tensors=kept, config=config, auto_mapping=None)
    return Adapters(model=model, base=model, adapters=(adapter,), metadata=metadata)


# By model and adapter: the names of its tensors in the file and in the model, and the key that they depend on. They are
# kept because peft may ask the hub whether the vocabulary was changed: no save should wait for that.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, dict[str, str]]]] = (
    weakref.WeakKeyDictionary()
)


def _select(model: Any, adapter: str, state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of an adapter, from `state` or computed, by their names in the file; and a copy of its config."""
    own = model.peft_config[adapter]
    config = copy.deepcopy(own)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    key = tuple(state), vocabulary, own.to_dict()
    known = _known.setdefault(model, {}).get(adapter)
    if known is not None and known[0] == key:
        tensors = {name: state[source] for name, source in known[1].items()}
    else:
        # peft writes the ranks that AdaLoRA chose into the config.
        model.peft_config[adapter] = config
        try:
            chosen, sources = _ask_peft(model, adapter, state)
        finally:
            model.peft_config[adapter] = own
        tensors = {**chosen, **{name: state[source] for name, source in sources.items()}}
        if chosen.keys() == sources.keys():
            _known[model][adapter] = key, sources
    for name, value in vars(config).items():
        # peft writes a set in the order that it has in this process.
        if isinstance(value, set):
            setattr(config, name, sorted(value, key=str))
    return tensors, config


def _ask_peft(
    model: Any, adapter: str, state: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that peft saves of an adapter, and where each comes from in `state`, unless peft computes it.

    Not collective: no rank may wait for another one in here.
    """
    for name, tensor in state.items():
        # peft would compute with the missing values, or fail with a message of its own.
        if adapter in name.split("."):
            check_gathered(name, tensor)
    is_sharded = any(map(is_dtensor, state.values()))
    refused = InvalidInputError(
        f"the weights that peft saves of the adapter {adapter!r} ({_kind_of(model.peft_config[adapter])}) are computed "
        "of parameters that are spread over ranks: save it with its own save_pretrained, where they are whole"
    )
    # Prompts are computed by modules of the model, not from `state`, so a sharded base does not matter.
    if model.peft_config[adapter].is_prompt_learning and any(
        map(is_dtensor, model.prompt_encoder[adapter].parameters())
    ):
        raise refused
    sources: dict[int, str] = {}
    given: dict[str, Any] = {}
    for path, name in _by_path(model, state).items():
        # An object for each name, so that tied weights are told apart.
        given[path] = _stand_in(state[name])
        sources[id(given[path])] = name
    choose = importlib.import_module("peft").get_peft_model_state_dict
    try:
        with torch.no_grad():
            chosen = choose(model, state_dict=given, adapter_name=adapter)
    except (NotImplementedError, RuntimeError) as error:
        if is_sharded:
            # Values are asked for, and a stand-in has none.
            raise refused from error
        raise
    chosen = {name_without_wrappers(name, model): tensor for name, tensor in chosen.items()}
    known = {name: sources[id(tensor)] for name, tensor in chosen.items() if id(tensor) in sources}
    if is_sharded and any(tensor.is_meta for name, tensor in chosen.items() if name not in known):
        raise refused
    return chosen, known


def _by_path(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """`names` by the paths of modules, which peft compares names with: some wrappers are in these and not in those."""
    # The innermost of a wrapper and its module, which come in this order.
    paths = {kept: path for path, kept in paths_without_wrappers(model).items()}
    named: dict[str, str] = {}
    for name in names:
        module, _, leaf = name_without_wrappers(name, model).rpartition(".")
        path = paths.get(module, module)
        named[f"{path}.{leaf}" if path else leaf] = name
    return named


def _kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _check(adapter: Adapter) -> None:
    folder = adapter.folder
    if not folder.isprintable() or folder in (".", "..") or "/" in folder or "\\" in folder:
        raise InvalidInputError(f"an adapter is called {folder!r}, which cannot name its folder: rename it")
    if not adapter.tensors:
        raise InvalidInputError(
            f"there is nothing to save: the adapter {folder or _DEFAULT!r} has no tensors"
        )
    for name, tensor in adapter.tensors.items():
        check_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTypeError(
                f"{name!r} of an adapter is {format_type(tensor)}, not a tensor: leave it out"
            )


def _stand_in(value: Any) -> Any:
    if is_dtensor(value):
        return torch.empty(value.shape, dtype=value.dtype, device="meta").as_subclass(_StandIn)
    return value.detach() if isinstance(value, torch.Tensor) else value


class _StandIn(torch.Tensor):
    """A tensor without values for a sharded one, which peft would gather."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # These only prepare the values to be written.
        if func in (torch.Tensor.detach, torch.Tensor.cpu, torch.Tensor.contiguous):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
