"""Plans an export before any value is read: tensors, conversions, the layout of the files, and their writers.

Ranks that hold parts of the same model make the same plan, except for the tensors themselves.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.hf.adapters import Adapters, adapters_of, holds_adapters
from tundish.checkpoint.hf.conversion import (
    Conversion,
    ConversionUnit,
    ToHf,
    cast_products,
    identity_conversion,
    join_conversions,
    to_hf_conversion,
)
from tundish.checkpoint.hf.safetensors import ShardFile, WeightFiles, assign_files, lay_out
from tundish.checkpoint.hf.transformers import conversion_of, fp32_pattern, is_pretrained, weights_of
from tundish.checkpoint.placements import check_placement, is_sharded_over_ranks, rank_parts_of
from tundish.checkpoint.tensors import (
    NamedTensors,
    TensorSpec,
    check_tensors,
    is_dtensor,
    local_of,
    named_tensors,
    specs_of,
    tied_names,
)
from tundish.distributed import GroupInfo, local_world_size
from tundish.errors import InvalidInputError, InvalidTypeError, format_type

_logger = logging.getLogger("tundish.checkpoint")

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportPlan:
    """The contents of an export.

    Attributes:
        tensors: the sources of `conversion`.
        is_sharded: which sources are sharded over ranks.
        conversion: how sources become products.
        products: name, shape and dtype of the tensors in the files.
        layout: where each product lies.
        writers: the rank that writes each file.
        model: the transformers model that is saved, or None.
        adapters: of a model that has some, or None.
    """

    tensors: tuple[torch.Tensor, ...]
    is_sharded: tuple[bool, ...]
    conversion: Conversion
    products: tuple[TensorSpec, ...]
    layout: WeightFiles
    writers: tuple[int, ...]
    model: Any
    adapters: Adapters | None

    @functools.cached_property
    def any_sharded(self) -> bool:
        """Whether ranks have to exchange parts."""
        return any(self.is_sharded)

    def files_of(self, rank: int) -> list[ShardFile]:
        """The files that `rank` writes."""
        return [file for file, writer in zip(self.layout.files, self.writers, strict=True) if writer == rank]

    def is_direct(self, unit: ConversionUnit) -> bool:
        """Whether a unit needs neither other ranks nor a conversion."""
        return unit.convert is None and not self.is_sharded[unit.sources[0]]

    def sent_dtype(self, unit: ConversionUnit, source: int) -> torch.dtype:
        """The dtype in which a source travels: its own if it is converted on arrival, else the file's."""
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
    of_first_rank: Collection[str] = (),
) -> ExportPlan:
    """Decide which tensors are saved and where they lie.

    Args:
        model_or_tensors: as `Checkpointer.save_hf` takes it.
        dtype: as `Checkpointer.save_hf` takes it.
        shard_bytes: as `Checkpointer.save_hf` takes it.
        to_hf: as `Checkpointer.save_hf` takes it.
        info: the ranks that save together.
        are_nodes_alike: whether all nodes have as many ranks as this one.
        of_first_rank: names of tensors that differ between ranks; the first rank's are saved.

    Raises:
        InvalidTypeError: a tensor or an argument has a kind or dtype that cannot be saved.
        InvalidInputError: a name, a layout or a number cannot be used.
    """
    _check_arguments(dtype, shard_bytes, to_hf)
    adapters = adapters_of(model_or_tensors)
    contents = (
        _model_contents(model_or_tensors, to_hf) if adapters is None else _adapter_contents(adapters, to_hf)
    )
    models = [model for model in contents.models if is_pretrained(model)]
    keep = filter(None, (fp32_pattern(model, dtype) for model in models))
    # A cache would keep alive what `to_hf` closes over.
    lay_out_products = _lay_out if to_hf is None else _lay_out.__wrapped__
    products, layout = lay_out_products(
        contents.conversion,
        dtype,
        "|".join(keep) or None,
        shard_bytes,
        tuple({**contents.metadata, "format": "pt"}.items()),
        contents.total_parameters,
        contents.files,
    )
    ranks = _by_node(info.ranks) if are_nodes_alike else info.ranks
    writers = assign_files([file.size for file in layout.files], ranks)
    if of_first_rank:
        writers = _with_first_rank(writers, layout, contents.conversion, of_first_rank, info.ranks[0])
    plan = ExportPlan(
        tensors=tuple(contents.tensors),
        is_sharded=tuple(
            [is_dtensor(tensor) and is_sharded_over_ranks(tensor) for tensor in contents.tensors]
        ),
        conversion=contents.conversion,
        products=products,
        layout=layout,
        writers=tuple(writers),
        model=models[0] if adapters is None and len(contents.models) == 1 and models else None,
        adapters=adapters,
    )
    if any(map(is_dtensor, plan.tensors)):
        _check_rank_parts(plan, info.rank)
    return plan


def _with_first_rank(
    writers: Sequence[int], layout: WeightFiles, conversion: Conversion, names: Collection[str], rank: int
) -> list[int]:
    """`writers`, but `rank` for files with products of these sources."""
    numbers = {number for number, (name, _, _) in enumerate(conversion.sources) if name in names}
    return [
        rank
        if any(numbers.intersection(conversion.unit_of[product].sources) for product in file.products)
        else writer
        for file, writer in zip(layout.files, writers, strict=True)
    ]


@dataclass(kw_only=True)
class _ExportedTensors:
    """The tensors of an export and their conversion.

    Attributes:
        models: the modules that the tensors are from; None for a mapping.
        metadata: of the files.
        total_parameters: for the index.
        files: names of the files and how many products each has; empty if shards are made.
    """

    tensors: list[torch.Tensor]
    conversion: Conversion
    models: Sequence[Any]
    metadata: dict[str, str]
    total_parameters: int | None = None
    files: tuple[tuple[str, int], ...] = ()


def _model_contents(model_or_tensors: Any, to_hf: ToHf | None) -> _ExportedTensors:
    """The contents of an export of whole models or tensors."""
    inputs = named_tensors(model_or_tensors)
    tensors: list[torch.Tensor] = []
    conversions: list[tuple[str, Conversion]] = []
    metadata: dict[str, str] = {}
    total_parameters = None
    for model in inputs:
        kept, added = _saved_tensors(model)
        specs = specs_of(kept)
        metadata = added | metadata
        tensors += kept.values()
        conversion = identity_conversion(specs)
        if to_hf is None and is_pretrained(model.module):
            conversion, total_parameters = conversion_of(model.module, specs)
        conversions.append((model.prefix, conversion))
    conversion = join_conversions(conversions)
    return _ExportedTensors(
        tensors=tensors,
        conversion=conversion if to_hf is None else to_hf_conversion(conversion.sources, to_hf),
        models=[model.module for model in inputs],
        metadata=metadata,
        total_parameters=total_parameters if len(inputs) == 1 else None,
    )


def _adapter_contents(adapters: Adapters, to_hf: ToHf | None) -> _ExportedTensors:
    """The contents of an export of adapters: one file for each, whatever its size, as peft's loaders expect."""
    if to_hf is not None:
        raise InvalidInputError(
            f"to_hf is given for the adapters of {format_type(adapters.model)}, which are saved under the names "
            "that peft gives them: leave it out"
        )
    tensors: list[torch.Tensor] = []
    specs: list[TensorSpec] = []
    for adapter in adapters.adapters:
        check_tensors(f"{adapter.folder}/" if adapter.folder else "", adapter.tensors)
        tensors += adapter.tensors.values()
        specs += specs_of(adapter.tensors)
    return _ExportedTensors(
        tensors=tensors,
        conversion=identity_conversion(tuple(specs)),
        models=[adapters.base],
        metadata=dict(adapters.metadata),
        files=tuple((adapter.file, len(adapter.tensors)) for adapter in adapters.adapters),
    )


# A training loop saves the same thousands of tensors again and again.
@functools.lru_cache(maxsize=4)
def _lay_out(
    conversion: Conversion,
    dtype: torch.dtype | None,
    keep: str | None,
    shard_bytes: int,
    metadata: tuple[tuple[str, str], ...],
    total_parameters: int | None,
    files: tuple[tuple[str, int], ...],
) -> tuple[tuple[TensorSpec, ...], WeightFiles]:
    products = cast_products(conversion, dtype, keep)
    return products, lay_out(products, conversion.blocks, shard_bytes, metadata, total_parameters, files)


def _check_arguments(dtype: Any, shard_bytes: Any, to_hf: Any) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidTypeError(
            f"dtype is {dtype!r}: give one of {', '.join(map(str, _DTYPES))}, or None to save tensors as they are"
        )
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise InvalidInputError(f"shard_bytes is {shard_bytes!r}: give a number of bytes")
    if to_hf is not None and not callable(to_hf):
        raise InvalidTypeError(f"to_hf is {to_hf!r}: give a function of a name and a tensor")


def _saved_tensors(given: NamedTensors) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of one input that are saved, each memory once, and metadata of the files."""
    if holds_adapters(given.module):
        raise InvalidTypeError(
            f"the model under {given.prefix!r} holds adapters, which are saved in files of their own: give the model "
            "itself, or merge them and give the merged model"
        )
    check_tensors(given.prefix, given.tensors)
    if is_pretrained(given.module):
        kept, metadata = weights_of(given.module, given.tensors)
        check_tensors(given.prefix, kept)
        return kept, metadata
    tied = tied_names(given.tensors)
    if tied and given.module is None:
        _warn_of_tied(tuple(map(tuple, tied)))
    again = {name for names in tied for name in names[1:]}
    return {name: tensor for name, tensor in given.tensors.items() if name not in again}, {}


@functools.cache
def _warn_of_tied(tied: tuple[tuple[str, ...], ...]) -> None:
    """Warn once: no model ties the names of a mapping again when they are loaded."""
    _logger.warning(
        "tied tensors are saved once, under the first name: %s; give clones to save them all",
        "; ".join(", ".join(names) for names in tied[:3]) + ("; and more" if tied[3:] else ""),
    )


def _by_node(ranks: tuple[int, ...]) -> Sequence[int]:
    """Sort ranks so that neighbours are on different nodes: few files are then written by many disks."""
    try:
        size = local_world_size()
    except InvalidInputError:
        # The launcher does not say how many ranks a node has.
        return ranks
    return sorted(ranks, key=lambda rank: (rank % size, rank // size))


def _check_rank_parts(plan: ExportPlan, rank: int) -> None:
    """Refuse unknown placements, and tensors that this rank has to write but holds no part of."""
    names = [name for name, _, _ in plan.conversion.sources]
    for name, tensor, is_sharded in zip(names, plan.tensors, plan.is_sharded, strict=True):
        if is_sharded:
            check_placement(name, tensor, rank)
    products = [product for file in plan.files_of(rank) for product in file.products]
    for source in {source for product in products for source in plan.conversion.unit_of[product].sources}:
        tensor = plan.tensors[source]
        is_whole = not plan.is_sharded[source] and local_of(tensor).shape == tensor.shape
        has_part = is_whole or (plan.is_sharded[source] and rank_parts_of(tensor, rank))
        if tensor.numel() and not has_part:
            raise InvalidInputError(
                f"{names[source]!r} is a DTensor on a mesh without rank {rank}, which is to write it: give the "
                "checkpointer a group of ranks that all hold a part of each tensor"
            )
