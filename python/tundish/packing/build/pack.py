"""`pack` and `pack_datasets`: compute a plan from token lengths.

Arguments are checked before any work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tundish import _native
from tundish.packing.build.destination import PlanDestination
from tundish.packing.build.pack_arguments import PackArguments
from tundish.packing.build.plan_folders import map_plan, publish_plan
from tundish.packing.build.shared import build_shared_plan
from tundish.packing.plan import PackPlan
from tundish.progress import ProgressLine

__all__ = ["pack", "pack_datasets"]

PathLike = str | os.PathLike[str]


def pack(
    lengths: Any,
    max_length: int,
    *,
    mode: str = "hard",
    seed: int | None = None,
    order: Any = None,
    drop_last: bool | None = None,
    overlong: str | None = None,
    window: int | None = None,
    max_samples: int | None = None,
    align: int = 1,
    costs: Any = None,
    max_cost: int | None = None,
    multiple_of: int | None = None,
    remainder: str | None = None,
    threads: int | None = None,
    out: PathLike | None = None,
    cache_dir: PathLike | None = None,
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackPlan:
    """Plan training sequences over the samples of one dataset.

    | mode | packs |
    |---|---|
    | "hard" | The samples, in order, are one stream of tokens, cut every `max_length` tokens. |
    | "best_fit" | Whole samples: best-fit decreasing over all samples. The packs come in random order. |
    | "ordered" | Whole samples: each goes into the fullest pack with room for it, of the last `window` packs. |
    | "sequential" | Whole samples, in order: a sample that does not fit opens the next pack. |

    In hard packing, samples of length 0 inside a pack are pieces of it; those on a boundary belong to no pack. The
    other modes leave all of them out. The same inputs give the same plan, bit for bit, for any dtype, stride, number
    of threads and platform.

    Args:
        lengths: Tokens of each sample, shape (n,): a numpy array of any integer dtype, a torch tensor, a pyarrow array,
            or a sequence. Arrays, also strided and memory-mapped ones, are read without a copy. Do not write to them
            during the call. The plan keeps them, so that every `Piece.stop` is known. They are pickled in full with
            the plan, unless they come from `tundish.shm.node_shared` or are mapped whole from a file.
        max_length: Tokens of a pack, at least 1, and at most 2**28 in all modes but "hard". Packs of whole samples
            may have fewer.
        mode: "hard", "best_fit", "ordered" or "sequential".
        seed: 0 … 2**32 - 1 to shuffle the samples exactly as
            `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` does. None keeps their order. In "best_fit" the
            seed shuffles the samples of each length, and the packs.
        order: The order itself: integers, shape (k,), each in 0 … n - 1, and no two the same. A subset leaves
            samples out. With an order the seed is not used.
        drop_last: For "hard" only, which takes None as True: leave out the tail shorter than a pack. False makes it a
            shorter last pack.
        overlong: For whole samples only: what happens to samples longer than `max_length`. "error", the default,
            refuses them. "split" cuts them into parts of `max_length` and a rest, which are packed like samples.
            "truncate" takes their first `max_length` tokens. "drop" leaves them out.
        window: For "ordered" only: open packs, 1 … 2**16, by default 64. A sample moves by at most `window` packs.
            The window, rounded up to a power of two, times `max_length` must be below 2**31.
        max_samples: For whole samples only: the most pieces of a pack.
        align: For whole samples only: each piece takes a multiple of so many tokens of its pack. `max_length` must be
            a multiple of it. The plan leaves room for this padding and counts it; your collator adds it.
        costs: For whole samples only: a second quantity that limits a pack, such as images, patches or squares of
            lengths: integers, shape (n,), one a sample, each 0 … `max_cost`. Not with `overlong="split"`. "best_fit"
            then places the samples one by one, the longest first. Each goes into the pack with the least room, of
            those that it fits by tokens and by cost.
        max_cost: The most that the samples of a pack cost together.
        multiple_of: Make the number of packs a multiple of this, 1 … 2**20: for example of the global batch.
        remainder: How the number becomes a multiple. "drop", the default, leaves out the emptiest packs; of packs
            that are equally full, the last ones. "repeat" appends the first packs again. `plan.stats` counts both.
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
        its arrays. No tokens, or too few for a pack of "hard", give an empty plan.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: A length is negative, all lengths add up to 2**63 tokens or more, the order is bad, an
            argument is out of range or not one of the mode's, a sample is longer than `max_length` with
            `overlong="error"` or costs more than `max_cost`, the plan is larger than memory, or the inputs changed
            during the call.
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
        >>> whole = pack([5, 3, 9, 2], 10, mode="sequential")
        >>> [[piece.sample for piece in pack.pieces] for pack in whole]
        [[0, 1], [2], [3]]
    """
    arguments = PackArguments(
        lengths=lengths,
        is_single=True,
        max_length=max_length,
        mode=mode,
        seed=seed,
        order=order,
        drop_last=drop_last,
        overlong=overlong,
        window=window,
        max_samples=max_samples,
        align=align,
        costs=costs,
        max_cost=max_cost,
        multiple_of=multiple_of,
        remainder=remainder,
        threads=threads,
    )
    return _build(
        arguments, PlanDestination(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress)
    )


def pack_datasets(
    lengths: Sequence[Any],
    max_length: int,
    *,
    mode: str | Sequence[str] = "hard",
    global_pack: bool = False,
    seed: int | None = None,
    drop_last: bool | None = None,
    overlong: str | None = None,
    window: int | None = None,
    max_samples: int | None = None,
    align: int = 1,
    costs: Any = None,
    max_cost: int | None = None,
    multiple_of: int | None = None,
    remainder: str | None = None,
    threads: int | None = None,
    out: PathLike | None = None,
    cache_dir: PathLike | None = None,
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackPlan:
    """Plan training sequences over several datasets.

    Packs never span datasets, except with `global_pack`, which joins the datasets to one: sample indices count
    through, and `dataset_id` is 0. With a seed, one `numpy.random.RandomState(seed)` shuffles one dataset after the
    other. The packs of the first dataset come first. A dataset too short for a pack contributes none.

    Args:
        lengths: The lengths of each dataset, as `pack` takes them.
        max_length: As in `pack`.
        mode: As in `pack`, or a list with a mode for each dataset: for example texts cut "hard", and samples with
            images kept whole. Different modes make a plan of mode "mixed". Each dataset is then packed as `pack` packs
            it alone, with the same seed. An option applies to the datasets whose mode has it.
        global_pack: Pack all datasets as one.
        seed: As in `pack`, in one random stream over all datasets.
        drop_last: As in `pack`; each dataset has a tail of its own.
        overlong: As in `pack`.
        window: As in `pack`; each dataset has a window of its own.
        max_samples: As in `pack`.
        align: As in `pack`.
        costs: As in `pack`, a list with the costs of each dataset; None for those of mode "hard" among others.
        max_cost: As in `pack`.
        multiple_of: As in `pack`, for the packs of all datasets together.
        remainder: As in `pack`; of packs that are equally full, those of the dataset with the most packs are left out.
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
        >>> texts_and_images = pack_datasets([[5, 9], [3, 4, 6]], 7, mode=["hard", "best_fit"])
        >>> [[piece.sample for piece in pack.pieces] for pack in texts_and_images]
        [[0, 1], [1], [2], [1, 0]]
    """
    arguments = PackArguments(
        lengths=lengths,
        is_single=False,
        max_length=max_length,
        mode=mode,
        seed=seed,
        drop_last=drop_last,
        overlong=overlong,
        window=window,
        max_samples=max_samples,
        align=align,
        costs=costs,
        max_cost=max_cost,
        multiple_of=multiple_of,
        remainder=remainder,
        global_pack=global_pack,
        threads=threads,
    )
    return _build(
        arguments, PlanDestination(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress)
    )


def _build(arguments: PackArguments, destination: PlanDestination) -> PackPlan:
    if destination.is_collective:
        return build_shared_plan(arguments, destination)
    with ProgressLine("pack", destination.progress) as line:
        destination.check()
        request = arguments.checked()
        if destination.is_memory:
            metadata, columns = _native.pack(request, line.callback)
            return PackPlan(columns, metadata, lengths=request["lengths"])
        if destination.cache_dir is None:
            expected = publish_plan(request, destination.folder(""), line.callback, None)
        else:
            expected = _native.plan_fingerprint(request, line.callback)
        return map_plan(request, destination, expected, line.callback)
