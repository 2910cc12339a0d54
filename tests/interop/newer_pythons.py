"""Environments with the newest zarr, for every Python here that is newer than this one: ``newer_pythons.py FOLDER``.

Each is FOLDER/<version>/bin/python. cloudckpt is installed there without what it needs, so that zarr finds its data
types; `test_shared_zarr` reads with all of them. Looked for: python3.12 and newer on PATH, and those of pyenv.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.12", "3.13", "3.14")
NEEDED = ("zarr", "tensorstore", "ml_dtypes", "fsspec", "s3fs", "xarray", "dask")
CLOUDCKPT = Path(__file__).parents[2]


def candidates() -> Iterator[str]:
    for version in VERSIONS:
        if found := shutil.which(f"python{version}"):
            yield found
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        yield from sorted(str(path) for path in Path(root).glob("versions/3.*/bin/python"))


def version_of(python: str) -> str | None:
    """None for what does not start: pyenv puts names on PATH for versions that are not chosen."""
    told = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", told], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def make(python: str, folder: Path) -> None:
    if (folder / ".done").exists():
        return
    subprocess.run([python, "-m", "venv", folder], check=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *NEEDED], check=True)
    subprocess.run([*install, "--no-deps", "--editable", CLOUDCKPT], check=True)
    (folder / ".done").touch()


def main(folder: str) -> None:
    known = {version: python for python in candidates() if (version := version_of(python)) in VERSIONS}
    for version, python in sorted(known.items()):
        print(f"newest zarr on Python {version}: {folder}/{version}")
        make(python, Path(folder) / version)
    if not known:
        print(f"no newer Python here: {', '.join(VERSIONS)} were looked for")


if __name__ == "__main__":
    main(*sys.argv[1:])
