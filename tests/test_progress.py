"""Bars, lines and callbacks."""

from __future__ import annotations

import io
import threading

import pytest

from cloudckpt import progress
from cloudckpt.progress import start_progress


def test_a_function_gets_bytes_done_and_bytes_in_all():
    seen: list[tuple[int, int]] = []
    with start_progress(lambda done, total: seen.append((done, total)), "save", 10, show=False) as advance:
        advance(4)
        advance(6)
        advance(-6)
        advance(6)
    assert seen == [(4, 10), (10, 10), (4, 10), (10, 10)]


def test_a_function_is_called_by_one_thread_at_a_time():
    seen: list[int] = []
    with start_progress(lambda done, _: seen.append(done), "save", 4000, show=False) as advance:
        threads = [threading.Thread(target=lambda: [advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == list(range(1, 4001))


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_is_shown_unasked(wanted: bool | None, capsys: pytest.CaptureFixture[str]):
    with start_progress(wanted, "save", 10, show=True) as advance:
        advance(10)
    with start_progress(True, "save", 10, show=False) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_lines_where_there_is_no_terminal():
    now_s = [0.0]
    out = io.StringIO()
    with progress._lines("save", 4_000_000, out, clock=lambda: now_s[0]) as advance:
        for seconds in (7, 7, 7, 2):
            now_s[0] += seconds
            advance(1_000_000)
        assert out.getvalue() == "save: 2.0 of 4.0 MB (50 %), 0.1 MB/s, 14 s left\n"
    assert out.getvalue().splitlines()[1:] == ["save: 4.0 of 4.0 MB (100 %), 0.2 MB/s"]


def test_what_is_soon_over_writes_no_line(capsys: pytest.CaptureFixture[str]):
    with start_progress(True, "save", 10, show=True) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    with start_progress(True, "save", 1_000_000, show=True) as advance:
        advance(1_000_000)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "save" in shown.err
    assert "1.0/1.0 MB" in shown.err
