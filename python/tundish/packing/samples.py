"""What a sample may be: its keys, and how its content becomes arrays.

Invariants:
    Every key of a sample is used, checked, in `IGNORED_KEYS`, which the guide lists, or in `drop_columns`. Others are
    refused, before training where the source tells its columns.
    Arrays and tensors are viewed and not copied, so that a piece of a long memory-mapped sample costs only the piece.
    Values are checked only where a piece takes them. Any other content is refused, and the message names the sample.
    Each tuple of keys is checked once, not for each row, because a look-up takes a tenth of the time.
    Importing this module does not import torch: readers of files take the names of keys from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_integer, format_type

# A column has the dtype of its padding value, so that it is the same in every item.
Padding = bool | int | float

# The names of TRL, of transformers' chat templates, and of most other trainers.
MASK_KEYS = ("completion_mask", "assistant_masks", "loss_mask")

# Tokenizers add these keys. They are left out while every value is the one here, and refused otherwise.
CONSTANT_KEYS = {"attention_mask": 1, "token_type_ids": 0}

# Lengths, and texts that samples were tokenized from.
IGNORED_KEYS = frozenset({"length", "num_tokens", "text", "messages", "prompt", "completion"})

# Under this key, an item has the padding values of its columns.
COLUMN_PADDING = "column_padding"

# Keys of items and of batches that have a meaning of their own.
MADE_KEYS = frozenset(
    {
        "position_ids",
        "cu_seqlens",
        "max_seqlen",
        COLUMN_PADDING,
        "seq_idx",
        "document_ids",
        "loss_weights",
        "shift_labels",
        "shift_loss_weights",
        "num_unlearned_pieces",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


# Further keys of items and of batches, which a column cannot have. In files they may mean something else.
_TAKEN_KEYS = MADE_KEYS | {"dataset_id", "use_cache", "num_items_in_batch"}

# Left out of a sample in silence, these would change what is trained: sources look for them by name, not by type.
MEANINGFUL_KEYS = frozenset({"labels", *MASK_KEYS, *CONSTANT_KEYS, *MADE_KEYS})

# A message lists at most so many keys.
_SHOWN_KEYS = 8

# For samples of shape (1, tokens).
SHAPE_ADVICE = "a tokenizer gives rows with return_tensors=: leave that out, or take row [0]"

# As `drop_columns`: all keys that are not known.
_UNKNOWN = "unknown"

# A key whose name holds one of these may say what is learned: it is left out only if `drop_columns` lists it.
_WORDS_OF_LOSS = ("mask", "label", "weight", "target", "advantage")

# What to do about samples that have no `input_ids`.
TOKENIZE_HINT = "td.hf.tokenize makes input_ids of text, of prompt and completion, or of messages"

# The padding of a column by the kind of its dtype.
_PADDINGS: dict[str, Padding] = {"f": 0.0, "i": 0, "u": 0, "b": False}


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


class _Kind(NamedTuple):
    """Names numpy's kinds of dtypes that an array may have, and what to call them."""

    name: str
    kinds: str
    dtypes: str


_TOKEN_IDS = _Kind("token ids", "iu", "integers")
_MASK = _Kind("zeros and ones", "biu", "booleans or integers")
_COLUMN_KINDS: dict[type[np.generic], _Kind] = {
    np.bool_: _Kind("booleans", "b", "booleans"),
    np.int64: _Kind("integers", "iu", "integers"),
    np.float32: _Kind("numbers", "fiu", "floats or integers"),
}


class _Schema(NamedTuple):
    """Which of the keys of a row are masks, and which hold constants; `is_plain` if it has no extras at all."""

    masks: tuple[str, ...]
    constants: tuple[str, ...]
    is_plain: bool


def name_sample(dataset: int, number: int, key: str | None = None) -> str:
    """Name a sample, or what it has as its `key`, in a message."""
    sample = f"sample {number} of dataset {dataset}"
    return sample if key is None else f"{key} of {sample}"


class SampleReader:
    """Reads the rows of datasets as samples, which may have the given columns beside tokens, labels and masks.

    None stands for a key that is not there, as in rows of joined Hugging Face datasets.

    Args:
        columns: As in `PackedDataset`.
        sample_columns: As in `PackedDataset`.
        drop_columns: As in `PackedDataset`.

    Attributes:
        columns: The columns, checked, with their padding values.
        sample_columns: The names of the values that samples have once, checked.

    Raises:
        InvalidTypeError, InvalidInputError: An argument is refused.
    """

    def __init__(self, columns: Any, sample_columns: Any, drop_columns: Any) -> None:
        self.columns = _as_columns(columns)
        self.sample_columns = _as_sample_columns(sample_columns, self.columns)
        self._dropped = _as_drop_columns(drop_columns, (*self.columns, *self.sample_columns))
        self._drops_unknown = isinstance(drop_columns, str)
        self._kinds = {name: _COLUMN_KINDS[dtype_of(padding)] for name, padding in self.columns.items()}
        self._named = (*self.columns, *self.sample_columns)
        self._known = {
            "input_ids",
            "labels",
            *MASK_KEYS,
            *CONSTANT_KEYS,
            *IGNORED_KEYS,
            *self._named,
            *self._dropped,
        }
        self._schemas: dict[tuple[Hashable, ...], _Schema] = {}

    def form(self) -> str:
        """The columns and their padding values as JSON, in which 0, 0.0 and False differ, and NaN equals itself."""
        return json.dumps([self.columns, self.sample_columns], sort_keys=True)

    def check_source(self, source: Any, dataset: int) -> set[str] | None:
        """Check what a source tells before its samples are read: the names of its columns, or else its first sample.

        The samples of datasets that users wrote are checked when they are read: reading one here might open files that
        the forked workers of a `DataLoader` cannot share.

        Args:
            source: A dataset or a stream that is not empty.
            dataset: Its number, for messages.

        Returns:
            The names of all columns, or None if the source does not tell them.

        Raises:
            InvalidTypeError: There is no `input_ids`.
            InvalidInputError: A key is unknown, or a column is missing.
        """
        told = _told_columns(source)
        if told is not None:
            self._schema(tuple(told), f"dataset {dataset}", told.get)
            # A file may have further columns, which `open_samples` leaves out.
            return None if hasattr(source, "column_types") else set(told)
        if (isinstance(source, list | tuple) or hasattr(source, "column_types")) and len(source):
            first = source[0]
            if isinstance(first, Mapping):
                self._schema(tuple(first), name_sample(dataset, 0), lambda key: _padding_of_value(first[key]))
            elif self._named:
                raise self._no_columns(first, dataset, 0)
        return None

    def check_dropped(self, columns: Sequence[set[str] | None]) -> None:
        """Refuse a name in `drop_columns` that no dataset has, if all tell their columns.

        Args:
            columns: The columns of each dataset, as `check_source` returned them.

        Raises:
            InvalidInputError: There is such a name.
        """
        told = [names for names in columns if names is not None]
        if len(told) < len(columns):
            return
        found = set().union(*told)
        if missing := [name for name in self._dropped if name not in found]:
            raise InvalidInputError(
                f"drop_columns names {missing[0]!r}, and no sample has it; the columns are {_listed([*found])}"
            )

    def read(self, row: Any, dataset: int, number: int) -> Sample:
        """Read one row; `dataset` and `number` name it in errors.

        Raises:
            InvalidTypeError: It holds something else than token ids, or a mask or column is of a wrong dtype.
            InvalidInputError: Its labels, masks or columns are not as many as its tokens; a column is missing; or a key
                is unknown.
        """
        # The first question is for speed: the others take longer than all else that is asked of a dict.
        if type(row) is not dict and (isinstance(row, np.ndarray) or not isinstance(row, Mapping)):
            tokens = _as_array(row, None, dataset, number, _TOKEN_IDS)
            if self._named:
                raise self._no_columns(row, dataset, number)
            return Sample(tokens, tokens, dataset, number)
        keys = tuple(row)
        schema = self._schemas.get(keys) or self._schema(
            keys, name_sample(dataset, number), lambda key: _padding_of_value(row[key])
        )
        tokens = _as_array(row["input_ids"], "input_ids", dataset, number, _TOKEN_IDS)
        own = row.get("labels")
        labels = tokens if own is None else _as_array(own, "labels", dataset, number, _TOKEN_IDS)
        if len(labels) != len(tokens):
            raise InvalidInputError(
                f"{name_sample(dataset, number)} has {len(tokens)} input_ids but {len(labels)} labels: "
                "they must be as many"
            )
        if schema.is_plain:
            return Sample(tokens, labels, dataset, number)
        return Sample(
            tokens, labels, dataset, number, self._extras(row, schema, len(tokens), dataset, number)
        )

    def _extras(
        self, row: Mapping[str, Any], schema: _Schema, tokens: int, dataset: int, number: int
    ) -> Extras:
        def arrays(kinds: Iterable[tuple[str, _Kind]]) -> dict[str, NDArray[Any]]:
            found = {}
            for key, kind in kinds:
                value = row[key]
                if value is None:
                    continue
                array = found[key] = _as_array(value, key, dataset, number, kind)
                if len(array) != tokens:
                    raise InvalidInputError(
                        f"{key} of {name_sample(dataset, number)} has {len(array)} entries for {tokens} input_ids: "
                        "give one a token"
                    )
            return found

        columns = arrays(self._kinds.items())
        if missing := [key for key in self.columns if key not in columns]:
            raise InvalidInputError(
                f"{name_sample(dataset, number)} has None as its {', '.join(missing)}: give one entry a token, or take "
                "the name out of columns"
            )
        return Extras(
            masks=arrays((key, _MASK) for key in schema.masks),
            constants=arrays((key, _MASK) for key in schema.constants),
            columns=columns,
            values={key: row[key] for key in self.sample_columns},
        )

    def _no_columns(self, row: Any, dataset: int, number: int) -> InvalidInputError:
        return InvalidInputError(
            f"{name_sample(dataset, number)} is {format_type(row)} of token ids, and has no "
            f"{', '.join(self._named)}: a sample with columns is a mapping with input_ids"
        )

    def _schema(
        self, keys: tuple[Hashable, ...], where: str, padding_of: Callable[[Any], Padding | None]
    ) -> _Schema:
        """Check keys that were not seen before.

        Args:
            keys: The keys.
            where: What has them, for messages.
            padding_of: The padding of the column that a key has, None if it has no number a token.
        """
        if "input_ids" not in keys:
            raise InvalidTypeError(f"{where} has no input_ids; its keys are {_listed(keys)}: {TOKENIZE_HINT}")
        if missing := [name for name in self._named if name not in keys]:
            raise InvalidInputError(
                f"{where} lacks {', '.join(missing)}, named in columns or sample_columns, or has null there; its keys "
                f"are {_listed(keys)}"
                ". (A sample that has no value for one of sample_columns has None there)"
            )
        unknown = [key for key in keys if key not in self._known]
        if made := [key for key in unknown if key in MADE_KEYS]:
            raise InvalidInputError(
                f"{where} has {_listed(made)}, which PackedDataset or PackedCollator makes from the pieces: remove "
                f"it, in a HF Dataset with remove_columns({_listed(made)})"
            )
        if unnamed := [key for key in unknown if not isinstance(key, str)]:
            raise InvalidInputError(
                f"{where} has the key {unnamed[0]!r}, which is {format_type(unnamed[0])}: keys of samples are strings"
            )
        if unknown and not self._drops_unknown:
            raise _unknown_keys(unknown, where, padding_of)
        if doubtful := [key for key in unknown if any(word in str(key).lower() for word in _WORDS_OF_LOSS)]:
            raise InvalidInputError(
                f"{where} has {_listed(doubtful)}, which by the name may say what is learned, and which "
                f"drop_columns={_UNKNOWN!r} leaves to you; the masks that PackedDataset knows are "
                f"{', '.join(MASK_KEYS)}: rename it to one of them, carry it with columns, or list in drop_columns all "
                "names to leave out"
            )
        masks = tuple(key for key in MASK_KEYS if key in keys)
        constants = tuple(key for key in CONSTANT_KEYS if key in keys and key not in self._named)
        is_plain = not (masks or constants or self._named)
        schema = self._schemas[keys] = _Schema(masks, constants, is_plain)
        return schema


def _unknown_keys(
    unknown: Sequence[Hashable], where: str, padding_of: Callable[[Any], Padding | None]
) -> InvalidInputError:
    """The error for keys that are not known: names the masks that are, and the arguments that carry or drop a key."""
    listed = _listed(unknown)
    paddings = {key: padding for key in listed if (padding := padding_of(key)) is not None}
    ways = [f"carry what a sample has once with sample_columns={listed}"]
    if paddings:
        ways.insert(
            0, f"carry what each token has with columns={paddings}, which gives the padding of each column"
        )
    dropped = _UNKNOWN if len(unknown) > len(listed) else listed
    return InvalidInputError(
        f"{where} has {listed}, which PackedDataset does not know; the masks that it knows are {', '.join(MASK_KEYS)}: "
        f"{'; '.join(ways)}; or leave out what is not needed with drop_columns={dropped!r}"
    )


def _listed(keys: Sequence[Hashable]) -> list[Hashable]:
    return sorted(keys, key=str)[:_SHOWN_KEYS]


# ---- What a source tells of its columns ----


def _told_columns(source: Any) -> Mapping[str, Padding | None] | None:
    """The columns that a source names before it is read, each with the padding of its type.

    Returns:
        None as a padding stands for a column that is no list of numbers. None altogether if the source does not tell,
        as a HF dataset that computes its rows.
    """
    # Of the sources that `open_samples` gives.
    if hasattr(source, "column_types"):
        types = source.column_types()
        return None if types is None else {name: _padding_of_type(kind) for name, kind in types.items()}
    if type(source).__module__.partition(".")[0] != "datasets":
        return None
    # A stream may not know its columns, and a column of a dataset has none.
    names = getattr(source, "column_names", None)
    if not isinstance(names, list) or not names:
        return None
    form = getattr(source, "format", None)
    if isinstance(form, Mapping):
        if form["type"] == "custom":
            return None
        names = names if form["output_all_columns"] else form["columns"]
    types = {field.name: field.type for field in source.features.arrow_schema}
    return {name: _padding_of_type(types[name]) for name in names}


def _padding_of_type(kind: Any) -> Padding | None:
    """The padding of a column of an Arrow type, None if it is no list of numbers."""
    try:
        return _PADDINGS.get(np.dtype(kind.value_type.to_pandas_dtype()).kind)
    except (AttributeError, NotImplementedError):
        return None


def _padding_of_value(value: Any) -> Padding | None:
    """The padding of a column that has this value in a sample, None if it is no list of numbers."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        # torch raises any of these for a tensor.
        return None
    return _PADDINGS.get(array.dtype.kind) if array.ndim == 1 else None


def _as_array(value: Any, key: str | None, dataset: int, number: int, kind: _Kind) -> NDArray[Any]:
    """The value of a sample's `key`, or the sample itself, as an array of one dimension.

    Raises:
        InvalidTypeError: It is none, or of another kind.
    """
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in kind.kinds:
        return value
    if type(value) is list and "i" in kind.kinds:
        # numpy makes the same array in three times the time.
        integers = _native.integers_of_list(value)
        if integers is not None:
            return integers
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} is a nested tensor, which holds several tensors: give each as a "
            "sample of its own"
        )
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
            f"{kind.name}{f'; {SHAPE_ADVICE}' if array.ndim > 1 else ''}"
        )
    if array.dtype.kind not in kind.kinds and array.size:
        raise InvalidTypeError(
            f"{name_sample(dataset, number, key)} is {format_type(value)} of dtype {array.dtype}: give {kind.dtypes}"
        )
    return array


# ---- The arguments that name columns ----


def dtype_of(padding: Padding) -> type[np.generic]:
    """The dtype of the column that a value pads."""
    if isinstance(padding, bool):
        return np.bool_
    return np.int64 if isinstance(padding, int) else np.float32


def _as_columns(columns: Any) -> dict[str, Padding]:
    """Check the argument `columns`, and return its padding values as Python's own numbers.

    Raises:
        InvalidTypeError: It is no mapping of names to numbers.
        InvalidInputError: A name has another meaning, or a padding value is beyond int64 or float32.
    """
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InvalidTypeError(
            f"columns is {format_type(columns)}: give the padding value of each column by its name, for example "
            "{'loss_weight': 0.0}"
        )
    checked: dict[str, Padding] = {}
    for name, padding in columns.items():
        _check_name(name, "columns")
        value = padding.item() if isinstance(padding, np.generic) else padding
        if not isinstance(value, bool | int | float):
            raise InvalidTypeError(
                f"columns[{name!r}] is {format_type(padding)}: give the padding value: a float for float32, "
                "an integer for int64, False for bool columns"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InvalidInputError(
                f"columns[{name!r}] is {format_integer(value)}, beyond the int64 of the column"
            )
        if isinstance(value, float) and math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
            raise InvalidInputError(f"columns[{name!r}] is {value}, beyond the float32 of the column")
        checked[name] = value
    return checked


def _as_sample_columns(names: Any, columns: Mapping[str, Padding]) -> tuple[str, ...]:
    """Check the argument `sample_columns`.

    Raises:
        InvalidTypeError: It is no list of names.
        InvalidInputError: A name has another meaning, or is among `columns` too.
    """
    if names is None:
        return ()
    if not isinstance(names, list | tuple):
        raise InvalidTypeError(
            f"sample_columns is {format_type(names)}: give a list of names, for example ['pixel_values']"
        )
    for name in names:
        _check_name(name, "sample_columns")
        if name in columns:
            raise InvalidInputError(
                f"{name!r} is in columns and in sample_columns: a sample has it for each token, or once"
            )
    return tuple(dict.fromkeys(names))


def _as_drop_columns(names: Any, carried: Sequence[str]) -> tuple[str, ...]:
    """Check the argument `drop_columns`, and return the names that it lists; `carried` are those of other arguments.

    Raises:
        InvalidTypeError: It is neither a list of names nor "unknown".
        InvalidInputError: A name has a meaning, or is carried.
    """
    if names is None or (isinstance(names, str) and names == _UNKNOWN):
        return ()
    if not isinstance(names, list | tuple):
        given = repr(names) if isinstance(names, str) else format_type(names)
        raise InvalidTypeError(
            f"drop_columns is {given}: give a list of names, for example ['id'], or {_UNKNOWN!r} for all that are not "
            "known"
        )
    for name in names:
        _check_is_name(name, "drop_columns")
        if name == "input_ids" or name in MEANINGFUL_KEYS:
            raise InvalidInputError(
                f"drop_columns names {name!r}, which has a meaning: without it, something else would be trained on. "
                "Take it out; or remove the column from the data, if that is meant"
            )
        if name in carried:
            raise InvalidInputError(
                f"{name!r} is in drop_columns, and in columns or sample_columns: a key is carried or left out"
            )
    return tuple(dict.fromkeys(names))


def _check_is_name(name: Any, argument: str) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(f"{argument} names {name!r}, which is {format_type(name)}: names are strings")


def _check_name(name: Any, argument: str) -> None:
    _check_is_name(name, argument)
    if name in ("input_ids", "labels"):
        why = "PackedDataset reads it in any case"
    elif name in MASK_KEYS:
        why = "PackedDataset makes labels of -100 of it"
    elif name == "attention_mask":
        why = "packs hold no padding, and a mask would let pieces see each other"
    elif name in _TAKEN_KEYS:
        why = "PackedDataset or PackedCollator makes it; rename the column"
    else:
        return
    raise InvalidInputError(f"{argument} names {name!r}: take it out, because {why}")
