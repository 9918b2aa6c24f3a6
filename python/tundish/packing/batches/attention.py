"""Attention masks by which the pieces of a row do not see each other, for models that ignore positions.

Invariants: document ids ascend along the row, so that the first and last one of a block bound all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

# The block size of FlexAttention's kernels; any other needs options of theirs.
_BLOCK = 128


def causal_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """The block-diagonal causal mask of a row, to be added to the scores of attention.

    Not booleans: transformers' eager attention would add them to the scores as zeros and ones, without a word. And in
    float32: both its eager and its sdpa attention take it beside queries of any dtype.

    Args:
        document_ids: The number of the piece of each token, (1, tokens).

    Returns:
        float32, (1, 1, tokens, tokens): 0 where the token of the row sees that of the column, else the least float32.
    """
    (ids,) = document_ids
    place = torch.arange(len(ids), device=ids.device)
    seen = (ids[:, None] == ids) & (place[:, None] >= place)
    mask = torch.zeros(seen.shape, dtype=torch.float32, device=ids.device)
    return mask.masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]


class PackedBlockMask(BlockMask):
    """The `BlockMask` of a row of pieces, whose document ids move and travel between processes with it.

    A plain `BlockMask` keeps them in a closure: `to` would leave them where they are, and a worker could not send it.
    """

    document_ids: torch.Tensor

    @classmethod
    def of(cls, document_ids: torch.Tensor) -> PackedBlockMask:
        """Make the mask of a row from the number of the piece of each token, (1, tokens).

        FlexAttention's own `create_block_mask` compares all pairs of tokens. Here blocks are compared by their first
        and last piece.
        """
        (ids,) = document_ids
        tokens, device = len(ids), ids.device
        starts = torch.arange(0, tokens, _BLOCK, device=device)
        first, last = ids[starts], ids[(starts + _BLOCK - 1).clamp_(max=tokens - 1)]
        block = torch.arange(len(starts), device=device)
        before = block[:, None] > block
        # Of a block of queries (row) and a block of keys (column) that lies before it.
        seen = before & (last >= first[:, None])
        full = before & (first == last[:, None])
        if tokens % _BLOCK:
            # The kernels also compute the queries after the row's end.
            full[-1] = False
        partial = (seen & ~full) | (block[:, None] == block)

        def document_mask(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            seen: torch.Tensor = (query >= key) & (ids[query] == ids[key])
            return seen

        mask = cls.from_kv_blocks(
            *_ordered(partial),
            *_ordered(full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=document_mask,
            seq_lengths=(tokens, tokens),
        )
        mask.document_ids = document_ids
        return mask

    def to(self, device: torch.device | str, **options: Any) -> PackedBlockMask:
        """Move the mask; `options` are those of `torch.Tensor.to`."""
        return self.of(self.document_ids.to(device, **options))

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBlockMask.of, (self.document_ids,)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks of keys of each block of queries, and their indices, those that are taken first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None]
