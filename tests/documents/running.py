"""Runs code blocks in the processes of a `RankPool`, as if a reader had typed them one after the other."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from tests.documents.blocks import ROOT, Block, commands, printed_as, runs
from tests.ranks import RankPool
from tests.servers.process import S3Server

PRELUDES = Path(__file__).parent / "preludes"

# What pages call their store, for the one that the tests have.
HOME = "/home/me"
BUCKET, ENDPOINT, KEY, SECRET, MOUNT = "s3://bucket", "http://minio:9000", "minio-user", "minio-password", "/mnt/"


@dataclass
class Page:
    """A page that is being run. ``folder``: where its blocks run; ``server`` and ``bucket``: what s3:// is for it."""

    name: str
    folder: Path
    server: S3Server | None = None
    bucket: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.server is not None:
            self.environment |= {
                "AWS_ENDPOINT_URL": self.server.endpoint_url,
                "AWS_ACCESS_KEY_ID": self.server.key,
                "AWS_SECRET_ACCESS_KEY": self.server.secret,
            }

    def here(self, text: str) -> str:
        """A text of the page with the names of this machine."""
        text = text.replace(f'"{MOUNT}', f'"{self.folder}{MOUNT}').replace(f" {MOUNT}", f" {self.folder}{MOUNT}")
        if self.server is not None:
            text = text.replace(BUCKET, f"s3://{self.bucket}").replace(ENDPOINT, self.server.endpoint_url)
            text = text.replace(KEY, self.server.key).replace(SECRET, self.server.secret)
        return text

    def as_printed(self, text: str) -> str:
        """The reverse, for what was printed."""
        text = text.replace(f"{self.folder}{MOUNT}", MOUNT).replace(str(self.folder), HOME)
        if self.server is not None:
            text = text.replace(f"s3://{self.bucket}", BUCKET).replace(self.server.endpoint_url, ENDPOINT)
        return text


def run_page(page: Page, ranks: RankPool) -> None:
    prelude = PRELUDES / f"{page.name.removeprefix('docs/').removesuffix('.md').replace('/', '_').replace('-', '_')}.py"
    if prelude.exists():
        _python(page, ranks, prelude.read_text(), str(prelude), 1, fresh=False)
    for block in runs(page.name):
        run_block(page, block, ranks)


def run_block(page: Page, block: Block, ranks: RankPool) -> None:
    """Raises AssertionError, with file and line, where it fails, or does not print what the page shows."""
    if block.language != "python":
        _console(page, ranks, block)
        return
    source = "\n" * (block.line - 1) + page.here(block.source)
    is_fresh = block.num_ranks is not None
    printed = _python(page, ranks, source, str(ROOT / page.name), block.num_ranks or 1, fresh=is_fresh)
    if block.output is not None:
        _compare(block.where, block.output, page.as_printed(printed))


def _python(page: Page, ranks: RankPool, source: str, name: str, num_ranks: int, *, fresh: bool) -> str:
    key = None if fresh else page.name
    printed: str = ranks.run(num_ranks, execute, source, name, str(page.folder), page.environment, key)[0]
    return printed


def _console(page: Page, ranks: RankPool, block: Block) -> None:
    printed = ""
    for command in commands(block):
        words = shlex.split(page.here(command.text), comments=True)
        where = f"{block.page}:{command.line}: {command.text}"
        if words[:1] == ["export"]:
            page.environment |= dict(word.partition("=")[::2] for word in words[1:])
            continue
        if words[:1] != ["cloudckpt"]:
            raise AssertionError(f"{where}: no command of ours; mark the block <!-- not run: reason -->")
        (answer,) = ranks.run(1, command_line, words[1:], str(page.folder), page.environment)
        code, out, err = answer
        assert code == 0, f"{where}: exit code {code}\n{out}{err}"
        printed += out
        if command.output is not None:
            _compare(where, command.output, page.as_printed(out))
    if block.output is not None:
        _compare(block.where, block.output, page.as_printed(printed))


def _compare(where: str, shown: str, printed: str) -> None:
    assert printed_as(shown, printed), f"{where} prints\n\n{printed}\nbut the page shows\n\n{shown}"


# What runs in the processes of the ranks. Blocks of a page without a number of ranks share their names.
_names: dict[str, dict[str, Any]] = {}


def execute(source: str, name: str, folder: str, environment: Mapping[str, str], key: str | None) -> str:
    """What it printed."""
    names: dict[str, Any] = {"__name__": "example"}
    if key is not None:
        if key not in _names:
            _names.clear()
        names = _names.setdefault(key, names)
    with _at(folder, environment), redirect_stdout(StringIO()) as printed:
        exec(compile(source, name, "exec"), names)
    return printed.getvalue()


def command_line(arguments: Sequence[str], folder: str, environment: Mapping[str, str]) -> tuple[int, str, str]:
    from cloudckpt.cli import main

    with _at(folder, environment), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            code = main(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


@contextmanager
def _at(folder: str, environment: Mapping[str, str]) -> Iterator[None]:
    from cloudckpt.plan.migrations import _registered as migrations

    before, path, variables, known = Path.cwd(), list(sys.path), dict(os.environ), dict(migrations)
    os.chdir(folder)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for module, loaded in list(sys.modules.items()):
            if (getattr(loaded, "__file__", None) or "").startswith(folder):
                del sys.modules[module]
        migrations.clear()
        migrations.update(known)
        os.environ.clear()
        os.environ.update(variables)
