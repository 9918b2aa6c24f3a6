"""Reads samples as arrays, from the datasets that users have.

Invariants: arrays and tensors are viewed and not copied, so that a piece of a long memory-mapped sample costs only the
piece. Values are checked only where a piece takes them. Any other content is refused, and the message names the sample.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError, format_count, format_type

__all__ = [
    "BOOLEANS",
    "IGNORED_LABEL",
    "INTEGERS",
    "MASK",
    "NUMBERS",
    "TOKEN_IDS",
    "ArrayKind",
    "Extras",
    "Sample",
    "SampleSource",
    "as_array",
    "as_datasets",
    "column_names",
    "joined",
    "name_sample",
    "refuse_first",
]

_INT64_ADVICE = "tensors of ids are int64, so they must be below 2**63"
_FLOAT32_ADVICE = "the column is float32, whose largest value is 3.4e38; scale the column"
# Cross-entropy in torch and transformers ignores this label by default.
IGNORED_LABEL = -100


class SampleSource(Protocol):
    """A map-style dataset, a HF `Dataset`, a list, or the rows of an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Extras(NamedTuple):
    """Further content of a sample by key. Arrays are (tokens,), views of what the dataset gave.

    `masks` say which tokens are learned, and `constants` must hold the same number everywhere. `columns` are carried
    beside the tokens. `values` are those that the sample has once.
    """

    masks: dict[str, NDArray[Any]]
    constants: dict[str, NDArray[Any]]
    columns: dict[str, NDArray[Any]]
    values: dict[str, Any]


class Sample(NamedTuple):
    """One sample as arrays of any integer dtype, both (tokens,), views of what the dataset gave.

    `labels` is `tokens` itself if the sample has no labels. `dataset` and `number` name the sample in errors. `extras`
    is None if the sample has nothing else.
    """

    tokens: NDArray[Any]
    labels: NDArray[Any]
    dataset: int
    number: int
    extras: Extras | None = None


class ArrayKind(NamedTuple):
    """Names numpy's kinds of dtypes that an array may have, and what to call them."""

    name: str
    kinds: str
    dtypes: str


TOKEN_IDS = ArrayKind("token ids", "iu", "integers")
MASK = ArrayKind("zeros and ones", "biu", "booleans or integers")
INTEGERS = ArrayKind("integers", "iu", "integers")
NUMBERS = ArrayKind("numbers", "fiu", "floats or integers")
BOOLEANS = ArrayKind("booleans", "b", "booleans")


def joined(
    key: str,
    arrays: Sequence[NDArray[Any]],
    samples: Sequence[Sample],
    starts: Sequence[int],
    stops: Sequence[int],
    dtype: type[np.generic] = np.int64,
) -> NDArray[Any]:
    """The values from `starts` to `stops` of each array, one after the other; `key` and `samples` name them.

    Raises:
        InvalidInputError: One does not fit int64, or is finite and beyond float32.
    """
    parts = [array[start:stop] for array, start, stop in zip(arrays, starts, stops, strict=True)]
    if dtype is np.int64 and any(part.dtype.kind == "u" and part.dtype.itemsize == 8 for part in parts):
        for sample, start, part in zip(samples, starts, parts, strict=True):
            refuse_first(part > np.iinfo(np.int64).max, part, start, key, sample, _INT64_ADVICE)
    # A value beyond float32 becomes infinite, which is looked for below. Kinds were checked; "unsafe" lets unsigned
    # 64-bit ids through.
    with np.errstate(over="ignore"):
        values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    if dtype is np.float32 and not np.isfinite(values).all():
        largest = float(np.finfo(np.float32).max)
        for sample, start, part in zip(samples, starts, parts, strict=True):
            refuse_first(
                np.isfinite(part) & (np.abs(part) > largest), part, start, key, sample, _FLOAT32_ADVICE
            )
    return values


def name_sample(dataset: int, number: int, key: str | None = None) -> str:
    """Name a sample, or what it has as its `key`, in a message."""
    sample = f"sample {number} of dataset {dataset}"
    return sample if key is None else f"{key} of {sample}"


def refuse_first(
    wrong: NDArray[np.bool_], values: NDArray[Any], start: int, key: str, sample: Sample, advice: str
) -> None:
    """Refuse the first of `values` that is `wrong`; the first of them is at position `start` in the sample."""
    if wrong.any():
        position = int(wrong.argmax())
        value = values[position].item()
        shown = int(value) if isinstance(value, bool) else value
        raise InvalidInputError(
            f"{name_sample(sample.dataset, sample.number, key)} is {shown} at position {start + position}: {advice}"
        )


def as_array(value: Any, key: str | None, dataset: int, number: int, kind: ArrayKind) -> NDArray[Any]:
    """The value of a sample's `key`, or the sample itself, as an array of one dimension.

    Raises:
        InvalidTypeError: it is none, or of another kind.
    """
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in kind.kinds:
        return value
    if type(value) is list and "i" in kind.kinds:
        # numpy makes the same array in three times the time.
        integers = _native.integers_of_list(value)
        if integers is not None:
            return integers
    try:
        array = value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # torch raises any of these for a tensor. A RuntimeError of anything else is the dataset's own.
        is_tensor = isinstance(value, torch.Tensor)
        if isinstance(error, RuntimeError) and not is_tensor:
            raise
        reason = str(error)
        if is_tensor and value.is_meta:
            reason = "it is a tensor on the meta device, which holds no values; make samples on the CPU"
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} cannot be read as an array of {kind.name}: {reason}"
        ) from error
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} is a masked array; give its data, and the mask as loss_mask"
        )
    if array.ndim != 1:
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} is {format_type(value)} of shape {array.shape}: give one-dimensional "
            f"{kind.name}"
        )
    if array.dtype.kind not in kind.kinds and array.size:
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} is {format_type(value)} of dtype {array.dtype}: give {kind.dtypes}"
        )
    return array


# Packages whose tables look like datasets: `len` gives the number of rows.
_TABLES = ("pandas", "polars", "pyarrow")


def as_datasets(datasets: Any, num_samples: tuple[int, ...]) -> tuple[SampleSource, ...]:
    """Tell one dataset from several, and check them against the plan.

    Raises:
        InvalidTypeError: Something is no dataset.
        PlanMismatchError: The number of datasets, or of samples in one, is not the plan's.
    """
    several = isinstance(datasets, list | tuple) and not _holds_samples(datasets, num_samples)
    found: tuple[Any, ...] = tuple(datasets) if several else (datasets,)
    # If there are as many "datasets" as the plan has samples, they may be samples of a wrong type.
    hint = ""
    if several and num_samples == (len(found),):
        first = found[0]
        entry = f" of {type(first[0]).__name__}" if isinstance(first, list | tuple) and first else ""
        hint = (
            f"; or, if these are the samples of one dataset: a sample is a dict or one-dimensional token ids, which "
            f"are integers, and the first is {format_type(first)}{entry}"
        )
    for number, dataset in enumerate(found):
        if _is_row(dataset):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)} of one dimension, which is one sample: a dataset of this "
                f"sample alone is a list of it; several datasets are a list of datasets{hint}"
            )
        if isinstance(dataset, str | os.PathLike):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, and no dataset: "
                f"td.packing.open_samples({os.fspath(dataset)!r}) opens files and folders{hint}"
            )
        if _is_stream(dataset):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, which gives samples in an order of its own, and packs "
                "ask for them by number: td.PackedStream packs them as they come. Or give a map-style dataset, as HF's "
                f"load_dataset gives without streaming=True, or a list of the samples{hint}"
            )
        usable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not usable or isinstance(dataset, Mapping | bytes):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}: a dataset has a length and gives "
                f"samples by their numbers; several datasets are a list{hint}"
            )
        if type(dataset).__module__.partition(".")[0] in _TABLES and hasattr(dataset, "columns"):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, which gives columns by numbers or names, and no "
                "samples: give a datasets.Dataset of it, or a list of its token ids"
            )
        if (form := _table_format(dataset)) is not None:
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)} with the format {form!r}, in which it gives tables "
                "and no rows: pass dataset.with_format(None), or 'numpy' or 'torch'"
            )
    if len(found) != len(num_samples):
        raise PlanMismatchError(
            f"the plan was made for {format_count(len(num_samples), 'dataset')}, and "
            f"{format_count(len(found), 'dataset')} {'was' if len(found) == 1 else 'were'} given: pass those that "
            f"were planned, in their order{hint}"
        )
    for number, (dataset, expected) in enumerate(zip(found, num_samples, strict=True)):
        if len(dataset) != expected:
            raise PlanMismatchError(
                f"dataset {number} has {len(dataset)} samples, the plan was made for {expected}: "
                "pass the dataset that was planned, or plan this one"
            )
    return found


def _is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated over."""
    if isinstance(dataset, IterableDataset):
        # Torch gives it a __getitem__, which raises.
        return True
    if isinstance(dataset, Mapping):
        return False
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def _hf_format(dataset: Any) -> Mapping[str, Any]:
    """The format of a HF `Dataset`; empty for any other dataset."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return {}
    described = getattr(dataset, "format", None)
    return described if isinstance(described, Mapping) else {}


def _table_format(dataset: Any) -> str | None:
    """The format of a HF `Dataset` whose rows are tables, or None for any other dataset."""
    form = _hf_format(dataset).get("type")
    return form if form in ("arrow", "polars") else None


def column_names(dataset: Any) -> list[str] | None:
    """The keys of all rows, if the dataset is a HF `Dataset` without a function that makes others of them."""
    form = _hf_format(dataset)
    if not form or form["type"] == "custom":
        return None
    names: list[str] = dataset.column_names if form["output_all_columns"] else form["columns"]
    return names


def _holds_samples(items: Sequence[Any], num_samples: tuple[int, ...]) -> bool:
    """Whether a list holds the samples of one dataset rather than datasets."""
    for item in items:
        if isinstance(item, Mapping):
            return True
        if isinstance(item, np.ndarray | torch.Tensor):
            return _is_row(item)
        if not isinstance(item, list | tuple):
            return False
        if item:
            return isinstance(item[0], int | np.integer)
    # Nothing but empty lists: each may be a sample or a dataset without samples.
    return num_samples == (len(items),)


def _is_row(value: Any) -> bool:
    """Whether an array holds the tokens of one sample; one of objects or of rows holds samples."""
    return (
        isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1 and value.dtype != np.dtype(object)
    )
