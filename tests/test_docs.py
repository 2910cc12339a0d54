"""Every code block of the documents runs as it is printed, or says why it is not run."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.documents.blocks import Block, blocks, blocks_of, commands, not_run, pages, printed_as, runs
from tests.documents.running import Page, run_block, run_page
from tests.ranks import RankPool

NUM_NOT_RUN = 9


@pytest.mark.parametrize("page", [page for page in pages() if runs(page)])
def test_code_blocks(ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest, page: str):
    if any("s3://" in block.source for block in runs(page)):
        server = request.getfixturevalue("juicefs_s3")
        bucket = server.make_bucket(f"docs-{secrets.token_hex(4)}")
        run_page(Page(page, tmp_path, server, bucket), ranks)
    else:
        run_page(Page(page, tmp_path), ranks)


def test_blocks_that_are_not_run_are_few():
    left = [f"{block.where} ```{block.language}: {block.reason}" for block in not_run()]
    assert len(left) == NUM_NOT_RUN, "\n" + "\n".join(left)


@pytest.mark.parametrize("page", pages())
def test_blocks_say_what_they_are(page: str):
    for block in blocks(page):
        if block.language == "text":
            lines = block.source.splitlines()
            told = [line for line in lines if line.startswith(("$ ", "cloudckpt ", "import ", "pip "))]
            assert not told, f"{block.where}: {told[0]!r} looks like a program: the block is python or console"


def test_marks_and_output_of_blocks():
    page = "- in a list:\n\n  <!-- not run: why -->\n  ```python\n  x = 1\n  ```\n\n"
    page += "```console\n$ ls\n```\n\n```text\na\n```\n"
    first, second, third = blocks_of("page.md", page)
    assert (first.line, first.source, first.reason) == (5, "x = 1\n", "why")
    assert (second.reason, second.output, third.language) == (None, "a\n", "text")


def test_blocks_of_no_or_an_unknown_language_are_refused():
    for text in ("```\nx\n```\n", "```fortran\nx\n```\n", "```text\nx\n"):
        with pytest.raises(AssertionError, match=r"page\.md"):
            blocks_of("page.md", text)


def test_blocks_that_fail_or_print_something_else_are_named(ranks: RankPool, tmp_path: Path):
    page = Page("page.md", tmp_path)
    for source, output, message in (
        ("# 1 rank\nassert False\n", None, r'page\.md", line 8'),
        ("# 1 rank\nprint(1)\n", "2\n", r"page\.md:7 prints"),
    ):
        with pytest.raises(AssertionError, match=message):
            run_block(page, Block("page.md", 7, "python", source, None, output), ranks)
    for command in ("kubectl get pods", "cloudckpt show nothing-there", "cloudckpt --no-such-option"):
        with pytest.raises(AssertionError, match=r"page\.md:7: "):
            run_block(page, Block("page.md", 7, "console", f"$ {command}\n", None, None), ranks)


def test_lines_of_a_console():
    source = "$ cloudckpt ls run \\\n    --storage-options '{}'\n step\n...\n\n$ cloudckpt show run  # why\n"
    first, second = commands(Block("page.md", 10, "console", source, None, None))
    assert (first.line, first.text, first.output) == (10, "cloudckpt ls run --storage-options '{}'", " step\n...\n\n")
    assert (second.line, second.output) == (15, None)


@pytest.mark.parametrize(
    ("shown", "printed", "is_equal"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a ... c", "a b\nb c", True),
        ("...", "", True),
        ("a", "a b", False),
        ("a.c", "abc", False),
    ],
)
def test_what_is_printed_is_what_is_shown(shown: str, printed: str, is_equal: bool):
    assert printed_as(shown, printed) is is_equal
