"""Finds what `save_pretrained` writes of a model that holds peft adapters: their tensors, one file each, and configs.

Follows `PeftModel.save_pretrained` of peft 0.21. For transformers models after `add_adapter` or `load_adapter` it
follows `PreTrainedModel.save_pretrained` of transformers 5.

Invariants:
    - peft is imported only where the caller's model holds adapters.
    - The model and the configs of its adapters are not changed, though `save_pretrained` changes them.
    - Nothing that is sharded is gathered here. No tensor is copied but what peft computes when it saves.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from tundish.checkpoint.hf.pretrained import WRAPPERS, is_pretrained, own_class, tied_away
from tundish.checkpoint.tensor_names import check_name, without_wrappers
from tundish.checkpoint.tensors import check_gathered, is_dtensor
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "Adapter",
    "AdapterSettings",
    "Adapters",
    "adapters_of",
    "holds_adapters",
    "load_adapters",
    "refuse_encoded",
    "refuse_mixed",
]

_logger = logging.getLogger("tundish.checkpoint")

_WEIGHTS = "adapter_model.safetensors"
_CARD = "README.md"
# The adapter that lies at the top of the folder; any other has a folder of its name.
_DEFAULT = "default"
# Before the names of weights in models that are not wrapped by peft, as peft's loaders expect it.
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter as it is saved.

    `folder`: in the export, empty for the top of it. `tensors`: by their names in the file. `config`: this save's own.
    `auto_mapping`: what its file says besides of the class of the model; None for nothing.
    """

    folder: str
    tensors: Mapping[str, torch.Tensor]
    config: Any
    auto_mapping: dict[str, str] | None

    @property
    def file(self) -> str:
        """The name of the file with its weights, in the export."""
        return _file_in(self.folder)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """All that is saved of a model: its adapters, in order, and what they add to the files' metadata.

    `model`: whose they are. `base`: the model that they adapt.
    """

    model: nn.Module
    base: nn.Module
    adapters: tuple[Adapter, ...]
    metadata: Mapping[str, str]

    def settings(self) -> tuple[AdapterSettings, Any]:
        """What is written beside the weights: settings, and the generation config of a model of transformers.

        Both are this save's own.
        """
        adapters = tuple((one.folder, one.config, one.auto_mapping) for one in self.adapters)
        if _is_of_peft(self.model):
            return AdapterSettings(adapters, _card_of(self.model)), None
        model: Any = self.model
        generation = copy.deepcopy(model.generation_config) if model.can_generate() else None
        return AdapterSettings(adapters, None), generation

    @property
    def coded(self) -> Any:
        """The model whose code belongs beside the weights, if it has any of its own; None of one of peft."""
        return None if _is_of_peft(self.model) else self.model


class AdapterSettings:
    """The configs of adapters, and the model card: what `save_pretrained` writes of them."""

    def __init__(
        self, adapters: tuple[tuple[str, Any, dict[str, str] | None], ...], card: bytes | None
    ) -> None:
        self._adapters = adapters
        self._card = card

    def to_dict(self) -> dict[str, Any]:
        """All that is written, to be compared."""
        return {
            "card": self._card,
            "adapters": [(folder, config.to_dict(), auto) for folder, config, auto in self._adapters],
        }

    def save_pretrained(self, folder: str) -> None:
        """Write all of it into `folder`."""
        if self._card is not None:
            Path(folder, _CARD).write_bytes(self._card)
        for name, config, auto_mapping in self._adapters:
            config.save_pretrained(str(Path(folder, name)), auto_mapping_dict=auto_mapping)


def holds_adapters(module: nn.Module | None) -> bool:
    """Whether `module`, without wrappers, is a model whose `save_pretrained` writes nothing but adapters."""
    is_loaded = is_pretrained(module) and getattr(module, "_hf_peft_config_loaded", False)
    return is_loaded or _is_of_peft(module) or _is_mixed(module)


def refuse_mixed(module: nn.Module | None) -> None:
    """Refuse a model that mixes kinds of adapters, of which peft itself saves nothing. Raises `InvalidTypeError`."""
    if _is_mixed(module):
        raise InvalidTypeError(
            f"the model ({type(module).__name__}) mixes kinds of adapters, which peft cannot save and load: merge "
            "them and save the merged model, or wrap it in a PeftModel for each kind"
        )


def refuse_encoded(module: nn.Module | None) -> None:
    """Refuse prompts that are made by an encoder, of which an export holds what comes out and not the encoder.

    peft loads that into the encoder's embedding, so that it is right for inference alone: while the model is trained,
    the encoder makes other prompts of it. Raises `InvalidInputError`.
    """
    if not _is_of_peft(module):
        return
    model: Any = module
    for name, config in model.peft_config.items():
        is_encoded = _kind_of(config) == "P_TUNING" or getattr(config, "prefix_projection", False)
        if is_encoded and not config.inference_mode:
            raise InvalidInputError(
                f"load_best_model_at_end cannot load the adapter {name!r} ({_kind_of(config)}) again: an export holds "
                "the prompts that its encoder makes, and not the encoder; train without it, and load the best export "
                "with PeftModel.from_pretrained"
            )


def load_adapters(model: Any, folder: Path) -> bool:
    """Load the weights of all adapters of `model` that an export holds; False where it holds none of any adapter.

    Adapters that the export lacks, as they were added since, stay as they are, and a warning names them. `model`: one
    of which `save_hf` made the export. On every rank that holds it; where no parameter is spread.
    """
    peft = importlib.import_module("peft")
    is_of_peft = _is_of_peft(model)
    names = list(model.peft_config) if is_of_peft else model.active_adapters()
    files = {name: folder / _file_in(_folder_of(name) if is_of_peft else "") for name in names}
    missing = [name for name, file in files.items() if not file.is_file()]
    # What lies at the top and is no adapter of the model is of one that was deleted since: it belongs into no other.
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
        if name in missing:
            continue
        weights = load_file(file)
        if not is_of_peft:
            weights = {key.removeprefix(_PREFIX): tensor for key, tensor in weights.items()}
        peft.set_peft_model_state_dict(model, weights, adapter_name=name)
    return True


def adapters_of(model_or_tensors: Any) -> Adapters | None:
    """The adapters of a model, as its `save_pretrained` writes them; None for anything that holds none.

    Raises:
        InvalidTypeError: it mixes kinds of adapters, or an adapter holds what is no tensor.
        InvalidInputError: several adapters are active, or none, of a model whose `save_pretrained` writes the active
            one; an adapter has no weights, or a name that leads elsewhere; weights have to be computed that are spread
            over ranks; weights are sharded by DeepSpeed, or tied without the model declaring it.
        Whatever peft raises where it cannot say what belongs to an adapter.
    """
    if not isinstance(model_or_tensors, nn.Module):
        return None
    model = without_wrappers(model_or_tensors)
    if not holds_adapters(model):
        return None
    refuse_mixed(model)
    found = _of_peft(model) if _is_of_peft(model) else _of_transformers(model)
    for adapter in found.adapters:
        _check(adapter)
    return found


def _folder_of(adapter: str) -> str:
    return "" if adapter == _DEFAULT else adapter


def _file_in(folder: str) -> str:
    return f"{folder}/{_WEIGHTS}" if folder else _WEIGHTS


def _is_of_peft(module: nn.Module | None) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def _is_mixed(module: nn.Module | None) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftMixedModel)


def _of_peft(model: Any) -> Adapters:
    state = model.state_dict(keep_vars=True)
    adapters = []
    for name, own in model.peft_config.items():
        tensors, config = _selected(model, name, state)
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
    tensors, config = _selected(
        model, active[0], model.state_dict(keep_vars=True) if state is None else state
    )
    tensors = {_PREFIX + name: tensor for name, tensor in tensors.items()}
    dropped = tied_away(model, tensors) | set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    adapter = Adapter(folder="", tensors=kept, config=config, auto_mapping=None)
    return Adapters(model=model, base=model, adapters=(adapter,), metadata=metadata)


# Of each model and adapter: what follows from what, so that a training loop does not have peft look again at each save,
# which may ask the hub whether the vocabulary was changed.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, dict[str, str]]]] = (
    weakref.WeakKeyDictionary()
)


def _selected(model: Any, adapter: str, state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """What of `state`, or made of it, is saved of an adapter, by its names in the file; and a copy of its config."""
    own = model.peft_config[adapter]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    # Tensors are found again by the first of their names, which is another one once weights are tied or untied.
    first: dict[int, int] = {}
    tied = tuple([first.setdefault(id(tensor), number) for number, tensor in enumerate(state.values())])
    key = tuple(state), tied, tuple(model.peft_config), vocabulary, own.to_dict()
    known = _known.setdefault(model, {})
    for gone in known.keys() - model.peft_config.keys():
        del known[gone]
    if adapter in known and known[adapter][0] == key:
        return {name: state[source] for name, source in known[adapter][1].items()}, _copied(own)
    # peft writes into the config what it finds of the ranks of AdaLoRA.
    before = dict(own.__dict__)
    try:
        tensors = _ask(model, adapter, state)
        config = _copied(own)
    finally:
        # Never without a setting that was there, wherever this is interrupted.
        own.__dict__.update(before)
        for name in own.__dict__.keys() - before.keys():
            del own.__dict__[name]
    sources = {id(tensor): source for source, tensor in reversed(state.items())}
    if all(id(tensor) in sources for tensor in tensors.values()):
        known[adapter] = key, {name: sources[id(tensor)] for name, tensor in tensors.items()}
    return tensors, config


def _ask(model: Any, adapter: str, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What peft says is to be saved of an adapter. Not collective: no rank may wait for another in here."""
    state = _by_path(model, state)
    for name, tensor in state.items():
        # Of what has no values peft would compute something else, or fail in words of its own.
        if adapter in name.split("."):
            check_gathered(name, tensor)
    if not any(map(is_dtensor, state.values())):
        return _chosen(model, adapter, state)
    refused = InvalidInputError(
        f"the weights that peft saves of the adapter {adapter!r} ({_kind_of(model.peft_config[adapter])}) are computed "
        "of parameters that are spread over ranks: save it with its own save_pretrained, where they are whole"
    )
    # Prompts are computed by the modules of the model, and not of `state`: a base that is spread is no matter.
    if model.peft_config[adapter].is_prompt_learning and any(
        map(is_dtensor, model.prompt_encoder[adapter].parameters())
    ):
        raise refused
    stand_ins = {name: _StandIn.of(one) if is_dtensor(one) else one for name, one in state.items()}
    spread = {id(stand_in): state[name] for name, stand_in in stand_ins.items()}
    try:
        chosen = _chosen(model, adapter, stand_ins)
    except (NotImplementedError, RuntimeError) as error:
        # Values are asked for, and a stand-in has none.
        raise refused from error
    found = {name: spread.get(id(one), one) for name, one in chosen.items()}
    if any(isinstance(one, _StandIn) or one.is_meta for one in found.values()):
        raise refused
    return found


def _chosen(model: Any, adapter: str, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    choose = importlib.import_module("peft").get_peft_model_state_dict
    with torch.no_grad():
        chosen = choose(model, state_dict=state, adapter_name=adapter)
    return {WRAPPERS.sub("", name): tensor for name, tensor in chosen.items()}


def _by_path(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """`state` by the paths of modules, which peft compares names with: some wrappers are in these and not in those."""
    paths = {WRAPPERS.sub("", f"{path}."): f"{path}." for path, _ in model.named_modules() if path}
    if all(plain == path for plain, path in paths.items()):
        return dict(state)
    named: dict[str, Any] = {}
    for name, tensor in state.items():
        module, dot, leaf = WRAPPERS.sub("", name).rpartition(".")
        named[paths.get(module + dot, module + dot) + leaf] = tensor
    return named


def _kind_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _copied(own: Any) -> Any:
    config = copy.deepcopy(own)
    for name, value in vars(config).items():
        # peft writes a set in whatever order it has in this process.
        if isinstance(value, set):
            setattr(config, name, sorted(value, key=str))
    return config


# Of each model: what its card follows from, and the card. To make one takes 20 ms.
_cards: weakref.WeakKeyDictionary[nn.Module, tuple[Any, bytes]] = weakref.WeakKeyDictionary()


def _card_of(model: Any) -> bytes:
    base = model.get_base_model()
    kinds = [_kind_of(config) for config in model.peft_config.values()]
    tags = list(getattr(base, "model_tags", None) or ())
    named = getattr(getattr(model, "config", None), "_name_or_path", None)
    key = str(model.active_adapter), kinds, tags, base.__dict__.get("name_or_path"), named
    known = _cards.get(model)
    if known is None or known[0] != key:
        with TemporaryDirectory() as scratch:
            model.create_or_update_model_card(scratch)
            known = _cards[model] = key, Path(scratch, _CARD).read_bytes()
    return known[1]


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
            raise InvalidTypeError(f"{name!r} of an adapter is a {type(tensor).__name__}, not a tensor")


class _StandIn(torch.Tensor):
    """Stands for a tensor that is spread over ranks where peft chooses among tensors: it would gather it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _StandIn:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What only makes the values ready to be written.
        if func in (torch.Tensor.detach, torch.Tensor.cpu, torch.Tensor.contiguous):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
