"""The examples in the documents run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own, on import of its compiler
@pytest.mark.parametrize("name", ["layouts.md"])
def test_examples_run(name: str) -> None:
    text = (DOCS / name).read_text()
    blocks = [*BLOCK.finditer(text)]
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(DOCS / name), "exec"), scope)
