"""`import_preset`: packs of a preset of XTuner v1 as a plan.

Invariants: every value of the files is checked against the lengths before the plan is made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, PlanFormatError, format_type
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.packing.arguments.integers import as_integer
from tundish.packing.arguments.paths import as_absolute
from tundish.packing.exchange.export import as_pack_order
from tundish.packing.exchange.xtuner_preset import BOUNDARIES, COLUMNS, PATHS, PIECES
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["import_preset"]


class ImportedPlan(PackPlan):
    """A plan of mode "preset", whose packs are given and not computed.

    It is read as any plan. It cannot be verified, because no algorithm made it, and is not saved as a plan folder: the
    folder that it was imported from stays.
    """

    def save(self, path: Any, *, progress: bool | None = None) -> NoReturn:  # noqa: ARG002 (of `PackPlan.save`)
        """Refuse.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "this plan was imported, and a plan folder says by which mode its packs were made: keep the folder that it "
            "was imported from"
        )

    def verify(self, lengths: Any = None, **options: Any) -> NoReturn:  # noqa: ARG002 (of `PackPlan.verify`)
        """Refuse.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "this plan was imported, so there is no mode to compute its packs again. The import compared all pieces "
            "with the lengths"
        )


def import_preset(
    path: str | os.PathLike[str],
    lengths: Sequence[Any] | Mapping[str, Any],
    max_length: int | None = None,
    *,
    pack_order: Any = None,
) -> PackPlan:
    """Read a preset of XTuner v1 (`pack_level="preset"`), as `export` and other tools write it.

    The packs may hold pieces of several datasets, and samples or parts of them more than once. The plan is in memory:
    `PackedDataset`, `PackedBatchSampler` and `export` take it. It cannot be verified or saved.

    Args:
        path: The folder with `boundaries.npy`, `samples.npy` and `paths.json`.
        lengths: The lengths of each dataset, as `td.pack_datasets` takes them. Either a mapping from the paths in
            `paths.json`, or a list in their order.
        max_length: Tokens a pack. By default those of the largest.
        pack_order: Numbers of packs in the order in which they are taken, integers, shape (k,), or the path of such a
            `.npy` file. The plan then has these packs in this order; it may repeat packs and leave some out.

    Returns:
        A plan with `mode == "preset"` and `global_pack == True`: sample indices count through the datasets, in the
        order of `paths.json`.

    Raises:
        NotFoundError: A file is missing.
        PlanFormatError: A file is damaged, or is no preset; the message names it.
        InvalidInputError: A dataset has no lengths, a piece is not within its sample, a pack is longer than
            `max_length`, the preset is of long texts that XTuner cuts by characters, or `pack_order` is out of range.
        InvalidTypeError: An argument is of a wrong type.

    Example:
        >>> import tempfile, tundish as td
        >>> folder, plan = tempfile.mkdtemp() + "/preset", td.pack([5, 3, 9], 8)
        >>> td.packing.export(plan, folder, "xtuner-preset", paths=["train.jsonl"])
        >>> again = td.packing.import_preset(folder, {"train.jsonl": [5, 3, 9]})
        >>> again[1]
        Pack(dataset_id=0, pieces=[Piece(sample=2, start=0, stop=8)])
    """
    folder = as_absolute(path, "path")
    names = _read_paths(folder / PATHS)
    arrays = _lengths_of_each(names, lengths)
    bounds = _load(folder / BOUNDARIES, dimensions=1).astype(np.int64, copy=False)
    pieces = _load(folder / PIECES, dimensions=2)
    _check_layout(folder, bounds, pieces)
    if pack_order is not None:
        bounds, pieces = _reordered(bounds, pieces, pack_order)
    columns = dict(zip(COLUMNS, np.ascontiguousarray(pieces.T, dtype=np.int64), strict=True))
    sample = _check_pieces(columns, arrays, names, folder / PIECES)
    start, stop = columns["start"], columns["stop"]
    sizes = stop - start
    tokens = np.add.reduceat(sizes, bounds[:-1]) if len(bounds) > 1 else np.empty(0, dtype=np.int64)
    most = _as_max_length(max_length, tokens)
    is_cut = sizes != _joined(arrays)[sample] if len(sample) else np.empty(0, dtype=bool)
    last = bounds[1:] - 1
    table = (
        np.zeros(len(tokens), dtype=np.int64),
        sample,
        bounds[1:],
        start[bounds[:-1]],
        stop[last],
        np.maximum.reduceat(sizes, bounds[:-1]) if len(tokens) else tokens,
        start,
        stop,
    )
    held = [_narrowed(column) for column in table]
    metadata = {
        "format_version": 1,
        "mode": "preset",
        "max_length": most,
        "global_pack": True,
        "order": "given",
        "seed": None,
        "samples": [len(array) for array in arrays],
        "tokens": int(sizes.sum()),
        "tokens_packed": int(sizes.sum()),
        "packs": len(tokens),
        "pieces": len(sample),
        # Pieces can be parts of samples, as those of split samples.
        "whole": {
            "overlong": "split",
            "window": None,
            "max_samples": None,
            "align": 1,
            "max_cost": None,
            "samples_empty": 0,
            "samples_overlong": len(np.unique(sample[is_cut])),
            "tokens_overlong_cut": 0,
            "padding_align": 0,
            "samples_packed": len(np.unique(sample)),
        },
        "fingerprint": _fingerprint(held, most, arrays),
    }
    return ImportedPlan(held, json.dumps(metadata), lengths=arrays)


def _read_paths(file: Path) -> list[str]:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(errno.ENOENT, "is missing, and every preset has one", str(file)) from error
    except ValueError as error:
        raise PlanFormatError(f"{file}: is no JSON ({error}), and so no preset of XTuner") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PlanFormatError(f"{file}: is no list of paths, and so no preset of XTuner")
    return names


def _lengths_of_each(names: list[str], lengths: Any) -> list[IntegerArray]:
    """The lengths of each dataset, in the order of `names`."""
    if isinstance(lengths, Mapping):
        missing = [name for name in names if name not in lengths]
        if missing:
            raise InvalidInputError(
                f"lengths has none for {missing[0]!r}: the preset is of the datasets {', '.join(map(repr, names))}"
            )
        given = [lengths[name] for name in names]
    elif isinstance(lengths, list | tuple):
        given = list(lengths)
        if len(given) != len(names):
            raise InvalidInputError(
                f"lengths has {len(given)} entries, and the preset is of {len(names)} datasets: give an array of the "
                f"lengths of each, in the order {', '.join(map(repr, names))}"
            )
    else:
        raise InvalidTypeError(
            f"lengths is {format_type(lengths)}: give the lengths of each dataset by its path, or a list of them"
        )
    return [as_integer_array(array, f"lengths[{number}]") for number, array in enumerate(given)]


def _joined(lengths: Sequence[IntegerArray]) -> NDArray[np.int64]:
    # Arrays of signed and of unsigned integers would become floats.
    return np.concatenate([array.astype(np.int64, copy=False) for array in lengths])


def _load(file: Path, dimensions: int) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r")
    except FileNotFoundError as error:
        raise NotFoundError(errno.ENOENT, "is missing, and every preset has one", str(file)) from error
    except (OSError, ValueError, EOFError) as error:
        raise PlanFormatError(f"{file}: is damaged or no .npy file ({error})") from error
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        raise PlanFormatError(
            f"{file}: holds {array.dtype} of shape {array.shape}, and a preset has integers in {dimensions} "
            f"dimension{'s' * (dimensions > 1)}"
        )
    return array


def _check_layout(folder: Path, bounds: NDArray[np.int64], pieces: NDArray[Any]) -> None:
    if pieces.shape[1] != len(COLUMNS):
        raise PlanFormatError(
            f"{folder / PIECES}: has {pieces.shape[1]} columns, and a preset has {len(COLUMNS)}"
        )
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(pieces):
        raise PlanFormatError(
            f"{folder / BOUNDARIES}: does not go from 0 to {len(pieces)}, the rows of {PIECES}: the preset is damaged"
        )
    falls = np.flatnonzero(bounds[1:] <= bounds[:-1])
    if len(falls):
        raise PlanFormatError(f"{folder / BOUNDARIES}: pack {falls[0]} has no pieces: the preset is damaged")


def _reordered(
    bounds: NDArray[np.int64], pieces: NDArray[Any], pack_order: Any
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The packs in another order."""
    is_file = isinstance(pack_order, str | os.PathLike)
    given = _load(Path(pack_order), 1) if is_file else pack_order
    order = as_pack_order(given, len(bounds) - 1, "preset")
    counts = (bounds[1:] - bounds[:-1])[order]
    found = np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(bounds[:-1][order] - found[:-1], counts) + np.arange(found[-1])
    return found, pieces[rows]


def _check_pieces(
    columns: Mapping[str, NDArray[np.int64]], lengths: Sequence[IntegerArray], names: list[str], file: Path
) -> NDArray[np.int64]:
    """Refuse pieces that are not within a sample; return the samples, counted through all datasets."""
    path, sample, start, stop = (columns[name] for name in ("path", "sample", "start", "stop"))
    _refuse_first(
        (columns["first_character"] != -1) | (columns["last_character"] != -1),
        file,
        lambda row: (
            f"is of characters {columns['first_character'][row]} to {columns['last_character'][row]}: XTuner cuts such "
            "long texts itself. Import presets of tokenized samples"
        ),
    )
    _refuse_first(
        (path < 0) | (path >= len(names)),
        file,
        lambda row: f"is of dataset {path[row]}, and {PATHS} has {len(names)}",
    )
    counts = np.array([len(array) for array in lengths])
    _refuse_first(
        (sample < 0) | (sample >= counts[path]) if len(path) else path != path,
        file,
        lambda row: (
            f"is of sample {sample[row]} of {names[path[row]]!r}, which has {counts[path[row]]}: give the lengths of "
            "the dataset that the preset was made for"
        ),
    )
    numbers = np.cumsum([0, *counts[:-1]])[path] + sample if len(path) else sample
    ends = _joined(lengths)[numbers] if len(path) else sample
    _refuse_first(
        (start < 0) | (stop <= start) | (stop > ends),
        file,
        lambda row: (
            f"takes the tokens {start[row]} to {stop[row]} of sample {sample[row]} of {names[path[row]]!r}, which has "
            f"{ends[row]}"
        ),
    )
    return numbers


def _refuse_first(wrong: NDArray[np.bool_], file: Path, describe: Any) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidInputError(f"{file}: row {row} {describe(row)}")


def _as_max_length(max_length: Any, tokens: NDArray[np.int64]) -> int:
    largest = int(tokens.max(initial=1))
    if max_length is None:
        return largest
    most = as_integer(max_length, "max_length", 1, 2**63 - 1)
    if largest > most:
        pack = int(np.argmax(tokens > most))
        raise InvalidInputError(f"pack {pack} holds {tokens[pack]} tokens, more than max_length={most}")
    return most


def _narrowed(column: NDArray[np.int64]) -> NDArray[Any]:
    fits = int(column.max(initial=0)) <= np.iinfo(np.int32).max
    return np.ascontiguousarray(column, dtype=np.int32 if fits else np.int64)


def _fingerprint(columns: Sequence[NDArray[Any]], max_length: int, lengths: Sequence[IntegerArray]) -> str:
    """32 hexadecimal digits of a hash of the packs and the lengths."""
    found = hashlib.blake2b(repr((max_length, [len(array) for array in lengths])).encode(), digest_size=16)
    for array in (*columns, *lengths):
        found.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return found.hexdigest()
