"""The official library is the oracle: what it refuses is refused here, and what it accepts is accepted."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from cloudckpt.errors import FormatError, NotFoundError, StoreError
from cloudckpt.interop import safetensors_header
from cloudckpt.interop.safetensors_header import DTYPE_BITS, LENGTH_BYTES, Header, read_header
from cloudckpt.store.memory import MemoryStore
from tests.interop.safetensors_files import entry, file_bytes

ONE = json.dumps(entry())
STRICTER = re.compile(r"twice|must be an object with|unknown dtype \{\.\.\.\}")
"""What is refused here alone: names and fields given twice, and entries and dtypes in forms that no writer uses."""


def read(data: bytes) -> Header:
    store = MemoryStore("memory://safetensors-header")
    store.put("model.safetensors", data)
    return read_header(store, "model.safetensors", len(data))


def official(data: bytes) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        return deserialize(data)
    except SafetensorError:
        return None


def refusal(data: bytes) -> str | None:
    try:
        read(data)
    except FormatError as error:
        return str(error)
    return None


def compare(data: bytes) -> Header | None:
    theirs, said = official(data), refusal(data)
    if said is not None:
        assert "model.safetensors: " in said
        assert theirs is None or STRICTER.search(said), f"refused, though the official library reads it: {said}"
        return None
    assert theirs is not None, "read, though the official library refuses it"
    header = read(data)
    found = {t.name: (t.dtype, list(t.shape), data[t.byte_offset :][: t.nbytes]) for t in header.tensors}
    assert found == {name: (view["dtype"], view["shape"], bytes(view["data"])) for name, view in theirs}
    return header


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"a": first, "b": second}


NESTED = "[" * 125 + "]" * 125
VALID = {
    "empty metadata": ({"__metadata__": {}}, b""),
    "no tensors": ({}, b""),
    "null metadata": ({"__metadata__": None}, b""),
    "0-dim": ({"a": entry("F64", (), (0, 8))}, bytes(8)),
    "empty": ({"a": entry("F32", (0, 3), (0, 0))}, b""),
    "empty among others": ({"a": entry(), "b": entry("F32", (0,), (4, 4)), "c": entry("I32", (1,), (4, 8))}, bytes(8)),
    "empty, with a huge extent": ({"a": entry("F32", (0, 2**40, 2**40), (0, 0))}, b""),
    "not sorted": (two(entry(data_offsets=(4, 8)), entry()), bytes(8)),
    "padded": (f"{{}}{' ' * 6}", b""),
    "padded with tabs and lines": ("{}\t\r\n", b""),
    "padded in front": (" {}", b""),
    "spread": (f' {{ "a" : {ONE} , "b" : {json.dumps(entry(data_offsets=(4, 8)))} }} ', bytes(8)),
    "more fields": ({"a": entry(more=[1, {"x": None}])}, bytes(4)),
    "an empty name": ({"": entry()}, bytes(4)),
    "a name with a null": ({"a\0b": entry()}, bytes(4)),
    "a name in escapes": (f'{{"\\ud83d\\ude00\\u00e9": {ONE}}}', bytes(4)),
    "half-byte elements": ({"a": entry("F4", (3, 2), (0, 3))}, bytes(3)),
    "six-bit elements": ({"a": entry("F6_E2M3", (4,), (0, 3))}, bytes(3)),
    "nested as deep as may be": (f'{{"a": {ONE[:-1]}, "x": {NESTED}}}}}', bytes(4)),
    "a huge number in another field": (f'{{"a": {ONE[:-1]}, "x": {"9" * 300}}}}}', bytes(4)),
}


@pytest.mark.parametrize(("header", "data"), VALID.values(), ids=VALID)
def test_accepted(header: Any, data: bytes):
    assert compare(file_bytes(header, data)) is not None


MALFORMED = {
    "overlap": (two(entry(), entry(data_offsets=(2, 6))), bytes(6), "tensor 'b' overlaps tensor 'a', by 2 bytes"),
    "the same bytes": (two(entry(), entry()), bytes(4), "tensor 'b' overlaps tensor 'a'"),
    "gap": (
        two(entry(), entry(data_offsets=(5, 9))),
        bytes(9),
        "tensor 'b': the 1 bytes before it belong to no tensor",
    ),
    "gap in front": ({"a": entry(data_offsets=(1, 5))}, bytes(5), "tensor 'a': the 1 bytes before it"),
    "trailing bytes": ({"a": entry()}, bytes(7), "the 3 bytes at its end belong to no tensor"),
    "truncated": ({"a": entry()}, bytes(3), r"tensor 'a' ends at byte \d+, the file at \d+: it is cut off"),
    "size": ({"a": entry(shape=(2,))}, bytes(4), r"tensor 'a' of F32 \[2\] takes 8 bytes, its offsets 4"),
    "end before start": ({"a": entry(data_offsets=(4, 0))}, bytes(4), "tensor 'a' ends 4 bytes before it begins"),
    "part of a byte": ({"a": entry("F4", (3,), (0, 2))}, bytes(2), "tensor 'a': 3 elements of 4 bits"),
    "negative offset": ({"a": entry(data_offsets=(-4, 0))}, b"", r"tensor 'a': its data_offsets .* \[-4, 0\]"),
    "negative size": ({"a": entry(shape=(-1,))}, bytes(4), r"tensor 'a': its shape .* \[-1\]"),
    "float offset": ({"a": entry(data_offsets=(0, 4.0))}, bytes(4), "tensor 'a': its data_offsets"),
    "float size": ({"a": entry(shape=(1.0,))}, bytes(4), "tensor 'a': its shape"),
    "boolean size": ({"a": entry(shape=(True,))}, bytes(4), "tensor 'a': its shape"),
    "negative zero": ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-0, 4]}}', bytes(4), "data_offsets"),
    "text as a shape": ({"a": {**entry(), "shape": "1"}}, bytes(4), "tensor 'a': its shape"),
    "three offsets": ({"a": entry(data_offsets=(0, 2, 4))}, bytes(4), "tensor 'a': its data_offsets"),
    "overflow": ({"a": entry(shape=(2**40, 2**40))}, bytes(4), "tensor 'a': the shape .* 64 bits"),
    "overflow before a zero": (
        {"a": entry(shape=(2**40, 2**40, 0), data_offsets=(0, 0))},
        b"",
        "tensor 'a': the shape",
    ),
    "a size of 65 bits": ({"a": entry(shape=(0, 2**64), data_offsets=(0, 0))}, b"", "tensor 'a': its shape"),
    "unknown dtype": ({"a": entry("F7")}, bytes(4), "tensor 'a' has an unknown dtype 'F7'; known are BF16, BOOL"),
    "dtype of another kind": ({"a": {**entry(), "dtype": 1}}, bytes(4), "tensor 'a' has an unknown dtype 1"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), "tensor 'a' has no dtype"),
    "no fields": ({"a": {}}, b"", "tensor 'a' has no dtype, shape, data_offsets"),
    "not an object": ({"a": 7}, b"", "tensor 'a' must be an object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__ must be an object of strings"),
    "metadata as a list": ({"__metadata__": ["a"]}, b"", "__metadata__ must be an object of strings"),
    "metadata twice": ('{"__metadata__": {}, "__metadata__": {}}', b"", "__metadata__ is given twice"),
    "a field twice": (f'{{"a": {{"dtype": "F32", {ONE[1:]}}}', bytes(4), "valid JSON.* one name twice"),
    "nested too deep": (f'{{"a": {ONE[:-1]}, "x": [{NESTED}]}}}}', bytes(4), "tensor 'a' is nested more than 126"),
    "nested without end": (f'{{"a": {"[" * 10**6}', b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not UTF-8"),
    "half a surrogate pair": (f'{{"\\ud83d": {ONE}}}', bytes(4), "not valid JSON"),
    "half a pair in metadata": ('{"__metadata__": {"a": "\\udc00"}}', b"", "not valid JSON"),
    "not JSON": ("{'a': 1}", b"", "not valid JSON"),
    "NaN": (f'{{"a": {ONE[:-1]}, "x": NaN}}}}', bytes(4), "not valid JSON"),
    "a number out of range": (f'{{"a": {ONE[:-1]}, "x": 1e999}}}}', bytes(4), "not valid JSON"),
    "an int out of range": (f'{{"a": {ONE[:-1]}, "x": {"9" * 5000}}}}}', bytes(4), "not valid JSON"),
    "a comma too many": (f'{{"a": {ONE},}}', bytes(4), "not valid JSON after 'a'"),
    "no comma": (f'{{"a": {ONE} "b": {ONE}}}', bytes(4), "not valid JSON"),
    "no colon": (f'{{"a" {ONE}}}', bytes(4), "not valid JSON"),
    "a number as a name": (f"{{1: {ONE}}}", bytes(4), "not valid JSON: no name"),
    "no end": ('{"a": ', b"", "not valid JSON"),
    "text behind it": ("{} {}", b"", "not valid JSON"),
    "nulls behind it": ("{}\0\0", b"", "not valid JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", b"", "not a JSON object"),
    "nothing": ("", b"", "not a JSON object"),
    "a list": ("[]", b"", "not a JSON object"),
    "null": ("null", b"", "not a JSON object"),
}


@pytest.mark.parametrize(("header", "data", "said"), MALFORMED.values(), ids=MALFORMED)
def test_refused(header: Any, data: bytes, said: str):
    made = file_bytes(header, data)
    assert official(made) is None
    with pytest.raises(FormatError, match=said) as caught:
        read(made)
    assert "safetensors-header/model.safetensors: " in str(caught.value)


STRICT = {
    "a tensor twice": (f'{{"a": {ONE}, "a": {ONE}}}', bytes(4), "tensor 'a' is listed twice"),
    "a field of its own twice": (f'{{"a": {ONE[:-1]}, "x": 1, "x": 1}}}}', bytes(4), "one name twice"),
    "metadata of one name": ('{"__metadata__": {"a": "1", "a": "2"}}', b"", "one name twice"),
    "an entry as a list": ('{"a": ["F32", [1], [0, 4]]}', bytes(4), "tensor 'a' must be an object with"),
    "a dtype as an object": (
        '{"a": {"dtype": {"F32": null}, "shape": [1], "data_offsets": [0, 4]}}',
        bytes(4),
        "dtype",
    ),
}


@pytest.mark.parametrize(("header", "data", "said"), STRICT.values(), ids=STRICT)
def test_stricter_than_the_official_library(header: Any, data: bytes, said: str):
    made = file_bytes(header, data)
    assert official(made) is not None
    assert compare(made) is None
    with pytest.raises(FormatError, match=said):
        read(made)


@pytest.mark.parametrize("nbytes", range(LENGTH_BYTES))
def test_a_file_too_short_for_a_length(nbytes: int):
    with pytest.raises(FormatError, match=f"{nbytes} bytes are no safetensors file"):
        read(bytes(nbytes))


@pytest.mark.parametrize("length", [3, 100_000_001, 2**32, 2**60, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_takes_no_memory(length: int):
    made = file_bytes("{}", length=length)
    assert official(made) is None
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"cut off|would be"):
            read(made)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_all_data_types_of_the_official_library():
    with pytest.raises(SafetensorError) as caught:
        deserialize(file_bytes({"a": entry("?")}, bytes(4)))
    assert set(re.findall("`([A-Z0-9_]+)`", str(caught.value))) == set(DTYPE_BITS)
    for dtype, bits in DTYPE_BITS.items():
        assert compare(file_bytes({"a": entry(dtype, (8,), (0, bits))}, bytes(bits))) is not None


def test_one_request_and_a_second_for_a_long_header(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore("memory://safetensors-requests")
    data = file_bytes({f"tensor.{i}": entry(data_offsets=(4 * i, 4 * i + 4)) for i in range(50)}, bytes(200))
    store.put("x.safetensors", data)
    for limit, requests in [(len(data), 1), (len(data) - 200, 1), (len(data) - 201, 2), (8, 2)]:
        monkeypatch.setattr(safetensors_header, "FIRST_READ_BYTES", limit)
        before = store.counts.gets
        assert len(read_header(store, "x.safetensors", len(data)).tensors) == 50
        assert store.counts.gets - before == requests


def test_a_file_that_is_not_there_or_shorter_than_listed():
    store = MemoryStore("memory://safetensors-absent")
    with pytest.raises(NotFoundError):
        read_header(store, "x.safetensors", 100)
    store.put("x.safetensors", file_bytes({}))
    with pytest.raises(StoreError, match="ends at byte"):
        read_header(store, "x.safetensors", 100)


NAMES = st.text(max_size=4) | st.sampled_from(["a", "b", "__metadata__", "\ud83d", '"', "\\"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid one, whose entries stand in any order, and the bytes of its data."""
    names = draw(st.lists(st.text(max_size=4).filter(lambda n: n != "__metadata__"), unique=True, max_size=4))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = [*draw(st.lists(st.integers(0, 3), max_size=2)), *([4] if DTYPE_BITS[dtype] % 8 else [])]
        elements = list(itertools.accumulate(shape, lambda a, b: a * b, initial=1))[-1]
        start, end = end, end + elements * DTYPE_BITS[dtype] // 8
        header[name] = entry(dtype, shape, (start, end))
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    order = draw(st.permutations(list(header)))
    return {name: header[name] for name in order}, end


@given(made=headers(), padding=st.text(" \t\r\n", max_size=4), ascii_only=st.booleans())
def test_valid_files(made: tuple[dict[str, Any], int], padding: str, ascii_only: bool):
    header, nbytes = made
    data = (bytes(range(256)) * (nbytes // 256 + 1))[:nbytes]
    found = compare(file_bytes(json.dumps(header, ensure_ascii=ascii_only) + padding, data))
    assert found is not None
    assert found.metadata == header.get("__metadata__", {})


@given(data=st.data(), made=headers())
def test_files_with_a_value_changed(data: st.DataObject, made: tuple[dict[str, Any], int]):
    header, nbytes = made
    name = data.draw(st.sampled_from([*header, "new"]))
    if isinstance(header.get(name), dict) and data.draw(st.booleans()):
        field = data.draw(st.sampled_from([*header[name], "new"]))
        old = header[name].get(field)
        if isinstance(old, list) and old and data.draw(st.booleans()):
            old[data.draw(st.integers(0, len(old) - 1))] = data.draw(JUNK | st.integers(0, 64))
        else:
            header[name][field] = data.draw(JUNK | st.lists(st.integers(0, 9), max_size=3))
    else:
        header[name] = data.draw(JUNK)
    nbytes = max(0, nbytes + data.draw(st.sampled_from([0, 0, 0, -1, 1, 4])))
    compare(file_bytes(json.dumps(header), bytes(nbytes)))


PIECES = [
    *'{}[]",:0-1. \\\x00\t',
    "1e5",
    "1e999",
    "NaN",
    "null",
    "true",
    '"a":',
    '"__metadata__":',
    "\\ud83d",
    "\\u0041",
    "é",
    "[]",
]


@given(data=st.data(), made=headers())
def test_files_with_some_of_their_text_changed(data: st.DataObject, made: tuple[dict[str, Any], int]):
    header, nbytes = made
    text = json.dumps(header)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(["", *PIECES])) + text[at + data.draw(st.integers(0, 3)) :]
    compare(file_bytes(text, bytes(nbytes)))


@given(data=st.data(), made=headers())
def test_files_with_some_of_their_bytes_changed(data: st.DataObject, made: tuple[dict[str, Any], int]):
    header, nbytes = made
    raw = bytearray(file_bytes(header, bytes(nbytes)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    compare(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) - 1, 9]))]))
