"""How much memory is left, by the files in which Linux says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudckpt.pytorch import host_memory

MEMINFO = "MemTotal:       24627284 kB\nMemFree:         100000 kB\nMemAvailable:    200000 kB\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files: there are none."""
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CONTAINER", tmp_path)
    return tmp_path


def test_unknown_where_the_system_does_not_say(system: Path):
    assert host_memory.available_bytes() is None


def test_of_the_machine(system: Path):
    (system / "meminfo").write_text(MEMINFO)
    assert host_memory.available_bytes() == 200000 * 1024


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 200000 * 1024), ("60000000", 60000000 - 50000000 + 7000), ("1000", 0)]
)
def test_a_container_may_have_less(system: Path, limit: str, expected: int):
    (system / "meminfo").write_text(MEMINFO)
    (system / "memory.max").write_text(f"{limit}\n")
    (system / "memory.current").write_text("50000000\n")
    (system / "memory.stat").write_text("anon 1\ninactive_file 7000\n")
    assert host_memory.available_bytes() == expected


def test_here():
    available = host_memory.available_bytes()
    assert available is None or available > 1024 * 1024
