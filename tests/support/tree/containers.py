"""Random containers of anything, for tests that take nested structures apart and put them together again."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any

from hypothesis import strategies as some

__all__ = ["KEYS", "containers"]

KEYS = some.text(max_size=3) | some.integers(0, 3) | some.tuples(some.integers(0, 2))


def containers(
    inner: some.SearchStrategy[Any], *, rows: type[list[Any]], keys: some.SearchStrategy[Any], most: int
) -> some.SearchStrategy[Any]:
    """Of up to `most` of `inner`: lists, also as `rows`, dicts, namespaces, and the same thing twice."""
    return (
        some.lists(inner, max_size=most).flatmap(
            lambda items: some.sampled_from([list, tuple, rows, deque]).map(lambda kind: kind(items))
        )
        | some.dictionaries(keys, inner, max_size=most).flatmap(
            lambda items: some.sampled_from(
                [dict, OrderedDict, lambda one: defaultdict(list, one), UserDict]
            ).map(lambda kind: kind(items))
        )
        | some.builds(lambda one, other: types.SimpleNamespace(a=one, b=other), inner, inner)
        | inner.map(lambda one: [one, {"again": one}])
    )
