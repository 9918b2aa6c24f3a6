"""Finds the weights that `save_pretrained` of a transformers model writes, and saves its configs and code.

Follows `PreTrainedModel.save_pretrained` of transformers 5, step by step.

Invariants:
    - transformers is imported only if the caller's model is one of its own.
    - The model and its configs are not changed, though `save_pretrained` changes them.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import weakref
from typing import Any

import torch
from torch import nn

from tundish.checkpoint.hf.conversion import Conversion, reverting_conversion
from tundish.checkpoint.tensors import TensorSpec, paths_without_wrappers, tied_names
from tundish.errors import InvalidInputError, InvalidTypeError


def is_pretrained(module: nn.Module | None) -> bool:
    """Whether `module` is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def weights_of(
    model: Any, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that `save_pretrained` writes, of all `tensors` of the model, and metadata of the files.

    Raises:
        InvalidTypeError: the model is quantized in a way that cannot be saved.
        InvalidInputError: weights are tied that the model does not declare, so that a loaded model would not tie them.
    """
    metadata: dict[str, str] = {}
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        if not quantizer.is_serializable():
            method = quantizer.quantization_config.quant_method
            raise InvalidTypeError(
                f"the model is quantized ({getattr(method, 'value', method)}) in a way that cannot be saved: "
                "dequantize it first"
            )
        replaced, metadata = quantizer.get_state_dict_and_metadata(model)
        tensors = tensors if replaced is None else dict(replaced)
    ignored = set(model._keys_to_ignore_on_save or ())
    dropped = tied_duplicates(model, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored and name not in dropped}
    return kept, metadata


def conversion_of(model: Any, sources: tuple[TensorSpec, ...]) -> tuple[Conversion, int]:
    """The conversion of weights from their layout in the model to that on the hub, and the number of parameters.

    Raises `InvalidInputError` if this transformers is too old.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        raise InvalidInputError(
            f"this is transformers {sys.modules['transformers'].__version__}, which cannot say how its models are "
            "saved: install transformers 5, or give tensors instead of the model"
        ) from None
    known = _conversions.get(model)
    if known is None or known[0] != sources:
        # The conversion is kept as long as the model lives, and so must not keep it alive.
        own = weakref.ref(model)

        def revert(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            reverted: dict[str, torch.Tensor] = loading.revert_weight_conversion(own(), named)
            return reverted

        known = _conversions[model] = (sources, reverting_conversion(sources, revert), model.num_parameters())
    return known[1:]


_conversions: weakref.WeakKeyDictionary[Any, tuple[tuple[TensorSpec, ...], Conversion, int]] = (
    weakref.WeakKeyDictionary()
)


def fp32_pattern(model: Any, dtype: torch.dtype | None) -> str | None:
    """A regular expression for the names of weights that the model keeps in float32 though it is saved as `dtype`."""
    globs: set[str] = set()
    if dtype == torch.float16:
        globs.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        globs.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return "|".join(sorted(glob.replace("*", ".*") for glob in globs)) or None


def save_settings(model: Any, config: Any, dtype: torch.dtype | None, folder: str) -> None:
    """Write the configs of a model into `folder`, and its code if that is not part of transformers.

    Args:
        model: the model; it is not changed.
        config: replaces the model's own config, unless it is None.
        dtype: the weights are converted to this dtype.
        folder: an existing folder.
    """
    own = copy.deepcopy(model.config if config is None else config)
    if config is None:
        own.architectures = [own_class(model).__name__]
    set_dtype(own, dtype or (model.dtype if config is None else None))
    save_code(model, own, folder)
    own.save_pretrained(folder)
    save_generation_config(model, folder)


def set_dtype(config: Any, dtype: torch.dtype | None) -> None:
    """Write the dtype of the weights into a config that has a field for it."""
    if dtype is not None and hasattr(config, "dtype"):
        config.dtype = str(dtype).removeprefix("torch.")


def save_generation_config(model: Any, folder: str) -> None:
    """Write the generation config of a model that generates."""
    if model.can_generate():
        copy.deepcopy(model.generation_config).save_pretrained(folder)


def save_code(model: Any, config: Any, folder: str) -> None:
    """Copy the code of a model that is not part of transformers into `folder`, and name it in `config`, if given."""
    if model.is_remote_code():
        modules = importlib.import_module("transformers.dynamic_module_utils")
        # An instance without weights, since fully_shard gives the model another class, of another module.
        modules.custom_object_save(object.__new__(own_class(model)), folder, config=config)


def own_class(model: Any) -> type[Any]:
    """The class of a model without the one that `fully_shard` puts in front."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))


def tied_duplicates(model: Any, tensors: dict[str, torch.Tensor]) -> set[str]:
    """The names of tied weights that are not written: the model ties them again when it is loaded."""
    groups = tied_names(tensors)
    if not groups:
        return set()
    patterns: list[re.Pattern[str]] = []
    untied: list[re.Pattern[str]] = []
    plain = paths_without_wrappers(model)
    for path, module in model.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or ()
        # The regular expressions are relative to the module that declares them.
        start = f"{plain[path]}." if plain[path] else ""
        # A loaded model ties only what its config says.
        is_tied = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
        (patterns if is_tied else untied).extend(re.compile(start + pattern) for pattern in declared)
    dropped: set[str] = set()
    for names in groups:
        known = [name for name in sorted(names) if any(pattern.search(name) for pattern in patterns)]
        rest = [name for name in names if name not in known]
        if sum(not any(pattern.search(name) for pattern in untied) for name in rest) > 1:
            raise InvalidInputError(
                f"{', '.join(names)} are one tensor, but {type(model).__name__} does not declare it in "
                "_tied_weights_keys, so a loaded model would have several: declare it, or untie them"
            )
        dropped.update(known if rest else known[:-1])
    return dropped
