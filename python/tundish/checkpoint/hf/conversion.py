"""Converts the tensors of the training to those in the files, in small groups called units.

A unit is the smallest group of tensors that has to be on one rank at once. It is one tensor that is saved as it is, or
the tensors that one conversion needs.

Invariants:
    - Names, shapes and dtypes of the products are known before any value is read.
    - Each product belongs to one unit. A conversion sees no more than its unit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from tundish.checkpoint.tensors import DTYPES, TensorSpec, check_name, is_fp8, refuse_repeated
from tundish.errors import InvalidInputError, InvalidTypeError

ToHf = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
Convert = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionUnit:
    """Sources and products that belong together, by index.

    Attributes:
        sources: indices of the tensors of the training.
        products: indices of the tensors in the files.
        convert: makes the products of the whole sources, both in order; None if the only source is the product.
    """

    sources: tuple[int, ...]
    products: tuple[int, ...]
    convert: Convert | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """All units, and the contents of the files. Equal to itself alone.

    Attributes:
        sources: the tensors of the training.
        units: in the order of their products.
        products: the tensors in the files, in the order in which files are filled.
        blocks: a number for each product; products with the same number go into the same file.
    """

    sources: tuple[TensorSpec, ...]
    units: tuple[ConversionUnit, ...]
    products: tuple[TensorSpec, ...]
    blocks: tuple[int, ...]

    @functools.cached_property
    def converts(self) -> bool:
        """Whether any unit converts."""
        return any(unit.convert is not None for unit in self.units)

    @functools.cached_property
    def unit_of(self) -> list[ConversionUnit]:
        """The unit of each product."""
        units = {product: unit for unit in self.units for product in unit.products}
        return [units[product] for product in range(len(self.products))]


# A training loop saves the same thousands of tensors again and again.
@functools.lru_cache(maxsize=4)
def identity_conversion(sources: tuple[TensorSpec, ...]) -> Conversion:
    """Every source is a product."""
    numbers = range(len(sources))
    return Conversion(
        sources=sources,
        units=tuple(
            [ConversionUnit(sources=(number,), products=(number,), convert=None) for number in numbers]
        ),
        products=sources,
        blocks=tuple(numbers),
    )


def to_hf_conversion(sources: tuple[TensorSpec, ...], to_hf: ToHf) -> Conversion:
    """`to_hf` turns each source into its products.

    It is called with tensors on the meta device to learn names and shapes, or with zeros if that fails.

    Raises:
        InvalidTypeError: it returns something else than pairs of a name and a tensor.
        InvalidInputError: a name cannot be used, or is there twice.
        Exception: raised by `to_hf`.
    """
    units: list[ConversionUnit] = []
    products: list[TensorSpec] = []
    for number, (name, shape, dtype) in enumerate(sources):
        given = torch.empty(shape, dtype=dtype, device="meta")
        try:
            pairs = _pairs(to_hf, name, given)
        except Exception:  # noqa: BLE001 (some functions need values, whatever they raise without them)
            given = torch.zeros(shape, dtype=dtype, device="cpu")
            pairs = _pairs(to_hf, name, given)
        made: list[TensorSpec] = [(product, tensor.shape, tensor.dtype) for product, tensor in pairs]
        is_same = len(pairs) == 1 and pairs[0][1] is given
        units.append(
            ConversionUnit(
                sources=(number,),
                products=tuple(range(len(products), len(products) + len(made))),
                convert=None if is_same else _checked(functools.partial(_apply, to_hf, name), [name], made),
            )
        )
        products += made
    if not products:
        raise InvalidInputError("there is nothing to save: to_hf gives no tensor")
    refuse_repeated((name for name, _, _ in products), "to_hf gives the name {!r} twice")
    return Conversion(
        sources=sources,
        units=tuple(units),
        products=tuple(products),
        blocks=tuple(range(len(products))),
    )


def reverting_conversion(
    sources: tuple[TensorSpec, ...], revert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> Conversion:
    """`revert` turns all sources into all products at once, and the sources of a unit into its products.

    The units are found by a run of `revert` on tensors without values that track their origins. Products that are views
    of one tensor make a block.

    Raises `InvalidInputError` if a product comes from no source.
    """
    metas = [_Traced.make(number, shape, dtype) for number, (_, shape, dtype) in enumerate(sources)]
    named: dict[str, torch.Tensor] = {name: meta for (name, _, _), meta in zip(sources, metas, strict=True)}
    with torch.no_grad():
        outcome = revert(named)
    if outcome is named:
        return identity_conversion(sources)
    products = tuple([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in outcome.items()])
    numbers = {id(meta): number for number, meta in enumerate(metas)}
    units: list[ConversionUnit] = []
    storages: dict[int, int] = {}
    blocks: list[int] = []
    # The sources that are needed together, by each of them; and the products of each such group.
    groups: dict[int, set[int]] = {}
    origins_of: dict[int, frozenset[int]] = {}
    for number, (name, tensor) in enumerate(outcome.items()):
        blocks.append(storages.setdefault(tensor.untyped_storage()._cdata, number))
        if id(tensor) in numbers:
            units.append(ConversionUnit(sources=(numbers[id(tensor)],), products=(number,), convert=None))
            continue
        origins = origins_of[number] = getattr(tensor, "origins", frozenset[int]())
        if not origins:
            raise InvalidInputError(f"cannot tell which weights {name!r} is converted from: give a to_hf")
        group = set(origins).union(*(groups.get(origin, ()) for origin in origins))
        groups.update(dict.fromkeys(group, group))
    made: dict[int, list[int]] = {}
    for number, origins in origins_of.items():
        made.setdefault(id(groups[min(origins)]), []).append(number)
    for numbers_made in made.values():
        group = groups[min(origins_of[numbers_made[0]])]
        names = [sources[origin][0] for origin in sorted(group)]
        convert = _checked(
            functools.partial(_revert, revert, names), names, [products[number] for number in numbers_made]
        )
        units.append(
            ConversionUnit(sources=tuple(sorted(group)), products=tuple(numbers_made), convert=convert)
        )
    units.sort(key=lambda unit: unit.products)
    return Conversion(sources=sources, units=tuple(units), products=products, blocks=tuple(blocks))


def join_conversions(parts: Sequence[tuple[str, Conversion]]) -> Conversion:
    """Join the conversions of several models; the names of each get its prefix."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    sources: list[TensorSpec] = []
    units: list[ConversionUnit] = []
    products: list[TensorSpec] = []
    blocks: list[int] = []
    for prefix, part in parts:
        before, made = len(sources), len(products)
        sources += [(prefix + name, shape, dtype) for name, shape, dtype in part.sources]
        products += [(prefix + name, shape, dtype) for name, shape, dtype in part.products]
        blocks += [block + made for block in part.blocks]
        units += [
            ConversionUnit(
                sources=tuple(number + before for number in unit.sources),
                products=tuple(number + made for number in unit.products),
                convert=unit.convert,
            )
            for unit in part.units
        ]
    refuse_repeated((name for name, _, _ in products), "the models together have the name {!r} twice")
    return Conversion(
        sources=tuple(sources), units=tuple(units), products=tuple(products), blocks=tuple(blocks)
    )


def cast_products(
    conversion: Conversion, dtype: torch.dtype | None, keep: str | None
) -> tuple[TensorSpec, ...]:
    """The products as the files contain them: floats become `dtype`.

    These stay as they are: products of a source whose name the regular expression `keep` matches, fp8 tensors, and the
    scales of fp8 tensors. A scale has "scale" in its name and lies in the module of an fp8 tensor or in one around it.

    Raises `InvalidTypeError` for a dtype that files cannot contain.
    """
    for name, _, given in conversion.products:
        if given not in DTYPES:
            raise InvalidTypeError(
                f"{name!r} is {given}, which a safetensors file cannot hold: convert it first"
            )
    if dtype is None:
        return conversion.products
    paths = [tuple(name.split(".")) for name, _, given in conversion.products if is_fp8(given)]
    scaled = {path[:end] for path in paths for end in range(len(path))}
    kept = {
        product
        for unit in conversion.units
        if keep and any(re.search(keep, conversion.sources[source][0]) for source in unit.sources)
        for product in unit.products
    }

    def stays(number: int, name: str, given: torch.dtype) -> bool:
        *module, leaf = name.split(".")
        is_scale = tuple(module) in scaled and "scale" in leaf
        return is_scale or not given.is_floating_point or is_fp8(given) or number in kept

    return tuple(
        (name, shape, given if stays(number, name, given) else dtype)
        for number, (name, shape, given) in enumerate(conversion.products)
    )


def _pairs(to_hf: ToHf, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        made = to_hf(name, tensor)
        pairs = list(made) if isinstance(made, Iterable) else [made]
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise InvalidTypeError(
                f"to_hf makes {pair!r} of {name!r}: give an iterable of pairs of a name and a tensor"
            )
        check_name(pair[0])
    return [(pair[0], pair[1]) for pair in pairs]


def _apply(to_hf: ToHf, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for _, tensor in _pairs(to_hf, name, tensors[0])]


def _revert(
    revert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(revert(dict(zip(names, tensors, strict=True))).values())


def _checked(convert: Convert, names: Sequence[str], products: Sequence[TensorSpec]) -> Convert:
    """`convert`, which fails if it gives other shapes than those of `products`.

    Names are not compared: they may depend on tensors outside of the unit.
    """
    expected = [tuple(shape) for _, shape, _ in products]

    def checked(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = convert(tensors)
        shapes = [tuple(tensor.shape) for tensor in made]
        if shapes != expected:
            raise InvalidInputError(
                f"the conversion of {', '.join(names)} gives the shapes {shapes}, and gave {expected} when the save "
                "was planned: it must follow from names, shapes and dtypes of these tensors alone; give another to_hf"
            )
        return made

    return checked


class _Traced(torch.Tensor):
    """A tensor without values that tracks from which sources it was made."""

    origins: frozenset[int]

    @classmethod
    def make(cls, number: int, shape: Sequence[int], dtype: torch.dtype) -> _Traced:
        traced = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        traced.origins = frozenset([number])
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _pytree.tree_leaves([args, dict(kwargs)])
        origins = frozenset[int]().union(*(leaf.origins for leaf in leaves if isinstance(leaf, cls)))
        with torch._C.DisableTorchFunctionSubclass():
            outcome = func(*args, **kwargs)

        def mark(tensor: torch.Tensor) -> torch.Tensor:
            traced = tensor if isinstance(tensor, cls) else tensor.as_subclass(cls)
            traced.origins = origins | getattr(tensor, "origins", frozenset[int]())
            return traced

        return _pytree.tree_map_only(torch.Tensor, mark, outcome)
