"""The documents build as a site without a warning, its links lead somewhere, and nothing comes from elsewhere."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import cloudckpt
from cloudckpt import errors
from cloudckpt.cli.parser import make_parser
from tests.documents.blocks import ROOT

# Addresses that a page may name in a link, for readers to follow; nothing is loaded from them.
FOREIGN_LINKS = {"fsspec.github.io", "keepachangelog.com", "semver.org"}


class Page(HTMLParser):
    """``links``: what readers may follow; ``assets``: what a browser loads; ``anchors``: where links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "href" and value and tag == "a":
                self.links.append(value)
            elif name in ("src", "href", "srcset", "poster", "data") and value and tag != "a":
                self.assets.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        check=False,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


@cache
def page(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def html(site: Path) -> Iterator[Path]:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 50
    yield from found


def test_links_lead_somewhere(site: Path):
    broken = []
    for file in html(site):
        if file.name == "404.html":  # its links are those of a server's root
            continue
        for link in page(file).links + page(file).assets:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = file.parent / unquote(address.path) if address.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(address.fragment)
            if not target.exists():
                broken.append(f"{file.relative_to(site)}: {link}")
            elif anchor and target.suffix == ".html" and anchor not in page(target).anchors:
                broken.append(f"{file.relative_to(site)}: {link}: no such anchor")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Path):
    for file in html(site):
        foreign = [asset for asset in page(file).assets if urlsplit(asset).netloc]
        assert foreign == [], file
        hosts = {urlsplit(link).netloc for link in page(file).links} - {""}
        assert hosts <= FOREIGN_LINKS, file
    for file in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", file.read_text(encoding="utf-8")) == [], file


def test_no_page_knows_the_machine_that_built_it(site: Path):
    known = re.compile(rf"{re.escape(str(ROOT))}|{re.escape(sys.prefix)}|{re.escape(str(site))}|pypi\.org|index-url")
    for file in [*html(site), site / "search" / "search_index.json"]:
        assert known.findall(file.read_text(encoding="utf-8")) == [], file


def test_every_public_name_is_on_one_page_with_its_docstring(site: Path):
    public = {name: getattr(cloudckpt, name) for name in set(cloudckpt.__all__) - {"dcp", "errors"}}
    public |= {f"dcp.{name}": getattr(cloudckpt.dcp, name) for name in cloudckpt.dcp.__all__}
    for name, value in public.items():
        entry = api_entry(site, f"cloudckpt.{name}", value.__doc__)
        assert 'class="doc-signature' in entry, f"{name} has no signature"


def test_every_error_is_on_one_page_with_its_docstring(site: Path):
    kinds = {name: kind for name, kind in vars(errors).items() if name.endswith("Error")}
    for name in kinds.keys() - {"InterruptedTransferError"}:  # which is internal
        api_entry(site, f"cloudckpt.errors.{name}", kinds[name].__doc__)


def api_entry(site: Path, path: str, docstring: str | None) -> str:
    """What the pages of the interface have for a name: its first sentence is checked."""
    texts = [file.read_text(encoding="utf-8") for file in (site / "api").glob("*.html")]
    heading = f'<h2 id="{path}"'
    found = [text for text in texts if heading in text]
    assert len(found) == 1, f"{path} is on {len(found)} pages of docs/api"
    entry = found[0].partition(heading)[2].partition("<h2 ")[0]
    words = re.findall(r"\w{4,}", (docstring or "").partition("\n\n")[0])[:8]
    assert words, f"{path} has no docstring"
    plain = re.sub(r"<[^>]+>", "", entry)
    assert [word for word in words if word not in plain] == [], f"{path}: its docstring is not shown"
    return entry


def test_every_command_is_described(site: Path):
    headings = re.findall(r'<h2 id="([^"]+)">cloudckpt (\w+)', (site / "commands.html").read_text(encoding="utf-8"))
    assert {name for _, name in headings} == set(command_names())


def command_names() -> Iterator[str]:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
