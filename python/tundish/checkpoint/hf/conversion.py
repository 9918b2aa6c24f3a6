"""Converts the tensors of the training to those in the files, in small groups called units.

A unit is the least that has to be in one place at once: a tensor that is saved as it is, or the tensors that a
conversion takes together.

Invariants:
    - Names, shapes and dtypes of the products are known before a value is looked at.
    - Each product belongs to one unit. A conversion sees no more than its unit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.tensor_names import check_name
from tundish.checkpoint.tensors import DTYPES, Facts, is_fp8
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "Conversion",
    "Convert",
    "ToHf",
    "Unit",
    "as_they_are",
    "by_function",
    "by_reverting",
    "cast",
    "together",
]

ToHf = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
Convert = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Sources and products that belong together, by number.

    `convert` makes the products, in order, of the whole sources, in order; None where a single source is the product.
    """

    sources: tuple[int, ...]
    products: tuple[int, ...]
    convert: Convert | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """All units, and what the files will hold; equal to itself alone.

    `sources`: what there is. `products`: what is made of it, in the order in which files are filled. `blocks`: a number
    a product; products of the same number go into the same file.
    """

    sources: tuple[Facts, ...]
    units: tuple[Unit, ...]
    products: tuple[Facts, ...]
    blocks: tuple[int, ...]

    @functools.cached_property
    def converts(self) -> bool:
        """Whether anything is not saved as it is."""
        return any(unit.convert is not None for unit in self.units)

    @functools.cached_property
    def unit_of(self) -> list[Unit]:
        """The unit of each product."""
        units = {product: unit for unit in self.units for product in unit.products}
        return [units[product] for product in range(len(self.products))]


# A training loop saves the same tensors again and again, and with thousands of them this costs milliseconds.
@functools.lru_cache(maxsize=4)
def as_they_are(sources: tuple[Facts, ...]) -> Conversion:
    """Every source is a product."""
    numbers = range(len(sources))
    return Conversion(
        sources=sources,
        units=tuple([Unit(sources=(number,), products=(number,), convert=None) for number in numbers]),
        products=sources,
        blocks=tuple(numbers),
    )


def by_function(sources: tuple[Facts, ...], to_hf: ToHf) -> Conversion:
    """`to_hf` turns each source into its products.

    To learn their names and shapes it is called with a tensor on the meta device; where it cannot deal with
    that, with zeros.

    Raises:
        InvalidTypeError: it gives something else than pairs of a name and a tensor.
        InvalidInputError: a name cannot be used, or is given twice.
        Whatever `to_hf` raises.
    """
    units: list[Unit] = []
    products: list[Facts] = []
    for number, (name, shape, dtype) in enumerate(sources):
        given, pairs = _trial(to_hf, name, shape, dtype)
        start = len(products)
        products += [(product, tensor.shape, tensor.dtype) for product, tensor in pairs]
        is_same = len(pairs) == 1 and pairs[0][1] is given
        units.append(
            Unit(
                sources=(number,),
                products=tuple(range(start, len(products))),
                convert=None if is_same else _converting(to_hf, name, products[start:]),
            )
        )
    if not products:
        raise InvalidInputError("there is nothing to save: to_hf gives no tensor")
    _refuse_same(products, "to_hf gives")
    return Conversion(
        sources=sources,
        units=tuple(units),
        products=tuple(products),
        blocks=tuple(range(len(products))),
    )


def by_reverting(
    sources: tuple[Facts, ...], revert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
) -> Conversion:
    """`revert` turns all sources into all products at once, and a part of them into what comes of that part.

    Which part a product needs is found by letting `revert` work on tensors without values that remember what they
    were made of. Products that `revert` cuts out of one tensor, as views, make a block.

    Raises `InvalidInputError` where a product is made of nothing.
    """
    metas = [_Traced.of(number, shape, dtype) for number, (_, shape, dtype) in enumerate(sources)]
    named: dict[str, torch.Tensor] = {name: meta for (name, _, _), meta in zip(sources, metas, strict=True)}
    with torch.no_grad():
        outcome = revert(named)
    if outcome is named:
        return as_they_are(sources)
    products = tuple([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in outcome.items()])
    storages: dict[int, int] = {}
    blocks = tuple(
        storages.setdefault(tensor.untyped_storage()._cdata, number)
        for number, tensor in enumerate(outcome.values())
    )
    identities = {id(meta): number for number, meta in enumerate(metas)}
    units: list[Unit] = []
    groups = _Groups()
    for number, (name, tensor) in enumerate(outcome.items()):
        origins = getattr(tensor, "origins", frozenset[int]())
        if not origins:
            raise InvalidInputError(f"cannot tell which weights {name!r} is converted from: give a to_hf")
        if id(tensor) in identities:
            units.append(Unit(sources=(identities[id(tensor)],), products=(number,), convert=None))
        else:
            groups.add(origins, number)
    for origins, made in groups:
        names = [sources[origin][0] for origin in origins]
        shapes = [products[number] for number in made]
        units.append(Unit(sources=origins, products=made, convert=_reverting(revert, names, shapes)))
    units.sort(key=lambda unit: unit.products)
    return Conversion(sources=sources, units=tuple(units), products=products, blocks=blocks)


def together(parts: Sequence[tuple[str, Conversion]]) -> Conversion:
    """The conversions of several models, whose names begin with the prefix that stands before each."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    sources: list[Facts] = []
    units: list[Unit] = []
    products: list[Facts] = []
    blocks: list[int] = []
    for prefix, part in parts:
        before, made = len(sources), len(products)
        sources += [(prefix + name, shape, dtype) for name, shape, dtype in part.sources]
        products += [(prefix + name, shape, dtype) for name, shape, dtype in part.products]
        blocks += [block + made for block in part.blocks]
        units += [
            Unit(
                sources=tuple(number + before for number in unit.sources),
                products=tuple(number + made for number in unit.products),
                convert=unit.convert,
            )
            for unit in part.units
        ]
    _refuse_same(products, "the models together have")
    return Conversion(
        sources=tuple(sources), units=tuple(units), products=tuple(products), blocks=tuple(blocks)
    )


def cast(conversion: Conversion, dtype: torch.dtype | None, keep: str | None) -> tuple[Facts, ...]:
    """The products as the files hold them: floats become `dtype`.

    As given stay fp8 tensors and what scales them: what is called a scale, in their module or in one around it, as
    scales of a key-value cache lie beside the projections. As given stay also what is no float, and what is made of a
    source whose name the regular expression `keep` is found in.

    Raises `InvalidTypeError` for a dtype that files cannot hold.
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


def _trial(
    to_hf: ToHf, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """What `to_hf` is called with to learn what it makes of `name`, and what that is."""
    given = torch.empty(shape, dtype=dtype, device="meta")
    try:
        return given, _pairs(to_hf, name, given)
    except Exception:  # noqa: BLE001 (whatever it is that has no answer without values, it is asked again)
        given = torch.zeros(shape, dtype=dtype, device="cpu")
        return given, _pairs(to_hf, name, given)


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


def _converting(to_hf: ToHf, name: str, products: Sequence[Facts]) -> Convert:
    expected = [(product, tuple(shape)) for product, shape, _ in products]

    def convert(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = _pairs(to_hf, name, tensors[0])
        if [(product, tuple(tensor.shape)) for product, tensor in pairs] != expected:
            raise InvalidInputError(
                f"to_hf makes {[(product, tuple(tensor.shape)) for product, tensor in pairs]} of {name!r}, but made "
                f"{expected} when the save was planned: names and shapes must follow from name, shape and dtype alone"
            )
        return [tensor for _, tensor in pairs]

    return convert


def _reverting(
    revert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    names: Sequence[str],
    products: Sequence[Facts],
) -> Convert:
    expected = [tuple(shape) for _, shape, _ in products]

    def convert(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            made = list(revert(dict(zip(names, tensors, strict=True))).values())
        # Not by name: a renaming may depend on weights outside of the unit.
        if [tuple(tensor.shape) for tensor in made] != expected:
            raise InvalidInputError(
                f"the conversion of {', '.join(names)} gives other shapes for them alone than among all weights: give "
                "a to_hf that converts them"
            )
        return made

    return convert


def _refuse_same(products: Sequence[Facts], who: str) -> None:
    seen: set[str] = set()
    for name, _, _ in products:
        if name in seen:
            raise InvalidInputError(f"{who} the name {name!r} twice")
        seen.add(name)


class _Traced(torch.Tensor):
    """A tensor without values that remembers which sources it was made of."""

    origins: frozenset[int]

    @classmethod
    def of(cls, number: int, shape: Sequence[int], dtype: torch.dtype) -> _Traced:
        traced = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        traced.origins = frozenset([number])
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        origins = frozenset[int]().union(*(one.origins for one in _traced_in([args, kwargs or {}])))
        with torch._C.DisableTorchFunctionSubclass():
            outcome = func(*args, **(kwargs or {}))
        return _mark(outcome, origins)


def _traced_in(value: Any) -> Iterator[_Traced]:
    if isinstance(value, _Traced):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _traced_in(item)
    elif isinstance(value, dict):
        yield from _traced_in(list(value.values()))


def _mark(outcome: Any, origins: frozenset[int]) -> Any:
    if isinstance(outcome, torch.Tensor):
        marked = outcome if isinstance(outcome, _Traced) else outcome.as_subclass(_Traced)
        marked.origins = origins | getattr(marked, "origins", frozenset())
        return marked
    if type(outcome) in (list, tuple):
        return type(outcome)(_mark(item, origins) for item in outcome)
    return outcome


class _Groups:
    """Products together with the sources they need, joined wherever they share one."""

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}
        self._products: dict[int, list[int]] = {}

    def add(self, origins: frozenset[int], product: int) -> None:
        """`product` needs all of `origins`."""
        roots = {self._root(origin) for origin in origins}
        root = min(roots)
        for other in roots - {root}:
            self._joined[other] = root
            self._products.setdefault(root, []).extend(self._products.pop(other, []))
        self._products.setdefault(root, []).append(product)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        sources: dict[int, list[int]] = {}
        for origin in sorted(self._joined):
            sources.setdefault(self._root(origin), []).append(origin)
        for root, products in self._products.items():
            yield tuple(sources[root]), tuple(sorted(products))

    def _root(self, origin: int) -> int:
        above = self._joined.setdefault(origin, origin)
        while above != origin:
            origin, above = above, self._joined[above]
        return origin
