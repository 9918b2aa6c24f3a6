"""Loss weights, with which every token or every sample of a step counts alike, and the denominator of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.item import IGNORED_LABEL

_WHAT = "summing up the loss weights"
_ADVICE = "give the batches of PackedCollator, or others with labels or loss_weights"


def token_weights(
    learned: NDArray[np.bool_], bounds: NDArray[np.integer[Any]], by: str
) -> tuple[NDArray[np.float32], int]:
    """The weight of each token's loss, and the number of pieces without a token to learn from.

    Args:
        learned: Which tokens of the row are learned, (tokens,).
        bounds: Bounds of the pieces, (pieces + 1,), without padding after them.
        by: "tokens" for a weight of 1 a learned token, "samples" for weights that sum to 1 in each piece.

    Returns:
        The weights, float32, (tokens,), and the count.
    """
    weights = learned.astype(np.float32)
    counts = np.add.reduceat(learned[: bounds[-1]], bounds[:-1], dtype=np.int64)
    if by == "samples":
        weights[: bounds[-1]] /= np.maximum(counts, 1).repeat(np.diff(bounds))
    return weights, int((counts == 0).sum())


def num_items_in_batch(batches: Iterable[Mapping[str, Any]], *, group: Any = None) -> torch.Tensor:
    """The denominator of a step's loss: the number of learned tokens of all its batches, on all ranks.

    If a batch has loss weights, it is their sum: with `loss_weights="samples"` the number of pieces that have a learned
    token. It is what transformers' `Trainer` calls `num_items_in_batch`. The call is collective if there are several
    ranks. It uses the job's store, so the group's backend can be any. An error on one rank is raised on all.

    Args:
        batches: This rank's batches of the step, one for each accumulation step, as `PackedCollator` gave them.
        group: The `ProcessGroup` of the ranks whose gradients are averaged or summed. None: all ranks of the job.

    Returns:
        float64, (): the same on all ranks.

    Raises:
        InvalidTypeError: `batches` is one batch, or holds something else.
        InvalidInputError: A batch has neither labels nor loss weights.
        PeerFailedError: Another rank raised one of these errors, or was killed.
        VoteTimeoutError: A rank did not make the call within half an hour.

    Example:
        >>> import tundish as td
        >>> dataset = td.PackedDataset([[1, 2, 3], [4, 5]], td.pack([3, 2], max_length=5))
        >>> batch = td.PackedCollator()([dataset[0]])
        >>> td.packing.num_items_in_batch([batch, batch]).item()
        6.0
    """
    from tundish.distributed import voter_of

    voter = voter_of(group)
    total = 0.0
    error = None
    try:
        total = _summed(batches)
    except BaseException as caught:  # noqa: BLE001 (the vote raises it again, Ctrl-C included)
        error = caught
    whole = voter.combine(
        total.hex(), lambda sums: math.fsum(map(float.fromhex, sums)).hex(), error, what=_WHAT
    )
    return torch.tensor(float.fromhex(whole), dtype=torch.float64)


def _summed(batches: Any) -> float:
    if isinstance(batches, Mapping | str) or not isinstance(batches, Iterable):
        raise InvalidTypeError(
            f"batches is {format_type(batches)}: give a list of batches, one for each accumulation step"
        )
    sums = []
    are_weighted = None
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise InvalidTypeError(f"batch {number} is {format_type(batch)}: {_ADVICE}")
        is_weighted = "loss_weights" in batch
        if are_weighted not in (None, is_weighted):
            has, others = ("loss_weights", "have none") if is_weighted else ("no loss_weights", "have some")
            raise InvalidInputError(
                f"batch {number} has {has}, and the batches before it {others}: make all by one collator"
            )
        are_weighted = is_weighted
        weights = _weights_of(batch)
        if weights is None:
            raise InvalidInputError(f"batch {number} has no labels: {_ADVICE}")
        sums.append(weights.sum(dtype=torch.float64).item())
    return math.fsum(sums)


def _weights_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The weights of the learned tokens of a batch, or whether each token is one; None if nothing says it."""
    # The split over context-parallel ranks has shifted those that begin with `shift_`.
    for key in ("shift_loss_weights", "loss_weights", "shift_labels", "labels"):
        found = batch.get(key)
        if isinstance(found, torch.Tensor):
            if key == "labels":
                # No token predicts the first one.
                found = found[..., 1:]
            return found if key.endswith("weights") else found != IGNORED_LABEL
    return None


def weighted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_weights: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    shift_labels: torch.Tensor | None = None,
    shift_loss_weights: torch.Tensor | None = None,
    **_ignored: Any,
) -> torch.Tensor:
    """The weighted cross-entropy of the next tokens, divided by the sum of the weights.

    transformers' models take it as their `loss_function`: its arguments are those that they pass.

    Args:
        logits: What the model gives for each token, (1, tokens, vocabulary), computed in float32.
        labels: The labels of the tokens themselves, int64, (1, tokens); the loss shifts them.
        loss_weights: The weight of each label, (1, tokens), as `PackedCollator(loss_weights=...)` gives it.
        num_items_in_batch: What to divide by, as `td.packing.num_items_in_batch` gives it. None: the sum of the
            weights. A denominator of 0 gives a loss of 0.
        shift_labels: Labels that are shifted already, as `td.packing.context_parallel` gives them.
        shift_loss_weights: Their weights.
        **_ignored: Further arguments that models pass, such as `vocab_size`.

    Returns:
        The loss, float32, ().

    Raises:
        InvalidInputError: The weights are not as many as the labels, or `shift_labels` come without their weights.

    Example:
        >>> import torch
        >>> logits, labels = torch.zeros(1, 3, 10), torch.tensor([[-100, 4, 5]])
        >>> loss = weighted_loss(logits, labels, loss_weights=torch.tensor([[0.0, 0.5, 0.5]]))
        >>> round(loss.item(), 4)  # ln 10
        2.3026
    """
    if shift_labels is None:
        targets, weights = labels[..., 1:], loss_weights[..., 1:]
        logits = logits[..., :-1, :]
    elif shift_loss_weights is None:
        raise InvalidInputError("shift_labels come without shift_loss_weights: give both, or none")
    else:
        targets, weights = shift_labels, shift_loss_weights
    if weights.shape != targets.shape:
        raise InvalidInputError(
            f"the loss weights have the shape {tuple(weights.shape)}, and the labels {tuple(targets.shape)}: a label "
            "has one weight"
        )
    # Cross-entropy is 0 where the label is -100.
    losses = functional.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten().to(logits.device), reduction="none"
    )
    weights = weights.flatten().to(losses)
    items = weights.sum() if num_items_in_batch is None else num_items_in_batch
    items = torch.as_tensor(items).to(losses)
    return (losses * weights).sum() / torch.where(items == 0, 1, items)
