"""What mkdocs does to pages before they are rendered.

- ``<!-- include: README.md#How fast -->`` stands for that section of that file: nothing is said twice.
- ``<!-- commands -->`` stands for what the command line says of itself.
- Comments, which are for the tests, are left out.
- The one script that the theme would load from elsewhere is a file of ours (``assets/worker.js``).
- The pages of decisions are put into the navigation, in the order of their numbers.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_FOREIGN_SCRIPT = "https://unpkg.com/iframe-worker/shim"
_INCLUDE = re.compile(r"^<!-- include: ([\w./-]+)(?:#(.+?))? -->$", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    pages = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    decisions = _find(config.nav, "Decisions")
    decisions += [f"adr/{name}" for name in pages]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("adr/"):
        page.meta.setdefault("search", {"boost": 0.5})  # found after the pages for users
    return rendered(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(_FOREIGN_SCRIPT, posixpath.relpath("assets/worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    return output_content.replace(_FOREIGN_SCRIPT, "assets/worker.js")


def rendered(markdown: str, page: str) -> str:
    """The Markdown of a page (a path below docs/) without what only this module and the tests understand."""
    folder = posixpath.dirname(page)
    has_title = markdown.startswith("# ")

    def included(found: re.Match[str]) -> str:
        text = section(found[1], found[2], folder)
        return text.partition("\n")[2] if has_title and text.startswith("# ") else text

    text = _INCLUDE.sub(included, markdown)
    if "<!-- commands -->" in text:
        text = text.replace("<!-- commands -->", "\n".join(commands()))
    return _outside_fences(text, lambda part: _COMMENT.sub("", part))


def section(file: str, heading: str | None, folder: str) -> str:
    """A file of the repository, or what is under a ``##`` heading of it, with links as a page in ``folder`` needs."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if heading is not None:
        _, found, text = text.partition(f"\n## {heading}\n")
        if not found:
            raise ValueError(f"{file} has no section {heading!r}")
        text = text.partition("\n## ")[0]
    return _LINK.sub(lambda link: _moved(link, file, folder), text).strip()


def _moved(link: re.Match[str], file: str, folder: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link[1]))
    pages = {
        "CHANGELOG.md": "docs/changelog.md",
        "README.md": "docs/index.md",
        "benchmarks/README.md": "docs/performance.md",
    }
    target = pages.get(target, target)
    if not target.startswith("docs/"):  # a file of the repository that is no page: its name is enough
        return f"] (`{target}`)"
    return f"]({posixpath.relpath(target.removeprefix('docs/'), folder or '.')}{link[2] or ''})"


def _outside_fences(text: str, change: Any) -> str:
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _find(nav: Any, title: str) -> Any:
    for entry in nav if isinstance(nav, list) else []:
        if isinstance(entry, dict):
            for name, inner in entry.items():
                found = inner if name == title else _find(inner, title)
                if found is not None:
                    return found
    return None


# ``cloudckpt --help``, as a page


def commands() -> Iterator[str]:
    sys.path.insert(0, str(ROOT))
    from cloudckpt.cli.parser import make_parser

    yield from _command(make_parser())


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    inner = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield f"## {parser.prog}\n"
        yield f"{parser.description}\n"
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        yield f"```text\n{_wrapped(usage)}\n```\n"
        yield "| argument | meaning |\n|---|---|"
        for action in actions:
            if not isinstance(action, argparse._HelpAction):
                yield f"| {_names(action)} | {_cell(action)} |"
        yield ""
    for group in inner:
        for command in dict.fromkeys(group.choices.values()):
            yield from _command(command)


def _wrapped(usage: str) -> str:
    return "\n".join(textwrap.wrap(usage, 76, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


def _names(action: argparse.Action) -> str:
    value = str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    names = [name if action.nargs == 0 else f"{name} {value}" for name in action.option_strings] or [value]
    return "<br>".join(f'<code class="argument">{escape(name).replace("|", "&#124;")}</code>' for name in names)


def _cell(action: argparse.Action) -> str:
    text = (action.help or "").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return text + (" (required)" if action.required and action.option_strings else "")
