"""`context_parallel`: the split of a batch over context-parallel ranks, and its inverse.

Invariants: a piece is cut into `2 * world` equal chunks. A rank has chunk `rank`, and then chunk
`2 * world - 1 - rank`, so that causal attention costs every rank the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import as_integer

# Keys of a batch that have one entry a token.
_PER_TOKEN = ("input_ids", "labels", "position_ids", "seq_idx", "loss_weights")
_IGNORED_LABEL = -100
_MOST_RANKS = 2**20


def context_parallel(
    batch: Mapping[str, Any], rank: int, world: int, *, columns: Sequence[str] = ()
) -> dict[str, Any]:
    """A context-parallel rank's part of a batch: of each piece, one chunk from its front and one from its back.

    Each piece is cut into 2 × world equal chunks. The rank takes number `rank` and number 2 × world - 1 - `rank`, so
    that causal attention costs all ranks the same. Megatron-LM's `get_batch_on_this_cp_rank` splits whole sequences in
    this way. Transformer Engine's `thd_get_partitioned_indices` and torch's `_PerDocumentHeadTailLoadBalancer` split
    packed ones.

    Every piece must have a multiple of 2 × world tokens. Make the plan with `align=2 * world`, and pad rows to a
    multiple of it.

    Args:
        batch: What `PackedCollator(return_flash_attn_kwargs=True)` gave, with `attention="none"`. The same on all ranks
            of the context-parallel group.
        rank: The context-parallel rank, 0 … world - 1.
        world: The number of context-parallel ranks.
        columns: Names of the dataset's `columns`, whose entries are split, too.

    Returns:
        A new dict. `input_ids`, `labels`, `position_ids`, `seq_idx`, `loss_weights` and the columns hold this rank's
        tokens, their last dimension divided by `world`. A loss cannot shift labels whose successors are on another
        rank. So `shift_labels` is new: the label of each token's successor, which transformers' models take. So is
        `shift_loss_weights`, if the batch has loss weights. Anything else is unchanged: `cu_seq_lens_q` and
        `cu_seq_lens_k` bound the whole pieces, as Transformer Engine expects.

    Raises:
        InvalidTypeError: An argument is of a wrong type.
        InvalidInputError: The rank is not below `world`; the batch has no labels or bounds, or an attention mask; its
            bounds do not rise from 0 to its tokens; an entry has not one value a token; or the tokens of a piece are no
            multiple of 2 × world.

    Example:
        >>> import tundish as td
        >>> plan = td.pack([7, 3], max_length=12, mode="sequential", align=4)
        >>> dataset = td.PackedDataset([[1, 2, 3, 4, 5, 6, 7], [11, 12, 13]], plan)
        >>> batch = td.PackedCollator(return_flash_attn_kwargs=True)([dataset[0]])
        >>> [td.packing.context_parallel(batch, rank, 2)["input_ids"].tolist() for rank in range(2)]
        [[[1, 2, 7, 0, 11, 0]], [[3, 4, 5, 6, 12, 13]]]
    """
    ranks = as_integer(world, "world", 1, _MOST_RANKS)
    number = as_integer(rank, "rank", 0, ranks - 1)
    if not isinstance(batch, Mapping):
        raise InvalidTypeError(f"batch is {format_type(batch)}: give a batch of PackedCollator")
    if "attention_mask" in batch:
        raise InvalidInputError(
            'the batch has an attention_mask, whose rows and columns are on several ranks: use attention="none"; '
            "context-parallel attention takes the bounds of the pieces"
        )
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise InvalidTypeError("columns is no list of names: give the names of the dataset's columns")
    if missing := [name for name in columns if name not in batch]:
        raise InvalidInputError(f"the batch has no {', '.join(missing)}, named in columns")
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.ndim:
        raise InvalidInputError("the batch has no labels, which are shifted before they are split: keep them")
    bounds = batch.get("cu_seq_lens_q")
    if not isinstance(bounds, torch.Tensor):
        raise InvalidInputError(
            "the batch has no cu_seq_lens_q, the bounds of its pieces: give the collator return_flash_attn_kwargs=True"
        )
    tokens = labels.shape[-1]
    places = _places(_checked_bounds(bounds, tokens), number, ranks).to(labels.device)
    whole = dict(batch)
    whole["shift_labels"] = functional.pad(labels[..., 1:], (0, 1), value=_IGNORED_LABEL)
    split = [key for key in (*_PER_TOKEN, "shift_labels", *columns) if key in whole]
    for key in split:
        value = whole[key]
        if not isinstance(value, torch.Tensor) or value.shape[-1:] != (tokens,):
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else format_type(value)
            raise InvalidInputError(
                f"{key} of the batch is {found}, and has no entry for each of {tokens} tokens: take it out, or make "
                "the batch with PackedCollator"
            )
    if "loss_weights" in whole:
        whole["shift_loss_weights"] = functional.pad(whole["loss_weights"][..., 1:], (0, 1))
        split.append("shift_loss_weights")
    return whole | {key: whole[key].index_select(-1, places.to(whole[key].device)) for key in split}


def undo_context_parallel(
    parts: Sequence[torch.Tensor], cu_seq_lens: torch.Tensor, *, dim: int = 1
) -> torch.Tensor:
    """Put the parts of all context-parallel ranks back into the order of the tokens.

    Args:
        parts: One tensor for each rank, in the order of the ranks, with that rank's tokens along `dim`.
        cu_seq_lens: The bounds of the whole pieces, (pieces + 1,), as `cu_seq_lens_q` of the batch.
        dim: The dimension of the tokens.

    Returns:
        A tensor of the parts' shape, but with all tokens along `dim`. Gradients flow through it.

    Raises:
        InvalidTypeError: `parts` is no list of tensors, or the bounds are no tensor of integers.
        InvalidInputError: `parts` is empty, or their shapes do not fit together or to the bounds. Or the bounds do not
            rise from 0, or the tokens of a piece are no multiple of twice the number of parts.

    Example:
        >>> import torch
        >>> parts = [torch.tensor([[1, 2, 7, 8]]), torch.tensor([[3, 4, 5, 6]])]
        >>> undo_context_parallel(parts, torch.tensor([0, 8])).tolist()
        [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    if not isinstance(parts, list | tuple):
        raise InvalidTypeError(f"parts is {format_type(parts)}: give a list of one tensor for each rank")
    if not parts:
        raise InvalidInputError("parts is empty: give one tensor for each rank")
    for rank, part in enumerate(parts):
        if not isinstance(part, torch.Tensor):
            raise InvalidTypeError(f"parts[{rank}] is {format_type(part)}: give one tensor for each rank")
    world, first = len(parts), parts[0]
    dim = as_integer(dim, "dim", -first.ndim, first.ndim - 1)
    bounds = _checked_bounds(cu_seq_lens, None)
    places = torch.cat([_places(bounds, rank, world) for rank in range(world)])
    each = len(places) // world
    expected = list(first.shape)
    expected[dim] = each
    for rank, part in enumerate(parts):
        if part.shape != torch.Size(expected):
            raise InvalidInputError(
                f"parts[{rank}] has the shape {tuple(part.shape)}, and a rank has {each} tokens of the pieces, which "
                f"makes {tuple(expected)}: give the part of each of the {world} ranks, and the bounds of the whole "
                "pieces"
            )
    joined = torch.cat([part.to(first.device) for part in parts], dim)
    return joined.index_select(dim, places.argsort().to(joined.device))


def _checked_bounds(bounds: Any, tokens: int | None) -> torch.Tensor:
    """The bounds of pieces as int64 on the CPU. None for `tokens` allows any number of them."""
    if not isinstance(bounds, torch.Tensor) or bounds.dtype.is_floating_point or bounds.dtype is torch.bool:
        raise InvalidTypeError(
            f"the bounds of the pieces are {format_type(bounds)}: give cu_seq_lens_q of the batch, integers"
        )
    found = bounds.to("cpu", torch.int64)
    if found.ndim != 1 or not len(found) or found[0] != 0 or (found.diff() < 0).any():
        raise InvalidInputError(
            f"the bounds of the pieces are {found.tolist()!s:.200}, which do not rise from 0: give cu_seq_lens_q of "
            "the batch, as PackedCollator made it"
        )
    if tokens is not None and found[-1] != tokens:
        raise InvalidInputError(
            f"the bounds of the pieces end at {found[-1]}, and the batch has {tokens} tokens: give cu_seq_lens_q of "
            "the same batch, before it is split"
        )
    return found


def _places(bounds: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Where a rank's tokens are in the row, int64, (tokens / world,), on the CPU."""
    sizes = bounds.diff()
    odd = (sizes % (2 * world)).nonzero()
    if len(odd):
        piece = int(odd[0])
        raise InvalidInputError(
            f"piece {piece} of the batch has {sizes[piece]} tokens, and {world} ranks need multiples of {2 * world}: "
            f"make the plan with align={2 * world}, and pad rows with pad_to or pad_to_multiple_of to a multiple of it"
        )
    chunks = sizes // (2 * world)
    # Two chunks of each piece, one after the other.
    starts = torch.stack([bounds[:-1] + rank * chunks, bounds[1:] - (rank + 1) * chunks], 1).flatten()
    each = chunks.repeat_interleave(2)
    ends = each.cumsum(0)
    places = torch.arange(int(each.sum()), device="cpu")
    return places + (starts - (ends - each)).repeat_interleave(each)
