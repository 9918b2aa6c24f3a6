"""`pack` and `pack_datasets`: from token lengths to a plan.

Owns the checks of their arguments and where the plan ends up: in memory, in a folder of its own, in a cache
(`tundish.packing.cache`), or built once a node for all ranks, in files or in memory that they share. What always
holds: arguments are refused before any work; a plan in a folder is published whole or not at all, and is the one that
the arguments ask for.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    PlanMismatchError,
)
from tundish.packing.block import as_block
from tundish.packing.cache import cached_plan, found_plan, is_there
from tundish.packing.columns import (
    IntegerArray,
    as_absolute,
    as_integer,
    as_integer_column,
    as_length_columns,
    as_new_folder,
    as_threads,
)
from tundish.packing.plan import PackPlan, plan_in_block
from tundish.progress import ProgressLine

__all__ = ["pack", "pack_datasets"]

MODES = ("hard",)
# Seconds that ranks wait for one another to hash or map; far beyond what either takes for 10^9 samples.
PATIENCE = 3600.0
PathLike = str | os.PathLike[str]
# Told how far long work is; what it raises ends that.
Tick = Callable[[str, int, int], None]


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
        lengths: tokens of each sample, shape (n,): a numpy array of any integer dtype (strided and
            memory-mapped ones too), a torch tensor, a pyarrow array, or a sequence. Read without a
            copy where it is an array, and kept, so that every `Piece.stop` of the plan is known. With the plan they
            are pickled in full, to every spawned worker, unless they are of `tundish.shm.node_shared` or mapped whole
            from a file. Nobody may write to it meanwhile.
        max_length: tokens a pack, at least 1.
        mode: "hard".
        seed: 0 … 2**32 - 1 to shuffle the samples exactly as
            `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` does; None keeps their order.
        order: the order itself: integers, shape (k,), each in 0 … n - 1 and none twice; a subset leaves
            samples out. With it the seed is not used.
        drop_last: leave out the tail shorter than a pack; False makes it a shorter last pack.
        threads: threads to compute on at most, 1 … 512; by default as many as processors that this process may run on.
        out: publish the plan as this folder, computing straight into its files: memory beyond the
            inputs stays bounded, whatever the size of the plan.
        cache_dir: look the plan up by its fingerprint in this folder, and publish it there if it is missing; also
            when a clean-up job removes it before it is mapped.
        share: in a torch.distributed run, a collective call: every rank calls it with the same
            arguments, one rank a node builds, all others map the files, or, without `out` and `cache_dir`, the same
            memory (see `tundish.shm.node_shared`). Without it the call is local.
        group: the process group that shares; by default all ranks.
        progress: show progress; by default on a terminal.

    Returns:
        The plan, mapped from its files with `out` or `cache_dir`, else in memory; with `share` there is one copy of its
        arrays a node, but not of the lengths that it keeps (see there). Too few tokens for a pack, or no samples at
        all, give the empty plan.

    Raises:
        InvalidTypeError: lengths, order, max_length, seed or threads are no integers, or another argument is of a type
            that it cannot be.
        InvalidInputError: a negative length, a total of 2**63 tokens or more, a bad order, an argument out of
            range, a plan larger than memory, lengths or an order that were found to change meanwhile.
        OutOfMemoryError: the system gave no more memory.
        AlreadyExistsError: `out`, or the plan's place in `cache_dir`, holds something else than this plan.
        PlanFormatError: the plan that lies there is damaged; the message names the file.
        NotFoundError: the parent of `out` does not exist, or the plan that lies there lacks a file.
        StorageError: the file system refused, or has less room than the plan takes: before any work, where it has
            not even that of the packs and pieces that the lengths make in whatever order, and else as it is written.
        PeerFailedError: with `share`, another rank failed, and the message carries its error; or ranks ask for
            different plans.
        KeyboardInterrupt: on Ctrl-C, within 100 ms; nothing half-written stays.

    >>> import numpy as np
    >>> plan = pack(np.array([5, 3, 9, 2]), 8)
    >>> len(plan), plan.stats()["tokens_dropped"]
    (2, 3)
    >>> plan[1]
    Pack(dataset_id=0, pieces=[Piece(sample=2, start=0, stop=8)])
    """

    def job() -> _native.PackRequest:
        column = as_integer_column(lengths, "lengths")
        return _job([column], max_length, mode, seed, order, drop_last, False, threads)

    return _plan(job, _Place(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress))


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

    Packs never span datasets, except with `global_pack`, where the datasets are one: sample
    indices count through, and `dataset_id` is 0. With a seed, the order of each dataset goes on in the
    same random stream, as one `numpy.random.RandomState(seed)` would that shuffles one after the other. A dataset
    too short for a pack contributes none.

    Args:
        lengths: for each dataset its lengths, as `pack` takes them.
        max_length: as in `pack`; so are all other arguments.
        mode: "hard".
        global_pack: pack all datasets as one.
        seed: see `pack`.
        drop_last: see `pack`; each dataset has a tail of its own.
        threads: see `pack`.
        out: see `pack`.
        cache_dir: see `pack`.
        share: see `pack`.
        group: see `pack`.
        progress: see `pack`.

    Raises:
        As `pack`.

    >>> import numpy as np
    >>> plan = pack_datasets([np.array([5, 3]), np.array([9])], 4)
    >>> plan.dataset_id.tolist()
    [0, 0, 1, 1]
    """

    def job() -> _native.PackRequest:
        columns = as_length_columns(lengths, single=False)
        return _job(columns, max_length, mode, seed, None, drop_last, global_pack, threads)

    return _plan(job, _Place(out=out, cache_dir=cache_dir, share=share, group=group, progress=progress))


def _job(
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
        "order": None if order is None else as_integer_column(order, "order"),
        "seed": None if seed is None else as_integer(seed, "seed", 0, 2**32 - 1),
        "max_length": as_integer(max_length, "max_length", 1, 2**63 - 1),
        "drop_last": drop_last,
        "global_pack": global_pack,
        "threads": as_threads(threads),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a plan is to end up, as the caller said it."""

    out: PathLike | None
    cache_dir: PathLike | None
    share: bool
    group: Any
    progress: bool | None

    @property
    def is_collective(self) -> bool:
        """Whether other ranks may wait for this one, also where `check` refuses what was given as `share`."""
        try:
            return bool(self.share)
        except (ValueError, RuntimeError, TypeError):
            # Arrays and tensors of several entries are neither true nor false.
            return True

    @property
    def is_memory(self) -> bool:
        return self.out is None and self.cache_dir is None

    def check(self) -> None:
        if not isinstance(self.share, bool):
            raise InvalidTypeError(f"share must be True or False, not {self.share!r}")
        if self.out is not None and self.cache_dir is not None:
            raise InvalidInputError("give out or cache_dir, not both: each says where the plan is to lie")
        if self.group is not None and not self.share:
            raise InvalidInputError("group has a meaning only with share=True")
        if self.out is not None:
            as_new_folder(self.out, "out")
        if self.cache_dir is not None:
            as_absolute(self.cache_dir, "cache_dir")

    def target(self, fingerprint: str) -> Path:
        """The folder of the plan with this fingerprint."""
        if self.cache_dir is None:
            return as_absolute(self.out, "out")
        return as_absolute(self.cache_dir, "cache_dir") / f"plan-{fingerprint}"


def _plan(checked: Callable[[], _native.PackRequest], place: _Place) -> PackPlan:
    if place.is_collective:
        return _shared(checked, place)
    with ProgressLine("pack", place.progress) as line:
        place.check()
        job = checked()
        if place.is_memory:
            facts, columns = _native.hard_pack(job, line.callback)
            return PackPlan(columns, facts, lengths=job["lengths"])
        if place.cache_dir is None:
            expected = _publish(job, place.target(""), line.callback, None)
        else:
            expected = _native.hard_plan_fingerprint(job, line.callback)
        return _mapped(job, place, expected, line)


def _shared(checked: Callable[[], _native.PackRequest], place: _Place) -> PackPlan:
    from tundish.distributed import Voter, voter_of

    # What this leaves lasts: of a rank that is gone by the next call, the others know it there.
    lasting = voter_of(place.group)
    lasting.vote(what="meeting to share a plan")
    # Ranks watch one another from here on; so this comes before any work, which may be killed.
    with ExitStack() as lines, Voter(place.group) as voter:
        # Arguments are checked within a vote too: a rank that got bad ones must not leave the others waiting.
        with voter.agreed("checking what to pack", timeout=PATIENCE):
            line = lines.enter_context(ProgressLine("pack", place.progress))
            place.check()
            job = checked()
            expected = _native.hard_plan_fingerprint(job, line.callback)
        # Of two plans that are both in the cache each rank would find its own.
        voter.vote(
            what="comparing the fingerprints of the plans asked for, and whether they are to lie in memory, which are "
            "equal where all ranks pass the same arguments, as share=True needs",
            same=f"{expected} in {'memory' if place.is_memory else 'files'}",
        )

        def tick(phase: str, done: int, total: int) -> None:
            # A builder waits for nobody, and would hear only when it is done that nobody waits for it any more.
            voter.raise_if_peer_lost()
            line.update(phase, done, total)

        if place.is_memory:
            # Nobody comes to its votes whom something ended within this call.
            with lasting.extra_failure_source(voter.lost_peer):
                return _shared_in_memory(job, expected, place, tick)
        target = place.target(expected)

        def build() -> None:
            if place.cache_dir is None:
                _publish(job, target, tick, expected)
            else:
                cached_plan(target, lambda: _publish(job, target, tick, expected))

        voter.build_once_per_node(build, what="building the plan")
        with voter.agreed("mapping the plan", timeout=PATIENCE):
            if not is_there(target):
                raise PlanMismatchError(
                    f"{target} is not there after one rank of this node built its plan: with share=True all ranks "
                    "must pass the same arguments and share one file system on a node, and nobody may remove the plan "
                    "meanwhile"
                )
            return _mapped(job, place, expected, line)


def _shared_in_memory(job: _native.PackRequest, expected: str, place: _Place, tick: Tick) -> PackPlan:
    from tundish.shm import SharedArray, node_shared

    def build() -> SharedArray:
        facts, columns = _native.hard_pack(job, tick, expected)
        left = list(columns)
        del columns
        return as_block(facts, left, tick)

    block = node_shared(build, key=f"plan {expected}", group=place.group)
    return plan_in_block(block, list(job["lengths"]))


def _publish(job: _native.PackRequest, target: Path, tick: Tick | None, expected: str | None) -> str:
    """Publish the plan as `target`, unless there is a plan already; the fingerprint that it should have.

    `expected`: that fingerprint, where the inputs were hashed before. Inputs that give another one by now publish
    nothing: what lies under the name of a plan, or is called so by all ranks, has to be that plan.
    """
    # Looked at first: a plan that is there needs no room on its disk.
    if not is_there(target / "plan.json"):
        try:
            return str(json.loads(_native.hard_pack_to_folder(job, target, tick, expected))["fingerprint"])
        except AlreadyExistsError:
            if not is_there(target / "plan.json"):
                raise
    return expected or _native.hard_plan_fingerprint(job, tick)


def _mapped(job: _native.PackRequest, place: _Place, expected: str, line: ProgressLine) -> PackPlan:
    target = place.target(expected)
    is_cached = place.cache_dir is not None
    plan = (
        cached_plan(target, lambda: _publish(job, target, line.callback, expected))
        if is_cached
        else found_plan(target)
    )
    if plan.fingerprint != expected:
        raise AlreadyExistsError(
            errno.EEXIST,
            f"holds another plan (fingerprint {plan.fingerprint}, not {expected}); "
            "choose another folder or remove this one",
            str(target),
        )
    return plan.with_lengths(job["lengths"])
