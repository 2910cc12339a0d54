import contextlib
import datetime as dt
import math
import pathlib
import pickle
import uuid
import zoneinfo
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudckpt.errors import FormatError, InvalidStateError
from cloudckpt.format import scalars, values
from tests.format.exact import same

UTC = dt.UTC
EAST = dt.timezone(dt.timedelta(hours=5, minutes=45), "EAST")
ZURICH = zoneinfo.ZoneInfo("Europe/Zurich")


def labelled(candidates):
    return [pytest.param(value, id=f"{index}-{type(value).__name__}") for index, value in enumerate(candidates)]


def through_json(value, **options):
    return values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(value, **options))), **options)


keys = st.recursive(
    st.one_of(
        st.text(max_size=4),
        st.integers(),
        st.floats(allow_nan=False),
        st.booleans(),
        st.none(),
        st.binary(max_size=4),
        st.just("$"),
        st.characters(categories=["Cs"]),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
timezones = st.one_of(st.none(), st.sampled_from([UTC, EAST, ZURICH, dt.timezone.min]))
scalar_values = st.one_of(
    keys,
    st.floats(),
    st.complex_numbers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**53 - 1, 2**53, -(2**53) + 1, -(2**53), 2**63, 2**64]),
    st.binary().map(bytearray),
    st.datetimes(timezones=timezones),
    st.dates(),
    st.times(timezones=st.sampled_from([UTC, EAST]) | st.none()),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
    st.text(alphabet="a/.\\:", max_size=6)
    .flatmap(
        lambda text: st.sampled_from([pathlib.PurePosixPath(text), pathlib.PureWindowsPath(text), pathlib.Path(text)])
    )
    .filter(lambda path: type(path)(str(path)) == path),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: np.datetime64(n, "ns")),
    st.floats(width=16).map(ml_dtypes.bfloat16),
)
members = st.one_of(keys, st.frozensets(keys, max_size=2))
plain = st.recursive(
    scalar_values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items)),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.sets(members, max_size=4),
        st.frozensets(members, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(lambda items: SimpleNamespace(**items)),
    ),
    max_leaves=12,
)


@given(plain)
@example([0.0, -0.0, 5.0, 5, True, 1e22, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf])
@example({1: 1, "1": 2, (True,): 3, (1.5,): 4, None: 5, b"1": 6, "None": 7})
@example({"$": "tuple", "items": []})
@example([{"$": 1}, {"": {}}, [], (), set(), frozenset(), None, OrderedDict(), deque()])
@example(["\ud800", {"\udcff": "\ud83d\ude00"}, "\0", "\u2028"])
def test_round_trip_is_exact(value):
    assert same(through_json(value), value)


EXACT = [
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZURICH),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "UTC")),
    dt.time(1, 2, 3, 4, fold=1),
    UTC,
    EAST,
    ZURICH,
    Decimal("-0.00"),
    Decimal("sNaN123"),
    Decimal("1E+999999"),
    defaultdict(None, {1: 2}),
    defaultdict(int),
    deque([1, 2], 2),
    Namespace(lr=0.1, betas=(0.9, 0.95)),
    np.dtype("<f4"),
    np.dtype(">U5"),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.datetime64("NaT"),
    np.timedelta64(3, "D"),
    np.str_("a\0"),
    np.bytes_(b"a\0"),
    ml_dtypes.int4(-3),
    10**5000,
    -(10**5000),
    uuid.UUID(int=3),
    Fraction(-(2**70), 3),
    pathlib.Path("/tmp/x"),
    slice(None, 2**60, -1),
    range(2**70),
]


@pytest.mark.parametrize("value", labelled(EXACT))
def test_exact_types(value):
    found = through_json([value])[0]
    assert type(found) is type(value)
    if isinstance(value, np.generic):
        assert found.tobytes() == value.tobytes()
    else:
        assert repr(found) == repr(value) if not isinstance(value, int) else found == value
    if isinstance(value, (dt.datetime, dt.time)):
        assert (found.fold, found.tzinfo, found.tzname()) == (value.fold, value.tzinfo, value.tzname())


def test_plain_json_stays_plain_json():
    value = {"a": [1, 2.5, None, True, "x", {}], "b": {"": -0.0}}
    assert same(values.encode(value), value)
    assert values.encode((1,)) == {"$": "tuple", "items": [1]}
    assert values.encode({1: 2}) == {"$": "dict", "items": [[1, 2]]}
    assert values.encode(2**53) == {"$": "int", "hex": "0x20000000000000"}
    assert values.encode(math.nan) == {"$": "float", "value": "nan"}


def test_a_float_stays_a_float_in_json():
    # The bare form relies on this of any JSON codec that is used: integral floats keep a point or an exponent.
    assert msgspec.json.encode([5.0, -0.0, 1e22, 1e-7]) == b"[5.0,-0.0,1e22,1e-7]"
    assert same(msgspec.json.decode(b"[5.0,-0.0,1e22,1e-7]"), [5.0, -0.0, 1e22, 1e-7])


def test_every_nan_has_the_same_node():
    assert values.encode(math.inf - math.inf) == values.encode(float("nan")) == values.encode(-float("nan"))


@given(st.lists(members, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_equal_sets_have_equal_nodes(found, rng):
    shuffled = found.copy()
    rng.shuffle(shuffled)
    # Colliding members iterate in the order of insertion.
    assert values.encode(set(found)) == values.encode(set(shuffled))
    assert values.encode({8: set(found)}) == values.encode({8: set(shuffled)})


def test_set_order_is_that_of_the_json_text():
    assert values.encode({16, 8, 0, "x"}) == {"$": "set", "items": ["x", 0, 16, 8]}


def test_decoding_does_not_share_lists_with_the_node():
    node = {"a": [1]}
    found = values.decode(node)
    found["a"].append(2)
    assert node == {"a": [1]}


Point = namedtuple("Point", "x y")  # noqa: PYI024  # the untyped kind is what states hold


class Colour(IntEnum):
    RED = 1


@dataclass
class Settings:
    lr: float = 0.1


class MyDict(dict):
    pass


class MyStr(str):
    __slots__ = ()


SUBCLASSES = [Point(1, 2), Colour.RED, Settings(), MyDict(a=1), MyStr("a"), object(), len, Settings, 1j.__class__]
REFUSED = [
    *SUBCLASSES,
    np.zeros(2),
    np.longdouble(1),
    np.zeros(1, [("a", "f4")])[0],
    np.dtype([("a", "f4")]),
    memoryview(b"a"),
    slice("a"),
    defaultdict(lambda: 0),
    defaultdict(Settings),
    dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()),
    Ellipsis,
    pathlib.PureWindowsPath("//a/"),  # its str() is another path
]


@pytest.mark.parametrize("value", labelled(REFUSED))
def test_other_types_are_refused_by_path_type_and_ways_out(value):
    with pytest.raises(InvalidStateError) as caught:
        values.encode({"train": [0, {"x": value}]})
    text = str(caught.value)
    assert text.startswith("train.1.x: ")
    assert type(value).__qualname__ in text
    assert "allow_pickle=True" in text


@pytest.mark.parametrize("value", labelled([Colour.RED, frozenset({1}), MyStr("a"), np.int64(1), ((Colour.RED,),)]))
def test_other_key_types_are_refused(value):
    with pytest.raises(InvalidStateError, match=r"^a\.b: a dict key of type"):
        values.encode({"a": {"b": {value: 1}}})


@pytest.mark.parametrize("key", [math.nan, (1, math.nan)], ids=repr)
def test_nan_keys_are_refused(key):
    with pytest.raises(InvalidStateError, match="nan"):
        values.encode({key: 1})
    with pytest.raises(FormatError, match="nan"):
        values.decode({"$": "dict", "items": [[values.encode(key), 1]]})


def test_pickle_needs_consent_on_both_sides():
    value = {"a": [Point(1, 2), Settings(0.5), Colour.RED, MyDict(b=1)], "n": 1}
    node = msgspec.json.decode(msgspec.json.encode(values.encode(value, allow_pickle=True)))
    assert same(values.decode(node, allow_pickle=True), value)
    with pytest.raises(FormatError, match=r"^a\.0: .*allow_pickle=True"):
        values.decode(node)
    with pytest.raises(InvalidStateError, match=r"^a: .*cannot be pickled"):
        values.encode({"a": lambda: 0}, allow_pickle=True)


@pytest.mark.parametrize("raw", labelled([b"", b"cos\nabort\n(", b"\x80\x05cnope\nnope\n.", pickle.dumps(1)[:-1]]))
def test_broken_pickles_are_format_errors(raw):
    with pytest.raises(FormatError):
        values.decode({"$": "pickle", **scalars.pack_bytes(raw)}, allow_pickle=True)


def test_a_namespace_from_a_file_cannot_replace_its_class():
    for tag in ("Namespace", "SimpleNamespace"):
        found = values.decode({"$": tag, "items": [["__class__", 3], ["__dict__", 4]]})
        assert type(found).__name__ == found.__class__.__name__ == tag


def test_cycles_are_refused():
    cycle = {"a": [1]}
    cycle["a"].append((cycle,))
    with pytest.raises(InvalidStateError, match=r"^a\.1\.0: the state contains itself"):
        values.encode(cycle)


def test_the_same_object_twice_is_no_cycle():
    shared = [1]
    assert through_json([shared, {"a": shared}]) == [[1], {"a": [1]}]


def nested(levels, wrap):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"a": v},
        lambda v: {1: v},
        lambda v: frozenset([v]),
        lambda v: deque([v]),
    ],
    ids=["list", "tuple", "str dict", "int dict", "frozenset", "deque"],
)
def test_nesting_is_bounded_on_both_sides(wrap):
    deepest = nested(values.MAX_DEPTH, wrap)
    assert through_json(deepest) == deepest
    with pytest.raises(InvalidStateError, match="nested more than 200 levels"):
        values.encode(wrap(deepest))
    with pytest.raises(FormatError, match="nested more than 200 levels"):
        values.decode([values.encode(deepest)])


def test_deep_keys_are_bounded_too():
    with pytest.raises(InvalidStateError, match="nested more than 200 levels"):
        values.encode({nested(250, lambda v: (v,)): 1})


class Handle:
    def __init__(self, name):
        self.name = name


def test_leaf_comes_first_and_gets_the_path():
    seen = []

    def leaf(path, value):
        seen.append(path)
        return {"$": "handle", "name": value.name} if isinstance(value, Handle) else None

    state = {"a": [Handle("x"), (Handle("y"),)], 1: SimpleNamespace(h=Handle("z")), "s": {1}, "d": {(1, 2): 3}}
    node = values.encode(state, leaf=leaf)
    assert seen == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, 0), (1,), (1, "h"), ("s",), ("d",), ("d", (1, 2))]
    found = values.decode(node, leaf=lambda tagged: Handle(tagged["name"]))
    assert [found["a"][0].name, found["a"][1][0].name, found[1].h.name] == ["x", "y", "z"]
    with pytest.raises(FormatError, match=r"a\.0: unknown tag 'handle'"):
        values.decode(node)


def test_no_leaves_in_sets():
    with pytest.raises(InvalidStateError, match=r"^s: .*Handle"):
        values.encode({"s": {Handle("x")}}, leaf=lambda path, value: {"$": "h"} if isinstance(value, Handle) else None)


def test_a_leaf_encodes_what_it_wraps_under_its_own_path():
    def leaf(path, value):
        return {"$": "box", "value": values.encode(value.name, path=path)} if isinstance(value, Handle) else None

    with pytest.raises(InvalidStateError, match=r"^a\.0\.1: .*object"):
        values.encode({"a": [Handle([1, object()])]}, leaf=leaf)


def test_registered_types(monkeypatch):
    monkeypatch.setattr(scalars, "_BY_TYPE", scalars._BY_TYPE.copy())
    monkeypatch.setattr(scalars, "_BY_TAG", scalars._BY_TAG.copy())
    values.register(Handle, "test.Handle", lambda h: {"name": h.name}, lambda node: Handle(node["name"].upper()))
    assert values.encode([Handle("x")]) == [{"$": "test.Handle", "name": "x"}]
    assert through_json({"a": Handle("x")})["a"].name == "X"
    for node in ({"$": "test.Handle"}, {"$": "test.Handle", "name": 3}):
        with pytest.raises(FormatError):
            values.decode(node)
    for kind, tag in ((Handle, "new"), (Settings, "test.Handle"), (tuple, "new"), (Settings, "tuple"), (str, "new")):
        with pytest.raises(ValueError, match=r"registered already|built in"):
            values.register(kind, tag, vars, Settings)


@pytest.mark.parametrize("path", [(), ("a",), ("a", 0, "b.c", True, None, (1, "x"), 10**5000)], ids=len)
def test_dotted(path):
    assert values.dotted(path) == {0: "", 1: "a", 7: "a.0.b.c.True.None.(1, 'x').<int>"}[len(path)]


MALFORMED = [
    {"$": "no.such.tag"},
    {"$": None},
    {"$": []},
    {"$": 1},
    *(
        {"$": tag}
        for tag in ("tuple", "set", "dict", "OrderedDict", "deque", "Namespace", "int", "float", "str", "path")
    ),
    *(
        {"$": tag}
        for tag in ("bytes", "complex", "range", "slice", "datetime", "numpy", "numpy.dtype", "pickle", "UUID")
    ),
    {"$": "tuple", "items": {}},
    {"$": "tuple", "items": "ab"},
    {"$": "list", "items": []},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[1, 2, 3]]},
    {"$": "dict", "items": [{"1": 2}]},
    {"$": "dict", "items": [[[1], 2]]},
    {"$": "dict", "items": [[1, 2], [1, 3]]},
    {"$": "dict", "items": [[1, 2], [True, 3]]},
    {"$": "set", "items": [1, 1]},
    {"$": "set", "items": [[]]},
    {"$": "set", "items": [{"$": "tuple", "items": [{}]}]},
    {"$": "deque", "items": [1, 2], "maxlen": 1},
    {"$": "deque", "items": [], "maxlen": -1},
    {"$": "deque", "items": [], "maxlen": True},
    {"$": "deque", "items": [], "maxlen": 2**64},
    {"$": "deque", "items": []},
    {"$": "defaultdict", "items": []},
    {"$": "defaultdict", "items": [], "factory": "eval"},
    {"$": "defaultdict", "items": [], "factory": []},
    {"$": "Namespace", "items": [[1, 2]]},
    {"$": "int", "hex": "12"},
    {"$": "int", "hex": "0x0"},
    {"$": "int", "hex": "0x_1"},
    {"$": "float", "value": "1.0"},
    {"$": "float", "value": "NaN"},
    {"$": "bytes", "base64": "A"},
    {"$": "bytes", "base64": "AA=\n="},
    {"$": "str", "base64": "/w=="},
    {"$": "complex", "real": 1, "imag": 0.0},
    {"$": "range", "start": 0, "stop": 1, "step": 0},
    {"$": "range", "start": 0, "stop": True, "step": 1},
    {"$": "slice", "start": "a", "stop": None, "step": None},
    {"$": "datetime", "iso": "2024-01-01", "fold": 0, "tz": None},
    {"$": "datetime", "iso": "2024-01-01T00:00:00Z", "fold": 0, "tz": None},
    {"$": "datetime", "iso": "2024-01-01T00:00:00", "fold": 2, "tz": None},
    {"$": "datetime", "iso": "2024-01-01T00:00:00", "fold": 0, "tz": "UTC"},
    {"$": "datetime", "iso": "2024-01-01T00:00:00", "fold": 0, "tz": {"zone": "No/Where"}},
    {"$": "datetime", "iso": "2024-01-01T00:00:00", "fold": 0, "tz": {"offset_us": 10**15}},
    {"$": "date", "iso": "20240101"},
    {"$": "timedelta", "days": 10**12, "seconds": 0, "microseconds": 0},
    {"$": "ZoneInfo", "zone": "../etc/passwd"},
    {"$": "ZoneInfo", "zone": "Europe"},
    {"$": "ZoneInfo", "zone": ""},
    {"$": "path", "type": "Path", "value": "a"},
    {"$": "path", "type": "PurePosixPath", "value": 1},
    {"$": "numpy", "dtype": "<f4", "base64": "AAAA"},
    {"$": "numpy", "dtype": "<f16", "base64": "AAAA"},
    {"$": "numpy", "dtype": "|S999999999", "base64": ""},
    {"$": "numpy", "dtype": "|V3", "base64": "AAAA"},
    {"$": "numpy", "dtype": "|O", "base64": "AAAAAAAAAAA="},
    {"$": "numpy.dtype", "dtype": "float32"},
    {"$": "Decimal", "value": "1.0e"},
    {"$": "Decimal", "value": " 1"},
    {"$": "Fraction", "numerator": 1, "denominator": 0},
    {"$": "UUID", "value": "00000000000000000000000000000003"},
    math.nan,
    math.inf,
    b"bytes",
    (1, 2),
    {1: 2},
    object(),
]


@pytest.mark.parametrize("node", labelled(MALFORMED))
def test_malformed_nodes_are_format_errors(node):
    with pytest.raises(FormatError, match=r"^a\.1: "):
        values.decode({"a": [0, node]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = [
    *("items", "factory", "maxlen", "base64", "hex", "value", "real", "imag", "start", "stop", "step", "iso", "fold"),
    *("tz", "zone", "offset_us", "name", "type", "dtype", "days", "seconds", "microseconds", "numerator"),
    "denominator",
]
TAGS = sorted({*scalars._BY_TAG, *values.containers.BY_TAG, "pickle", "nope"})
wild_nodes = st.recursive(
    json_values,
    lambda inner: st.builds(
        lambda tag, fields: {"$": tag, **fields},
        st.sampled_from(TAGS),
        st.dictionaries(st.sampled_from(FIELD_NAMES), inner | st.lists(st.lists(inner, min_size=2, max_size=2))),
    ),
    max_leaves=6,
)


@given(wild_nodes)
def test_wild_nodes_decode_exactly_or_are_format_errors(node):
    try:
        value = values.decode(node)
    except FormatError:
        return
    assert same(through_json(value), value)


@given(plain, st.data())
def test_damaged_nodes_never_raise_anything_else(value, data):
    node = values.encode([value])
    places = []
    _collect(node, places)
    container, key = data.draw(st.sampled_from(places))
    container[key] = data.draw(json_values)
    with contextlib.suppress(FormatError):
        values.decode(node)


def _collect(node, places):
    if isinstance(node, (list, dict)):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            _collect(inner, places)
