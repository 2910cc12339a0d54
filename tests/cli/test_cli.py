"""The command line, in this process and as a program."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import cloudckpt
from cloudckpt.cli import main
from cloudckpt.cli.text import age, human_bytes, printable, table
from tests.interop import saved


@pytest.fixture
def run(tmp_path):
    w = torch.arange(6.0).reshape(2, 3)
    state = {"w": w, "tied": w, "names": np.array(["a", "b"]), "step": 7, "opt": {"lr": [0.5, 0.1]}}
    cloudckpt.save(state, tmp_path / "run/step-00000007", step=7, metadata={"loss": 1.5})
    cloudckpt.save(state, tmp_path / "run/step-00000012", step=12, layout="zarr")
    (tmp_path / "run/step-00000012/manifest.json").unlink()
    (tmp_path / "run/notes").mkdir()
    return tmp_path / "run"


def program(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "cloudckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )


def test_ls(run, capsys):
    assert main(["ls", str(run)]) == 0
    head, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["step", "state", "created", "age", "bytes", "referenced", "tensors", "chunks", "ranks"]
    assert first[:2] == ["7", "committed"]
    assert first[-3:] == ["2", "2", "1"]
    assert second[:3] == ["12", "not", "committed"]


def test_ls_shows_an_unreadable_step(run, capsys):
    (run / "step-00000012/manifest.json").write_bytes(b"{")
    assert main(["ls", str(run)]) == 0
    assert "unreadable" in capsys.readouterr().out.splitlines()[-1]


def test_ls_of_what_is_no_run(run, capsys):
    assert main(["ls", str(run / "step-00000007")]) == 1
    assert "it is a checkpoint itself" in capsys.readouterr().err
    assert main(["ls", str(run / "none")]) == 1
    assert "no steps in" in capsys.readouterr().err


def test_show(run, capsys):
    assert main(["show", str(run / "step-00000007")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "step 7",
        "format 1.2, layout packed",
        "metadata {'loss': 1.5}",
        "w float32 [2, 3] 1 x 1 of [2, 3] 28 B",
        "tied same as w",
        "names numpy <U1 [2]",
        "opt.lr [0.5, 0.1]",
        "rank tensors chunks chunk bytes objects object bytes 0 2 2 40 1",
    ):
        assert part in shown


def test_show_of_a_sharded_checkpoint(tmp_path, capsys, ranks):
    ranks.run(4, saved.save_irregular, tmp_path, "packed", "zstd")
    assert main(["show", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ranks 4, mesh 2 x 2 (a, b)" in shown
    assert "w float32 [10, 6] 4 x 1 of [~3, 6], zstd" in shown
    assert "raw complex32 [10] 4 of [~3], zstd" in shown


def test_show_and_ls_tell_new_from_referenced_bytes(tmp_path, capsys):
    for step in (1, 2):
        state = {"frozen": torch.zeros(2000), "w": torch.full((100,), float(step))}
        cloudckpt.save(state, tmp_path / f"step-{step:08d}", step=step, incremental=True)
    assert main(["show", str(tmp_path / "step-00000001")]) == 0
    assert "referenced" not in capsys.readouterr().out
    assert main(["show", str(tmp_path / "step-00000002")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "new        404 B" in lines
    assert "referenced 7.82 KiB in step-00000001" in lines
    assert lines[-1].split() == ["0", "1", "1", "404", "1", lines[-1].split()[-1]]
    assert main(["show", "--json", str(tmp_path / "step-00000002")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["nbytes"], shown["nbytes_new"]) == (8408, 404)
    assert shown["nbytes_referenced"] == {"step-00000001": 8004}
    assert len(shown["topology"]) == 32
    assert main(["ls", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "  0 B  " in first
    assert "  7.82 KiB  " in second


def test_show_as_json(run, capsys):
    assert main(["show", "--json", str(run / "step-00000007")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["version"], shown["world_size"]) == (7, "1.2", 1)
    assert shown["tree"]["w"] == shown["tree"]["tied"] == {"$": "tensor", "array": "w"}
    assert shown["arrays"][0] == {
        "name": "w",
        "path": "w",
        "dtype": "float32",
        "shape": [2, 3],
        "grid": [2, 3],
        "num_chunks": 1,
        "compression": None,
        "nbytes": 28,
    }
    assert [row["num_chunks"] for row in shown["ranks"]] == [2]
    assert shown["objects"][0]["nbytes"] == next((run / "step-00000007").glob("*/*.zip")).stat().st_size


def test_show_of_an_uncommitted_checkpoint(run, capsys):
    assert main(["show", str(run / "step-00000012")]) == 1
    assert "never committed" in capsys.readouterr().err


def test_prune(tmp_path, capsys):
    for step in (7, 10, 12, 20):
        cloudckpt.save({"w": torch.arange(6.0)}, tmp_path / f"step-{step:08d}", step=step)
    left = tmp_path / "step-00000021/0123456789ab/r00000-000.zarr.zip"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"12345")
    time.sleep(0.1)
    arguments = ["prune", str(tmp_path), "--keep-last", "1", "--keep-every", "10", "--orphan-age", "0.05"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "would remove from" in (out := capsys.readouterr().out)
    assert "steps: 7, 12; 3 objects" in out
    assert main(arguments) == 0
    assert "steps: 7, 12; 3 objects" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "steps: none; 0 objects, 0 B" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_prune_refuses(run, capsys):
    for arguments, text in (
        (["--keep-last", "0"], "keep_last must be an int of at least 1"),
        (["--orphan-age", "0"], "--orphan-age must be positive"),
    ):
        assert main(["prune", str(run), *arguments]) == 1
        assert text in capsys.readouterr().err
    assert main(["prune", str(run / "none")]) == 1
    assert "no steps in" in capsys.readouterr().err
    (run / "step-00000012/manifest.json").write_bytes(b"{")
    assert main(["prune", str(run), "--keep-last", "1"]) == 1
    assert "nothing is removed while the manifest in step-00000012 cannot be read" in capsys.readouterr().err


def test_verify(run, capsys):
    url = run / "step-00000007"
    assert main(["verify", str(url)]) == 0
    assert capsys.readouterr().out.startswith("no faults in ")
    pack = next(url.glob("*/*.zip"))
    data = bytearray(pack.read_bytes())
    offset = int(cloudckpt.open_checkpoint(url).manifest.columns.byte_offset[0])
    data[offset] ^= 1
    pack.write_bytes(data)
    assert main(["verify", str(url)]) == 1
    fault, summary = capsys.readouterr().out.splitlines()
    key = pack.relative_to(url).as_posix()
    assert fault.startswith("tensor 'w' [0:2, 0:3]: checksum mismatch")
    assert fault.endswith(f"(object {key}, byte offset {offset})")
    assert summary.startswith("1 faults in ")


def test_verify_draws_its_bar_on_standard_error(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["verify", str(run / "step-00000007")]) == 0
    assert capsys.readouterr().out.startswith("no faults in ")


def test_verify_does_not_flood(tmp_path, capsys):
    cloudckpt.save({"w": torch.zeros(4000)}, tmp_path, config=cloudckpt.Config(chunk_bytes=64))
    next(tmp_path.glob("*/*.zip")).unlink()
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert lines[-2].startswith("... and ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["ls"],
        ["show"],
        ["show", "a", "b"],
        ["verify", "--json", "a"],
        ["show", "a", "--storage-options", "{"],
        ["show", "a", "--storage-options", "[1]"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_secrets_stay_out_of_messages(capsys):
    with pytest.raises(SystemExit):
        main(["show", "s3://b/x", "--storage-options", '{"secret": "hunter2"'])
    assert "hunter2" not in capsys.readouterr().err


def test_as_a_program(run):
    done = program("show", run / "step-00000007")
    assert (done.returncode, done.stderr) == (0, "")
    assert "float32" in done.stdout
    done = program("show", run / "none")
    assert done.returncode == 1
    assert done.stderr.startswith("cloudckpt: no checkpoint at ")
    assert "Traceback" not in done.stderr
    assert program("show").returncode == 2
    assert program("--help").returncode == 0


def test_a_reader_that_stops_early(run):
    """As with ``| head -1``."""
    with subprocess.Popen(
        [sys.executable, "-m", "cloudckpt", "show", "--json", str(run / "step-00000007")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(100) == 1


def test_a_terminal_without_unicode(tmp_path):
    cloudckpt.save({"größe": torch.zeros(1), "\udcff": 5}, tmp_path)
    done = program("show", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout


def test_start_imports_no_heavy_library(run):
    code = """
import sys
from cloudckpt.cli import main
main(["ls", sys.argv[1]])
main(["show", sys.argv[1] + "/step-00000007"])
heavy = {"torch", "zarr", "s3fs", "fsspec", "boto3", "obstore", "rich", "typer", "numcodecs"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_on_s3_with_settings_from_the_environment(juicefs_s3):
    run = f"s3://{juicefs_s3.make_bucket('command-line')}/run"
    options = juicefs_s3.storage_options
    cloudckpt.save({"w": torch.zeros(3)}, f"{run}/step-00000001", step=1, storage_options=options)
    environment = {
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
    }
    done = program("ls", run, **environment)
    assert done.returncode == 0, done.stderr
    assert "committed" in done.stdout
    done = program("verify", f"{run}/step-00000001", "--storage-options", json.dumps(options))
    assert (done.returncode, done.stderr) == (0, "")
    done = program("show", f"{run}/step-00000001", **{**environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_texts():
    from datetime import UTC, datetime

    assert [human_bytes(n) for n in (0, 999, 1000, 1024, 1536, 5 * 2**30)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 KiB",
        "1.5 KiB",
        "5 GiB",
    ]
    now = datetime(2026, 1, 2, tzinfo=UTC)
    ages = [
        age(text, now) for text in ("2026-01-01T00:00:00+00:00", "2026-01-01T23:00:00", "x", "2026-01-02T00:00:00Z")
    ]
    assert ages == ["1 d", "1 h", "", "0 s"]
    assert printable("a\nb\x1b", keep_lines=True) == "a\nb\\x1b"
    assert table(("a", "b"), [["xx", "1"], ["y", "22"]], right="1") == ["a    b", "xx   1", "y   22"]


def test_show_of_a_number_too_long_to_print(tmp_path, capsys):
    cloudckpt.save({"p": 2**20000}, tmp_path / "c")
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "over 4300 digits" in capsys.readouterr().out
