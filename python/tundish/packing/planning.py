"""`pack` and `pack_datasets`: compute a plan from token lengths, in memory, in a cache, or once a node for all ranks.

Options go to the compiled module as they are given; it checks them before any work.

Invariants: a plan is mapped whole or not at all. Anything else that lies in its place stays as it is, and the error
names it and says what to do. With `share`, everything that may fail on one rank runs within a vote, so that no rank
waits for one that failed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    PlanFormatError,
    PlanMismatchError,
    StorageError,
)
from tundish.packing.arguments import (
    as_absolute,
    as_integer_array,
    as_length_arrays,
    as_new_folder,
    check_sharing,
    make_folder,
)
from tundish.packing.plan import PackPlan, fields_of
from tundish.progress import ProgressLine

PathLike = str | os.PathLike[str]
# A request as the compiled module takes it: the arrays, and the options that were given.
Request = dict[str, Any]
# Receives the progress of long work: phase, done, total. An exception that it raises ends the work.
Tick = Callable[[str, int, int], None]
# Seconds that ranks wait for one another to hash or map: far more than 10^9 samples take.
TIMEOUT = 3600.0


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
    other modes leave all of them out. "ordered" and "sequential" number the packs in the order in which they were
    opened. The same inputs give the same plan, bit for bit, for any dtype, stride, number of threads and platform.

    Args:
        lengths: Tokens of each sample, shape (n,): a numpy array of any integer dtype, a torch tensor, a pyarrow array,
            or a sequence. Arrays, also strided and memory-mapped ones, are read without a copy. Do not write to them
            during the call. The plan keeps them, so that every `Piece.stop` is known. They are pickled in full with
            the plan, unless they come from `tundish.shm.node_shared` or are mapped whole from a file.
        max_length: Tokens of a pack, at least 1, and at most 2**28 in all modes but "hard". Packs of whole samples
            may have fewer.
        mode: "hard", "best_fit", "ordered" or "sequential". "hard" is the default because it takes samples of any
            length, and no token of a full pack is padding.
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
        remainder: How the number becomes a multiple. "drop", the default, leaves out the last packs of the largest
            dataset, but never all packs of one. "repeat" appends the first packs again. `plan.stats` counts both.
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
        InvalidInputError: A length is negative, all lengths add up to 2**63 tokens or more, or the order is bad. An
            argument is out of range or not one of the mode's. A sample is longer than `max_length` with
            `overlong="error"`, or costs more than `max_cost`. `multiple_of` would leave out all packs of a dataset.
            The plan is larger than memory, or the inputs changed during the call.
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
    options = {
        "max_length": max_length,
        "mode": mode,
        "seed": seed,
        "drop_last": drop_last,
        "overlong": overlong,
        "window": window,
        "max_samples": max_samples,
        "align": align,
        "max_cost": max_cost,
        "multiple_of": multiple_of,
        "remainder": remainder,
        "threads": threads,
    }

    def request() -> Request:
        return {
            "lengths": [as_integer_array(lengths, "lengths")],
            "order": None if order is None else as_integer_array(order, "order"),
            "costs": None if costs is None else as_length_arrays(costs, single=True, name="costs"),
            **options,
        }

    return _build(request, _Destination(out, cache_dir, share, group, progress))


def pack_datasets(
    lengths: Sequence[Any],
    max_length: int,
    *,
    global_pack: bool = False,
    costs: Any = None,
    **options: Any,
) -> PackPlan:
    """Plan training sequences over several datasets.

    Packs never span datasets, except with `global_pack`, which joins the datasets to one: sample indices count
    through, and `dataset_id` is 0. With a seed, one `numpy.random.RandomState(seed)` shuffles one dataset after the
    other. The packs of the first dataset come first. A dataset too short for a pack contributes none. If datasets
    need different modes, pack each and mix the plans (`tundish.mix`).

    Args:
        lengths: The lengths of each dataset, as `pack` takes them.
        max_length: As in `pack`.
        global_pack: Pack all datasets as one.
        costs: As in `pack`, a list with the costs of each dataset.
        **options: The other arguments of `pack`, but `order`. Each dataset has a tail and a window of its own.
            `multiple_of` counts the packs of all datasets together.

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
    if "order" in options:
        raise InvalidTypeError("pack_datasets takes no order: give a seed, or pack one dataset")

    places = {field.name: options.pop(field.name, field.default) for field in fields(_Destination)}

    def request() -> Request:
        return {
            "lengths": as_length_arrays(lengths, single=False),
            "costs": None if costs is None else as_length_arrays(costs, single=False, name="costs"),
            "max_length": max_length,
            "global_pack": global_pack,
            **options,
        }

    return _build(request, _Destination(**places))


@dataclass(frozen=True, slots=True)
class _Destination:
    """The arguments of `pack` that say where the plan ends up, as the caller gave them."""

    out: PathLike | None = None
    cache_dir: PathLike | None = None
    share: bool = False
    group: Any = None
    progress: bool | None = None

    @property
    def is_collective(self) -> bool:
        """Whether `share` may mean True; then a bad value is refused on all ranks together."""
        try:
            return bool(self.share)
        except (ValueError, RuntimeError, TypeError):
            # Arrays and tensors of several entries are neither true nor false.
            return True

    @property
    def is_memory(self) -> bool:
        """Whether the plan stays in memory."""
        return self.out is None and self.cache_dir is None

    def check(self) -> None:
        """Refuse arguments that contradict each other."""
        check_sharing(self.share, self.group)
        if self.out is not None and self.cache_dir is not None:
            raise InvalidInputError("give out or cache_dir, not both: each says where the plan is to lie")
        if self.out is not None:
            as_new_folder(self.out, "out")
        if self.cache_dir is not None:
            as_absolute(self.cache_dir, "cache_dir")

    def folder(self, fingerprint: str) -> Path:
        """The folder of the plan with this fingerprint."""
        if self.cache_dir is None:
            return as_absolute(self.out, "out")
        return as_absolute(self.cache_dir, "cache_dir") / f"plan-{fingerprint}"


def _build(request_of: Callable[[], Request], destination: _Destination) -> PackPlan:
    """Build the plan of the request that `request_of` makes; an error of it is one of the arguments."""
    start = time.perf_counter()
    build = _build_shared if destination.is_collective else _build_alone
    plan = build(request_of, destination)
    plan.log("plan" if plan.path is None else f"plan {plan.path}", start)
    return plan


def _build_alone(request_of: Callable[[], Request], destination: _Destination) -> PackPlan:
    with ProgressLine("pack", destination.progress) as line:
        destination.check()
        request = request_of()
        if destination.is_memory:
            metadata, columns = _native.pack(request, line.callback)
            return PackPlan(columns, metadata, lengths=request["lengths"])
        if destination.cache_dir is None:
            expected = publish_plan(request, destination.folder(""), line.callback, None)
        else:
            expected = _native.plan_fingerprint(request, line.callback)
        return map_plan(request, destination, expected, line.callback)


def path_exists(path: Path) -> bool:
    """Whether anything lies at `path`.

    Raises:
        StorageError: The file system refused to tell.
    """
    try:
        return path.exists()
    except OSError as error:
        raise StorageError(error.errno, f"cannot be examined: {error.strerror}", str(path)) from error


def publish_plan(request: Request, target: Path, tick: Tick | None, expected: str | None) -> str:
    """Publish the plan as `target`, unless there is a plan already, and return its fingerprint.

    Args:
        request: The checked arguments.
        target: The folder.
        tick: Receives progress.
        expected: The fingerprint that the inputs gave before. Inputs that give another one now publish nothing.
    """
    # An existing plan needs no room on the disk, so this comes first.
    if not path_exists(target / "plan.json"):
        try:
            metadata = _native.pack_to_folder(request, target, tick, expected)
            return str(json.loads(metadata)["fingerprint"])
        except AlreadyExistsError as error:
            if not path_exists(target / "plan.json"):
                reason = f"is no whole plan, and a plan cannot take its place: {error.strerror}; remove it"
                raise AlreadyExistsError(errno.EEXIST, reason, str(target)) from error
    return expected or _native.plan_fingerprint(request, tick)


def map_plan(request: Request, destination: _Destination, expected: str, tick: Tick | None) -> PackPlan:
    """Map the plan with the fingerprint `expected`; in a cache, build it if it is missing.

    Raises:
        PlanFormatError: The plan is damaged; the message names the file.
        NotFoundError: A part of it is missing.
        AlreadyExistsError: The folder holds something else.
        StorageError: The cache cannot be created or read.
    """
    target = destination.folder(expected)
    if destination.cache_dir is not None and not path_exists(target / "plan.json"):
        make_folder(target.parent, "cache_dir")
        # If another process publishes first, its plan is mapped.
        publish_plan(request, target, tick, expected)
    advice = f"to have it made again, remove {target} and make the same call"
    try:
        plan = PackPlan.map_folder(target, progress=False)
    except PlanFormatError as error:
        raise PlanFormatError(f"{error}; {advice}") from error
    except NotFoundError as error:
        raise NotFoundError(error.errno, f"{error.strerror}; {advice}", error.filename) from error
    if plan.fingerprint != expected:
        raise AlreadyExistsError(
            errno.EEXIST,
            f"holds another plan (fingerprint {plan.fingerprint}, not {expected}); "
            "choose another folder or remove this one",
            str(target),
        )
    return plan.with_lengths(request["lengths"])


def _build_shared(request_of: Callable[[], Request], destination: _Destination) -> PackPlan:
    """As `_build_alone`, on all ranks. Collective."""
    from tundish.distributed import Voter, same_arguments, voter_of

    # This voter stays for the next call, which then notices a rank that is gone.
    group_voter = voter_of(destination.group)
    group_voter.vote(what="starting to share a plan")
    # From here on ranks notice when another one is lost, so this comes before work in which a rank may be killed.
    with ExitStack() as progress_lines, Voter(destination.group) as voter:
        with voter.agreed("checking what to pack", timeout=TIMEOUT):
            line = progress_lines.enter_context(ProgressLine("pack", destination.progress))
            destination.check()
            request = request_of()
            expected = _native.plan_fingerprint(request, line.callback)
        # If two plans were both in the cache, each rank would find its own.
        voter.vote(
            what="comparing the plans that the ranks ask for (share=True needs the same arguments on all ranks), by "
            "fingerprint and destination",
            same=same_arguments(plan=expected, destination="memory" if destination.is_memory else "files"),
        )

        def tick(phase: str, done: int, total: int) -> None:
            # The builder takes part in no vote meanwhile. This stops it when a waiting rank is lost.
            voter.raise_if_peer_lost()
            line.update(phase, done, total)

        if destination.is_memory:
            try:
                return _build_in_memory(request, expected, destination, tick)
            except Exception:
                raise
            except BaseException:
                # The other ranks wait in votes of node_shared, which the group's voter holds.
                group_voter.close("was interrupted and is closed: make the process group anew")
                raise
        target = destination.folder(expected)

        def build() -> None:
            if destination.cache_dir is None:
                publish_plan(request, target, tick, expected)
            else:
                map_plan(request, destination, expected, tick)

        voter.build_once_per_node(build, what="building the plan")
        with voter.agreed("mapping the plan", timeout=TIMEOUT):
            if not path_exists(target):
                raise PlanMismatchError(
                    f"{target} is missing after one rank of this node built its plan: with share=True all ranks "
                    "must pass the same arguments and share one file system on a node, and no process may remove the "
                    "plan meanwhile"
                )
            return map_plan(request, destination, expected, line.callback)


def _build_in_memory(request: Request, expected: str, destination: _Destination, tick: Tick) -> PackPlan:
    """Build the plan on one rank of each node, and share its columns one by one."""
    from tundish.shm import node_shared

    built: list[NDArray[Any]] = []

    def first() -> NDArray[Any]:
        metadata, columns = _native.pack(request, tick, expected)
        built.extend(columns)
        return np.frombuffer(metadata.encode(), np.uint8)

    def share(what: str, build: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        return node_shared(build, key=f"plan {expected}: {what}", group=destination.group)

    metadata = bytes(share("plan.json", first)).decode()
    # Each column is freed on the builder when it is shared.
    fields = fields_of(json.loads(metadata)["overlong"])
    columns = [share(field, lambda: built.pop(0)) for field in fields]
    return PackPlan(columns, metadata, lengths=request["lengths"])
