"""What one Hugging Face export consists of: tensors, what becomes of them, where that lies, and who writes it.

Owns everything that is decided about a save, and refused, before a value is touched. What always holds: ranks that hold
parts of the same model come to the same drawing, but for the tensors themselves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tundish.checkpoint.hf import pretrained
from tundish.checkpoint.hf.adapters import Adapters, adapters_of, holds_adapters
from tundish.checkpoint.hf.conversion import Conversion, ToHf, as_they_are, by_function, cast, together
from tundish.checkpoint.hf.metadata_cache import MetadataCache, facts_if_unchanged, remember
from tundish.checkpoint.hf.shards import Layout, assign, lay_out, lay_out_as_named
from tundish.checkpoint.placements import check_placement, is_cut, shares_for
from tundish.checkpoint.tensor_names import Part, parts_of
from tundish.checkpoint.tensors import (
    Facts,
    are_of_torch,
    check_tensors,
    facts_of,
    is_dtensor,
    local_of,
    tied_names,
)
from tundish.distributed import GroupInfo, local_world_size
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["ExportPlan", "draw"]

_logger = logging.getLogger("tundish.checkpoint")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# What was drawn of tensors that were given by name, without them. A training loop saves the same ones again and again.
_drawn: MetadataCache[ExportPlan] = MetadataCache()


class Origins(NamedTuple):
    """Of each entry of a file the source, or the first of several, by number, and its name."""

    sources: tuple[int, ...]
    names: tuple[str, ...]


# What the files hold, how, and from where.
_LaidOut = tuple[tuple[Facts, ...], Layout, dict[str, Origins]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportPlan:
    """All that is known of a save before it is staged.

    `tensors`: the sources of `conversion`. `is_spread`: which of them are cut over ranks. `products`: what the files
    hold. `layout`: how. `origins`: of what, by the name of each file. `writers`: of each file, by rank of the job.
    `model`: the model of transformers that is saved, if it is one. `adapters`: those of a model that holds some.
    """

    tensors: tuple[torch.Tensor, ...]
    is_spread: tuple[bool, ...]
    conversion: Conversion
    products: tuple[Facts, ...]
    layout: Layout
    origins: Mapping[str, Origins]
    writers: tuple[int, ...]
    model: Any = None
    adapters: Adapters | None = None


def draw(
    model_or_tensors: Any,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    to_hf: ToHf | None,
    member: GroupInfo,
    are_nodes_alike: bool,
) -> ExportPlan:
    """Decide what is saved and where it lies. `are_nodes_alike`: whether all have as many ranks as this one.

    Raises:
        InvalidTypeError: for what is no tensor, or of a kind or dtype that cannot be saved; for arguments of other
            types.
        InvalidInputError: for names, layouts and numbers that cannot be used.
    """
    _check_arguments(dtype, shard_bytes, to_hf)
    writers = tuple(_by_node(member.ranks)) if are_nodes_alike else member.ranks
    if to_hf is not None or type(model_or_tensors) is not dict:
        return _draw(model_or_tensors, dtype, shard_bytes, to_hf, writers, member.rank)
    # One look at the tensors tells that nothing has to be judged again.
    key = dtype, shard_bytes, writers, member.rank
    drawing = _drawn.find(model_or_tensors, key)
    if drawing is not None:
        return replace(drawing, tensors=tuple(model_or_tensors.values()))
    drawing = _draw(model_or_tensors, dtype, shard_bytes, to_hf, writers, member.rank)
    if len(drawing.tensors) == len(model_or_tensors):
        _drawn.keep(model_or_tensors, replace(drawing, tensors=()), key)
    return drawing


def _draw(
    model_or_tensors: Any,
    dtype: torch.dtype | None,
    shard_bytes: int,
    to_hf: ToHf | None,
    ranks: Sequence[int],
    rank: int,
) -> ExportPlan:
    """As `draw`. `ranks`: in the order in which they are given files; `rank`: this one."""
    adapters = adapters_of(model_or_tensors)
    if adapters is not None:
        return _draw_adapters(adapters, dtype, to_hf, ranks, rank)
    parts = parts_of(model_or_tensors)
    model = parts[0].module if len(parts) == 1 and pretrained.is_pretrained(parts[0].module) else None
    metadata = {"format": "pt"}
    tensors: list[torch.Tensor] = []
    conversions: list[tuple[str, Conversion]] = []
    totals: list[int] = []
    keep: list[str] = []
    for part in parts:
        kept, facts, added = _kept(part)
        metadata = added | metadata
        tensors += kept.values()
        if pretrained.is_pretrained(part.module):
            keep += filter(None, [pretrained.fp32_pattern(part.module, dtype)])
            if to_hf is None:
                conversion, total = pretrained.conversion_of(part.module, facts)
                conversions.append((part.prefix, conversion))
                totals.append(total)
                continue
        conversions.append((part.prefix, as_they_are(facts)))
    conversion = together(conversions)
    if to_hf is not None:
        conversion = by_function(conversion.sources, to_hf)
    # A conversion by a function is another one each time: to keep it would keep all that the function closes over.
    lay_out_products = _laid_out_before if to_hf is None else _lay_out
    laid_out = lay_out_products(
        conversion,
        dtype,
        "|".join(keep) or None,
        shard_bytes,
        tuple(metadata.items()),
        totals[0] if model is not None and totals else None,
    )
    return replace(_drawn_as(tensors, conversion, laid_out, ranks, rank), model=model)


def _drawn_as(
    tensors: Sequence[torch.Tensor],
    conversion: Conversion,
    laid_out: _LaidOut,
    ranks: Sequence[int],
    rank: int,
) -> ExportPlan:
    """The drawing of these sources; refuses what this rank is to write and cannot. `ranks`, `rank`: as of `_draw`."""
    products, layout, origins = laid_out
    drawing = ExportPlan(
        tensors=tuple(tensors),
        is_spread=_are_spread(tensors),
        conversion=conversion,
        products=products,
        layout=layout,
        origins=origins,
        writers=tuple(assign([file.size for file in layout.files], ranks)),
    )
    _check_parts_at_hand(drawing, rank)
    return drawing


def _lay_out(
    conversion: Conversion,
    dtype: torch.dtype | None,
    keep: str | None,
    shard_bytes: int,
    metadata: tuple[tuple[str, str], ...],
    total_parameters: int | None,
) -> _LaidOut:
    products = cast(conversion, dtype, keep)
    layout = lay_out(products, conversion.blocks, shard_bytes, metadata, total_parameters)
    return products, layout, _origins_of(conversion, layout)


# A training loop saves the same tensors again and again, and with thousands of them this costs milliseconds.
_laid_out_before = functools.lru_cache(maxsize=4)(_lay_out)


# As above.
@functools.lru_cache(maxsize=4)
def _lay_out_as_named(
    conversion: Conversion,
    dtype: torch.dtype | None,
    keep: str | None,
    files: tuple[tuple[str, int], ...],
    metadata: tuple[tuple[str, str], ...],
) -> _LaidOut:
    products = cast(conversion, dtype, keep)
    layout = lay_out_as_named(products, files, metadata)
    return products, layout, _origins_of(conversion, layout)


def _origins_of(conversion: Conversion, layout: Layout) -> dict[str, Origins]:
    origins: dict[str, Origins] = {}
    for file in layout.files:
        sources = tuple([conversion.unit_of[entry.product].sources[0] for entry in file.entries])
        origins[file.name] = Origins(sources, tuple([conversion.sources[source][0] for source in sources]))
    return origins


def _draw_adapters(
    adapters: Adapters, dtype: torch.dtype | None, to_hf: ToHf | None, ranks: Sequence[int], rank: int
) -> ExportPlan:
    """As `_draw`, of a model that holds adapters. Their loaders look for one file each, however large it is."""
    if to_hf is not None:
        raise InvalidInputError(
            f"to_hf is given for the adapters of a {type(adapters.model).__name__}, which are saved under the names "
            "that peft gives them: leave it out"
        )
    tensors: list[torch.Tensor] = []
    facts: list[Facts] = []
    for adapter in adapters.adapters:
        check_tensors(f"{adapter.folder}/" if adapter.folder else "", adapter.tensors)
        tensors += adapter.tensors.values()
        facts += facts_of(adapter.tensors)
    conversion = as_they_are(tuple(facts))
    base = adapters.base
    laid_out = _lay_out_as_named(
        conversion,
        dtype,
        pretrained.fp32_pattern(base, dtype) if pretrained.is_pretrained(base) else None,
        tuple((adapter.file, len(adapter.tensors)) for adapter in adapters.adapters),
        tuple({**adapters.metadata, "format": "pt"}.items()),
    )
    return replace(_drawn_as(tensors, conversion, laid_out, ranks, rank), adapters=adapters)


def _check_arguments(dtype: Any, shard_bytes: Any, to_hf: Any) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidTypeError(
            f"dtype is {dtype!r}: give one of {', '.join(map(str, _DTYPES))}, or None to save tensors as they are"
        )
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InvalidInputError(f"shard_bytes is {shard_bytes!r}: give a number of bytes")
    if to_hf is not None and not callable(to_hf):
        raise InvalidTypeError(f"to_hf is {to_hf!r}: give a function of a name and a tensor")


def _kept(part: Part) -> tuple[dict[str, torch.Tensor], tuple[Facts, ...], dict[str, str]]:
    """The tensors of a part that are saved, each memory once, and what they add to the files' metadata."""
    if holds_adapters(part.module):
        raise InvalidTypeError(
            f"the model under {part.prefix!r} holds adapters, which are saved in files of their own: give the model "
            "itself, or merge them and give the merged model"
        )
    is_pretrained = pretrained.is_pretrained(part.module)
    facts = None if is_pretrained else facts_if_unchanged(part.tensors)
    if facts is not None:
        return part.tensors, facts, {}
    check_tensors(part.prefix, part.tensors)
    if is_pretrained:
        kept, metadata = pretrained.weights_of(part.module, part.tensors)
        check_tensors(part.prefix, kept)
        return kept, facts_of(kept), metadata
    tied = tied_names(part.tensors)
    if tied and part.module is None:
        _warn_of_tied(tuple(map(tuple, tied)))
    again = {name for names in tied for name in names[1:]}
    kept = {name: tensor for name, tensor in part.tensors.items() if name not in again}
    facts = facts_of(kept)
    if not again:
        remember(kept, facts)
    return kept, facts, {}


@functools.cache
def _warn_of_tied(tied: tuple[tuple[str, ...], ...]) -> None:
    """Once, as a mapping of names says of no model that it ties them again when it is loaded."""
    _logger.warning(
        "these are one tensor each, and are saved under the first name alone: %s; give clones to save them all",
        "; ".join(", ".join(names) for names in tied[:3]) + ("; and more" if tied[3:] else ""),
    )


def _are_spread(tensors: Sequence[Any]) -> tuple[bool, ...]:
    if are_of_torch(tensors):
        return (False,) * len(tensors)
    return tuple([is_dtensor(tensor) and is_cut(tensor) for tensor in tensors])


def _by_node(ranks: tuple[int, ...]) -> list[int]:
    """`ranks` so that neighbours are on different nodes: few files are then written by many disks."""
    try:
        size = local_world_size()
    except InvalidInputError:
        # Nobody says how many ranks a node has.
        return list(ranks)
    return sorted(ranks, key=lambda rank: (rank % size, rank // size))


def _check_parts_at_hand(drawing: ExportPlan, rank: int) -> None:
    """Refuse layouts that are not understood, and tensors that this rank is to write but holds no part of."""
    if are_of_torch(drawing.tensors):
        return
    names = [name for name, _, _ in drawing.conversion.sources]
    for name, tensor, is_spread in zip(names, drawing.tensors, drawing.is_spread, strict=True):
        if is_spread:
            check_placement(name, tensor, rank)
    for source in _sources_of(drawing, rank):
        tensor = drawing.tensors[source]
        has_part = (
            bool(shares_for(tensor, rank))
            if drawing.is_spread[source]
            else local_of(tensor).shape == tensor.shape
        )
        if tensor.numel() and not has_part:
            raise InvalidInputError(
                f"{names[source]!r} is a DTensor on a mesh without rank {rank}, which is to write it: give the "
                "checkpointer a group of ranks that all hold a part of each tensor"
            )


def _sources_of(drawing: ExportPlan, rank: int) -> Iterator[int]:
    """What goes into the files of `rank`, where DTensors are among it."""
    if not any(is_dtensor(tensor) for tensor in drawing.tensors):
        return
    for file, writer in zip(drawing.layout.files, drawing.writers, strict=True):
        if writer == rank:
            for entry in file.entries:
                yield from drawing.conversion.unit_of[entry.product].sources
