"""fsspec/filesystem_spec#1797: temporary files of mode 600 become the objects, and others cannot read them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from tests.recipes.kills import CONFIG, Zygote, expected

NOBODY = 65534


@pytest.fixture
def root() -> Iterator[Path]:
    """Not pytest's own folder: that one is closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def modes_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): oct(path.stat().st_mode & 0o777) for path in [folder, *folder.rglob("*")]}


def save_with_umask(url: str, umask: int, layout: str) -> None:
    os.umask(umask)
    cloudckpt.save(expected(3), url, layout=layout, config=CONFIG)


def load_as_another_user(url: str, user: int) -> dict[str, Any]:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    found = {"w": torch.zeros(1000), "b": torch.zeros(7, dtype=torch.int64), "value": 0}
    cloudckpt.load(found, url, config=CONFIG)
    assert not os.access(url, os.W_OK)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o022, "0o644", "0o755"), (0o027, "0o640", "0o750"), (0, "0o666", "0o777")]
)
def test_modes_follow_the_umask(zygote: Zygote, root: Path, umask: int, file_mode: str, folder_mode: str, layout: str):
    ended = zygote.run([(save_with_umask, str(root / "run/step-1"), umask, layout)])
    assert ended[0].raised is None
    found = modes_below(root / "run")
    files = [name for name in found if (root / "run" / name).is_file()]
    assert {found[name] for name in files} == {file_mode}
    assert {found[name] for name in found if name not in files} == {folder_mode}
    assert "step-1/manifest.json" in files


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_who_may_not_write_can_load(zygote: Zygote, root: Path):
    url = root / "run/step-1"
    assert zygote.run([(save_with_umask, str(url), 0o022, "packed")])[0].raised is None
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    (ended,) = zygote.run([(load_as_another_user, str(url), NOBODY)])
    assert ended.raised is None
    right = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in expected(3).items()}
    assert ended.returned == right
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_read_only_copy_loads_and_stays_as_it_is(zygote: Zygote, root: Path):
    url = root / "run/step-1"
    assert zygote.run([(save_with_umask, str(url), 0o022, "zarr")])[0].raised is None
    everything = [*root.rglob("*")]
    for path in reversed(everything):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        found = {"w": torch.zeros(1000), "b": torch.zeros(7, dtype=torch.int64), "value": 0}
        cloudckpt.load(found, url)
        assert torch.equal(found["w"], expected(3)["w"])
        assert {*root.rglob("*")} == {*everything}
    finally:
        for path in everything:
            path.chmod(0o755)
