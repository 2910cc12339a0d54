"""open_checkpoint, and manifests that somebody has made up, through everything that looks at one."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.checkpoint import ArrayInfo, Placeholder
from cloudckpt.cli import main
from cloudckpt.errors import FormatError, NotFoundError
from cloudckpt.format.manifest import Manifest
from cloudckpt.verify import verify

W = np.arange(6, dtype=np.float32).reshape(2, 3)


def make_state():
    w = torch.from_numpy(W.copy())
    return {
        "w": w,
        "tied": w,
        ("k", 1): torch.ones(2, dtype=torch.bfloat16),
        "list": [1, {"lr": 0.5}],
        "strings": np.array(["ab", "c"]),
        "size": torch.Size([2, 3]),
        "rng": cloudckpt.PerRank({"seed": 7}),
    }


@pytest.fixture
def url(tmp_path):
    cloudckpt.save(make_state(), tmp_path, step=12, metadata={"note": "x", "loss": 0.25})
    return tmp_path


def test_what_a_checkpoint_says(url):
    with cloudckpt.open_checkpoint(url) as checkpoint:
        assert (checkpoint.step, checkpoint.url) == (12, str(url))
        assert checkpoint.metadata == {"note": "x", "loss": 0.25}
        assert checkpoint.manifest.document.world_size == 1
        arrays = checkpoint.arrays
        assert [info.path for info in arrays.values()] == ["w", "('k', 1)", "strings"]
        w = arrays["w"]
        assert (w.dtype, w.shape, w.grid.num_chunks, w.compression, w.nbytes) == ("float32", (2, 3), 1, None, 28)
        assert arrays["('k', 1)"] == arrays[arrays["('k', 1)"].name]
        assert arrays["tied"] == w
        assert "nothing" not in arrays


def test_the_tree(url):
    tree = cloudckpt.open_checkpoint(url).tree
    assert list(tree) == ["w", "tied", ("k", 1), "list", "strings", "size", "rng"]
    assert isinstance(tree["w"], ArrayInfo)
    assert tree["tied"] == tree["w"]
    assert tree["list"] == [1, {"lr": 0.5}]
    assert tree["rng"] == [{"seed": 7}]
    assert tree["size"] == torch.Size([2, 3])


def test_without_torch(url):
    program = f"""
import sys
import cloudckpt
checkpoint = cloudckpt.open_checkpoint({str(url)!r})
tree = checkpoint.tree
assert checkpoint.arrays["w"].shape == (2, 3)
print(repr(tree["size"]))
from cloudckpt.verify import verify
assert verify({str(url)!r}).ok
cloudckpt.open_zarr({str(url)!r})["w"][...]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "<torch.Size dims=[2, 3]>\n"


def test_pickles_are_shown_and_not_loaded(tmp_path):
    cloudckpt.save({"a": {1, 2}, "b": [object]}, tmp_path, allow_pickle=True)
    tree = cloudckpt.open_checkpoint(tmp_path).tree
    assert tree["a"] == {1, 2}
    assert isinstance(tree["b"][0], Placeholder)
    assert tree["b"][0].tag == "pickle"
    with pytest.raises(FormatError, match="allow_pickle"):
        cloudckpt.read(tmp_path)
    assert cloudckpt.read(tmp_path, allow_pickle=True)["b"] == [object]


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        cloudckpt.open_checkpoint(tmp_path / "none")


def test_not_committed(url):
    (url / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="never committed"):
        cloudckpt.open_checkpoint(url)


def test_a_url_with_the_word_bucket_in_it(tmp_path):
    cloudckpt.save({"a": 1}, tmp_path / "bucket/x")
    assert cloudckpt.read(tmp_path / "bucket/x") == {"a": 1}
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        cloudckpt.open_checkpoint(tmp_path / "bucket/y")


def test_a_run_is_not_a_checkpoint(tmp_path):
    cloudckpt.save({"a": 1}, tmp_path / "step-00000003")
    with pytest.raises(NotFoundError, match="step-00000003"):
        cloudckpt.open_checkpoint(tmp_path)


# Manifests that nobody should have written. Each is a change of the document that `url` has.


def changed(**fields):
    return lambda document: msgspec.structs.replace(document, **fields)


def with_array(**fields):
    def change(document):
        first, *others = document.arrays
        return msgspec.structs.replace(document, arrays=(msgspec.structs.replace(first, **fields), *others))

    return change


def with_object(**fields):
    def change(document):
        first, *others = document.objects
        return msgspec.structs.replace(document, objects=(msgspec.structs.replace(first, **fields), *others))

    return change


def with_column(name, data):
    def change(document):
        size = {"byte_offset": 8}.get(name, 4)
        table = msgspec.structs.replace(document.chunks, **{name: data[:size] * document.chunks.count})
        return msgspec.structs.replace(document, chunks=table)

    return change


def deep(levels):
    node = {"$": "tensor", "array": "w"}
    for _ in range(levels):
        node = [node]
    return {"a": node}


HOSTILE = {
    "escape": (with_object(key="../../etc/passwd"), "unsafe object key"),
    "absolute": (with_object(key="/etc/passwd"), "unsafe object key"),
    "url": (with_object(key="s3://other/bucket"), "unsafe object key"),
    "array escape": (with_array(name="../w"), "unsafe array name"),
    "object overflow": (with_object(nbytes=2**63 + 5), "impossible size"),
    "object negative": (with_object(nbytes=-1), "impossible size"),
    "offset overflow": (with_column("byte_offset", b"\xff" * 8), "does not fit 63 bits"),
    "offset outside": (with_column("byte_offset", (2**40).to_bytes(8, "little")), "behind the end"),
    "object outside": (with_column("object", b"\x07\0\0\0"), "not listed"),
    "short chunk": (with_column("nbytes", b"\x05\0\0\0"), "differ from its size"),
    "shape overflow": (with_array(shape=(2**40, 2**40)), "impossible shape"),
    "shape negative": (with_array(shape=(-2, 3)), "impossible shape"),
    "shape absurd": (with_array(shape=(2**31, 3)), "does not fit"),
    "chunks absurd": (with_array(grid=(2**31, 2**31)), "2 GiB"),
    "chunk extent 0": (with_array(grid=(0, 3)), "chunk extent"),
    "runs absurd": (with_array(grid=(((1, 2**50),), 3)), "add up"),
    "dtype": (with_array(dtype="float12"), "unknown data type"),
    "compression": (with_array(compression="gzip"), "unknown compression"),
    "major": (changed(version="2.0"), "2.0 is newer"),
    "version": (changed(version="one"), "malformed format version"),
    "format": (changed(format="other"), "not a cloudckpt manifest"),
    "array unknown": (changed(tree={"a": {"$": "tensor", "array": "nothing"}}), "not listed"),
    "array in a set": (changed(tree={"$": "set", "items": [{"$": "tensor", "array": "nothing"}]}), "not listed"),
    "tag": (changed(tree={"a": {"$": 5}}), "tag is not a string"),
    "items": (changed(tree={"$": "dict", "items": 3}), "list of items"),
    "key twice": (changed(tree={"$": "dict", "items": [[1, 2], [True, 3]]}), "twice"),
    "deep": (changed(tree=deep(250)), "nested"),
    "deeper": (changed(tree=deep(400)), "nested"),
    "ranks": (changed(tree={"a": {"$": "per_rank", "values": {"999999999999": 1}}}), "per-rank"),
    "ranks list": (changed(tree={"a": {"$": "per_rank", "values": []}}), "per-rank"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(url, name, capsys):
    change, message = HOSTILE[name]
    document = cloudckpt.open_checkpoint(url).manifest.document
    (url / "manifest.json").write_bytes(Manifest(change(document)).encode())
    for use in (cloudckpt.read, verify, lambda url: cloudckpt.read(url, "*")):
        with pytest.raises(FormatError, match=message) as caught:
            use(url)
        assert str(url) in str(caught.value)
    assert main(["show", str(url)]) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


# What only a reader of values finds: these can be shown.
HOSTILE_VALUES = {
    "inline short": {"$": "inline", "kind": "tensor", "dtype": "float32", "shape": [2**40], "base64": ""},
    "inline bytes": {"$": "inline", "kind": "tensor", "dtype": "float32", "shape": [1], "base64": 5},
    "inline object": {"$": "inline", "kind": "ndarray", "dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="},
    "inline kind": {"$": "inline", "kind": "module", "dtype": "os", "shape": [], "base64": ""},
    "nested ranks": {"$": "per_rank", "values": {"0": 1}},
    "future": {"$": "a future tag"},
}


@pytest.mark.parametrize("name", HOSTILE_VALUES)
def test_hostile_values(url, name):
    document = cloudckpt.open_checkpoint(url).manifest.document
    tree = {"a": {"$": "per_rank", "values": {"0": HOSTILE_VALUES[name]}}}
    (url / "manifest.json").write_bytes(Manifest(msgspec.structs.replace(document, tree=tree)).encode())
    assert isinstance(cloudckpt.open_checkpoint(url).tree["a"][0], Placeholder)
    with pytest.raises(FormatError):
        cloudckpt.read(url)


def test_a_newer_minor_version_is_read_and_unknown_fields_are_ignored(url):
    document = cloudckpt.open_checkpoint(url).manifest.document
    raw = Manifest(msgspec.structs.replace(document, version="1.9")).encode()
    (url / "manifest.json").write_bytes(raw)
    assert torch.equal(cloudckpt.read(url)["w"], torch.from_numpy(W))


def test_every_cut_and_every_changed_byte_of_a_manifest_is_noticed(url):
    path = url / "manifest.json"
    raw = path.read_bytes()
    for end in range(0, len(raw), 37):
        path.write_bytes(raw[:end])
        with pytest.raises(FormatError):
            cloudckpt.open_checkpoint(url)
    for i in range(len(raw)):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :])
        with pytest.raises(FormatError):
            cloudckpt.open_checkpoint(url)


def test_keys_that_would_steer_a_terminal_are_escaped(tmp_path, capsys):
    cloudckpt.save({"\x1b[31mred\n": torch.zeros(1), "\udcff": 1}, tmp_path)
    assert main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31mred\n" in shown
    assert r"\udcff" in shown
