"""The examples in the documents run as they are printed, in the order in which they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```python\n(# (\d+) ranks?\n.*?)^```$", re.MULTILINE | re.DOTALL)


def sections(page: str) -> list[Any]:
    """``(heading, [(ranks, source), ...])`` of every section with examples; the examples of one share a folder."""
    text = (DOCS / page).read_text()
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        blocks = [(int(ranks), source) for source, ranks in _BLOCK.findall(part)]
        assert len(blocks) == part.count("```python"), "the first line of an example is the number of its ranks"
        if blocks:
            heading = part.partition("\n")[0]
            found.append(pytest.param(blocks, id=f"{page}: {heading}"))
    return found


def execute(source: str, folder: str, name: str) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(source, name, "exec"), {"__name__": "example"})
    finally:
        os.chdir(before)


@pytest.mark.parametrize("blocks", [*sections("layouts.md"), *sections("runs.md"), *sections("copying.md")])
def test_examples(ranks: RankPool, tmp_path: Path, blocks: list[tuple[int, str]]):
    for number, (num_ranks, source) in enumerate(blocks):
        ranks.run(num_ranks, execute, source, str(tmp_path), f"example {number}")
