"""Handles: what they say, how they travel, and what becomes of bytes that somebody else made."""

from __future__ import annotations

import copy
import pickle
import random
import struct
import tracemalloc
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor import RTensor, TensorShardInfo, dumps, loads

META = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")


def handle(number: int = 7, data: torch.Tensor = META, owner: str = "10.0.0.1:4000") -> RTensor:
    return RTensor(TensorShardInfo(f"00000000000000ff-{number}", owner), data)


def test_a_handle_shows_its_shape_and_dtype_without_a_fetch() -> None:
    one = handle()
    assert (one.shape, one.dtype, one.ndim, one.nbytes, len(one)) == (
        torch.Size([4, 8]),
        torch.bfloat16,
        2,
        64,
        4,
    )
    assert one.shard == TensorShardInfo("00000000000000ff-7", "10.0.0.1:4000", None)
    assert one.data.is_meta and one.data.shape == (4, 8)
    assert type(one.shape) is torch.Size
    assert repr(one) == (
        "RTensor(shape=[4, 8], dtype=torch.bfloat16, shard 00000000000000ff-7 of 10.0.0.1:4000)"
    )


def test_a_handle_takes_shape_and_dtype_of_a_tensor_and_does_not_keep_it() -> None:
    one = RTensor(TensorShardInfo("a", "nowhere:1"), torch.arange(3))
    assert (one.shape, one.dtype, one.data.is_meta) == (torch.Size([3]), torch.int64, True)


def test_rows_are_chosen_as_of_a_tensor() -> None:
    one, like = handle(), torch.arange(4)
    for key in (slice(1, 3), slice(None), slice(-1, None), slice(2, 99), slice(3, 1)):
        assert len(one[key]) == len(like[key]) and one[key].shape == (len(like[key]), 8)
    assert one[1:][1:2].rows == (2, 3)
    assert one[1:3].shard == one.shard and one.rows is None
    for wrong in (1, (slice(1), 2), slice(0, 4, 2), None, ...):
        with pytest.raises(InvalidTypeError, match="make it local first"):
            one[wrong]
    scalar = handle(data=torch.empty((), device="meta"))
    with pytest.raises(InvalidTypeError, match="no rows"):
        scalar[:1]
    with pytest.raises(InvalidTypeError, match="no length"):
        len(scalar)


def test_handles_of_the_same_rows_are_equal() -> None:
    assert handle() == handle() and hash(handle()) == hash(handle())
    assert handle() != handle(8) and handle() != handle()[1:2] and handle() != handle(owner="10.0.0.2:4000")
    assert len({handle(), handle(), handle()[:2], handle()[:2]}) == 2
    assert handle() != 7 and not handle() == "a"  # noqa: SIM201 (what `==` says is looked at)


def test_names_and_dtypes_that_no_shard_has_are_refused() -> None:
    for name in ("", "a/b", "a b", "ä", "x" * 129):
        with pytest.raises(InvalidInputError, match="a shard id"):
            RTensor(TensorShardInfo(name, "a:1"), META)
    with pytest.raises(InvalidTypeError, match="cannot be stored"):
        RTensor(TensorShardInfo("a", "a:1"), SimpleNamespace(shape=(1,), dtype=torch.qint8, is_meta=True))


@pytest.mark.parametrize("addr", ["h x:1", "h:1\n", "h\0:1", "ä:1", "h\ud800:1", "h" * 299 + ":1"])
def test_an_address_that_none_is_is_refused_where_a_handle_is_made(addr: str) -> None:
    with pytest.raises(
        InvalidInputError, match="an address of an owner is host:port, up to 300 ASCII characters"
    ):
        RTensor(TensorShardInfo("a", addr), META)


@pytest.mark.parametrize("addr", ["local", "[fe80::1%eth0]:1", "h" * 298 + ":1"])
def test_an_address_that_a_handle_takes_travels(addr: str) -> None:
    one = RTensor(TensorShardInfo("a", addr), META)
    assert loads(dumps([one])) == [one]


@pytest.mark.parametrize("addr", ["my store", "h" * 301])
def test_a_handle_with_a_backend_reference_is_refused_by_dumps_with_its_path(addr: str) -> None:
    (one,) = td._native.ShardStore().put([torch.ones(1)], addr, 1.0)
    why = r"^obj\['a'\]\[1\] is a handle that cannot travel: an address of an owner is host:port"
    with pytest.raises(InvalidTypeError, match=why):
        dumps({"a": [None, one]})


def test_a_handle_is_pickled_and_copied() -> None:
    for one in (handle(), handle()[1:3], RTensor(TensorShardInfo("some.name", "[::1]:80"), META)):
        for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
            assert again == one and again.shape == one.shape and again.dtype == one.dtype
    referring = handle().with_ref({"any": "object"})
    again = pickle.loads(pickle.dumps(referring))
    assert again.ref == {"any": "object"} and again.shard.ref == {"any": "object"}
    with pytest.raises(InvalidTypeError, match="only Ray itself can carry"):
        dumps([referring])


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
def test_every_dtype_travels() -> None:
    known = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    stored = 0
    for dtype in known:
        if dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4):
            continue
        one = handle(data=torch.empty(2, dtype=dtype, device="meta"))
        assert loads(dumps(one)).dtype is dtype
        stored += 1
    assert stored > 20


def test_shards_are_collected_each_once() -> None:
    other = handle(9, owner="10.0.0.2:4000")
    nested = {"a": [handle(), handle(8), other], "b": (handle(), {"c": handle()[1:2]}), "d": ["text", None]}
    assert td.rtensor.flatten_shard_ids(nested) == [
        "00000000000000ff-7",
        "00000000000000ff-8",
        "00000000000000ff-9",
    ]
    assert td.rtensor.collect_shards(nested) == {
        "10.0.0.1:4000": ["00000000000000ff-7", "00000000000000ff-8"],
        "10.0.0.2:4000": ["00000000000000ff-9"],
    }
    assert td.rtensor.flatten_shard_ids({"nothing": ["here"]}) == []


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
handles = st.builds(
    lambda number, shape, owner: handle(number, torch.empty(shape, device="meta"), owner),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from(["10.0.0.1:4000", "host:80"]),
)
keys = st.recursive(
    st.text(max_size=9) | st.integers() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
nested = st.recursive(
    plain | handles,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=30,
)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(types_of, value)]
    return type(value)


@given(nested)
def test_dumped_handles_are_loaded_alike(value: Any) -> None:
    again = loads(dumps(value))
    assert again == value and types_of(again) == types_of(value)


def test_floats_and_large_integers_come_back_bit_for_bit() -> None:
    numbers = [
        0.0,
        -0.0,
        float("inf"),
        float("nan"),
        5e-324,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**63) - 1,
        1 << 5000,
    ]
    again = loads(dumps(numbers))
    assert [struct.pack("d", one) for one in again[:5]] == [struct.pack("d", one) for one in numbers[:5]]
    assert again[5:] == numbers[5:]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (torch.eye(2).to_sparse(), "obj is a tensor of torch.sparse_coo"),
        ({"a": [0, {"b": object()}]}, r"obj\['a'\]\[1\]\['b'\] is a builtins.object"),
        ([{1, 2}], r"obj\[0\] is a builtins.set"),
        ({(1, frozenset()): 1}, r"obj \(a key\)\[1\] is a builtins.frozenset"),
        ({torch.zeros(1): 1}, r"obj \(a key\) is a tensor"),
        ([bytearray(b"x")], r"obj\[0\] is a builtins.bytearray"),
        ([msgpack.ExtType(1, b"")], r"obj\[0\] is a msgpack"),
        ([True, "\ud800"], r"obj\[1\] .*surrogates not allowed"),
    ],
)
def test_dumps_refuses_other_types_with_their_path(value: Any, path: str) -> None:
    with pytest.raises(InvalidTypeError, match=path):
        dumps(value)


def test_depth_is_bounded_both_ways() -> None:
    own: list[Any] = []
    own.append(own)
    with pytest.raises(InvalidTypeError, match="a container that contains itself"):
        dumps(own)
    deep: Any = None
    for place in range(100):
        deep = ([deep], (deep,), {"a": deep})[place % 3]
    assert loads(dumps(deep)) == deep
    with pytest.raises(InvalidTypeError, match="deeper than 100 containers"):
        dumps([deep])
    # Lists and dicts of one item, again and again.
    for container in (
        b"\x91",
        b"\x81\xa0",
        b"\xdc\x00\x01",
        b"\x92" + msgpack.packb(msgpack.ExtType(1, b"")),
    ):
        for count in (101, 1_000, 100_000):
            with pytest.raises(InvalidInputError, match="100 containers"):
                loads(container * count + b"\xc0")


def test_hostile_bytes_are_refused_and_import_nothing() -> None:
    good = dumps(
        {
            "batch": [handle(), handle(8)[1:2], RTensor(TensorShardInfo("x.y", "h:1"), META)],
            "n": [1, 2.5, None],
        }
    )
    assert loads(good)["batch"][1].rows == (1, 2)
    for length in range(len(good)):
        with pytest.raises(InvalidInputError):
            loads(good[:length])
    fields = ["00000000000000ff-7", "h:1", "float32", [2, 2]]
    for field, wrong in [
        (0, "a/b"),
        (1, "h x"),
        (2, "qint8"),
        (2, "os.system"),
        (3, [-1]),
        (3, [2**63, 4]),
        (3, "ab"),
    ]:
        bad = [*fields]
        bad[field] = wrong
        with pytest.raises(InvalidInputError):
            loads(msgpack.packb(msgpack.ExtType(3, msgpack.packb(bad))))
    with pytest.raises(InvalidInputError):
        loads(msgpack.packb(msgpack.ExtType(3, msgpack.packb([*fields, [1, 3]]))))
    for tensor in (
        ["float32", [2], bytes(7)],
        ["float32", [-1, -2], bytes(8)],
        ["Tensor", [1], b"a"],
        ["int8", [0, 2**62, 9], b""],
    ):
        with pytest.raises(InvalidInputError):
            loads(msgpack.packb(msgpack.ExtType(4, msgpack.packb(tensor))))
    unknown = [msgpack.packb(msgpack.ExtType(code, b"")) for code in (0, 1, 5, 127)]
    stamp = msgpack.packb(msgpack.Timestamp(1))
    for bad_bytes in (pickle.dumps(handle()), b"", good + b"\x00", b"\xc1", stamp, b"\x81\x90\xc0", *unknown):
        with pytest.raises(InvalidInputError):
            loads(bad_bytes)
    with pytest.raises(InvalidTypeError, match="is a str"):
        loads("text")  # type: ignore[arg-type]
    draw = random.Random(0)
    for _ in range(20_000):
        damaged = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(good))] = draw.randrange(256)
        try:
            value = loads(bytes(damaged))
        except InvalidInputError:
            continue
        # Whatever it is, it is made of nothing else.
        assert dumps(value)


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf"])
def test_loads_allocates_nothing_for_claimed_lengths(header: bytes) -> None:
    # Containers in one another, each of which announces nearly all bytes that are left.
    length = 100_000
    bad = (header + (length // 3).to_bytes(4, "big")) * 90 + bytes(length)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError):
            loads(bad)
        assert tracemalloc.get_traced_memory()[1] < 100 * length
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
def test_tensors_inline_come_back_as_they_were() -> None:
    tensors = [
        torch.arange(6).view(2, 3),
        torch.rand(3, 2, dtype=torch.bfloat16).t(),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ]
    again = loads(dumps({"handle": handle(), "tensors": tensors, 3: None}))
    assert again["handle"] == handle() and again[3] is None
    for one, other in zip(again["tensors"], tensors, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (
            torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
            or not one.ndim
        )
    again["tensors"][0][0] = 9  # it may be written to
    assert bool(again["tensors"][2]) and torch.equal(
        loads(dumps(torch.ones(2, requires_grad=True))), torch.ones(2)
    )


def test_a_hundred_thousand_handles_are_small() -> None:
    numbers = random.Random(0).sample(range(10**9), 100_000)
    for many in (
        [handle(number) for number in numbers],
        [{"input_ids": handle(number), "reward": 0.5} for number in numbers],
    ):
        data = dumps(many)
        assert len(data) <= 100 * len(many)
        assert loads(data) == many
