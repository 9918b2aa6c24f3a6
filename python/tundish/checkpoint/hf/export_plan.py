"""Plans an export before a value is touched: tensors, conversions, the layout of the files, who writes which.

Ranks that hold parts of the same model come to the same plan, but for the tensors themselves.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tundish.checkpoint.hf import pretrained
from tundish.checkpoint.hf.adapters import Adapters, adapters_of, holds_adapters
from tundish.checkpoint.hf.conversion import (
    Conversion,
    ToHf,
    Unit,
    as_they_are,
    by_function,
    cast,
    together,
)
from tundish.checkpoint.hf.shards import Layout, ShardFile, assign, lay_out, lay_out_as_named
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

__all__ = ["ExportPlan", "make_export_plan"]

_logger = logging.getLogger("tundish.checkpoint")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Origins(NamedTuple):
    """The first source of each entry of a file: its number and its name."""

    sources: tuple[int, ...]
    names: tuple[str, ...]


# Facts of the products, the files, and the origins of each file by its name.
_LaidOut = tuple[tuple[Facts, ...], Layout, dict[str, Origins]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportPlan:
    """What an export consists of.

    Attributes:
        tensors: the sources of `conversion`.
        is_sharded: which sources are sharded over ranks.
        conversion: how sources become products.
        products: name, shape and dtype of what the files hold.
        layout: where each product lies.
        origins: the sources of each file, by its name.
        writers: the rank that writes each file.
        model: the transformers model that is saved, or None.
        adapters: of a model that holds some, or None.
    """

    tensors: tuple[torch.Tensor, ...]
    is_sharded: tuple[bool, ...]
    conversion: Conversion
    products: tuple[Facts, ...]
    layout: Layout
    origins: Mapping[str, Origins]
    writers: tuple[int, ...]
    model: Any = None
    adapters: Adapters | None = None

    @functools.cached_property
    def any_sharded(self) -> bool:
        """Whether ranks have to exchange anything."""
        return any(self.is_sharded)

    def files_of(self, rank: int) -> list[ShardFile]:
        """The files that `rank` writes."""
        return [file for file, writer in zip(self.layout.files, self.writers, strict=True) if writer == rank]

    def is_direct(self, unit: Unit) -> bool:
        """Whether a unit needs neither other ranks nor a conversion."""
        return unit.convert is None and not self.is_sharded[unit.sources[0]]

    def sent_dtype(self, unit: Unit, source: int) -> torch.dtype:
        """The dtype in which a source travels: that of the file, unless it is converted after it arrives."""
        return self.tensors[source].dtype if unit.convert else self.products[unit.products[0]][2]

    def product_bytes(self, product: int) -> int:
        """Bytes of a product."""
        _, shape, dtype = self.products[product]
        return math.prod(shape) * dtype.itemsize


def make_export_plan(
    model_or_tensors: Any,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    to_hf: ToHf | None,
    info: GroupInfo,
    are_nodes_alike: bool,
) -> ExportPlan:
    """Decide what is saved and where it lies.

    Args:
        model_or_tensors, dtype, shard_bytes, to_hf: as `Checkpointer.save_hf` takes them.
        info: the ranks that save together.
        are_nodes_alike: whether all nodes have as many ranks as this one.

    Raises:
        InvalidTypeError: a tensor or an argument has a kind or dtype that cannot be saved.
        InvalidInputError: a name, a layout or a number cannot be used.
    """
    _check_arguments(dtype, shard_bytes, to_hf)
    ranks = tuple(_by_node(info.ranks)) if are_nodes_alike else info.ranks
    adapters = adapters_of(model_or_tensors)
    if adapters is not None:
        return _plan_adapters(adapters, dtype, to_hf, ranks, info.rank)
    parts = parts_of(model_or_tensors)
    model = parts[0].module if len(parts) == 1 and pretrained.is_pretrained(parts[0].module) else None
    metadata = {"format": "pt"}
    tensors: list[torch.Tensor] = []
    conversions: list[tuple[str, Conversion]] = []
    totals: list[int] = []
    keep: list[str] = []
    for part in parts:
        kept, added = _kept(part)
        facts = facts_of(kept)
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
    # A conversion by a function is a new one each time, and a cache would keep what the function closes over.
    lay_out_products = _lay_out_cached if to_hf is None else _lay_out
    laid_out = lay_out_products(
        conversion,
        dtype,
        "|".join(keep) or None,
        shard_bytes,
        tuple(metadata.items()),
        totals[0] if model is not None and totals else None,
    )
    return replace(_plan_of(tensors, conversion, laid_out, ranks, info.rank), model=model)


def _plan_of(
    tensors: Sequence[torch.Tensor],
    conversion: Conversion,
    laid_out: _LaidOut,
    ranks: Sequence[int],
    rank: int,
) -> ExportPlan:
    """The plan; `ranks` get files in this order. Refuses what `rank` has to write and holds no part of."""
    products, layout, origins = laid_out
    plan = ExportPlan(
        tensors=tuple(tensors),
        is_sharded=_are_sharded(tensors),
        conversion=conversion,
        products=products,
        layout=layout,
        origins=origins,
        writers=tuple(assign([file.size for file in layout.files], ranks)),
    )
    _check_parts_at_hand(plan, rank)
    return plan


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


# A training loop saves the same tensors again and again: with thousands of them this saves milliseconds.
_lay_out_cached = functools.lru_cache(maxsize=4)(_lay_out)


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


def _plan_adapters(
    adapters: Adapters, dtype: torch.dtype | None, to_hf: ToHf | None, ranks: Sequence[int], rank: int
) -> ExportPlan:
    """The plan of a model that holds adapters: one file each, however large, as their loaders expect."""
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
    return replace(_plan_of(tensors, conversion, laid_out, ranks, rank), adapters=adapters)


def _check_arguments(dtype: Any, shard_bytes: Any, to_hf: Any) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidTypeError(
            f"dtype is {dtype!r}: give one of {', '.join(map(str, _DTYPES))}, or None to save tensors as they are"
        )
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InvalidInputError(f"shard_bytes is {shard_bytes!r}: give a number of bytes")
    if to_hf is not None and not callable(to_hf):
        raise InvalidTypeError(f"to_hf is {to_hf!r}: give a function of a name and a tensor")


def _kept(part: Part) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a part that are saved, each memory once, and what they add to the files' metadata."""
    if holds_adapters(part.module):
        raise InvalidTypeError(
            f"the model under {part.prefix!r} holds adapters, which are saved in files of their own: give the model "
            "itself, or merge them and give the merged model"
        )
    check_tensors(part.prefix, part.tensors)
    if pretrained.is_pretrained(part.module):
        kept, metadata = pretrained.weights_of(part.module, part.tensors)
        check_tensors(part.prefix, kept)
        return kept, metadata
    tied = tied_names(part.tensors)
    if tied and part.module is None:
        _warn_of_tied(tuple(map(tuple, tied)))
    again = {name for names in tied for name in names[1:]}
    return {name: tensor for name, tensor in part.tensors.items() if name not in again}, {}


@functools.cache
def _warn_of_tied(tied: tuple[tuple[str, ...], ...]) -> None:
    """Warn once: a mapping of names has no model that ties them again when it is loaded."""
    _logger.warning(
        "these are one tensor each, and are saved under the first name alone: %s; give clones to save them all",
        "; ".join(", ".join(names) for names in tied[:3]) + ("; and more" if tied[3:] else ""),
    )


def _are_sharded(tensors: Sequence[Any]) -> tuple[bool, ...]:
    if are_of_torch(tensors):
        return (False,) * len(tensors)
    return tuple([is_dtensor(tensor) and is_cut(tensor) for tensor in tensors])


def _by_node(ranks: tuple[int, ...]) -> list[int]:
    """Sort ranks so that neighbours are on different nodes: few files are then written by many disks."""
    try:
        size = local_world_size()
    except InvalidInputError:
        # The launcher does not say how many ranks a node has.
        return list(ranks)
    return sorted(ranks, key=lambda rank: (rank % size, rank // size))


def _check_parts_at_hand(plan: ExportPlan, rank: int) -> None:
    """Refuse unknown placements, and tensors that this rank has to write but holds no part of."""
    if are_of_torch(plan.tensors):
        return
    names = [name for name, _, _ in plan.conversion.sources]
    for name, tensor, is_sharded in zip(names, plan.tensors, plan.is_sharded, strict=True):
        if is_sharded:
            check_placement(name, tensor, rank)
    for source in _sources_of(plan, rank):
        tensor = plan.tensors[source]
        has_part = (
            bool(shares_for(tensor, rank))
            if plan.is_sharded[source]
            else local_of(tensor).shape == tensor.shape
        )
        if tensor.numel() and not has_part:
            raise InvalidInputError(
                f"{names[source]!r} is a DTensor on a mesh without rank {rank}, which is to write it: give the "
                "checkpointer a group of ranks that all hold a part of each tensor"
            )


def _sources_of(plan: ExportPlan, rank: int) -> Iterator[int]:
    """The sources of the files of `rank`, where any source is a DTensor."""
    if not any(is_dtensor(tensor) for tensor in plan.tensors):
        return
    for file in plan.files_of(rank):
        for entry in file.entries:
            yield from plan.conversion.unit_of[entry.product].sources
