import random
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.format import array_names
from cloudckpt.format.keys import check_key
from tests.format.exact import same

DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

atoms = st.one_of(
    st.text(max_size=6),
    st.text(alphabet="aA.bB-_cC/é", max_size=4),
    st.sampled_from(["c", "con", "nul.x", "zarr.json", "__", ".", "..", "w-0123456789abcdef", "e\u0301", "\u00e9"]),
    st.text(alphabet="xX", min_size=130, max_size=170),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, width=16),
    st.binary(max_size=3),
)
elements = st.one_of(atoms, st.tuples(atoms), st.tuples(atoms, atoms))
paths = st.lists(elements, max_size=4).map(tuple)


def distinct(candidates):
    found = []
    for path in candidates:
        if not any(same(path, other) for other in found):
            found.append(path)
    return found


@given(st.lists(paths, max_size=12))
@example([("a", "b"), ("a.b",), ("a", "b", ""), ("a", "", "b")])
@example([(1,), ("1",), (True,), (1.0,), ((1,),), ("True",)])
@example([("W",), ("w",), ("\u017f",), ("s",), ("S",)])
@example([("\u00e9",), ("e\u0301",), ("_",), ("",), ()])
@example([("a" * 160,), ("a" * 161,), ("a" * 160 + "b",), ("A" * 160,)])
def test_distinct_paths_get_distinct_safe_names(candidates):
    candidates = distinct(candidates)
    names = array_names.array_names(candidates)
    assert len({name.casefold() for name in names}) == len(candidates)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,160}", name)
        assert not name.startswith((".", "__"))
        assert not name.endswith(".")
        assert ".." not in name
        assert name.casefold() not in ("c", "zarr.json")
        assert not DEVICES.fullmatch(name)
        assert check_key(f"0123456789ab/{name}") == f"0123456789ab/{name}"


@given(st.lists(paths, max_size=10), st.randoms(use_true_random=False))
def test_names_depend_on_the_set_of_paths_only(candidates, rng: random.Random):
    expected = dict(zip(map(repr, candidates), array_names.array_names(candidates), strict=True))
    shuffled = candidates + candidates[:3]
    rng.shuffle(shuffled)
    assert array_names.array_names(shuffled) == [expected[repr(path)] for path in shuffled]


def test_ordinary_names_stay_as_they_are():
    ordinary = [("model", "layers", 0, "wq.weight"), ("optimizer", "state", "w", "exp_avg"), ("_x",), ("C2",), ("a-b",)]
    expected = ["model.layers.0.wq.weight", "optimizer.state.w.exp_avg", "_x", "C2", "a-b"]
    assert array_names.array_names(ordinary) == expected


def test_names_are_stable_between_versions():
    assert array_names.array_names([("a", "b"), ("a.b",), (1, ("x", b"y", None, True, 1.5)), ("é",)]) == [
        "a.b-b78d064afcd4a94a",
        "a.b-3eb643e8713efc83",
        "1.__x___b_y___None__True__1.5_-2f28a87f2ded98f5",
        "_-e5df49b499e6fc4e",
    ]


def test_a_name_that_looks_hashed_is_hashed_again():
    mimic = array_names.array_names([("a", "b"), ("a.b",)])[0]
    names = array_names.array_names([("a", "b"), ("a.b",), (mimic,), (mimic.upper(),)])
    assert len({name.lower() for name in names}) == 4
    assert names[0] == mimic


def test_unicode_forms_are_told_apart():
    nfc, nfd = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    first, second = array_names.array_names([(nfc,), (nfd,)])
    assert first != second


def test_equal_digests_are_an_error_not_one_name(monkeypatch):
    monkeypatch.setattr(array_names, "_digest", lambda serialised: "0" * 16)
    with pytest.raises(InvalidStateError, match="digest"):
        array_names.array_names([("é",), ("ü",)])


def test_elements_that_no_plain_dict_has_are_refused():
    with pytest.raises(InvalidStateError, match="frozenset"):
        array_names.array_names([("é", frozenset())])
