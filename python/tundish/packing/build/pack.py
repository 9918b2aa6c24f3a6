"""`pack` and `pack_datasets`: compute a plan from token lengths.

Arguments are checked before any work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array, as_length_arrays
from tundish.packing.arguments.integers import as_integer, as_threads
from tundish.packing.build.destination import PlanDestination
from tundish.packing.build.local import build_local_plan
from tundish.packing.build.shared import build_shared_plan
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["pack", "pack_datasets"]

MODES = ("hard",)
PathLike = str | os.PathLike[str]


def pack(
    lengths: Any,
    max_length: int,
    *,
    mode: str = "hard",
    seed: int | None = None,
    order: Any = None,
    drop_last: bool = True,
    threads: int | None = None,
    out: PathLike | None = None,
    cache_dir: PathLike | None = None,
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackPlan:
    """Plan fixed-length sequences over the samples of one dataset.

    Hard packing: the samples, in order, are one stream of tokens, cut every `max_length` tokens.
    Pack *i* holds the tokens `i * max_length` … `(i + 1) * max_length - 1` of the stream. Samples of
    length 0 inside a pack are pieces of it; those on a boundary belong to no pack. The same
    inputs give the same plan, bit for bit, for any dtype, stride, number of threads and platform.

    Args:
        lengths: Tokens of each sample, shape (n,): a numpy array of any integer dtype (strided and
            memory-mapped ones too), a torch tensor, a pyarrow array, or a sequence. Arrays are read without a copy.
            The plan keeps them, so that every `Piece.stop` is known, and they are pickled in full with the plan,
            unless they come from `tundish.shm.node_shared` or are mapped whole from a file. Do not write to them
            during the call.
        max_length: Tokens a pack, at least 1.
        mode: "hard".
        seed: 0 … 2**32 - 1 to shuffle the samples exactly as
            `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` does. None keeps their order.
        order: The order itself: integers, shape (k,), each in 0 … n - 1, and no two the same. A subset leaves
            samples out. With an order the seed is not used.
        drop_last: Leave out the tail shorter than a pack. False makes it a shorter last pack.
        threads: Threads to compute on at most, 1 … 512. The default is the number of processors that this process
            may run on.
        out: Publish the plan as this folder. The plan is computed straight into its files, so that memory beyond
            the inputs stays bounded.
        cache_dir: Look the plan up by its fingerprint in this folder, and publish it there if it is missing.
        share: Make the call collective over the ranks of a torch.distributed job. Every rank passes the same
            arguments. One rank a node builds the plan, and all ranks map its files, or, without `out` and
            `cache_dir`, the same memory (see `tundish.shm.node_shared`).
        group: The process group that shares; by default all ranks.
        progress: Show progress; by default on a terminal.

    Returns:
        The plan, mapped from its files with `out` or `cache_dir`, else in memory. With `share` a node has one copy of
        its arrays. Too few tokens for a pack give an empty plan.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: A length is negative, all lengths add up to 2**63 tokens or more, the order is bad, an
            argument is out of range, the plan is larger than memory, or the inputs changed during the call.
        OutOfMemoryError: The system gave no more memory.
        AlreadyExistsError: `out`, or the plan's place in `cache_dir`, holds something else than this plan.
        PlanFormatError: The plan that lies there is damaged; the message names the file.
        NotFoundError: The parent of `out` does not exist, or the plan that lies there lacks a file.
        StorageError: The file system refused, or is full. A disk that cannot even hold the least that the lengths
            can make is refused before any work.
        PeerFailedError: With `share`, another rank failed, and the message carries its error; or ranks ask for
            different plans.
        KeyboardInterrupt: On Ctrl-C, within 100 ms; nothing half-written stays.

    Example:
        >>> import numpy as np
        >>> plan = pack(np.array([5, 3, 9, 2]), 8)
        >>> len(plan), plan.stats()["tokens_dropped"]
        (2, 3)
        >>> plan[1]
        Pack(dataset_id=0, pieces=[Piece(sample=2, start=0, stop=8)])
    """

    def request() -> _native.PackRequest:
        array = as_integer_array(lengths, "lengths")
        return _request([array], max_length, mode, seed, order, drop_last, False, threads)

    return _build(
        request, PlanDestination(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress)
    )


def pack_datasets(
    lengths: Sequence[Any],
    max_length: int,
    *,
    mode: str = "hard",
    global_pack: bool = False,
    seed: int | None = None,
    drop_last: bool = True,
    threads: int | None = None,
    out: PathLike | None = None,
    cache_dir: PathLike | None = None,
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackPlan:
    """Plan fixed-length sequences over several datasets.

    Packs never span datasets, except with `global_pack`, which joins the datasets to one: sample indices count
    through, and `dataset_id` is 0. With a seed, one `numpy.random.RandomState(seed)` shuffles one dataset after the
    other. A dataset too short for a pack contributes none.

    Args:
        lengths: The lengths of each dataset, as `pack` takes them.
        max_length: Tokens a pack, at least 1.
        mode: "hard".
        global_pack: Pack all datasets as one.
        seed: As in `pack`, in one random stream over all datasets.
        drop_last: As in `pack`; each dataset has a tail of its own.
        threads: As in `pack`.
        out: As in `pack`.
        cache_dir: As in `pack`.
        share: As in `pack`.
        group: As in `pack`.
        progress: As in `pack`.

    Returns:
        The plan, as `pack` returns it.

    Raises:
        TundishError: As `pack`.

    Example:
        >>> import numpy as np
        >>> plan = pack_datasets([np.array([5, 3]), np.array([9])], 4)
        >>> plan.dataset_id.tolist()
        [0, 0, 1, 1]
    """

    def request() -> _native.PackRequest:
        arrays = as_length_arrays(lengths, single=False)
        return _request(arrays, max_length, mode, seed, None, drop_last, global_pack, threads)

    return _build(
        request, PlanDestination(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress)
    )


def _request(
    lengths: list[IntegerArray],
    max_length: Any,
    mode: str,
    seed: Any,
    order: Any,
    drop_last: Any,
    global_pack: Any,
    threads: Any,
) -> _native.PackRequest:
    if not isinstance(mode, str):
        raise InvalidTypeError(f"mode must be the name of one, {', '.join(map(repr, MODES))}, not {mode!r}")
    if mode not in MODES:
        raise InvalidInputError(f"mode is {mode!r}; the modes are {', '.join(map(repr, MODES))}")
    for name, flag in (("drop_last", drop_last), ("global_pack", global_pack)):
        if not isinstance(flag, bool):
            raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")
    return {
        "lengths": lengths,
        "order": None if order is None else as_integer_array(order, "order"),
        "seed": None if seed is None else as_integer(seed, "seed", 0, 2**32 - 1),
        "max_length": as_integer(max_length, "max_length", 1, 2**63 - 1),
        "mode": mode,
        "drop_last": drop_last,
        "overlong": "error",
        "window": 64,
        "max_samples": None,
        "align": 1,
        "global_pack": global_pack,
        "threads": as_threads(threads),
    }


def _build(request: Callable[[], _native.PackRequest], destination: PlanDestination) -> PackPlan:
    if destination.is_collective:
        return build_shared_plan(request, destination)
    return build_local_plan(request, destination)
