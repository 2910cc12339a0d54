"""docs/troubleshooting.md speaks of every class of error, and of messages that exist."""

from __future__ import annotations

import inspect
import re

from cloudckpt import errors
from tests.documents.blocks import ROOT
from tests.documents.messages import is_in, messages, tables

PAGE = ROOT / "docs" / "troubleshooting.md"
NO_MESSAGES = "It is slow"
NOT_SEEN = {"InterruptedTransferError"}  # internal: callers never get it


def test_every_class_of_errors_has_its_section():
    classes = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.CloudckptError) and kind.__module__ == errors.__name__
    }
    headings = set(re.findall(r"^##+ (\w+Error)$", PAGE.read_text(), re.MULTILINE))
    assert headings == classes - NOT_SEEN


def test_the_messages_that_are_quoted_are_those_of_the_source():
    known = messages()
    quotes = [quote for heading, found in tables(PAGE).items() if heading != NO_MESSAGES for quote in found]
    assert len(quotes) > 50
    assert [quote for quote in quotes if not any(is_in(quote, message) for message in known)] == []


def test_a_quote_is_found_in_what_it_quotes_only():
    assert is_in("no checkpoint at <url>", "no checkpoint at <>")
    assert is_in("at <url>; save to another", "<> at <>; save to another URL")
    assert not is_in("no checkpoint in <url>", "no checkpoint at <>")
