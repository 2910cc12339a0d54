"""Pickles are read as data: as Python's own unpickler reads them, and without doing anything of what they say."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import FormatError
from cloudckpt.interop.pickle_reader import Global, Inert, read_pickle
from cloudckpt.interop.pickled_values import Plain

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


def read(data: bytes) -> Any:
    value, _, end = read_pickle(data, "it")
    assert end == len(data)
    return Plain(lambda path, saved: None, len(data)).value(value)


@given(plain, st.integers(0, 5))
def test_reads_what_pickle_writes(value: Any, protocol: int):
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple))


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes):
    with contextlib.suppress(FormatError):
        read_pickle(data, "it")


@given(plain, st.data())
def test_damaged_pickles(value: Any, data: st.DataObject):
    raw = bytearray(pickle.dumps({"a": value, "b": OrderedDict(c=Path("x"))}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        found, _, _ = read_pickle(bytes(raw), "it")
        Plain(lambda path, saved: None, len(raw)).value(found)


class Attack:
    """Runs a function wherever it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path: Path, protocol: int):
    target = tmp_path / "made"
    data = pickle.dumps({"x": [Attack(os.mkdir, str(target))]}, protocol)
    value, named, _ = read_pickle(data, "it")
    assert not target.exists()
    assert named == {"posix.mkdir"}
    made = value["x"][0]
    assert (type(made), made.kind, made.args) == (Inert, "posix.mkdir", (str(target),))
    keeps = Plain(lambda path, saved: None, len(data))
    keeps.value(value)
    assert [str(left) for left in keeps.left] == ["x.0: posix.mkdir"]


ATTACKS = {
    "inst": b"(S'echo'\niposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'echo'\no.",
    "newobj": b"cposix\nsystem\n(S'echo'\nt\x81.",
    "popped": b"cposix\nsystem\n(S'echo'\ntR0N.",
    "built": b"}cposix\nsystem\n(tR}b.",
    "stack global": b"\x8c\x05posix\x8c\x06system\x93).R"[:-3] + b")R.",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_every_way_to_call(name: str):
    assert read_pickle(ATTACKS[name], "it")[1] == {"posix.system"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"]}b.", "a state for list"),
        (b"]K\x01\x85R.", "a call of list"),
        (b"cposix\nsystem\n}b.", "a state for Global"),
        (b"cposix\nsystem\nN]Nae.", "no mark"),
        (b"\x82\x01.", "opcode 0x82 is not for files"),
        (b"\x97.", "opcode 0x97 is not for files"),
        (b"(0.", "empty"),
        (b"}(K\x01u.", "a key without a value"),
        (b"h\x05.", "5"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes are wanted where it ends"),
        (b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes are wanted where it ends"),
        (b"}" + b")" + b"\x85" * 100 + b"Ns.", "a key nested more than"),
        (b"I" + b"9" * 5000 + b"\n.", "limit"),
    ],
)
def test_malformed(data: bytes, says: str):
    with pytest.raises(FormatError, match=says):
        read_pickle(data, "it")


def test_a_large_memo_index_takes_no_memory():
    assert read_pickle(b"Nr\xff\xff\xff\x7f.", "it")[0] is None


def test_deep_nesting():
    data = b"(" * 100_000 + b"t" * 100_000 + b"."
    value, _, _ = read_pickle(data, "it")
    with pytest.raises(FormatError, match="nested too deeply"):
        Plain(lambda path, saved: None, len(data)).value(value)


def test_few_bytes_that_come_to_many_values():
    """Each list holds the one before it twice: 2**100 values."""
    data = b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(100)) + b"."
    value, _, _ = read_pickle(data, "it")
    start = time.process_time()
    with pytest.raises(FormatError, match="more values than a file of this size"):
        Plain(lambda path, saved: None, len(data)).value(value)
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    "data",
    [
        b"c__builtin__\nbytes\n\x8a\x06\x00\x00\x00\x00\x00\x40\x85R.",
        b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x40\x85R.",
        b"cfractions\nFraction\nX\x0b\x00\x00\x001e999999999\x85R.",
        b"ctorch.serialization\n_get_layout\nX\x0a\x00\x00\x00torch.load\x85R.",
        b"ctorch\nload\n.",
        b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.",
    ],
)
def test_values_that_are_refused(data: bytes):
    value, _, _ = read_pickle(data, "it")
    keeps = Plain(lambda path, saved: None, len(data))
    keeps.value(value)
    assert len(keeps.left) == 1


def test_globals_are_names():
    assert read_pickle(b"\x8c\x05torch\x8c\x07float32\x93.", "it")[0] == Global("torch.float32")
