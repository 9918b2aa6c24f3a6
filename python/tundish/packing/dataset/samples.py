"""Reads samples as arrays, from the datasets that users have.

Invariants: arrays and tensors are viewed and not copied, so that a piece of a long memory-mapped sample costs only the
piece. Any other content is refused, and the message names the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError, format_count, format_type

__all__ = ["Sample", "SampleSource", "as_datasets", "as_sample", "joined"]


class SampleSource(Protocol):
    """A map-style dataset, a HF `Dataset`, a list, or the rows of an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Sample(NamedTuple):
    """One sample as arrays of any integer dtype, both (tokens,), views of what the dataset gave.

    `labels` is `tokens` itself if the sample has no labels. `dataset` and `number` name the sample in errors.
    """

    tokens: NDArray[Any]
    labels: NDArray[Any]
    dataset: int
    number: int


def joined(
    samples: Sequence[Sample],
    starts: Sequence[int],
    stops: Sequence[int],
    key: Literal["input_ids", "labels"],
) -> NDArray[np.int64]:
    """The tokens or the labels from `starts` to `stops` of each sample, one after the other.

    Raises:
        InvalidInputError: one does not fit int64.
    """
    parts = [
        (sample.tokens if key == "input_ids" else sample.labels)[start:stop]
        for sample, start, stop in zip(samples, starts, stops, strict=True)
    ]
    if any(part.dtype.kind == "u" for part in parts):
        for sample, start, part in zip(samples, starts, parts, strict=True):
            _check_range(part, start, key, sample)
    # Kinds and values were checked; "unsafe" lets unsigned 64-bit ids through.
    return np.concatenate(parts, dtype=np.int64, casting="unsafe")


def as_sample(row: Any, dataset: int, number: int) -> Sample:
    """Read one row of a dataset; `dataset` and `number` name it in errors.

    Raises:
        InvalidTypeError: it holds something else than token ids.
        InvalidInputError: its labels are not as many as its tokens.
    """
    if isinstance(row, np.ndarray) or not isinstance(row, Mapping):
        tokens = _as_token_array(row, None, dataset, number)
        return Sample(tokens, tokens, dataset, number)
    if "input_ids" not in row:
        raise InvalidTypeError(
            f"{_name(None, dataset, number)} has no input_ids; its keys are {sorted(map(str, row))[:8]}"
        )
    tokens = _as_token_array(row["input_ids"], "input_ids", dataset, number)
    own = row.get("labels")
    if own is None:
        return Sample(tokens, tokens, dataset, number)
    labels = _as_token_array(own, "labels", dataset, number)
    if len(labels) != len(tokens):
        raise InvalidInputError(
            f"{_name(None, dataset, number)} has {len(tokens)} input_ids but {len(labels)} labels: "
            "they must be as many"
        )
    return Sample(tokens, labels, dataset, number)


def _name(key: str | None, dataset: int, number: int) -> str:
    sample = f"sample {number} of dataset {dataset}"
    return sample if key is None else f"{key} of {sample}"


def _check_range(values: NDArray[Any], start: int, key: str, sample: Sample) -> None:
    # Only values that are used are checked: the rest of a mapped sample need not be read.
    if (values.dtype.kind, values.dtype.itemsize) != ("u", 8):
        return
    beyond = np.flatnonzero(values > np.iinfo(np.int64).max)
    if len(beyond):
        raise InvalidInputError(
            f"{_name(key, sample.dataset, sample.number)} hold {values[beyond[0]]} at position {start + beyond[0]}: "
            "tensors of ids are int64, so they must be below 2**63"
        )


def _as_token_array(value: Any, key: str | None, dataset: int, number: int) -> NDArray[Any]:
    """The value of a sample's `key` as an array; `dataset` and `number` name the sample in errors."""
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
            f"{_name(key, dataset, number)} cannot be read as an array of token ids: {reason}"
        ) from error
    if array.ndim != 1:
        raise InvalidTypeError(
            f"{_name(key, dataset, number)} must be one-dimensional token ids, got {type(value).__name__} of shape "
            f"{array.shape}"
        )
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidTypeError(
            f"{_name(key, dataset, number)} must be integers, got {type(value).__name__} of dtype {array.dtype}"
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
        entry = f", of {type(first[0]).__name__}" if isinstance(first, list | tuple) and first else ""
        hint = (
            f"; or, if these are the samples of one dataset: a sample is a dict or one-dimensional token ids, which "
            f"are integers, and the first is of type {type(first).__name__}{entry}"
        )
    for number, dataset in enumerate(found):
        if _is_row(dataset):
            raise InvalidTypeError(
                f"dataset {number} is of type {type(dataset).__name__} and has one dimension, which is one sample: a "
                f"dataset of this sample alone is a list of it; several datasets are a list of datasets{hint}"
            )
        usable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not usable or isinstance(dataset, Mapping | str | bytes):
            raise InvalidTypeError(
                f"dataset {number} is of type {type(dataset).__name__}: a dataset has a length and gives "
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


def _table_format(dataset: Any) -> str | None:
    """The format of a HF `Dataset` whose rows are tables, or None for any other dataset."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return None
    described = getattr(dataset, "format", None)
    form = described.get("type") if isinstance(described, Mapping) else None
    return form if form in ("arrow", "polars") else None


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
