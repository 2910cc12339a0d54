"""How exports are cut and named, and that no crash between two steps shows a mixture of an old one and a new one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.errors import InvalidStateError
from cloudckpt.plan.hf_shards import INDEX, SINGLE, file_names, of_export, parse_size, split, succeed


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("1.5MB", 1_500_000),
        ("2KiB", 2048),
        ("1GiB", 2**30),
        ("30", 30),
    ],
)
def test_sizes(text: int | str, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", 0, -5, 1.5, True, None, "0.1"])
def test_no_sizes(text: object):
    with pytest.raises(InvalidStateError, match="a size is"):
        parse_size(text)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_files_are_cut_as_the_official_function_cuts_them(sizes: list[int], limit: int):
    factory = pytest.importorskip("huggingface_hub.serialization").split_state_dict_into_shards_factory
    tensors = {str(i): size for i, size in enumerate(sizes)}
    official = factory(
        tensors, get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    files = split(sizes, limit)
    named = dict(zip(file_names(len(files)), ([str(i) for i in numbers] for numbers in files), strict=True))
    assert named == official.filename_to_tensors


def test_a_tensor_beyond_the_limit_has_a_file_of_its_own():
    assert split([3, 9, 3, 3, 9], 6) == [[1], [0, 2], [4], [3]]
    assert split([9], 6) == [[0]]
    assert split([], 6) == []
    assert file_names(1) == [SINGLE]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_what_counts_as_weights():
    mine = {"model-00001-of-00002.safetensors", SINGLE, INDEX}
    others = {"adapter_model.safetensors", "1_Dense/model.safetensors", "config.json", "model.fp16.safetensors"}
    assert of_export(mine | others, ()) == mine
    # An index may lead to any name, but what is no safetensors file right there is not deleted for it.
    assert of_export(mine | others, others) == mine | {"adapter_model.safetensors", "model.fp16.safetensors"}


OLD = {
    "nothing": (),
    "one": (SINGLE,),
    "two": (*file_names(2), INDEX),
    "three": (*file_names(3), INDEX),
    "one-hides-three": (SINGLE, *file_names(3), INDEX),
    "no-index": tuple(file_names(3)),
    "variant": ("model.fp16.safetensors", "model.fp16.safetensors.index.json", "model.fp16-00001-of-00001.safetensors"),
}


class Place:
    """Objects, and whose they are. ``names``: by whose index, the files that it leads to."""

    def __init__(self, old: tuple[str, ...]) -> None:
        self.objects = dict.fromkeys(old, "old")
        self.objects["config.json"] = "old"
        self.names: dict[str, list[str]] = {}
        if SINGLE in old:  # what it hides is older still
            self.objects |= {key: "older" for key in old if key != SINGLE}

    def seen(self) -> str | None:
        """Whose weights and configuration a reader gets; the index tells by whose it is what is in the files."""
        if SINGLE in self.objects:
            weights = {self.objects[SINGLE]}
        elif INDEX in self.objects:
            owner = self.objects[INDEX]
            names = self.names[owner]
            if not {*names} <= {*self.objects}:
                return None
            weights = {owner, *(self.objects[name] for name in names)}
        else:
            return None
        assert len(weights) == 1, f"a mixture: {self.objects}"
        (owner,) = weights
        assert owner == self.objects["config.json"] or self.objects["config.json"] == "same", f"{self.objects}"
        return owner


def steps(place: Place, old: tuple[str, ...], new: list[str], replaces_files: bool, unreadable: bool) -> Iterator[None]:
    names = [key for key in old if key not in (SINGLE, INDEX)]
    plan = succeed(
        sorted(of_export(old, names)),
        new,
        indexed=None if unreadable else names if INDEX in old else (),
        replaces_files=replaces_files,
    )

    def delete(keys: tuple[str, ...]) -> Iterator[None]:
        for key in keys:
            place.objects.pop(key, None)
            yield

    def put(key: str) -> Iterator[None]:
        place.objects[key] = "new"
        yield

    yield from delete(plan.first)
    if new != [SINGLE]:
        for key in new:
            yield from put(key)
    yield from delete(plan.before_files)
    if replaces_files:
        yield from put("config.json")
    yield from put(SINGLE if new == [SINGLE] else INDEX)
    for group in plan.last:
        yield from delete(group)


@pytest.mark.parametrize("replaces_files", [False, True])
@pytest.mark.parametrize("unreadable", [False, True])
@pytest.mark.parametrize(("name", "count"), [*itertools.product(OLD, [1, 2, 3])])
def test_at_every_step_old_new_or_nothing(name: str, count: int, replaces_files: bool, unreadable: bool):
    old, new = OLD[name], file_names(count)
    place = Place(old)
    if not replaces_files:
        place.objects["config.json"] = "same"
    place.names = {owner: [k for k in old if k not in (SINGLE, INDEX)] for owner in ("old", "older")} | {"new": new}
    seen = [place.seen(), *(place.seen() for _ in steps(place, old, new, replaces_files, unreadable))]
    assert seen[-1] == "new"
    assert "older" not in seen
    order = [owner for owner, _ in itertools.groupby(seen)]
    assert order in (["new"], ["old", "new"], ["old", None, "new"], [None, "new"]), order
    weights = of_export(place.objects, ())
    assert weights == {*new, *([INDEX] if count > 1 else [])}


def test_the_old_export_stays_until_the_new_one_is_there_if_the_names_differ():
    for old, count in (("one", 1), ("one", 3), ("two", 3), ("three", 2), ("three", 1)):
        plan = succeed(OLD[old], file_names(count), indexed=OLD[old], replaces_files=False)
        assert (plan.first, plan.before_files) == ((), ())
    again = succeed(OLD["three"], file_names(3), indexed=file_names(3), replaces_files=False)
    assert again.first == (INDEX,)
