"""pytorch/pytorch#133923: a library update changes what is stored, and older checkpoints stop loading.

The part of formats: those of every released one are loaded in tests/test_golden.py; here is what is said where one
cannot be read.
"""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.errors import FormatError
from cloudckpt.format.document import VERSION
from cloudckpt.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DATA = Path(__file__).parent.parent / "data"


def edited(folder: Path, **fields: Any) -> Path:
    """With other fields, and sealed again, as another version would have written it."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes()) | fields
    del document["sha256"]
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    path.write_bytes(body + b',"sha256":"' + sha256(body).hexdigest().encode() + b'"}\n')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cloudckpt.save({"w": torch.arange(4.0), "n": 1}, tmp_path / "c")
    return tmp_path / "c"


def test_every_older_format_is_kept_and_loads():
    found = sorted(path.name for path in DATA.glob("format-*"))
    minor = int(VERSION.partition(".")[2])
    assert found == [f"format-1.{i}" for i in range(minor + 1)]
    for manifest in DATA.glob("format-*/**/manifest.json"):
        assert verify(manifest.parent).ok
        assert cloudckpt.read(manifest.parent)


def test_a_newer_minor_version_is_read(folder: Path):
    edited(folder, version="1.99", hindsight={"what": "came later"})
    state = {"w": torch.zeros(4), "n": 0}
    cloudckpt.load(state, folder)
    assert (state["w"].tolist(), state["n"]) == ([0.0, 1.0, 2.0, 3.0], 1)
    assert verify(folder).ok


def test_what_a_newer_minor_version_has_and_this_one_cannot_read(folder: Path):
    objects = json.loads((folder / "manifest.json").read_bytes())["objects"]
    edited(folder, version="1.99", objects=[{**objects[0], "key": "pool://" + objects[0]["key"]}])
    with pytest.raises(
        FormatError, match=f"it has format 1.99, this cloudckpt reads {VERSION}: a newer one may read it"
    ):
        cloudckpt.read(folder)


def test_another_major_version_is_named(folder: Path):
    edited(folder, version="2.0")
    with pytest.raises(
        FormatError, match=f"format version 2.0 is newer than this cloudckpt reads .{VERSION}.; upgrade"
    ):
        cloudckpt.load({"w": torch.zeros(4)}, folder)


def test_fields_that_were_not_there_yet(tmp_path: Path):
    shutil.copytree(DATA / "format-1.1" / "layouts", tmp_path / "c")
    with cloudckpt.open_checkpoint(tmp_path / "c") as checkpoint:
        document = checkpoint.manifest.document
        assert (document.branch, document.model_version, document.topology) == (0, None, None)
        assert checkpoint.manifest.columns.digest is None
        assert checkpoint.manifest.is_new.all()
