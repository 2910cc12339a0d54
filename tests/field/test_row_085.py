"""equinor/ert#12083: names longer than a file system allows must neither fail nor meet."""

import msgspec

from cloudckpt.format import keys, values

NAMES = [
    "n" * 254,
    "n" * 256,
    "n" * 300,
    "層" * 200,
    "p" * 250 + "a",
    "p" * 250 + "b",
    "/".join(["x" * 100] * 10),
    "P" * 250 + "a",
]


def test_long_names_become_short_distinct_names():
    names = keys.array_names([("model", name) for name in NAMES])
    assert len({name.lower() for name in names}) == len(NAMES)
    for name in names:
        assert len(name.encode()) <= 160
        key = keys.chunk_key(f"{keys.plain_root(keys.new_attempt())}/{name}", (1234567,) * 4)
        assert max(len(part) for part in key.split("/")) <= 255
        assert len(keys.check_key(key)) < 256


def test_the_true_names_stand_in_the_tree():
    state = {"model": dict.fromkeys(NAMES, 1)}
    found = values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(state))))
    assert list(found["model"]) == NAMES
