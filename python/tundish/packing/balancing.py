"""`balance` and `micro_batches`: the samples of a training step, split; `shuffled_indices`: numpy's random orders."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import InvalidInputError
from tundish.packing.arguments import IntegerArray, as_integer, as_integer_array, check_flag

Indices = list[NDArray[np.int64]]

_COSTS = ("tokens", "attention")
_WHAT = "agreeing on the number of micro-batches"


def balance(lengths: Any, parts: int, *, cost: Any = "tokens", equal_counts: bool = False) -> Indices:
    """Split the samples of a step into parts of nearly equal cost, such as one part for each rank.

    The method is largest differencing (Karmarkar and Karp). The result depends on the arguments alone, so that every
    rank can compute it and take its own part. Time grows with the product of samples and parts.

    Args:
        lengths: Tokens of each sample, shape (n,), integers of any dtype, at least 0.
        parts: The number of parts, 1 … n.
        cost: "tokens", "attention", or integers of at least 0, shape (n,): the cost of each sample.
            With "attention" a sample of L tokens costs L² + 24576·L. A layer of hidden size h does 2·h operations for
            each pair of tokens and 12·h² for each token. Their ratio is 6·h, which is 24576 for the 4096 of a model of
            7 billion parameters. For another hidden size, pass `lengths * (lengths + 6 * h)` as int64.
        equal_counts: Give every part the same number of samples; n must be a multiple of `parts`.

    Returns:
        A list of `parts` int64 arrays of sample indices, none of them empty. Each index 0 … n - 1 is in one of them.
        An array's indices ascend. The heaviest part is first; of parts with equal costs, the one with the lowest index.

    Raises:
        InvalidTypeError: Lengths or costs are not integers, or another argument has the wrong type.
        InvalidInputError: A length or cost is negative; there are more parts than samples, or no parts; `cost` has
            another length than `lengths`; n is no multiple of `parts` with `equal_counts`; all costs together are 2^128
            or more.

    Example:
        >>> [part.tolist() for part in balance([7, 5, 4, 4, 2], 2)]
        [[0, 3], [1, 2, 4]]
    """
    checked = as_integer_array(lengths, "lengths")
    number = as_integer(parts, "parts", 1, 2**62)
    check_flag(equal_counts, "equal_counts")
    if not isinstance(cost, str):
        return _native.balanced_parts(checked, number, as_integer_array(cost, "cost"), False, equal_counts)
    if cost not in _COSTS:
        raise InvalidInputError(f'cost is {cost!r}; it must be "tokens", "attention" or an array of integers')
    return _native.balanced_parts(checked, number, None, cost == "attention", equal_counts)


def micro_batches(lengths: Any, max_tokens: int, *, same_count_on: Any = None) -> Indices:
    """Split the samples of a rank into few batches of at most `max_tokens` tokens each.

    The number of batches is ceil(sum(lengths) / max_tokens), the least that any split can have, if largest differencing
    into so many parts keeps the limit. Otherwise it is that of best-fit decreasing, which is close to the least. The
    batches are balanced by largest differencing where that keeps the limit.

    Args:
        lengths: Tokens of each sample of this rank, shape (n,), integers of any dtype, at least 0.
        max_tokens: The most tokens of a batch, at least 1.
        same_count_on: A `ProcessGroup` all of whose ranks get the same number of batches, the largest that one of them
            needs; the call is then collective. It uses the job's store, so the group's backend can be any, and no
            device is used. An error on one rank is raised on all. None: this rank alone.

    Returns:
        A list of int64 arrays of sample indices, none of them empty. Each index 0 … n - 1 is in one of them. An array's
        indices ascend. The batch with the most tokens is first; of equal batches, the one with the lowest index. So
        memory peaks in the first batch, and the ranks of a group process batches of similar size at the same time.

    Raises:
        InvalidTypeError: Lengths are not integers, or another argument has the wrong type.
        InvalidInputError: `lengths` is empty; a length is negative or above `max_tokens`; another rank needs more
            batches than this rank has samples; this rank is not in the group.
        PeerFailedError: Another rank of the group raised one of these errors, or was killed.
        VoteTimeoutError: A rank of the group did not make the call within half an hour.

    Example:
        >>> [batch.tolist() for batch in micro_batches([7, 5, 4, 4, 2], 12)]
        [[0, 3], [1, 2, 4]]
    """

    def split(count: int | None = None) -> Indices:
        checked = as_integer_array(lengths, "lengths")
        return _native.micro_batches(checked, as_integer(max_tokens, "max_tokens", 1, 2**63 - 1), count)

    if same_count_on is None:
        return split()
    from tundish.distributed import voter_of

    voter = voter_of(same_count_on)
    batches: Indices = []
    error = None
    try:
        batches = split()
    except BaseException as caught:  # noqa: BLE001 (the vote raises it again, Ctrl-C included)
        error = caught
    counts = voter.gather(str(len(batches)), error, what=_WHAT)
    largest = str(max(map(int, counts))) if counts else None
    count = int(voter.broadcast(largest, what=_WHAT))
    with voter.agreed(_WHAT):
        return batches if count == len(batches) else split(count)


def shuffled_indices(n: int, seed: int) -> IntegerArray:
    """Return the order of `n` samples in `pack(..., seed=seed)`.

    It equals `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` bit for bit, several times as fast.

    Args:
        n: How many samples, at least 0.
        seed: 0 … 2**32 - 1.

    Returns:
        A permutation of 0 … n - 1, shape (n,), int32 up to 2**31 samples, else int64.

    Raises:
        InvalidTypeError: An argument is not an integer.
        InvalidInputError: An argument is out of range.

    Example:
        >>> shuffled_indices(5, 0).tolist()
        [2, 0, 1, 3, 4]
    """
    return _native.shuffled_indices(as_integer(n, "n", 0, 2**62), as_integer(seed, "seed", 0, 2**32 - 1))
