"""zarr-developers/zarr-python#3411: a local write killed half-way leaves a truncated file under the final name."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import cloudckpt
from cloudckpt.config import MIB
from cloudckpt.errors import CorruptChunkError
from cloudckpt.store import temporary
from cloudckpt.verify import verify
from tests.field.places import Place
from tests.recipes.kills import Ended, Zygote, save_job, value_at

NUMEL = 16 * MIB
"""64 MiB of float32."""


def files_below(root: str) -> list[Path]:
    return [path for path in Path(root).rglob("*") if path.is_file()]


@pytest.mark.parametrize("event", ["within write", "before replace", "before link", "before unlink"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_a_kill_within_a_large_file(place: Place, zygote: Zygote, tmp_path: Path, event: str, overwrite: bool):
    if overwrite and event in ("before link", "before unlink"):
        pytest.skip("an overwriting commit is a rename")
    log = tmp_path / "events"

    def save(name: str, value: int, at: int | None, **arguments: Any) -> Ended:
        log.unlink(missing_ok=True)
        arguments["config"] = place.config(chunk_bytes=64 * MIB)
        return zygote.run([(save_job, place.url(name), value, str(log), at, "system", None, arguments, NUMEL)])[0]

    assert save("older", 1, None).raised is None
    # What is going to happen: with a root that is there, or over a checkpoint that is there.
    assert save("older" if overwrite else "other", 2, None, overwrite=overwrite).raised is None
    events = log.read_text().splitlines()
    found = [i for i, name in enumerate(events) if name == event]
    name, old = ("older", 2) if overwrite else ("newer", None)
    # Half of the pack is there, or all of it under its temporary name, or all of it and the manifest's own file.
    which = {"within write": len(found) // 2, "before replace": 0}.get(event, -1)
    killed = save(name, 3, found[which], overwrite=overwrite)
    assert killed.signal == signal.SIGKILL
    assert log.read_text().splitlines()[-1] == event
    is_committed = event == "before unlink"
    assert value_at(place.url("older"), None, NUMEL) == (2 if overwrite else 1)
    assert value_at(place.url(name), None, NUMEL) == (3 if is_committed else old)
    # A part of the bytes lies under temporary names only.
    sizes = {path.stat().st_size for path in files_below(place.root) if path.name.endswith(".zip")}
    assert len(sizes) == 1
    assert min(sizes) > 64 * MIB
    # Saving again works, and what is deleted later takes the leftovers along.
    assert save(name, 4, None, overwrite=overwrite or is_committed).raised is None
    assert value_at(place.url(name), None, NUMEL) == 4
    assert not any(temporary.is_temporary(path.name) for path in Path(place.url(name)).iterdir())
    store = place.store("")
    assert store.delete(place.keys("")) == {}
    assert [path for path in files_below(place.root) if not temporary.is_temporary(path.name)] == []
    store.close()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("layout", ["packed", "zarr"])
@pytest.mark.parametrize("place", ["local"], indirect=True)
def test_a_short_file_is_found_out(place: Place, layout: str, fraction: float):
    place.save({"w": torch.ones(1000)}, layout=layout, config=place.config(chunk_bytes=4000))
    with cloudckpt.open_checkpoint(place.url()) as checkpoint:
        manifest = checkpoint.manifest
        entry = manifest.objects[int(manifest.columns.object[-1])]
        end = int(manifest.columns.byte_offset[-1] + manifest.columns.nbytes[-1])
    keep = int((end - 1) * fraction)
    with (Path(place.url()) / entry.key).open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(CorruptChunkError, match=f"'w'.*ends at byte {keep}") as caught:
        place.load({"w": torch.zeros(1000)})
    assert caught.value.key == entry.key
    faults = verify(place.url()).faults
    assert {(fault.path, fault.key) for fault in faults} >= {("w", entry.key)}
