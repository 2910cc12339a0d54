"""Manifests edited by someone who can seal them: all end in FormatError, at once and without memory."""

import base64

import msgspec
import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt import catalog
from cloudckpt.cli import main
from cloudckpt.errors import FormatError
from cloudckpt.format.document import ChunkColumns, ChunkTable, Document
from cloudckpt.format.manifest import Manifest, decode_manifest
from cloudckpt.store.resolve import resolve
from cloudckpt.verify import verify

replace = msgspec.structs.replace


@pytest.fixture
def url(tmp_path):
    state = {
        "a": torch.arange(6.0),
        "b": torch.arange(8.0),
        "mine": cloudckpt.PerRank([torch.ones(2), np.ones(2)]),
    }
    cloudckpt.save(state, tmp_path, compression=None)
    return tmp_path


def edit(url, change):
    path = url / "manifest.json"
    document = decode_manifest(path.read_bytes(), "here").document
    path.write_bytes(Manifest(change(document)).encode())


def refused(url, said):
    with pytest.raises(FormatError, match=said):
        cloudckpt.open_checkpoint(url)
    with pytest.raises(FormatError, match=said):
        cloudckpt.read(url)


def columns(document: Document, **change) -> ChunkTable:
    found = ChunkColumns(document.chunks)
    names = ("object", "byte_offset", "nbytes", "crc32c")
    return ChunkColumns.pack(**{name: np.array(change.get(name, getattr(found, name))) for name in names})


def first(entries, **change):
    return (replace(entries[0], **change), *entries[1:])


def test_the_edits_below_start_from_what_can_be_read(url):
    edit(url, lambda d: replace(d, chunks=columns(d)))
    assert verify(url).ok
    assert cloudckpt.read(url)["b"].tolist() == list(range(8))


def test_chunks_that_overlap_in_an_object(url):
    def share(document):
        offsets = ChunkColumns(document.chunks).byte_offset
        return replace(document, chunks=columns(document, byte_offset=[offsets[1] + 8, offsets[1]]))

    key = catalog.read_manifest(resolve(url)).objects[0].key
    edit(url, share)
    refused(url, f"chunks 0 and 1 overlap in object '{key}'")


@pytest.mark.parametrize("nbytes", range(4))
def test_a_compressed_chunk_without_room_for_its_checksum(url, nbytes):
    def shrink(document):
        sizes = ChunkColumns(document.chunks).nbytes
        table = columns(document, nbytes=[nbytes, *sizes[1:]])
        return replace(document, chunks=table, arrays=first(document.arrays, compression="zstd"))

    edit(url, shrink)
    refused(url, "do not even hold its checksum")


@pytest.mark.parametrize("rank", ["x", "9" * 5000, "00", "1", "9999999", "-1", "", "\u0663"])
def test_ranks_of_per_rank_values(url, rank):
    edit(url, lambda d: replace(d, tree={**d.tree, "mine": {"$": "per_rank", "values": {rank: 1}}}))
    refused(url, "per-rank value")
    with pytest.raises(FormatError, match="per-rank value"):
        cloudckpt.load({"mine": cloudckpt.PerRank()}, url, strict=False)


def inline(kind, dtype, shape, data=b""):
    return {"$": "inline", "kind": kind, "dtype": dtype, "shape": shape, "base64": base64.b64encode(data).decode()}


@pytest.mark.parametrize(
    "node",
    [
        inline("tensor", "float32", [0, 2**62, 2**62]),
        inline("tensor", "float32", [0, 2**63]),
        inline("tensor", "uint8", [1] * 70, b"x"),
        inline("tensor", "float99", [0]),
        inline("ndarray", "<U0", [3]),
        inline("ndarray", "|V0", [3]),
        inline("ndarray", "<f4", [1] * 70, bytes(4)),
        inline("ndarray", "<f4", [0, 2**63]),
        inline("ndarray", "<f4", [2], bytes(4)),
    ],
    ids=str,
)
def test_inline_tensors_that_cannot_be(url, node):
    edit(url, lambda d: replace(d, tree={**d.tree, "mine": {"$": "per_rank", "values": {"0": node}}}))
    with pytest.raises(FormatError, match="inline"):
        cloudckpt.read(url)
    with pytest.raises(FormatError, match="inline"):
        cloudckpt.load({"mine": cloudckpt.PerRank()}, url, strict=False)


def test_empty_inline_tensors_are_read(url):
    nodes = [inline("tensor", "float32", [0, 3]), inline("ndarray", "<f4", [2, 0])]
    edit(url, lambda d: replace(d, tree={**d.tree, "mine": {"$": "per_rank", "values": {"0": nodes}}}))
    tensor, array = cloudckpt.read(url)["mine"][0]
    assert (tensor.shape, array.shape) == ((0, 3), (2, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (1,) * 70 + (6,), "grid": (1,) * 70 + (6,)}, "71 dims"),
        ({"shape": (10**4000,)}, "impossible shape"),
        ({"shape": (0, 10**4000), "grid": (1, 1)}, "impossible shape"),
        ({"grid": (10**4000,)}, "impossible grid"),
        ({"grid": ((6, (10**4000, 1)),)}, "impossible grid"),
        *(({"name": name}, "unsafe array name") for name in ("", "c", "C", "zarr.json", "a/b", "__x", ".x", "x.")),
        *(({"name": name}, "unsafe array name") for name in ("a..b", "con", "Nul.x", "\u00e9", "a\n", "x" * 161)),
        ({"name": "B"}, "two arrays have one name"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arrays_that_cannot_be(url, change, said):
    edit(url, lambda d: replace(d, arrays=first(d.arrays, **change)))
    refused(url, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": -1}, "step -1"),
        ({"step": 10**4000}, "step of 13288 bits"),
        ({"world_size": 0}, "world size 0"),
        ({"world_size": 10**7}, "world size"),
        ({"version": "9" * 5000 + ".0"}, "malformed format version"),
        ({"version": "1"}, "malformed format version"),
        ({"version": "\u0661.0"}, "malformed format version"),
        ({"version": "2.0"}, "newer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_of_a_checkpoint(url, change, said):
    edit(url, lambda d: replace(d, **change))
    refused(url, said)


@pytest.mark.parametrize("rank", [-1, 1, 10**30, 10**4000], ids=["-1", "1", "1e30", "1e4000"])
def test_ranks_of_objects(url, rank):
    edit(url, lambda d: replace(d, objects=first(d.objects, rank=rank)))
    refused(url, "impossible rank")


def test_references_to_what_is_no_sibling(url):
    edit(url, lambda d: replace(d, objects=first(d.objects, key="../other/0123456789ab/x")))
    refused(url, "unsafe object key")


def test_a_digest_column_of_the_wrong_length(url):
    edit(url, lambda d: replace(d, chunks=replace(d.chunks, digest=b"x" * 31)))
    refused(url, "column 'digest' does not hold 2 rows")


def test_an_impossible_branch(url):
    edit(url, lambda d: replace(d, branch=-1))
    refused(url, "impossible branch")


def test_what_a_newer_minor_version_allows_is_told_from_damage(url):
    edit(url, lambda d: replace(d, version="1.99", objects=first(d.objects, key="s3://elsewhere/x")))
    refused(url, "unsafe object key.*it has format 1.99, this cloudckpt reads 1")


@pytest.mark.parametrize("key", ["manifest.json", "MANIFEST.json", "keep", "0123456789ab/lease"])
@pytest.mark.parametrize("where", ["", "../step-00000002/"])
def test_objects_that_are_none_of_a_checkpoints(url, where, key):
    """A copy would put the manifest before its objects, and retention take another step's away."""
    edit(url, lambda d: replace(d, objects=(*d.objects, replace(d.objects[0], key=where + key))))
    refused(url, "unsafe object key")


def test_leaves_without_an_array_or_a_shape(url, capsys):
    edit(url, lambda d: replace(d, tree={**d.tree, "b": {"$": "ndarray", "shape": 3, "array": "b"}}))
    with pytest.raises(FormatError, match="malformed array"):
        cloudckpt.read(url, ["b"])
    assert main(["show", str(url)]) == 0
    assert "numpy None" in capsys.readouterr().out
    edit(url, lambda d: replace(d, tree={**d.tree, "a": {"$": "tensor"}}))
    with pytest.raises(FormatError, match="not listed"):
        cloudckpt.read(url, ["a"])
    assert main(["show", str(url)]) == 1
