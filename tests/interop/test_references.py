"""fsspec reference files: `references` and the command. What reads them: test_shared_zarr."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.errors import InvalidStateError, NotFoundError
from tests.interop import saved, shared_set


def opened(reference: dict | Path | str, **options) -> zarr.Group:
    return zarr.open_group("reference://", mode="r", storage_options={"fo": reference, **options})


def test_chunks_are_ranges_of_packs(tmp_path):
    cloudckpt.save({"w": np.arange(100.0)}, tmp_path / "x", step=3, config=cloudckpt.Config(chunk_bytes=400))
    made = cloudckpt.references(tmp_path / "x")
    assert made["version"] == 1
    assert "templates" not in made
    assert list(made["refs"]) == ["zarr.json", "w/zarr.json", *(f"w/c/{i}" for i in range(10))]
    url, byte_offset, nbytes = made["refs"]["w/c/1"]
    (pack,) = (tmp_path / "x").glob("*/*.zarr.zip")
    assert (url, nbytes) == (f"file://{pack}", 84)
    data = pack.read_bytes()[byte_offset : byte_offset + 80]
    assert np.array_equal(np.frombuffer(data), np.arange(10.0, 20.0))
    assert json.loads(made["refs"]["zarr.json"])["attributes"]["cloudckpt"]["step"] == 3
    array = json.loads(made["refs"]["w/zarr.json"])
    assert (array["dimension_names"], array["attributes"]) == (["w[0]"], {"cloudckpt_path": "w"})


def test_objects_that_are_one_chunk_are_named_whole(tmp_path):
    cloudckpt.save({"w": np.arange(3.0)}, tmp_path / "x", layout="zarr")
    (chunk,) = (tmp_path / "x").glob("*.zarr/w/c/0")
    made = cloudckpt.references(str(tmp_path / "x"))
    assert made["refs"]["w/c/0"] == [f"file://{chunk}"]
    assert opened(made)["w"][...].tolist() == [0, 1, 2]


def test_the_checkpoint_itself_has_no_names_of_dims(tmp_path):
    cloudckpt.save({"w": np.arange(3.0)}, tmp_path / "x", layout="zarr")
    assert "dimension_names" not in json.loads(next((tmp_path / "x").glob("*.zarr/w/zarr.json")).read_text())


def test_a_template_leads_to_copies(tmp_path):
    cloudckpt.save({"w": np.arange(3.0)}, tmp_path / "x")
    made = cloudckpt.references(tmp_path / "x", template=True)
    assert made["templates"] == {"u": f"file://{tmp_path}/x"}
    assert opened(made)["w"][...].tolist() == [0, 1, 2]
    cloudckpt.copy(tmp_path / "x", tmp_path / "y/z")
    (tmp_path / "x/manifest.json").unlink()
    next((tmp_path / "x").glob("*/*.zarr.zip")).unlink()
    moved = opened(made, template_overrides={"u": f"file://{tmp_path}/y/z"})
    assert moved["w"][...].tolist() == [0, 1, 2]


def two_steps(run: Path) -> None:
    with cloudckpt.Checkpointer(run, incremental=True) as held:
        held.save(1, {"a": np.arange(3.0), "b": np.arange(2.0)})
        held.save(2, {"a": np.arange(3.0), "b": np.arange(2.0) + 5})


def test_references_to_other_steps(tmp_path):
    two_steps(tmp_path / "run")
    made = cloudckpt.references(tmp_path / "run/step-00000002")
    assert made["refs"]["a/c/0"][0].startswith(f"file://{tmp_path}/run/step-00000001/")
    assert made["refs"]["b/c/0"][0].startswith(f"file://{tmp_path}/run/step-00000002/")
    cloudckpt.copy(tmp_path / "run", tmp_path / "other")
    templated = cloudckpt.references(tmp_path / "run/step-00000002", template=True)
    assert templated["templates"] == {"u": f"file://{tmp_path}/run"}
    (tmp_path / "run").rename(tmp_path / "gone")
    group = opened(templated, template_overrides={"u": f"file://{tmp_path}/other"})
    assert group["a"][...].tolist() + group["b"][...].tolist() == [0, 1, 2, 5, 6]


def test_some_arrays_only(tmp_path):
    cloudckpt.save({"m": {"w/x": np.zeros(2), "b": np.ones(2)}, "n": np.zeros(1)}, tmp_path)

    def found(names):
        return [key for key in cloudckpt.references(tmp_path, names=names)["refs"] if key.endswith("/zarr.json")]

    assert found("m.*") == ["m.w_x-c854482d56c5ee21/zarr.json", "m.b/zarr.json"]
    assert found(["m.w/x", "n"]) == ["m.w_x-c854482d56c5ee21/zarr.json", "n/zarr.json"]
    assert found(["m.w_x*"]) == ["m.w_x-c854482d56c5ee21/zarr.json"]
    with pytest.raises(NotFoundError, match=r"no array 'x\.\*', 'y'"):
        found(["n", "x.*", "y"])


def test_types_that_zarr_lacks_as_integers(tmp_path):
    cloudckpt.save(saved.state(), tmp_path, compression="zstd")
    group = opened(cloudckpt.references(tmp_path, plain_types=True))
    assert group["model.b"].dtype == np.uint16
    assert group["model.b"].attrs["cloudckpt_dtype"] == "bfloat16"
    assert group["model.b"][...].view(ml_dtypes.bfloat16).tolist() == [1.0, -2.0, 0.5]
    assert group["e8"][...].tolist() == [127, 129]
    assert group["model.w"].dtype == np.float32
    assert opened(cloudckpt.references(tmp_path))["model.b"].dtype == ml_dtypes.bfloat16


def test_a_pack_that_is_gone_is_an_error_and_never_fill_values(tmp_path):
    cloudckpt.save({"w": np.arange(3.0)}, tmp_path)
    made = cloudckpt.references(tmp_path)
    next(tmp_path.glob("*/*.zarr.zip")).unlink()
    with pytest.raises(RuntimeError, match="failed to fetch"):
        opened(made)["w"][...]


def test_memory():
    cloudckpt.save({"w": np.arange(3.0)}, "memory://references/x", overwrite=True)
    assert opened(cloudckpt.references("memory://references/x"))["w"][...].tolist() == [0, 1, 2]


def test_the_url_that_is_written(tmp_path):
    cloudckpt.save({"w": np.arange(3.0)}, tmp_path)
    made = cloudckpt.references(tmp_path, base="s3://bucket/run/step-1/")
    assert made["refs"]["w/c/0"][0].startswith("s3://bucket/run/step-1/")
    assert not made["refs"]["w/c/0"][0].startswith("s3://bucket/run/step-1//")
    with pytest.raises(InvalidStateError, match=r"\*\*\*@host/x: a reference file must not hold a password"):
        cloudckpt.references(tmp_path, base="ftp://me:secret@host/x")
    for base in ("folder/x", "simplecache::s3://bucket/x"):
        with pytest.raises(InvalidStateError, match="URLs of one scheme"):
            cloudckpt.references(tmp_path, base=base)
    with pytest.raises(InvalidStateError, match="holds braces"):
        cloudckpt.references(tmp_path, base="s3://bucket/{{x}}", template=True)


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError):
        cloudckpt.references(tmp_path)


def test_command(tmp_path, capsys):
    url = tmp_path / "run/step-00000001"
    cloudckpt.save({"w": torch.ones(2, dtype=torch.bfloat16), "v": torch.ones(2)}, url)
    assert main(["references", str(url)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == cloudckpt.references(url)
    assert told.err == (
        "cloudckpt: zarr reads bfloat16 only where cloudckpt is installed; --plain-types makes integers of them\n"
    )
    beside = tmp_path / "run/step-00000001.json"
    command = ["references", str(url), "--template", "--plain-types", "--names", "w", "--output"]
    assert main([*command, str(beside)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"wrote {beside}: 1 arrays, 1 chunks, ")
    assert told.err == ""
    assert json.loads(beside.read_text()) == cloudckpt.references(url, template=True, plain_types=True, names="w")
    for name in ("manifest.json", "keep"):
        assert main([*command, str(url / name)]) == 1
        assert "cannot be the name of a reference file" in capsys.readouterr().err
    assert cloudckpt.read(url)["v"].tolist() == [1, 1]


def test_command_with_irregular_grids(tmp_path, capsys):
    cloudckpt.save(shared_set.irregular_state(), tmp_path)
    assert main(["references", str(tmp_path)]) == 0
    assert "2 arrays have irregular grids: zarr reads them from 3.2 on" in capsys.readouterr().err


def test_a_file_of_references_is_in_nobodys_way(tmp_path, capsys):
    """Beside the steps, or in one: copies leave it out, and retention lets it be."""
    run = tmp_path / "run"
    two_steps(run)
    for place in (run / "step-00000001.json", run / "step-00000001/references.json"):
        assert main(["references", str(run / "step-00000001"), "--output", str(place)]) == 0
    with cloudckpt.Checkpointer(run) as held:
        assert held.steps() == [1, 2]
    cloudckpt.copy(run, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").rglob("*.json")] == ["manifest.json"] * 2
    assert main(["prune", str(run), "--keep-last", "1"]) == 0
    with cloudckpt.Checkpointer(run) as held:
        assert held.steps() == [2]
    assert (run / "step-00000001.json").exists()
    assert cloudckpt.read(run / "step-00000002")["a"].tolist() == [0, 1, 2]


def test_command_writes_to_a_store(juicefs_s3, monkeypatch, capsys):
    bucket = juicefs_s3.make_bucket("references")
    options = juicefs_s3.storage_options
    cloudckpt.save({"w": torch.arange(3)}, f"s3://{bucket}/x", storage_options=options)
    command = ["references", f"s3://{bucket}/x", "--storage-options", json.dumps(options)]
    assert main([*command, "--output", f"s3://{bucket}/x.json"]) == 0
    capsys.readouterr()
    group = opened(f"s3://{bucket}/x.json", target_options=options, remote_options={**options, "asynchronous": True})
    assert group["w"][...].tolist() == [0, 1, 2]
    text = json.dumps(cloudckpt.references(f"s3://{bucket}/x", storage_options=options))
    assert options["secret"] not in text
    assert options["endpoint_url"] not in text
